"""Checks of single values, and how messages quote them. Every module that takes something from users calls them."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from infinilm.errors import ConfigError, InfinilmError

__all__ = ["DTYPES", "OfThisProcess", "as_boolean", "as_integer", "dtype_name", "short_repr", "token_ids"]

DTYPES = ("float32", "bfloat16", "float16")
"""What an engine can compute in."""

INT_LIMIT = 2**31
"""Sizes and lengths are 32-bit in the core."""

_DTYPE_ALIASES = {
    **{"half": "float16", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"},
    **{"fp8_e4m3": "fp8", "float8_e4m3fn": "fp8"},
}


class OfThisProcess:
    """Base of what has threads and memory of this process: it cannot be pickled, nor be there twice.

    A copy would share them with the original, and end them for it when it goes.
    """

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled or copied: it has threads and memory of this process; "
            "make another one where it is needed"
        )


def short_repr(value: object, limit: int = 80) -> str:
    """`repr` for a message: cut off after `limit` characters."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deeply; an integer of thousands of digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def as_integer(
    name: str,
    value: Any,
    *,
    least: int = 1,
    below: int = INT_LIMIT,
    error: type[InfinilmError] = ConfigError,
) -> int:
    """Return `value`, an integer (numpy's too) in [least, below), as int.

    Raises
    ------
    InfinilmError
        `error`: it is something else, True and False among it, or out of range.
    """
    number = None
    if not isinstance(value, bool) and hasattr(value, "__index__"):
        number = int(value.__index__())
    if number is None or not least <= number < below:
        limit = str(below) if below & (below - 1) else f"2**{below.bit_length() - 1}"
        raise error(f"{name} must be an integer in [{least}, {limit}); got {short_repr(value)}")
    return number


def as_boolean(name: str, value: Any, *, error: type[Exception] = TypeError) -> bool:
    """Return `value`, True or False (numpy's too), as bool; `error`: it is something else, such as "false"."""
    if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise error(f"{name} must be True or False; got {short_repr(value)}")


def dtype_name(value: Any) -> str:
    """'bfloat16' for "bfloat16", "bf16", torch.bfloat16 and its text; numpy's dtypes by their name."""
    if isinstance(value, type):
        text = value.__name__
    else:
        name = getattr(value, "name", None)  # of numpy's dtypes
        text = name if isinstance(name, str) else str(value).removeprefix("torch.")
    return _DTYPE_ALIASES.get(text, text)


def token_ids(key: str, value: Any) -> list[int]:
    """Return token ids as a list. TypeError: neither an integer nor a list of them."""
    items = list(value) if isinstance(value, (list, tuple)) else [value]
    for item in items:
        if isinstance(item, bool) or not isinstance(item, (int, np.integer)):
            raise TypeError(f"{key} must be an int or a list of ints ([] for none); got {value!r}")
    return [int(item) for item in items]
