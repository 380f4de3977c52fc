"""Packed checkpoints: safetensors files with linears as the CPU kernels read them, which are mapped and used in place.

`infinilm pack` writes them (`pack_writer.py`), `folder.py` loads them. The metadata of the header say that a file is
packed and in which layout; the dtype and the shape of each tensor say the rest (docs/kernels.md). A linear of several
checkpoint tensors (q, k, v; gate, up) has one set: `<linear>.panels`, and `<linear>.scales` where it is quantised.
Norms and biases are as in any checkpoint, and so are the names of the parameters once they are loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinilm import _core
from infinilm.checks import DTYPES, short_repr
from infinilm.errors import ConfigError, WeightError

if TYPE_CHECKING:
    from infinilm.checkpoint.safetensors_header import TensorInfo

__all__ = ["PackedInfo", "expected_tensors", "is_of_linear", "read_packed"]

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
    """

    file: Path
    quantization: str | None
    dtype: str

    def metadata(self) -> dict[str, str]:
        """The metadata in the header of a file."""
        return {
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
        if other is None or (other.quantization, other.dtype) != (first.quantization, first.dtype):
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
    return PackedInfo(file, None if quantization == "none" else quantization, dtype)


def is_of_linear(name: str, shape: Sequence[int]) -> bool:
    """Tell whether a parameter is packed with a linear: rows that are added to the embedding stay as they are."""
    return len(shape) == 2 and not name.startswith(("model.embed_positions.", "model.embed_token_types."))


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
