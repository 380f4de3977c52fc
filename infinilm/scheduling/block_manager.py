"""Blocks of the paged KV cache: which sequence holds which block, and the prefix cache.

A block is `block_size` tokens of keys and values of a group of layers. There is one group of all layers; or those that
see all keys are the first group, and those with a window, of which a sequence needs no more than the last ones, the
second. A sequence in slot s owns in group g the blocks `block_table[g, s, i]`, its tokens
`[i * block_size, (i + 1) * block_size)`. Full blocks are shared: a block whose tokens, and all tokens before it, are
those of another sequence is used by both and counted. Since only full blocks are shared, no step writes into a
shared block. A block is copied only where a sequence is forked within it.

Prefixes are found by a chain: every known one has an id that is never used again, and its key is the id of the prefix
without its last block, and the tokens of that block. A lookup compares the tokens themselves, block by block from the
first, so a collision of hashes cannot hand out another prompt's keys. A prefix is known as long as the first group has
the block that it ends with. Other groups may have lost theirs, and a sequence begins behind the longest prefix of which
every group has what it sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from infinilm.scheduling.block_group import BlockGroup
from infinilm.scheduling.sequence import IndexArray, Int32Array

__all__ = ["DEFAULT_BLOCK_SIZE", "BlockManager"]

DEFAULT_BLOCK_SIZE = 16

_ROOT = 0  # id of the empty prefix without an adapter


def _root_of(adapter_id: int) -> int:
    """The id of the empty prefix with an adapter: a negative one of its own."""
    return _ROOT - 1 - adapter_id


class BlockManager:
    """The blocks of all groups, and the prefixes that they hold.

    Parameters
    ----------
    num_blocks, block_size : int
        Shape of the cache; `block_size` in tokens.
    max_num_seqs, max_model_len : int
        Shape of the block table: slots, and tokens of a slot.
    enable_prefix_caching : bool
        Keep full blocks after their sequence has ended, until the space is needed.
    sliding_window : int
        The most keys that a token sees, in the second group where there is one; 0: all. Blocks that lie wholly before
        the window are freed.
    num_window_blocks : int
        Blocks of a second group; 0: there is none.

    Attributes
    ----------
    groups : list of BlockGroup
        One for each group of layers.
    block_table : ndarray
        [num_groups, max_num_seqs, ceil(max_model_len / block_size)] int32, changed in place. Entries behind the window
        and beyond `lengths` mean nothing.
    lengths : ndarray
        [max_num_seqs] int32: entries of a row, those behind the window included.
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
        num_window_blocks: int = 0,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        sizes = [(num_blocks, 0), (num_window_blocks, sliding_window)]
        sizes = sizes if num_window_blocks else [(num_blocks, sliding_window)]
        self.block_table = np.zeros((len(sizes), max_num_seqs, -(-max_model_len // block_size)), np.int32)
        self.groups = [
            BlockGroup(count, block_size, window, table)
            for (count, window), table in zip(sizes, self.block_table, strict=True)
        ]
        self.has_window = sliding_window > 0
        self.lengths = np.zeros(max_num_seqs, np.int32)
        self.num_remembered = np.zeros(max_num_seqs, np.int32)
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._chain_id = [_ROOT] * max_num_seqs  # id of the prefix that a slot's remembered blocks are
        self._known: dict[tuple[int, bytes], int] = {}  # (id before, tokens) -> id
        self._keys: dict[int, tuple[int, bytes]] = {}  # id -> its key in _known
        self._next_id = _ROOT + 1

    # ---- counting ----

    @property
    def num_free(self) -> int:
        """Blocks that can be taken of every group now, including idle ones."""
        return min(group.num_free for group in self.groups)

    @property
    def hit_rate(self) -> float:
        """Share of the tokens looked up that the prefix cache held, 0 to 1."""
        return self.num_hit_tokens / self.num_queried_tokens if self.num_queried_tokens else 0.0

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill."""
        return -(-num_tokens // self.block_size)

    def headroom(self, chain: Sequence[int] = ()) -> int:
        """Blocks of every group above its watermark, once a sequence shares a prefix, as `find_prefix` gave it."""
        return min(
            group.num_free - group.num_idle(chain[self._first_of(group, chain) :]) - group.watermark
            for group in self.groups
        )

    def room(self, slot: int) -> int:
        """Tokens that the slot could hold if it took every free block; the slot may be empty."""
        return (int(self.lengths[slot]) + self.num_free) * self.block_size

    # ---- taking and giving back ----

    def grow(self, slot: int, num_tokens: int) -> None:
        """Give the slot enough blocks to hold `num_tokens` tokens; they must be free."""
        begin, end = int(self.lengths[slot]), self.blocks_for(num_tokens)
        if end > begin:
            for group in self.groups:
                group.block_table[slot, begin:end] = self._take(group, end - begin)
            self.lengths[slot] = end

    def grow_by_one(self, slots: IndexArray) -> None:
        """Give each of these slots one block more of every group; they must be free."""
        for group in self.groups:
            group.block_table[slots, self.lengths[slots]] = self._take(group, len(slots))
        self.lengths[slots] += 1

    def trim(self, slot: int, num_tokens: int) -> None:
        """Give back the blocks of a slot behind those that its first `num_tokens` tokens fill; none is remembered."""
        begin, end = self.blocks_for(num_tokens), int(self.lengths[slot])
        if end > begin:
            for group in self.groups:
                group.give_back(group.block_table[slot, begin:end][::-1])
            self.lengths[slot] = begin

    def share(self, slot: int, chain: Sequence[int], adapter_id: int = -1) -> None:
        """Begin an empty slot with a known prefix, behind which a sequence can begin; see `starts`."""
        self._chain_id[slot] = chain[-1] if chain else _root_of(adapter_id)
        for group in self.groups if chain else ():  # `free` has left the slot as it begins without one
            first = self._first_of(group, chain)
            group.touch(chain[:first])  # a prefix is found from its beginning
            group.block_table[slot, first : len(chain)] = group.share(chain[first:])
            group.first[slot] = first
        self.lengths[slot] = self.num_remembered[slot] = len(chain)

    def can_fork(self, num_tokens: int) -> bool:
        """Whether there is a free block for what a fork behind so many tokens copies."""
        return self.num_free >= (num_tokens % self.block_size > 0)

    def fork(self, slot: int, other: int, num_tokens: int, copy: Callable[[int, int, int], object]) -> None:
        """Begin an empty slot, `other`, with the first `num_tokens` tokens of `slot`, which are all that it has.

        Full blocks are shared. A last one that is not full is copied by ``copy(group, from, to)``; see `can_fork`.
        """
        full, rest = divmod(num_tokens, self.block_size)
        for number, group in enumerate(self.groups):
            table, first = group.block_table, int(group.first[slot])
            group.hold(table[slot, first:full])
            table[other, :full] = table[slot, :full]
            group.first[other] = first
            if rest:
                table[other, full] = self._take(group, 1)[0]
                copy(number, int(table[slot, full]), int(table[other, full]))
        self.lengths[other] = full + (rest > 0)
        self.num_remembered[other] = self.num_remembered[slot]
        self._chain_id[other] = self._chain_id[slot]

    def release_behind_window(self, slots: IndexArray, num_computed: Int32Array) -> None:
        """Free the blocks that no token from `num_computed` on sees. Without a window there are none.

        Blocks that are not remembered yet stay.
        """
        for group in self.groups:
            if not group.sliding_window:
                continue
            first = group.first_seen(num_computed)
            if self.enable_prefix_caching:
                first = np.minimum(first, self.num_remembered[slots])
            for i in np.flatnonzero(first > group.first[slots]):
                slot, end = int(slots[i]), int(first[i])
                group.give_back(group.block_table[slot, group.first[slot] : end])
                group.first[slot] = end

    def free(self, slot: int, num_computed: int) -> None:
        """Empty a slot. The full blocks among its first `num_computed` tokens, which were computed, stay known."""
        self.forget_uncomputed(slot, num_computed)
        for group in self.groups:
            # The end of a prefix is less useful than its beginning, so it is first in the order of eviction.
            group.give_back(group.block_table[slot, group.first[slot] : self.lengths[slot]][::-1])
            group.first[slot] = 0
        self.lengths[slot] = self.num_remembered[slot] = 0
        self._chain_id[slot] = _ROOT

    def _take(self, group: BlockGroup, count: int) -> IndexArray:
        taken, lost = group.take(count)
        self._drop(group, lost)
        return taken

    # ---- prefixes ----

    def find_prefix(self, tokens: Int32Array, adapter_id: int = -1) -> list[int]:
        """Ids of the known prefixes of `tokens`, of one block and more; the last token is always left to compute.

        `adapter_id`: of the LoRA adapter that computed them, whose keys and values are its own; -1: none.
        """
        chain: list[int] = []
        if self.enable_prefix_caching:
            size, chain_id = self.block_size, _root_of(adapter_id)
            for begin in range(0, (len(tokens) - 1) // size * size, size):
                found = self._known.get((chain_id, tokens[begin : begin + size].tobytes()))
                if found is None:
                    break
                chain_id = found
                chain.append(chain_id)
        return chain

    def starts(self, chain: Sequence[int]) -> list[bool]:
        """Whether a sequence can begin behind so many blocks of a chain: an entry for none, for one and so on."""
        if len(self.groups) == 1 or not chain:
            return [True] * (len(chain) + 1)
        counts = np.arange(len(chain) + 1, dtype=np.int32)
        starts = np.ones(len(counts), np.bool_)
        for group in self.groups[1:]:  # the first has all
            num_missing = np.cumsum([0, *(not group.knows(chain_id) for chain_id in chain)])
            starts &= num_missing == num_missing[group.first_seen(counts * self.block_size)]
        return list(starts.tolist())

    def _first_of(self, group: BlockGroup, chain: Sequence[int]) -> int:
        """The first block of a prefix that a sequence behind it sees."""
        return int(group.first_seen(np.array(len(chain) * self.block_size)))

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
            chain_id = self._make_known(key, self.block_table[:, slot, i].tolist())
        self.num_remembered[slot] = max(end, self.num_remembered[slot])
        self._chain_id[slot] = chain_id

    def remember_next(self, slots: IndexArray, tokens: Int32Array) -> None:
        """Make the next block of each of these slots known, as `remember` does; `tokens`: [max_num_seqs, ...]."""
        index, size = self.num_remembered[slots], self.block_size
        columns = index[:, None] * size + np.arange(size)
        content = tokens[slots[:, None], columns].tobytes()
        width = len(content) // len(slots)
        blocks = self.block_table[:, slots, index].T.tolist()
        for i, (slot, of_groups) in enumerate(zip(slots.tolist(), blocks, strict=True)):
            key = (self._chain_id[slot], content[i * width : (i + 1) * width])
            self._chain_id[slot] = self._make_known(key, of_groups)
        self.num_remembered[slots] += 1

    def _make_known(self, key: tuple[int, bytes], blocks: Sequence[int | None]) -> int:
        """The id of the prefix that ends with these blocks, one of each group; they stand for it where none did.

        None: a group behind the first has none.
        """
        chain_id = self._known.get(key)
        if chain_id is None:
            chain_id = self._known[key] = self._new_id()
            self._keys[chain_id] = key
        for group, block in zip(self.groups, blocks, strict=True):
            if block is not None:
                group.remember(chain_id, block)
        return chain_id

    def forget_uncomputed(self, slot: int, num_computed: int) -> None:
        """Take back what `remember` said of the slot's blocks beyond `num_computed` tokens."""
        end = int(self.num_remembered[slot])
        begin = num_computed // self.block_size
        if begin >= end:
            return
        # The chain continues from the block before. If the first of these blocks was a second copy of a known one, the
        # id of that block is lost. A new id then keeps the rest of the sequence from being shared.
        first = self.groups[0].prefix_of(int(self.block_table[0, slot, begin]))
        self._chain_id[slot] = self._new_id() if first is None else self._keys[first][0]
        for group in self.groups:
            forgotten = [group.forget(block) for block in group.block_table[slot, begin:end].tolist()]
            self._drop(group, [chain_id for chain_id in forgotten if chain_id is not None])
        self.num_remembered[slot] = begin

    def adopt(
        self,
        chain: Sequence[int],
        tokens: Int32Array,
        present: Sequence[Sequence[int]],
        write: Callable[[int, Int32Array], object],
        adapter_id: int = -1,
    ) -> list[int] | None:
        """Make blocks known that were computed elsewhere, behind a known prefix.

        Parameters
        ----------
        chain
            The prefix, as `find_prefix` gives it.
        tokens
            [num_new_blocks * block_size]: those of the blocks.
        present
            Which of the new blocks there are of each group, from 0; the first group has all.
        write
            Called with the number of a group and [len(present[group])] blocks, which it fills.
        adapter_id
            As in `find_prefix`.

        Returns
        -------
        list of int or None
            The ids of the prefixes that end with the new blocks; None: too few blocks are free.
        """
        size = self.block_size
        shared = [[one for one in chain if group.knows(one)] for group in self.groups]
        held = [np.array(group.share(ids), np.intp) for group, ids in zip(self.groups, shared, strict=True)]
        taken: list[IndexArray] = []
        try:
            if any(len(own) > group.num_free for group, own in zip(self.groups, present, strict=True)):
                return None
            taken += [self._take(group, len(own)) for group, own in zip(self.groups, present, strict=True)]
            for number, blocks in enumerate(taken):
                write(number, blocks.astype(np.int32))
            chain_id, ids = chain[-1] if chain else _root_of(adapter_id), []
            places = [dict(zip(own, blocks.tolist(), strict=True)) for own, blocks in zip(present, taken, strict=True)]
            for i in range(len(tokens) // size):
                key = (chain_id, tokens[i * size : (i + 1) * size].tobytes())
                chain_id = self._make_known(key, [place.get(i) for place in places])
                ids.append(chain_id)
            return ids
        finally:
            for group, blocks in zip(self.groups, taken, strict=False):
                group.give_back(blocks[::-1].astype(np.int32))
            for group, blocks in zip(self.groups, held, strict=True):
                group.give_back(blocks[::-1].astype(np.int32))

    def reset_prefix_cache(self) -> None:
        """Forget every prefix. Running sequences keep their blocks, and their later blocks are not shared."""
        for group in self.groups:
            group.forget_all()
        self._known.clear()
        self._keys.clear()
        for slot, length in enumerate(self.lengths.tolist()):
            if length:
                self._chain_id[slot] = self._new_id()

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def _drop(self, group: BlockGroup, chain_ids: Sequence[int]) -> None:
        """A group has lost the blocks that these prefixes end with."""
        if group is self.groups[0]:
            for chain_id in chain_ids:
                del self._known[self._keys.pop(chain_id)]
