"""Ops that work row by row: embedding, gather_rows, rms_norm, add_rms_norm, act_mul, clip, soft_cap; and sum_parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from reference import ops as oracle
from reference.ops import Array, load, store

from infinilm.errors import InfinilmError
from ops import support
from ops.support import (
    Output,
    Rows,
    assert_bitwise,
    assert_close,
    backend,
    call,
    each_dtype,
    each_isa,
    each_threads,
    every_backend,
    framed,
    rows,
)

EPS = (1e-5, 1e-6, 0.0)
multipliers = st.sampled_from((1.0, 12.0, 0.22))


@every_backend
@given(case=rows(), vocab_size=support.sizes, multiplier=multipliers)
def test_embedding(isa: str, dtype: str, threads: int, case: Rows, vocab_size: int, multiplier: float) -> None:
    """Rows of the table, widened exactly, times the multiplier."""
    rng = case.rng()
    table = support.stored(rng, dtype, vocab_size, case.size)
    ids = rng.integers(0, vocab_size, case.num_tokens).astype(np.int32)
    ids[-1] = vocab_size - 1
    out = Output((case.num_tokens, case.size), pad=case.pad_out)
    operands = framed(ids), (framed(table), dtype), out
    call(backend(isa, threads), "embedding", *operands, None, "none", multiplier)
    want = oracle.embedding(ids, load(table, dtype)).astype(np.float32) * np.float32(multiplier)
    assert_bitwise(out.check(), want)


@every_backend
@given(case=rows(), vocab_size=support.sizes, data=st.data())
def test_embedding_of_a_part(
    isa: str, dtype: str, threads: int, case: Rows, vocab_size: int, data: st.DataObject
) -> None:
    """Over the parts of a vocabulary, some of them empty, exactly one gives the row of an id; the others give zeros."""
    rng = case.rng()
    table = support.stored(rng, dtype, vocab_size, case.size)
    ids = rng.integers(0, vocab_size, case.num_tokens).astype(np.int32)
    cut = data.draw(st.integers(0, vocab_size))
    for begin, end in ((0, cut), (cut, vocab_size)):
        out = Output((case.num_tokens, case.size), pad=case.pad_out)
        call(backend(isa, threads), "embedding", framed(ids), (framed(table[begin:end]), dtype), out, begin)
        here = ((ids >= begin) & (ids < end))[:, None]
        expected = np.where(here, oracle.embedding(ids, load(table, dtype)), 0)
        assert_bitwise(out.check(), expected.astype(np.float32))


@every_backend
@given(
    case=rows(num_tokens=support.sizes),
    multiplier=multipliers,
    scale=multipliers,
    normed=st.booleans(),
    in_place=st.booleans(),
)
def test_add_rms_norm_of_a_multiple(
    isa: str, dtype: str, threads: int, case: Rows, multiplier: float, scale: float, normed: bool, in_place: bool
) -> None:
    """The sum is exact to the bit, and normed as `rms_norm` does it; without a weight, `out` is not written."""
    rng, b = case.rng(), backend(isa, threads)
    x, residual, weight = case.x(rng), case.x(rng), support.stored(rng, dtype, case.size)
    out = Output(x.shape, pad=case.pad_out, values=x)
    total = Output(x.shape, pad=case.pad_in[::-1], values=residual)
    weights = (framed(weight), dtype) if normed else None
    call(b, "add_rms_norm", out if in_place else framed(x, case.pad_in), total, weights, out, 1e-5, multiplier, scale)
    assert_bitwise(total.check(), (residual + x * np.float32(multiplier)) * np.float32(scale), "residual")
    assert_bitwise(out.check(), norm(b, total.check(), weight, dtype, 1e-5, None) if normed else x)


@each_isa
@each_threads
@given(case=rows(), num_rows=support.sizes)
def test_gather_rows(isa: str, threads: int, case: Rows, num_rows: int) -> None:
    """Rows of x in any order, repeats allowed, bit for bit (a NaN payload included)."""
    rng = case.rng()
    x = case.x(rng)
    x[0, 0] = np.nan
    chosen = rng.integers(0, case.num_tokens, num_rows).astype(np.int32)
    out = Output((num_rows, case.size), pad=case.pad_out)
    call(backend(isa, threads), "gather_rows", framed(x, case.pad_in), framed(chosen), out)
    assert_bitwise(out.check(), oracle.gather_rows(x, chosen))


def norm(b: Any, x: Array, weight: Array, dtype: str, eps: float, case: Rows | None, in_place: bool = False) -> Array:
    pad_in, pad_out = (case.pad_in, case.pad_out) if case else ((0, 0), (0, 0))
    out = Output(x.shape, pad=pad_out, values=x if in_place else None)
    call(b, "rms_norm", out if in_place else framed(x, pad_in), (framed(weight), dtype), out, eps)
    return out.check()


def add_norm(
    b: Any,
    x: Array,
    residual: Array,
    weight: Array,
    dtype: str,
    eps: float,
    case: Rows | None,
    in_place: bool = False,
) -> tuple[Array, Array]:
    pad_in, pad_out = (case.pad_in, case.pad_out) if case else ((0, 0), (0, 0))
    out = Output(x.shape, pad=pad_out, values=x if in_place else None)
    total = Output(x.shape, pad=pad_in[::-1], values=residual)
    call(b, "add_rms_norm", out if in_place else framed(x, pad_in), total, (framed(weight), dtype), out, eps)
    return total.check(), out.check()


@every_backend
@given(case=rows(num_tokens=support.sizes), eps=st.sampled_from(EPS), in_place=st.booleans())
def test_rms_norm(isa: str, dtype: str, threads: int, case: Rows, eps: float, in_place: bool) -> None:
    """Against the oracle; the output may be x itself."""
    rng = case.rng()
    x, weight = case.x(rng), support.stored(rng, dtype, case.size)
    got = norm(backend(isa, threads), x, weight, dtype, eps, case, in_place)
    # eps arrives as float32.
    want = oracle.rms_norm(x.astype(np.float64), load(weight, dtype), float(np.float32(eps)))
    assert_close(got, want, length=case.size)


@every_backend
@given(case=rows(num_tokens=support.sizes), eps=st.sampled_from(EPS), in_place=st.booleans())
def test_add_rms_norm(isa: str, dtype: str, threads: int, case: Rows, eps: float, in_place: bool) -> None:
    """The residual is one float32 addition, exact to the bit; the norm is that of the stored sum."""
    rng = case.rng()
    x, residual, weight = case.x(rng), case.x(rng), support.stored(rng, dtype, case.size)
    total, got = add_norm(backend(isa, threads), x, residual, weight, dtype, eps, case, in_place)
    assert_bitwise(total, residual + x, "residual")
    want = oracle.rms_norm(total.astype(np.float64), load(weight, dtype), float(np.float32(eps)))
    assert_close(got, want, length=case.size)


@each_isa
@each_threads
@given(case=rows(num_tokens=support.sizes), parts=st.sampled_from((1, 2, 4)))
def test_rms_norm_of_a_part_of_a_row(isa: str, threads: int, case: Rows, parts: int) -> None:
    """Mean squares of parts of rows, of equal sizes, add up to what norms each part as it is normed in the whole."""
    rng, b = case.rng(), backend(isa, threads)
    x = np.hstack([case.x(rng) for _ in range(parts)])
    weight = support.stored(rng, "float32", x.shape[1])
    want = oracle.rms_norm(x.astype(np.float64), weight.astype(np.float64), float(np.float32(1e-5)))
    means = np.zeros((len(x), 1), np.float32)
    for own in np.split(x, parts, axis=1):
        out = Output(means.shape)
        call(b, "mean_square", framed(own, case.pad_in), out, 1 / parts)
        means += out.check()
    for i, own in enumerate(np.split(x, parts, axis=1)):
        columns = slice(i * case.size, (i + 1) * case.size)
        out = Output(own.shape, pad=case.pad_out)
        call(b, "rms_norm", framed(own, case.pad_in), framed(weight[columns].copy()), out, 1e-5, framed(means))
        assert_close(out.check(), want[:, columns], length=x.shape[1])


@every_backend
@given(case=rows(num_tokens=support.sizes), eps=st.sampled_from((1e-5, 1e-3)), in_place=st.booleans())
def test_layer_norm(isa: str, dtype: str, threads: int, case: Rows, eps: float, in_place: bool) -> None:
    """A weight of two rows is that of a LayerNorm and its bias, alone and behind an addition."""
    rng, b = case.rng(), backend(isa, threads)
    x, residual, weight = case.x(rng) + np.float32(2), case.x(rng), support.stored(rng, dtype, 2, case.size)
    both = load(weight, dtype)

    def check(got: Array, of: Array) -> None:
        wide = of.astype(np.float64)
        deviation = np.sqrt(np.var(wide, axis=-1, keepdims=True) + eps)
        cancelled = np.abs(wide).max(axis=-1, keepdims=True) / deviation * np.abs(both[0]) + np.abs(both[1])
        assert_close(got, oracle.layer_norm(wide, both, float(np.float32(eps))), length=case.size, scale=cancelled)

    check(norm(b, x, weight, dtype, eps, case, in_place), x)
    total, got = add_norm(b, x, residual, weight, dtype, eps, case, in_place)
    assert_bitwise(total, residual + x, "residual")
    check(got, total)


@every_backend
@given(case=rows(num_tokens=support.sizes), num_groups=st.sampled_from((1, 2, 3, 7)), in_place=st.booleans())
def test_layer_norm_of_groups(isa: str, dtype: str, threads: int, case: Rows, num_groups: int, in_place: bool) -> None:
    """Each group of a row has the bits of a row of its own, with its part of the weight."""
    rng, b = case.rng(), backend(isa, threads)
    x = np.hstack([case.x(rng) for _ in range(num_groups)])
    weight = support.stored(rng, dtype, 2, x.shape[1])
    out = Output(x.shape, pad=case.pad_out, values=x if in_place else None)
    of = out if in_place else framed(x, case.pad_in)
    call(b, "rms_norm", of, (framed(weight), dtype), out, 1e-5, None, num_groups)
    for i in range(num_groups):
        own = slice(i * case.size, (i + 1) * case.size)
        want = norm(b, x[:, own].copy(), weight[:, own].copy(), dtype, 1e-5, None)
        assert_bitwise(out.check()[:, own], want, f"group {i}")


@each_isa
@each_dtype
@given(size=support.sizes, seed=support.seeds, layer=st.booleans())
def test_norm_rows_do_not_depend_on_each_other(isa: str, dtype: str, size: int, seed: int, layer: bool) -> None:
    """A row alone, in any batch, by any number of threads, in place, and fused with the addition: the same
    bits.
    """
    rng = np.random.default_rng(seed)
    x, residual = support.activations(rng, 40, size), support.activations(rng, 40, size)
    weight = support.stored(rng, dtype, 2, size) if layer else support.stored(rng, dtype, size)
    total, want = add_norm(backend(isa, 1), x, residual, weight, dtype, 1e-6, None)
    for threads in support.THREADS:
        b = backend(isa, threads)
        assert_bitwise(norm(b, total, weight, dtype, 1e-6, None), want, "rms_norm of the sum")
        for begin, end in ((0, 1), (1, 3), (3, 20), (20, 40), (39, 40)):
            part = slice(begin, end)
            sums, got = add_norm(b, x[part], residual[part], weight, dtype, 1e-6, None, in_place=begin > 1)
            assert_bitwise(sums, total[part], f"residual of rows {begin}..{end}, {threads} threads")
            assert_bitwise(got, want[part], f"rows {begin}..{end}, {threads} threads")


@each_isa
def test_norm_of_zero_and_of_large_values(isa: str) -> None:
    """A row of zeros stays zero (eps is inside the root); 1e18 does not overflow: its square, 1e36, is in
    range.
    """
    b = backend(isa, 1)
    weight = np.ones(33, np.float32)
    assert not norm(b, np.zeros((3, 33), np.float32), weight, "float32", 1e-6, None).any()
    x = np.full((2, 33), 1e18, np.float32)
    got = norm(b, x, weight, "float32", 1e-6, None)
    assert_close(got, oracle.rms_norm(x.astype(np.float64), weight.astype(np.float64), 1e-6), length=33)


@each_isa
@each_threads
@pytest.mark.parametrize("activation", oracle.ACTIVATIONS)
@given(case=rows(num_tokens=support.sizes), spread=st.sampled_from((1.0, 30.0, 300.0)))
def test_act_mul(isa: str, activation: str, threads: int, case: Rows, spread: float) -> None:
    """Against the oracle, gates of both signs far beyond the range of exp included."""
    rng = case.rng()
    gate_up = support.activations(rng, case.num_tokens, 2 * case.size)
    gate_up[:, : case.size] *= np.float32(spread)
    out = Output((case.num_tokens, case.size), pad=case.pad_out)
    call(backend(isa, threads), "act_mul", framed(gate_up, case.pad_in), out, activation)
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=1)
    # Where exp(-gate) leaves the range of float32, |gate| 2^-125 may be lost; tolerance(1) is a bit under
    # 2^-20.
    scale = np.abs(gate * up) * 2.0**-104
    want = oracle.act_mul(gate_up.astype(np.float64), activation)
    if activation == "gelu_tanh":  # an error in the exponent of e^-2u is one of the result, of |2u| times the size
        exponent = 1.6 * np.abs(gate) * (1 + 0.045 * gate**2)
        scale += np.abs(want) * (1 + exponent)
    if activation == "quick_gelu":
        scale += np.abs(want) * (1 + 1.7 * np.abs(gate))
    if activation == "gelu":  # the share of the normal distribution below gate is a sum with 1/2
        scale += np.abs(gate * up)
    assert_close(out.check(), want, length=1, scale=scale)


@each_isa
@each_threads
@given(case=rows(num_tokens=support.sizes), in_place=st.booleans())
def test_act_mul_of_a_gate_alone(isa: str, threads: int, case: Rows, in_place: bool) -> None:
    """As with an up of ones, to the bit; the output may be the gate itself."""
    gate = case.x(case.rng())
    whole = Output(gate.shape)
    call(backend(isa, 1), "act_mul", framed(np.hstack([gate, np.ones_like(gate)])), whole, "gelu_tanh")
    out = Output(gate.shape, pad=case.pad_out, values=gate)
    call(backend(isa, threads), "act_mul", out if in_place else framed(gate, case.pad_in), out, "gelu_tanh")
    assert_bitwise(out.check(), whole.check())


@each_isa
@each_threads
@given(case=rows(num_tokens=support.sizes), in_place=st.booleans())
def test_act_mul_of_an_up_that_lies_elsewhere(isa: str, threads: int, case: Rows, in_place: bool) -> None:
    """As of one behind the gate, to the bit; the output may be the gate itself."""
    rng = case.rng()
    gate, up = case.x(rng), case.x(rng)
    whole = Output(gate.shape)
    call(backend(isa, 1), "act_mul", framed(np.hstack([gate, up])), whole, "gelu_tanh")
    out = Output(gate.shape, pad=case.pad_out, values=gate)
    given_gate = out if in_place else framed(gate, case.pad_in)
    call(backend(isa, threads), "act_mul", given_gate, out, "gelu_tanh", framed(up, case.pad_in[::-1]))
    assert_bitwise(out.check(), whole.check())


@each_isa
@each_threads
@given(case=rows(num_tokens=support.sizes), spread=st.sampled_from((1.0, 6.0, 300.0)))
def test_clamped_silu(isa: str, threads: int, case: Rows, spread: float) -> None:
    """Gates and ups on both sides of the limit."""
    gate_up = support.activations(case.rng(), case.num_tokens, 2 * case.size) * np.float32(spread)
    out = Output((case.num_tokens, case.size), pad=case.pad_out)
    call(backend(isa, threads), "act_mul", framed(gate_up, case.pad_in), out, "clamped_silu", None, 0.0, 0.0, 0.75)
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=1)
    want = oracle.join("clamped_silu", gate, up, 0.75)
    assert_close(out.check(), want, length=1, scale=np.abs(want) + np.abs(gate * up) * 2.0**-104)


GATES = ("sigmoid", "softplus")


@each_isa
@each_threads
@given(case=rows(num_tokens=support.sizes), group=st.sampled_from((2, 5, 16, 600)), activation=st.sampled_from(GATES))
def test_a_gate_of_each_head(isa: str, threads: int, case: Rows, group: int, activation: str) -> None:
    """One element of a gate for so many columns has the bits of as many equal ones; the result may be in up's place."""
    rng = case.rng()
    heads = 1 + case.size % 3
    gate, up = (support.activations(rng, case.num_tokens, n) for n in (heads, heads * group))
    whole, out = Output(up.shape), Output(up.shape, pad=case.pad_out, values=up)
    call(backend(isa, 1), "act_mul", framed(np.repeat(gate, group, axis=1)), whole, activation, framed(up))
    call(backend(isa, threads), "act_mul", framed(gate, case.pad_in), out, activation, out)
    assert_bitwise(out.check(), whole.check())
    want = oracle.join(activation, *(x.astype(np.float64) for x in (np.repeat(gate, group, axis=1), up)))
    assert_close(whole.check(), want, length=1, scale=np.abs(want) + 2.0**-104)


@each_isa
@each_threads
@given(case=rows(num_tokens=support.sizes), spread=st.sampled_from((1.0, 6.0, 300.0)))
def test_clamped_swiglu(isa: str, threads: int, case: Rows, spread: float) -> None:
    """Against the oracle, within the limits of gate and up and beyond; a NaN is not clamped away."""
    gate_up = support.activations(case.rng(), case.num_tokens, 2 * case.size) * np.float32(spread)
    gate_up[-1, [0, -1]] = np.nan
    out = Output((case.num_tokens, case.size), pad=case.pad_out)
    call(backend(isa, threads), "act_mul", framed(gate_up, case.pad_in), out, "clamped_swiglu")
    got, want = out.check(), oracle.act_mul(gate_up.astype(np.float64), "clamped_swiglu")
    assert np.isnan(got[-1, [0, -1]]).all()
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=1)
    scale = np.abs(np.minimum(gate, 7)) * (1 + np.abs(np.clip(up, -7, 7))) * 2.0**-104
    known = np.isfinite(want)
    assert_close(got[known], want[known], length=1, scale=scale[known] + np.abs(want[known]) * (1 + 2 * 7))


@each_isa
@each_threads
@given(
    case=rows(num_tokens=support.sizes),
    spread=st.sampled_from((1e-3, 1.0, 30.0)),
    alphas=st.tuples(st.floats(0, 4, width=32), st.floats(0.5, 4, width=32)),
    alone=st.booleans(),
)
def test_xielu(isa: str, threads: int, case: Rows, spread: float, alphas: tuple[float, float], alone: bool) -> None:
    """Against the oracle, near 0 too, of a gate alone and times up; a NaN stays one."""
    rng = case.rng()
    gate, up = case.x(rng) * np.float32(spread), case.x(rng)
    gate[-1, -1] = np.nan
    up = np.ones_like(up) if alone else up
    given_gate = gate if alone else np.hstack([gate, up])
    out = Output(gate.shape, pad=case.pad_out)
    call(backend(isa, threads), "act_mul", framed(given_gate, case.pad_in), out, "xielu", None, *alphas)
    got, want = out.check(), oracle.xielu(gate.astype(np.float64), *alphas) * up
    assert np.isnan(got[-1, -1])
    known = np.isfinite(want)
    wide = np.abs(gate.astype(np.float64))
    scale = np.abs(up) * (wide + alphas[0] * wide**2 + alphas[1] * np.minimum(wide**2, wide + 1))
    assert_close(got[known], want[known], length=1, scale=scale[known] + 2.0**-104)


@each_isa
@pytest.mark.parametrize("activation", oracle.ACTIVATIONS)
def test_act_mul_extremes(isa: str, activation: str) -> None:
    """Very negative gates give zero, very positive ones themselves or their squares, never NaN."""
    gate = np.array([-3.4e38, -1e4, -200, -104, -88.8, -0.0, 0.0, 88.8, 104, 200, 1e4, 3.4e38], np.float32)
    out = Output((1, gate.size))
    call(backend(isa, 1), "act_mul", framed(np.concatenate([gate, np.ones_like(gate)])[None]), out, activation)
    got = out.check()[0]
    assert not np.isnan(got).any()
    with np.errstate(over="ignore"):
        assert_bitwise(got[7:], np.square(gate[7:]) if activation == "relu2" else gate[7:])
    assert np.all(np.abs(got[:5]) <= 1e-35)
    assert np.all(got[5:7] == 0)


@each_isa
@given(size=support.sizes, seed=support.seeds)
def test_act_mul_rows_do_not_depend_on_each_other(isa: str, size: int, seed: int) -> None:
    """A row alone equals the row in a batch, by any number of threads."""
    gate_up = support.activations(np.random.default_rng(seed), 19, 2 * size)
    outs = []
    for threads, step in ((1, 19), (1, 1), (2, 19), (3, 19), (3, 2)):
        parts = []
        for begin in range(0, 19, step):
            out = Output((len(gate_up[begin : begin + step]), size))
            call(backend(isa, threads), "act_mul", framed(gate_up[begin : begin + step]), out)
            parts.append(out.check())
        outs.append(np.concatenate(parts))
    for got in outs[1:]:
        assert_bitwise(got, outs[0])


# Not -0, since which zero is the larger of two is nothing that anyone may rely on.
clip_bounds = st.floats(-3, 3, width=32).map(lambda bound: bound + 0.0)


@each_isa
@each_threads
@given(case=rows(num_tokens=support.sizes), bounds=st.tuples(clip_bounds, clip_bounds), in_place=st.booleans())
def test_clip(isa: str, threads: int, case: Rows, bounds: tuple[float, float], in_place: bool) -> None:
    """Exact to the bit; the upper bound counts where the lower one is larger, and NaN stays."""
    x = case.x(case.rng())
    x.flat[:3] = [np.inf, -np.inf, np.nan][: x.size]
    out = Output(x.shape, pad=case.pad_out, values=x)
    call(backend(isa, threads), "clip", out if in_place else framed(x, case.pad_in), out, *bounds)
    assert_bitwise(out.check(), oracle.clip(x.astype(np.float64), *bounds).astype(np.float32))


@each_isa
@each_threads
@given(case=rows(num_tokens=support.sizes), cap=st.sampled_from((0.5, 30.0, 1e4)))
def test_soft_cap(isa: str, threads: int, case: Rows, cap: float) -> None:
    """cap * tanh(x / cap) in place, to a small part of the cap; infinities become the cap, NaN stays."""
    x = case.x(case.rng()) * np.float32(3 * cap)
    x.flat[:3] = [np.inf, -np.inf, np.nan][: x.size]
    out = Output(x.shape, pad=case.pad_out, values=x)
    call(backend(isa, threads), "soft_cap", out, cap)
    got, want = out.check(), oracle.soft_cap(x.astype(np.float64), float(np.float32(cap)))
    assert np.array_equal(np.isnan(got), np.isnan(want))
    known = ~np.isnan(want)
    assert_close(got[known], want[known], length=1, scale=np.full(want[known].shape, 2 * cap))


@pytest.mark.parametrize("cap", [0.0, -1.0, float("inf"), float("nan")])
def test_a_soft_cap_is_positive(cap: float) -> None:
    with pytest.raises(InfinilmError, match=r"soft_cap: cap must be positive and finite, got"):
        call(backend("generic", 1), "soft_cap", Output((2, 3)), cap)


@every_backend
@given(num_parts=st.integers(1, 9), vectors=support.sizes, seed=support.seeds)
def test_sum_parts(isa: str, dtype: str, threads: int, num_parts: int, vectors: int, seed: int) -> None:
    """float32 additions in the order of the parts, rounded once: exact to the bit."""
    parts = support.stored(np.random.default_rng(seed), dtype, num_parts, 8 * vectors)
    out = Output((8 * vectors,), dtype=parts.dtype)
    call(backend(isa, threads), "sum_parts", (framed(parts), dtype), support.tensor(out.view, dtype))
    exact = load(parts, dtype)
    total = exact[0].astype(np.float32)
    for part in exact[1:]:
        total = total + part.astype(np.float32)
    got = out.check()
    assert_bitwise(got, store(total, dtype))
    size = np.abs(exact).sum(0)
    assert_close(load(got, dtype), oracle.sum_parts(exact), dtype=dtype, length=num_parts, scale=size)


@each_isa
@each_dtype
def test_no_rows(isa: str, dtype: str) -> None:
    """Calls with no tokens do nothing."""
    b = backend(isa, 2)
    nothing = np.zeros((0, 7), np.float32)
    weight = (support.stored(np.random.default_rng(0), dtype, 7), dtype)
    none = np.zeros(0, np.int32)
    call(b, "rms_norm", nothing, weight, Output((0, 7)), 1e-6)
    call(b, "add_rms_norm", nothing, Output((0, 7)), weight, Output((0, 7)), 1e-6)
    call(b, "act_mul", np.zeros((0, 14), np.float32), Output((0, 7)))
    call(b, "gather_rows", np.zeros((3, 7), np.float32), none, Output((0, 7)))
    call(b, "embedding", none, (support.stored(np.random.default_rng(0), dtype, 3, 7), dtype), Output((0, 7)))
