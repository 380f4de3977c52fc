"""Layers with a state: the causal convolution and the gated delta rule, over sequences cut in any way."""

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
from ops.states import LOG_ROWS, NUM_STATES, Replay, Sequences, draw_sequences
from ops.support import Output, assert_bitwise, assert_close, backend, each_isa, each_threads, framed, tensor


@each_isa
@each_threads
@given(
    data=st.data(),
    channels=st.sampled_from((1, 7, 16, 33, 600)),
    taps=st.integers(1, 8),
    gated=st.booleans(),
    biased=st.booleans(),
    seed=support.seeds,
)
def test_causal_conv(
    isa: str, threads: int, data: st.DataObject, channels: int, taps: int, gated: bool, biased: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    sequences = draw_sequences(data, rng)
    x = support.activations(rng, int(sequences.starts[-1]), channels)
    gates = (support.activations(rng, *x.shape), support.activations(rng, *x.shape)) if gated else None
    weight = support.activations(rng, taps, channels)
    state = support.activations(rng, NUM_STATES, taps - 1, channels)
    out, after = Output(x.shape, pad=(1, 3)), state.copy()
    b = backend(isa, threads)
    arguments = sequences.arguments()
    strided = {
        name: tensor(framed(gate, pad))
        for name, gate, pad in zip(("gate_in", "gate_out"), gates or (), ((1, 2), (4, 3)), strict=False)
    }
    bias = support.activations(rng, channels) if biased else None
    more = strided if bias is None else {**strided, "bias": tensor(bias)}
    b.causal_conv(tensor(framed(x, (2, 5))), tensor(weight), tensor(after), *arguments, tensor(out.view), **more)
    got, want_state = out.check(), state.copy()
    for s, (begin, end) in enumerate(itertools.pairwise(sequences.starts)):
        before = state[sequences.inn[s]] if sequences.inn[s] >= 0 else np.zeros_like(state[0])
        own = (gates[0][begin:end], gates[1][begin:end]) if gates else None
        want, kept = oracle.causal_conv(x[begin:end], weight, before, own, bias)
        sizes = (np.abs(own[0]), np.abs(own[1])) if own else None
        added = None if bias is None else np.abs(bias)
        scale, _ = oracle.causal_conv(np.abs(x[begin:end]), np.abs(weight), np.abs(before), sizes, added)
        assert_close(got[begin:end], want, length=taps + biased + 2 * gated, scale=2 * scale)
        want_state[sequences.out[s]] = kept.astype(np.float32)  # a product of two float32 is rounded once
    assert_bitwise(after, want_state, "state")


class Rule:
    """Inputs of the gated delta rule."""

    def __init__(
        self,
        rng: np.random.Generator,
        n: int,
        k_heads: int,
        group: int,
        k_dim: int,
        v_dim: int,
        by_element: bool = False,
        doubled_beta: bool = False,
        lower_bound: float = 0,
    ) -> None:
        heads = k_heads * group
        decays = heads * k_dim if by_element else heads
        self.kind: dict[str, Any] = {"by_element": by_element, "sigmoid_gate": by_element}
        self.kind |= {"doubled_beta": doubled_beta, "lower_bound": lower_bound}
        self.k_heads, self.heads = k_heads, heads
        self.qkv = support.activations(rng, n, 2 * k_heads * k_dim + heads * v_dim)
        self.z = support.activations(rng, n, heads * v_dim)
        self.a, self.b = support.activations(rng, n, decays), support.activations(rng, n, heads)
        self.rate = -np.exp(support.activations(rng, heads))
        self.bias = support.activations(rng, decays)
        self.norm = support.activations(rng, v_dim)
        self.state = support.activations(rng, NUM_STATES, heads, k_dim, v_dim)

    def run(self, b: Any, state: Array, arguments: Any, rows: Any = slice(None), **more: Any) -> Array:
        """`state` [num_states, ...] is changed in place."""
        qkv, z, a, beta = (x[rows] for x in (self.qkv, self.z, self.a, self.b))
        out, gates = Output(z.shape, pad=(2, 1)), np.zeros((len(z), 2 * self.heads), np.float32)
        b.delta_rule(
            tensor(framed(qkv, (1, 2))), tensor(framed(z, (3, 1))), tensor(framed(a, (1, 1))), tensor(beta.copy()),
            tensor(self.rate), tensor(self.bias), tensor(self.norm), tensor(state), *arguments, tensor(gates),
            tensor(out.view), num_k_heads=self.k_heads, eps=1e-6, **self.kind, **more,
        )  # fmt: skip
        return out.check()


sizes = st.sampled_from((1, 5, 16, 31, 64, 128))


@each_isa
@each_threads
@given(
    data=st.data(),
    k_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    k_dim=sizes,
    v_dim=sizes,
    by_element=st.booleans(),
    doubled_beta=st.booleans(),
    lower_bound=st.sampled_from((0.0, -5.0)),
    seed=support.seeds,
)
def test_delta_rule(
    isa: str,
    threads: int,
    data: st.DataObject,
    k_heads: int,
    group: int,
    k_dim: int,
    v_dim: int,
    by_element: bool,
    doubled_beta: bool,
    lower_bound: float,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    sequences = draw_sequences(data, rng)
    rule = Rule(rng, int(sequences.starts[-1]), k_heads, group, k_dim, v_dim, by_element, doubled_beta, lower_bound)
    after = rule.state.copy()
    got = rule.run(backend(isa, threads), after, sequences.arguments())
    touched = set(sequences.out.tolist())
    for s, (begin, end) in enumerate(itertools.pairwise(sequences.starts)):
        before = rule.state[sequences.inn[s]] if sequences.inn[s] >= 0 else np.zeros_like(rule.state[0])
        heads, matrix = oracle.delta_heads(
            *(x[begin:end] for x in (rule.qkv, rule.a, rule.b)),
            *(rule.rate, rule.bias, before),
            num_k_heads=k_heads,
            most_beta=1 + doubled_beta,
            lower_bound=lower_bound,
        )
        # A head sums what it reads of the state with weights whose squares add up to 1 / k_dim.
        length, size = k_dim + end - begin, 4 * max(1.0, float(np.abs(before).max()))
        assert_close(after[sequences.out[s]], matrix, length=length, scale=size)
        want, scale = oracle.gated_norm(
            heads, rule.z[begin:end], rule.norm, 1e-6, size / k_dim**0.5, sigmoid=by_element
        )
        assert_close(got[begin:end], want, length=length + v_dim, scale=scale)
    for other in set(range(NUM_STATES)) - touched:
        assert_bitwise(after[other], rule.state[other], f"state {other}")


@each_isa
@given(data=st.data(), k_dim=sizes, v_dim=sizes, by_element=st.booleans(), seed=support.seeds)
def test_any_cut_gives_the_same_bits(
    isa: str, data: st.DataObject, k_dim: int, v_dim: int, by_element: bool, seed: int
) -> None:
    """One sequence in chunks, through one state or from one to the next, alone or beside others, on any threads."""
    rng, n = np.random.default_rng(seed), 45
    rule = Rule(rng, n, 2, 2, k_dim, v_dim, by_element)
    whole = np.zeros_like(rule.state)
    one = [tensor(np.array(values, np.int32)) for values in ([0, n], [-1], [0])]
    want = rule.run(backend(isa), whole, one)
    cuts = sorted(data.draw(st.sets(st.integers(1, n - 1), max_size=6)) | {0, n})
    states, at, parts = rule.state.copy(), -1, []
    for begin, end in itertools.pairwise(cuts):
        to = at if at >= 0 and data.draw(st.booleans()) else (at + 1) % NUM_STATES
        step = [tensor(np.array(values, np.int32)) for values in ([0, end - begin], [at], [to])]
        parts.append(
            rule.run(backend(isa, data.draw(st.sampled_from(support.THREADS))), states, step, slice(begin, end))
        )
        at = to
    assert_bitwise(np.concatenate(parts), want)
    assert_bitwise(states[at], whole[0], "state")


@each_isa
@given(data=st.data(), taps=st.integers(1, 8), k_dim=sizes, v_dim=sizes, by_element=st.booleans(), seed=support.seeds)
def test_drafts_leave_no_state(
    isa: str, data: st.DataObject, taps: int, k_dim: int, v_dim: int, by_element: bool, seed: int
) -> None:
    """Tokens of drafts have the bits of other tokens, and states those of the tokens in front of them."""
    rng, threads = np.random.default_rng(seed), data.draw(st.sampled_from(support.THREADS))
    b, sequences = backend(isa, threads), draw_sequences(data, rng)
    seen = [data.draw(st.integers(max(1, count - 16), count)) for count in sequences.counts]
    certain = np.concatenate([range(begin, begin + n) for begin, n in zip(sequences.starts, seen, strict=False)])
    state_tokens = tensor(np.array(seen, np.int32))
    before = Sequences(rng, seen, [False] * len(seen), [False] * len(seen))
    before.inn, before.out = sequences.inn, sequences.out
    n, channels = int(sequences.starts[-1]), 2 * 2 * k_dim + 4 * v_dim
    x, weight = support.activations(rng, n, channels), support.activations(rng, taps, channels)
    kept = support.activations(rng, NUM_STATES, taps - 1, channels)
    rule, outs, states = Rule(rng, n, 2, 2, k_dim, v_dim, by_element), [], []
    for step, rows, more in (
        (sequences, slice(None), {}),
        (sequences, slice(None), {"state_tokens": state_tokens}),
        (before, certain, {}),
    ):
        out, conv_state, state = Output(x[rows].shape), kept.copy(), rule.state.copy()
        given_x = tensor(framed(x[rows], (0, 0)))
        b.causal_conv(given_x, tensor(weight), tensor(conv_state), *step.arguments(), tensor(out.view), **more)
        outs.append((out.check(), rule.run(b, state, step.arguments(), rows, **more)))
        states.append((conv_state, state))
    for whole, drafted, alone in zip(*outs, strict=True):
        assert_bitwise(drafted, whole)
        assert_bitwise(drafted[certain], alone)
    for drafted, alone in zip(*states[1:], strict=True):
        assert_bitwise(drafted, alone, "state")


@each_isa
@given(
    data=st.data(),
    taps=st.integers(1, 8),
    gated=st.booleans(),
    channels=st.sampled_from((1, 33, 600)),
    k_dim=sizes,
    v_dim=sizes,
    by_element=st.booleans(),
    seed=support.seeds,
)
def test_replayed_drafts_are_tokens(
    isa: str,
    data: st.DataObject,
    taps: int,
    gated: bool,
    channels: int,
    k_dim: int,
    v_dim: int,
    by_element: bool,
    seed: int,
) -> None:
    """A step that replays drafts of the one before from a log has the bits of one that computes them."""
    rng, b = np.random.default_rng(seed), backend(isa, data.draw(st.sampled_from(support.THREADS)))
    sequences = draw_sequences(data, rng)
    replay, n = Replay(data, sequences), int(sequences.starts[-1])
    x, gate_in, gate_out = (support.activations(rng, n, channels) for _ in range(3))
    weight, kept = support.activations(rng, taps, channels), support.activations(rng, NUM_STATES, taps - 1, channels)

    def conv(state: Array, arguments: Any, rows: Any, **more: Any) -> Array:
        gates = {"gate_in": tensor(gate_in[rows]), "gate_out": tensor(gate_out[rows])} if gated else {}
        out = Output(x[rows].shape)
        b.causal_conv(tensor(x[rows]), tensor(weight), tensor(state), *arguments, tensor(out.view), **gates, **more)
        return out.check()

    rule = Rule(rng, n, 2, 2, k_dim, v_dim, by_element)
    x_log, gate_in_log = replay.log(b, x, gate_in)
    kv_log, b_log, a_log = replay.log(b, rule.qkv[:, 2 * k_dim :], rule.b, rule.a)
    logs = {"x_log": x_log, **({"gate_in_log": gate_in_log} if gated else {})}
    for run, before, more in (
        (conv, kept, logs),
        (lambda state, *step, **own: rule.run(b, state, *step, **own), rule.state,
         {"kv_log": kv_log, "a_log": a_log, "b_log": b_log}),
    ):  # fmt: skip
        whole, state = before.copy(), before.copy()
        want = run(whole, sequences.arguments(), slice(None))
        run(state, replay.first, replay.first_rows, state_tokens=replay.state_tokens)
        got = run(state, replay.second, replay.rows, num_replayed=replay.num_replayed, **more)
        assert_bitwise(got, want[replay.rows])
        assert_bitwise(state[replay.out], whole[sequences.out], "state")


def test_refused() -> None:
    rule, b = Rule(np.random.default_rng(1), 4, 2, 1, 8, 8), backend(support.ISAS[-1])
    for starts, inn, out, match in (
        ([0, 2, 4], [-1, 9], [0, 1], r"state_in\[1\] is 9, expected -1 to 8"),
        ([0, 2, 4], [-1, -1], [0, -1], r"state_out\[1\] is -1, expected 0 to 8"),
        ([0, 2, 4], [-1, -1], [3, 3], "sequences 0 and 1 both write state 3"),
        ([0, 2, 4], [1, -1], [0, 1], r"state_in\[0\]: sequence 1 writes state 1 in the same step"),
        ([0, 3, 2], [-1, -1], [0, 1], "expected to rise from 0 to the 4 tokens"),
    ):
        step = [tensor(np.array(values, np.int32)) for values in (starts, inn, out)]
        with pytest.raises(InfinilmError, match=match):
            rule.run(b, rule.state, step)
    step = [tensor(np.array(values, np.int32)) for values in ([0, 4], [-1], [0])]
    for seen in (0, 5):
        with pytest.raises(InfinilmError, match=rf"state_tokens\[0\] is {seen}, expected 1 to 4: .* at most 16 drafts"):
            rule.run(b, rule.state, step, state_tokens=tensor(np.array([seen], np.int32)))
    wide = np.zeros((1, 2, 257, 4), np.float32)
    step = [tensor(np.array(values, np.int32)) for values in ([0, 4], [-1], [0])]
    with pytest.raises(InfinilmError, match="1 to 256 rows"):
        rule.run(b, wide, step)
    log = np.zeros((NUM_STATES, LOG_ROWS, 6), np.float32)
    part, three = tensor(np.zeros((4, 6), np.float32)), tensor(np.zeros((4, 3), np.float32))
    few = tensor(np.zeros((NUM_STATES, 2, 6), np.float32))
    seen = tensor(np.array([1], np.int32))
    for parts, into, match in (
        ([], tensor(log), "parts: expected 1 to 4, got 0"),
        ([part, three], tensor(log), "log: expected"),
        ([part], few, "sequence 0 has 3 drafts, and a state has 2 rows of its log"),
    ):
        with pytest.raises(InfinilmError, match=match):
            b.log_drafts(parts, into, *step, seen)
    weight, state = tensor(np.zeros((2, 6), np.float32)), tensor(np.zeros((NUM_STATES, 1, 6), np.float32))
    for count, begins_in, match in (
        (1, -1, r"num_replayed\[0\] is 1, expected 0 to 0"),
        (16, 2, r"num_replayed\[0\] is 16, expected 0 to 15: a state has 15 rows of its log"),
        (-1, 2, r"num_replayed\[0\] is -1, expected 0 to 15"),
    ):
        own = [tensor(np.array(values, np.int32)) for values in ([0, 4], [begins_in], [2], [count])]
        with pytest.raises(InfinilmError, match=match):
            b.causal_conv(part, weight, state, *own[:3], tensor(np.zeros((4, 6), np.float32)), num_replayed=own[3],
                          x_log=tensor(log))  # fmt: skip
    with pytest.raises(InfinilmError, match="x_log: tensor is missing"):
        b.causal_conv(part, weight, state, *own[:3], tensor(np.zeros((4, 6), np.float32)), num_replayed=own[3])
