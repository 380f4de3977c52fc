"""Layers of experts: which of them a token goes to, and the sum of what they give, in the order of its list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st
from reference import ops as oracle
from reference.ops import F64, Array

from infinilm.errors import InfinilmError
from ops import support
from ops.support import Output, assert_bitwise, assert_close, backend, each_isa, each_threads, framed, tensor
from ops.test_quantised_linear import quantised_x, stored_rows

FORMATS = ("float32", "bfloat16", "float16", "int8", "int4")
each_format = pytest.mark.parametrize("format", FORMATS)
few = st.sampled_from((1, 2, 3, 7, 8, 19, 33))
widths = st.sampled_from((1, 8, 31, 32, 64, 111))


# ------------------------------------------------------------------------------------------------------ route


def run_route(logits: Array, top_k: int, isa: str = "", threads: int = 1, **options: Any) -> tuple[Array, Array]:
    ids, weights = Output((len(logits), top_k), np.int32, pad=(1, 2)), Output((len(logits), top_k), pad=(2, 1))
    b = backend(isa or support.ISAS[-1], threads)
    b.route(tensor(framed(logits, (2, 3))), tensor(ids.view), tensor(weights.view), **options)
    return ids.check(), weights.check()


@each_threads
@given(data=st.data(), num_tokens=few, num_experts=st.sampled_from((1, 2, 8, 60, 128)), seed=support.seeds)
def test_route(threads: int, data: st.DataObject, num_tokens: int, num_experts: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_groups = data.draw(st.sampled_from([n for n in (1, 2, 4) if num_experts % n == 0]))
    top_groups, group_best = data.draw(st.integers(1, num_groups)), data.draw(st.sampled_from((1, 2)))
    top_k = data.draw(st.integers(1, min(10, num_experts // num_groups * top_groups)))
    scoring = data.draw(st.sampled_from(("softmax", "sigmoid")))
    normalize, scale = data.draw(st.booleans()), data.draw(st.sampled_from((1.0, 2.5)))
    logits = support.activations(rng, num_tokens, num_experts) * np.float32(3)
    bias, scales = (support.activations(rng, num_experts) if data.draw(st.booleans()) else None for _ in range(2))
    ids, weights = run_route(
        logits, top_k, threads=threads, scoring=scoring, normalize=normalize, scale=scale,
        correction_bias=tensor(bias), num_groups=num_groups, top_groups=top_groups, expert_scales=tensor(scales),
        group_best=group_best,
    )  # fmt: skip
    wide = logits.astype(np.float64)
    scores = oracle.softmax(wide) if scoring == "softmax" else 1 / (1 + np.exp(-wide))
    choice = scores if bias is None else scores + bias
    want_ids = oracle.best_experts(choice, top_k, num_groups, top_groups, group_best)
    # Two that differ by a rounding may change places; of seeds drawn at random none has such.
    np.testing.assert_array_equal(ids, want_ids)
    want = np.take_along_axis(scores, want_ids, 1)
    want = want / want.sum(1, keepdims=True) if normalize else want
    own = 1.0 if scales is None else scales.astype(np.float64)[want_ids]
    assert_close(weights, want * scale * own, length=num_experts)


@each_threads
@given(
    num_tokens=few,
    num_experts=st.sampled_from((2, 8, 60)),
    top_k=st.sampled_from((1, 2)),
    tolerance=st.sampled_from((0.02, 0.3, 1.5)),
    seed=support.seeds,
)
def test_sparse_mixer(threads: int, num_tokens: int, num_experts: int, top_k: int, tolerance: float, seed: int) -> None:
    logits = support.activations(np.random.default_rng(seed), num_tokens, num_experts) * np.float32(3)
    ids, weights = run_route(logits, top_k, threads=threads, scoring="sparse_mixer", tolerance=tolerance, scale=2.0)
    left, rows = np.exp(logits.astype(np.float64)), np.arange(num_tokens)
    for k in range(top_k):
        best = left.argmax(1)
        np.testing.assert_array_equal(ids[:, k], best)
        most = np.log(left[rows, best])[:, None]
        distance = (most - logits) / np.maximum(np.abs(logits), most)
        assume(not (np.abs(distance - tolerance) < 1e-5).any())
        want = left[rows, best] / (left * (distance <= tolerance)).sum(1)
        assert_close(weights[:, k], 2 * want, length=num_experts)
        left[rows, best] = 0


def test_equal_scores_go_by_id() -> None:
    ids, weights = run_route(np.zeros((2, 8), np.float32), 3)
    np.testing.assert_array_equal(ids, [[0, 1, 2]] * 2)
    np.testing.assert_array_equal(weights, np.float32(1 / 8))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_row_without_finite_logits_tells_in_its_weights(bad: float, scoring: str) -> None:
    logits = np.zeros((3, 8), np.float32)
    logits[1, 5] = bad
    ids, weights = run_route(logits, 2, scoring=scoring)
    np.testing.assert_array_equal(ids[1], [0, 1])
    assert np.isnan(weights[1]).all()
    assert np.isfinite(weights[[0, 2]]).all()


def test_an_expert_that_is_ruled_out_is_chosen_last() -> None:
    logits = np.full((1, 4), -np.inf, np.float32)
    logits[0, 2] = 1
    ids, weights = run_route(logits, 2)
    np.testing.assert_array_equal(ids, [[2, 0]])
    np.testing.assert_array_equal(weights, [[1, 0]])


def test_route_refuses_what_does_not_fit() -> None:
    logits = np.zeros((2, 8), np.float32)
    with pytest.raises(InfinilmError, match="num_groups: expected a divisor of 8 experts, got 3"):
        run_route(logits, 2, num_groups=3)
    with pytest.raises(InfinilmError, match="top_groups: expected 1 to 2, got 3"):
        run_route(logits, 2, num_groups=2, top_groups=3)
    with pytest.raises(InfinilmError, match=r"sparse_mixer takes a tolerance .* neither weights that add up to 1"):
        run_route(logits, 2, scoring="sparse_mixer", normalize=True)
    with pytest.raises(InfinilmError, match="ids: expected 1 to 4 columns, got 5"):
        run_route(logits, 5, num_groups=2, top_groups=1)


# ---------------------------------------------------------------------------------------------------- experts


@dataclass
class Layer:
    """Experts in one format: as the backend has them, and as what their panels hold."""

    gate_up: list[Any]
    down: list[Any]
    weights: list[tuple[F64, F64, F64]]  # gate, up, down
    quantised: str | None


def make_layer(
    b: Any, rng: np.random.Generator, format: str, num_experts: int, hidden: int, inner: int, gated: bool = True
) -> Layer:
    dtype, quantization = (format, "none") if format.startswith(("float", "bf")) else ("float32", format)
    layer = Layer([], [], [], quantization if quantization != "none" else None)
    for _ in range(num_experts):
        arrays = [
            support.stored(rng, dtype, *shape, scale=shape[1] ** -0.5)
            for shape in ((inner, hidden), (inner, hidden), (hidden, inner))
        ]
        gate, up, down = [(tensor(array, dtype), None) for array in arrays]
        kind = {"kind": "act_mul"} if gated else {}
        layer.gate_up.append(b.prepare_linear([gate, up] if gated else [up], quantization=quantization, **kind))
        layer.down.append(b.prepare_linear([down], quantization=quantization))
        held = [stored_rows(b, array, dtype, quantization).astype(np.float64) for array in arrays]
        layer.weights.append((held[0], held[1], held[2]))
    return layer


def run_experts(
    b: Any, layer: Layer, x: Array, ids: Array, weights: Array, values: Array | None = None, **more: Any
) -> Array:
    """values: what out holds before."""
    parts, inner = ids.size, layer.weights[0][0].shape[0] * (2 if "activation" in more else 1)
    out = Output(x.shape, pad=(3, 1), values=values)
    scratch = [Output((parts, inner), pad=(1, 0)), Output((parts, x.shape[1]), pad=(0, 2))]
    more = {
        key: value if key in ("activation", "limit") else tensor(out.view) if value is values else tensor(framed(value))
        for key, value in more.items()
    }
    b.experts(
        tensor(framed(x, (1, 2))), tensor(framed(ids, (1, 1))), tensor(framed(weights, (2, 1))),
        layer.gate_up, layer.down, tensor(out.view), *(tensor(s.view) for s in scratch), **more,
    )  # fmt: skip
    for area in scratch:
        area.check()
    return out.check()


@each_isa
@each_format
@given(
    data=st.data(), num_tokens=few, num_experts=st.sampled_from((1, 3, 8)), hidden=widths, inner=widths,
    seed=support.seeds, threads=st.sampled_from(support.THREADS),
)  # fmt: skip
def test_experts(
    isa: str, format: str, data: st.DataObject, num_tokens: int, num_experts: int, hidden: int, inner: int, seed: int,
    threads: int,
) -> None:  # fmt: skip
    """Any routing, with and without gates, a shared expert, its gate, and a residual that may be the output."""
    rng, b = np.random.default_rng(seed), backend(isa, threads)
    gated, clamps = data.draw(st.sampled_from(((True, False), (False, False), (True, True))))
    layer = make_layer(b, rng, format, num_experts, hidden, inner, gated)
    top_k = data.draw(st.integers(1, num_experts))
    ids = np.argsort(rng.random((num_tokens, num_experts)), axis=1)[:, :top_k].astype(np.int32)
    weights, x = rng.random(ids.shape, np.float32), support.activations(rng, num_tokens, hidden)
    names = data.draw(st.sampled_from([(), ("shared",), ("shared", "shared_gate")]))
    more = {name: support.activations(rng, num_tokens, 1 if name == "shared_gate" else hidden) for name in names}
    values = None
    if data.draw(st.booleans()):
        values = more["residual"] = support.activations(rng, num_tokens, hidden)
    joined = {"activation": "clamped_silu", "limit": 0.5} if clamps else {}
    got = run_experts(b, layer, x, ids, weights, values, **more, **joined)

    want, scale = np.zeros((num_tokens, hidden)), np.zeros((num_tokens, hidden))
    for t in range(num_tokens):
        for k in range(top_k):
            gate, up, down = layer.weights[ids[t, k]]
            seen = quantised_x(x[t : t + 1], layer.quantised) if layer.quantised else x[t : t + 1].astype(np.float64)
            if clamps:
                h = oracle.join("clamped_silu", seen @ gate.T, seen @ up.T, 0.5)
            elif gated:
                h = oracle.linear(seen, [(gate, None), (up, None)], "act_mul")
            else:
                h = oracle.linear(seen, [(up, None)])
                h = h / (1 + np.exp(-h))
            h = quantised_x(h, layer.quantised) if layer.quantised else h
            part = (h @ down.T)[0] * float(weights[t, k])
            want[t] += part
            scale[t] += (np.abs(h) @ np.abs(down).T)[0] * float(weights[t, k])
    if "shared" in more:
        gate = 1 / (1 + np.exp(-more["shared_gate"].astype(np.float64))) if "shared_gate" in more else 1.0
        want, scale = want + gate * more["shared"], scale + np.abs(more["shared"])
    if values is not None:
        want, scale = want + values, scale + np.abs(values)
    if layer.quantised:  # x in between is rounded to 8 bits: a last bit of it may fall otherwise
        assert np.all(np.abs(got - want) <= 0.02 * (scale + 1e-3))
    else:
        assert_close(got, want, length=hidden + inner, scale=scale + 1)


@each_isa
@each_format
@given(data=st.data(), hidden=widths, inner=widths, seed=support.seeds)
def test_a_token_does_not_depend_on_its_company(
    isa: str, format: str, data: st.DataObject, hidden: int, inner: int, seed: int
) -> None:
    """The same bits alone, in any chunk, with any threads, and whichever tokens go to the same experts."""
    rng = np.random.default_rng(seed)
    num_tokens, num_experts = 40, 5
    layer = make_layer(backend(isa), rng, format, num_experts, hidden, inner)
    top_k = data.draw(st.integers(1, num_experts))
    ids = np.argsort(rng.random((num_tokens, num_experts)), axis=1)[:, :top_k].astype(np.int32)
    ids[: num_tokens // 2] = ids[0]  # a crowd at some
    weights, x = rng.random(ids.shape, np.float32), support.activations(rng, num_tokens, hidden)
    alone = [run_experts(backend(isa), layer, *(a[t : t + 1] for a in (x, ids, weights))) for t in range(num_tokens)]
    want = np.concatenate(alone)
    for threads in support.THREADS:
        chunk = data.draw(st.integers(1, num_tokens))
        order = rng.permutation(num_tokens)
        for begin in range(0, num_tokens, chunk):
            own = order[begin : begin + chunk]
            got = run_experts(backend(isa, threads), layer, x[own], ids[own], weights[own])
            assert_bitwise(got, want[own], f"tokens {own.tolist()}, {threads} threads")


def test_experts_that_nobody_asks_for_are_not_read() -> None:
    """Their weights are NaN, and so is what rows of zeros times them would give."""
    rng, b = np.random.default_rng(1), backend(support.ISAS[-1])
    layer = make_layer(b, rng, "float32", 4, 32, 16)
    for expert in (0, 3):
        gate = tensor(np.full((16, 32), np.nan, np.float32))
        layer.gate_up[expert] = b.prepare_linear([(gate, None), (gate, None)], kind="act_mul")
    x, weights = support.activations(rng, 3, 32), np.zeros((3, 2), np.float32)
    got = run_experts(b, layer, x, np.array([[1, 2], [2, 1], [1, 2]], np.int32), weights)
    assert_bitwise(got, np.zeros_like(got))


def test_experts_refuses_what_does_not_fit() -> None:
    rng, b = np.random.default_rng(1), backend(support.ISAS[-1])
    layer = make_layer(b, rng, "float32", 2, 8, 4)
    x, weights = support.activations(rng, 1, 8), np.ones((1, 1), np.float32)
    with pytest.raises(InfinilmError, match="ids: expected 0 to 1, got 2 for token 0"):
        run_experts(b, layer, x, np.array([[2]], np.int32), weights)
    with pytest.raises(InfinilmError, match="shared_gate: there is nothing shared"):
        run_experts(b, layer, x, np.array([[1]], np.int32), weights, shared_gate=np.ones((1, 1), np.float32))
    other = make_layer(b, rng, "float32", 1, 8, 6)
    layer.gate_up[1], layer.down[1] = other.gate_up[0], other.down[0]
    with pytest.raises(InfinilmError, match="expert 1 has another shape than expert 0"):
        run_experts(b, layer, x, np.array([[1]], np.int32), weights)
