"""Tensors in files that are mapped when they are first read: what checkpoints of all formats share."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from infinilm.checkpoint.packed import PackedInfo
from infinilm.checkpoint.safetensors_header import TensorInfo, file_errors
from infinilm.config.families.names import TensorNames
from infinilm.errors import WeightError, did_you_mean
from infinilm.files import open_regular, os_errors

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["FileState", "MappedTensors", "file_state"]

FileState = tuple[int, int, int, int]


def file_state(status: os.stat_result) -> FileState:
    """Identifies a file and its contents: device and inode; size and time of the last write."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class MappedTensors:
    """Tensors by name, and the files they are in. A context manager.

    Attributes
    ----------
    path : Path
        Named in errors: a folder or a file.
    tensors : Mapping of str to TensorInfo
        By their names in a Hugging Face checkpoint. Read-only.
    dtypes : frozenset of str
        What weights may be stored as.
    packed : PackedInfo or None
        How the weights are packed, in a folder that `infinilm pack` made.
    names : TensorNames or None
        How the files call the parameters of their model; None: as its family does.
    """

    path: Path
    tensors: Mapping[str, TensorInfo]
    dtypes: frozenset[str]
    packed: PackedInfo | None = None
    names: TensorNames | None = None
    _states: Mapping[Path, FileState]  # the state of each file before its header was read

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] | None = {}

    def __enter__(self) -> Self:
        """Return self."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    @property
    def states(self) -> Mapping[Path, FileState]:
        """The files that the tensors are in, and what each was when it was opened."""
        return self._states

    def __repr__(self) -> str:
        """Name the files, the number of tensors and their size."""
        nbytes = sum(t.nbytes for t in self.tensors.values())
        return f"<{type(self).__name__} {self.path}: {len(self.tensors)} tensors, {nbytes} bytes>"

    def checkpoint_dtype(self) -> str:
        """Return the floating dtype that most of the weights have. WeightError: there is none."""
        raise NotImplementedError

    def kept_dtype(self, dtype: str) -> str:
        """Return the dtype that most of the weights have in an engine that computes in `dtype`."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of the files. Arrays handed out stay valid: each keeps its mapping alive."""
        for mapping in (self._maps or {}).values():
            with suppress(BufferError):  # arrays are alive; the mapping goes with the last of them
                mapping.close()
        self._maps = None

    def info(self, name: str) -> TensorInfo:
        """Return `tensors[name]`; an unknown name is a `WeightError` with the nearest names."""
        if name not in self.tensors:
            raise WeightError(f"{self.path}: no tensor {name!r}{did_you_mean(name, self.tensors, count=3)}")
        return self.tensors[name]

    def check_unchanged(self) -> None:
        """Check that no mapped file was written to since its header was read; one replaced by a rename still is mapped.

        Raises
        ------
        WeightError
            Names the file.
        """
        for file in self._maps or {}:
            with suppress(FileNotFoundError), os_errors(file, WeightError):
                now = file.stat()
                if file_state(now)[:2] == self._states[file][:2]:
                    self._check_state(file, now)

    def release(self, name: str, rows: slice = slice(None)) -> None:
        """Tell the kernel that a tensor's pages may leave memory; reading them again is correct, only slower.

        Covers the whole pages inside the tensor, or some rows of it: pages shared with a neighbour stay.
        """
        self._release(self.info(name), rows)

    def _release(self, info: TensorInfo, rows: slice = slice(None)) -> None:
        if not self._maps or info.file not in self._maps or not hasattr(mmap, "MADV_DONTNEED"):
            return
        num_rows = info.shape[0] if info.shape else 1
        first, last, _ = rows.indices(num_rows)
        row_bytes = info.nbytes // max(num_rows, 1)
        begin = -(-(info.offset + first * row_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (info.offset + last * row_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > begin:
            self._maps[info.file].madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def _mapping(self, info: TensorInfo) -> mmap.mmap:
        if self._maps is None:
            raise WeightError(f"{self.path}: the checkpoint is closed; tensor {info.name!r} cannot be read")
        mapping = self._maps.get(info.file)
        if mapping is None:
            try:
                with file_errors(info.file), open_regular(info.file, WeightError) as file:
                    self._check_state(info.file, os.fstat(file.fileno()))
                    mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError as error:  # "cannot mmap an empty file"
                raise WeightError(f"{info.file}: shrank after it was opened: {error}") from error
            self._maps[info.file] = mapping
        return mapping

    def _check_state(self, file: Path, now: os.stat_result) -> None:
        if file_state(now) != self._states[file]:
            raise WeightError(
                f"{file}: was changed or replaced while it was being read; open the model again when nothing writes "
                "to its files any more"
            )
