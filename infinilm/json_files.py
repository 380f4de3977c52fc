"""The small JSON files of a checkpoint: one reader, which says what is wrong and reads nothing that never ends."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from infinilm.errors import ConfigError, InfinilmError

__all__ = ["parse_json_object", "read_json_object"]

_MAX_BYTES = 256 << 20  # the largest index of a real checkpoint has a few megabytes


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key!r} appears twice")
        result[key] = value
    return result


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")


def parse_json_object(
    raw: bytes, name: str, *, error: type[InfinilmError] = ConfigError, strict: bool = False
) -> dict[str, Any]:
    """Parse a JSON object.

    Parameters
    ----------
    raw
        UTF-8; a byte order mark is skipped, unless `strict`.
    name
        Of the file, or of the part of it: begins the message of an error.
    error
        What to raise.
    strict
        Refuse duplicate keys, NaN and infinity.

    Raises
    ------
    InfinilmError
        `error`, with what is wrong and where.
    """
    checks: Any = {"object_pairs_hook": _no_duplicates, "parse_constant": _refuse_constant} if strict else {}
    try:
        value = json.loads(raw.decode("utf-8" if strict else "utf-8-sig"), **checks)
    except UnicodeDecodeError as cause:
        raise error(f"{name}: not UTF-8 at byte {cause.start}; download it again") from cause
    except json.JSONDecodeError as cause:
        raise error(
            f"{name}: not valid JSON at line {cause.lineno}, column {cause.colno}: {cause.msg}; the file may be cut "
            "short, download it again"
        ) from cause
    except RecursionError as cause:
        raise error(f"{name}: not valid JSON: nested too deeply") from cause
    except ValueError as cause:  # such as a number of more digits than Python reads
        raise error(f"{name}: not valid JSON: {cause}") from cause
    if not isinstance(value, dict):
        raise error(f"{name}: must hold a JSON object; got a {type(value).__name__}")
    return value


def read_json_object(
    path: Path, *, error: type[InfinilmError] = ConfigError, strict: bool = False
) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None when there is no such file; see `parse_json_object`.

    Raises
    ------
    InfinilmError
        `error`: it is no regular file (a pipe or a device may never end), is too large, cannot be read, or does not
        hold a JSON object.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise error(f"{path}: expected a regular file")
        if status.st_size > _MAX_BYTES:
            raise error(f"{path}: {status.st_size} bytes long; a file of settings has at most {_MAX_BYTES}")
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as cause:
        raise error(f"{path}: cannot be read: {cause}") from cause
    return parse_json_object(raw, str(path), error=error, strict=strict)
