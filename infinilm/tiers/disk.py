"""`DiskTier`: segments as files of a folder, which several processes may share.

The name of a file is the key of its segment. It is written under another name first, so that a reader sees a whole file
or none, whatever happens to the writer. The time of its last use is its modification time. Files are removed in that
order, by whichever process finds the folder too large.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from infinilm.errors import CacheFileError, ConfigError
from infinilm.logs import logger
from infinilm.tiers.segment import Segment

__all__ = ["DiskTier", "StoredFile"]

_SUFFIX = ".prefix"
_UNFINISHED = ".part"
_NOTE = ".note"
_UNFINISHED_SECONDS = 600.0  # after which the writer of an unfinished file is taken to be gone
_LOOKS_PER_SIZE = 32  # the folder is counted anew when this share of its limit was written since


class StoredFile(NamedTuple):
    """A file of the tier."""

    path: Path
    num_bytes: int
    last_used: float  # seconds since 1970


class DiskTier:
    """Segments in a folder.

    Parameters
    ----------
    folder : path
        Made if it is not there, for this user alone: keys and values tell what was said.
    max_bytes : int
        All files together; the least recently used are removed.

    Raises
    ------
    ConfigError
        The folder cannot be made, or not be written to.
    """

    setting = "disk_cache"

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int) -> None:
        self.folder = Path(folder).expanduser()
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._written = 0  # bytes since the folder was last counted
        self._told: set[str] = set()  # kinds of failures that the log has told
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with open(self.folder / f"try-{secrets.token_hex(8)}{_UNFINISHED}", "xb") as file:
                os.unlink(file.name)
        except OSError as error:
            raise ConfigError(
                f"disk_cache: cannot write to the folder {self.folder}: {error.strerror or error}; name another one"
            ) from None
        self.prune()

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}{_SUFFIX}"

    @property
    def name(self) -> str:
        """A name of the folder's own, which all processes find there."""
        return self.noted("the name of this folder", lambda: secrets.token_hex(16))

    def has(self, key: str) -> bool:
        """Whether there is a file of the segment."""
        return self._path(key).exists()

    def read(self, key: str) -> Segment | None:
        """The segment, if there is a whole file of it. One that is damaged is told and removed."""
        path = self._path(key)
        try:
            with open(path, "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode) or size > self.max_bytes:
                    raise CacheFileError(f"it has {size} bytes")
                data: Any = np.empty(size, np.uint8)
                view, place = memoryview(data), 0
                while place < size and (count := file.readinto(view[place:])):
                    place += count
            segment = Segment.from_bytes(data[:place], key)
        except FileNotFoundError:
            return None
        except CacheFileError as error:
            logger.warning("disk_cache: %s is passed over and removed: %s", path, error)
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        except OSError as error:
            self._tell("read", error)
            return None
        with contextlib.suppress(OSError):  # another process may have removed it since
            os.utime(path)
        return segment

    def write(self, key: str, segment: Segment) -> None:
        """Keep a segment. One that cannot be written, as on a full disk, is left out and told once."""
        path = self._path(key)
        if segment.num_bytes > self.max_bytes or path.exists():
            return
        try:
            path.parent.mkdir(exist_ok=True, mode=0o700)
            self._put(path, segment.pieces(key))
        except OSError as error:
            self._tell("write", error)
            self.prune()
            return
        with self._lock:
            self._written += segment.num_bytes
            is_due = self._written * _LOOKS_PER_SIZE > self.max_bytes
        if is_due:
            self.prune()

    def noted(self, question: str, answer: Callable[[], str]) -> str:
        """The answer to a question, such as for the digest of a large file, which one process finds for all."""
        path = self.folder / f"{hashlib.sha256(question.encode()).hexdigest()}{_NOTE}"
        with contextlib.suppress(OSError, ValueError):
            noted = json.loads(path.read_bytes())
            if noted["question"] == question:
                return str(noted["answer"])
        given = answer()
        with contextlib.suppress(OSError):
            self._put(path, [json.dumps({"question": question, "answer": given}).encode()])
        return given

    def _put(self, path: Path, pieces: Iterable[bytes | memoryview]) -> None:
        """Write a file whole or not at all. OSError: it cannot be."""
        part = path.with_name(f"{path.stem}-{secrets.token_hex(8)}{_UNFINISHED}")
        try:
            with open(part, "xb", opener=_for_this_user) as file:
                for piece in pieces:
                    file.write(piece)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)

    def files(self) -> list[StoredFile]:
        """All files of segments, the least recently used first."""
        return sorted(self._find(_SUFFIX), key=lambda file: file.last_used)

    def _find(self, suffix: str) -> Iterator[StoredFile]:
        for path in (*self.folder.glob(f"??/*{suffix}"), *self.folder.glob(f"*{suffix}")):
            with contextlib.suppress(OSError):  # removed meanwhile
                found = path.stat(follow_symlinks=False)
                yield StoredFile(path, found.st_size, found.st_mtime)

    def prune(self, max_bytes: int | None = None) -> int:
        """Remove the files that were not used for the longest time; returns how many bytes went.

        `max_bytes`: what may stay; None: what the tier may have. Files that a process began and never finished go, too.
        """
        with self._lock:
            self._written = 0
            limit = self.max_bytes if max_bytes is None else max_bytes
            removed = 0
            for part in self._find(_UNFINISHED):
                if part.last_used < time.time() - _UNFINISHED_SECONDS:
                    with contextlib.suppress(OSError):
                        part.path.unlink()
            files = self.files()
            total = sum(file.num_bytes for file in files)
            for file in files:
                if total - removed <= limit:
                    break
                with contextlib.suppress(OSError):
                    file.path.unlink()
                removed += file.num_bytes
            return removed

    def _tell(self, what: str, error: OSError) -> None:
        if what not in self._told:
            self._told.add(what)
            logger.warning(
                "disk_cache: cannot %s files in %s: %s; requests go on without them", what, self.folder, error.strerror
            )


def _for_this_user(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
