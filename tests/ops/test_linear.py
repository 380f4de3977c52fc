"""linear and prepare_linear: against the oracle, and bit for bit whatever shares the call."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, strategies as st
from reference.ops import ACTIVATIONS, Array, load, store

from ops import support
from ops.support import Rows, backend, batches, each_dtype, each_isa, every_backend, linear_cases, rows

widths = st.sampled_from([n for n in support.SIZES if n <= 500])


@every_backend
@given(data=st.data(), case=rows(), with_residual=st.booleans(), in_place=st.booleans())
def test_matches_the_oracle(
    isa: str, dtype: str, threads: int, data: st.DataObject, case: Rows, with_residual: bool, in_place: bool
) -> None:
    """Both kinds, one to three parts, biases on some, odd strides of everything and odd addresses, residual
    apart and in place.
    """
    layer = data.draw(linear_cases(dtype, st.just(case.size), widths))
    b, rng = backend(isa, threads), case.rng()
    x = case.x(rng)
    residual = support.activations(rng, case.num_tokens, layer.out_features) if with_residual else None
    got = support.run_linear(
        b,
        layer.prepare(b),
        x,
        layer.out_features,
        residual,
        case.pad_in,
        case.pad_out,
        with_residual and in_place,
        layer.activation,
    )
    want, scale = layer.expected(x.astype(np.float64), None if residual is None else residual.astype(np.float64))
    support.assert_close(got, want, length=case.size, scale=scale)


@every_backend
@given(data=st.data(), case=rows(), activation=st.sampled_from(tuple(ACTIVATIONS)))
def test_an_activation_behind_it(
    isa: str, dtype: str, threads: int, data: st.DataObject, case: Rows, activation: str
) -> None:
    """linear_act gives the bits of linear, then act_mul of its result alone."""
    layer = data.draw(linear_cases(dtype, st.just(case.size), widths).filter(lambda layer: layer.kind == "plain"))
    b, x = backend(isa, threads), case.x(case.rng())
    weight = layer.prepare(b)
    want = support.Output((case.num_tokens, layer.out_features))
    sums = support.run_linear(b, weight, x, layer.out_features)
    support.call(b, "act_mul", support.framed(sums), want, activation)
    got = support.Output((case.num_tokens, layer.out_features), pad=case.pad_out)
    support.call(b, "linear_act", support.framed(x, case.pad_in), weight, got, activation)
    support.assert_bitwise(got.check(), want.check())


@each_isa
@each_dtype
@given(
    layer_seed=st.integers(0, 2**31),
    features=st.sampled_from(support.SIZES),
    outs=st.lists(widths, min_size=1, max_size=3),
    kind=st.sampled_from(("plain", "act_mul")),
    compute=st.sampled_from(("float32", "bfloat16")),
    with_residual=st.booleans(),
)
def test_a_row_does_not_depend_on_its_batch_or_the_threads(
    isa: str,
    dtype: str,
    layer_seed: int,
    features: int,
    outs: list[int],
    kind: str,
    compute: str,
    with_residual: bool,
) -> None:
    """70 rows alone, in batches of 2, 5, 16, 17, 40 and all together, by 1, 2 and 3 threads: the same
    bits.
    """
    parts = (outs[0], outs[0]) if kind == "act_mul" else tuple(outs)
    layer = support.LinearCase(features, parts, (True,) * len(parts), kind, dtype, 1, layer_seed)
    rng = np.random.default_rng(layer_seed)
    x = support.activations(rng, 70, features, outliers=True)
    residual = support.activations(rng, 70, layer.out_features) if with_residual else None
    first = backend(isa, 1, compute)
    want = support.run_linear(first, layer.prepare(first), x, layer.out_features, residual)
    for threads in support.THREADS:
        b = backend(isa, threads, compute)
        weight = layer.prepare(b)
        for batch in (1, 2, 5, 16, 17, 40, 70):
            begins = range(0, 70, batch) if threads == 1 or batch > 5 else (0, 35)
            for begin in begins:
                chosen = slice(begin, min(begin + batch, 70))
                part = None if residual is None else residual[chosen]
                got = support.run_linear(b, weight, x[chosen], layer.out_features, part)
                support.assert_bitwise(got, want[chosen], f"rows {chosen} in a batch of {batch}, {threads} threads")


@each_isa
@pytest.mark.parametrize("kind", ("plain", "act_mul"))
@pytest.mark.parametrize(("features", "out"), ((64, 32), (33, 19), (111, 47)))
def test_bits_for_every_number_of_tokens(isa: str, kind: str, features: int, out: int) -> None:
    """bfloat16 by bfloat16, 1 to 40 tokens, then across the edge of a block of 256: the rows of the longest
    call, to the bit.
    """
    layer = support.LinearCase(features, (out, out), (True, False), kind, "bfloat16", 3, 11, gap=2)
    rng = np.random.default_rng(12)
    x, residual = support.activations(rng, 301, features), support.activations(rng, 301, layer.out_features)
    b = backend(isa, 2, "bfloat16")
    weight = layer.prepare(b)
    want = support.run_linear(b, weight, x, layer.out_features, residual)
    for batch in (*range(1, 41), 255, 256, 257):
        got = support.run_linear(b, weight, x[:batch], layer.out_features, residual[:batch])
        support.assert_bitwise(got, want[:batch], f"{batch} tokens")


def tiled(x: Array, weight: Array) -> Array:
    """What matrix tiles compute, x . weight^T of bfloat16 values in float32: in steps of 32 the products of
    even and of odd features are added up apart, then together, then to the sum.
    """
    features = -(-x.shape[1] // 32) * 32
    x, weight = (np.pad(a, ((0, 0), (0, features - a.shape[1]))).astype(np.float32) for a in (x, weight))
    total = np.zeros((len(x), len(weight)), np.float32)
    for step in range(0, features, 32):
        halves = np.zeros((2, *total.shape), np.float32)
        for k in range(step, step + 32):
            halves[k % 2] += x[:, k, None] * weight[None, :, k]  # exact: 8 bits by 8 bits
        total += halves[0] + halves[1]
    return total


@pytest.mark.parametrize("isa", [isa for isa in support.ISAS if "amx" in isa])
@given(case=rows(batches, st.sampled_from((1, 31, 32, 33, 111, 500))), out=st.sampled_from((1, 15, 16, 17, 61)))
def test_tiles_add_in_the_order_that_is_defined(isa: str, case: Rows, out: int) -> None:
    """The instruction and its emulation agree with the definition, to the bit."""
    layer = support.LinearCase(case.size, (out,), (False,), "plain", "bfloat16", 1, case.seed)
    b, x = backend(isa, 1, "bfloat16"), case.x(case.rng())
    got = support.run_linear(b, layer.prepare(b), x, out, None, case.pad_in, case.pad_out)
    want = tiled(load(store(x, "bfloat16"), "bfloat16"), load(layer.parts[0][0], "bfloat16"))
    support.assert_bitwise(got, want)


@every_backend
@given(data=st.data(), case=rows(size=st.sampled_from((1, 7, 16, 33, 111, 128, 500))))
def test_bfloat16_compute(isa: str, dtype: str, threads: int, data: st.DataObject, case: Rows) -> None:
    """compute_dtype="bfloat16" rounds x to bfloat16 for bfloat16 weights where the kernels multiply
    bfloat16.

    Everywhere else it changes nothing, bit for bit. Nowhere is anything but x rounded.
    """
    layer = data.draw(linear_cases(dtype, st.just(case.size), widths))
    exact, b = backend(isa, threads), backend(isa, threads, "bfloat16")
    x, shape = case.x(case.rng()), (layer.out_features, None, case.pad_in, case.pad_out)
    got = support.run_linear(b, layer.prepare(b), x, *shape, activation=layer.activation)
    plain = support.run_linear(exact, layer.prepare(exact), x, *shape, activation=layer.activation)
    if np.array_equal(support.bits(got), support.bits(plain)):
        return
    assert dtype == "bfloat16", f"x was rounded for {dtype} weights"
    want, scale = layer.expected(load(store(x, "bfloat16"), "bfloat16"), None)
    support.assert_close(got, want, length=case.size, scale=scale)


@each_isa
@each_dtype
def test_parts_joined_equal_parts_alone(isa: str, dtype: str) -> None:
    """q, k and v joined give the columns that each gives alone, bit for bit."""
    for in_features, outs in (((64, (128, 31, 31))), (111, (7, 1, 500)), (989, (33, 16, 15))):
        joined = support.LinearCase(in_features, outs, (True, False, True), "plain", dtype, 0, 5)
        b = backend(isa, 2)
        x = support.activations(np.random.default_rng(6), 19, in_features)
        got = support.run_linear(b, joined.prepare(b), x, sum(outs))
        edges = list(itertools.accumulate(outs, initial=0))
        for part, (begin, end) in zip(joined.parts, itertools.pairwise(edges), strict=True):
            pairs = [(support.tensor(part[0], dtype), support.tensor(part[1], dtype))]
            alone = support.run_linear(b, b.prepare_linear(pairs, kind="plain"), x, end - begin)
            support.assert_bitwise(got[:, begin:end], alone, f"columns {begin}..{end}")


@each_isa
@each_dtype
def test_bias_may_be_float32(isa: str, dtype: str) -> None:
    """A float32 bias beside weights of any dtype is added unrounded."""
    rng = np.random.default_rng(1)
    weight, bias = support.stored(rng, dtype, 33, 19), support.activations(rng, 33)
    x = support.activations(rng, 8, 19)
    b = backend(isa, 2)
    prepared = b.prepare_linear([(support.tensor(weight, dtype), support.tensor(bias))], kind="plain")
    w = load(weight, dtype)
    want = x.astype(np.float64) @ w.T + bias.astype(np.float64)
    scale = np.sqrt((x.astype(np.float64) ** 2) @ (w**2).T) + np.abs(bias)
    support.assert_close(support.run_linear(b, prepared, x, 33), want, length=19, scale=scale)


@each_isa
@each_dtype
def test_prepared_weights_keep_their_memory(isa: str, dtype: str) -> None:
    """The arrays may go out of scope after prepare_linear."""
    b = backend(isa, 2)
    layer = support.LinearCase(64, (500, 111), (True, True), "plain", dtype, 0, 9)
    x = support.activations(np.random.default_rng(2), 3, 64)
    want, scale = layer.expected(x.astype(np.float64), None)
    weight = layer.prepare(b)
    layer.parts.clear()
    _ = [np.full((611, 64), np.nan, np.float32) for _ in range(8)]  # reuses what was freed
    support.assert_close(support.run_linear(b, weight, x, 611), want, length=64, scale=scale)


@each_isa
def test_infinity_and_nan_come_through(isa: str) -> None:
    """A NaN in one row of x makes that row NaN and leaves its neighbours alone."""
    b = backend(isa, 2)
    layer = support.LinearCase(33, (19,), (False,), "plain", "float32", 0, 3)
    x = support.activations(np.random.default_rng(3), 7, 33)
    weight = layer.prepare(b)
    clean = support.run_linear(b, weight, x, 19)
    x[4, 32] = np.nan
    got = support.run_linear(b, weight, x, 19)
    assert np.isnan(got[4]).all()
    keep = [0, 1, 2, 3, 5, 6]
    support.assert_bitwise(got[keep], clean[keep])


@pytest.mark.parametrize("kind", ("plain", "act_mul"))
@each_isa
def test_no_rows(isa: str, kind: str) -> None:
    """A call with no tokens does nothing."""
    b = backend(isa, 2)
    layer = support.LinearCase(8, (16, 16), (False, False), kind, "float32", 0, 4)
    assert support.run_linear(b, layer.prepare(b), np.zeros((0, 8), np.float32), layer.out_features).size == 0


@pytest.mark.parametrize("kind", ("plain", "act_mul"))
@pytest.mark.parametrize("num_tokens", (1, 24, 25, 60))
@each_isa
def test_no_inputs(isa: str, num_tokens: int, kind: str) -> None:
    """Sums of nothing: the biases are left."""
    b = backend(isa, 2)
    bias = np.linspace(-2, 2, 20, dtype=np.float32)
    weight = support.tensor(np.zeros((20, 0), np.float32))
    prepared = b.prepare_linear([(weight, support.tensor(bias))] * 2, kind)
    nothing = np.zeros((num_tokens, 0), np.float32)  # beside it, NaN
    got = support.run_linear(b, prepared, nothing, prepared.out_features, pad_in=(0, 64))
    expected = bias / (1 + np.exp(-bias)) * bias if kind == "act_mul" else np.concatenate((bias, bias))
    np.testing.assert_allclose(got, np.tile(expected, (num_tokens, 1)), rtol=1e-6)
