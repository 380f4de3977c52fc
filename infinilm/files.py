"""Files that come with a model, read with care: they may be damaged, hostile, or no files at all.

All modules that read a file call them (configuration, checkpoint, tokenizer, templates). Invariants: only regular
files are read, so that no FIFO or device makes a program wait or fill its memory; sizes are bounded; every fault is an
error that names the file. A file that is not there is a FileNotFoundError: the caller knows what that means.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from infinilm.errors import ConfigError, InfinilmError

__all__ = [
    "open_regular",
    "os_errors",
    "parse_json",
    "read_bytes",
    "read_json",
    "read_json_list",
    "read_optional_json",
    "read_text",
]

MAX_BYTES = 64 * 1024 * 1024
"""The limit of a file that is read whole. The largest ones in use, indexes of shards, have a few megabytes."""

_OF_UNKNOWN_SIZE = 1 << 20  # bytes, of a file of /proc or of some mounts

FETCH_AGAIN = "the file is damaged or not what its name says: fetch it again"


@contextmanager
def os_errors(path: Path, error: type[InfinilmError] = ConfigError) -> Iterator[None]:
    """Turn the operating system's errors about `path` into `error`, but for FileNotFoundError."""
    try:
        yield
    except FileNotFoundError:
        raise
    except NotADirectoryError as cause:
        raise FileNotFoundError(cause.errno, "no such file", str(path)) from cause
    except PermissionError as cause:
        raise error(f"{path}: no permission to read this file; check its owner and mode") from cause
    except OSError as cause:
        raise error(f"{path}: cannot be read: {cause.strerror or cause}") from cause


@contextmanager
def open_regular(path: Path, error: type[InfinilmError] = ConfigError) -> Iterator[BinaryIO]:
    """Open a file for reading; one that is no regular file (a folder, FIFO, socket or device) is an `error`.

    Raises
    ------
    FileNotFoundError
        There is nothing of that name.
    InfinilmError
        `error`: whatever else the operating system says, also inside the `with` block.
    """
    with os_errors(path, error):
        # Without O_NONBLOCK, opening a FIFO waits for a process that writes to it.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise error(f"{path}: expected a regular file")
            yield file


def read_bytes(path: Path, *, error: type[InfinilmError] = ConfigError, limit: int = MAX_BYTES) -> bytes:
    """Return the content of a file of at most `limit` bytes; raises as `open_regular`."""
    with open_regular(path, error) as file:
        # A read takes the memory of what it asks for at first: that of this file, and of those whose size is not told.
        size = max(os.fstat(file.fileno()).st_size, _OF_UNKNOWN_SIZE)
        content = file.read(min(size, limit) + 1)
        if len(content) > size:
            content += file.read(max(limit + 1 - len(content), 0))
    if len(content) > limit:
        raise error(f"{path}: expected at most {limit} bytes, got more; is it another file?")
    return content


def read_text(path: Path, *, error: type[InfinilmError] = ConfigError) -> str:
    """Return the text of a UTF-8 file; raises as `open_regular`."""
    content = read_bytes(path, error=error)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as cause:
        raise error(f"{path}: not UTF-8 at byte {cause.start}; {FETCH_AGAIN}") from cause


def read_json(path: Path, *, error: type[InfinilmError] = ConfigError, strict: bool = False) -> dict[str, Any]:
    """Return the JSON object in a file; see `parse_json`.

    Raises
    ------
    FileNotFoundError
        There is no such file.
    InfinilmError
        `error`: it is no regular file, cannot be read, is too large, or holds something else.
    """
    return parse_json(read_bytes(path, error=error), str(path), error=error, strict=strict)


def read_json_list(path: Path) -> list[Any]:
    """Return the JSON list in a file; raises as `read_json`."""
    value = _parse(read_bytes(path), str(path), ConfigError, {})
    if not isinstance(value, list):
        raise ConfigError(f"{path}: must hold a JSON list; got a {type(value).__name__}; {FETCH_AGAIN}")
    return value


def read_optional_json(path: Path) -> dict[str, Any]:
    """Return what `read_json` returns, or `{}` when there is no such file."""
    try:
        return read_json(path)
    except FileNotFoundError:
        return {}


def parse_json(
    raw: bytes, where: str, *, error: type[InfinilmError] = ConfigError, strict: bool = False
) -> dict[str, Any]:
    """Return the JSON object in `raw`, which is UTF-8.

    Parameters
    ----------
    raw
    where
        Begins the messages: the file, or the part of it.
    error
        Raised for everything that is wrong.
    strict
        Refuse what JSON leaves open, too: keys that appear twice, NaN and infinities.
    """
    hooks: dict[str, Any] = {"object_pairs_hook": _no_duplicates, "parse_constant": _no_constant} if strict else {}
    value = _parse(raw, where, error, hooks)
    if not isinstance(value, dict):
        raise error(f"{where}: must hold a JSON object; got a {type(value).__name__}; {FETCH_AGAIN}")
    return value


def _parse(raw: bytes, where: str, error: type[InfinilmError], hooks: dict[str, Any]) -> Any:
    try:
        return json.loads(raw.decode("utf-8-sig"), **hooks)
    except UnicodeDecodeError as cause:
        raise error(f"{where}: not UTF-8 at byte {cause.start}; {FETCH_AGAIN}") from cause
    except json.JSONDecodeError as cause:
        raise error(
            f"{where}: not valid JSON at line {cause.lineno}, column {cause.colno}: {cause.msg}; {FETCH_AGAIN}"
        ) from cause
    except RecursionError as cause:
        raise error(f"{where}: not valid JSON: nested too deeply; {FETCH_AGAIN}") from cause
    except ValueError as cause:  # an integer of thousands of digits, and our own
        raise error(f"{where}: not valid JSON: {cause}; {FETCH_AGAIN}") from cause


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r} appears twice")
    return result


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")
