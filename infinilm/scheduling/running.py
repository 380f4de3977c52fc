"""`RunningSequences`: the sequences that have slots, as arrays indexed by slot.

A few numpy operations on these arrays choose and build a step for many sequences. `num_tokens - num_computed` tokens of
a sequence are still to be computed: one in decode, many in prefill.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from infinilm.scheduling.sequence import IndexArray, Int32Array, Lane, Sequence

__all__ = ["NO_LIMIT", "RunningSequences"]

NO_LIMIT = int(np.iinfo(np.int32).max)


class RunningSequences:
    """The running sequences in order of arrival, and what steps need of each, by slot.

    Parameters
    ----------
    max_num_seqs, max_model_len : int
        Slots, and tokens of a slot.

    Attributes
    ----------
    sequences : list of Sequence
    num_left : int
        How many times a sequence has left its slot.
    num_held : int
        Sequences among them whose tokens the host chooses, see `Sequence.is_held`.
    tokens : int32 array, [max_num_seqs, max_model_len]
        Prompt and output; negative where embeddings are given, see `GivenTokens.contents`. The newest token is not
        there yet while the step that samples it is in flight.
    num_tokens, num_computed : int32 array, [max_num_seqs]
        Tokens so far, and how many of them have keys and values, and are in the state if the model has one, or in the
        log of that; both as they are after the steps in flight.
    max_num_tokens : int32 array, [max_num_seqs]
        Length at which the sequence ends at the latest.
    previous_row : int32 array, [max_num_seqs]
        The row of the step in flight that samples the newest token; -1: the token is known.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        self.sequences: list[Sequence] = []
        self.num_left = 0
        self.num_held = 0
        self._free_slots = list(range(max_num_seqs))[::-1]
        # Kept from step to step while the same sequences run. None: must be made again.
        self._slots: IndexArray | None = None
        self._stop_token_ids: frozenset[int] | None = None
        self.tokens = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int32)
        self.num_computed = np.zeros(max_num_seqs, np.int32)
        self.max_num_tokens = np.zeros(max_num_seqs, np.int32)
        self.previous_row = np.full(max_num_seqs, -1, np.int32)
        # The rest is what `Sequence` and `SamplingParams` have under these names.
        self.prompt_lens = np.zeros(max_num_seqs, np.int32)
        self.collects = np.zeros(max_num_seqs, np.bool_)
        self.is_bulk = np.zeros(max_num_seqs, np.bool_)  # of that lane
        self.is_plain = np.zeros(max_num_seqs, np.bool_)
        self.is_streamed = np.zeros(max_num_seqs, np.bool_)
        self.needs_logits = np.zeros(max_num_seqs, np.bool_)
        self.num_logprobs = np.full(max_num_seqs, -1, np.int32)
        self.is_constrained = np.zeros(max_num_seqs, np.bool_)
        self.is_changed = np.zeros(max_num_seqs, np.bool_)
        self.is_drafted = np.zeros(max_num_seqs, np.bool_)  # has a drafter
        self.temperature = np.zeros(max_num_seqs, np.float32)
        self.top_k = np.zeros(max_num_seqs, np.int32)
        self.top_p = np.ones(max_num_seqs, np.float32)
        self.min_p = np.zeros(max_num_seqs, np.float32)
        self.seed = np.zeros(max_num_seqs, np.uint64)
        self.adapter_id = np.full(max_num_seqs, -1, np.int32)
        self.has_given = np.zeros(max_num_seqs, np.bool_)
        self.num_axes = np.zeros(max_num_seqs, np.int32)  # of its positions; 0: its tokens have one each
        self.rope_shift = np.zeros(max_num_seqs, np.int32)

    @property
    def has_free_slot(self) -> bool:
        """Whether another sequence may enter."""
        return bool(self._free_slots)

    @property
    def slots(self) -> IndexArray:
        """Slots of the sequences, in order of arrival; the same array until a sequence enters or leaves."""
        if self._slots is None:
            self._slots = np.fromiter((s.slot for s in self.sequences), np.intp, len(self.sequences))
            self._stop_token_ids = None
        return self._slots

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Stop token ids of all sequences together."""
        if self._slots is None or self._stop_token_ids is None:
            self._stop_token_ids = frozenset().union(*{s.stop_token_ids for s in self.sequences})
        return self._stop_token_ids

    def write_tokens(self, sequence: Sequence) -> Int32Array:
        """Write the tokens of a sequence into the slot that it will have; returns them, [num_tokens]."""
        num_prompt = len(sequence.prompt_token_ids)
        tokens: Int32Array = self.tokens[self._free_slots[-1], : sequence.num_tokens]
        given = sequence.given
        tokens[:num_prompt] = sequence.prompt_token_ids if given is None else given.contents
        tokens[num_prompt:] = sequence.output_token_ids
        return tokens

    def enter(self, sequence: Sequence, num_cached: int, max_num_tokens: int, behind: Sequence | None = None) -> int:
        """Give the sequence that was written last a slot, and return it; `num_cached` of its tokens are computed.

        `behind`: the sequence that it is as old as; None: it is the youngest.
        """
        slot = sequence.slot = self._free_slots.pop()
        self.sequences.insert(len(self.sequences) if behind is None else self.sequences.index(behind) + 1, sequence)
        self._slots = None
        self.num_held += sequence.is_held
        self.num_tokens[slot] = sequence.num_tokens
        self.max_num_tokens[slot] = max_num_tokens
        self.num_computed[slot] = num_cached
        self.prompt_lens[slot] = len(sequence.prompt_token_ids)
        self.collects[slot] = sequence.collect_logits
        self.is_bulk[slot] = sequence.lane is Lane.BULK
        self.is_plain[slot] = sequence.is_plain
        self.is_streamed[slot] = sequence.is_streamed
        self.needs_logits[slot] = sequence.needs_logits
        self.num_logprobs[slot] = sequence.num_logprobs
        self.is_constrained[slot] = sequence.constraint is not None
        self.is_changed[slot] = sequence.changes is not None
        self.is_drafted[slot] = bool(sequence.drafters)
        params = sequence.params
        self.temperature[slot] = params.temperature
        self.top_k[slot] = params.top_k
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.seed[slot] = sequence.seed
        self.adapter_id[slot] = sequence.adapter_id
        given = sequence.given
        self.has_given[slot] = given is not None
        self.num_axes[slot] = 0 if given is None or given.rope_positions is None else len(given.rope_positions)
        self.rope_shift[slot] = 0 if given is None else given.shift
        return slot

    def token_ids(self, slots: IndexArray, positions: Int32Array) -> Int32Array:
        """The ids of tokens, one for each of `slots` and `positions`; 0 where an embedding is given."""
        tokens: Int32Array = self.tokens[slots, positions]
        return np.maximum(tokens, 0) if np.count_nonzero(self.has_given[slots]) else tokens

    def leave(self, sequence: Sequence) -> None:
        """Take the slot of a sequence."""
        self.previous_row[sequence.slot] = -1
        self._free_slots.append(sequence.slot)
        sequence.slot = -1
        self.sequences.remove(sequence)
        self._slots = None
        self.num_left += 1
        self.num_held -= sequence.is_held

    def num_known(self, slot: int) -> int:
        """Tokens of a slot whose ids are known: all but one that a step in flight samples."""
        return int(self.num_tokens[slot]) - bool(self.previous_row[slot] >= 0)

    def advance(self, slots: IndexArray, ends: Int32Array, sample_slots: IndexArray) -> None:
        """Be as after a step that computes `slots` up to `ends` and samples row i for `sample_slots[i]`."""
        self.num_computed[slots] = ends
        self.num_tokens[sample_slots] += 1
        self.previous_row[sample_slots] = np.arange(len(sample_slots), dtype=np.int32)

    def set_tokens(self, slots: IndexArray, positions: Int32Array, ids: npt.NDArray[np.int32]) -> None:
        """Fill in sampled tokens; all three arrays have one entry for each token."""
        self.tokens[slots, positions] = ids
        # A later step may have sampled the next token meanwhile, and then its row stays.
        self.previous_row[slots[self.num_tokens[slots] == positions + 1]] = -1

    def hold(self, slots: IndexArray) -> None:
        """Take back that a step has given each of these slots a token: the host will choose it, see `append`."""
        self.num_tokens[slots] -= 1
        self.previous_row[slots] = -1

    def append(self, slot: int, token_id: int) -> None:
        """Add a token that the host has chosen."""
        self.tokens[slot, self.num_tokens[slot]] = token_id
        self.num_tokens[slot] += 1

    def is_held(self, sequence: Sequence) -> bool:
        """Whether a sequence waits for a token that the host will choose, so that nothing of it is to be computed."""
        return sequence.is_held and bool(self.num_tokens[sequence.slot] == self.num_computed[sequence.slot])

    def catch_up(self, slots: IndexArray, positions: Int32Array) -> None:
        """Be as after so many steps as these tokens take without drafts, which one step has drawn, in order."""
        self.num_tokens[slots] = np.maximum(self.num_tokens[slots], positions + 1)
        self.num_computed[slots] = np.maximum(self.num_computed[slots], positions)
