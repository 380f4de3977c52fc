"""What blocks of GGUF files stand for, in float64: one formula per type, over whole arrays of blocks.

Written from the layouts of ggml-common.h, element by element, and not from the C++ code that it judges.
"""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
import numpy.typing as npt

Blocks = npt.NDArray[np.uint8]  # [num_blocks, bytes of a block]
Weights = npt.NDArray[np.float64]  # [num_blocks, weights of a block]

SIZES = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ1_S": (256, 50),
    "IQ1_M": (256, 56),
    "IQ2_XXS": (256, 66),
    "IQ2_XS": (256, 74),
    "IQ2_S": (256, 82),
    "IQ3_XXS": (256, 98),
    "IQ3_S": (256, 110),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "TQ1_0": (256, 54),
    "TQ2_0": (256, 66),
    "MXFP4": (32, 17),
    "NVFP4": (64, 36),
    # In no file: what 4 bits with zero points become.
    "Z4_32": (32, 19),
    "Z4_64": (64, 35),
    "Z4_128": (128, 67),
}
IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float64)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _half(blocks: Blocks, at: int) -> Weights:
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float64)  # [n, 1]


def _bits(blocks: Blocks, at: int, size: int) -> npt.NDArray[np.int64]:
    """Bit i of the `size` bytes from `at` on, lowest bit of the first byte first: [n, 8 * size]."""
    return np.unpackbits(blocks[:, at : at + size], axis=1, bitorder="little").astype(np.int64)


def _nibbles(blocks: Blocks, at: int, group: int = 16) -> npt.NDArray[np.int64]:
    """The low halves of each `group` bytes, then the high ones."""
    q = blocks[:, at:].reshape(len(blocks), -1, group)
    return np.concatenate([q & 15, q >> 4], axis=2).reshape(len(blocks), -1).astype(np.int64)


def _crumbs(blocks: Blocks, at: int, size: int) -> npt.NDArray[np.int64]:
    """2 bits each: of 32 bytes the lowest bits, then the next."""
    q = blocks[:, at : at + size].reshape(len(blocks), -1, 1, 32).astype(np.int64)
    return (q >> np.array([0, 2, 4, 6])[:, None] & 3).reshape(len(blocks), -1)


def _spread(scales: npt.NDArray[np.int64], size: int) -> Weights:
    return np.repeat(scales, size, axis=1).astype(np.float64)


def _six_bits(blocks: Blocks, at: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Scales and minima of Q4_K and Q5_K, [n, 8] each."""
    s = blocks[:, at : at + 12].astype(np.int64)
    first, second, third = s[:, :4], s[:, 4:8], s[:, 8:]
    scales = np.concatenate([first % 64, third % 16 + (first // 64) * 16], axis=1)
    minima = np.concatenate([second % 64, third // 16 + (second // 64) * 16], axis=1)
    return scales, minima


def _q2_k(b: Blocks) -> Weights:
    packed = b[:, :16].astype(np.int64)
    return _half(b, 80) * _spread(packed % 16, 16) * _crumbs(b, 16, 64) - _half(b, 82) * _spread(packed // 16, 16)


def _q3_k(b: Blocks) -> Weights:
    low = np.concatenate([b[:, 96:104] & 15, b[:, 96:104] >> 4], axis=1).astype(np.int64)  # [n, 16]
    high = np.concatenate([b[:, 104:108] >> shift & 3 for shift in (0, 2, 4, 6)], axis=1).astype(np.int64)
    third = _bits(b, 0, 32).reshape(len(b), 32, 8).transpose(0, 2, 1).reshape(len(b), 256)
    return _half(b, 108) * _spread(low + 16 * high - 32, 16) * (_crumbs(b, 32, 64) + 4 * third - 4)


def _q4_k(b: Blocks) -> Weights:
    scales, minima = _six_bits(b, 4)
    return _half(b, 0) * _spread(scales, 32) * _nibbles(b, 16, 32) - _half(b, 2) * _spread(minima, 32)


def _q5_k(b: Blocks) -> Weights:
    scales, minima = _six_bits(b, 4)
    fifth = _bits(b, 16, 32).reshape(len(b), 32, 8).transpose(0, 2, 1).reshape(len(b), 256)
    q = _nibbles(b, 48, 32) + 16 * fifth
    return _half(b, 0) * _spread(scales, 32) * q - _half(b, 2) * _spread(minima, 32)


def _q6_k(b: Blocks) -> Weights:
    q = _nibbles(b[:, :128], 0, 64) + 16 * _crumbs(b, 128, 64) - 32
    return _half(b, 208) * _spread(b[:, 192:208].view(np.int8).astype(np.int64), 16) * q


def _iq4_xs(b: Blocks) -> Weights:
    high = np.ascontiguousarray(b[:, 2:4]).view("<u2").astype(np.int64) >> 2 * np.arange(8) & 3
    low = np.stack([b[:, 4:8] & 15, b[:, 4:8] >> 4], axis=2).reshape(len(b), 8).astype(np.int64)
    return _half(b, 0) * _spread(low + 16 * high - 32, 32) * IQ4[_nibbles(b, 8)]


def _grid(name: str, bits: int) -> Weights:
    """The table of a type as the gguf package has it, `bits` to an element: [entries, elements of one]."""
    kind = getattr(gguf.quants, name)
    stored = np.frombuffer(bytes.fromhex(kind.grid_hex.decode()), np.uint8)
    fields = 8 // (bits + bits % 2)  # elements of 3 bits have 4 there
    elements = stored[:, None] >> (8 // fields * np.arange(fields)) & ((1 << bits) - 1)
    return np.array(kind.grid_map, np.float64)[elements].reshape(kind.grid_shape)


IQ1, IQ2_XXS, IQ2_XS, IQ2_S = (_grid(name, 2) for name in ("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S"))
IQ3_XXS, IQ3_S = (_grid(name, 3) for name in ("IQ3_XXS", "IQ3_S"))


def _words(blocks: Blocks, at: int, count: int, size: int) -> npt.NDArray[np.int64]:
    """Little-endian numbers of `size` bytes: [n, count]."""
    return np.ascontiguousarray(blocks[:, at : at + count * size]).view(f"<u{size}").astype(np.int64)


def _fields(words: npt.NDArray[np.int64], bits: int, count: int) -> npt.NDArray[np.int64]:
    """`count` numbers of so many bits of each word, lowest first: [n, words * count]."""
    return (words[..., None] >> bits * np.arange(count) & ((1 << bits) - 1)).reshape(len(words), -1)


def _signs(codes: npt.NDArray[np.int64], bits: int) -> Weights:
    """-1 for each bit that is set; of 7 bits the eighth makes the number of them even: [n, 8 * codes]."""
    signs = _fields(codes, 1, bits).reshape(*codes.shape, bits)
    if bits == 7:
        signs = np.concatenate([signs, signs.sum(axis=-1, keepdims=True) % 2], axis=-1)
    return 1.0 - 2.0 * signs.reshape(len(codes), -1)


def _entries(grid: Weights, numbers: npt.NDArray[np.int64]) -> Weights:
    return grid[numbers].reshape(len(numbers), -1)


def _iq2_xxs(b: Blocks) -> Weights:
    words = _words(b, 2, 16, 4)
    entries, codes = _fields(words[:, ::2], 8, 4), words[:, 1::2]
    scales = (0.5 + _spread(codes >> 28, 32)) * 0.25
    return _half(b, 0) * scales * _entries(IQ2_XXS, entries) * _signs(_fields(codes, 7, 4), 7)


def _iq2_xs(b: Blocks) -> Weights:
    codes = _words(b, 2, 32, 2)
    scales = (0.5 + _spread(_fields(_words(b, 66, 8, 1), 4, 2), 16)) * 0.25
    return _half(b, 0) * scales * _entries(IQ2_XS, codes % 512) * _signs(codes // 512, 7)


def _iq2_s(b: Blocks) -> Weights:
    entries = _words(b, 2, 32, 1) + 256 * _fields(_words(b, 66, 8, 1), 2, 4)
    scales = (0.5 + _spread(_fields(_words(b, 74, 8, 1), 4, 2), 16)) * 0.25
    return _half(b, 0) * scales * _entries(IQ2_S, entries) * _signs(_words(b, 34, 32, 1), 8)


def _iq3_xxs(b: Blocks) -> Weights:
    codes = _words(b, 66, 8, 4)
    scales = (0.5 + _spread(codes >> 28, 32)) * 0.5
    return _half(b, 0) * scales * _entries(IQ3_XXS, _words(b, 2, 64, 1)) * _signs(_fields(codes, 7, 4), 7)


def _iq3_s(b: Blocks) -> Weights:
    entries = _words(b, 2, 64, 1) + 256 * _fields(_words(b, 66, 8, 1), 1, 8)
    scales = 1 + 2 * _spread(_fields(_words(b, 106, 4, 1), 4, 2), 32)
    return _half(b, 0) * scales * _entries(IQ3_S, entries) * _signs(_words(b, 74, 32, 1), 8)


def _iq1(d: Weights, scales: Weights, entries: npt.NDArray[np.int64], smaller: npt.NDArray[np.int64]) -> Weights:
    """Scale * (entry + delta); of an infinite scale what the sum with a minimum gives, which is NaN."""
    shift = np.where(_spread(smaller, 256 // smaller.shape[1]) > 0, 1.125, 0.875)
    scales = d * (2 * scales + 1)
    return scales * (_entries(IQ1, entries) + 1) - scales * shift


def _iq1_s(b: Blocks) -> Weights:
    codes = _words(b, 34, 8, 2)
    entries = _words(b, 2, 32, 1) + 256 * _fields(codes, 3, 4)
    return _iq1(_half(b, 0), _spread(codes >> 12 & 7, 32), entries, codes >> 15)


def _iq1_m(b: Blocks) -> Weights:
    codes, scales = _fields(_words(b, 32, 16, 1), 4, 2), _words(b, 48, 4, 2)
    d = ((scales >> 12) << 4 * np.arange(4)).sum(axis=1, keepdims=True).astype("<u2").view(np.float16)
    entries = _words(b, 0, 32, 1) + 256 * (codes % 8)
    return _iq1(d.astype(np.float64), _spread(_fields(scales, 3, 4), 16), entries, codes // 8)


def _nvfp4(b: Blocks) -> Weights:
    codes = b[:, :4].astype(np.int64)
    exponents, mantissas = codes // 8 % 16, codes % 8
    scales = np.where(exponents == 0, mantissas / 512, (1 + mantissas / 8) * 2.0 ** (exponents - 7))
    return np.repeat(np.where(codes == 0x7F, 0, scales), 16, axis=1) * E2M1[_nibbles(b, 4, 8)]


def _tq1_0(b: Blocks) -> Weights:
    def digits(q: Blocks, count: int) -> npt.NDArray[np.int64]:
        powers = 3 ** np.arange(count)[:, None]
        return (q[:, None, :].astype(np.int64) * powers % 256 * 3 // 256).reshape(len(q), -1) - 1

    return _half(b, 52) * np.concatenate([digits(b[:, :32], 5), digits(b[:, 32:48], 5), digits(b[:, 48:52], 4)], axis=1)


def _z4(b: Blocks) -> Weights:
    return _half(b, 0) * (_nibbles(b, 3) - b[:, 2:3].view(np.int8).astype(np.int64))


FORMULAS: dict[str, Callable[[Blocks], Weights]] = {
    "F32": lambda b: np.ascontiguousarray(b).view("<f4").astype(np.float64),
    "F16": lambda b: _half(b, 0),
    "BF16": lambda b: (np.ascontiguousarray(b).view("<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64),
    "Q4_0": lambda b: _half(b, 0) * (_nibbles(b, 2) - 8),
    "Q4_1": lambda b: _half(b, 0) * _nibbles(b, 4) + _half(b, 2),
    "Q5_0": lambda b: _half(b, 0) * (_nibbles(b, 6) + 16 * _bits(b, 2, 4) - 16),
    "Q5_1": lambda b: _half(b, 0) * (_nibbles(b, 8) + 16 * _bits(b, 4, 4)) + _half(b, 2),
    "Q8_0": lambda b: _half(b, 0) * b[:, 2:].view(np.int8),
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "IQ4_NL": lambda b: _half(b, 0) * IQ4[_nibbles(b, 2)],
    "IQ4_XS": _iq4_xs,
    "TQ1_0": _tq1_0,
    "TQ2_0": lambda b: _half(b, 64) * (_crumbs(b, 0, 64) - 1),
    "MXFP4": lambda b: 2.0 ** (b[:, :1].astype(np.float64) - 127) * E2M1[_nibbles(b, 1)],
    "NVFP4": _nvfp4,
    "Z4_32": _z4,
    "Z4_64": _z4,
    "Z4_128": _z4,
}


def dequantise(type_name: str, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    """The weights of whole blocks, flat."""
    with np.errstate(all="ignore"):  # scales of any bits
        return FORMULAS[type_name](data.reshape(-1, SIZES[type_name][1])).reshape(-1)


# Where a block has float16 numbers that scale all of it; the second one those that are added or subtracted.
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2)}
HALVES |= {"Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,)}
HALVES |= dict.fromkeys(("IQ1_M", "MXFP4", "NVFP4", "F32", "BF16"), ())


def random_blocks(type_name: str, num_blocks: int, seed: int, scale: float | npt.NDArray[np.float64] = 0.02) -> Blocks:
    """Bytes of any kind, whose float16 scales are of the size that those of models have, or of another: flat."""
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (num_blocks, SIZES[type_name][1]), dtype=np.uint8)
    for at in HALVES.get(type_name, (0,)):
        data[:, at : at + 2] = rng.normal(0, scale, (num_blocks, 1)).astype(np.float16).view(np.uint8)
    if type_name == "IQ1_M":  # the upper halves of four bytes
        bits = rng.normal(0, scale, (num_blocks, 1)).astype(np.float16).view(np.uint16)
        data[:, 49::2] = data[:, 49::2] & 15 | (bits >> 4 * np.arange(4) & 15).astype(np.uint8) << 4
    if type_name == "NVFP4":
        data[:, :4] = rng.integers(1, 64, (num_blocks, 4))
    if type_name == "MXFP4":
        data[:, 0] = rng.integers(115, 124, num_blocks)
    if type_name in ("F32", "BF16"):
        values = rng.normal(0, scale, (num_blocks, 1)).astype(np.float32)
        data[:] = values.view(np.uint8)[:, 4 - SIZES[type_name][1] :]
    return data.reshape(-1)
