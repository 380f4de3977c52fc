"""Fingerprints of the files that weights came from, for receipts."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from infinilm.checkpoint.mapped import FileState, file_state
from infinilm.errors import WeightError
from infinilm.files import open_regular

__all__ = ["WeightHistory", "adapter_fingerprint", "fingerprint_of", "weights_fingerprint"]

_CHUNK = 1 << 20  # bytes that are read at a time
_MAX_THREADS = 8  # hashing leaves Python alone meanwhile, and a disk gives no more to more threads


def fingerprint_of(parts: Iterable[str]) -> str:
    """One fingerprint of several, in any order, or of texts: SHA-256 in hexadecimal digits."""
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()


class WeightHistory:
    """What became of weights since they were read of files.

    Parameters
    ----------
    engine
        Counts in `weights_version` how often its weights were changed.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._version = engine.weights_version
        self._digests: tuple[str, ...] = ()

    @property
    def is_known(self) -> bool:
        """Whether all changes were told to `changed`; others were made behind its back, on the engine itself."""
        return bool(self._engine.weights_version == self._version)

    def changed(self, digest: str) -> None:
        """Note a change of which this is the digest, just after it was made."""
        self._version = self._engine.weights_version
        self._digests += (digest,)

    def of(self, files: str) -> str:
        """The fingerprint of the weights, given that of their files."""
        for digest in self._digests:
            files = fingerprint_of([f"was {files}", f"then {digest}"])
        return files


def weights_fingerprint(files: Mapping[Path, FileState]) -> str:
    """Fingerprint of the files of weights, whatever they are called.

    This reads all of them, some 2 GB a second on a core of Zen 5 (SHA-256 with its own instructions).

    Parameters
    ----------
    files
        What each was when its weights were loaded.

    Raises
    ------
    WeightError
        One cannot be read, or was written since, so that it may not be what was loaded.
    """
    return _of_files(files)


def adapter_fingerprint(folder: Path) -> str:
    """Fingerprint of an adapter that PEFT saved: its weights and what its configuration says. WeightError: as above."""
    return _of_files({path: None for path in folder.iterdir() if path.name.startswith("adapter_")})


def _of_files(files: Mapping[Path, FileState | None]) -> str:
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        return fingerprint_of(pool.map(_of_file, files.keys(), files.values()))


def _of_file(path: Path, state: FileState | None) -> str:
    digest = hashlib.sha256()
    with open_regular(path, WeightError) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
        if state is not None and file_state(os.fstat(file.fileno())) != state:
            raise WeightError(f"{path}: was written after the model was loaded; load the model again for its receipts")
    return digest.hexdigest()
