"""Fingerprints of the files that weights came from, for receipts."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from infinilm.checkpoint.opening import open_checkpoint
from infinilm.errors import WeightError
from infinilm.files import open_regular

__all__ = ["adapter_fingerprint", "fingerprint_of", "weights_fingerprint"]

_CHUNK = 1 << 20  # bytes that are read at a time
_MAX_THREADS = 8  # hashing leaves Python alone meanwhile, and a disk gives no more to more threads


def fingerprint_of(parts: Iterable[str]) -> str:
    """One fingerprint of several, in any order, or of texts: SHA-256 in hexadecimal digits."""
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()


def weights_fingerprint(model: Path, not_after: float) -> str:
    """Fingerprint of the weight files of a folder or of a GGUF file, whatever the files are called.

    This reads all of them, some 1.5 GB a second on a core that has instructions for it.

    Parameters
    ----------
    model
    not_after
        When they were loaded, `time.time`.

    Raises
    ------
    WeightError
        They cannot be read, or a file was written after that, so that it may not be what was loaded.
    """
    with open_checkpoint(model) as checkpoint:
        files = checkpoint.files
    return _of_files(files, not_after)


def adapter_fingerprint(folder: Path) -> str:
    """Fingerprint of an adapter that PEFT saved: its weights and what its configuration says. WeightError: as above."""
    return _of_files([path for path in folder.iterdir() if path.name.startswith("adapter_")])


def _of_files(files: Iterable[Path], not_after: float = math.inf) -> str:
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        return fingerprint_of(pool.map(lambda path: _of_file(path, not_after), files))


def _of_file(path: Path, not_after: float) -> str:
    digest = hashlib.sha256()
    with open_regular(path, WeightError) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
        if os.fstat(file.fileno()).st_mtime > not_after:
            raise WeightError(f"{path}: was written after the model was loaded; load the model again for its receipts")
    return digest.hexdigest()
