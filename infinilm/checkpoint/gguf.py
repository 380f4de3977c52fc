"""The tensors of a GGUF file under the names of a Hugging Face checkpoint, as plain numbers."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm import _core
from infinilm.checkpoint.dtype_conversion import convert
from infinilm.checkpoint.head_rows import order_of_pairs, rows_by_head, tiled_heads
from infinilm.checkpoint.mapped import MappedTensors, file_state
from infinilm.checkpoint.native import Linears, LoadParam, bytes_of_block, choose_native, type_on
from infinilm.checkpoint.safetensors_header import TensorInfo, file_errors
from infinilm.checkpoint.sources import FoundTensors, Source, find_by_names
from infinilm.config.families import family_of_model_type
from infinilm.config.families.names import DELTA_BY_HEAD, GATED_Q, TensorNames
from infinilm.config.json.model_config import ModelConfig
from infinilm.config.spec import shapes_of
from infinilm.errors import WeightError
from infinilm.gguf.architectures import JOINED, MATRICES, STACKED, Architecture
from infinilm.gguf.config import architecture_of, config_json, gguf_layers, layer_numbers, stored_dtype
from infinilm.gguf.file import GgufFile, open_gguf, reading
from infinilm.pooling.recipe import GGUF_DENSE

__all__ = ["PLAIN", "GgufCheckpoint", "GgufTensors"]

PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
_OF_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_MODULE = re.compile(r"model\.layers\.\d+\.(.+?)(?:\.weight|\.bias|_bias)?$")
_TENSOR = re.compile(r"model\.layers\.\d+\.(.+?)(?:\.weight|\.bias)?")
_BARE = frozenset({"self_attn.sinks"})  # no ".weight" behind it
_CONSUMED = frozenset(  # by config.json, and by what follows the pooling
    f"{name}.weight" for name in ("rope_freqs", "rope_factors_long", "rope_factors_short", *GGUF_DENSE)
)
_BY_HEAD = ("self_attn.k_b_proj.weight", "self_attn.v_b_proj.weight")  # a matrix for each head
_FLAT = (".A_log", ".mamba.D", ".mamba.norm.weight")  # columns, or a row for each group
_READABLE = frozenset(PLAIN.values())

Sources = Mapping[str, Source]


class GgufTensors(MappedTensors):
    """Tensors of a GGUF file, or of the parts of one, under other names; a context manager, as `Checkpoint` is.

    The `dtype` of a `TensorInfo` is "float32", "bfloat16", "float16", or the type of the blocks, such as "Q4_K".

    Parameters
    ----------
    path : Path
    gguf : GgufFile
    """

    def __init__(self, path: Path, gguf: GgufFile) -> None:
        super().__init__()
        self.path, self._gguf = path, gguf
        with file_errors(path):
            self._states = MappingProxyType({part: file_state(part.stat()) for part in gguf.parts})
        self._types: dict[str, str] = {}
        self._scales: dict[str, npt.NDArray[np.float32]] = {}  # of NVFP4 weights: one number for each matrix

    def _take(self, tensors: Mapping[str, TensorInfo]) -> None:
        """Have these tensors, whose types are known."""
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(dict(tensors))
        self.dtypes = _READABLE | {t for t in set(self._types.values()) if _core.gguf_type(t)[2]}

    def _offset(self, name: str) -> float:
        """What the converter has added to all numbers of a tensor."""
        return 0.0

    def bytes_of(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes of a tensor as they are stored: a read-only view of the mapped file."""
        info = self.info(name)
        return np.frombuffer(self._mapping(info), np.uint8, info.nbytes, info.offset)

    def _rows(self, source: Source) -> npt.NDArray[np.uint8]:
        """The stored bytes of a parameter, [rows, bytes]: a view of the file where they lie there in their order."""
        info = self.info(source.tensor)
        of_matrix = info.shape if source.matrix is None else info.shape[1:]
        num_rows = math.prod(
            info.shape[: len(info.shape) - (len(of_matrix) > 1)]
        )  # a vector has a row for each element
        rows = self.bytes_of(source.tensor).reshape(num_rows, -1)
        first = 0 if source.matrix is None else source.matrix * of_matrix[0]
        rows = rows[first + source.begin : first + source.end : source.step]
        return rows if source.order is None else rows[source.order]

    def read(self, source: Source, dtype: str) -> tuple[npt.NDArray[Any], str]:
        """Return a parameter for an engine that computes in `dtype`, and its dtype: 16 bits are exact in float32.

        In place, a read-only view of the file, where it needs no conversion; else made numbers of `dtype`, rounded to
        nearest, and its pages of the file released. bfloat16 comes as uint16.

        Raises
        ------
        WeightError
            A value that `dtype` cannot hold, a type that is not read, or no such tensor.
        """
        name, info, type_name = source.tensor, self.info(source.tensor), self._types[source.tensor]
        offset = self._offset(name)
        of_decay = name.endswith(".A_log")
        is_exact = info.dtype == dtype or (dtype == "float32" and info.dtype in _READABLE)
        scale = self._scale(source)
        target = "float32" if offset or of_decay or scale != 1 else info.dtype if is_exact else dtype
        rows = self._rows(source)
        if target == info.dtype:
            array = rows.view(_NUMPY[target])
        else:
            shape = len(rows), rows.shape[1] // _core.gguf_type(type_name)[1] * _core.gguf_type(type_name)[0]
            try:
                tensor = _core.gguf_dequantise(np.ascontiguousarray(rows).reshape(-1), type_name, shape, target)
            except WeightError as error:
                raise WeightError(f"{info.file}: tensor {name!r}: {error}") from None
            self.release(name, source.places)
            array = np.asarray(tensor.memory()).view(_NUMPY[target]).reshape(shape)
        of_matrix = info.shape if source.matrix is None else info.shape[1:]
        array = array.reshape(len(rows), *of_matrix[1:])
        if source.transposed:
            array = source.transpose(array)
        if source.column_order is not None:
            array = np.ascontiguousarray(array[:, source.column_order])
        if of_decay:  # the file has what the recurrence multiplies with, -exp(A_log); of Ling 3, exp(A_log)
            array, target = convert(np.log(np.abs(array)), "float32", dtype, name=name), dtype
        if scale != 1:
            array, target = convert(array * np.float32(scale), "float32", dtype, name=name), dtype
        if offset:
            array, target = convert(array - np.float32(offset), "float32", dtype, name=name), dtype
        return array, target

    def _scale(self, source: Source) -> float:
        """What multiplies the numbers of a parameter besides the scales of its blocks."""
        scales = self._scales.get(source.tensor)
        return 1.0 if scales is None else float(scales[source.matrix or 0])

    def checkpoint_dtype(self) -> str:
        """See `MappedTensors.checkpoint_dtype`; of quantised weights "float16"."""
        return stored_dtype(self._gguf)

    def kept_dtype(self, dtype: str) -> str:
        """See `MappedTensors.kept_dtype`."""
        plain = PLAIN.get(next(iter(self.types()), "F32"))
        return plain if plain and dtype == "float32" else dtype

    def types(self) -> dict[str, int]:
        """How many weights are stored in each type, most first."""
        counts: dict[str, int] = {}
        for name, info in self.tensors.items():
            counts[self._types[name]] = counts.get(self._types[name], 0) + math.prod(info.shape)
        return dict(sorted(counts.items(), key=lambda item: -item[1]))


class GgufCheckpoint(GgufTensors):
    """The model of a GGUF file, opened for reading.

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

    names: TensorNames

    def __init__(self, path: str | os.PathLike[str]) -> None:
        with file_errors(Path(path)):
            gguf = open_gguf(path)
        super().__init__(Path(path), gguf)
        self._row = architecture_of(gguf)
        with reading(self.path):
            config = config_json(gguf)
            self._take(self._named_tensors(gguf, self._row, config["num_hidden_layers"]))
            self.names, self._order = self._layout(config)
            self._numbers = layer_numbers(gguf, self._row, config["num_hidden_layers"])
        self._config = config

    def _named_tensors(self, gguf: GgufFile, row: Architecture, num_layers: int) -> dict[str, TensorInfo]:
        """The tensors of the model and of its MTP head, which is the layer behind its last, or all behind it."""
        found: dict[str, TensorInfo] = {}
        end_of_head = gguf_layers(gguf) if family_of_model_type(row.model_type).names.head_modules else num_layers + 1
        for tensor in gguf.tensors.values():
            of_layer = _OF_LAYER.fullmatch(tensor.name)
            if self._is_scale(gguf, tensor.name, row):
                continue
            if tensor.name in _CONSUMED or (of_layer and end_of_head <= int(of_layer[1]) < gguf_layers(gguf)):
                continue
            name, shape = _name(tensor.name, row), tensor.shape
            if (
                name.endswith(".mlp.gate_up_proj.weight")
                and f"blk.{name.split('.')[2]}.ffn_gate.weight" in gguf.tensors
            ):
                name = name.replace("gate_up_proj", "up_proj")  # older files of Jina v2 have both apart
            if name in found:
                raise WeightError(f"{tensor.file}: two tensors are {name!r}, one of them {tensor.name!r}")
            if name.endswith(".mlp.shared_expert_gate.weight") and len(shape) == 1:
                shape = 1, *shape  # a linear of one output
            elif name.endswith(".e_score_correction_bias") and shape[:-1] == (1,):
                shape = shape[1:]  # as ERNIE 4.5 has it, and the converter leaves it
            elif name.endswith(_BY_HEAD) and len(shape) == 3:
                shape = shape[0] * shape[1], shape[2]
            elif name.endswith(_FLAT):
                shape = (math.prod(shape),)
            elif name.endswith(("conv1d.weight", ".conv.conv.weight")):  # with axes of length 1, or without
                shape = math.prod(shape[:-1]), 1, shape[-1]
            dtype = PLAIN.get(tensor.type, tensor.type)
            own = [TensorInfo(name, dtype, shape, tensor.file, tensor.offset, tensor.nbytes)]
            if (pattern := MATRICES.get(tensor.name.removesuffix(".weight"))) and len(shape) == 3:
                size = tensor.nbytes // shape[0]
                names = [f"{pattern.format(i)}.weight" for i in range(shape[0])]
                places = [tensor.offset + i * size for i in range(shape[0])]
                own = [
                    TensorInfo(part, dtype, shape[1:], tensor.file, place, size)
                    for part, place in zip(names, places, strict=True)
                ]
            self._types.update((info.name, tensor.type) for info in own)
            found.update((info.name, info) for info in own)
        return found

    def _is_scale(self, gguf: GgufFile, name: str, row: Architecture) -> bool:
        """Keep the scale of an NVFP4 weight, a tensor beside it that multiplies all of it.

        The scale of its inputs, which says how they may be rounded to 4 bits, is not used.
        """
        stem, _, kind = name.rpartition(".")
        weight = gguf.tensors.get(f"{stem}.weight")
        if kind not in ("scale", "input_scale") or weight is None or weight.type != "NVFP4":
            return False
        if kind == "scale":
            tensor = gguf.tensors[name]
            matrices = weight.shape[0] if len(weight.shape) == 3 else 1
            if tensor.type != "F32" or math.prod(tensor.shape) != matrices:
                raise WeightError(
                    f"{tensor.file}: tensor {name!r} must be {matrices} numbers of F32, the scales of an NVFP4 weight; "
                    f"got {tensor.type} of shape {tensor.shape}"
                )
            self._scales[_name(weight.name, row)] = np.fromfile(tensor.file, "<f4", matrices, offset=tensor.offset)
        return True

    def _layout(self, config: dict[str, Any]) -> tuple[TensorNames, npt.NDArray[np.int64] | None]:
        """How the engine's parameters lie in the tensors, and the order of the elements of a head of q and k."""
        modules = {match[1] for name in self.tensors if (match := _MODULE.match(name))}
        family = family_of_model_type(config["model_type"])
        norms_embedding = family.embedding_norm  # beside the norms of layers
        has_norm = "model.embed_norm.weight" in self.tensors
        names = TensorNames(
            joined={whole: parts for whole, parts in JOINED.items() if whole in modules},
            stacked={whole: parts for whole, parts in STACKED.items() if whole in modules},
            renamed=self._row.renamed,
            later_layers=True,
            head_modules=family.names.head_modules,
            by_head=(GATED_Q,) * self._row.gated_q + DELTA_BY_HEAD * self._row.delta_by_head,
            norm_of_embedding="embed_norm" if has_norm and not norms_embedding else "",
            norm_of_layer="output_norm" if "output_norm" in modules else "",
        )
        prefix = f"{self._gguf.metadata['general.architecture']}."
        # Where RoPE has sections, the converter has turned neighbours to halves.
        if self._row.rope_pairs == "halves" or f"{prefix}rope.dimension_sections" in self._gguf.metadata:
            return names, None
        head_dim = config["head_dim"]
        rotary_dim = int(head_dim * config.get("partial_rotary_factor", 1))
        for name, info in self.tensors.items():
            if name.endswith((".q_proj.weight", ".k_proj.weight", ".qkv_proj.weight")) and info.shape[0] % head_dim:
                raise WeightError(f"{info.file}: tensor {name!r} of shape {info.shape} has no heads of {head_dim} rows")
        if rotary_dim % 2:
            raise WeightError(f"{self.path}: RoPE turns {rotary_dim} elements of a head, which are no pairs")
        return names, order_of_pairs(head_dim, rotary_dim)

    def _offset(self, name: str) -> float:
        """See `GgufTensors._offset`."""
        has_offset = name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
        return self._row.norm_offset if has_offset else 0.0

    def find(self, expected: Mapping[str, tuple[int, ...]]) -> FoundTensors:
        """Find an engine's parameters, by their names and shapes."""
        config = ModelConfig.from_dict(self._config)
        layers = shapes_of(config)
        by_head = rows_by_head(config, self.names) | (tiled_heads(config) if self._row.tiled_heads else {})
        there = {match[1] for name in self.tensors if (match := _TENSOR.fullmatch(name))}
        by_head = {module: rows for module, rows in by_head.items() if rows.tensor in there}
        values = {name: array for name, array in self._numbers.items() if name in expected}
        others = {name: shape for name, shape in expected.items() if name not in values}
        found = find_by_names(self.names, self._order, layers, others, self.tensors, by_head)
        return replace(found, values=found.values | values)

    def native_weights(self, linears: Linears, sources: Sources, device: str = "cpu") -> dict[str, str]:
        """Return the weights whose blocks a device computes with, and their types in the file: see `choose_native`.

        Weights that must be of one type must be so on the device (`type_on`). `sources`: where the parameters are.
        """
        types = {
            name: self._types[s.tensor]
            for name, s in sources.items()
            if s.tensor in self._types and (s.column_order is None or self._block_order(s) is not None)
        }
        on_device = {name: self._type_on(sources[name], device) for name in types}
        return {name: types[name] for name in choose_native(linears, on_device, device)}

    def _type_on(self, source: Source, device: str) -> str:
        """Return the type that a parameter's blocks have on a device: see `type_on`."""
        scales = self._scales.get(source.tensor, np.ones(1, np.float32))
        if device == "cpu":
            scales = scales[(source.matrix or 0) :][:1]
        return "NVFP4_ROW" if (scales != 1).any() else type_on(self._types[source.tensor], device)

    def _block_order(self, source: Source) -> npt.NDArray[np.int64] | None:
        """`Source.column_order` as an order of blocks; None: it is none."""
        assert source.column_order is not None
        block = _core.gguf_type(self._types[source.tensor])[0]
        if len(source.column_order) % block:
            return None
        blocks = source.column_order.reshape(-1, block)
        order: npt.NDArray[np.int64] = blocks[:, 0] // block
        return order if np.array_equal(blocks, order[:, None] * block + np.arange(block)) else None

    def packed_bytes(self, source: Source, device: str = "cpu") -> int:
        """Bytes that a parameter takes when a device computes with its integers; 0: it does not."""
        info, type_name = self.info(source.tensor), type_on(self._types[source.tensor], device)
        num_weights = len(range(source.begin, source.end, source.step)) * info.shape[-1]
        return num_weights // max(_core.gguf_type(type_name)[0], 1) * bytes_of_block(type_name, device)

    def load_blocks(self, load: LoadParam, name: str, source: Source, device: str) -> Sequence[str] | None:
        """Give an engine a weight's blocks, of the type that its device takes (`type_on`).

        Returns the names of those that it does not read again.
        """
        info, rows = self.info(source.tensor), self._rows(source)
        if source.column_order is not None:
            order = self._block_order(source)
            assert order is not None
            rows = rows.reshape(len(rows), len(order), -1)[:, order].reshape(len(rows), -1)
        rows = np.ascontiguousarray(rows)
        try:
            stored = self._types[source.tensor]
            kept = self._type_on(source, device)
            if kept == stored:
                return load(name, _core.from_numpy(rows), kept)
            if kept == "NVFP4_ROW":
                return load(name, _core.from_numpy(scaled_nvfp4(rows, self._scale(source))), kept)
            shape = len(rows), rows.shape[1] // _core.gguf_type(stored)[1] * _core.gguf_type(stored)[0]
            return load(name, _core.gguf_regroup(rows.reshape(-1), stored, shape), kept)
        except WeightError as error:
            raise WeightError(f"{info.file}: {error}") from None


def scaled_nvfp4(rows: npt.NDArray[np.uint8], scale: float) -> npt.NDArray[np.uint8]:
    """Rows of NVFP4 as those of NVFP4_ROW: a scale before each block, and codes in pairs of columns j and j + 16."""
    blocks = rows.reshape(len(rows), -1, 36)
    out = np.empty((*blocks.shape[:2], 40), np.uint8)
    out[..., :4] = np.array([scale], "<f4").view(np.uint8)
    out[..., 4:8] = blocks[..., :4]
    codes = blocks[..., 4:].reshape(*blocks.shape[:2], 2, 2, 8)  # of two pairs of 16 columns each: columns j and j + 8
    first, second = codes[..., 0, :], codes[..., 1, :]
    pairs = out[..., 8:].reshape(*blocks.shape[:2], 2, 2, 8)
    pairs[..., 0, :] = first & 15 | second << 4
    pairs[..., 1, :] = first >> 4 | second & 0xF0
    return out.reshape(len(rows), -1)


def _name(name: str, row: Architecture) -> str:
    """Name in a Hugging Face checkpoint; an unknown tensor keeps its own."""
    if (match := _OF_LAYER.fullmatch(name)) and (whole := row.whole_name(match[2])):
        return f"model.layers.{int(match[1])}.{whole}"
    if match := _LAYER.fullmatch(name):
        layer, base, kind = match.groups()
        if module := row.layer_name(base):
            end = ("_bias" if kind == "bias" else "") if module in STACKED or module in _BARE else f".{kind}"
            return f"model.layers.{int(layer)}.{module}{end}"
    base, _, kind = name.rpartition(".")
    module = row.model_name(base)
    return f"{module}.{kind}" if module else name
