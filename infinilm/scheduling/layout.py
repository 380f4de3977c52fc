"""`Layout`: where the tokens of a step come from, and where their keys and values go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from infinilm.scheduling.block_manager import BlockManager
from infinilm.scheduling.sequence import IndexArray, Int32Array

__all__ = ["BatchArrays", "Layout", "most_probable"]

BatchArrays = dict[str, Any]
"""Keywords of `_core.Batch`."""


@dataclass(slots=True)
class Layout:
    """The chunks of the sequences of a step, which lie one behind the other."""

    slots: IndexArray  # [num_seqs]
    starts: Int32Array  # [num_seqs]: tokens of each that are computed before the step
    ends: Int32Array  # [num_seqs]: and behind it
    cu_seqlens_q: Int32Array  # [num_seqs + 1]
    token_slots: IndexArray  # [num_tokens]
    positions: Int32Array  # [num_tokens]

    @classmethod
    def of_one_token(cls, slots: IndexArray, starts: Int32Array) -> Layout:
        """One token of each slot."""
        return cls(slots, starts, starts + 1, np.arange(len(slots) + 1, dtype=np.int32), slots, starts)

    @classmethod
    def of_chunks(cls, slots: IndexArray, starts: Int32Array, counts: Int32Array) -> Layout:
        """`counts` tokens of each slot, from `starts` on; all three are [num_seqs]."""
        cu_seqlens_q = np.zeros(len(slots) + 1, np.int32)
        counts.cumsum(out=cu_seqlens_q[1:])
        positions = np.arange(cu_seqlens_q[-1], dtype=np.int32) - (cu_seqlens_q[:-1] - starts).repeat(counts)
        return cls(slots, starts, starts + counts, cu_seqlens_q, slots.repeat(counts), positions)

    def cache_arrays(self, blocks: BlockManager) -> BatchArrays:
        """Where the step writes keys and values, and which blocks it reads."""
        block_size, tables, positions = blocks.block_size, blocks.block_table, self.positions
        token_blocks = tables[:, self.token_slots, positions // block_size]  # [num_groups, num_tokens]
        slot_mapping = np.ascontiguousarray(token_blocks).astype(np.int64) * block_size + positions % block_size
        num_blocks = blocks.blocks_for(int(self.ends.max()))
        return {
            "slot_mapping": slot_mapping,
            "block_table": np.ascontiguousarray(tables[:, self.slots, :num_blocks]),
        }


def most_probable(num_rows: int) -> BatchArrays:
    """Sampling parameters of rows that take the most probable token."""
    zeros = np.zeros(num_rows, np.float32)
    return {
        "temperature": zeros,
        "top_k": np.zeros(num_rows, np.int32),
        "top_p": np.ones(num_rows, np.float32),
        "min_p": zeros,
        "random_val": zeros,
    }
