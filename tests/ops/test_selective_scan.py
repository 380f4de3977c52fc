"""The state space of Mamba-2 and the gated norm behind it, over sequences cut in any way."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from reference import ops as oracle
from reference.ops import Array

from infinilm.errors import InfinilmError
from ops import support
from ops.states import NUM_STATES, Replay, Sequences, draw_sequences
from ops.support import Output, assert_bitwise, assert_close, backend, each_isa, each_threads, framed, tensor

sizes = st.sampled_from((1, 5, 16, 31, 64, 100))


class Scan:
    """Inputs of the state space."""

    def __init__(self, rng: np.random.Generator, n: int, groups: int, of_group: int, state: int, head: int) -> None:
        self.groups, self.heads, size = groups, groups * of_group, groups * of_group * head
        self.xbc = support.activations(rng, n, size + 2 * groups * state)
        self.dt = support.activations(rng, n, self.heads)
        self.rate = -np.exp(support.activations(rng, self.heads))
        self.bias, self.skip = support.activations(rng, self.heads), support.activations(rng, self.heads)
        self.state = support.activations(rng, NUM_STATES, self.heads, state, head)
        self.size = size

    def run(self, b: Any, state: Array, arguments: Any, rows: Any = slice(None), **more: Any) -> Array:
        """`state` [num_states, ...] is changed in place."""
        xbc, dt = self.xbc[rows], self.dt[rows]
        out, gates = Output((len(dt), self.size), pad=(2, 1)), np.zeros((len(dt), 2 * self.heads), np.float32)
        b.selective_scan(
            tensor(framed(xbc, (1, 2))), tensor(framed(dt, (3, 1))), tensor(self.rate), tensor(self.bias),
            tensor(self.skip), tensor(state), *arguments, tensor(gates), tensor(out.view), num_groups=self.groups,
            **more,
        )  # fmt: skip
        return out.check()


@each_isa
@each_threads
@given(
    data=st.data(),
    groups=st.integers(1, 3),
    of_group=st.integers(1, 3),
    state_dim=sizes,
    head_dim=sizes,
    limits=st.sampled_from(((0.0, np.inf), (0.3, 1.1))),
    multiplier=st.sampled_from((1.0, -0.4)),
    seed=support.seeds,
)
def test_selective_scan(
    isa: str,
    threads: int,
    data: st.DataObject,
    groups: int,
    of_group: int,
    state_dim: int,
    head_dim: int,
    limits: tuple[float, float],
    multiplier: float,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    sequences = draw_sequences(data, rng)
    scan = Scan(rng, int(sequences.starts[-1]), groups, of_group, state_dim, head_dim)
    after = scan.state.copy()
    more = {"dt_multiplier": multiplier, "dt_min": limits[0], "dt_max": limits[1]}
    got = scan.run(backend(isa, threads), after, sequences.arguments(), **more)
    for s, (begin, end) in enumerate(itertools.pairwise(sequences.starts)):
        before = scan.state[sequences.inn[s]] if sequences.inn[s] >= 0 else np.zeros_like(scan.state[0])
        want, matrix, size = oracle.selective_scan(
            scan.xbc[begin:end], scan.dt[begin:end], scan.rate, scan.bias, scan.skip, before,
            num_groups=groups, dt_multiplier=multiplier, dt_limits=limits,
        )  # fmt: skip
        assert_close(got[begin:end], want, length=state_dim + 3 * (end - begin), scale=size)
        largest = max(1.0, float(np.abs(matrix).max()))
        assert_close(after[sequences.out[s]], matrix, length=3 * (end - begin), scale=4 * largest)
    for other in set(range(NUM_STATES)) - set(sequences.out.tolist()):
        assert_bitwise(after[other], scan.state[other], f"state {other}")


@each_isa
@given(data=st.data(), state_dim=sizes, head_dim=sizes, seed=support.seeds)
def test_any_cut_gives_the_same_bits(isa: str, data: st.DataObject, state_dim: int, head_dim: int, seed: int) -> None:
    """One sequence in chunks, through one state or from one to the next, on any threads."""
    rng, n = np.random.default_rng(seed), 29
    scan = Scan(rng, n, 2, 2, state_dim, head_dim)
    whole = np.zeros_like(scan.state)
    one = [tensor(np.array(values, np.int32)) for values in ([0, n], [-1], [0])]
    want = scan.run(backend(isa), whole, one)
    cuts = sorted(data.draw(st.sets(st.integers(1, n - 1), max_size=8)) | {0, n})
    states, at, parts = scan.state.copy(), -1, []
    for begin, end in itertools.pairwise(cuts):
        to = at if at >= 0 and data.draw(st.booleans()) else (at + 1) % NUM_STATES
        step = [tensor(np.array(values, np.int32)) for values in ([0, end - begin], [at], [to])]
        threads = data.draw(st.sampled_from(support.THREADS))
        parts.append(scan.run(backend(isa, threads), states, step, slice(begin, end)))
        at = to
    assert_bitwise(np.concatenate(parts), want)
    assert_bitwise(states[at], whole[0], "state")


@each_isa
@given(data=st.data(), state_dim=sizes, head_dim=sizes, seed=support.seeds)
def test_drafts_leave_no_state(isa: str, data: st.DataObject, state_dim: int, head_dim: int, seed: int) -> None:
    """Tokens of drafts have the bits of other tokens, and states those of the tokens in front of them."""
    rng = np.random.default_rng(seed)
    b, sequences = backend(isa, data.draw(st.sampled_from(support.THREADS))), draw_sequences(data, rng)
    seen = [data.draw(st.integers(max(1, count - 16), count)) for count in sequences.counts]
    certain = np.concatenate([range(begin, begin + n) for begin, n in zip(sequences.starts, seen, strict=False)])
    before = Sequences(rng, seen, [False] * len(seen), [False] * len(seen))
    before.inn, before.out = sequences.inn, sequences.out
    scan, outs, states = Scan(rng, int(sequences.starts[-1]), 2, 2, state_dim, head_dim), [], []
    drafts = {"state_tokens": tensor(np.array(seen, np.int32))}
    for step, rows, more in ((sequences, slice(None), {}), (sequences, slice(None), drafts), (before, certain, {})):
        states.append(scan.state.copy())
        outs.append(scan.run(b, states[-1], step.arguments(), rows, **more))
    assert_bitwise(outs[1], outs[0])
    assert_bitwise(outs[1][certain], outs[2])
    assert_bitwise(states[1], states[2], "state")


@each_isa
@given(data=st.data(), state_dim=sizes, head_dim=sizes, seed=support.seeds)
def test_replayed_drafts_are_tokens(isa: str, data: st.DataObject, state_dim: int, head_dim: int, seed: int) -> None:
    """A step that replays drafts of the one before from a log has the bits of one that computes them."""
    rng, b = np.random.default_rng(seed), backend(isa, data.draw(st.sampled_from(support.THREADS)))
    sequences = draw_sequences(data, rng)
    replay, scan = Replay(data, sequences), Scan(rng, int(sequences.starts[-1]), 2, 2, state_dim, head_dim)
    xb_log, dt_log = replay.log(b, scan.xbc[:, : scan.size + 2 * state_dim], scan.dt)
    whole, state = scan.state.copy(), scan.state.copy()
    want = scan.run(b, whole, sequences.arguments())
    scan.run(b, state, replay.first, replay.first_rows, state_tokens=replay.state_tokens)
    more = {"num_replayed": replay.num_replayed, "xb_log": xb_log, "dt_log": dt_log}
    assert_bitwise(scan.run(b, state, replay.second, replay.rows, **more), want[replay.rows])
    assert_bitwise(state[replay.out], whole[sequences.out], "state")


@each_isa
@each_threads
@given(
    n=st.integers(1, 4),
    groups=st.integers(1, 4),
    size=st.sampled_from((1, 7, 16, 70)),
    normed=st.booleans(),
    norm_first=st.booleans(),
    in_place=st.booleans(),
    seed=support.seeds,
)
def test_gated_norm(
    isa: str, threads: int, n: int, groups: int, size: int, normed: bool, norm_first: bool, in_place: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x, gate = support.activations(rng, n, groups * size), support.activations(rng, n, groups * size)
    weight = support.activations(rng, groups * size) if normed else None
    out = Output(x.shape, pad=(1, 2))
    given_x = out.view if in_place else framed(x, (2, 3))
    given_x[:] = x
    backend(isa, threads).gated_norm(
        tensor(given_x), tensor(framed(gate, (1, 4))), None if weight is None else tensor(weight), tensor(out.view),
        group_size=size, eps=1e-5, norm_first=norm_first, gate_multiplier=1.3,
    )  # fmt: skip
    want = oracle.group_norm(x, np.float32(1.3) * gate, weight, size, 1e-5, norm_first)
    assert_close(out.check(), want, length=size + 8, scale=np.abs(want))


def test_refused() -> None:
    scan, b = Scan(np.random.default_rng(1), 4, 2, 1, 8, 8), backend(support.ISAS[-1])
    step = [tensor(np.array(values, np.int32)) for values in ([0, 4], [-1], [0])]
    with pytest.raises(InfinilmError, match="state: expected 1 to 256 rows of state_dim and a head_dim, got 257 and 8"):
        scan.run(b, np.zeros((1, 2, 257, 8), np.float32), step)
    with pytest.raises(InfinilmError, match=r"dt_min to be at most dt_max, got 2\.0+ and 1\.0+"):
        scan.run(b, scan.state, step, dt_min=2.0, dt_max=1.0)
    scan.groups = 3
    with pytest.raises(InfinilmError, match="num_heads to be a positive multiple of num_groups, got 2 and 3"):
        scan.run(b, scan.state, step)
    x = np.zeros((2, 6), np.float32)
    with pytest.raises(InfinilmError, match="group_size: expected a divisor of the size of a row, 6, got 4"):
        b.gated_norm(tensor(x), tensor(x), None, tensor(x), group_size=4, eps=1e-5)
