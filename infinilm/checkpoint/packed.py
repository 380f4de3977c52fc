"""Packed checkpoints: safetensors files with linears as the CPU kernels read them, which are mapped and used in place.

`infinilm pack` writes them (`pack_writer.py`), `folder.py` loads them. The metadata of the header say that a file is
packed and in which layout; the dtype and the shape of each tensor say the rest (docs/kernels.md). A linear of several
checkpoint tensors (q, k, v; gate, up) has one set: `<linear>.panels`, and `<linear>.scales` where it is quantised.
Norms and biases are as in any checkpoint, and so are the names of the parameters once they are loaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinilm import _core
from infinilm.checks import DTYPES, short_repr
from infinilm.config.spec import MtpFormat
from infinilm.errors import ConfigError, WeightError

if TYPE_CHECKING:
    from infinilm.checkpoint.safetensors_header import TensorInfo

__all__ = ["PackedInfo", "expected_tensors", "is_of_linear", "read_packed", "unread_of_head"]

_FORMAT = "infinilm packed"  # in the metadata, where files of other libraries have "pt"
_LAYOUT = (
    "a panel is 16 outputs: 64-byte lines, each with the next k (in_features) of all 16; k is padded to 32, outputs to "
    "pairs of panels; q, k, v follow each other, gate and up take turns by panel; in int4, byte j of four has k j in "
    "its low half and k j + 4 in its high one, plus 8 each"
)


@dataclass(frozen=True, slots=True)
class PackedInfo:
    """How the weights of a folder are packed.

    Attributes
    ----------
    file : Path
        The first one.
    quantization : str or None
        None, "int8" or "int4".
    dtype : str
        The dtype that the weights had before they were quantised: "float32", "bfloat16" or "float16".
    mtp : MtpFormat or None
        How the MTP head is packed; None: there is none.
    """

    file: Path
    quantization: str | None
    dtype: str
    mtp: MtpFormat | None = None

    def metadata(self) -> dict[str, str]:
        """The metadata in the header of a file."""
        of_head = self.mtp and {
            "mtp_quantization": self.mtp.quantization or "none",
            "mtp_lm_head_size": str(self.mtp.lm_head_size),
            "mtp_num_modules": str(self.mtp.num_modules),
        }
        return {
            **(of_head or {}),
            "format": _FORMAT,
            "layout_version": str(_core.PACKED_LAYOUT_VERSION),
            "layout": _LAYOUT,
            "quantization": self.quantization or "none",
            "dtype": self.dtype,
        }

    def resolve_quantization(self, wanted: str | None) -> str | None:
        """Return the quantization of the weights; another one that was asked for is a `ConfigError`."""
        if wanted not in (None, self.quantization):
            raise ConfigError(
                f"quantization={wanted!r} contradicts {self.file}, whose weights are packed as "
                f"{self.quantization or self.dtype}; leave it out, or pack the original checkpoint again"
            )
        return self.quantization

    def resolve_mtp(self, quantization: str | None, vocab_size: int | None) -> MtpFormat | None:
        """Return how the MTP head is packed; what contradicts it is a `ConfigError`.

        `quantization`, `vocab_size`: those of `MtpSettings`.
        """
        if self.mtp is None:
            return None
        is_other = quantization != "auto" and (quantization or self.quantization) != self.mtp.quantization
        if is_other or vocab_size not in (None, self.mtp.lm_head_size):
            raise ConfigError(
                f"speculation: the MTP head in {self.file} is packed as {self.mtp.quantization or self.dtype} with "
                f"{self.mtp.lm_head_size or 'all'} tokens, got quantization={quantization!r} and "
                f"vocab_size={vocab_size}; leave them out, or load the checkpoint that it was packed from"
            )
        return self.mtp

    def check_device(self, device: str) -> None:
        """Refuse a device other than the CPU."""
        if device != "cpu":
            raise ConfigError(
                f"{self.file}: the weights are packed for CPUs, and the device is {device}; pass device='cpu', or load "
                "the checkpoint that they were packed from"
            )

    def check_dtype(self, dtype: str) -> None:
        """Refuse a dtype of the computation that the weights would have to be converted to."""
        if self.quantization is None and dtype not in ("float32", self.dtype):
            choices = f"'{self.dtype}' or 'float32'" if self.dtype != "float32" else "'float32'"
            raise ConfigError(
                f"dtype={dtype!r} contradicts {self.file}, whose weights are packed as {self.dtype}; use dtype="
                f"{choices}, or pack the original checkpoint with --dtype {dtype}"
            )


def read_packed(metadata: Mapping[Path, Mapping[str, str]]) -> PackedInfo | None:
    """Return what the metadata of a checkpoint's files say, or None where they are not packed.

    Raises
    ------
    WeightError
        Another version of the layout, damaged metadata, or files that do not belong together.
    """
    found = {file: _read_file(file, entries) for file, entries in metadata.items() if entries.get("format") == _FORMAT}
    if not found:
        return None
    first = next(iter(found.values()))
    for file in metadata:
        other = found.get(file)
        if other is None or replace(other, file=first.file) != first:
            raise WeightError(
                f"{file}: packed otherwise than {first.file}, or not packed: these files are not of one model; pack "
                "the original checkpoint again"
            )
    return first


def _read_file(file: Path, entries: Mapping[str, str]) -> PackedInfo:
    version, known = entries.get("layout_version"), str(_core.PACKED_LAYOUT_VERSION)
    if version != known:
        raise WeightError(
            f"{file}: weights packed in layout {short_repr(version)}, and this version of infinilm reads layout "
            f"{known}; pack the original checkpoint again with infinilm pack"
        )
    quantization, dtype = entries.get("quantization"), entries.get("dtype")
    if quantization not in ("none", "int8", "int4") or dtype not in DTYPES:
        raise WeightError(
            f"{file}: expected packed weights whose metadata have the quantization none, int8 or int4 and a dtype of "
            f"{', '.join(DTYPES)}; got {short_repr(quantization)} and {short_repr(dtype)}; pack the original "
            "checkpoint again"
        )
    of_head, size = entries.get("mtp_quantization"), entries.get("mtp_lm_head_size", "")
    modules = entries.get("mtp_num_modules", "1")  # which folders from before it was written have not
    mtp = None
    if of_head is not None:
        are_numbers = size.isdecimal() and len(size) < 10 and re.fullmatch("[1-9][0-9]?", modules)
        if of_head not in ("none", "int8", "int4") or not are_numbers:
            raise WeightError(
                f"{file}: expected a packed MTP head of the quantization none, int8 or int4, the size of its lm_head "
                f"and its modules, got {short_repr(of_head)}, {short_repr(size)} and {short_repr(modules)}; pack the "
                "original checkpoint again"
            )
        mtp = MtpFormat(None if of_head == "none" else of_head, int(size), num_modules=int(modules))
    return PackedInfo(file, None if quantization == "none" else quantization, dtype, mtp)


_TABLES = ("model.embed_positions.", "model.embed_token_types.", "model.relative_attention_bias.")
_MIXING = ".altup."  # small matrices by which the residual streams of a layer are mixed


def is_of_linear(name: str, shape: Sequence[int]) -> bool:
    """Tell whether a parameter is of a linear or the embedding.

    Tables that are looked up in and added are of none, and neither is what mixes residual streams.
    """
    return len(shape) == 2 and not name.startswith(_TABLES) and _MIXING not in name


def expected_tensors(
    engine: Any, params: Mapping[str, tuple[int, ...]], stored: Mapping[str, TensorInfo], packed: PackedInfo
) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Tensors that a packed checkpoint of an engine's model holds: shapes of all, dtypes of those of linears.

    The format of a linear is what its panels are stored as.

    Parameters
    ----------
    engine
        `_core.InferEngine`, or an object with its `spec` and `num_ranks`.
    params : mapping of str to shape
        The parameters of the model.
    stored : mapping of str to TensorInfo
    packed : PackedInfo

    Raises
    ------
    WeightError
        The engine does not take packed weights.
    """
    if not hasattr(engine, "num_ranks"):  # it has no kernels
        raise WeightError(
            f"{packed.file}: the weights are packed for the kernels of InferEngine and LLM, and {type(engine).__name__}"
            " cannot read them; load the checkpoint that they were packed from"
        )
    usual = packed.quantization or packed.dtype
    tables: dict[str, Mapping[str, tuple[str, Sequence[int]]]] = {
        format: _core.packed_shapes(engine.spec, format) for format in (*DTYPES, "int8", "int4")
    }
    shapes: dict[str, tuple[int, ...]] = {
        name: shape for name, shape in params.items() if not is_of_linear(name, shape)
    }
    dtypes: dict[str, str] = {}
    for name in tables[usual]:
        if not name.endswith(".panels"):
            continue
        dtype = stored[name].dtype if name in stored else usual
        table = tables.get("int4" if dtype == "uint8" else dtype, tables[usual])
        for tensor in (name, name.removesuffix(".panels") + ".scales"):
            if tensor in table:
                dtypes[tensor], shapes[tensor] = table[tensor][0], tuple(table[tensor][1])
    return shapes, dtypes


def unread_of_head(engine: Any, stored: Mapping[str, TensorInfo], packed: PackedInfo) -> tuple[str, ...]:
    """Names of the tensors of a packed MTP head that an engine does not load; the arguments are as above."""
    if packed.mtp is None or engine.spec.mtp is not None:
        return ()
    first = engine.spec.num_layers
    layers = tuple(f"model.layers.{layer}." for layer in range(first, first + packed.mtp.num_modules))
    return tuple(name for name in stored if name.startswith(layers))
