"""Cases for cuda/delta/selective_scan.cu against float64 numpy, and bit for bit between any cuts of a sequence."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from delta_cases import NO_LOG, NUM_STATES, Log, Shape, Step, _long, check_replays, oracle
from emulation import Array, Buffer, Gpu
from frames import KINDS, Frame, assert_bitwise, assert_close, decode, encode, normal, of


class Scan:
    """Inputs of the state space, as stored."""

    def __init__(self, shape: Shape, kind: str, n: int) -> None:
        seed, self.kind = shape["seed"], kind
        self.groups, self.heads = shape["groups"], shape["groups"] * shape["of_group"]
        self.state_dim, self.head_dim = shape["state_dim"], shape["head_dim"]
        self.size, self.limits = self.heads * self.head_dim, tuple(shape.get("limits", (0.0, np.inf)))
        self.xbc = encode(normal(seed, n, self.size + 2 * self.groups * self.state_dim), kind)
        self.dt = encode(normal(seed + 1, n, self.heads), kind)
        self.vectors = [
            -np.exp(normal(seed + 2, self.heads)),
            normal(seed + 3, self.heads),
            normal(seed + 4, self.heads),
        ]
        self.state = normal(seed + 5, NUM_STATES, self.heads, self.state_dim, self.head_dim)

    def log(self, gpu: Gpu, step: Step, rows: Any) -> tuple[Any, ...]:
        """What the next step gets of the drafts of this one."""
        width = self.size + self.groups * self.state_dim
        return Log(gpu, self.kind, step, self.xbc[rows, :width], self.dt[rows]).columns(0, width)

    def run(
        self, gpu: Gpu, state: Buffer, step: Step, rows: Any = slice(None), log: Any = (None, None, *NO_LOG)
    ) -> Array:
        """Changes `state` in place."""
        xbc, dt = of(gpu, self.xbc[rows], self.kind, 2), of(gpu, self.dt[rows], self.kind, 1)
        out = Frame(gpu, self.kind, (dt.shape[0], self.size), 3)
        gpu.call(
            "run_selective_scan", xbc.pointer, _long(xbc.stride), dt.pointer, _long(dt.stride),
            *(gpu.upload(x) for x in self.vectors), state, *step.upload(gpu), out.pointer, _long(out.stride),
            int(step.starts[-1]), self.heads, self.groups, self.state_dim, self.head_dim, 0.7, *self.limits,
            KINDS.index(self.kind), *log,
        )  # fmt: skip
        return out.get()


def scan(gpu: Gpu, shapes: list[Shape]) -> None:
    """Outputs and states of any sequences."""
    for shape in shapes:
        step = Step.draw(shape["seed"], shape["counts"])
        for kind in KINDS:
            given = Scan(shape, kind, int(step.starts[-1]))
            held = gpu.upload(given.state)
            got, after = given.run(gpu, held, step), gpu.download(held)
            xbc, dt = (decode(x, kind).astype(np.float64) for x in (given.xbc, given.dt))
            for s, (begin, end) in enumerate(step.spans()):
                want, matrix, size = oracle.selective_scan(
                    xbc[begin:end], dt[begin:end], *given.vectors, step.before(given.state, s),
                    num_groups=given.groups, dt_multiplier=0.7, dt_limits=given.limits,
                )  # fmt: skip
                terms = 3 * (end - begin)
                assert_close(after[step.out[s]], matrix, "f32", terms, 4 * max(1.0, float(np.abs(matrix).max())))
                assert_close(got[begin:end], want, kind, given.state_dim + terms, size)
            for other in set(range(NUM_STATES)) - set(step.out.tolist()):
                assert_bitwise(after[other], given.state[other])
            gpu.close()


def scan_cuts(gpu: Gpu, shapes: list[Shape]) -> None:
    """A sequence in chunks, through one state or from one to the next; single tokens are decode's."""
    for shape in shapes:
        places = [0, *shape["cuts"], shape["length"]]
        for kind in ("f32", "bf16"):
            given = Scan(shape, kind, shape["length"])
            held = gpu.upload(given.state)
            want = given.run(gpu, held, Step([shape["length"]], [-1], [0]))
            whole = gpu.download(held)[0]
            held, at, parts = gpu.upload(given.state), -1, []
            for i, (begin, end) in enumerate(itertools.pairwise(places)):
                to = at if at >= 0 and i % 2 else (at + 1) % NUM_STATES
                parts.append(given.run(gpu, held, Step([end - begin], [at], [to]), slice(begin, end)))
                at = to
            assert_bitwise(np.concatenate(parts), want)
            assert_bitwise(gpu.download(held)[at], whole)
            gpu.close()


def scan_drafts(gpu: Gpu, shapes: list[Shape]) -> None:
    """Drafts have the bits of other tokens, and a state sees none of them, through one state or into another."""
    for shape in shapes:
        counts, seen = shape["counts"], shape["seen"]
        step, given = Step.draw(shape["seed"], counts), Scan(shape, "bf16", sum(counts))
        inn, out = step.inn.tolist(), step.out.tolist()
        certain = [begin + i for (begin, _), n in zip(step.spans(), seen, strict=True) for i in range(n)]
        outs, states = [], []
        steps = (step, slice(None)), (Step(counts, inn, out, seen), slice(None)), (Step(seen, inn, out), certain)
        for one, rows in steps:
            held = gpu.upload(given.state)
            outs.append(given.run(gpu, held, one, rows))
            states.append(gpu.download(held))
        assert_bitwise(outs[1], outs[0])
        assert_bitwise(outs[1][certain], outs[2])
        assert_bitwise(states[1], states[2])
        gpu.close()


def scan_replays(gpu: Gpu, shapes: list[Shape]) -> None:
    for shape in shapes:
        for kind in ("f32", "bf16"):
            inputs = Scan(shape, kind, sum(shape["counts"]))
            check_replays(gpu, inputs, inputs.state, shape)


def gated_norm(gpu: Gpu, shapes: list[Shape]) -> None:
    for shape in shapes:
        n, size, group = shape["n"], shape["groups"] * shape["group_size"], shape["group_size"]
        weight = normal(shape["seed"] + 2, size) if shape["normed"] else None
        for kind in KINDS:
            x, gate = (encode(normal(shape["seed"] + i, n, size), kind) for i in range(2))
            given_x, given_gate = of(gpu, x, kind, 3), of(gpu, gate, kind, 1)
            out = given_x if shape["in_place"] else Frame(gpu, kind, (n, size), 2)
            gpu.call(
                "run_gated_norm", given_x.pointer, _long(given_x.stride), given_gate.pointer, _long(given_gate.stride),
                None if weight is None else gpu.upload(weight), out.pointer, _long(out.stride), n, size, group, 1e-5,
                1.3, int(shape["norm_first"]), KINDS.index(kind),
            )  # fmt: skip
            exact_x, exact_gate = (decode(values, kind).astype(np.float64) for values in (x, gate))
            want = oracle.group_norm(exact_x, np.float32(1.3) * exact_gate, weight, group, 1e-5, shape["norm_first"])
            assert_close(out.get(), want, kind, group + 8, np.abs(want))
            gpu.close()
