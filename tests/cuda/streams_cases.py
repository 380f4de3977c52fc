"""Cases for cuda/rows/streams.cu and sparsify.cu against float64 numpy. Run by the worker process."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np
from emulation import ROOT, Array, Gpu
from frames import KINDS, Frame, assert_bitwise, assert_close, decode, encode, normal, of

sys.path.insert(0, str(ROOT / "tests"))
from reference import ops as oracle

F64 = np.float64
Shape = dict[str, Any]
EPS = 1e-6


def _long(value: int) -> ctypes.c_int64:
    return ctypes.c_int64(value)


def _stored(seed: int, kind: str, *shape: int) -> tuple[Array, Array]:
    """Random values as stored, and the float64 values of that."""
    stored = encode(normal(seed, *shape), kind)
    return stored, decode(stored, kind).astype(F64)


def _mix(
    gpu: Gpu, kind: str, x: Array, streams: Array, router: Array, coefficients: Array, scale: Array | None, pad: int
) -> tuple[Array, Array, Array]:
    """The op of tokens x [rows, width] and streams [num_streams, rows, width]; with a scale it corrects."""
    count, rows, width = streams.shape
    dx, of_streams = of(gpu, x, kind, pad), of(gpu, streams.reshape(-1, width), kind, 2 * pad)
    out = Frame(gpu, kind, x.shape, 3 * pad)
    corrects = scale is not None
    gpu.call(
        "mix_streams_of_rows", dx.pointer, of_streams.pointer, gpu.upload(router), gpu.upload(coefficients),
        gpu.upload(scale) if corrects else None, out.pointer if corrects else None, _long(dx.stride),
        _long(rows * of_streams.stride), _long(of_streams.stride), _long(out.stride), rows, count, width, corrects,
        ctypes.c_float(EPS), KINDS.index(kind),
    )  # fmt: skip
    return dx.get(), of_streams.get().reshape(streams.shape), out.get() if corrects else dx.get()


def mix_streams(gpu: Gpu, shapes: list[Shape]) -> None:
    """Values of both steps; a token alone has the bits that it has among others."""
    for shape in shapes:
        rows, width, pad, seed, n = (shape[key] for key in ("rows", "width", "pad", "seed", "streams"))
        router, scale = normal(seed, n, width) / np.float32(width**0.5), normal(seed + 1, width)
        for kind in KINDS:
            x, wide_x = _stored(seed + 2, kind, rows, width)
            streams, wide = _stored(seed + 3, kind, n, rows, width)
            size = (np.abs(wide).max(0) + np.abs(wide_x)) * (4 + 4 * n)
            for corrects in (False, True):
                coefficients = normal(seed + 4, n if corrects else n * n, n) / 2
                rest = router, coefficients, scale if corrects else None, pad
                got, mixed, scaled = _mix(gpu, kind, x, streams, *rest)
                numbers = router.astype(F64), coefficients.astype(F64)
                want_x, want = oracle.mix_streams(wide_x, wide, *numbers, corrects, EPS)
                assert_close(got, want_x, kind, width + n * n, size)
                for j in range(1, n):
                    assert_close(mixed[j], want[j], kind, width + n * n, size)
                if corrects:
                    assert_bitwise(scaled, encode(decode(got, kind).astype(np.float32) * scale, kind))
                else:
                    assert_bitwise(mixed[0], got)
                alone, others, _ = _mix(gpu, kind, x[-1:].copy(), streams[:, -1:].copy(), *rest)
                assert_bitwise(alone, got[-1:])
                assert_bitwise(others[1:], mixed[1:, -1:])


def match_rms(gpu: Gpu, shapes: list[Shape]) -> None:
    for shape in shapes:
        rows, width, pad, seed = (shape[key] for key in ("rows", "width", "pad", "seed"))
        for kind in KINDS:
            x, wide = _stored(seed, kind, rows, width)
            like, wide_like = _stored(seed + 1, kind, rows, width)
            x[0] = wide[0] = 0  # it counts as larger, and stays
            dx, dlike = of(gpu, x, kind, pad), of(gpu, like, kind, 2 * pad)
            gpu.call(
                "match_rms_of_rows", dx.pointer, dlike.pointer, _long(dx.stride), _long(dlike.stride), rows, width,
                ctypes.c_float(1e-5), KINDS.index(kind),
            )  # fmt: skip
            want = oracle.match_rms(wide, wide_like, float(np.float32(1e-5)))
            assert_close(dx.get(), want, kind, width, np.abs(want))


def sparsify(gpu: Gpu, shapes: list[Shape]) -> None:
    """Mean and variance, and what is left above a threshold; NaN stays."""
    for shape in shapes:
        rows, width, pad, seed = (shape[key] for key in ("rows", "width", "pad", "seed"))
        for kind in KINDS:
            x, wide = _stored(seed, kind, rows, width)
            dx, moments = of(gpu, x, kind, pad), []
            for multiplier in (1.0, 0.5):
                centre = moments[0] if moments else None
                out = gpu.upload(np.full(rows, np.nan, np.float32))
                gpu.call(
                    "moment_of_rows", dx.pointer, centre, out, _long(dx.stride), rows, width,
                    ctypes.c_float(multiplier), KINDS.index(kind),
                )  # fmt: skip
                moments.append(out)
            mean, half = (gpu.download(moment) for moment in moments)
            size = np.abs(wide).max(-1)
            assert np.all(np.abs(mean - wide.mean(-1)) <= 1e-5 * size)
            assert np.all(np.abs(2 * half - wide.var(-1)) <= 1e-5 * size**2)
            variance = gpu.upload(2 * half)
            gpu.call(
                "sparsify_rows", dx.pointer, moments[0], variance, _long(dx.stride), rows, width,
                ctypes.c_float(0.25), KINDS.index(kind),
            )  # fmt: skip
            want = oracle.sparsify(wide, 0.25)
            assert_close(dx.get(), want, kind, width, np.broadcast_to(4 * size[:, None], want.shape))
