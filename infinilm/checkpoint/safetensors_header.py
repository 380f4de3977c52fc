"""The header of one safetensors file, read and checked: the names, places and dtypes of its tensors.

Called by `infinilm.checkpoint.folder`. Invariant: a header that passes describes exactly the bytes of its file;
whatever else the file may be is a `WeightError` that names it. The safetensors library has the last word; it
is asked after our own checks, which also refuse what it lets pass (duplicate keys) and say more.

Format: 8 bytes little-endian length, that many bytes of JSON, then the tensors without holes.
https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from infinilm.checks import short_repr
from infinilm.errors import WeightError
from infinilm.files import FETCH_AGAIN, open_regular, os_errors, parse_json

__all__ = ["DTYPE_CODES", "MAX_HEADER_BYTES", "STORED_DTYPES", "Header", "StoredDtype", "TensorInfo", "read_header"]

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_MAX_TENSORS = 2**17  # The largest files in use have some ten thousand; reading 100,000 takes a second.
_MAX_NDIM = 32  # numpy 1.x


@dataclass(frozen=True, slots=True)
class StoredDtype:
    """A dtype of the safetensors format."""

    name: str
    bits: int  # size of one element
    numpy: str | None  # dtype of the numpy view; None: there is no view


_DTYPES: Mapping[str, StoredDtype] = {
    "F64": StoredDtype("float64", 64, "<f8"),
    "F32": StoredDtype("float32", 32, "<f4"),
    "F16": StoredDtype("float16", 16, "<f2"),
    "BF16": StoredDtype("bfloat16", 16, "<u2"),
    "I64": StoredDtype("int64", 64, "<i8"),
    "I32": StoredDtype("int32", 32, "<i4"),
    "I16": StoredDtype("int16", 16, "<i2"),
    "I8": StoredDtype("int8", 8, "i1"),
    "U64": StoredDtype("uint64", 64, "<u8"),
    "U32": StoredDtype("uint32", 32, "<u4"),
    "U16": StoredDtype("uint16", 16, "<u2"),
    "U8": StoredDtype("uint8", 8, "u1"),
    "BOOL": StoredDtype("bool", 8, "?"),
    "C64": StoredDtype("complex64", 64, "<c8"),
    "F8_E4M3": StoredDtype("float8_e4m3", 8, "u1"),
    "F8_E4M3FNUZ": StoredDtype("float8_e4m3fnuz", 8, "u1"),
    "F8_E5M2": StoredDtype("float8_e5m2", 8, "u1"),
    "F8_E5M2FNUZ": StoredDtype("float8_e5m2fnuz", 8, "u1"),
    "F8_E8M0": StoredDtype("float8_e8m0", 8, "u1"),
    "F6_E2M3": StoredDtype("float6_e2m3", 6, None),
    "F6_E3M2": StoredDtype("float6_e3m2", 6, None),
    "F4": StoredDtype("float4", 4, None),
}
STORED_DTYPES: Mapping[str, StoredDtype] = {d.name: d for d in _DTYPES.values()}
DTYPE_CODES: Mapping[str, str] = {d.name: code for code, d in _DTYPES.items()}  # "bfloat16" -> "BF16"


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
        First byte in the file, counted from the start of the file; it may have any alignment.
    nbytes : int
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


@contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """Turn the operating system's errors about `path` into `WeightError`."""
    try:
        with os_errors(path, WeightError):
            yield
    except FileNotFoundError as error:
        raise WeightError(f"{path}: no such file; is the download complete?") from error


def _read_header_bytes(path: Path) -> tuple[bytes, int]:
    """Return the header's bytes and the size of the whole file."""
    with file_errors(path), open_regular(path, WeightError) as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(8)
        if len(head) < 8:
            raise WeightError(f"{path}: {len(head)} bytes long, a safetensors file has at least 8; {FETCH_AGAIN}")
        if head == b"version ":
            raise WeightError(f"{path}: a Git LFS pointer, not the weights; run `git lfs pull` in the folder")
        length = int.from_bytes(head, "little")
        if length > size - 8:
            raise WeightError(
                f"{path}: the header claims {length} bytes, but only {size - 8} follow in a file of "
                f"{size} bytes; {FETCH_AGAIN}"
            )
        if length > MAX_HEADER_BYTES:
            raise WeightError(
                f"{path}: the header claims {length} bytes, more than the format's limit of "
                f"{MAX_HEADER_BYTES}; {FETCH_AGAIN}"
            )
        header = file.read(length)
    if len(header) < length:
        raise WeightError(f"{path}: the header ends after {len(header)} of {length} bytes; {FETCH_AGAIN}")
    return header, size


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _parse_entry(path: Path, name: str, entry: Any, data_begin: int) -> TensorInfo:
    """Check one tensor's header entry by itself: keys, dtype, shape, offsets, size."""

    def fail(trouble: str) -> WeightError:
        return WeightError(f"{path}: tensor {name!r}: {trouble}; {FETCH_AGAIN}")

    if not name.isprintable():
        raise fail("a name must consist of printable characters")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        got = sorted(entry) if isinstance(entry, dict) else type(entry).__name__
        raise fail(f"expected an object with the keys data_offsets, dtype and shape, got {got}")
    dtype = _DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise fail(f"unknown dtype {entry['dtype']!r}, known are {', '.join(_DTYPES)}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or not all(_is_count(n) for n in shape) or len(shape) > _MAX_NDIM:
        raise fail(f"shape must be a list of at most {_MAX_NDIM} numbers >= 0, got {short_repr(shape)}")
    if math.prod(max(n, 1) for n in shape) * 8 >= 1 << 63:
        raise fail(f"shape {short_repr(shape)} is larger than any address space")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(n) for n in offsets):
        raise fail(f"data_offsets must be two numbers >= 0, got {short_repr(offsets)}")
    begin, end = offsets
    if end < begin:
        raise fail(f"data_offsets end before they begin: {short_repr(offsets)}")
    bits = math.prod(shape) * dtype.bits
    if bits % 8 or bits // 8 != end - begin:
        raise fail(f"shape {shape} of {entry['dtype']} needs {bits / 8:g} bytes, data_offsets span {end - begin}")
    return TensorInfo(name, dtype.name, tuple(shape), path, data_begin + begin, end - begin)


def _check_cover(path: Path, tensors: Iterable[TensorInfo], data_begin: int, size: int) -> None:
    """Tensors must fill the file from the header's end to the last byte: no hole, no overlap."""
    position, previous = data_begin, "the header"
    for info in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        if info.offset != position:
            kind = "overlaps" if info.offset < position else "leaves a hole after"
            raise WeightError(
                f"{path}: tensor {info.name!r} begins at byte {info.offset} and {kind} {previous}, which "
                f"ends at byte {position}; {FETCH_AGAIN}"
            )
        position, previous = info.offset + info.nbytes, f"tensor {info.name!r}"
    if position > size:
        raise WeightError(
            f"{path}: the tensors end at byte {position}, but the file has only {size} bytes: it is "
            "truncated; fetch it again"
        )
    if position < size:
        raise WeightError(f"{path}: {size - position} bytes follow the last tensor ({previous}); {FETCH_AGAIN}")


def _library_check(path: Path) -> None:
    """Let the safetensors library judge the header too: what it refuses, we refuse."""
    from safetensors import SafetensorError, __version__, safe_open

    try:
        with file_errors(path), safe_open(str(path), framework="numpy"):
            pass
    except SafetensorError as error:
        raise WeightError(
            f"{path}: refused by the safetensors library {__version__}: {error}; {FETCH_AGAIN}, or update the library"
        ) from error


class Header(NamedTuple):
    """The header of a file."""

    tensors: dict[str, TensorInfo]  # in the order of the header
    metadata: dict[str, str]


def read_header(path: Path) -> Header:
    """Read and check the header of one safetensors file.

    Parameters
    ----------
    path : Path

    Returns
    -------
    Header

    Raises
    ------
    WeightError
        For whatever is wrong with the file; names the file and the trouble.
    """
    raw, size = _read_header_bytes(path)
    if not raw.startswith(b"{"):
        raise WeightError(f"{path}: the header must begin with '{{', got {short_repr(raw[:8])}; {FETCH_AGAIN}")
    num_tensors = raw.count(b'"data_offsets"')
    if num_tensors > _MAX_TENSORS:
        raise WeightError(
            f"{path}: expected at most {_MAX_TENSORS} tensors in a file, got {num_tensors}; {FETCH_AGAIN}"
        )
    header = parse_json(raw, f"{path}: the header", error=WeightError, strict=True)
    metadata = header.pop("__metadata__", None)
    if metadata is not None and not (isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())):
        raise WeightError(f"{path}: __metadata__ must map strings to strings; {FETCH_AGAIN}")
    data_begin = 8 + len(raw)
    tensors = {name: _parse_entry(path, name, entry, data_begin) for name, entry in header.items()}
    _check_cover(path, tensors.values(), data_begin, size)
    _library_check(path)
    return Header(tensors, metadata or {})
