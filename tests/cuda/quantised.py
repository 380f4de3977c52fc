"""Quantised weights in numpy: the rules of src/numerics/quantise.h and the layout of cuda/weight_formats.cuh.

A quantised weight is (numbers, scales): what it stands for is numbers * scales, each scale repeated over its columns.
"""

from __future__ import annotations

import numpy as np
from emulation import Array, from_bf16, to_bf16
from numpy.typing import NDArray
from packing import feature_of_row

FORMATS = ("", "int8", "int4", "fp8", "int4_128")  # the numbers of WeightFormat, and one of the tests
SMALLEST = np.float32(2.0**-119)
UNIT_COLUMNS = {"int8": 32, "fp8": 32, "int4": 64, "int4_128": 64}
GROUP = {"int4": 32, "int4_128": 128}


def e4m3_values() -> NDArray[np.float32]:
    """Of the bytes 0 .. 255; NaN has two."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    size = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    size[(byte & 127) == 127] = np.nan
    return np.where(byte < 128, size, -size).astype(np.float32)


def _inverse(scale: Array) -> Array:
    with np.errstate(divide="ignore"):
        return np.where(np.abs(scale) > SMALLEST, np.float32(1) / scale, np.float32(0)).astype(np.float32)


def to_e4m3(values: Array) -> NDArray[np.uint8]:
    """Bytes of the nearest numbers, ties to the even byte."""
    table = e4m3_values()[:127].astype(np.float64)
    size = np.minimum(np.abs(values.astype(np.float64)), 448)
    above = np.minimum(np.searchsorted(table, size), 126)
    below = np.maximum(above - 1, 0)
    up, down = table[above] - size, size - table[below]
    nearest = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return (nearest + np.where(np.signbit(values), 128, 0)).astype(np.uint8)


def quantise(weight: Array, name: str) -> tuple[Array, Array]:
    """Float32 [n, k] to numbers [n, k] as they are stored (int8; -8 .. 7; bytes of e4m3), scales [n, groups]."""
    if name in ("int8", "fp8"):
        largest = np.abs(weight).max(1, keepdims=True).astype(np.float32)
        scale = largest / np.float32(127 if name == "int8" else 448)
        scaled = weight * _inverse(scale)
        return (np.clip(np.rint(scaled), -127, 127).astype(np.int8) if name == "int8" else to_e4m3(scaled)), scale
    n, k = weight.shape
    parts = np.pad(weight, ((0, 0), (0, -k % GROUP[name]))).reshape(n, -1, GROUP[name])
    largest = np.take_along_axis(parts, np.abs(parts).argmax(-1)[..., None], -1)
    best, least, numbers = np.zeros_like(largest), np.full(largest.shape, np.inf), np.zeros(parts.shape, np.int8)
    for candidate in range(16):
        scale = from_bf16(to_bf16(largest / np.float32(-8.5 + 0.125 * candidate)))
        q = np.rint(np.clip(parts * _inverse(scale), -8, 7))
        error = ((parts.astype(np.float64) - q * scale) ** 2).sum(-1, keepdims=True)
        better = error < least
        best, numbers = np.where(better, scale, best), np.where(better, q, numbers).astype(np.int8)
        least = np.minimum(error, least)
    return numbers.reshape(n, -1)[:, :k], best[..., 0]


def dequantise(numbers: Array, scales: Array, name: str) -> NDArray[np.float64]:
    """What it stands for, [n, k]."""
    values = e4m3_values()[numbers] if name == "fp8" else numbers.astype(np.float64)
    width = GROUP.get(name, numbers.shape[1])
    return values * np.repeat(scales.astype(np.float64), width, axis=1)[:, : numbers.shape[1]]


def _columns(tiles: Array, lane: Array, register: Array, step: Array, part: Array) -> Array:
    """Elements of [.., 16 rows, columns] in half `part` of a register of a lane, as mma_m16n8k16 wants them."""
    row = lane // 4 + register % 2 * 8
    return tiles[..., row, step * 16 + lane % 4 * 2 + part + register // 2 * 8]


def pack(numbers: Array, scales: Array, name: str, order: str = "natural", head_dim: int = 0) -> NDArray[np.uint8]:
    """The bytes of a PackedWeight."""
    n, k = numbers.shape
    features, width = feature_of_row(n, order, head_dim), UNIT_COLUMNS[name]
    units = -(-k // width)
    offset = 8 if name.startswith("int4") else 0
    padded = np.zeros((max(n, int(features.max()) + 1), units * width), np.int64)
    padded[:n, : -(-k // 32) * 32] = offset  # zero, in a group of columns that is there
    padded[:n, :k] = numbers.astype(np.int64) + offset & 255
    tiles = padded[features].reshape(-1, 16, units, width).transpose(0, 2, 1, 3)  # tile, unit, row, column
    bits = 4 if offset else 8
    words = np.zeros((*tiles.shape[:2], 32, 4), np.uint64)
    lane, step, register, part = np.meshgrid(*map(np.arange, (32, width // 16, 4, 2)), indexing="ij")
    values = _columns(tiles, lane, register, step, part).astype(np.uint64)
    if offset:
        word, place = step // 2 * 2 + register % 2, step % 2 * 2 + register // 2 + 4 * part
    else:
        word, place = step * 2 + register % 2, register // 2 + 2 * part
    for index in np.ndindex(lane.shape):
        words[:, :, lane[index], word[index]] |= values[(..., *index)] << np.uint64(bits * place[index])
    data = words.astype(np.uint32).reshape(*tiles.shape[:2], -1).view(np.uint8)
    by_row = np.zeros((padded.shape[0], scales.shape[1]), np.float32)
    by_row[:n] = scales
    by_row = by_row[features]
    if not offset:
        return np.concatenate([data.ravel(), by_row[:, 0].astype(np.float32).view(np.uint8).ravel()])
    per_unit = width // min(GROUP[name], width)
    repeated = np.repeat(by_row, max(GROUP[name] // width, 1), axis=1)  # a scale for each unit, or two
    whole = np.zeros((len(by_row), units * per_unit), np.float32)
    whole[:, : min(repeated.shape[1], whole.shape[1])] = repeated[:, : whole.shape[1]]
    grouped = whole.reshape(-1, 2, 8, units, per_unit).transpose(0, 3, 2, 4, 1)  # tile, unit, r, group, half
    bytes_of = np.ascontiguousarray(to_bf16(grouped)).reshape(*tiles.shape[:2], -1).view(np.uint8)
    return np.concatenate([data, bytes_of], -1).ravel()
