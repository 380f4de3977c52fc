"""Blocks of the paged KV cache: which sequence holds which block, and the prefix cache.

A block is `block_size` tokens of keys and values. A sequence in slot s owns the blocks `block_table[s, i]`, its tokens
`[i * block_size, (i + 1) * block_size)`. Full blocks are shared: a block whose tokens, and all tokens before it, are
those of another sequence is used by both and counted. Since only full blocks are shared, nobody writes into a shared
block, and nothing is ever copied.

Prefixes are found by a chain: every known block has an id that is never used again, and its key is the id of the block
before it and its own tokens. A lookup compares the tokens themselves, block by block from the first, so a collision of
hashes cannot hand out another prompt's keys.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from infinilm.requests.steps import IndexArray, Int32Array

__all__ = ["DEFAULT_BLOCK_SIZE", "BlockManager", "common_window"]

DEFAULT_BLOCK_SIZE = 16

_ROOT = 0  # id of the empty prefix without an adapter


def _root_of(adapter_id: int) -> int:
    """The id of the empty prefix with an adapter: a negative one of its own."""
    return _ROOT - 1 - adapter_id


def common_window(sliding_windows: Sequence[int]) -> int:
    """The most keys that any layer sees: the widest window, or 0 if some layer sees all keys (window 0)."""
    return max(sliding_windows) if sliding_windows and all(sliding_windows) else 0


class BlockManager:
    """The blocks of the cache: free, used, or idle (unused, with a known prefix).

    Parameters
    ----------
    num_blocks, block_size : int
        Shape of the cache; `block_size` in tokens.
    max_num_seqs, max_model_len : int
        Shape of the block table: slots, and tokens of a slot.
    enable_prefix_caching : bool
        Keep full blocks after their sequence has ended, until the space is needed.
    sliding_window : int
        The most keys that a token sees; 0: all. Blocks that lie wholly before the window are freed.

    Attributes
    ----------
    block_table : ndarray
        [max_num_seqs, ceil(max_model_len / block_size)] int32, changed in place. Entries behind the window and beyond
        `lengths` mean nothing.
    lengths : ndarray
        [max_num_seqs] int32: entries of a row, those behind the window included.
    ref_counts : ndarray
        [num_blocks] int32: slots that use a block.
    num_remembered : ndarray
        [max_num_seqs] int32: full blocks of a slot that have gone through the chain, see `remember`.
    num_queried_tokens, num_hit_tokens : int
        Tokens of prompts looked up so far, and how many of them the prefix cache held.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        *,
        enable_prefix_caching: bool = True,
        sliding_window: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.sliding_window = sliding_window
        self.block_table = np.zeros((max_num_seqs, -(-max_model_len // block_size)), np.int32)
        self.lengths = np.zeros(max_num_seqs, np.int32)
        self.ref_counts = np.zeros(num_blocks, np.int32)
        self.num_remembered = np.zeros(max_num_seqs, np.int32)
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._first = np.zeros(max_num_seqs, np.int32)  # first entry not yet given back by the window
        self._chain_id = [_ROOT] * max_num_seqs  # id of the last of them
        self._free = list(range(num_blocks))[
            ::-1
        ]  # hold nothing known; the lowest first, so that memory stays untouched
        self._idle: OrderedDict[int, None] = OrderedDict()  # unused, but known; the least recently used first
        self._known: dict[tuple[int, bytes], tuple[int, int]] = {}  # (id before, tokens) -> (block, its id)
        self._keys: dict[int, tuple[int, bytes]] = {}  # block -> its key in _known
        self._next_id = _ROOT + 1

    # ---- counting ----

    @property
    def num_free(self) -> int:
        """Blocks that can be taken now, including idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Blocks that sequences hold; a shared block counts once."""
        return self.num_blocks - self.num_free

    @property
    def hit_rate(self) -> float:
        """Share of the tokens looked up that the prefix cache held, 0 to 1."""
        return self.num_hit_tokens / self.num_queried_tokens if self.num_queried_tokens else 0.0

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill."""
        return -(-num_tokens // self.block_size)

    def least_blocks(self, num_tokens: int) -> int:
        """Blocks that a sequence of `num_tokens` tokens needs at the same time, even with the smallest steps."""
        blocks = self.blocks_for(num_tokens)
        return min(blocks, self.blocks_for(self.sliding_window - 1) + 1) if self.sliding_window else blocks

    def num_idle(self, blocks: Sequence[int]) -> int:
        """How many of these known blocks are idle: sharing them reduces the free blocks."""
        return sum(block in self._idle for block in blocks)

    def room(self, slot: int) -> int:
        """Tokens that the slot could hold if it took every free block; the slot may be empty."""
        return (int(self.lengths[slot]) + self.num_free) * self.block_size

    # ---- taking and giving back ----

    def grow(self, slot: int, num_tokens: int) -> None:
        """Give the slot enough blocks to hold `num_tokens` tokens; they must be free."""
        begin, end = int(self.lengths[slot]), self.blocks_for(num_tokens)
        if end > begin:
            self.block_table[slot, begin:end] = self._take(end - begin)
            self.lengths[slot] = end

    def grow_by_one(self, slots: IndexArray) -> None:
        """Give each of these slots one block more; they must be free."""
        self.block_table[slots, self.lengths[slots]] = self._take(len(slots))
        self.lengths[slots] += 1

    def share(self, slot: int, blocks: Sequence[int], adapter_id: int = -1) -> None:
        """Begin an empty slot with known blocks, as `find_prefix` gave them."""
        self._chain_id[slot] = _root_of(adapter_id)
        if blocks:
            for block in blocks:
                self._idle.pop(block, None)
            self.ref_counts[blocks] += 1
            self.block_table[slot, : len(blocks)] = blocks
            self._chain_id[slot] = self._known[self._keys[blocks[-1]]][1]
        self.lengths[slot] = self.num_remembered[slot] = len(blocks)

    def release_behind_window(self, slots: IndexArray, num_computed: Int32Array) -> None:
        """Free the blocks that no token from `num_computed` on sees. Without a window there are none.

        Blocks that are not remembered yet stay.
        """
        if not self.sliding_window:
            return
        first = np.maximum(num_computed - self.sliding_window + 1, 0) // self.block_size
        if self.enable_prefix_caching:
            first = np.minimum(first, self.num_remembered[slots])
        for i in np.flatnonzero(first > self._first[slots]):
            slot, end = int(slots[i]), int(first[i])
            self._give_back(self.block_table[slot, self._first[slot] : end])
            self._first[slot] = end

    def free(self, slot: int, num_computed: int) -> None:
        """Empty a slot. The full blocks among its first `num_computed` tokens, which were computed, stay known."""
        self.forget_uncomputed(slot, num_computed)
        # The end of a prefix is less useful than its beginning, so it is first in the order of eviction.
        self._give_back(self.block_table[slot, self._first[slot] : self.lengths[slot]][::-1])
        self.lengths[slot] = self._first[slot] = self.num_remembered[slot] = 0
        self._chain_id[slot] = _ROOT

    def _take(self, count: int) -> IndexArray:
        if count > self.num_free:
            raise AssertionError(f"{count} blocks asked for, {self.num_free} are free")
        split = max(len(self._free) - count, 0)
        blocks = self._free[split:][::-1]
        del self._free[split:]
        while len(blocks) < count:
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
            blocks.append(block)
        taken = np.array(blocks, np.intp)
        self.ref_counts[taken] = 1
        return taken

    def _give_back(self, blocks: Int32Array) -> None:
        self.ref_counts[blocks] -= 1
        for block in blocks[self.ref_counts[blocks] == 0].tolist():
            if block in self._keys:
                self._idle[block] = None
            else:
                self._free.append(block)

    # ---- prefixes ----

    def find_prefix(self, tokens: Int32Array, adapter_id: int = -1) -> list[int]:
        """Blocks that hold the longest known prefix of `tokens`, in order; the last token is always left to compute.

        `adapter_id`: of the LoRA adapter that computed them, whose keys and values are its own; -1: none.
        """
        blocks: list[int] = []
        if self.enable_prefix_caching:
            size, chain_id = self.block_size, _root_of(adapter_id)
            for begin in range(0, (len(tokens) - 1) // size * size, size):
                found = self._known.get((chain_id, tokens[begin : begin + size].tobytes()))
                if found is None:
                    break
                block, chain_id = found
                blocks.append(block)
        return blocks

    def chain_ids(self, blocks: Sequence[int]) -> list[int]:
        """Return the ids of the prefixes that end with these known blocks."""
        return [self._known[self._keys[block]][1] for block in blocks]

    def chain_id(self, slot: int) -> int:
        """Return the id of the prefix that a slot's remembered blocks are."""
        return self._chain_id[slot]

    def remember(self, slot: int, tokens: Int32Array, num_tokens: int) -> None:
        """Make the full blocks among the first `num_tokens` of the slot's `tokens` known.

        They may be shared from now on, also within the step that computes them, because a step writes all keys of a
        layer before it reads any. If the step does not take place, `forget_uncomputed` or `free` takes this back.
        """
        if not self.enable_prefix_caching:
            return
        size, chain_id = self.block_size, self._chain_id[slot]
        end = num_tokens // size
        for i in range(int(self.num_remembered[slot]), end):
            key = (chain_id, tokens[i * size : (i + 1) * size].tobytes())
            chain_id = self._make_known(key, int(self.block_table[slot, i]))
        self.num_remembered[slot] = max(end, self.num_remembered[slot])
        self._chain_id[slot] = chain_id

    def remember_next(self, slots: IndexArray, tokens: Int32Array) -> None:
        """Make the next block of each of these slots known, as `remember` does; `tokens`: [max_num_seqs, ...]."""
        index, size = self.num_remembered[slots], self.block_size
        columns = index[:, None] * size + np.arange(size)
        content = tokens[slots[:, None], columns].tobytes()
        width = len(content) // len(slots)
        for i, (slot, block) in enumerate(zip(slots.tolist(), self.block_table[slots, index].tolist(), strict=True)):
            key = (self._chain_id[slot], content[i * width : (i + 1) * width])
            self._chain_id[slot] = self._make_known(key, block)
        self.num_remembered[slots] += 1

    def _make_known(self, key: tuple[int, bytes], block: int) -> int:
        """The id of the chain up to this block; that of another block if it holds the same prefix already."""
        found = self._known.get(key)
        if found is not None:
            return found[1]
        chain_id = self._new_id()
        self._keys[block] = key
        self._known[key] = block, chain_id
        return chain_id

    def forget_uncomputed(self, slot: int, num_computed: int) -> None:
        """Take back what `remember` said of the slot's blocks beyond `num_computed` tokens."""
        end = int(self.num_remembered[slot])
        begin = num_computed // self.block_size
        if begin >= end:
            return
        uncomputed = self.block_table[slot, begin:end].tolist()
        first_key = self._keys.get(uncomputed[0])
        for block in uncomputed:
            self._forget(block)
        self.num_remembered[slot] = begin
        # The chain continues from the block before. If the first of these blocks was a second copy of a known one, the
        # id of that block is lost. A new id then keeps the rest of the sequence from being shared.
        self._chain_id[slot] = first_key[0] if first_key else self._new_id()

    def reset_prefix_cache(self) -> None:
        """Forget every prefix. Running sequences keep their blocks, and their later blocks are not shared."""
        self._free.extend(reversed(self._idle))
        self._idle.clear()
        self._known.clear()
        self._keys.clear()
        for slot, length in enumerate(self.lengths.tolist()):
            if length:
                self._chain_id[slot] = self._new_id()

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def _forget(self, block: int) -> None:
        key = self._keys.pop(block, None)
        if key is not None:
            del self._known[key]
