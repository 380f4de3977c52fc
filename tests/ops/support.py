"""Helpers of the op tests: backends, tolerances, framed arrays, and the cases hypothesis draws.

Hypothesis draws shapes, strides and a seed; numpy makes the values from the seed. Everything an op reads lies
in a larger buffer full of NaN (or absurd integers), everything it writes in a buffer full of sentinels: a
stray read shows in the result, a stray write in the frame.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import emulated_isas
import numpy as np
import pytest
from covering import covering
from hypothesis import strategies as st
from reference import ops as oracle
from reference.ops import F64, FLOATING, Array, load, store

from infinilm import _core

ISAS = emulated_isas.offered()
SIZES = (1, 2, 3, 7, 8, 15, 16, 19, 31, 33, 64, 111, 128, 500, 989)
BATCHES = tuple(n for n in SIZES if n <= 128)
THREADS = (1, 2, 3)

each_isa = pytest.mark.parametrize("isa", ISAS)
each_dtype = pytest.mark.parametrize("dtype", FLOATING)
each_threads = pytest.mark.parametrize("threads", THREADS)

sizes = st.sampled_from(SIZES)
batches = st.sampled_from(BATCHES)
seeds = st.integers(0, 2**32 - 1)
pads = st.tuples(st.integers(0, 5), st.integers(0, 5))


def every_backend(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test for every instruction set, weight dtype and number of threads, of which every two meet."""
    return pytest.mark.parametrize(("isa", "dtype", "threads"), covering(ISAS, FLOATING, THREADS))(test)


@functools.cache
def backend(isa: str, threads: int = 1, compute_dtype: str = "float32") -> Any:
    """One backend per kind, kept: idle ones sleep."""
    return _core.Backend("cpu", isa=isa, num_threads=threads, compute_dtype=compute_dtype)


def tensor(array: Array | None, dtype: str | None = None) -> Any:
    """A `_core.Tensor` over the array, `dtype` needed where numpy lacks it (bfloat16 as uint16)."""
    if array is None:
        return None
    return _core.from_numpy(array, dtype=dtype if array.dtype == np.uint16 else None)


# ------------------------------------------------------------------------------------------------- comparison

UNIT = {"float32": 2.0**-24, "bfloat16": 2.0**-9, "float16": 2.0**-11}  # unit roundoff: half the spacing at 1
SMALLEST_NORMAL = {"float32": 2.0**-126, "bfloat16": 2.0**-126, "float16": 2.0**-14}


def tolerance(dtype: str, length: int) -> float:
    """The relative error allowed to a float32 reduction over `length` terms whose result is stored in
    `dtype`.

    With u = 2^-24, adding `length` independent terms of size s one after another rounds partial sums of size
    s sqrt(k): the errors add up to u s sqrt(sum k) = u s length / sqrt(2), that is u sqrt(length / 2) of the
    result's own size s sqrt(length). Vector lanes and blocks only lower it. 8 u (1 + sqrt(length)) is
    therefore about eleven standard deviations, and its constant part covers exp, rsqrt, division and the few
    roundings around the sum. Storing adds half a unit in the last place of `dtype`, doubled for a double
    rounding. A product rounded to bfloat16 (2^-9) where float32 was promised exceeds it about a hundredfold
    at length 989.
    """
    stored = 0.0 if dtype == "float32" else 2 * UNIT[dtype]
    return stored + 8 * UNIT["float32"] * (1 + length**0.5)


def assert_close(
    got: Array, want: F64, *, dtype: str = "float32", length: int, scale: F64 | None = None, what: str = "out"
) -> None:
    """Both the relative norm and the worst element are within `tolerance`; NaN and infinity never pass.

    scale: the size of what was rounded, per element, where cancellation makes the result smaller than its
    terms. An element may err by four times the norm's share of its scale; below the smallest normal number,
    absolutely.
    """
    got = np.asarray(got, np.float64)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    if got.size == 0:
        return
    finite = np.isfinite(got)
    first = np.argwhere(~finite)[:1].tolist()
    assert finite.all(), f"{what}: {np.count_nonzero(~finite)} of {got.size} not finite, first at {first}"
    size = np.abs(want) if scale is None else np.maximum(np.abs(want), scale)
    size = size + SMALLEST_NORMAL[dtype]
    allowed = tolerance(dtype, length)
    error = np.abs(got - want)
    norm = float(np.linalg.norm(error) / np.linalg.norm(size))
    assert norm <= allowed, f"{what}: relative norm of the error {norm:.3g} > {allowed:.3g}"
    worst = np.unravel_index(int(np.argmax(error / size)), error.shape)
    ratio = float(error[worst] / size[worst])
    at = tuple(int(i) for i in worst)
    assert ratio <= 4 * allowed, (
        f"{what}: at {at} got {got[worst]!r}, expected {want[worst]!r}: error {ratio:.3g} of scale > {4 * allowed:.3g}"
    )


def bits(array: Array) -> Array:
    """The array as unsigned integers: NaN equals itself, -0 differs from 0."""
    array = np.ascontiguousarray(array)
    return array.view(np.dtype(f"u{array.itemsize}"))


def assert_bitwise(got: Array, want: Array, what: str = "out") -> None:
    """Equal to the last bit."""
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    different = bits(got) != bits(want)
    if different.any():
        at = tuple(np.argwhere(different)[0].tolist())
        count = np.count_nonzero(different)
        raise AssertionError(f"{what}: {count} of {got.size} differ, first at {at}: {got[at]!r} != {want[at]!r}")


# ----------------------------------------------------------------------------------------------------- frames

POISON: dict[str, Any] = {"f": np.nan, "u": 0x7FC1, "i": -0x5EADBEEF}  # 0x7fc1: a bfloat16 NaN
SENTINEL: dict[str, Any] = {"f": -12345.0, "u": 0xC0DE, "i": 0x1234567}


def poison(dtype: np.dtype[Any]) -> Any:
    """The value that stands where no op may look."""
    return -128 if dtype == np.int8 else POISON[dtype.kind]


class Framed:
    """A view of `shape` inside a wider 2-d buffer: two rows more, `pad` columns left and right.

    Trailing dimensions past the first are one contiguous row ([num_tokens, num_heads, head_dim] keeps its
    heads together); 1-d arrays lie in a single row. `view` starts as `values`, or poisoned where there are
    none.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any, pad: tuple[int, int], edge: Any) -> None:
        rows, width = (1, shape[0]) if len(shape) == 1 else (shape[0], int(np.prod(shape[1:])))
        left, right = pad
        self.buffer = np.full((rows + 2, left + width + right), edge, dtype)
        inner = self.buffer[1 : 1 + rows, left : left + width]
        self.view: Array = inner[0] if len(shape) == 1 else inner.reshape(shape)
        assert np.shares_memory(self.view, self.buffer) or self.view.size == 0
        self.inside = np.zeros(self.buffer.shape, bool)
        self.inside[1 : 1 + rows, left : left + width] = True


def framed(values: Array, pad: tuple[int, int] = (0, 0)) -> Array:
    """An input: `values` in a frame of NaN (or absurd integers)."""
    frame = Framed(values.shape, values.dtype, pad, poison(values.dtype))
    frame.view[...] = values
    return frame.view


class Output(Framed):
    """An output: poisoned with NaN (or holding `values`), in a frame of sentinels that `check` finds
    unchanged.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: Any = np.float32,
        pad: tuple[int, int] = (0, 0),
        values: Array | None = None,
    ) -> None:
        kind = np.dtype(dtype)
        super().__init__(shape, dtype, pad, 0x5E if kind == np.int8 else SENTINEL[kind.kind])
        self.view[...] = poison(kind) if values is None else values
        self.before = self.buffer.copy()

    def check(self) -> Array:
        """The frame is unchanged; returns a copy of the result."""
        stray = (bits(self.buffer) != bits(self.before)) & ~self.inside
        assert not stray.any(), f"wrote outside the output, at {np.argwhere(stray)[:4].tolist()} of the frame"
        return self.view.copy()

    def check_untouched(self) -> None:
        """Nothing was written, inside or out."""
        assert_bitwise(self.buffer, self.before, "output of a refused call")


# ----------------------------------------------------------------------------------------------------- values


def activations(rng: np.random.Generator, *shape: int, magnitude: int = 0, outliers: bool = False) -> Array:
    """float32 normal values times 2^magnitude; with outliers one column is 100 times larger, as in real
    models.
    """
    x = rng.standard_normal(shape).astype(np.float32) * np.float32(2.0**magnitude)
    if outliers and x.size:
        x[..., int(rng.integers(shape[-1]))] *= 100
    return x


def stored(rng: np.random.Generator, dtype: str, *shape: int, scale: float = 1.0) -> Array:
    """Normal values times scale, rounded to dtype and stored as it is."""
    return store(rng.standard_normal(shape) * scale, dtype)


@dataclass(frozen=True)
class Rows:
    """A case of an op over rows: [num_tokens, size], padding of input and output rows, and where values come
    from.
    """

    num_tokens: int
    size: int
    pad_in: tuple[int, int]
    pad_out: tuple[int, int]
    magnitude: int
    outliers: bool
    seed: int

    def rng(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)

    def x(self, rng: np.random.Generator, size: int | None = None) -> Array:
        return activations(rng, self.num_tokens, size or self.size, magnitude=self.magnitude, outliers=self.outliers)


def rows(num_tokens: st.SearchStrategy[int] = batches, size: st.SearchStrategy[int] = sizes) -> Any:
    return st.builds(Rows, num_tokens, size, pads, pads, st.sampled_from((0, -12, 12)), st.booleans(), seeds)


# ----------------------------------------------------------------------------------------------- call helpers
# Each takes plain arrays, frames them, calls the op, checks frames and inputs, and returns copies of the
# results.


def call(b: Any, op: str, *arguments: Any) -> None:
    """b.<op>(...), with arrays turned into tensors; (array, dtype) pairs for stored arrays, Output for
    outputs.

    Afterwards every input holds the bytes it held before.
    """
    tensors: list[Any] = []
    inputs: list[tuple[Array, Array]] = []
    for argument in arguments:
        if isinstance(argument, Output):
            tensors.append(tensor(argument.view))
            continue
        array, dtype = argument if isinstance(argument, tuple) else (argument, None)
        if isinstance(array, np.ndarray):
            inputs.append((array, array.copy()))
            tensors.append(tensor(array, dtype))
        else:
            tensors.append(array)
    getattr(b, op)(*tensors)
    for number, (array, before) in enumerate(inputs):
        assert_bitwise(array, before, f"{op}: input {number} after the call")


@dataclass
class LinearCase:
    """Weights of a linear layer: `outs` are the out_features of its parts, `biases` which of them have
    one.
    """

    in_features: int
    outs: tuple[int, ...]
    biases: tuple[bool, ...]
    kind: str
    dtype: str
    offset: int  # elements between an aligned address and the first weight
    seed: int
    gap: int = 0  # elements between the rows of a weight
    activation: str = "silu"
    parts: list[tuple[Array, Array | None]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        self.parts = []
        for out, has_bias in zip(self.outs, self.biases, strict=True):
            weight = stored(rng, self.dtype, out, self.in_features, scale=self.in_features**-0.5)
            stride = self.in_features + self.gap
            flat = np.full(self.offset + out * stride + 5, POISON[weight.dtype.kind], weight.dtype)
            placed = flat[self.offset : self.offset + out * stride].reshape(out, stride)[:, : self.in_features]
            placed[...] = weight
            self.parts.append((placed, framed(stored(rng, self.dtype, out)) if has_bias else None))

    @property
    def out_features(self) -> int:
        return self.outs[0] if self.kind == "act_mul" else sum(self.outs)

    def prepare(self, b: Any) -> Any:
        pairs = [(tensor(w, self.dtype), tensor(bias, self.dtype)) for w, bias in self.parts]
        return b.prepare_linear(pairs, kind=self.kind)

    def expected(self, x: F64, residual: F64 | None) -> tuple[F64, F64]:
        """The oracle's result and the size of what is rounded on the way to it."""
        parts = [(load(w, self.dtype), None if c is None else load(c, self.dtype)) for w, c in self.parts]
        want = oracle.linear(x, parts, self.kind, residual, self.activation)  # type: ignore[arg-type]
        # sqrt(sum (x w)^2): how large the partial sums are, whatever their sum is.
        sums = [np.sqrt((x * x) @ (w * w).T) + (0.0 if c is None else np.abs(c)) for w, c in parts]
        if self.kind == "act_mul":
            gate, up = (x @ w.T + (0.0 if c is None else c) for w, c in parts)
            # |activation'|: an error in gate moves it by that much, one in exp by |activation| itself.
            slope = 2 * np.abs(gate) + sums[0] if self.activation == "relu2" else 1.2
            activated = np.abs(oracle.ACTIVATIONS[self.activation](gate))
            # Where both are exactly 0, the result is the product of their errors.
            both = sums[0] * sums[1] * tolerance("float32", x.shape[1])
            scale = slope * (sums[0] * np.abs(up) + both) + activated * (sums[1] + np.abs(up))
        else:
            scale = np.concatenate(sums, axis=-1)
        return want, scale + (0.0 if residual is None else np.abs(residual))


def linear_cases(
    dtype: str, in_features: Any = sizes, outs: Any = sizes, kinds: tuple[str, ...] = ("plain", "act_mul")
) -> Any:
    """Plain layers of one to three parts and act_mul layers, biases on some parts, weights at odd
    addresses, some with gaps between their rows.
    """

    def build(
        features: int, out: list[int], bias: list[bool], kind: str, offset: int, seed: int, gap: int, activation: str
    ) -> LinearCase:
        parts = (out[0], out[0]) if kind == "act_mul" else tuple(out)
        return LinearCase(features, parts, tuple(bias[: len(parts)]), kind, dtype, offset, seed, gap, activation)

    return st.builds(
        build,
        in_features,
        st.lists(outs, min_size=1, max_size=3),
        st.lists(st.booleans(), min_size=3, max_size=3),
        st.sampled_from(kinds),
        st.integers(0, 7),
        seeds,
        st.sampled_from((0, 0, 1, 7)),
        # Linears do not join gelu, quick_gelu and relu, which the op act_mul computes.
        st.sampled_from([name for name in oracle.ACTIVATIONS if name not in ("gelu", "quick_gelu", "relu")]),
    )


def run_linear(
    b: Any,
    weight: Any,
    x: Array,
    out_features: int,
    residual: Array | None = None,
    pad_in: tuple[int, int] = (0, 0),
    pad_out: tuple[int, int] = (0, 0),
    in_place: bool = False,
    activation: str = "silu",
) -> Array:
    """linear over framed copies; in_place: the residual is the output's own memory."""
    out = Output((len(x), out_features), pad=pad_out, values=residual if in_place else None)
    other: Any = None if residual is None else out if in_place else framed(residual, pad_in)
    call(b, "linear", framed(x, pad_in), weight, out, other, None, None, 0.0, activation)
    return out.check()
