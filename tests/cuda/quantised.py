"""Quantised weights in numpy: the rules of src/numerics/quantise.h and the layout of cuda/linear/weight_formats.cuh."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from emulation import Array, from_bf16, to_bf16
from numpy.typing import NDArray
from packing import feature_of_row

# The numbers of WeightFormat.
FORMATS = ("", "int8", "int4", "fp8", "int4_zeros", "int8_groups", "fp8_blocks", "fp4", "q4_k", "q5_k", "q6_k")
FORMATS += ("q2_k", "q4_1", "q5_1", "nvfp4", "q3_k", "fp8_pairs", "fp8_block_pairs")
SMALLEST = np.float32(2.0**-119)
FOUR_BITS = ("int4", "int4_zeros", "fp4")
UNIT_COLUMNS = {name: 64 if name in FOUR_BITS else 32 for name in FORMATS}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
GROUP = {"int4": 32, "int4_zeros": 64, "int8_groups": 32, "fp8_blocks": 32, "fp4": 32}


class Quantised(NamedTuple):
    """What it stands for is numbers * scales, each scale repeated over its columns.

    numbers: [n, k], integers, less their zero points; or codes of e4m3 and e2m1. scales, zeros: [n, groups]. rows: [n],
    by which scales of groups are divided where they are stored; in a format without groups the same as scales.
    """

    numbers: Array
    scales: Array
    rows: Array
    zeros: Array | None = None


def e4m3_values() -> NDArray[np.float32]:
    """The values of the bytes 0 .. 255; two bytes are NaN."""
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


def to_8_bits(rows: Array, name: str) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """What a KV cache in "int8" or "fp8" keeps of float32 rows: bytes, and the scale of each row."""
    rows, number = rows.astype(np.float32), np.float32(127 if name == "int8" else 448)
    largest = np.abs(rows).max(axis=-1)
    with np.errstate(divide="ignore"):
        inverse = np.where(largest > SMALLEST, number / largest, np.float32(0)).astype(np.float32)
    scaled = rows * inverse[..., None]
    return np.rint(scaled).astype(np.int8).view(np.uint8) if name == "int8" else to_e4m3(scaled), largest / number


def from_8_bits(numbers: NDArray[np.uint8], scales: Array, name: str) -> NDArray[np.float32]:
    """Such rows as float32."""
    values = numbers.view(np.int8).astype(np.float32) if name == "int8" else e4m3_values()[numbers]
    return np.asarray(values * scales[..., None], np.float32)


def quantise(weight: Array, name: str, columns: int = 0) -> Quantised:
    """Float32 [n, k], by the rules of quantise.h; or by simple ones where files are what quantises.

    columns: that share a scale of fp8_blocks, where these are more than a group.
    """
    n, k = weight.shape
    if name in ("int8", "fp8"):
        largest = np.abs(weight).max(1, keepdims=True).astype(np.float32)
        scale = largest / np.float32(127 if name == "int8" else 448)
        scaled = weight * _inverse(scale)
        numbers = np.clip(np.rint(scaled), -127, 127).astype(np.int8) if name == "int8" else to_e4m3(scaled)
        return Quantised(numbers, scale, scale[:, 0])
    width = columns or GROUP[name]
    parts = np.pad(weight, ((0, 0), (0, -k % width))).reshape(n, -1, width)
    ones = np.ones(n, np.float32)
    largest = np.take_along_axis(parts, np.abs(parts).argmax(-1)[..., None], -1)
    if name == "int4":
        best, least, numbers = np.zeros_like(largest), np.full(largest.shape, np.inf), np.zeros(parts.shape, np.int8)
        for candidate in range(16):
            scale = from_bf16(to_bf16(largest / np.float32(-8.5 + 0.125 * candidate)))
            q = np.rint(np.clip(parts * _inverse(scale), -8, 7))
            error = ((parts.astype(np.float64) - q * scale) ** 2).sum(-1, keepdims=True)
            better = error < least
            best, numbers = np.where(better, scale, best), np.where(better, q, numbers).astype(np.int8)
            least = np.minimum(error, least)
        rows = 2.0 ** np.maximum(np.frexp(np.abs(weight).max(1))[1] - 1 - 14, -126)
        return Quantised(numbers.reshape(n, -1)[:, :k], best[..., 0], rows.astype(np.float32))
    if name == "int4_zeros":
        low = parts.min(-1, keepdims=True)
        scale = ((parts.max(-1, keepdims=True) - low) / 15).astype(np.float16).astype(np.float32)
        zeros = np.clip(np.rint(-low * _inverse(scale)), 0, 15)
        numbers = (np.clip(np.rint(parts * _inverse(scale)) + zeros, 0, 15) - zeros).astype(np.int8)
        return Quantised(numbers.reshape(n, -1)[:, :k], scale[..., 0], ones, zeros[..., 0].astype(np.int8))
    if name == "int8_groups":
        scale = (np.abs(largest) / 127).astype(np.float16).astype(np.float32)
        numbers = np.clip(np.rint(parts * _inverse(scale)), -127, 127).astype(np.int8)
    elif name == "fp4":
        scale = 2.0 ** (np.frexp(np.abs(largest))[1] - 3.0)
        numbers = np.abs((parts / scale)[..., None] - E2M1).argmin(-1).astype(np.uint8)
    else:
        eight = np.maximum.reduceat(np.abs(largest), np.arange(0, n, 8), axis=0)
        scale = np.repeat(eight / np.float32(448), 8, axis=0)[:n]
        numbers = to_e4m3(parts * _inverse(scale))
    scales = np.repeat(scale[..., 0], width // GROUP[name], axis=1)[:, : -(-k // GROUP[name])]
    return Quantised(numbers.reshape(n, -1)[:, :k], scales, ones)


def dequantise(q: Quantised, name: str) -> NDArray[np.float64]:
    """What it stands for, [n, k]."""
    k = q.numbers.shape[1]
    tables = {"fp8": e4m3_values(), "fp4": E2M1}
    values = tables[name[:3]][q.numbers] if name[:3] in tables else q.numbers.astype(np.float64)
    return values * np.repeat(q.scales.astype(np.float64), GROUP.get(name, k), axis=1)[:, :k]


def blocks(q: Quantised, name: str, size: int) -> NDArray[np.uint8]:
    """Rows as blocks of `size`, as `pack_blocks` reads them; k is a multiple of that."""
    n, k = q.numbers.shape
    per_block = np.repeat(q.scales, GROUP.get(name, k) // 32, axis=1)[:, :: size // 32]
    dtype = np.float32 if name.startswith("fp8") else np.float16
    heads = [np.ascontiguousarray(per_block[..., None].astype(dtype)).view(np.uint8)]
    if name == "fp4":
        heads = [(np.frexp(per_block[..., None])[1] + 126).astype(np.uint8)]
    codes = q.numbers.view(np.uint8).reshape(n, -1, 32)
    if name in FOUR_BITS:
        middle = 8 if name == "int4" else 0
        zeros = np.full((n, k // 32), middle) if q.zeros is None else np.repeat(q.zeros, 2, axis=1)
        codes = (q.numbers.reshape(n, -1, 32) + zeros[..., None]).astype(np.uint8)
        codes = codes[..., :16] | codes[..., 16:] << 4
        if q.zeros is not None:
            heads.append(zeros[:, :: size // 32, None].astype(np.uint8))
    return np.concatenate([*heads, codes.reshape(n, k // size, -1)], -1).reshape(n, -1)


def _columns(tiles: Array, lane: Array, register: Array, step: Array, part: Array) -> Array:
    """Elements of [.., 16 rows, columns] in half `part` of a register of a lane, as mma_m16n8k16 wants them."""
    row = lane // 4 + register % 2 * 8
    return tiles[..., row, step * 16 + lane % 4 * 2 + part + register // 2 * 8]


def pack(q: Quantised, name: str, order: str = "natural", head_dim: int = 0, kind: str = "bf16") -> NDArray[np.uint8]:
    """The bytes of a PackedWeight."""
    n, k = q.numbers.shape
    features, width = feature_of_row(n, order, head_dim), UNIT_COLUMNS[name]
    units, all_rows = -(-k // width), max(n, int(features.max()) + 1)
    bits = 4 if name in FOUR_BITS else 8

    def by_row(table: Array) -> Array:
        """[n, ..] in the order of packed rows; padding is zero."""
        whole = np.zeros((all_rows, *table.shape[1:]), table.dtype)
        whole[:n] = table
        return whole[features]

    padded = np.zeros((n, units * width), np.int64)
    padded[:, :k] = q.numbers
    if name.startswith("int4"):
        zeros = np.full((n, 1), 8) if q.zeros is None else np.repeat(q.zeros, GROUP[name], axis=1)
        end = -(-k // 32) * 32  # of groups of columns that are there
        padded[:, :end] += zeros[:, :end]
    tiles = by_row(padded & 2**bits - 1).reshape(-1, 16, units, width).transpose(0, 2, 1, 3)  # tile, unit, row, column
    words = np.zeros((*tiles.shape[:2], 32, 4), np.uint64)
    lane, step, register, part = np.meshgrid(*map(np.arange, (32, width // 16, 4, 2)), indexing="ij")
    values = _columns(tiles, lane, register, step, part).astype(np.uint64)
    if bits == 4:
        word, place = step // 2 * 2 + register % 2, step % 2 * 2 + register // 2 + 4 * part
    else:
        word, place = step * 2 + register % 2, register // 2 + 2 * part
    for index in np.ndindex(lane.shape):
        words[:, :, lane[index], word[index]] |= values[(..., *index)] << np.uint64(bits * place[index])
    data = [words.astype(np.uint32).reshape(*tiles.shape[:2], -1).view(np.uint8)]
    rows = by_row(q.rows).astype(np.float32).view(np.uint8).ravel()

    def in_units(table: Array, per_unit: int) -> Array:
        """[n, groups] of so many groups in a unit as [tile, unit, r, group, half]."""
        whole = np.zeros((len(features), units * per_unit), table.dtype)
        whole[:, : table.shape[1]] = by_row(table)
        return whole.reshape(-1, 2, 8, units, per_unit).transpose(0, 3, 2, 4, 1)

    with np.errstate(over="ignore"):
        halves = (q.scales / q.rows[:, None]).astype(np.float16).view(np.uint16) if name in GROUP else None
    if name == "int4":
        data.append(in_units(halves, 2))
    elif name == "fp4":
        data.append(in_units(to_bf16(q.scales), 2))
    elif name == "int4_zeros":
        first = np.where(kind == "bf16", 0xC300, 0xE400).astype(np.uint16)  # -128, -1024
        data.append(np.concatenate([in_units(halves, 1), in_units(first + q.zeros.astype(np.uint16), 1)], 3))
    elif name == "int8_groups":
        data.append(in_units(halves, 1))
    elif name == "fp8_blocks":
        eight = in_units(q.scales.astype(np.float32), 1)[:, :, 0, 0]  # tile, unit, half
        data.append(np.concatenate([eight, np.zeros_like(eight)], -1))
    flat = [np.ascontiguousarray(part).reshape(*tiles.shape[:2], -1).view(np.uint8) for part in data]
    return np.concatenate([np.concatenate(flat, -1).ravel(), rows])
