"""Linears whose weights are int8 or int4: against float64 sums of the same integers, and bit for bit in any batch."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from reference import ops as oracle
from reference.ops import F64, Array, load

import infinilm
from ops import support
from ops.support import Rows, backend, each_dtype, each_isa, linear_cases, rows

each_quantization = pytest.mark.parametrize("quantization", ("int8", "int4"))
widths = st.sampled_from([n for n in support.SIZES if n <= 500])
GROUP = 32
SMALLEST = np.float32(2.0**-119)  # a scale below it is taken as zero


def groups(x: Array, size: int = GROUP) -> Array:
    """[n, K] as [n, groups, size], filled with zeros."""
    x = np.pad(x, ((0, 0), (0, -x.shape[1] % size)))
    return x.reshape(len(x), -1, size)


def quantised_x(x: Array, quantization: str | None = None) -> F64:
    """Activations as the kernels see them: int8 with a scale for each 32 of a token; for each 64 beside int8
    weights, which have one scale per output.
    """
    parts = groups(x.astype(np.float32), 64 if quantization == "int8" else GROUP)
    most = np.abs(parts).max(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        inverse = np.where(most > SMALLEST, np.float32(127) / most, np.float32(0)).astype(np.float32)
    q = np.rint(parts * inverse)
    assert np.abs(q).max(initial=0) <= 127
    scale = most / np.float32(127)
    return (q.astype(np.float64) * scale).reshape(len(x), -1)[:, : x.shape[1]]


def int8_weights(w: Array) -> Array:
    """One scale per output, float32."""
    scale = np.abs(w).max(axis=1, keepdims=True) / np.float32(127)
    with np.errstate(divide="ignore"):
        inverse = np.where(scale > SMALLEST, np.float32(1) / scale, np.float32(0)).astype(np.float32)
    return np.clip(np.rint(w * inverse), -127, 127).astype(np.int8).astype(np.float32) * scale


def bfloat16(x: Array) -> Array:
    return load(oracle.store(x, "bfloat16"), "bfloat16").astype(np.float32)


def int4_weights(w: Array) -> Array:
    """In groups of 32, the scale out of 16 that leaves the least squared error; it is bfloat16."""
    parts = groups(w)
    largest = np.take_along_axis(parts, np.abs(parts).argmax(axis=-1)[..., None], axis=-1)
    best = np.zeros_like(parts)
    least = np.full(largest.shape, np.inf)
    for candidate in range(16):
        scale = bfloat16(largest / np.float32(-8.5 + 0.125 * candidate))
        with np.errstate(divide="ignore"):
            inverse = np.where(np.abs(scale) > SMALLEST, np.float32(1) / scale, np.float32(0)).astype(np.float32)
        rounded = np.rint(np.clip(parts * inverse, -8, 7)).astype(np.float32) * scale
        error = ((parts.astype(np.float64) - rounded) ** 2).sum(axis=-1, keepdims=True)
        best = np.where(error < least, rounded, best)
        least = np.minimum(error, least)
    return best.reshape(len(w), -1)[:, : w.shape[1]]


def stored_rows(b: Any, weight: Array, dtype: str, quantization: str) -> Array:
    """What the packed weight holds: the rows that `embedding` finds."""
    out = np.full(weight.shape, np.nan, np.float32)
    ids = np.arange(len(weight), dtype=np.int32)
    b.embedding(support.tensor(ids), support.tensor(weight, dtype), support.tensor(out), quantization=quantization)
    return out


@each_isa
@each_dtype
@given(n=widths, k=widths, seed=support.seeds)
def test_int8_weights_are_the_nearest(isa: str, dtype: str, n: int, k: int, seed: int) -> None:
    weight = support.stored(np.random.default_rng(seed), dtype, n, k)
    got = stored_rows(backend(isa, 2), weight, dtype, "int8")
    support.assert_bitwise(got, int8_weights(load(weight, dtype).astype(np.float32)))


@each_isa
@each_dtype
@given(n=widths, k=widths, seed=support.seeds)
def test_int4_weights_have_the_best_scale(isa: str, dtype: str, n: int, k: int, seed: int) -> None:
    """As good as the search in float64; equally good ones may differ, as errors are added up in float32."""
    weight = support.stored(np.random.default_rng(seed), dtype, n, k)
    w = load(weight, dtype).astype(np.float32)
    got = stored_rows(backend(isa, 2), weight, dtype, "int4")
    error, least = (((groups(w) - groups(x)).astype(np.float64) ** 2).sum(axis=-1) for x in (got, int4_weights(w)))
    assert np.all(error <= least * 1.00001 + 1e-12)


@each_isa
@each_quantization
@given(data=st.data(), case=rows(), with_residual=st.booleans(), threads=st.sampled_from(support.THREADS))
def test_matches_the_sums_of_the_same_integers(
    isa: str, quantization: str, data: st.DataObject, case: Rows, with_residual: bool, threads: int
) -> None:
    """Both kinds, parts of ragged sizes, biases, odd strides: float32 rounding is all that is between them."""
    dtype = data.draw(st.sampled_from(support.FLOATING))
    layer = data.draw(linear_cases(dtype, st.just(case.size), widths))
    b, rng = backend(isa, threads), case.rng()
    x = case.x(rng)
    residual = support.activations(rng, case.num_tokens, layer.out_features) if with_residual else None
    pairs = [(support.tensor(w, dtype), support.tensor(bias, dtype)) for w, bias in layer.parts]
    prepared = b.prepare_linear(pairs, kind=layer.kind, quantization=quantization)
    got = support.run_linear(
        b, prepared, x, layer.out_features, residual, case.pad_in, case.pad_out, activation=layer.activation
    )
    for i, (w, bias) in enumerate(layer.parts):  # from here on the weights are what was packed
        layer.parts[i] = (stored_rows(b, np.ascontiguousarray(w), dtype, quantization), support_bias(bias, dtype))
    layer.dtype = "float32"
    added = None if residual is None else residual.astype(np.float64)
    want, scale = layer.expected(quantised_x(x, quantization), added)
    support.assert_close(got, want, length=case.size, scale=scale)


def support_bias(bias: Array | None, dtype: str) -> Array | None:
    return None if bias is None else load(bias, dtype).astype(np.float32)


@each_isa
@each_quantization
@given(
    seed=support.seeds,
    features=st.sampled_from(support.SIZES),
    out=widths,
    kind=st.sampled_from(("plain", "act_mul")),
)
def test_a_row_does_not_depend_on_its_batch_or_the_threads(
    isa: str, quantization: str, seed: int, features: int, out: int, kind: str
) -> None:
    layer = support.LinearCase(features, (out, out), (True, False), kind, "bfloat16", 1, seed)
    x = support.activations(np.random.default_rng(seed), 70, features, outliers=True)
    pairs = [(support.tensor(w, "bfloat16"), support.tensor(bias, "bfloat16")) for w, bias in layer.parts]
    want = None
    for threads in support.THREADS:
        b = backend(isa, threads)
        weight = b.prepare_linear(pairs, kind=kind, quantization=quantization)
        if want is None:
            want = support.run_linear(b, weight, x, layer.out_features)
        for batch in (1, 3, 4, 5, 13, 40, 70):
            for begin in (0, 35):
                chosen = slice(begin, min(begin + batch, 70))
                got = support.run_linear(b, weight, x[chosen], layer.out_features)
                support.assert_bitwise(got, want[chosen], f"rows {chosen}, {threads} threads")


def test_tiles_have_the_bits_of_vectors() -> None:
    """Integers in matrix tiles, from the smallest number of tokens and in every remainder of groups of k."""
    pairs = [("emulated_amx", "emulated512"), ("amx", "avx512_vnni")]
    runnable = [pair for pair in pairs if {*pair} <= {*support.ISAS}]
    if not runnable:
        pytest.skip("no matrix tiles here, nor their emulation")
    rng = np.random.default_rng(5)
    for pair, quantization, k in itertools.product(runnable, ("int8", "int4"), (32, 96, 130, 257, 600)):
        layer = support.LinearCase(k, (61,), (True,), "plain", "bfloat16", 1, k)
        x = support.activations(rng, 40, k, outliers=True)
        weights = [(support.tensor(w, "bfloat16"), support.tensor(bias, "bfloat16")) for w, bias in layer.parts]
        for num_tokens in (1, 6, 7, 16, 17, 40):
            tiles, vectors = (
                support.run_linear(b, b.prepare_linear(weights, quantization=quantization), x[:num_tokens], 61)
                for b in map(backend, pair)
            )
            support.assert_bitwise(tiles, vectors, f"{pair}, {quantization}, {num_tokens} tokens of {k}")


@each_isa
@each_quantization
def test_extreme_rows(isa: str, quantization: str) -> None:
    """Zeros give zero; the largest integers do not overflow; a NaN or an infinity makes its row NaN and no other."""
    b = backend(isa, 2)
    weight = np.ones((48, 96), np.float32)
    weight[1::2] = -1
    prepared = b.prepare_linear([(support.tensor(weight), None)], quantization=quantization)
    x = np.ones((5, 96), np.float32)
    x[1] = 0
    x[2, 50], x[3, 95] = np.nan, np.inf
    x[4, ::2] = -1
    got = support.run_linear(b, prepared, x, 48)
    held = stored_rows(b, weight, "float32", quantization)
    np.testing.assert_allclose(got[0], held.sum(axis=1), rtol=1e-6)
    assert not got[1].any()
    assert np.isnan(got[2]).all()
    assert np.isnan(got[3]).all()
    np.testing.assert_allclose(got[4], 0, atol=1e-5)


def test_unknown_quantization() -> None:
    weight = support.tensor(np.ones((4, 8), np.float32))
    with pytest.raises(Exception, match="'int5' is not one of none, int8, int4, fp8"):
        backend("generic").prepare_linear([(weight, None)], quantization="int5")


@each_isa
def test_fp8_is_for_gpus(isa: str) -> None:
    weight = support.tensor(np.ones((4, 8), np.float32))
    with pytest.raises(infinilm.ConfigError, match="'fp8': CPUs have int8 and int4"):
        backend(isa).prepare_linear([(weight, None)], quantization="fp8")
