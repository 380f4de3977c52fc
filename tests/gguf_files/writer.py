"""Writes GGUF files: metadata of any kind, tensors of any type."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf_files.block_formulas import SIZES, dequantise, random_blocks

NUMBERS = {"uint8": (0, "B"), "int8": (1, "b"), "uint16": (2, "H"), "int16": (3, "h"), "uint32": (4, "I")}
NUMBERS |= {"int32": (5, "i"), "float32": (6, "f"), "bool": (7, "?"), "uint64": (10, "Q"), "int64": (11, "q")}
NUMBERS |= {"float64": (12, "d")}
TYPE_NUMBERS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11}
TYPE_NUMBERS |= {"Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "IQ4_NL": 20, "IQ4_XS": 23, "BF16": 30, "TQ1_0": 34, "TQ2_0": 35}
TYPE_NUMBERS |= {"IQ2_XXS": 16, "IQ2_XS": 17, "IQ3_XXS": 18, "IQ1_S": 19, "IQ3_S": 21, "IQ2_S": 22, "IQ1_M": 29}
TYPE_NUMBERS |= {"MXFP4": 39, "NVFP4": 40, "Q1_0": 41, "I8": 24}
SIZES_OF_ALL = {**SIZES, "Q1_0": (128, 18)}


@dataclass(frozen=True)
class As:
    """A value of the metadata whose type is not the usual one, which is uint32, float32, bool or string."""

    type: str
    value: Any


@dataclass(frozen=True)
class Stored:
    """A tensor: its type, its shape (slowest dimension first) and its bytes."""

    type: str
    shape: tuple[int, ...]
    data: bytes


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value(item: Any) -> bytes:
    """Type and value."""
    if isinstance(item, As):
        kind, code = NUMBERS[item.type]
        if isinstance(item.value, list):
            return struct.pack(f"<IIQ{len(item.value)}{code}", 9, kind, len(item.value), *item.value)
        return struct.pack(f"<I{code}", kind, item.value)
    if isinstance(item, list):
        if item and isinstance(item[0], (str, bytes)):
            return struct.pack("<IIQ", 9, 8, len(item)) + b"".join(map(string, item))
        return value(As("float32" if any(isinstance(i, float) for i in item) else "int32", item))
    if isinstance(item, (str, bytes)):
        return struct.pack("<I", 8) + string(item)
    return value(As("bool" if isinstance(item, bool) else "float32" if isinstance(item, float) else "uint32", item))


@dataclass
class File:
    """What a file is to hold."""

    metadata: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Stored] = field(default_factory=dict)
    version: int = 3
    alignment: int = 32

    def header(self) -> bytes:
        out = b"GGUF" + struct.pack("<IQQ", self.version, len(self.tensors), len(self.metadata))
        for key, item in self.metadata.items():
            out += string(key) + value(item)
        offset = 0
        for name, tensor in self.tensors.items():
            dims = tensor.shape[::-1]
            out += string(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
            out += struct.pack("<IQ", TYPE_NUMBERS[tensor.type], offset)
            offset += len(self._padded(tensor.data))
        return self._padded(out)

    def to_bytes(self) -> bytes:
        return self.header() + b"".join(self._padded(tensor.data) for tensor in self.tensors.values())

    def write(self, path: Path) -> Path:
        with path.open("wb") as file:
            file.write(self.header())
            for tensor in self.tensors.values():
                file.write(self._padded(tensor.data))
        return path

    def _padded(self, data: bytes) -> bytes:
        return data + bytes(-len(data) % self.alignment)


def quantise(type_name: str, weights: npt.NDArray[np.float32]) -> Stored:
    """Round weights [.., columns] to a type, the plain way: the largest of a block decides its scale.

    Others get random blocks instead, of weights as large, which are as good for comparing two readers.
    """
    block, size = SIZES[type_name]
    flat = np.ascontiguousarray(weights, np.float32).reshape(-1, block)
    if type_name == "F32":
        data = flat.tobytes()
    elif type_name == "F16":
        data = flat.astype(np.float16).tobytes()
    elif type_name == "BF16":
        bits = flat.view(np.uint32).astype(np.uint64)
        data = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).tobytes()
    elif type_name == "Q8_0":
        d = (np.abs(flat).max(axis=1, keepdims=True) / 127).astype(np.float16)
        data = np.concatenate([d.view(np.uint8), _rounded(flat, d, -127, 127).astype(np.int8).view(np.uint8)], axis=1)
        data = data.tobytes()
    elif type_name == "Q4_0":
        largest = np.take_along_axis(flat, np.abs(flat).argmax(axis=1, keepdims=True), axis=1)
        d = (largest / -8).astype(np.float16)
        q = (_rounded(flat, d, -8, 7) + 8).astype(np.uint8)
        data = np.concatenate([d.view(np.uint8), q[:, :16] | q[:, 16:] << 4], axis=1).tobytes()
    else:
        deviation = dequantise(type_name, random_blocks(type_name, 256, seed=0, scale=1)).std()
        data = random_blocks(type_name, len(flat), seed=len(flat), scale=flat.std() / deviation).tobytes()
    assert len(data) == len(flat) * size
    return Stored(type_name, tuple(weights.shape), data)


def _rounded(flat: Any, d: Any, low: int, high: int) -> npt.NDArray[np.float32]:
    scale = d.astype(np.float32)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    return np.clip(np.rint(flat * inverse), low, high)
