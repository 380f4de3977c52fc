"""Embeddings that a prompt is given in place of those of token ids, such as those of images."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["GivenTokens"]

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class GivenTokens:
    """What stands in places of a prompt where the token ids say nothing.

    Attributes
    ----------
    spans : mapping of int to float32 array, [num_tokens, given_levels * hidden_size]
        By the first token of each place, in their order; see `Given` in `src/model/given.h`.
    contents : int32 array, [num_prompt_tokens]
        The token ids, but in each place a negative number that stands for what is given there. Equal numbers mean equal
        embeddings, so that the prefix cache knows prompts by them.
    names : int32 array, [num_prompt_tokens], or None
        The same with numbers that follow from what is given alone, in every process: those of a place are parts of its
        SHA-256. None: a place has too few tokens for all parts.
    rope_positions : int32 array, [num_axes, num_prompt_tokens], or None
        The positions that RoPE turns by; None: those in the sequence.
    shift : int
        What is added to the place of every later token in the sequence to give its position on all axes.
    shown : tuple of Mapping
        What `Receipt.images` says of each picture.
    two_way : bool
        Tokens of a span see all of it, so that a step computes what it has not of a span, and nothing else of the
        sequence: see `chunk`.
    """

    spans: Mapping[int, Float32Array]
    contents: Int32Array
    names: Int32Array | None
    rope_positions: Int32Array | None = None
    shift: int = 0
    two_way: bool = False
    shown: tuple[Mapping[str, Any], ...] = ()

    def within(self, begin: int, end: int) -> list[tuple[int, Float32Array]]:
        """The embeddings of tokens from `begin` to `end`: where each run of them begins, and its rows."""
        found = []
        for first, rows in self.spans.items():
            low, high = max(first, begin), min(first + len(rows), end)
            if low < high:
                found.append((low, rows[low - first : high - first]))
        return found

    def chunk(self, begin: int) -> tuple[int, bool]:
        """How many tokens from `begin` on a step may compute, and whether it is all of them or none.

        The beginning of a span may be there already, as a known prefix: it was computed with all of the span.
        """
        if self.two_way:
            for first, rows in self.spans.items():
                if begin < first:
                    return first - begin, False
                if begin < first + len(rows):
                    return first + len(rows) - begin, True
        return sys.maxsize, False
