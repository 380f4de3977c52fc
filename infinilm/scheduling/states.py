"""States of sequences, for models with layers that keep one: which sequence has which, and snapshots of prefixes.

A state is of one size, however long its sequence, and is changed in place by every step. So it cannot be shared as a
block of keys can. Instead a sequence that ends a step at a multiple of `interval` tokens of its prompt leaves its state
behind as a snapshot, and goes on from it into another one: `state_in` and `state_out` of a batch differ then. A
later sequence with the same prefix begins with the snapshot in the same way. Nothing is ever copied by itself.

A draft changes no state: in a step with drafts each state goes on up to the newest token that is certain, and what it
would have read of the draft is kept in its log. The next step of the sequence names how many of these turned out right
(`num_replayed`), and its state goes through them first. That takes no copies of states, and no token is computed again.

Snapshots are known by the ids of prefixes (`BlockManager.find_prefix`), which are never used again, and the least
recently used one makes room.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from infinilm.scheduling.running import NO_LIMIT
from infinilm.scheduling.sequence import IndexArray, Int32Array
from infinilm.speculation import MAX_DRAFT_TOKENS

__all__ = ["NUM_LOG_ROWS", "StatePool", "plan_states", "snapshot_interval"]

NUM_LOG_ROWS = MAX_DRAFT_TOKENS
"""Rows of the log of a state, and so tokens of a draft at most."""

_NONE = -1

# Steps of fewer tokens read the weights too often. The small states of short convolutions would have 16 tokens: then a
# prompt of 1,024 tokens of LFM2 1.2B's shape takes 1.63 times as long as with 512 (two Zen 5 cores), and with 256 as
# long.
_LEAST_INTERVAL = 256
_MAX_SNAPSHOTS = 32  # of the longest sequence, where it is short


def snapshot_interval(state_bytes: int, kv_bytes_per_token: int, block_size: int, max_model_len: int) -> int:
    """Tokens between two snapshots, in whole blocks: a snapshot takes no more than the keys and values between them.

    No step of a prompt goes beyond the next snapshot, so that many would make steps small: there are 256 tokens between
    them at least, or a 32nd of the longest sequence.
    """
    least = min(_LEAST_INTERVAL, max_model_len // _MAX_SNAPSHOTS)
    tokens = max(-(-state_bytes // max(kv_bytes_per_token, 1)), least)
    return -(-tokens // block_size) * block_size


def plan_states(max_num_seqs: int, with_snapshots: bool) -> int:
    """States that are kept: one for each running sequence, and as many snapshots.

    So one can always be taken: in a step, snapshots that several sequences begin with are at most half as many.
    """
    return 2 * max_num_seqs if with_snapshots else max_num_seqs


class StatePool:
    """The states of the cache.

    Parameters
    ----------
    num_states : int
        See `plan_states`; 0: of a model that has none, whose sequences have state -1.
    max_num_seqs : int
        Slots.
    interval : int
        Tokens between snapshots, a multiple of the block size; 0: none are made.
    """

    def __init__(self, num_states: int, max_num_seqs: int, interval: int) -> None:
        self.num_states = num_states
        self.interval = interval
        self._free = list(range(num_states))[::-1]  # the lowest first, so that memory stays untouched
        self._current = np.full(max_num_seqs, _NONE, np.int32)  # the state that each slot goes on from
        self._num_seen = np.zeros(max_num_seqs, np.int32)  # tokens that it has seen
        self._is_snapshot = np.zeros(num_states, np.bool_)
        self._snapshots: OrderedDict[int, int] = OrderedDict()  # id of a prefix -> state; least recently used first

    def find(self, chain: Sequence[int], starts: Sequence[bool]) -> tuple[int, int]:
        """Return how many blocks of a prefix a sequence can begin with, and the state behind them; or -1.

        `chain`, `starts`: as `BlockManager` gives them.
        """
        for count in range(len(chain), 0, -1):
            if not starts[count]:
                continue
            if not self.num_states:
                return count, _NONE
            state = self._snapshots.get(chain[count - 1])
            if state is not None:
                self._snapshots.move_to_end(chain[count - 1])
                return count, state
        return 0, _NONE

    def tokens_to_snapshot(self, num_tokens: int) -> int:
        """Tokens that a step computes of a prompt at most, to end where the next snapshot is due."""
        return self.interval - num_tokens % self.interval if self.interval else NO_LIMIT

    def enter(self, slot: int, state: int, num_tokens: int) -> None:
        """Begin a sequence with a snapshot, which has seen `num_tokens`, or with -1."""
        self._current[slot] = state
        self._num_seen[slot] = num_tokens

    def fork(self, slot: int, other: int) -> None:
        """Begin an empty slot, `other`, with the state of `slot`: both go on from it as from a snapshot."""
        state = self._current[slot]
        self._current[other], self._num_seen[other] = state, self._num_seen[slot]
        if state >= 0:
            self._is_snapshot[state] = True

    def leave(self, slot: int) -> None:
        """End a sequence."""
        state = int(self._current[slot])
        self._current[slot] = _NONE
        if state >= 0:
            self._give_back(state)

    def step(self, slots: IndexArray, prefixes: Sequence[int]) -> tuple[Int32Array, Int32Array]:
        """Choose the states of a step.

        Parameters
        ----------
        slots
            [num_seqs]: of its sequences.
        prefixes
            [num_seqs]: ids of the prefixes at whose end the step leaves snapshots; 0: it leaves none.

        Returns
        -------
        state_in, state_out : ndarray
            [num_seqs] int32.
        """
        state_in = self._current[slots]
        state_out = state_in.copy()
        read = [int(state) for state in state_in if state >= 0 and self._is_snapshot[state]]
        for i in np.flatnonzero((state_in < 0) | self._is_snapshot[state_in]).tolist():
            state_out[i] = self._take(int(slots[i]), read)
            self._current[slots[i]] = state_out[i]
        for i, prefix in enumerate(prefixes):
            if prefix and prefix not in self._snapshots:
                self._snapshots[prefix] = state = int(state_out[i])
                self._is_snapshot[state] = True
        for state in set(read):
            self._give_back(state)
        return state_in, state_out

    def batch_arrays(
        self,
        slots: IndexArray,
        starts: Int32Array,
        ends: Int32Array,
        num_decodes: int,
        prefix_of: Callable[[int], int],
        *,
        has_drafts: bool,
    ) -> dict[str, Any]:
        """The states of a step as arrays of its batch; none for a model without states.

        Prompts leave snapshots where their chunks end at a multiple of `interval` tokens.

        Parameters
        ----------
        slots, starts, ends
            [num_seqs]: slots of the step's sequences, and tokens of each that are certain before the step and behind
            it. Drafts are beyond: a state cannot be taken back to where one was wrong.
        num_decodes
            How many of them decode; these come first.
        prefix_of
            Gives the id of the prefix that a slot's full blocks are.
        has_drafts
            The step computes tokens beyond `ends`.
        """
        if not self.num_states:
            return {}
        prefixes = [0] * len(slots)
        for i in range(num_decodes, len(slots)) if self.interval else ():
            if ends[i] % self.interval == 0:
                prefixes[i] = prefix_of(int(slots[i]))
        state_in, state_out = self.step(slots, prefixes)
        num_replayed = starts - self._num_seen[slots]
        self._num_seen[slots] = ends
        arrays = {"state_in": state_in, "state_out": state_out}
        if has_drafts:
            arrays["state_tokens"] = ends - starts
        if has_drafts or np.count_nonzero(num_replayed):  # steps that verify drafts have both, and so the same graphs
            arrays["num_replayed"] = num_replayed
        return arrays

    def snapshot_of(self, prefix: int) -> int | None:
        """The state that is the snapshot of a prefix, if there is one."""
        return self._snapshots.get(prefix)

    def adopt(self, prefix: int) -> int | None:
        """A state that is the snapshot of a prefix from now on, to be filled; None: there is one, or none is free."""
        if prefix in self._snapshots:
            return None
        if self._free:
            state = self._free.pop()
        else:
            idle = (one for one in self._snapshots.items() if not (self._current == one[1]).any())
            if (oldest := next(idle, None)) is None:
                return None
            del self._snapshots[oldest[0]]
            state = oldest[1]
        self._snapshots[prefix] = state
        self._is_snapshot[state] = True
        return state

    def forget(self) -> None:
        """Drop all snapshots. Sequences that go on from one still do."""
        states = list(self._snapshots.values())
        self._snapshots.clear()
        for state in states:
            self._give_back(state)

    def _give_back(self, state: int) -> None:
        """Make a state free, unless it is a snapshot, or some sequence goes on from it."""
        if state not in self._snapshots.values() and not (self._current == state).any():
            self._is_snapshot[state] = False
            self._free.append(state)

    def _take(self, slot: int, read: Sequence[int]) -> int:
        """Take a free state that no sequence of the step reads; `read` names a state once for each of its readers."""
        if self._free:
            return self._free.pop()
        own = int(self._current[slot])
        for prefix, state in self._snapshots.items():
            if state not in read and not (self._current == state).any():
                del self._snapshots[prefix]
                self._is_snapshot[state] = False
                return state
        # The snapshot that it begins with becomes its own.
        if own >= 0 and read.count(own) == 1 and np.count_nonzero(self._current == own) == 1:
            for prefix, state in self._snapshots.items():
                if state == own:
                    del self._snapshots[prefix]
                    break
            self._is_snapshot[own] = False
            return own
        raise AssertionError(f"no state is free: {len(self._snapshots)} snapshots, {self._current.tolist()}")
