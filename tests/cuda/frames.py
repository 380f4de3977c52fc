"""Strided rows in a frame: what an op reads lies in NaN, what it writes in sentinels that it must leave alone."""

from __future__ import annotations

import ctypes

import numpy as np
from emulation import Array, Buffer, Gpu, from_16, to_16

KINDS = ("f32", "bf16", "f16")  # the numbers of Type in cuda/core/types.h
UNIT = {"f32": 2.0**-24, "bf16": 2.0**-8, "f16": 2.0**-11}  # unit roundoff: half the spacing at 1
SMALLEST = {"f32": 2.0**-149, "bf16": 2.0**-133, "f16": 2.0**-24}
SENTINEL = -12345.0


def encode(values: Array, kind: str) -> Array:
    """As the kernels store them: float32, or bits."""
    return np.asarray(values, np.float32) if kind == "f32" else to_16(values, kind)


def decode(stored: Array, kind: str) -> Array:
    """float32 values of what `encode` made."""
    return stored if kind == "f32" else from_16(stored, kind)


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


class Frame:
    """A matrix on the device, `pad` elements between its rows, one more row before and behind.

    `values` are stored ones, [rows, width]; without them the frame is an output of NaN in sentinels.
    """

    def __init__(self, gpu: Gpu, kind: str, shape: tuple[int, int], pad: int = 0, values: Array | None = None) -> None:
        rows, width = self.shape = shape
        self.gpu, self.stride = gpu, width + pad
        edge = np.nan if values is not None else SENTINEL
        self.before = encode(np.full((rows + 2, self.stride), edge, np.float32), kind)
        self.before[1 : 1 + rows, :width] = encode(np.float32(np.nan), kind) if values is None else values
        self.buffer: Buffer = gpu.upload(self.before)
        self.pointer = ctypes.c_void_p(self.buffer.pointer + self.stride * self.before.itemsize)

    def get(self) -> Array:
        """The stored values of the matrix; the rest of the frame is unchanged."""
        after = self.gpu.download(self.buffer)
        rows, width = self.shape
        inner: Array = after[1 : 1 + rows, :width].copy()
        after[1 : 1 + rows, :width] = self.before[1 : 1 + rows, :width]
        assert after.tobytes() == self.before.tobytes(), "wrote outside the output"
        return inner


def of(gpu: Gpu, values: Array, kind: str, pad: int = 0) -> Frame:
    """An input: stored values [rows, width] in NaN."""
    return Frame(gpu, kind, (values.shape[0], values.shape[1]), pad, values)


def assert_close(
    got: Array, want: Array, kind: str, terms: int, scale: Array | float = 0.0, slack: Array | float = 0.0
) -> None:
    """Stored `got` is float64 `want` within one rounding to `kind` and float32 sums of `terms` terms.

    scale: the size of what was rounded, where cancellation makes the result smaller. 8 u (1 + sqrt(terms)) is about
    eleven standard deviations of sequential float32 sums, with room for exp, rsqrt and division. slack: what a rounding
    on the way may add.
    """
    values = decode(got, kind).astype(np.float64)
    size = np.maximum(np.abs(want), scale)
    stored = 0.0 if kind == "f32" else 1.01 * UNIT[kind] * np.abs(want)
    allowed = stored + 8 * UNIT["f32"] * (1 + terms**0.5) * size + SMALLEST[kind] + slack
    with np.errstate(invalid="ignore"):
        wrong = np.where(np.isinf(want), values != want, ~(np.abs(values - want) <= allowed))
    at = tuple(np.argwhere(wrong)[0]) if wrong.any() else ()
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size} wrong, first {at}: {values[at]} != {want[at]}"


def assert_bitwise(got: Array, want: Array) -> None:
    """The same shape and bytes."""
    assert got.shape == want.shape and got.dtype == want.dtype
    assert got.tobytes() == want.tobytes(), f"{np.argwhere(got != want)[:4].tolist()} differ"
