"""Hugging Face checkpoint folders: safetensors headers, zero-copy arrays of the mapped files, strict loading.

Called by the `LLM` and engine layers. Nothing is read before every header has been checked: damage of any
kind is a `WeightError` that names the file. Arrays are views of the mapped file and keep the mapping alive;
the engine uses them in place where the stored dtype allows it, so that peak memory is the model and not twice
the model.
"""

from __future__ import annotations

import difflib
import json
import logging
import math
import mmap
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType, TracebackType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .errors import ConfigError, WeightError

__all__ = ["Checkpoint", "TensorInfo", "WeightEngine", "load_weights", "resolve_model"]

logger = logging.getLogger("infinilm")

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_MAX_NDIM = 32  # numpy 1.x
_MAX_LISTED = 20  # names of one kind in one error message
_CONVERT_ELEMENTS = 1 << 20  # a slice of a dtype conversion: temporaries stay below 40 MiB


@dataclass(frozen=True, slots=True)
class _StoredDtype:
    """A dtype of the safetensors format: our name, bits of one element, dtype of the numpy view (None: no view)."""

    name: str
    bits: int
    numpy: str | None


_DTYPES: Mapping[str, _StoredDtype] = {
    "F64": _StoredDtype("float64", 64, "<f8"),
    "F32": _StoredDtype("float32", 32, "<f4"),
    "F16": _StoredDtype("float16", 16, "<f2"),
    "BF16": _StoredDtype("bfloat16", 16, "<u2"),
    "I64": _StoredDtype("int64", 64, "<i8"),
    "I32": _StoredDtype("int32", 32, "<i4"),
    "I16": _StoredDtype("int16", 16, "<i2"),
    "I8": _StoredDtype("int8", 8, "i1"),
    "U64": _StoredDtype("uint64", 64, "<u8"),
    "U32": _StoredDtype("uint32", 32, "<u4"),
    "U16": _StoredDtype("uint16", 16, "<u2"),
    "U8": _StoredDtype("uint8", 8, "u1"),
    "BOOL": _StoredDtype("bool", 8, "?"),
    "C64": _StoredDtype("complex64", 64, "<c8"),
    "F8_E4M3": _StoredDtype("float8_e4m3", 8, "u1"),
    "F8_E4M3FNUZ": _StoredDtype("float8_e4m3fnuz", 8, "u1"),
    "F8_E5M2": _StoredDtype("float8_e5m2", 8, "u1"),
    "F8_E5M2FNUZ": _StoredDtype("float8_e5m2fnuz", 8, "u1"),
    "F8_E8M0": _StoredDtype("float8_e8m0", 8, "u1"),
    "F6_E2M3": _StoredDtype("float6_e2m3", 6, None),
    "F6_E3M2": _StoredDtype("float6_e3m2", 6, None),
    "F4": _StoredDtype("float4", 4, None),
}
_BY_NAME = {d.name: d for d in _DTYPES.values()}
_FLOATS = ("float32", "bfloat16", "float16", "float64")
_COMPUTE_DTYPES = ("float32", "bfloat16", "float16")
_QUANTISED_DTYPES = frozenset(
    {"int8", "uint8", "float4"} | {n for n in _BY_NAME if n.startswith(("float8", "float6"))}
)
_QUANTISED_SUFFIXES = (
    ".qweight",
    ".qzeros",
    ".g_idx",
    ".weight_packed",
    ".weight_scale_inv",
    ".SCB",
    ".quant_map",
)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies and what it is.

    Attributes
    ----------
    name : str
        Name in the checkpoint, for example `model.layers.0.self_attn.q_proj.weight`.
    dtype : str
        `"float32"`, `"bfloat16"`, `"float16"`, `"int8"`, `"float8_e4m3"`, ...
    shape : tuple of int
    file : Path
    offset : int
        First byte in the file, counted from the start of the file. Of any alignment.
    nbytes : int
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


# --- headers ------------------------------------------------------------------------------------------------


@contextmanager
def _file_errors(path: Path) -> Iterator[None]:
    """Turn the operating system's errors about `path` into `WeightError`."""
    try:
        yield
    except PermissionError as error:
        raise WeightError(f"{path}: no permission to read this file; check its owner and mode") from error
    except FileNotFoundError as error:
        raise WeightError(f"{path}: no such file; is the download complete?") from error
    except OSError as error:
        raise WeightError(f"{path}: cannot be read: {error}") from error


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key!r} appears twice")
        result[key] = value
    return result


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")


def _parse_json_object(raw: bytes, path: Path, what: str) -> dict[str, Any]:
    """Parse a JSON object strictly: UTF-8, no duplicate keys, no NaN.

    Raises
    ------
    WeightError
        Names `path` and the trouble.
    """
    try:
        value = json.loads(
            raw.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_refuse_constant
        )
    except UnicodeDecodeError as error:
        raise WeightError(
            f"{path}: {what} is not UTF-8 ({error.reason} at byte {error.start}); {_DAMAGED}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise WeightError(f"{path}: {what} is not valid JSON ({error}); {_DAMAGED}") from error
    if not isinstance(value, dict):
        raise WeightError(f"{path}: {what} must be a JSON object, got {type(value).__name__}; {_DAMAGED}")
    return value


_DAMAGED = "the file is damaged or not what its name says: fetch it again"


def _read_header_bytes(path: Path) -> tuple[bytes, int]:
    """Return the header's bytes and the size of the whole file."""
    with _file_errors(path):
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise WeightError(f"{path}: expected a regular file")
        size = status.st_size
        with path.open("rb") as file:
            head = file.read(8)
            if len(head) < 8:
                raise WeightError(
                    f"{path}: {len(head)} bytes long, a safetensors file has at least 8; {_DAMAGED}"
                )
            if head == b"version ":
                raise WeightError(
                    f"{path}: a Git LFS pointer, not the weights; run `git lfs pull` in the folder"
                )
            length = int.from_bytes(head, "little")
            if length > size - 8:
                raise WeightError(
                    f"{path}: the header claims {length} bytes, but only {size - 8} follow in a file of "
                    f"{size} bytes; {_DAMAGED}"
                )
            if length > _MAX_HEADER_BYTES:
                raise WeightError(
                    f"{path}: the header claims {length} bytes, more than the format's limit of "
                    f"{_MAX_HEADER_BYTES}; {_DAMAGED}"
                )
            header = file.read(length)
    if len(header) < length:
        raise WeightError(f"{path}: the header ends after {len(header)} of {length} bytes; {_DAMAGED}")
    return header, size


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _parse_entry(path: Path, name: str, entry: Any, data_begin: int) -> TensorInfo:
    """Check one tensor's header entry by itself: keys, dtype, shape, offsets, size."""

    def fail(trouble: str) -> WeightError:
        return WeightError(f"{path}: tensor {name!r}: {trouble}; {_DAMAGED}")

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        got = sorted(entry) if isinstance(entry, dict) else type(entry).__name__
        raise fail(f"expected an object with the keys data_offsets, dtype and shape, got {got}")
    dtype = _DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise fail(f"unknown dtype {entry['dtype']!r}, known are {', '.join(_DTYPES)}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or not all(_is_count(n) for n in shape) or len(shape) > _MAX_NDIM:
        raise fail(f"shape must be a list of at most {_MAX_NDIM} numbers >= 0, got {_short(shape)}")
    if math.prod(max(n, 1) for n in shape) * 8 >= 1 << 63:
        raise fail(f"shape {_short(shape)} is larger than any address space")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(n) for n in offsets):
        raise fail(f"data_offsets must be two numbers >= 0, got {_short(offsets)}")
    begin, end = offsets
    if end < begin:
        raise fail(f"data_offsets end before they begin: {_short(offsets)}")
    bits = math.prod(shape) * dtype.bits
    if bits % 8 or bits // 8 != end - begin:
        raise fail(
            f"shape {shape} of {entry['dtype']} needs {bits / 8:g} bytes, data_offsets span {end - begin}"
        )
    return TensorInfo(name, dtype.name, tuple(shape), path, data_begin + begin, end - begin)


def _short(value: object, limit: int = 120) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "..."


def _check_cover(path: Path, tensors: Iterable[TensorInfo], data_begin: int, size: int) -> None:
    """Tensors must fill the file from the header's end to the last byte: no hole, no overlap."""
    position, previous = data_begin, "the header"
    for info in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        if info.offset != position:
            kind = "overlaps" if info.offset < position else "leaves a hole after"
            raise WeightError(
                f"{path}: tensor {info.name!r} begins at byte {info.offset} and {kind} {previous}, which "
                f"ends at byte {position}; {_DAMAGED}"
            )
        position, previous = info.offset + info.nbytes, f"tensor {info.name!r}"
    if position > size:
        raise WeightError(
            f"{path}: the tensors end at byte {position}, but the file has only {size} bytes: it is "
            "truncated; fetch it again"
        )
    if position < size:
        raise WeightError(f"{path}: {size - position} bytes follow the last tensor ({previous}); {_DAMAGED}")


def _library_check(path: Path) -> None:
    """Let the safetensors library judge the header too: what it refuses, we refuse."""
    from safetensors import SafetensorError, safe_open

    try:
        with _file_errors(path), safe_open(str(path), framework="numpy"):
            pass
    except SafetensorError as error:
        raise WeightError(f"{path}: refused by the safetensors library: {error}; {_DAMAGED}") from error


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Read and check the header of one safetensors file.

    Parameters
    ----------
    path : Path

    Returns
    -------
    dict of str to TensorInfo
        In the order of the header.

    Raises
    ------
    WeightError
        For whatever is wrong with the file; names the file and the trouble.
    """
    raw, size = _read_header_bytes(path)
    if not raw.startswith(b"{"):
        raise WeightError(f"{path}: the header must begin with '{{', got {_short(raw[:8])}; {_DAMAGED}")
    header = _parse_json_object(raw, path, "the header")
    metadata = header.pop("__metadata__", None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
    ):
        raise WeightError(f"{path}: __metadata__ must map strings to strings; {_DAMAGED}")
    data_begin = 8 + len(raw)
    tensors = {name: _parse_entry(path, name, entry, data_begin) for name, entry in header.items()}
    _check_cover(path, tensors.values(), data_begin, size)
    _library_check(path)
    return tensors


# --- folders ------------------------------------------------------------------------------------------------


def _read_index(folder: Path) -> dict[str, Path]:
    """Return tensor name -> file of `model.safetensors.index.json`."""
    path = folder / _INDEX
    with _file_errors(path):
        raw = path.read_bytes()
    weight_map = _parse_json_object(raw, path, "the index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightError(f"{path}: expected an object 'weight_map' of tensor name to file name")
    return {name: folder / _checked_file_name(path, name, value) for name, value in weight_map.items()}


def _checked_file_name(index: Path, tensor: str, value: Any) -> str:
    """A shard's name must stay inside the folder (symlinks may lead out, as in the hub's cache)."""
    if not isinstance(value, str):
        raise WeightError(f"{index}: the file of tensor {tensor!r} must be a string, got {_short(value)}")
    pure = PurePosixPath(value)
    outside = pure.is_absolute() or ".." in pure.parts or "\\" in value or "\0" in value
    if outside or not value.endswith(".safetensors"):
        raise WeightError(
            f"{index}: the file of tensor {tensor!r} must be the name of a .safetensors file inside the "
            f"folder, got {_short(value)}"
        )
    return value


def _no_weights(folder: Path) -> WeightError:
    """Explain a folder without safetensors files."""
    names = sorted(entry.name for entry in folder.iterdir())
    torch_files = [n for n in names if n.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    gguf_files = [n for n in names if n.endswith(".gguf")]
    if gguf_files:
        return WeightError(
            f"{folder}: only GGUF weights ({gguf_files[0]}), which this version does not read; use the "
            "model's safetensors checkpoint"
        )
    if torch_files:
        return WeightError(
            f"{folder}: only pickled PyTorch weights ({torch_files[0]}), which infinilm does not read; "
            "convert them once to safetensors where torch and transformers are installed: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder, "
            "safe_serialization=True)"
        )
    return WeightError(
        f"{folder}: no weights: expected {_SINGLE}, {_INDEX} or other *.safetensors files; is the download "
        "complete?"
    )


def _find_tensors(folder: Path) -> dict[str, TensorInfo]:
    """Read all headers of a folder: one file, an index with shards, or every *.safetensors file."""
    index: dict[str, Path] = {}
    with _file_errors(folder):
        if not folder.is_dir():
            raise WeightError(f"{folder}: expected a checkpoint folder")
        if (folder / _SINGLE).exists():
            files = [folder / _SINGLE]
        elif (folder / _INDEX).exists():
            index = _read_index(folder)
            files = sorted(set(index.values()))
        else:
            files = sorted(p for p in folder.iterdir() if p.name.endswith(".safetensors"))
            if not files:
                raise _no_weights(folder)
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        if index and not file.exists():
            raise WeightError(f"{file}: named in {folder / _INDEX} but absent; is the download complete?")
        for name, info in read_header(file).items():
            if name in tensors:
                raise WeightError(f"tensor {name!r} is in two files, {tensors[name].file} and {file}")
            tensors[name] = info
    for name, file in index.items():
        if name not in tensors or tensors[name].file != file:
            where = f" (it is in {tensors[name].file.name})" if name in tensors else ""
            raise WeightError(f"{file}: lacks tensor {name!r}, which {folder / _INDEX} places there{where}")
    return tensors


class Checkpoint:
    """A Hugging Face checkpoint folder, opened for reading. A context manager.

    Parameters
    ----------
    folder : str or path
        Holds `model.safetensors`, else `model.safetensors.index.json` and its shards, else any
        `*.safetensors` files. The path of one `.safetensors` file is accepted too.

    Attributes
    ----------
    folder : Path
    tensors : Mapping of str to TensorInfo
        Read-only.

    Raises
    ------
    WeightError
        When a file is absent, unreadable or damaged, or when the folder holds no safetensors file.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        is_file = self.folder.suffix == ".safetensors" and self.folder.is_file()
        found = read_header(self.folder) if is_file else _find_tensors(self.folder)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(found)
        self._maps: dict[Path, mmap.mmap] | None = {}

    def __enter__(self) -> Checkpoint:
        """Return self."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def __repr__(self) -> str:
        """Name the folder, the number of tensors and their size."""
        nbytes = sum(t.nbytes for t in self.tensors.values())
        return f"<Checkpoint {self.folder}: {len(self.tensors)} tensors, {nbytes} bytes>"

    def close(self) -> None:
        """Let go of the files. Arrays handed out stay valid: each keeps its mapping alive."""
        for mapping in (self._maps or {}).values():
            with suppress(BufferError):  # arrays are alive; the mapping goes with the last of them
                mapping.close()
        self._maps = None

    def info(self, name: str) -> TensorInfo:
        """Return `tensors[name]`; an unknown name is a `WeightError` with the nearest names."""
        if name not in self.tensors:
            close = difflib.get_close_matches(name, self.tensors, n=3)
            hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
            raise WeightError(f"{self.folder}: no tensor {name!r}{hint}")
        return self.tensors[name]

    def _mapping(self, info: TensorInfo) -> mmap.mmap:
        if self._maps is None:
            raise WeightError(f"{self.folder}: the checkpoint is closed; tensor {info.name!r} cannot be read")
        mapping = self._maps.get(info.file)
        if mapping is None:
            try:
                with _file_errors(info.file), info.file.open("rb") as file:
                    mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError as error:  # "cannot mmap an empty file"
                raise WeightError(f"{info.file}: shrank after it was opened: {error}") from error
            self._maps[info.file] = mapping
        if len(mapping) < info.offset + info.nbytes:
            raise WeightError(
                f"{info.file}: shrank to {len(mapping)} bytes after it was opened; tensor {info.name!r}"
            )
        return mapping

    def array(self, name: str) -> npt.NDArray[Any]:
        """Return a tensor as a read-only view of the mapped file.

        Parameters
        ----------
        name : str

        Returns
        -------
        numpy.ndarray, shape `tensors[name].shape`
            bfloat16 comes as uint16 and float8 as uint8 (the bits), all else as numpy's own dtype. A copy
            only when the tensor's place in the file is not a multiple of its element size.

        Raises
        ------
        WeightError
            Unknown name, closed checkpoint, or a dtype of less than 8 bits.
        """
        info = self.info(name)
        dtype = _BY_NAME[info.dtype]
        if dtype.numpy is None:
            raise WeightError(f"{info.file}: tensor {name!r}: {info.dtype} has no numpy view")
        data = np.frombuffer(self._mapping(info), np.uint8, info.nbytes, info.offset)
        if info.offset % (dtype.bits // 8):
            data = data.copy()
            data.flags.writeable = False
        return data.view(dtype.numpy).reshape(info.shape)

    def release(self, name: str) -> None:
        """Tell the kernel that a tensor's pages may leave memory; reading them again is correct, only slower.

        Covers the whole pages inside the tensor: pages shared with a neighbour stay.
        """
        info = self.info(name)
        if not self._maps or info.file not in self._maps or not hasattr(mmap, "MADV_DONTNEED"):
            return
        begin = -(-info.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (info.offset + info.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > begin:
            self._maps[info.file].madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def checkpoint_dtype(self) -> str:
        """Return the floating dtype that holds most bytes: float32, bfloat16, float16 or float64.

        Raises
        ------
        WeightError
            No tensor is stored in one of these.
        """
        totals = dict.fromkeys(_FLOATS, 0)
        for info in self.tensors.values():
            if info.dtype in totals:
                totals[info.dtype] += info.nbytes
        best = max(totals, key=lambda name: totals[name])
        if totals[best] == 0:
            found = sorted({t.dtype for t in self.tensors.values()})
            raise WeightError(
                f"{self.folder}: no tensor of a floating dtype ({', '.join(_FLOATS)}), only {found}; "
                "pass dtype= explicitly if this is intended"
            )
        return best


# --- conversion ---------------------------------------------------------------------------------------------


def _float32_to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round to nearest, ties to even; NaN stays NaN (quiet)."""
    bits = values.view(np.uint32)
    rounded = ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    nan = np.isnan(values)
    if nan.any():
        rounded[nan] = (bits[nan] >> 16).astype(np.uint16) | np.uint16(0x40)
    return rounded


def _float64_to_float32_odd(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Round to odd: a later rounding to fewer bits then equals one rounding from float64."""
    nearest = values.astype(np.float32)
    bits = nearest.view(np.uint32)
    widened = nearest.astype(np.float64)
    inexact = (widened != values) & ~np.isnan(values)
    away = inexact & (np.abs(widened) > np.abs(values))
    bits = bits - away.astype(np.uint32)  # toward zero
    return (bits | inexact.astype(np.uint32)).view(np.float32)


def _is_finite(values: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.bool_]:
    if dtype == "bfloat16":
        return np.asarray((values & np.uint16(0x7F80)) != np.uint16(0x7F80))
    return np.asarray(np.isfinite(values))


def _convert_slice(values: npt.NDArray[Any], source: str, target: str) -> npt.NDArray[Any]:
    """Convert one flat slice; bfloat16 is uint16 on both sides."""
    if source == "bfloat16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    if target == "bfloat16":
        narrow = (
            _float64_to_float32_odd(values) if source == "float64" else values.astype(np.float32, copy=False)
        )
        return _float32_to_bfloat16(narrow)
    return values.astype(np.float16 if target == "float16" else np.float32)


def convert(values: npt.NDArray[Any], source: str, target: str, *, name: str = "?") -> npt.NDArray[Any]:
    """Convert between floating dtypes, to nearest, ties to even, in slices of bounded size.

    Parameters
    ----------
    values : numpy.ndarray, any shape
        C-contiguous; bfloat16 as uint16.
    source, target : str
        `"float32"`, `"bfloat16"`, `"float16"`; the source also `"float64"`.
    name : str
        The tensor's name, for the error.

    Returns
    -------
    numpy.ndarray, same shape
        A new array; bfloat16 as uint16.

    Raises
    ------
    WeightError
        A finite value lies outside the target's range.
    """
    result = np.empty(values.shape, {"bfloat16": np.uint16, "float16": np.float16}.get(target, np.float32))
    flat_in, flat_out = values.reshape(-1), result.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        for begin in range(0, flat_in.size, _CONVERT_ELEMENTS):
            part = flat_in[begin : begin + _CONVERT_ELEMENTS]
            out = _convert_slice(part, source, target)
            finite = _is_finite(out, target)
            if not finite.all():
                lost = ~finite & _is_finite(part, source)
                if lost.any():
                    raise _overflow(name, part[lost][0], source, target)
            flat_out[begin : begin + _CONVERT_ELEMENTS] = out
    return result


def _overflow(name: str, value: Any, source: str, target: str) -> WeightError:
    if source == "bfloat16":
        value = (np.uint32(value) << np.uint32(16)).view(np.float32)
    advice = "use dtype='bfloat16' or 'float32'" if target == "float16" else "use dtype='float32'"
    return WeightError(
        f"tensor {name!r}: the value {float(value):g} (stored as {source}) lies outside the range of "
        f"{target}; {advice}"
    )


# --- strict loading -----------------------------------------------------------------------------------------


class WeightEngine(Protocol):
    """What `load_weights` needs of an engine; `InferEngine` is one."""

    def param_shapes(self) -> Mapping[str, Sequence[int]]:
        """Return the full shape of each parameter expected, by its name in the checkpoint."""
        ...

    def load_param(self, name: str, tensor: Any, /) -> None:
        """Take one full tensor; each rank takes its shard."""
        ...


def _is_harmless(name: str, expected: Mapping[str, Any]) -> bool:
    """Tensors that may be in a file without being asked for.

    `lm_head.weight` of a model with tied embeddings (the engine then has no such parameter), and the rotary
    frequencies that old checkpoints store, which follow from the configuration.
    """
    return (name == "lm_head.weight" and name not in expected) or name.endswith(".rotary_emb.inv_freq")


def _listed(items: Sequence[str]) -> str:
    more = f", and {len(items) - _MAX_LISTED} more" if len(items) > _MAX_LISTED else ""
    return ", ".join(items[:_MAX_LISTED]) + more


def _missing_shards(checkpoint: Checkpoint) -> str | None:
    """Name the shards that a file name like model-00001-of-00003.safetensors promises and that are absent."""
    present: dict[str, set[int]] = {}
    for file in {t.file.name for t in checkpoint.tensors.values()}:
        if match := re.fullmatch(r"(.*)-(\d{1,6})-of-(\d{1,6})\.safetensors", file):
            present.setdefault(f"{match[1]}|{match[3]}", set()).add(int(match[2]))
    for key, numbers in present.items():
        total = int(key.rpartition("|")[2])
        absent = sorted(set(range(1, total + 1)) - numbers)
        if absent:
            return (
                f"shards {_listed([str(n) for n in absent])} of {total} are absent: is the download complete?"
            )
    return None


def _causes(
    checkpoint: Checkpoint, missing: list[str], unexpected: list[str], shaped: list[str]
) -> list[str]:
    """Guess what went wrong from the pattern of differences."""
    causes = []
    if missing and (shards := _missing_shards(checkpoint)):
        causes.append(shards)
    if missing == ["lm_head.weight"]:
        causes.append('the embeddings are tied: config.json should say "tie_word_embeddings": true')
    tails = {name.rpartition("model.")[2] for name in unexpected}
    if missing and unexpected and all(name.rpartition("model.")[2] in tails for name in missing):
        causes.append(
            "the names differ only by a prefix such as 'model.': the checkpoint was saved from a submodule"
        )
    if unexpected and all(name.endswith(".bias") for name in unexpected):
        causes.append(
            "the checkpoint has biases that config.json does not announce (attention_bias, mlp_bias)"
        )
    if any("lora_" in name for name in unexpected):
        causes.append("the files hold a LoRA adapter: merge it into its base model first")
    if shaped or not causes:
        causes.append(
            "config.json and the weights do not belong together (another size or another architecture)"
        )
    return causes


def _check_quantised(checkpoint: Checkpoint) -> None:
    found = [
        t
        for t in checkpoint.tensors.values()
        if t.dtype in _QUANTISED_DTYPES or t.name.endswith(_QUANTISED_SUFFIXES)
    ]
    if found:
        first = found[0]
        raise WeightError(
            f"{first.file}: tensor {first.name!r} is stored as {first.dtype} ({len(found)} such tensors): "
            "quantised checkpoints are not supported in this version; use the float16 or bfloat16 checkpoint "
            "of the model"
        )


def _match(checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]]) -> list[TensorInfo]:
    """Compare headers with the expected set; return what to load in the order of the files.

    Raises
    ------
    WeightError
        Reports all missing, unexpected and mis-shaped tensors together.
    """
    _check_quantised(checkpoint)
    stored = checkpoint.tensors
    missing = [name for name in expected if name not in stored]
    skipped = [name for name in stored if name not in expected and _is_harmless(name, expected)]
    unexpected = [name for name in stored if name not in expected and name not in skipped]
    shaped = [
        f"{name} (expected {list(shape)}, got {list(stored[name].shape)} in {stored[name].file.name})"
        for name, shape in expected.items()
        if name in stored and stored[name].shape != shape
    ]
    typed = [
        f"{name} ({stored[name].dtype} in {stored[name].file.name})"
        for name in expected
        if name in stored and stored[name].dtype not in _FLOATS
    ]
    report = [
        f"\n  {len(items)} {label}: {_listed(items)}"
        for label, items in (
            ("missing from the files", missing),
            ("unexpected in the files", unexpected),
            ("of another shape", shaped),
            ("not of a floating dtype", typed),
        )
        if items
    ]
    if report:
        causes = "; ".join(_causes(checkpoint, missing, unexpected, shaped))
        raise WeightError(
            f"{checkpoint.folder}: the weights do not fit the model:{''.join(report)}\n  Likely cause: "
            f"{causes}"
        )
    if skipped:
        logger.info("%s: not needed by this model and skipped: %s", checkpoint.folder, _listed(skipped))
    return sorted((stored[name] for name in expected), key=lambda t: (t.file, t.offset))


def _used_in_place(stored: str, compute: str) -> bool:
    return stored == compute or (compute == "float32" and stored in ("bfloat16", "float16"))


def load_weights(
    checkpoint: Checkpoint,
    engine: WeightEngine,
    *,
    dtype: str,
    progress: bool = True,
    from_numpy: Callable[..., Any] | None = None,
) -> None:
    """Load every parameter of an engine from a checkpoint, strictly.

    Headers are compared with `engine.param_shapes()` before a byte of data is read. A tensor is used in place
    (no copy) when it is stored in the compute dtype, or when the compute dtype is float32 and it is stored in
    16 bits; otherwise it is converted to the compute dtype, to nearest, ties to even, and its pages of the
    file are released.

    Parameters
    ----------
    checkpoint : Checkpoint
    engine : WeightEngine
    dtype : str
        The compute dtype: `"float32"`, `"bfloat16"` or `"float16"`.
    progress : bool
        Show a progress bar on stderr, if that is a terminal.
    from_numpy : callable, optional
        Makes the engine's tensor of an array: `from_numpy(array, dtype="bfloat16")`. Default: the core's own,
        zero-copy.

    Raises
    ------
    WeightError
        Tensors are missing, unexpected, mis-shaped, quantised or not floating, or a value does not fit
        `dtype`.
    ConfigError
        `dtype` is none of the three.
    """
    if dtype not in _COMPUTE_DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(_COMPUTE_DTYPES)}, got {dtype!r}")
    expected = {name: tuple(int(n) for n in shape) for name, shape in engine.param_shapes().items()}
    infos = _match(checkpoint, expected)
    if from_numpy is None:
        import importlib

        make: Callable[..., Any] = importlib.import_module("infinilm._core").from_numpy
    else:
        make = from_numpy
    with _progress_bar(sum(t.nbytes for t in infos), progress) as advance:
        for info in infos:
            array = checkpoint.array(info.name)
            if _used_in_place(info.dtype, dtype):
                engine.load_param(info.name, make(array, dtype=info.dtype))
            else:
                array = convert(array, info.dtype, dtype, name=info.name)
                checkpoint.release(info.name)
                engine.load_param(info.name, make(array, dtype=dtype))
            advance(info.nbytes)


@contextmanager
def _progress_bar(total: int, wanted: bool) -> Iterator[Callable[[int], object]]:
    """Yield a function that advances the bar by bytes; does nothing when unwanted or stderr is no terminal."""
    if not wanted:
        yield lambda _: None
        return
    from tqdm import tqdm

    with tqdm(total=total, unit="B", unit_scale=True, desc="Loading weights", disable=None) as bar:
        yield bar.update


# --- names of models ----------------------------------------------------------------------------------------

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.safetensors", "*.json", "tokenizer*", "*.jinja"]
_HUB_SKIP = ["consolidated*", "original/*", "onnx/*", "openvino/*", "metal/*"]


def resolve_model(model: str | os.PathLike[str]) -> Path:
    """Return the checkpoint folder that `model` names.

    Parameters
    ----------
    model : str or path
        `"demo"` (the bundled model), a folder, or a hub id `"org/name"` (needs the `[hub]` extra).

    Returns
    -------
    Path

    Raises
    ------
    FileNotFoundError
        A folder that does not exist.
    ConfigError
        A file instead of a folder, a hub id without huggingface_hub, or a download that failed.
    """
    text = os.fspath(model)
    if not text:
        raise ConfigError(
            "model must be a folder, 'demo' or a hub id such as 'org/name', got an empty string"
        )
    if text == "demo":
        return Path(__file__).parent / "assets" / "demo"
    path = Path(text).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ConfigError(
            f"model {text!r} is a file; pass the folder that holds config.json and *.safetensors"
        )
    if isinstance(model, str) and _HUB_ID.fullmatch(text):
        return _download(text)
    raise FileNotFoundError(
        f"model folder {text!r} does not exist (looked at {path.absolute()}); pass the folder of a Hugging "
        "Face checkpoint (config.json, *.safetensors, tokenizer.json), 'demo' for the bundled model, or a "
        "hub id 'org/name'"
    )


def _download(hub_id: str) -> Path:
    """Fetch a model from the Hugging Face hub into its cache; what is there already is not fetched again."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ConfigError(
            f"model {hub_id!r} is no folder here; to fetch it from the Hugging Face hub, run "
            "pip install 'infinilm[hub]', or pass the path of a downloaded folder"
        ) from error
    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_SKIP))
    except Exception as error:  # the hub's errors share no base class of their own
        raise ConfigError(
            f"model {hub_id!r} is no folder here and could not be fetched from the Hugging Face hub: {error}"
        ) from error
