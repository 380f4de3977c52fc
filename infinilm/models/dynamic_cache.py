"""`DynamicCache`: the cache of the numpy reference model, which grows as tokens come.

Written and read by `ReferenceModel.forward`. Every row is a sequence of its own length. A forward pass appends to
each layer in turn and moves the lengths only at its end (`advance`), so one that fails half way leaves the cache as
it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["DynamicCache"]

Array = npt.NDArray[Any]


class DynamicCache:
    """Keys and values of several rows, each of its own length.

    Parameters
    ----------
    heads : sequence of (int, int)
        num_kv_heads and head_dim of each layer.
    num_rows : int
    dtype : str
        "float32" or "float64".

    Attributes
    ----------
    lengths : numpy.ndarray, int64 [num_rows]
        Tokens in the cache, the same in every layer. Read it; `advance` writes it.
    """

    def __init__(self, heads: Sequence[tuple[int, int]], num_rows: int, dtype: str = "float32") -> None:
        self.lengths: npt.NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self._keys: list[Array] = [  # per layer [num_rows, capacity, num_kv_heads, head_dim]
            np.zeros((num_rows, 0, num_kv_heads, head_dim), dtype) for num_kv_heads, head_dim in heads
        ]
        self._values: list[Array] = [keys.copy() for keys in self._keys]
        self._index_keys: dict[tuple[int, int], Array] = {}  # by layer and row: [length, 1, index_dim]
        self._states: dict[tuple[int, int], tuple[Array, ...]] = {}  # by layer and row
        self._new_states: dict[tuple[int, int], tuple[Array, ...]] = {}

    def __repr__(self) -> str:
        """Name the layers and the length of every row."""
        return f"<DynamicCache: {self.num_layers} layers, lengths {self.lengths.tolist()}>"

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self._keys)

    @property
    def num_rows(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    def keys(self, layer: int, row: int) -> Array:
        """Keys of one row after RoPE, a view [length, num_kv_heads, head_dim]."""
        return self._keys[layer][row, : self.lengths[row]]

    def values(self, layer: int, row: int) -> Array:
        """Values of one row, a view [length, num_kv_heads, head_dim]."""
        return self._values[layer][row, : self.lengths[row]]

    def append(self, layer: int, row: int, keys: Array, values: Array) -> tuple[Array, Array]:
        """Write new tokens of one row behind those it has in one layer; `advance` makes them count.

        Parameters
        ----------
        layer, row : int
        keys, values : numpy.ndarray, [num_tokens, num_kv_heads, head_dim]

        Returns
        -------
        keys, values : numpy.ndarray
            All of the row, the new ones included: views [length + num_tokens, num_kv_heads, head_dim].
        """
        begin = int(self.lengths[row])
        end = begin + len(keys)
        self._reserve(layer, end)
        self._keys[layer][row, begin:end] = keys
        self._values[layer][row, begin:end] = values
        return self._keys[layer][row, :end], self._values[layer][row, :end]

    def append_index(self, layer: int, row: int, keys: Array) -> Array:
        """Write what keys are chosen by, [num_tokens, 1, index_dim], as `append` does; return that of all tokens."""
        known = self._index_keys.get((layer, row), keys[:0])[: self.lengths[row]]
        self._index_keys[layer, row] = np.concatenate([known, keys])
        return self._index_keys[layer, row]

    def seen(self, layer: int, row: int, num_new: int) -> tuple[Array, Array]:
        """Return what `append` returned of a row in a layer, where it wrote `num_new` tokens."""
        end = int(self.lengths[row]) + num_new
        return self._keys[layer][row, :end], self._values[layer][row, :end]

    def state(self, layer: int, row: int) -> tuple[Array, ...] | None:
        """Return what `set_state` kept; None before the first token."""
        return self._states.get((layer, row))

    def set_state(self, layer: int, row: int, *state: Array) -> None:
        """Keep the state of a row in a layer that has one, as it is behind the new tokens; `advance` makes it count."""
        self._new_states[layer, row] = state

    def copy(self, row: int, other: int) -> None:
        """Let another row become a copy of a row."""
        self.lengths[other] = self.lengths[row]
        for arrays in (self._keys, self._values):
            for array in arrays:
                array[other] = array[row]
        # These arrays are replaced and never written.
        self._index_keys |= {(layer, other): keys for (layer, of), keys in self._index_keys.items() if of == row}
        self._states |= {(layer, other): state for (layer, of), state in self._states.items() if of == row}

    def advance(self, counts: Sequence[int]) -> None:
        """Count the tokens that were appended to every layer: `counts` [num_rows]."""
        self._states.update(self._new_states)
        self.lengths += np.asarray(counts, np.int64)

    def _reserve(self, layer: int, num_tokens: int) -> None:
        """Make room for `num_tokens` per row; doubling makes a long generation linear in its length."""
        num_rows, capacity, num_kv_heads, head_dim = self._keys[layer].shape
        if num_tokens <= capacity:
            return
        more = np.zeros((num_rows, max(num_tokens, 2 * capacity) - capacity, num_kv_heads, head_dim))
        for arrays in (self._keys, self._values):
            arrays[layer] = np.concatenate([arrays[layer], more.astype(arrays[layer].dtype)], axis=1)
