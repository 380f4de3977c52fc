"""The blocks of one group of layers: free, used, or idle (unused, but the end of a known prefix).

Which sequence holds which is up to `BlockManager`. Layers that see a window only are a group of their own, so that
their blocks behind it can be used again while others keep theirs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from infinilm.scheduling.sequence import IndexArray, Int32Array

__all__ = ["BlockGroup"]


class BlockGroup:
    """Blocks, numbered from 0.

    Parameters
    ----------
    num_blocks, block_size : int
        How many, and the tokens of each.
    sliding_window : int
        The most keys that a token sees in these layers; 0: all.
    block_table : ndarray
        [max_num_seqs, max_blocks] int32: of each slot the block of each `block_size` tokens. Entries of a row before
        `first`, and beyond its length, mean nothing.

    Attributes
    ----------
    first : ndarray
        [max_num_seqs] int32: the first entry of a row that is not behind the window.
    ref_counts : ndarray
        [num_blocks] int32: slots that use a block.
    watermark : int
        Blocks that admission leaves free, so that running sequences can grow for a while; 0 if they cannot run out.
    """

    def __init__(self, num_blocks: int, block_size: int, sliding_window: int, block_table: Int32Array) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.sliding_window = sliding_window
        self.block_table = block_table
        self.first = np.zeros(len(block_table), np.int32)
        self.ref_counts = np.zeros(num_blocks, np.int32)
        self.watermark = 0 if num_blocks >= block_table.size else num_blocks // 100
        # Hold nothing known; the lowest first, so that memory stays untouched.
        self._free = list(range(num_blocks))[::-1]
        self._idle: OrderedDict[int, None] = OrderedDict()  # the least recently used first
        self._blocks: dict[int, int] = {}  # id of a prefix -> the block that it ends with
        self._ids: dict[int, int] = {}  # block -> id of the prefix that ends with it

    @property
    def num_free(self) -> int:
        """Blocks that can be taken now, including idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Blocks that sequences hold; a shared block counts once."""
        return self.num_blocks - self.num_free

    def least_blocks(self, num_tokens: int) -> int:
        """Blocks that a sequence of `num_tokens` tokens needs at the same time, even with the smallest steps."""
        blocks = -(-num_tokens // self.block_size)
        return min(blocks, blocks_of_window(self.sliding_window, self.block_size)) if self.sliding_window else blocks

    def first_seen(self, num_tokens: Int32Array) -> Int32Array:
        """The first block that tokens behind the first `num_tokens` see; of each element."""
        if not self.sliding_window:
            return np.zeros_like(num_tokens)
        return np.maximum(num_tokens - self.sliding_window + 1, 0) // self.block_size

    # ---- taking and giving back ----

    def take(self, count: int) -> tuple[IndexArray, list[int]]:
        """Take blocks, which must be free; returns them, and the ids of prefixes that are no longer known."""
        if count > self.num_free:
            raise AssertionError(f"{count} blocks asked for, {self.num_free} are free")
        split = max(len(self._free) - count, 0)
        blocks = self._free[split:][::-1]
        del self._free[split:]
        lost = []
        while len(blocks) < count:
            block, _ = self._idle.popitem(last=False)
            lost.append(self._ids.pop(block))
            del self._blocks[lost[-1]]
            blocks.append(block)
        taken = np.array(blocks, np.intp)
        self.ref_counts[taken] = 1
        return taken, lost

    def share(self, chain_ids: Sequence[int]) -> list[int]:
        """Use the blocks that these known prefixes end with."""
        blocks = [self._blocks[chain_id] for chain_id in chain_ids]
        for block in blocks:
            self._idle.pop(block, None)
        self.ref_counts[blocks] += 1
        return blocks

    def hold(self, blocks: Int32Array) -> None:
        """Use blocks that a sequence uses in another one as well; each is named once."""
        self.ref_counts[blocks] += 1

    def give_back(self, blocks: Int32Array) -> None:
        """Stop using these blocks, the least useful first."""
        self.ref_counts[blocks] -= 1
        for block in blocks[self.ref_counts[blocks] == 0].tolist():
            if block in self._ids:
                self._idle[block] = None
            else:
                self._free.append(block)

    # ---- prefixes ----

    def knows(self, chain_id: int) -> bool:
        """Whether the block is here that this prefix ends with."""
        return chain_id in self._blocks

    def block_of(self, chain_id: int) -> int:
        """The block that a known prefix ends with."""
        return self._blocks[chain_id]

    def num_idle(self, chain_ids: Iterable[int]) -> int:
        """How many blocks of these known prefixes are idle: sharing them reduces the free blocks."""
        return sum(self._blocks[chain_id] in self._idle for chain_id in chain_ids)

    def touch(self, chain_ids: Iterable[int]) -> None:
        """Count the blocks of these prefixes as used just now, if they are here and idle."""
        for chain_id in chain_ids:
            block = self._blocks.get(chain_id, -1)
            if block in self._idle:
                self._idle.move_to_end(block)

    def prefix_of(self, block: int) -> int | None:
        """The id of the prefix that is known to end with a block."""
        return self._ids.get(block)

    def remember(self, chain_id: int, block: int) -> None:
        """Make known that a prefix ends with this block, unless another one is known for it."""
        if chain_id not in self._blocks:
            self._blocks[chain_id] = block
            self._ids[block] = chain_id

    def forget(self, block: int) -> int | None:
        """Take back what `remember` said of a block; returns the id of the prefix, if it was known."""
        chain_id = self._ids.pop(block, None)
        if chain_id is not None:
            del self._blocks[chain_id]
            if block in self._idle:
                del self._idle[block]
                self._free.append(block)
        return chain_id

    def forget_all(self) -> None:
        """Forget every prefix; used blocks stay used."""
        self._free.extend(reversed(self._idle))
        self._idle.clear()
        self._blocks.clear()
        self._ids.clear()


def blocks_of_window(sliding_window: int, block_size: int) -> int:
    """Blocks that a token and those that it sees lie in at most."""
    return -(-(sliding_window - 1) // block_size) + 1
