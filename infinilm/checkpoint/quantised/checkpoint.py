"""A quantised checkpoint as its plain tensors: what several tensors say of a weight is one weight here."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from infinilm import _core
from infinilm.checkpoint.folder import FLOATS, Checkpoint
from infinilm.checkpoint.native import Linears, LoadParam, bytes_of_block, choose_native
from infinilm.checkpoint.quantised.config import QuantisedLinears
from infinilm.checkpoint.quantised.layouts import LAYOUTS
from infinilm.checkpoint.quantised.scheme import Codes, Layout, Scheme, Shape, as_float32
from infinilm.checkpoint.safetensors_header import TensorInfo, read_header
from infinilm.errors import WeightError

if TYPE_CHECKING:
    from infinilm.checkpoint.sources import Source

__all__ = ["QuantisedCheckpoint"]

_NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}

Sources = Mapping[str, "Source"]


@dataclass(frozen=True, slots=True)
class _Weight:
    """A quantised weight."""

    scheme: Scheme
    shape: Shape
    parts: Mapping[str, TensorInfo]  # by suffix

    @property
    def layout(self) -> Layout:
        return LAYOUTS[self.scheme.layout]


class QuantisedCheckpoint(Checkpoint):
    """A folder of quantised safetensors, opened for reading.

    `tensors` has each quantised weight under its plain name, with the shape of the plain weight and the scheme as
    `dtype`; other tensors are as they are.

    Parameters
    ----------
    folder : str or path
    linears : QuantisedLinears
        What the config says.

    Raises
    ------
    WeightError
        A weight lacks a tensor, or has one of another shape or dtype than its scheme has.
    """

    def __init__(self, folder: str | os.PathLike[str], linears: QuantisedLinears) -> None:
        super().__init__(folder)
        self._linears = linears
        # The tensor that was read last: the next source may be another part of it.
        self._last: tuple[tuple[str, int | None], Codes] | None = None
        self._weights: dict[str, _Weight] = {}
        self._metadata: dict[Path, Mapping[str, str]] = {}  # of files whose metadata count
        stored = self.tensors
        used: set[str] = set()
        for name, info in stored.items() if self.packed is None else ():
            for suffix, layouts in _mains(linears).items():
                if name.endswith(suffix) and info.dtype in {t for layout in layouts for t in _main_dtypes(layout)}:
                    module = name.removesuffix(suffix)
                    weight = self._read_weight(module, suffix, stored)
                    used.update(part.name for part in weight.parts.values())
                    self._weights[module + weight.layout.name] = weight
                    break
        plain = {n: t for n, t in stored.items() if n not in used and not n.endswith(linears.not_read)}
        for name in _idle_parts(linears, plain):
            plain.pop(name, None)
        for name, weight in self._weights.items():
            if name in plain:
                raise WeightError(f"{plain[name].file}: {name!r} is there twice, also as {weight.scheme}")
            first, size = next(iter(weight.parts.values())), sum(part.nbytes for part in weight.parts.values())
            plain[name] = TensorInfo(name, str(weight.scheme), weight.shape, first.file, first.offset, size)
        self.tensors = MappingProxyType(plain)
        self.dtypes = frozenset(FLOATS) | {str(weight.scheme) for weight in self._weights.values()}

    def _read_weight(self, module: str, suffix: str, stored: Mapping[str, TensorInfo]) -> _Weight:
        """Check the tensors of a quantised module against its scheme."""
        first = stored[module + suffix]
        schemes = [s for s in self._linears.schemes_of(module) if LAYOUTS[s.layout].main == suffix]
        schemes = [s for s in schemes if first.dtype in _main_dtypes(LAYOUTS[s.layout])]
        if not schemes:
            raise WeightError(
                f"{first.file}: tensor {first.name!r} ({first.dtype}) is quantised, but quantization_config of "
                f"{self._linears.method} says of no such weight here; is config.json that of another checkpoint?"
            )
        complete = [s for s in schemes if not _absent(LAYOUTS[s.layout], module, stored)]
        scheme = (complete or schemes)[0]
        layout = LAYOUTS[scheme.layout]
        where = f"{first.file}: {module!r}, which is {scheme}"
        if absent := _absent(layout, module, stored):
            raise WeightError(f"{where}, lacks {', '.join(absent)}: is the download complete?")
        parts = {part: stored[module + part] for part in layout.parts if module + part in stored}
        for part, info in parts.items():
            if info.dtype not in layout.parts[part].dtypes:
                allowed = " or ".join(layout.parts[part].dtypes)
                raise WeightError(f"{where}: {info.name!r} is {info.dtype}; expected {allowed}")
        if len(first.shape) not in layout.dims or 0 in first.shape:
            raise WeightError(f"{where}: {first.name!r} has the shape {list(first.shape)}, which is of no such weight")
        try:
            peeked = {part: self._view(parts[part]).copy() for part in layout.peek if part in parts}
            if layout.said is not None:
                if first.file not in self._metadata:
                    self._metadata[first.file] = read_header(first.file).metadata
                said = layout.said(self._metadata[first.file].get(module + layout.name, ""))
                peeked |= {} if said is None else {"said": said}
            shape = layout.shape(scheme, first.shape, peeked)
        except WeightError as error:
            raise WeightError(f"{where}: {error}") from None
        for part, shapes in layout.expected(scheme, shape).items():
            if part in parts and parts[part].shape not in shapes:
                expected = " or ".join(str(list(allowed)) for allowed in shapes)
                raise WeightError(
                    f"{where}: {parts[part].name!r} has the shape {list(parts[part].shape)}; expected {expected} for "
                    f"a weight of {list(shape)}"
                )
        return _Weight(scheme, shape, parts)

    def is_quantised(self, name: str) -> bool:
        """True if a tensor is made of several."""
        return name in self._weights

    def array(self, name: str) -> npt.NDArray[Any]:
        """See `Checkpoint.array`; of what is quantised there is none."""
        if name in self._weights:
            raise WeightError(f"{self.path}: tensor {name!r} is {self._weights[name].scheme}, and no array of its own")
        return super().array(name)

    def release(self, name: str, rows: slice = slice(None)) -> None:
        """See `MappedTensors.release`."""
        weight = self._weights.get(name)
        if weight is None:
            super().release(name, rows)
        elif rows in (slice(None), slice(0, weight.shape[0])) or len(weight.shape) == 3:  # of these, some matrices
            for part in weight.parts.values():
                self._release(part, rows)

    def read(self, source: Source, dtype: str) -> npt.NDArray[Any]:
        """Return the rows of a quantised weight as plain numbers, bfloat16 as uint16: exact, then rounded to `dtype`.

        Raises
        ------
        WeightError
            A weight that `dtype` cannot hold, or damaged tables.
        """
        weight = self._weights[source.tensor]
        codes, begin, end = self._codes(source)
        try:
            tensor = codes.dequantise(dtype, begin, end)
        except WeightError as error:
            raise WeightError(f"{self.path}: tensor {source.tensor!r}, which is {weight.scheme}: {error}") from None
        array = np.asarray(tensor.memory()).view(_NUMPY[dtype]).reshape(end - begin, weight.shape[-1])
        return source.choose(array)

    def _codes(self, source: Source) -> tuple[Codes, int, int]:
        """The codes of a weight, or of the one of its matrices that a source is of, and which rows a source is."""
        weight = self._weights[source.tensor]
        if self._last and self._last[0] == (source.tensor, source.matrix):
            return self._last[1], source.begin, source.end
        shape = weight.shape if source.matrix is None else (1, *weight.shape[1:])
        with np.errstate(all="ignore"):  # what overflows is infinite, here as in the formats
            try:
                parts = {p: self._view(info) for p, info in weight.parts.items() if weight.layout.parts[p].read}
                for part, info in weight.parts.items():
                    kept = (weight.layout.scale, weight.layout.minimum)
                    if part in parts and info.dtype == "bfloat16" and part not in kept:
                        parts[part] = as_float32(parts[part])
                if source.matrix is not None:
                    parts = {part: array[source.places] for part, array in parts.items()}
                codes = weight.layout.codes(weight.scheme, shape, parts)
            except WeightError as error:
                raise WeightError(f"{self.path}: tensor {source.tensor!r}, which is {weight.scheme}: {error}") from None
        self._last = ((source.tensor, source.matrix), codes)
        return codes, source.begin, source.end

    # ---- integers as they are ----

    def native_type(self, source: Source, unit: int = 0, device: str = "cpu") -> str | None:
        """Return the type of blocks that a weight can be kept in, by its headers; None: there is none.

        `unit`: what ranks cut its inputs at multiples of; 0: they do not. `device`: "cpu" or "cuda".
        """
        weight = self._weights.get(source.tensor)
        if weight is None:
            return None
        scheme = weight.scheme
        if scheme.kind == "nvfp4":
            return "NVFP4_ROW" if weight.shape[-1] % 64 == 0 and unit % 64 == 0 else None
        block_inputs = scheme.block[1] if scheme.block else 0
        sizes = weight.shape[-1], scheme.group_size, block_inputs, unit
        size = next((n for n in (128, 64, 32) if not any(size % n for size in sizes)), None)
        if size is None or scheme.reordered:
            return None
        if scheme.kind == "mxfp4":
            return "MXFP4"
        if scheme.kind == "fp8":
            if not scheme.block and not scheme.group_size:
                return "F8_ROW"
            if device == "cuda" and not (scheme.block and _share_scales(source, scheme.block[0])):
                return None  # where 8 outputs have one scale
            return "F8_128" if size == 128 else "F8_32"
        if not scheme.kind.startswith("int") or not weight.layout.scale or scheme.block:
            return None
        if weight.parts[weight.layout.scale].dtype == "float32":
            return None  # blocks have scales of 16 bits
        if weight.layout.minimum:
            return "Q4_1" if scheme.bits <= 4 else None
        if not scheme.symmetric:
            return f"Z4_{size}" if scheme.bits == 4 else None
        return {4: "Q4_0", 8: "Q8_0"}.get(scheme.bits)

    def native_weights(
        self, linears: Linears, sources: Sources, device: str = "cpu", *, by_headers: bool = True
    ) -> dict[str, str]:
        """Return the weights that a device computes with as they are stored, and the types of their blocks.

        See `choose_native`.

        Parameters
        ----------
        linears : Linears
        sources : mapping of str to Source
            Where the parameters are.
        device : str
            "cpu" or "cuda".
        by_headers : bool
            Do not look at zero points, groups and scales, which may turn out not to fit blocks.
        """
        types: dict[str, str] = {}
        for names, _, unit in linears.values():
            for name in names:
                source = sources.get(name)
                # Columns in another order would divide groups that have a scale.
                is_in_order = source is not None and source.column_order is None
                found = self.native_type(sources[name], unit, device) if is_in_order else None
                if found and bytes_of_block(found, device) and (by_headers or self._fits_blocks(sources[name], found)):
                    types[name] = found
        return choose_native(linears, types, device)

    def _fits_blocks(self, source: Source, block_type: str) -> bool:
        codes, _, _ = self._codes(source)
        return codes.block_scales(block_type) is not None

    def load_blocks(self, load: LoadParam, name: str, source: Source, type_name: str) -> Sequence[str] | None:
        """Give an engine a weight's integers and scales; return the names of those that it does not read again.

        `type_name`: as `native_weights` gives it.
        """
        codes, begin, end = self._codes(source)
        blocks = source.choose(codes.blocks(type_name, begin, end))
        self.release(source.tensor, source.places)
        return load(name, _core.from_numpy(blocks), type_name)

    # ---- what plan and info tell ----

    def packed_bytes(self, source: Source, type_name: str | None, size: int, device: str = "cpu") -> int | None:
        """Return what a quantised weight takes, as blocks or as numbers of `size` bytes; None: it is plain."""
        weight = self._weights.get(source.tensor)
        if weight is None:
            return None
        rows = range(source.begin, source.end, source.step) if source.order is None else source.order
        count = len(rows) * weight.shape[-1]
        if type_name is None:
            return count * size
        return count // _core.gguf_type(type_name)[0] * bytes_of_block(type_name, device)

    def types(self) -> dict[str, int]:
        """How many weights are stored in each scheme or dtype, most first."""
        counts: dict[str, int] = {}
        for info in self.tensors.values():
            counts[info.dtype] = counts.get(info.dtype, 0) + math.prod(info.shape)
        return dict(sorted(counts.items(), key=lambda item: -item[1]))

    def rounded_inputs(self) -> tuple[str, ...]:
        """The formats to which the schemes of this checkpoint round the inputs of linears."""
        return tuple(sorted({w.scheme.inputs for w in self._weights.values() if w.scheme.inputs}))

    def takes_fp8_inputs(self) -> bool:
        """Whether GPUs have kernels for some weights beside inputs of FP8.

        They have for FP8 with scales of outputs, of tensors, or of blocks of 128 inputs.
        """
        return bool(self._fp8_schemes())

    def asks_for_fp8_inputs(self) -> bool:
        """Whether the schemes of all such weights round their inputs to FP8; see `rounded_inputs`."""
        schemes = self._fp8_schemes()
        return bool(schemes) and all(scheme.inputs.startswith("fp8") for scheme in schemes)

    def inputs_on_gpus(self, native_types: Sequence[str]) -> set[str]:
        """To what kernels of GPUs round the inputs of the weights of these schemes, where that is wanted."""
        return {s.inputs_on_gpus() for s in self._fp8_schemes() if str(s) in native_types}

    def _fp8_schemes(self) -> list[Scheme]:
        schemes = {w.scheme for w in self._weights.values()}
        return [s for s in schemes if s.inputs_on_gpus()]

    def is_zero_bias(self, name: str) -> bool:
        """True if a tensor is a bias of zeros of a quantised linear, which some tools write where a model has none."""
        weight = name.removesuffix(".bias") + ".weight"
        is_bias = self._linears.zero_biases and name.endswith(".bias") and weight in self._weights
        return is_bias and self.tensors[name].dtype in FLOATS and not self.array(name).any()


def _share_scales(source: Source, block_rows: int) -> bool:
    """True if 8 rows, from a multiple of 8 on, lie in the same blocks of the tensor's rows, in any order."""
    if source.step != 1 or source.columns or source.transposed:
        return False
    rows = np.arange(source.end - source.begin) if source.order is None else source.order
    blocks = (source.begin + rows) // block_rows
    return bool((blocks == np.repeat(blocks[::8], 8)[: len(blocks)]).all())


def _mains(linears: QuantisedLinears) -> dict[str, list[Layout]]:
    found: dict[str, list[Layout]] = {}
    for scheme in linears.schemes():
        layout = LAYOUTS[scheme.layout]
        found.setdefault(layout.main, []).append(layout)
    return found


def _idle_parts(linears: QuantisedLinears, plain: Mapping[str, TensorInfo]) -> list[str]:
    """Scales of weights that are plain: tools write them beside weights that fit no block, or that they leave."""
    suffixes = tuple({part for s in linears.schemes() for part in LAYOUTS[s.layout].parts} - {".weight"})
    found = [
        (name, suffix) for name in plain if name.endswith(suffixes) for suffix in suffixes if name.endswith(suffix)
    ]
    weights = ((name, plain.get(f"{name.removesuffix(suffix)}.weight")) for name, suffix in found)
    return [name for name, weight in weights if weight is not None and weight.dtype in FLOATS]


def _main_dtypes(layout: Layout) -> tuple[str, ...]:
    return layout.parts[layout.main].dtypes


def _absent(layout: Layout, module: str, stored: Mapping[str, TensorInfo]) -> list[str]:
    return [module + part for part, what in layout.parts.items() if what.required and module + part not in stored]
