"""Cases for cuda/delta/delta.cu against float64 numpy, and bit for bit between any cuts of a sequence."""

from __future__ import annotations

import ctypes
import itertools
import sys
from typing import Any

import numpy as np
from emulation import ROOT, Array, Buffer, Gpu
from frames import KINDS, UNIT, Frame, assert_bitwise, assert_close, decode, encode, normal, of

sys.path.insert(0, str(ROOT / "tests"))
from reference import ops as oracle

NUM_STATES = 9
Shape = dict[str, Any]


def _long(value: int) -> ctypes.c_int64:
    return ctypes.c_int64(value)


class Step:
    """The sequences of a step: how many tokens each has, where it goes on, and what it leaves.

    `seen`: how many tokens of each its state takes in; the others are drafts. `replayed`: how many drafts of the step
    before it replays.
    """

    def __init__(
        self,
        counts: list[int],
        state_in: list[int],
        state_out: list[int],
        seen: list[int] | None = None,
        replayed: list[int] | None = None,
    ) -> None:
        self.seen = None if seen is None else np.array(seen, np.int32)
        self.replayed = None if replayed is None else np.array(replayed, np.int32)
        self.starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        self.inn, self.out = np.array(state_in, np.int32), np.array(state_out, np.int32)

    @classmethod
    def draw(cls, seed: int, counts: list[int]) -> Step:
        """Some sequences are new, some go on in their own state, others from one state to another."""
        rng, n = np.random.default_rng(seed), len(counts)
        order = rng.permutation(NUM_STATES)
        kinds = rng.integers(0, 3, n)
        return cls(counts, [(-1, order[i], order[n + i])[kinds[i]] for i in range(n)], order[:n].tolist())

    def upload(self, gpu: Gpu) -> tuple[Any, ...]:
        more = (None if x is None else gpu.upload(x) for x in (self.seen, self.replayed))
        return (*(gpu.upload(x) for x in (self.starts, self.inn, self.out)), *more, len(self.out))

    def before(self, state: Array, s: int) -> Array:
        """The state that sequence s goes on from."""
        kept: Array = state[self.inn[s]] if self.inn[s] >= 0 else np.zeros_like(state[0])
        return kept

    def spans(self) -> list[tuple[int, int]]:
        return list(itertools.pairwise(self.starts.tolist()))


class Log:
    """The log of two parts, [n, width] each, of the rows of a step; what an op gets of it is `of` some columns."""

    rows = 15

    def __init__(self, gpu: Gpu, kind: str, step: Step, *parts: Array) -> None:
        self.width, self._size = sum(part.shape[1] for part in parts), parts[0].itemsize
        empty = np.full((NUM_STATES, self.rows, self.width), np.nan, np.float32)
        self._log = gpu.upload(encode(empty, kind))
        frames = [of(gpu, part, kind, pad) for part, pad in zip(parts, (2, 3), strict=True)]
        inputs = [x for frame in frames for x in (frame.pointer, _long(frame.stride), frame.shape[1])]
        gpu.call("run_log_drafts", *inputs, *step.upload(gpu), self._log, self.rows, len(parts[0]), KINDS.index(kind))

    def columns(self, *begins: int) -> tuple[Any, ...]:
        """Arguments of an op whose parts begin at these columns."""
        views = [ctypes.c_void_p(self._log.pointer + begin * self._size) for begin in begins]
        return (*views, _long(self.width), self.rows)


NO_LOG = (_long(0), 0)


class Conv:
    """Inputs of the causal convolution, as stored."""

    def __init__(self, shape: Shape, kind: str, n: int) -> None:
        self.channels, self.taps, self.kind = shape["channels"], shape["taps"], kind
        seeds = (shape["seed"] + 3, shape["seed"] + 4) if shape.get("gated") else ()
        self.gates = [encode(normal(seed, n, self.channels), kind) for seed in seeds]
        self.weight = normal(shape["seed"], self.taps, self.channels)
        self.bias = normal(shape["seed"] + 5, self.channels) if shape.get("biased") else None
        self.x = encode(normal(shape["seed"] + 1, n, self.channels), kind)

    def log(self, gpu: Gpu, step: Step, rows: Any) -> tuple[Any, ...]:
        """What the next step gets of the drafts of this one."""
        parts = (self.x, self.gates[0]) if self.gates else (self.x, self.x)
        return Log(gpu, self.kind, step, *(part[rows] for part in parts)).columns(0, self.channels)

    def run(
        self, gpu: Gpu, state: Buffer, step: Step, rows: Any = slice(None), log: Any = (None, None, *NO_LOG)
    ) -> Array:
        """Changes `state` in place."""
        given = of(gpu, self.x[rows], self.kind, 3)
        gates = [of(gpu, gate[rows], self.kind, pad) for gate, pad in zip(self.gates, (1, 2), strict=False)]
        given_gates = [(gate.pointer, _long(gate.stride)) for gate in gates] or [(None, _long(0))] * 2
        out = Frame(gpu, self.kind, given.shape, 5)
        gpu.call(
            "run_causal_conv", given.pointer, _long(given.stride), gpu.upload(self.weight), state, *step.upload(gpu),
            out.pointer, _long(out.stride), given.shape[0], self.channels, self.taps, KINDS.index(self.kind),
            *itertools.chain(*given_gates), None if self.bias is None else gpu.upload(self.bias), *log,
        )  # fmt: skip
        return out.get()


def conv(gpu: Gpu, shapes: list[Shape]) -> None:
    """Outputs, and states: those that are written, and no others."""
    for shape in shapes:
        step = Step.draw(shape["seed"], shape["counts"])
        for kind in KINDS:
            inputs = Conv(shape, kind, int(step.starts[-1]))
            state = normal(shape["seed"] + 2, NUM_STATES, inputs.taps - 1, inputs.channels)
            state = decode(encode(state, kind), kind)
            held = gpu.upload(state if state.size else np.zeros(1, np.float32))
            got, after, exact = inputs.run(gpu, held, step), state.copy(), decode(inputs.x, kind).astype(np.float64)
            weight, gates = inputs.weight, [decode(gate, kind).astype(np.float64) for gate in inputs.gates]
            for s, (begin, end) in enumerate(step.spans()):
                before, own = step.before(state, s), tuple(gate[begin:end] for gate in gates)
                want, kept = oracle.causal_conv(exact[begin:end], weight, before, own or None, inputs.bias)
                sizes = tuple(map(np.abs, own)) or None
                added = None if inputs.bias is None else np.abs(inputs.bias)
                size, _ = oracle.causal_conv(np.abs(exact[begin:end]), np.abs(weight), np.abs(before), sizes, added)
                assert_close(got[begin:end], want, kind, inputs.taps + len(own), 2 * size)
                after[step.out[s]] = kept.astype(np.float32)
            if state.size:
                assert_bitwise(gpu.download(held), after)
        gpu.close()


def conv_cuts(gpu: Gpu, shapes: list[Shape]) -> None:
    """A sequence in chunks gives the bits of the whole, and leaves its state."""
    for shape in shapes:
        inputs = Conv(shape, "bf16", shape["length"])
        held = gpu.upload(np.full((2, inputs.taps - 1, inputs.channels), np.nan, np.float32))
        want = inputs.run(gpu, held, Step([shape["length"]], [-1], [0]))
        parts = [
            inputs.run(gpu, held, Step([end - begin], [1 if begin else -1], [1]), slice(begin, end))
            for begin, end in itertools.pairwise([0, *shape["cuts"], shape["length"]])
        ]
        assert_bitwise(np.concatenate(parts), want)
        whole, last = gpu.download(held)
        assert_bitwise(last, whole)
        gpu.close()


class Rule:
    """Inputs of the gated delta rule, as stored."""

    def __init__(self, shape: Shape, kind: str, n: int) -> None:
        self.seed, self.kind = shape["seed"], kind
        self.k_heads, self.heads = shape["k_heads"], shape["k_heads"] * shape["group"]
        self.k_dim, self.v_dim = shape["k_dim"], shape["v_dim"]
        self.by_element = shape.get("by_element", False)
        self.lower_bound = -5.0 * shape.get("bounded", False)
        decays = self.heads * self.k_dim if self.by_element else self.heads
        widths = (2 * self.k_heads * self.k_dim + self.heads * self.v_dim, self.heads * self.v_dim)
        self.stored = [
            encode(normal(self.seed + i, n, width), kind) for i, width in enumerate((*widths, decays, self.heads))
        ]
        self.vectors = [-np.exp(normal(self.seed + 4, self.heads)), normal(self.seed + 5, decays)]
        self.vectors.append(normal(self.seed + 6, self.v_dim))
        self.state = normal(self.seed + 7, NUM_STATES, self.heads, self.k_dim, self.v_dim)

    def log(self, gpu: Gpu, step: Step, rows: Any) -> tuple[Any, ...]:
        """What the next step gets of the drafts of this one: k and v, then a and b."""
        qkv, _, a, b = self.stored
        parts = qkv[:, self.k_heads * self.k_dim :], np.concatenate([a, b], 1)
        width = parts[0].shape[1]
        return Log(gpu, self.kind, step, *(part[rows] for part in parts)).columns(0, width, width + a.shape[1])

    def run(
        self,
        gpu: Gpu,
        state: Buffer,
        step: Step,
        rows: Any = slice(None),
        pad: int = 2,
        log: Any = (None, None, None, *NO_LOG),
    ) -> Array:
        """Changes `state` in place. `pad`: elements between rows of qkv; with 0 they may be read 16 bytes at a time."""
        pads = (pad, 3, pad and 1, 5)
        frames = [of(gpu, x[rows], self.kind, between) for x, between in zip(self.stored, pads, strict=True)]
        out = Frame(gpu, self.kind, frames[1].shape, 1)
        inputs = [x for frame in frames for x in (frame.pointer, _long(frame.stride))]
        gpu.call(
            "run_delta_rule", *inputs, *(gpu.upload(x) for x in self.vectors), state, *step.upload(gpu), out.pointer,
            _long(out.stride), int(step.starts[-1]), self.k_heads, self.heads, self.k_dim, self.v_dim, 1e-6,
            KINDS.index(self.kind), *log, self.by_element, ctypes.c_float(self.lower_bound),
        )  # fmt: skip
        return out.get()


def rule(gpu: Gpu, shapes: list[Shape]) -> None:
    """Outputs and states of any sequences."""
    for shape in shapes:
        step = Step.draw(shape["seed"], shape["counts"])
        for kind in KINDS:
            given = Rule(shape, kind, int(step.starts[-1]))
            held = gpu.upload(given.state)
            got, after = given.run(gpu, held, step, pad=shape["pad"]), gpu.download(held)
            exact = [decode(x, kind).astype(np.float64) for x in given.stored]
            for s, (begin, end) in enumerate(step.spans()):
                before = step.before(given.state, s)
                qkv, z, a, b = (x[begin:end] for x in exact)
                rate, bias, norm = given.vectors
                heads, matrix = oracle.delta_heads(
                    qkv, a, b, rate, bias, before, num_k_heads=given.k_heads, lower_bound=given.lower_bound
                )
                # A head sums what it reads of the state with weights whose squares add up to 1 / k_dim.
                terms, size = given.k_dim + end - begin, 4 * max(1.0, float(np.abs(before).max()))
                assert_close(after[step.out[s]], matrix, "f32", terms, size)
                rounded = size / given.k_dim**0.5
                want, scale = oracle.gated_norm(heads, z, norm, 1e-6, rounded, sigmoid=given.by_element)
                # Heads of several blocks are stored before they are normed, which moves them and their norm.
                slack = 0 if kind == "f32" else 2 * UNIT[kind] * np.abs(want)
                assert_close(got[begin:end], want, kind, terms + given.v_dim, scale, slack)
            for other in set(range(NUM_STATES)) - set(step.out.tolist()):
                assert_bitwise(after[other], given.state[other])
            gpu.close()


def cuts(gpu: Gpu, shapes: list[Shape]) -> None:
    """A sequence in chunks, through one state or from one to the next; single tokens are decode's.

    Only the whole is read 16 bytes at a time.
    """
    for shape in shapes:
        places = [0, *shape["cuts"], shape["length"]]
        for kind in ("f32", "bf16"):
            given = Rule(shape, kind, shape["length"])
            held = gpu.upload(given.state)
            want = given.run(gpu, held, Step([shape["length"]], [-1], [0]), pad=0)
            whole = gpu.download(held)[0]
            held, at, parts = gpu.upload(given.state), -1, []
            for i, (begin, end) in enumerate(itertools.pairwise(places)):
                to = at if at >= 0 and i % 2 else (at + 1) % NUM_STATES
                parts.append(given.run(gpu, held, Step([end - begin], [at], [to]), slice(begin, end)))
                at = to
            assert_bitwise(np.concatenate(parts), want)
            assert_bitwise(gpu.download(held)[at], whole)
            gpu.close()


def drafts(gpu: Gpu, shapes: list[Shape]) -> None:
    """Drafts have the bits of other tokens, and a state sees none of them, through one state or into another."""
    for shape in shapes:
        counts, seen = shape["counts"], shape["seen"]
        for kind in ("f32", "bf16"):
            step = Step.draw(shape["seed"], counts)
            inn, out = step.inn.tolist(), step.out.tolist()
            certain = [begin + i for (begin, _), n in zip(step.spans(), seen, strict=True) for i in range(n)]
            steps = (step, slice(None)), (Step(counts, inn, out, seen), slice(None)), (Step(seen, inn, out), certain)
            for inputs in (Rule(shape, kind, sum(counts)), Conv(shape, kind, sum(counts))):
                is_rule = isinstance(inputs, Rule)
                state = inputs.state if is_rule else normal(1, NUM_STATES, inputs.taps - 1, inputs.channels)
                outs, states = [], []
                for one, rows in steps:
                    held = gpu.upload(state)
                    outs.append(inputs.run(gpu, held, one, rows))
                    states.append(gpu.download(held))
                assert_bitwise(outs[1], outs[0])
                assert_bitwise(outs[1][certain], outs[2])
                assert_bitwise(states[1], states[2])
            gpu.close()


def check_replays(gpu: Gpu, inputs: Any, state: Array, shape: Shape) -> None:
    """Drafts that a step replays give the bits of a step that computes them, and leave the same states."""
    counts, seen, right = shape["counts"], shape["seen"], shape["right"]
    step = Step.draw(shape["seed"], counts)
    inn, out = step.inn.tolist(), step.out.tolist()
    held = gpu.upload(state)
    want = inputs.run(gpu, held, step)
    whole = gpu.download(held)
    held = gpu.upload(state)
    ends = [min(count, n + Log.rows) for count, n in zip(counts, seen, strict=True)]
    spans, known = step.spans(), [n + r for n, r in zip(seen, right, strict=True)]
    rows = [begin + i for (begin, _), end in zip(spans, ends, strict=True) for i in range(end)]
    drafted = Step(ends, inn, out, seen)
    inputs.run(gpu, held, drafted, rows)
    log = inputs.log(gpu, drafted, rows)
    rest = [begin + i for (begin, end), n in zip(spans, known, strict=True) for i in range(n, end - begin)]
    behind = Step([count - n for count, n in zip(counts, known, strict=True)], out, out, replayed=right)
    assert_bitwise(inputs.run(gpu, held, behind, rest, log=log), want[rest])
    assert_bitwise(gpu.download(held)[out], whole[out])
    gpu.close()


def replays(gpu: Gpu, shapes: list[Shape]) -> None:
    """The rule and its convolution replay drafts."""
    for shape in shapes:
        for kind in ("f32", "bf16"):
            rule_, conv_ = (make(shape, kind, sum(shape["counts"])) for make in (Rule, Conv))
            check_replays(gpu, rule_, rule_.state, shape)
            check_replays(gpu, conv_, normal(1, NUM_STATES, conv_.taps - 1, conv_.channels), shape)
