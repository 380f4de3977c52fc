"""One GGUF file, or the parts of a model that was split into several: metadata, and where each tensor lies.

The header is parsed and checked in C++ (src/gguf/header.h); this module knows about files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm import _core
from infinilm.checks import short_repr
from infinilm.errors import ConfigError, InfinilmError, WeightError
from infinilm.files import FETCH_AGAIN, open_regular

__all__ = [
    "PLAIN_TYPES",
    "GgufFile",
    "GgufTensor",
    "find_gguf",
    "is_gguf",
    "models_among",
    "open_gguf",
    "read_header",
    "reading",
]

_FIRST_READ = 1 << 20  # bytes; a vocabulary of 150,000 tokens takes some 8 MB
_LARGEST_HEADER = 1 << 30
_BESIDE_MODELS = re.compile(r"mmproj|imatrix", re.IGNORECASE)  # in names of files that come with a model
_MAGIC = b"GGUF"
_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


PLAIN_TYPES = ("F32", "F16", "BF16")
"""Types of tensors of plain numbers; others are of blocks."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies, and how it is stored.

    Attributes
    ----------
    name : str
        In the file, such as "blk.0.attn_q.weight".
    type : str
        "F32", "Q4_K", ...
    shape : tuple of int
        Slowest dimension first: [out_features, in_features] of a linear.
    file : Path
    offset, nbytes : int
        First byte in the file, and number of bytes.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn whatever goes wrong while metadata are interpreted into a ConfigError.

    A key may hold a value of any type, so any step from it to a setting may fail in a way of its own.
    """
    try:
        yield
    except (InfinilmError, OSError, MemoryError):
        raise
    except Exception as error:
        raise ConfigError(
            f"{path}: a value of the metadata has not the type or the form that its key asks for "
            f"({type(error).__name__}: {short_repr(str(error))}); convert the model again"
        ) from error


class _Metadata(Mapping[str, Any]):
    """The metadata of a header; values are made when they are asked for."""

    def __init__(self, path: Path, header: _core.GgufHeader) -> None:
        self._path, self._header, self._keys = path, header, frozenset(header.keys)

    def __getitem__(self, key: str) -> Any:
        if key not in self._keys:
            raise KeyError(key)
        try:
            return self._header.value(key)
        except WeightError as error:
            raise WeightError(f"{self._path}: {error}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._keys))

    def __len__(self) -> int:
        return len(self._keys)


class GgufFile:
    """A model in a GGUF file, or in several; nothing stays open.

    Attributes
    ----------
    path : Path
        The first part, whose metadata count.
    parts : tuple of Path
    metadata : Mapping of str to bool, int, float, str, or list of these
    tensors : Mapping of str to GgufTensor
        The tensors of all parts.

    Raises
    ------
    FileNotFoundError
        There is no such file.
    WeightError
        A part is damaged or absent.
    """

    def __init__(self, path: Path) -> None:
        header = _read_header(path)
        self.path = path
        self.metadata: Mapping[str, Any] = _Metadata(path, header)
        count = self.metadata.get("split.count", 1)
        self.parts: tuple[Path, ...] = (path,) if count in (0, 1) else _parts(path, count)
        tensors: dict[str, GgufTensor] = {}
        for number, part in enumerate(self.parts):
            if number > 0:
                header = _read_header(part)
                _check_part(part, header, number, count)
            for name, type_name, shape, offset, nbytes in header.tensors:
                if not shape:
                    raise WeightError(f"{part}: tensor {name!r} has no dimensions; {FETCH_AGAIN}")
                if name in tensors:
                    raise WeightError(f"tensor {name!r} is in two files, {tensors[name].file} and {part}")
                tensors[name] = GgufTensor(name, type_name, shape, part, offset, nbytes)
        expected = self.metadata.get("split.tensors.count", len(tensors))
        if len(self.parts) > 1 and expected != len(tensors):
            raise WeightError(f"{path}: expected {expected} tensors in all parts, got {len(tensors)}; {FETCH_AGAIN}")
        self.tensors: Mapping[str, GgufTensor] = tensors

    def floats(self, name: str) -> npt.NDArray[np.float32]:
        """Read a small tensor of plain numbers, such as factors of RoPE: a copy."""
        tensor = self.tensors[name]
        with open_regular(tensor.file, WeightError) as file:
            raw = os.pread(file.fileno(), tensor.nbytes, tensor.offset)
        if len(raw) < tensor.nbytes:
            raise WeightError(f"{tensor.file}: shrank while it was being read; {FETCH_AGAIN}")
        data = np.frombuffer(raw, np.uint8)
        return np.array(_core.gguf_dequantise(data, tensor.type, tensor.shape, "float32").numpy())


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """True if a path is that of a GGUF file, by its name or its first bytes: Ollama's files are named by a hash."""
    path = Path(path)
    return path.is_file() and (path.suffix.lower() == ".gguf" or _begins_as_gguf(path))


def _begins_as_gguf(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except (InfinilmError, FileNotFoundError):
        return False


def open_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Return what a GGUF file holds; that of the last files is remembered while they do not change.

    Any part of a split model stands for all. Raises what `GgufFile` raises.
    """
    path = Path(path)
    with reading(path):
        return _open_parts(path)


def _open_parts(path: Path) -> GgufFile:
    match = _PART.fullmatch(path.name)
    if not match:
        return _open(path, _state(path))
    parts = _part_paths(path.parent, match["stem"], int(match["count"]))
    if path in parts:
        _check_present(path, parts)
    return _open(parts[0], *map(_state, parts)) if parts else _open(path, _state(path))


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


@lru_cache(maxsize=2)
def _open(path: Path, *states: tuple[int, int, int] | None) -> GgufFile:
    return GgufFile(path)


def _part_paths(folder: Path, stem: str, count: int) -> list[Path]:
    return [folder / f"{stem}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def models_among(names: Iterable[str]) -> list[str]:
    """The names of GGUF files among others, without what comes with a model unless there is nothing else."""
    found = sorted(name for name in names if name.lower().endswith(".gguf"))
    return [name for name in found if not _BESIDE_MODELS.search(name)] or found


def find_gguf(folder: Path) -> Path | None:
    """The model of a folder that has its weights in GGUF files alone; None: it has none.

    Raises
    ------
    ConfigError
        There are several models.
    WeightError
        It is a link to a file that is absent.
    """
    found = [folder / name for name in models_among(entry.name for entry in folder.iterdir())]
    models: dict[str, Path] = {}
    for path in found:
        match = _PART.fullmatch(path.name)
        models.setdefault(match["stem"] if match else path.name, path)
    if len(models) > 1:
        names = ", ".join(path.name for path in models.values())
        raise ConfigError(f"{folder}: holds {len(models)} models as GGUF files: {names}; pass the path of one of them")
    model = next(iter(models.values()), None)
    if model is not None and model.is_symlink() and not model.exists():
        raise WeightError(f"{model}: a link to a file that is absent, {model.readlink()}; fetch it again")
    return model


def _read_header(path: Path) -> _core.GgufHeader:
    with open_regular(path, WeightError) as file:
        return read_header(path, file.read, os.fstat(file.fileno()).st_size)


def read_header(path: Path, read: Callable[[int], bytes], size: int) -> _core.GgufHeader:
    """Read the header of a file of `size` bytes; `read(n)` gives the next n of them, from the first on.

    WeightError: it is damaged, which `path` names.
    """
    raw, wanted = b"", _FIRST_READ
    while True:
        raw += read(wanted - len(raw))
        if raw.startswith(b"version https://git-lfs"):
            raise WeightError(f"{path}: a Git LFS pointer, not the weights; run `git lfs pull` in the folder")
        try:
            header = _core.GgufHeader.parse(raw, size)
        except WeightError as error:
            raise WeightError(f"{path}: {error}") from None
        if header is not None:
            return header
        if len(raw) < wanted:
            raise WeightError(f"{path}: shrank while it was being read; {FETCH_AGAIN}")
        if wanted >= _LARGEST_HEADER:
            raise WeightError(f"{path}: the header has more than {_LARGEST_HEADER} bytes; {FETCH_AGAIN}")
        wanted *= 8


def _parts(path: Path, count: Any) -> tuple[Path, ...]:
    """Paths of all parts of a split model, whose names are fixed."""
    match = _PART.fullmatch(path.name)
    if not isinstance(count, int) or not 1 < count <= 99999 or not match or int(match["count"]) != count:
        raise WeightError(
            f"{path}: the first of {count} parts (split.count), whose name must end in their number, such as "
            "-00001-of-00002.gguf; rename the parts, or fetch them again"
        )
    parts = _part_paths(path.parent, match["stem"], count)
    _check_present(path, parts)
    return tuple(parts)


def _check_present(path: Path, parts: list[Path]) -> None:
    absent = [part.name for part in parts if not part.is_file()]
    if absent:
        more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
        raise WeightError(
            f"{path}: one of {len(parts)} parts, of which {', '.join(absent[:3])}{more} are absent: fetch them"
        )


def _check_part(part: Path, header: _core.GgufHeader, number: int, count: int) -> None:
    metadata = _Metadata(part, header)
    said = metadata.get("split.no"), metadata.get("split.count")
    if said != (number, count):
        raise WeightError(
            f"{part}: expected part {number} (counted from 0) of {count}, got {said[0]} of {said[1]}; {FETCH_AGAIN}"
        )
