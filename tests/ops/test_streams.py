"""Ops of several residual streams and of sparse gates: mix_streams, match_rms, row_moment, sparsify."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from reference import ops as oracle
from reference.ops import Array

from infinilm.errors import InfinilmError
from ops import support
from ops.support import Output, Rows, assert_bitwise, assert_close, backend, call, each_isa, each_threads, framed, rows

streams_of = st.sampled_from((2, 3, 4, 8))
least_squares = st.sampled_from((1e-5, 1e-12))


@dataclass
class Mixed:
    """What mix_streams is given: x [n, size], streams [num_streams, n, size], and weights."""

    x: Array
    streams: Array
    router: Array
    coefficients: Array
    scale: Array

    @classmethod
    def draw(cls, rng: np.random.Generator, n: int, size: int, num_streams: int, corrects: bool) -> Mixed:
        rows_of = num_streams if corrects else num_streams**2
        return cls(
            support.activations(rng, n, size),
            support.activations(rng, num_streams, n, size),
            support.activations(rng, num_streams, size) / np.float32(size**0.5),
            support.activations(rng, rows_of, num_streams) / 2,
            support.activations(rng, size),
        )

    def run(self, b: Any, corrects: bool, case: Rows | None = None, part: slice = slice(None)) -> tuple[Array, ...]:
        """The op over some of the tokens: x, streams, and of a correction x times scale."""
        pads = (case.pad_in, case.pad_out) if case else ((0, 0), (0, 0))
        x = Output(self.x[part].shape, pad=pads[0], values=self.x[part])
        scaled = Output(x.view.shape, pad=pads[1])
        # The streams of a step lie in one buffer, a row behind the other.
        streams = Output(self.streams[:, part].shape, pad=pads[1][::-1], values=self.streams[:, part])
        weights = framed(self.router), framed(self.coefficients)
        of_correction = (framed(self.scale), scaled) if corrects else ()
        call(b, "mix_streams", x, streams, *weights, corrects, 1e-6, *of_correction)
        return (x.check(), streams.check(), *((scaled.check(),) if corrects else ()))

    def expected(self, corrects: bool) -> tuple[Array, ...]:
        wide = [a.astype(np.float64) for a in (self.x, self.streams, self.router, self.coefficients)]
        return oracle.mix_streams(*wide, corrects, float(np.float32(1e-6)))


@each_isa
@each_threads
@given(case=rows(), num_streams=streams_of, corrects=st.booleans())
def test_mix_streams(isa: str, threads: int, case: Rows, num_streams: int, corrects: bool) -> None:
    """Against the oracle, in place; a prediction keeps a copy of the active stream, a correction scales it."""
    mixed = Mixed.draw(case.rng(), case.num_tokens, case.size, num_streams, corrects)
    got = mixed.run(backend(isa, threads), corrects, case)
    want_x, want_streams = mixed.expected(corrects)
    # An error of the router's dot products moves coefficients, and with them every part of a sum.
    largest = np.abs(mixed.streams).max(0) + np.abs(mixed.x)
    reach = np.abs(mixed.router).sum(1).max() * np.abs(mixed.x).max(-1, keepdims=True) / case.size**0.5
    scale = largest.astype(np.float64) * (1 + num_streams * (2 + reach))
    length = case.size + num_streams**2
    assert_close(got[0], want_x, length=length, scale=scale, what="x")
    for j in range(1, num_streams):
        assert_close(got[1][j], want_streams[j], length=length, scale=scale, what=f"stream {j}")
    if corrects:
        assert_bitwise(got[2], got[0] * mixed.scale)
    else:
        assert_bitwise(got[1][0], got[0])


@each_isa
@given(size=support.sizes, num_streams=streams_of, seed=support.seeds, corrects=st.booleans())
def test_mixed_rows_do_not_depend_on_each_other(
    isa: str, size: int, num_streams: int, seed: int, corrects: bool
) -> None:
    """A token alone has the bits that it has among others, by any number of threads."""
    mixed = Mixed.draw(np.random.default_rng(seed), 19, size, num_streams, corrects)
    want = mixed.run(backend(isa, 1), corrects)
    for threads, step in ((1, 1), (2, 19), (3, 7)):
        for begin in range(0, 19, step):
            part = slice(begin, begin + step)
            got = mixed.run(backend(isa, threads), corrects, part=part)
            assert_bitwise(got[0], want[0][part])
            assert_bitwise(got[1][1:], want[1][1:, part])


@each_isa
@each_threads
@given(case=rows(), least=least_squares, is_zero=st.booleans())
def test_match_rms(isa: str, threads: int, case: Rows, least: float, is_zero: bool) -> None:
    """Rows become as large as others; small ones count as large as `least`, and zeros stay."""
    rng = case.rng()
    x, like = (case.x(rng) for _ in range(2))
    if is_zero:
        x[0] = 0
    out = Output(x.shape, pad=case.pad_out, values=x)
    call(backend(isa, threads), "match_rms", out, framed(like, case.pad_in), least)
    want = oracle.match_rms(x.astype(np.float64), like.astype(np.float64), float(np.float32(least)))
    assert_close(out.check(), want, length=case.size)


@each_isa
@each_threads
@given(
    case=rows(num_tokens=support.sizes), deviations=st.sampled_from((-0.5, 0.0, 1.6448536)), shift=st.integers(-3, 3)
)
def test_sparsify(isa: str, threads: int, case: Rows, deviations: float, shift: int) -> None:
    """Mean and variance of a row, whose parts add up as ranks do it, and what is left of it above a threshold."""
    rng, b = case.rng(), backend(isa, threads)
    x = np.hstack([case.x(rng), case.x(rng)]) + np.float32(shift)
    parts = np.split(x, 2, axis=1)

    def moment(centre: Array | None) -> Array:
        total = np.zeros((len(x), 1), np.float32)
        for part in parts:
            out = Output(total.shape)
            call(b, "row_moment", framed(part, case.pad_in), out, 0.5, None if centre is None else framed(centre))
            total += out.check()
        return total

    mean = moment(None)
    variance = moment(mean)
    wide = x.astype(np.float64)
    size = np.abs(wide).max(-1, keepdims=True)
    assert_close(mean, wide.mean(-1, keepdims=True), length=x.shape[1], scale=size)
    assert_close(variance, wide.var(-1, keepdims=True), length=x.shape[1], scale=size**2)
    out = Output(x.shape, pad=case.pad_out, values=x)
    call(b, "sparsify", out, framed(mean), framed(variance), deviations)
    want = oracle.sparsify(wide, float(np.float32(deviations)))
    assert_close(out.check(), want, length=x.shape[1], scale=np.broadcast_to(4 * size, x.shape))


@each_isa
@given(size=support.sizes, seed=support.seeds)
def test_moments_and_sizes_of_rows_do_not_depend_on_each_other(isa: str, size: int, seed: int) -> None:
    """A row alone, in any batch, by any number of threads: the same bits."""
    rng = np.random.default_rng(seed)
    x, like = support.activations(rng, 19, size), support.activations(rng, 19, size)

    def run(threads: int, part: slice) -> tuple[Array, Array]:
        b, own = backend(isa, threads), x[part]
        mean, variance = Output((len(own), 1)), Output((len(own), 1))
        call(b, "row_moment", framed(own), mean)
        call(b, "row_moment", framed(own), variance, 1.0, framed(mean.check()))
        kept = Output(own.shape, values=own)
        call(b, "sparsify", kept, framed(mean.check()), framed(variance.check()), 0.25)
        matched = Output(own.shape, values=own)
        call(b, "match_rms", matched, framed(like[part]), 1e-5)
        return kept.check(), matched.check()

    want = run(1, slice(0, 19))
    for threads, step in ((1, 1), (2, 19), (3, 7)):
        for begin in range(0, 19, step):
            part = slice(begin, begin + step)
            for got, whole in zip(run(threads, part), want, strict=True):
                assert_bitwise(got, whole[part])


def test_nan_stays() -> None:
    x = np.array([[1.0, np.nan, -2.0]], np.float32)
    out = Output(x.shape, values=x)
    call(
        backend("generic", 1),
        "sparsify",
        out,
        framed(np.zeros((1, 1), np.float32)),
        framed(np.ones((1, 1), np.float32)),
        0.0,
    )
    assert np.isnan(out.check()[0, 1])


@each_isa
@given(case=rows(), vocab_size=support.sizes, data=st.data())
def test_ids_beyond_those_that_are_known_count_as_the_first(
    isa: str, case: Rows, vocab_size: int, data: st.DataObject
) -> None:
    """Over the parts of a table, one gives the row of id 0, and the others zeros."""
    rng = case.rng()
    table = support.stored(rng, "float32", vocab_size, case.size)
    ids = rng.integers(0, 2 * vocab_size, case.num_tokens).astype(np.int32)
    ids[-1] = vocab_size
    cut = data.draw(st.integers(0, vocab_size))
    total = np.zeros((case.num_tokens, case.size), np.float32)
    for begin, end in ((0, cut), (cut, vocab_size)):
        out = Output(total.shape, pad=case.pad_out)
        rows_of = (framed(table[begin:end]), "float32")
        call(backend(isa, 1), "embedding", framed(ids), rows_of, out, begin, "none", 1.0, vocab_size)
        total += out.check()
    assert_bitwise(total + 0.0, oracle.embedding(np.where(ids < vocab_size, ids, 0), table).astype(np.float32) + 0.0)


GOOD: dict[str, Any] = {
    "x": np.zeros((2, 8), np.float32),
    "streams": np.zeros((3, 2, 8), np.float32),
    "router": np.zeros((3, 8), np.float32),
    "coefficients": np.zeros((3, 3), np.float32),
    "corrects": True,
    "eps": 1e-6,
    "scale": np.zeros(8, np.float32),
    "scaled": np.zeros((2, 8), np.float32),
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"streams": np.zeros((1, 2, 8), np.float32)}, r"streams: expected 2 to 8 of them, got 1"),
        ({"streams": np.zeros((9, 2, 8), np.float32)}, r"streams: expected 2 to 8 of them, got 9"),
        ({"router": np.zeros((2, 8), np.float32)}, r"router: num_streams is 3 \(from streams\), got 2"),
        ({"coefficients": np.zeros((9, 3), np.float32)}, r"coefficients: .*3.* got .*\[9, 3\]"),
        ({"corrects": False}, r"coefficients: .*9.* got .*\[3, 3\]"),
        ({"scaled": None}, r"scale and scaled: one is missing"),
        ({"corrects": False, "coefficients": np.zeros((9, 3), np.float32)}, r"scale: of a correction alone"),
        ({"scale": np.zeros(7, np.float32)}, r"scale: hidden_size is 8 \(from x\), got 7"),
    ],
)
def test_bad_arguments_of_mix_streams(changes: dict[str, Any], message: str) -> None:
    arguments = {**GOOD, **changes}
    tensors = {k: support.tensor(v) if isinstance(v, np.ndarray) else v for k, v in arguments.items()}
    with pytest.raises(InfinilmError, match=message):
        backend("generic", 1).mix_streams(**tensors)


def test_bad_arguments_of_rows() -> None:
    b, x = backend("generic", 1), support.tensor(np.zeros((2, 3), np.float32))
    column, empty = support.tensor(np.zeros((2, 1), np.float32)), support.tensor(np.zeros((2, 0), np.float32))
    for call_op, message in (
        (lambda: b.row_moment(empty, column), "row_moment: x: expected at least one column"),
        (
            lambda: b.row_moment(x, support.tensor(np.zeros((3, 1), np.float32))),
            r"row_moment: out: num_tokens is 2 \(from x\), got 3",
        ),
        (lambda: b.row_moment(x, column, 1.0, x), "row_moment: centre: .*1.* got"),
        (lambda: b.sparsify(x, column, x, 0.0), "sparsify: variance: .*1.* got"),
        (lambda: b.match_rms(x, column, 1e-5), "match_rms: like: hidden_size is 3 .* got 1"),
        (lambda: b.match_rms(x, x, 0.0), "match_rms: least must be positive, got 0"),
    ):
        with pytest.raises(InfinilmError, match=message):
            call_op()
