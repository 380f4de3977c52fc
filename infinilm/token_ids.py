"""Token ids as callers give them: lists and arrays of any integers, checked against the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from infinilm.errors import RequestError

__all__ = ["SupportsDLPack", "TokenIds", "check_token_ids", "host_array", "token_id_tuple"]


class SupportsDLPack(Protocol):
    """An array of another library, such as torch, jax or cupy."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """Export it, see https://data-apis.org/array-api/latest."""


TokenIds = Sequence[int] | npt.NDArray[np.integer[Any]] | SupportsDLPack


def host_array(value: Any) -> Any:
    """An array of numpy of what is an array, wherever it lies; all else as it is."""
    if hasattr(value, "detach") and hasattr(value, "cpu"):  # torch
        value = value.detach().cpu()
    if hasattr(value, "__array__"):
        return np.asarray(value)
    if not hasattr(value, "__dlpack__"):
        return value
    return value.get() if hasattr(value, "get") else np.from_dlpack(value)  # the first is cupy's way to the host


def check_token_ids(
    ids: Any, name: str, vocab_size: int, *, allow_empty: bool = False, expected: str = "a flat list of token ids"
) -> npt.NDArray[np.int32]:
    """Token ids of one sequence as an array, [num_tokens].

    Parameters
    ----------
    ids
        A sequence or array of integers, [num_tokens].
    name
        Begins the message of an error.
    vocab_size
        Ids are in 0..vocab_size - 1.
    allow_empty
        Whether there may be none.
    expected
        What a caller may give, for the message.

    Raises
    ------
    RequestError
        It is something else, empty, or holds an id out of range.
    """
    try:
        array = np.asarray(host_array(ids))
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise ValueError
    except (ValueError, TypeError):
        raise RequestError(f"{name}: expected {expected}, got {ids!r:.80}") from None
    if not array.size and not allow_empty:
        raise RequestError(f"{name} is empty: it needs at least one token to start from, such as the BOS token")
    if array.size and not 0 <= array.min() <= array.max() < vocab_size:
        bad = np.flatnonzero((array < 0) | (array >= vocab_size))[0]
        raise RequestError(
            f"{name}: token id {array[bad]} at position {bad} is out of range; the vocabulary has ids "
            f"0..{vocab_size - 1}"
        )
    return array.astype(np.int32)


def token_id_tuple(value: Any) -> tuple[int, ...]:
    """One id or a list of ids, such as `eos_token_id` of a JSON file, as a tuple. ValueError: something else."""
    items: Sequence[Any] = value if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(item, (int, np.integer)) and not isinstance(item, bool) and item >= 0 for item in items):
        raise ValueError(f"must be a token id >= 0 or a list of them, got {value!r:.80}")
    return tuple(dict.fromkeys(int(item) for item in items))
