"""Fingerprints of the files that weights came from, for receipts."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from infinilm.checkpoint.mapped import FileState, file_state
from infinilm.errors import WeightError
from infinilm.files import open_regular

__all__ = ["adapter_fingerprint", "fingerprint_of", "weights_fingerprint"]

_CHUNK = 1 << 20  # bytes that are read at a time
_MAX_THREADS = 8  # hashing leaves Python alone meanwhile, and a disk gives no more to more threads


def fingerprint_of(parts: Iterable[str]) -> str:
    """One fingerprint of several, in any order, or of texts: SHA-256 in hexadecimal digits."""
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()


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
