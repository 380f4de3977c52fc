"""Numbers of bytes, as people write and read them."""

from __future__ import annotations

import contextlib
import re
from typing import Any

from infinilm.checks import short_repr
from infinilm.errors import ConfigError

__all__ = ["format_bytes", "parse_size"]

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)}
_UNITS |= {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)}
_BYTES_LIMIT = 2**62  # sizes are signed 64-bit in the core


def parse_size(name: str, value: Any, otherwise: str = "") -> int:
    """Bytes of a number of bytes, or of a size such as "4GiB" or "500MB"; `otherwise`: what else could have been given.

    Raises
    ------
    ConfigError
        It is neither, or not positive.
    """
    size: float = -1
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str) and (match := re.fullmatch(r"\s*([0-9.]+)\s*([a-zA-Z]*)\s*", value)):
        with contextlib.suppress(ValueError):
            size = float(match[1]) * _UNITS.get(match[2].lower(), -1)
    if not 0 < size < _BYTES_LIMIT:
        more = f", {otherwise}" if otherwise else ""
        raise ConfigError(
            f"{name}: expected a positive number of bytes, a size such as '4GiB'{more}, got {short_repr(value)}"
        )
    return int(size)


def format_bytes(count: float) -> str:
    """Bytes for people: '1.2 GiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
