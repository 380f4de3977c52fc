"""The tensors of a GGUF file under the names of a Hugging Face checkpoint, as plain numbers."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm import _core
from infinilm.checkpoint.mapped import MappedTensors, file_state
from infinilm.checkpoint.safetensors_header import TensorInfo, file_errors
from infinilm.errors import WeightError
from infinilm.gguf.architectures import Architecture
from infinilm.gguf.config import architecture_of, config_json, stored_dtype
from infinilm.gguf.file import GgufFile, open_gguf

__all__ = ["GgufCheckpoint"]

_PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
_CONSUMED = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})  # by config.json
_READABLE = frozenset(_PLAIN.values())

Linears = Mapping[str, tuple[list[str], bool, int]]


class GgufCheckpoint(MappedTensors):
    """A GGUF file, or the parts of one, opened for reading; a context manager, as `Checkpoint` is.

    The `dtype` of a `TensorInfo` is "float32", "bfloat16", "float16", or the type of the blocks, such as "Q4_K".

    Parameters
    ----------
    path : str or path
        The file; of a model in several, any of them.

    Raises
    ------
    FileNotFoundError, WeightError
        A file is absent or damaged.
    ConfigError
        An architecture that is not supported.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path = Path(path)
        with file_errors(self.path):
            gguf = open_gguf(self.path)
        self._states = MappingProxyType({part: file_state(part.stat()) for part in gguf.parts})
        self._gguf, self._row = gguf, architecture_of(gguf)
        self._head_dim: int = config_json(gguf)["head_dim"]
        self._types: dict[str, str] = {}
        self._interleaved: set[str] = set()
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(self._named_tensors(gguf, self._row))
        self.dtypes = _READABLE | {t for t in set(self._types.values()) if _core.gguf_type(t)[2]}

    def _named_tensors(self, gguf: GgufFile, row: Architecture) -> dict[str, TensorInfo]:
        found: dict[str, TensorInfo] = {}
        for tensor in gguf.tensors.values():
            if tensor.name in _CONSUMED:
                continue
            name, base = _name(tensor.name, row)
            if name in found:
                raise WeightError(f"{tensor.file}: two tensors are {name!r}, one of them {tensor.name!r}")
            if base in row.interleaved:
                self._interleaved.add(name)
            self._types[name] = tensor.type
            dtype = _PLAIN.get(tensor.type, tensor.type)
            found[name] = TensorInfo(name, dtype, tensor.shape, tensor.file, tensor.offset, tensor.nbytes)
        return found

    def _interleaved_head_dim(self, name: str) -> int:
        """The size of the heads whose halves take turns in the rows of a tensor; 0: they do not."""
        if name not in self._interleaved:
            return 0
        info, head_dim = self.info(name), self._head_dim
        if head_dim % 2 or not info.shape or info.shape[0] % head_dim:
            raise WeightError(f"{info.file}: tensor {name!r} of shape {info.shape} has no heads of {head_dim} rows")
        return head_dim

    def bytes_of(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes of a tensor as they are stored: a read-only view of the mapped file."""
        info = self.info(name)
        return np.frombuffer(self._mapping(info), np.uint8, info.nbytes, info.offset)

    def read(self, name: str, dtype: str) -> tuple[npt.NDArray[Any], str]:
        """Return a tensor for an engine that computes in `dtype`, and the dtype it has: 16 bits are exact in float32.

        In place, a read-only view of the file, where it needs no conversion; else made numbers of `dtype`, rounded to
        nearest, and its pages of the file released. bfloat16 comes as uint16.

        Raises
        ------
        WeightError
            A value that `dtype` cannot hold, a type that is not read, or no such tensor.
        """
        info, type_name = self.info(name), self._types[name]
        is_exact = info.dtype == dtype or (dtype == "float32" and info.dtype in _READABLE)
        if is_exact and name not in self._interleaved:
            return self.bytes_of(name).view(_NUMPY[info.dtype]).reshape(info.shape), info.dtype
        target = info.dtype if is_exact else dtype
        head_dim = self._interleaved_head_dim(name)
        try:
            shape = (*info.shape, 1) if len(info.shape) == 1 else info.shape  # a bias has a row for each output
            tensor = _core.gguf_dequantise(self.bytes_of(name), type_name, shape, target, interleaved_head_dim=head_dim)
        except WeightError as error:
            raise WeightError(f"{info.file}: tensor {name!r}: {error}") from None
        self.release(name)
        return np.asarray(tensor.memory()).view(_NUMPY[target]).reshape(info.shape), target

    def native_weights(self, linears: Linears) -> dict[str, str]:
        """Return the weights that CPUs can compute with as they are stored, and their types.

        Gate and up, whose outputs are multiplied as they come, must be of one type, and ranks must cut the inputs of a
        linear at multiples of a block.

        Parameters
        ----------
        linears : mapping of str to (list of str, bool, int)
            As `_core.linears` gives them.
        """
        native: dict[str, str] = {}
        for names, pairs, unit in linears.values():
            types = {name: self._types[name] for name in names if name in self._types}
            if pairs and len(set(types.values())) > 1:
                continue
            for name, type_name in types.items():
                block, _, _, packed_bytes = _core.gguf_type(type_name)
                if packed_bytes and unit % block == 0:
                    native[name] = type_name
        return native

    def packed_bytes(self, name: str) -> int:
        """Bytes that a tensor takes when CPUs compute with its integers."""
        _, stored, _, packed = _core.gguf_type(self._types[name])
        return self.info(name).nbytes // stored * packed

    def load_blocks(self, engine: _core.InferEngine, name: str) -> list[str]:
        """Give an engine a weight as it is stored; return the names of those that it does not read again."""
        rows, info = self.bytes_of(name).reshape(self.info(name).shape[0], -1), self.info(name)
        try:
            return engine.load_param(name, _core.from_numpy(rows), self._types[name], self._interleaved_head_dim(name))
        except WeightError as error:
            raise WeightError(f"{info.file}: {error}") from None

    def checkpoint_dtype(self) -> str:
        """See `MappedTensors.checkpoint_dtype`; of quantised weights "float16"."""
        return stored_dtype(self._gguf)

    def kept_dtype(self, dtype: str) -> str:
        """See `MappedTensors.kept_dtype`."""
        plain = _PLAIN.get(next(iter(self.types()), "F32"))
        return plain if plain and dtype == "float32" else dtype

    def types(self) -> dict[str, int]:
        """How many weights are stored in each type, most first."""
        counts: dict[str, int] = {}
        for name, info in self.tensors.items():
            counts[self._types[name]] = counts.get(self._types[name], 0) + math.prod(info.shape)
        return dict(sorted(counts.items(), key=lambda item: -item[1]))


def _name(name: str, row: Architecture) -> tuple[str, str]:
    """Name in a Hugging Face checkpoint, and name within a layer; a tensor that nobody knows keeps its own."""
    if match := _LAYER.fullmatch(name):
        layer, base, kind = match.groups()
        if base in row.layer_names:
            return f"model.layers.{int(layer)}.{row.layer_names[base]}.{kind}", base
    base, _, kind = name.rpartition(".")
    return (f"{row.model_names[base]}.{kind}", base) if base in row.model_names else (name, base)
