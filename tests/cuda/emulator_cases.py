"""Cases for the primitives of cuda/core: kernels of tests/cuda/kernels against numpy. Run by the worker process.

Layouts are written down here a second time, from the tables of the PTX ISA manual, not by the emulator's formulas.
"""

from __future__ import annotations

import ctypes

import numpy as np
from emulation import Array, Gpu, from_16, to_16

F64 = np.float64


def _close(got: Array, expected: Array, terms: int) -> None:
    """Compare fp32 sums of `terms` products with float64 ones."""
    scale = np.abs(expected).max() + 1e-30
    error = np.abs(got.astype(F64) - expected).max() / scale
    assert error <= 2.0**-24 * (4 + 2 * terms), f"relative error {error:.2e} for sums of {terms}"


def _normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# ---------------------------------------------------------------------------------------------- device.cuh


def conversions(gpu: Gpu, kind: str) -> None:
    """Every 16-bit value widens exactly; rounding is to nearest even, at ties, overflow and subnormals too."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    exact = from_16(bits, kind)
    with np.errstate(all="ignore"):
        edges = np.nextafter(exact[:, None], np.array([-np.inf, np.inf], np.float32)).ravel()
        ties = (exact[:-1].astype(F64) + exact[1:]) / 2
        x = np.concatenate([exact, edges, ties.astype(np.float32), _normal(0, 1000)])
        x = np.concatenate(
            [x, np.array([0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519, 65520, 3e38, 1e-45], np.float32)]
        )
        expected = to_16(x, kind)
    n = x.size
    dx, dy, dz, dp = gpu.upload(x), gpu.empty(n, np.uint16), gpu.empty(n), gpu.empty((n + 1) // 2, np.uint32)
    gpu.call(f"convert_{kind}", dx, dy, dz, dp, n)
    y, z, packed = gpu.download(dy), gpu.download(dz), gpu.download(dp)
    number = ~np.isnan(x)
    np.testing.assert_array_equal(y[number], expected[number])
    assert (y[~number] == 0x7FFF).all()
    np.testing.assert_array_equal(z, from_16(y, kind))
    np.testing.assert_array_equal(packed[: n // 2], y[: n // 2 * 2].view(np.uint32))


def reductions(gpu: Gpu) -> None:
    """warp_sum and warp_max, sizes that are no multiple of anything."""
    for rows, n in [(1, 1), (3, 127), (2, 989)]:
        x = _normal(n, rows, n)
        out = gpu.empty((2, rows))
        gpu.call("reduce", gpu.upload(x), out, rows, n)
        got = gpu.download(out)
        _close(got[0], x.astype(F64).sum(1), n)
        np.testing.assert_array_equal(got[1], x.max(1))


def shuffles(gpu: Gpu) -> None:
    """Sources of the shuffles at the ends of their segments; votes."""
    x = np.random.default_rng(1).integers(0, 200, 32).astype(np.int32)
    out = gpu.empty((8, 32), np.int32)
    gpu.call("shuffle", gpu.upload(x), out)
    lane = np.arange(32)
    ballot = sum(1 << int(i) for i in lane if x[i] % 3 == 0)
    votes = 2 * int((x == 100).any()) + int((x < 1000).all())
    expected = [
        x[np.full(32, 5)], x[lane ^ 3], x[np.where(lane + 2 < 32, lane + 2, lane)], x[np.maximum(lane - 1, 0)],
        x[lane // 8 * 8 + 1], np.full(32, ballot, np.uint32).view(np.int32), np.full(32, votes), x[lane ^ 1],
    ]  # fmt: skip
    np.testing.assert_array_equal(gpu.download(out), np.stack(expected))


def random_numbers(gpu: Gpu) -> None:
    """Philox4x32-10 in Python integers; the published vector for counter and key zero."""

    def philox(counter: list[int], key: list[int]) -> list[int]:
        for _ in range(10):
            a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
            counter = [b >> 32 ^ counter[1] ^ key[0], b & 0xFFFFFFFF, a >> 32 ^ counter[3] ^ key[1], a & 0xFFFFFFFF]
            key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
        return counter

    assert philox([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    for seed, position in [(0, 0), (0x123456789ABCDEF0, 0xFFFFFFFE)]:
        out = gpu.empty(7)
        gpu.call("uniforms", ctypes.c_uint64(seed), ctypes.c_uint64(position), out, 7)
        counters = [position + i for i in range(7)]
        words = [philox([c & 0xFFFFFFFF, c >> 32, 0, 0], [seed & 0xFFFFFFFF, seed >> 32])[0] for c in counters]
        np.testing.assert_array_equal(gpu.download(out), np.array([(w >> 8) * 2.0**-24 for w in words], np.float32))


# ---------------------------------------------------------------------------------------------- ptx.cuh


def wide_copies(gpu: Gpu) -> None:
    x = _normal(3, 37, 4)
    y, exps = gpu.empty((37, 4)), gpu.empty(37)
    gpu.call("copy", gpu.upload(x), y, exps, 37)
    np.testing.assert_array_equal(gpu.download(y), x)
    np.testing.assert_allclose(gpu.download(exps), np.exp2(x[:, 0].astype(F64)), rtol=1e-6)


def named_barriers(gpu: Gpu) -> None:
    out = gpu.empty(1, np.int32)
    gpu.call("turns", out, 5)
    assert gpu.download(out)[0] == 5 * (1 + 2 + 3 + 4)


def last_arriver(gpu: Gpu) -> None:
    """Twice: the counter is left ready. The sum has a fixed order, whichever block arrives last."""
    x = _normal(4, 1000)
    dx, partial, counter, out = gpu.upload(x), gpu.empty(5), gpu.upload(np.zeros(1, np.uint32)), gpu.empty(1)
    results = set()
    for acquire_release in (0, 1, 0):
        gpu.call("last_arriver", dx, partial, counter, out, 1000, 5, acquire_release)
        results.add(float(gpu.download(out)[0]))
    assert len(results) == 1
    _close(np.array(list(results), np.float32), x.astype(F64).sum(keepdims=True), 1000)


def matrix_loads(gpu: Gpu) -> None:
    x = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
    out = gpu.empty((2, 32, 4), np.uint32)
    gpu.call("ldmatrix", gpu.upload(x), out)
    got = gpu.download(out).view(np.uint16).reshape(2, 32, 4, 2)
    for lane in range(32):
        for j in range(4):
            row, column = lane // 4, lane % 4 * 2
            assert list(got[0, lane, j]) == list(x[j, row, column : column + 2])
            assert list(got[1, lane, j]) == list(x[j, column : column + 2, row])


def _fragments(a: Array, b: Array) -> tuple[Array, Array]:
    """The A and B fragments of mma.m16n8k16, [lane][registers], from bits a[16][16] and b[16][8] (PTX ISA figures)."""
    fa, fb = np.empty((32, 4, 2), np.uint16), np.empty((32, 2, 2), np.uint16)
    for lane in range(32):
        group, t = divmod(lane, 4)
        for i in range(8):
            row = group + (8 if i in (2, 3, 6, 7) else 0)
            fa[lane, i // 2, i % 2] = a[row, t * 2 + i % 2 + (8 if i >= 4 else 0)]
        for i in range(4):
            fb[lane, i // 2, i % 2] = b[t * 2 + i % 2 + (8 if i >= 2 else 0), group]
    return fa.view(np.uint32)[..., 0], fb.view(np.uint32)[..., 0]


def mma(gpu: Gpu, kind: str) -> None:
    a, b, c = to_16(_normal(5, 16, 16), kind), to_16(_normal(6, 16, 8), kind), _normal(7, 16, 8)
    fa, fb = _fragments(a, b)
    lane, i = np.meshgrid(np.arange(32), np.arange(4), indexing="ij")
    rows, columns = lane // 4 + i // 2 * 8, lane % 4 * 2 + i % 2
    d = gpu.empty((32, 4))
    gpu.call(f"mma_{kind}", gpu.upload(fa), gpu.upload(fb), gpu.upload(c[rows, columns]), d)
    expected = from_16(a, kind).astype(F64) @ from_16(b, kind) + c
    _close(gpu.download(d), expected[rows, columns], 17)


def gemm(gpu: Gpu, kind: str, m: int, n: int, k: int, bug: int = 0) -> None:
    """The cp.async pipeline; K longer than its stages shows whether they are handed over."""
    a, b = to_16(_normal(8, m, k), kind), to_16(_normal(9, n, k), kind)
    c = gpu.empty((m, n))
    gpu.call(f"gemm_{kind}", gpu.upload(a), gpu.upload(b), c, m, n, k, *([bug] if kind == "bf16" else []))
    _close(gpu.download(c), from_16(a, kind).astype(F64) @ from_16(b, kind).T, k)


# ---------------------------------------------------------------------------------------------- ptx_sm90.cuh


class Operand(ctypes.Structure):
    _fields_ = [("image", ctypes.c_void_p)] + [
        (name, ctypes.c_int) for name in ("bytes", "leading", "stride", "layout", "step_bytes")
    ]


def _image(bits: Array, mn_major: bool, swizzled: bool) -> tuple[Array, dict[str, int]]:
    """The bytes of an operand bits[rows][k] in shared memory in a canonical layout, and its descriptor.

    In units of 16 bytes, T = 8 elements (PTX ISA "Shared Memory Matrix Layout", canonical layouts):
      K-major, none   ((8, rows/8), (T, k/8)) : ((1, SBO), (T in a unit, LBO))
      K-major, 128    rows of 64 k in 8 units, 8 rows together, XOR of unit number and row
      MN-major, none  ((T, rows/8), (8, k/8)) : ((in a unit, SBO), (1, LBO))
      MN-major, 128   ((T, 8, rows/64), (8, k/8)) : ((in a unit, 1, LBO), (8, SBO)), XOR of unit number and k
    """
    rows, k = bits.shape
    if not swizzled:
        groups = bits.reshape(rows // 8, 8, k // 8, 8)  # row group, row, k group, k
        if mn_major:  # row group, k group, k, row: SBO apart, LBO apart
            image = groups.transpose(0, 2, 3, 1)
            leading, stride = 128, 128 * (k // 8)
        else:  # k group, row group, row, k: LBO apart, SBO apart
            image = groups.transpose(2, 0, 1, 3)
            leading, stride = 128 * (rows // 8), 128
        return image.ravel(), {"leading": leading, "stride": stride, "layout": 0, "step_bytes": 2 * leading}
    lines, elements = (bits.T, rows) if mn_major else (bits, k)  # a line is 64 neighbours in memory
    assert elements % 64 == 0 and lines.shape[0] % 8 == 0
    units = lines.reshape(lines.shape[0], elements // 64, 8, 8)  # line, block of 64, unit, element
    swapped = np.empty_like(units)
    for line in range(lines.shape[0]):
        for unit in range(8):
            swapped[line, :, unit ^ line % 8] = units[line, :, unit]
    image = swapped.transpose(1, 0, 2, 3).ravel()  # block of 64, line, ..
    block = lines.shape[0] * 128
    if mn_major:  # 8 k are 1024 bytes; a step of 16 k is two of them
        return image, {"leading": block, "stride": 1024, "layout": 1, "step_bytes": 2048}
    return image, {"leading": 16, "stride": 1024, "layout": 1, "step_bytes": 32}


def _operand(gpu: Gpu, image: Array, **descriptor: int) -> Operand:
    buffer = gpu.upload(image)
    return Operand(buffer.pointer, buffer.nbytes, **descriptor)


def wgmma(gpu: Gpu, columns: int, kind: str, variant: int, swizzle_a: bool, swizzle_b: bool, k: int) -> None:
    """d = a b^T in one operand layout; variant as in hopper.cu."""
    in_registers, mn_b = bool(variant & 1), bool(variant & 2)
    a, b = to_16(_normal(10, 64, k), kind), to_16(_normal(11, columns, k), kind)
    if in_registers:
        words = np.empty((k // 16, 4, 32, 4), np.uint32)
        for step in range(k // 16):
            for warp in range(4):
                part = a[16 * warp : 16 * warp + 16, 16 * step : 16 * step + 16]
                words[step, warp] = _fragments(part, np.zeros((16, 8), np.uint16))[0]
        operand_a = _operand(gpu, words, leading=0, stride=0, layout=0, step_bytes=0)
    else:
        image, descriptor = _image(a, False, swizzle_a)
        operand_a = _operand(gpu, image, **descriptor)
    image, descriptor = _image(b, mn_b, swizzle_b)
    operand_b = _operand(gpu, image, **descriptor)
    d = gpu.empty((128, columns // 2))
    half = int(kind == "f16")
    gpu.call("wgmma", columns, half, variant, ctypes.byref(operand_a), ctypes.byref(operand_b), d, k // 16)
    thread, i = np.meshgrid(np.arange(128), np.arange(columns // 2), indexing="ij")
    rows, at = thread // 32 * 16 + thread % 32 // 4 + i // 2 % 2 * 8, i // 4 * 8 + thread % 4 * 2 + i % 2
    expected = from_16(a, kind).astype(F64) @ from_16(b, kind).T
    _close(gpu.download(d), expected[rows, at], k)


def hopper_gemm(gpu: Gpu, m: int, n: int, k: int, bug: int = 0) -> None:
    """Tensor maps, mbarriers and wgmma in a pipeline; edges filled with zeros."""
    a, b = to_16(_normal(12, m, k), "bf16"), to_16(_normal(13, n, k), "bf16")
    c = gpu.empty((m, n))
    gpu.call("gemm", gpu.upload(a), gpu.upload(b), c, m, n, k, bug)
    _close(gpu.download(c), from_16(a, "bf16").astype(F64) @ from_16(b, "bf16").T, k)


def cluster(gpu: Gpu) -> None:
    """Boxes brought to both blocks, zeros beyond the rows; arrivals on both; a matrix stored transposed."""
    clusters, rows = 3, 3 * 16 - 5
    x = np.zeros((clusters, 16, 64), np.uint16)
    x.reshape(-1, 64)[:rows] = np.random.default_rng(18).integers(1, 1 << 16, (rows, 64))
    out, transposed = gpu.empty((2 * clusters, 16, 64), np.uint16), gpu.empty((2 * clusters, 32, 8), np.uint16)
    gpu.call("cluster", gpu.upload(x), rows, out, transposed, clusters)
    both = np.repeat(x, 2, 0)
    np.testing.assert_array_equal(gpu.download(out), both)
    np.testing.assert_array_equal(gpu.download(transposed), both[:, :8, :32].transpose(0, 2, 1))


def dependent_launches(gpu: Gpu, bug: int = 0) -> None:
    x, y = _normal(16, 50), _normal(17, 50)
    dy = gpu.upload(y)
    gpu.call("add_dependent", gpu.upload(x), dy, 50, 3, bug)
    expected = y
    for _ in range(3):
        expected = expected + x[::-1]
    np.testing.assert_array_equal(gpu.download(dy), expected)
