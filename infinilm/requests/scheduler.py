"""The scheduler chooses the tokens of the next step: continuous batching over the blocks of a paged KV cache.

Its state is a structure of arrays indexed by slot (one per running sequence) and updated in place, so that a few numpy
operations build a step for many sequences. `num_tokens - num_computed` tokens of a sequence are still to be computed:
one in decode, many in prefill, in chunks of at most `max_num_batched_tokens`.

The engine thread calls `schedule`, runs the batch on the engine, and passes the sampled ids to `update`. It may
schedule one step ahead. The newest token of a sequence is not known then, and the batch names the row of the step
before that samples it. With a pipeline, as many steps are in flight as it has stages, and a sequence waits until its
newest token is known: sequences that decode are divided over the steps. `schedule` advances the state, and `update`
fills in the tokens. When blocks run out, and no step is in flight that may free some, the youngest sequence is
preempted: it frees its blocks, waits at the front of the queue, and is computed again later, mostly from the prefix
cache. None of this changes the tokens of a sequence.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm import _core
from infinilm.errors import CacheFullError
from infinilm.requests.block_manager import BlockManager
from infinilm.requests.states import StatePool
from infinilm.requests.steps import (
    Chunks,
    IndexArray,
    Int32Array,
    Sampled,
    SchedulerStats,
    Sequence,
    Step,
    StepMasks,
    logit_changes,
    tokens_of_a_step,
)

# Rows of logits that a step brings to the host for sequences that collect them: 128 MiB with a vocabulary of 131,072.
MAX_COLLECTED_ROWS = 256
_NO_LIMIT = np.iinfo(np.int32).max


class Scheduler:
    """First come, first served; decodes go first, then the chunks of prompts, oldest first.

    Parameters
    ----------
    num_blocks, block_size
        Shape of the KV cache; `block_size` in tokens.
    max_num_seqs
        Sequences that run at the same time.
    max_model_len
        Tokens of a sequence, prompt and output together; the owner removes a sequence of this length.
    max_num_batched_tokens
        Tokens a step computes at most, see `tokens_of_a_step`.
    enable_prefix_caching
        Share the blocks of equal beginnings of prompts; results do not change.
    sliding_window, num_window_blocks
        Keys that a token sees at most, and blocks, of layers with blocks of their own; see `BlockManager`.
    num_states, snapshot_interval
        Of models that keep a state of each sequence, see `StatePool`; 0 states: of others.
    num_stages
        Of a pipeline, and steps that may be in flight; 1: there is none.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        enable_prefix_caching: bool = True,
        sliding_window: int = 0,
        num_window_blocks: int = 0,
        num_states: int = 0,
        snapshot_interval: int = 0,
        num_stages: int = 1,
    ) -> None:
        self.max_model_len = max_model_len
        self.max_num_batched_tokens = tokens_of_a_step(max_num_batched_tokens, max_num_seqs, num_stages)
        self._num_stages = num_stages
        # Ordered set, in order of arrival; all are younger than the running ones. Any may be removed.
        self.waiting: OrderedDict[Sequence, None] = OrderedDict()
        self.running: list[Sequence] = []  # in order of arrival
        self.num_preemptions = 0
        self.blocks = BlockManager(
            num_blocks,
            block_size,
            max_num_seqs,
            max_model_len,
            enable_prefix_caching=enable_prefix_caching,
            sliding_window=sliding_window,
            num_window_blocks=num_window_blocks,
        )
        interval = snapshot_interval if enable_prefix_caching else 0
        self._states = StatePool(num_states, max_num_seqs, interval)
        self._free_slots = list(range(max_num_seqs))[::-1]
        # Kept from step to step while the same sequences run. None: must be made again.
        self._slots_of_running: IndexArray | None = None
        self._stop_token_ids: frozenset[int] | None = None
        self._params_of_running: dict[str, npt.NDArray[Any]] | None = None
        self._in_flight: list[Step] = []  # whose results are not in, the oldest first
        self._collected_rows = 0  # of the step that is being made
        self._num_left = 0  # times a sequence left its slot
        # Structure of arrays, [max_num_seqs, ...].
        # One token more than a sequence can have, for sequences that are not removed at their end.
        self._tokens = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self._num_tokens = np.zeros(max_num_seqs, np.int32)  # includes the token that a step in flight samples
        self._max_num_tokens = np.zeros(max_num_seqs, np.int32)  # final length; the last token is never computed
        # Tokens whose keys and values are in the cache, when the steps in flight are done.
        self._num_computed = np.zeros(max_num_seqs, np.int32)
        self._previous_row = np.full(max_num_seqs, -1, np.int32)  # of a step in flight, that samples the last token
        self._prompt_lens = np.zeros(max_num_seqs, np.int32)
        self._collects = np.zeros(max_num_seqs, np.bool_)
        self._owner_sees_end_only = np.zeros(max_num_seqs, np.bool_)
        self._is_streamed = np.zeros(max_num_seqs, np.bool_)
        self._needs_logits = np.zeros(max_num_seqs, np.bool_)
        self._num_logprobs = np.full(max_num_seqs, -1, np.int32)
        self._is_constrained = np.zeros(max_num_seqs, np.bool_)
        self._is_changed = np.zeros(max_num_seqs, np.bool_)
        self._temperature = np.zeros(max_num_seqs, np.float32)
        self._top_k = np.zeros(max_num_seqs, np.int32)
        self._top_p = np.ones(max_num_seqs, np.float32)
        self._min_p = np.zeros(max_num_seqs, np.float32)
        self._seed = np.zeros(max_num_seqs, np.uint64)
        self._adapter_id = np.full(max_num_seqs, -1, np.int32)

    # ---- for the owner of sequences ----

    @property
    def has_work(self) -> bool:
        """Whether any sequence is waiting or running."""
        return bool(self.waiting or self.running)

    @property
    def stats(self) -> SchedulerStats:
        """Counters; may be read while a step runs."""
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_used_blocks=self.blocks.groups[0].num_used,
            num_blocks=self.blocks.groups[0].num_blocks,
            cache_usage=max(group.num_used / group.num_blocks for group in self.blocks.groups),
            prefix_hit_rate=self.blocks.hit_rate,
            num_preemptions=self.num_preemptions,
        )

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; it is admitted when a slot and enough blocks are free.

        Raises
        ------
        CacheFullError
            If it could never run to its end, not even alone.
        """
        length = len(sequence.prompt_token_ids)
        if length > self.max_model_len:
            raise CacheFullError(
                f"the prompt has {length} tokens, but a sequence can have {self.max_model_len}: shorten it, or raise "
                "max_model_len"
            )
        length = length if sequence.collect_logits else self._final_length(sequence)
        for group in self.blocks.groups:
            if (needed := group.least_blocks(length)) > group.num_blocks:
                raise CacheFullError(
                    f"a sequence of {length} tokens, output included, needs {needed} blocks of {group.block_size} "
                    f"tokens, but the KV cache has {group.num_blocks} in all: raise kv_cache, or lower max_tokens or "
                    "max_model_len"
                )
        self.waiting[sequence] = None

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that has finished or was cancelled; its slot and blocks are free at once."""
        if sequence.slot >= 0:
            self._leave_slot(sequence)
            self.running.remove(sequence)
        else:
            self.waiting.pop(sequence, None)
        sequence.adapter = None

    def reset_prefix_cache(self) -> None:
        """Forget the prefixes of all prompts, as after a change of weights."""
        self.blocks.reset_prefix_cache()
        self._states.forget()

    def schedule(self, now: float) -> Step | None:
        """Choose the next step; None if there is nothing to do, or nothing before a step in flight is done.

        At most one step may be in flight, or one less than there are stages; results go to `update` in order.

        Parameters
        ----------
        now
            Seconds, perf_counter.
        """
        chunks = Chunks([], np.zeros(0, np.intp), [])
        admitted: list[Sequence] = []
        self._collected_rows = 0
        try:
            preempted = self._choose_decodes(chunks)
            if preempted is None:
                return None
            budget, all_served = self._choose_prefills(chunks, self.max_num_batched_tokens - len(chunks.sequences))
            if all_served and not preempted:
                self._admit(chunks, admitted, budget, now)
            return self._build(chunks) if chunks.sequences else None
        except BaseException:  # tokens that will not be computed must not stay in the prefix cache
            for sequence in reversed(admitted):
                self._preempt(sequence)
            for sequence in self.running:
                self.blocks.forget_uncomputed(sequence.slot, int(self._num_computed[sequence.slot]))
            raise

    def update(
        self,
        step: Step,
        output: _core.StepOutput,
        now: float,
        ids: Int32Array | None = None,
        hidden: npt.NDArray[np.float32] | None = None,
    ) -> Sampled:
        """Take in the result of a step, which came at `now` (seconds, perf_counter).

        `ids`: [num_rows], used instead of those in `output`. Negative: no token; the owner removes this sequence.
        `hidden`: [num_rows, hidden_size], the output of the final norm, if the step collects it.
        """
        self._in_flight.remove(step)
        for sequence, position, begin, end in step.logits_rows:
            begin += sequence.num_collected - position  # a preempted sequence has some already
            logits = None if output.logits is None else output.logits.numpy()
            collected = hidden if sequence.collect_hidden else logits
            if sequence.slot >= 0 and collected is not None and begin < end:
                sequence.logits.append(collected[begin:end])
                sequence.num_collected += end - begin
        if not step.samples:
            return Sampled(0, [], [])
        if ids is None:
            assert output.ids is not None  # there are samples
            ids = output.ids.numpy()
        samples, slots, positions = step.samples, step.slots, step.positions
        new_ids = ids[: len(slots)]  # those only collected come last
        rows: SequenceOf[int] = range(len(slots))
        # Leave out sequences that were cancelled while the step ran, or that got no token.
        if step.num_left != self._num_left or new_ids.min() < 0:
            rows = [row for row in rows if samples[row].slot >= 0 and new_ids[row] >= 0]
            samples = [samples[row] for row in rows]
            slots, positions, new_ids = slots[list(rows)], positions[list(rows)], new_ids[list(rows)]
        self._tokens[slots, positions] = new_ids
        self._previous_row[slots[self._num_tokens[slots] == positions + 1]] = -1  # that no later step has taken
        token_ids: list[int] = new_ids.tolist()
        for sequence, token_id in zip(samples, token_ids, strict=True):
            sequence.output_token_ids.append(token_id)
            sequence.token_times.append(now)
        # The owner takes in a token that ends its sequence.
        goes_on = self._owner_sees_end_only[slots] & (positions + 1 < self._max_num_tokens[slots])
        if not self._running_stop_token_ids().isdisjoint(token_ids):
            for i, (sequence, token_id) in enumerate(zip(samples, token_ids, strict=True)):
                goes_on[i] &= token_id not in sequence.stop_token_ids
        owner_tokens = [(samples[i], rows[i], token_ids[i]) for i in np.flatnonzero(~goes_on).tolist()]
        streamed = np.flatnonzero(goes_on & self._is_streamed[slots])
        is_all = len(streamed) == len(samples)
        return Sampled(len(samples), owner_tokens, samples if is_all else [samples[i] for i in streamed.tolist()])

    def undo(self, step: Step) -> None:
        """Take back an aborted step before its sequences leave; of several the newest first. No prefix keeps it."""
        assert all(sequence.slot >= 0 for sequence in step.sequences), "a sequence left before its step was undone"
        for sequence, start in zip(step.sequences, step.starts.tolist(), strict=True):
            self._num_computed[sequence.slot] = start
            self.blocks.forget_uncomputed(sequence.slot, start)
        self._states.forget()  # among others what the step was to leave
        self._in_flight.remove(step)

    def recompute_all(self) -> None:
        """Preempt all sequences and empty the prefix cache, after a failed step; no step may be in flight."""
        while self.running:
            self._preempt(self.running[-1])
        self.reset_prefix_cache()
        self._in_flight.clear()

    # ---- choosing ----

    def _running_slots(self) -> IndexArray:
        if self._slots_of_running is None:
            self._slots_of_running = np.fromiter((s.slot for s in self.running), np.intp, len(self.running))
            self._stop_token_ids = self._params_of_running = None
        return self._slots_of_running

    def _running_stop_token_ids(self) -> frozenset[int]:
        """Stop token ids of all running sequences."""
        self._running_slots()
        if self._stop_token_ids is None:
            self._stop_token_ids = frozenset().union(*{s.stop_token_ids for s in self.running})
        return self._stop_token_ids

    def _final_length(self, sequence: Sequence) -> int:
        """Tokens, prompt and output, at which a sequence ends at the latest."""
        new = sequence.params.max_tokens
        return self.max_model_len if new is None else min(len(sequence.prompt_token_ids) + new, self.max_model_len)

    def _choose_decodes(self, chunks: Chunks) -> bool | None:
        """Add one token of every sequence in decode, with a new block where the last is full.

        Returns whether a sequence was preempted. None: a preemption is needed, but a step in flight may end sequences
        and so free blocks, so wait for it.
        """
        blocks, preempted = self.blocks, False
        slots = self._running_slots()
        num_tokens, num_computed = self._num_tokens[slots], self._num_computed[slots]
        # One token to compute, and one to come after it.
        is_decode = (num_tokens - num_computed == 1) & (num_tokens < self._max_num_tokens[slots])
        if self._num_stages > 1:  # those whose token is known, and no more than leaves some for the other steps
            is_decode &= self._previous_row[slots] < 0
            is_decode &= np.cumsum(is_decode) <= -(-len(slots) // self._num_stages)
        decode_slots = slots if is_decode.all() else slots[is_decode]
        if blocks.has_window:
            self._remember_decoded(decode_slots, num_computed[is_decode])  # before blocks go
            blocks.release_behind_window(slots, num_computed)
        is_growing = is_decode & (num_computed == blocks.lengths[slots] * blocks.block_size)
        while (num_growing := np.count_nonzero(is_growing)) > blocks.num_free:
            if self._in_flight:
                return None
            self._preempt(self.running[-1])
            slots, is_decode, is_growing, preempted = slots[:-1], is_decode[:-1], is_growing[:-1], True
        if num_growing:
            blocks.grow_by_one(slots[is_growing])
        if preempted:
            decode_slots = slots[is_decode]
        if len(decode_slots) == len(slots):
            chunks.sequences, chunks.decode_slots = self.running.copy(), decode_slots
        else:
            chunks.sequences = [self.running[i] for i in np.flatnonzero(is_decode).tolist()]
            chunks.decode_slots = decode_slots
        return preempted

    def _remember_decoded(self, slots: IndexArray, ends: Int32Array) -> None:
        """Add the blocks that decodes have filled to the prefix cache; not done in every step.

        `ends`: [len(slots)], tokens that are computed, or that the step which is being made computes.
        """
        blocks = self.blocks
        if blocks.enable_prefix_caching:
            known = self._num_tokens[slots] - (self._previous_row[slots] >= 0)
            full = np.minimum(np.minimum(known, ends) // blocks.block_size, blocks.lengths[slots])
            while np.count_nonzero(is_behind := full > blocks.num_remembered[slots]):
                slots, full = slots[is_behind], full[is_behind]
                blocks.remember_next(slots, self._tokens)

    def _choose_prefills(self, chunks: Chunks, budget: int) -> tuple[int, bool]:
        """Add chunks of running prompts; returns the budget left, and whether each prompt got all it asked for."""
        if len(chunks.sequences) == len(self.running):
            return budget, True
        slots = self._running_slots()
        is_prefill = self._num_tokens[slots] - self._num_computed[slots] > 1
        for sequence in [self.running[i] for i in np.flatnonzero(is_prefill).tolist()]:
            if sequence.slot < 0:  # preempted below
                break
            num_computed = int(self._num_computed[sequence.slot])
            wanted = sequence.num_tokens - num_computed
            room = self.blocks.room(sequence.slot) - num_computed
            # At least one sequence must make progress.
            while room <= 0 and not chunks.sequences and not self._in_flight and self.running[-1] is not sequence:
                self._preempt(self.running[-1])
                room = self.blocks.room(sequence.slot) - num_computed
            # A full collection of logits does not hold up others, and neither does the border of a snapshot.
            most = min(wanted, self._rows_left(sequence), self._states.to_border(num_computed))
            count = min(most, budget, room)
            if count > 0:
                self._take_chunk(chunks, sequence, count)
                budget -= count
            if count < most:
                return budget, False
        return budget, True

    def _rows_left(self, sequence: Sequence) -> int:
        """Tokens of this sequence that the step has room for, given the limit of collected logits."""
        return MAX_COLLECTED_ROWS - self._collected_rows if sequence.collect_logits else _NO_LIMIT

    def _take_chunk(self, chunks: Chunks, sequence: Sequence, count: int) -> None:
        self._collected_rows += count if sequence.collect_logits else 0
        end = int(self._num_computed[sequence.slot]) + count
        self.blocks.grow(sequence.slot, end)
        self.blocks.remember(sequence.slot, self._tokens[sequence.slot], end)
        chunks.sequences.append(sequence)
        chunks.prefill_counts.append(count)

    def _admit(self, chunks: Chunks, admitted: list[Sequence], budget: int, now: float) -> None:
        """Admit waiting sequences while there are slots, budget, and blocks for a first chunk above the watermark."""
        blocks = self.blocks
        if self.waiting and self._free_slots and budget > 0:
            self._remember_decoded(chunks.decode_slots, self._num_computed[chunks.decode_slots] + 1)
        while self.waiting and self._free_slots and budget > 0:
            sequence, alone = next(iter(self.waiting)), not chunks.sequences
            rows = self._rows_left(sequence)
            if rows == 0 or (not alone and blocks.headroom() <= 0):
                return
            num_tokens = sequence.num_tokens
            tokens = self._tokens[self._free_slots[-1], :num_tokens]  # of the slot it will have
            tokens[: len(sequence.prompt_token_ids)] = sequence.prompt_token_ids
            tokens[len(sequence.prompt_token_ids) :] = sequence.output_token_ids
            # A sequence that collects logits must compute every token.
            chain = [] if sequence.collect_logits else blocks.find_prefix(tokens, sequence.adapter_id)
            num_known, state = self._states.find(chain, blocks.starts(chain))
            chain = chain[:num_known]
            cached = num_known * blocks.block_size
            count = min(num_tokens - cached, budget, rows, self._states.to_border(cached))
            needed = blocks.blocks_for(cached + count) - num_known
            if not alone and needed > blocks.headroom(chain):
                return
            del self.waiting[sequence]
            self._enter_slot(sequence, chain, now)
            self._states.enter(sequence.slot, state)
            admitted.append(sequence)
            count = min(count, blocks.room(sequence.slot) - cached)
            if count <= 0:  # only while other sequences hold all blocks
                self._preempt(sequence)
                admitted.pop()
                return
            self._take_chunk(chunks, sequence, count)
            budget -= count

    # ---- slots ----

    def _enter_slot(self, sequence: Sequence, chain: SequenceOf[int], now: float) -> None:
        slot = sequence.slot = self._free_slots.pop()
        self.running.append(sequence)
        self._slots_of_running = None
        num_cached = len(chain) * self.blocks.block_size
        self.blocks.share(slot, chain, sequence.adapter_id)
        self._num_tokens[slot] = sequence.num_tokens
        self._max_num_tokens[slot] = _NO_LIMIT if sequence.collect_logits else self._final_length(sequence)
        self._num_computed[slot] = num_cached
        if not sequence.first_scheduled:
            sequence.first_scheduled = now
            if not sequence.collect_logits:
                sequence.cached_tokens = min(num_cached, len(sequence.prompt_token_ids))
                self.blocks.num_queried_tokens += sequence.num_tokens
                self.blocks.num_hit_tokens += num_cached
        params = sequence.params
        self._prompt_lens[slot] = len(sequence.prompt_token_ids)
        self._collects[slot] = sequence.collect_logits
        self._owner_sees_end_only[slot] = sequence.owner_sees_end_only
        self._is_streamed[slot] = sequence.is_streamed
        self._needs_logits[slot] = sequence.needs_logits
        self._num_logprobs[slot] = sequence.num_logprobs
        self._is_constrained[slot] = sequence.constraint is not None
        self._is_changed[slot] = sequence.changes is not None
        self._temperature[slot] = params.temperature
        self._top_k[slot] = params.top_k
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._seed[slot] = sequence.seed
        self._adapter_id[slot] = sequence.adapter_id

    def _leave_slot(self, sequence: Sequence) -> None:
        slot, num_computed = sequence.slot, int(self._num_computed[sequence.slot])
        num_known = int(self._num_tokens[slot]) - bool(self._previous_row[slot] >= 0)
        self.blocks.remember(slot, self._tokens[slot], min(num_known, num_computed))
        self.blocks.free(slot, num_computed)
        self._states.leave(slot)
        self._num_left += 1
        self._free_slots.append(sequence.slot)
        self._previous_row[sequence.slot] = -1
        sequence.slot = -1
        self._slots_of_running = None

    def _preempt(self, sequence: Sequence) -> None:
        """Free the blocks of the youngest running sequence and move it to the front of the waiting queue."""
        self._leave_slot(sequence)
        self.running.pop()
        self.waiting[sequence] = None
        self.waiting.move_to_end(sequence, last=False)
        sequence.num_preemptions += 1
        self.num_preemptions += 1

    # ---- the batch ----

    def _build(self, chunks: Chunks) -> Step:
        """Make the step, and advance the state to what it will be after the step."""
        sequences, num_decodes = chunks.sequences, len(chunks.decode_slots)
        num_seqs, block_size = len(sequences), self.blocks.block_size
        if num_seqs == num_decodes:
            slots = token_slots = chunks.decode_slots  # [num_seqs], of each token
            starts = positions = self._num_computed[slots]  # [num_seqs], of each token
            ends = starts + 1  # [num_seqs]
            cu_seqlens_q = np.arange(num_seqs + 1, dtype=np.int32)
        else:
            prefill_slots = np.array([s.slot for s in sequences[num_decodes:]], np.intp)
            slots = np.concatenate((chunks.decode_slots, prefill_slots))
            counts = np.ones(num_seqs, np.int32)
            counts[num_decodes:] = chunks.prefill_counts
            starts = self._num_computed[slots]
            ends = starts + counts
            cu_seqlens_q = np.zeros(num_seqs + 1, np.int32)
            np.cumsum(counts, out=cu_seqlens_q[1:])
            token_slots = np.repeat(slots, counts)  # [num_tokens]
            positions = np.arange(cu_seqlens_q[-1], dtype=np.int32) - np.repeat(cu_seqlens_q[:-1] - starts, counts)
        tables = self.blocks.block_table
        token_blocks = np.ascontiguousarray(tables[:, token_slots, positions // block_size])  # [num_groups, num_tokens]
        collects = self._collects[slots]
        sampled = np.flatnonzero(~collects & (ends == self._num_tokens[slots]))
        samples, sample_slots, sample_positions = sequences, slots, ends
        if len(sampled) < num_seqs:
            samples, sample_slots, sample_positions = [sequences[i] for i in sampled], slots[sampled], ends[sampled]
        needs_logits = bool(np.count_nonzero(self._needs_logits[sample_slots]))
        previous_rows: Int32Array | None = None
        if self._in_flight and self._num_stages == 1:
            is_last = positions == self._num_tokens[token_slots] - 1
            previous_rows = np.where(is_last, self._previous_row[token_slots], np.int32(-1))
        rows = [cu_seqlens_q[1:][sampled] - 1]
        logits_rows = []
        num_rows = len(samples)
        for i in np.flatnonzero(collects).tolist():
            rows.append(np.arange(cu_seqlens_q[i], cu_seqlens_q[i + 1], dtype=np.int32))
            count = int(ends[i] - starts[i])
            logits_rows.append((sequences[i], int(starts[i]), num_rows, num_rows + count))
            num_rows += count
        adapter_ids = self._adapter_id[slots]
        masks = StepMasks.of(samples, num_rows) if np.count_nonzero(self._is_constrained[sample_slots]) else None
        batch = _core.Batch(
            input_ids=self._tokens[token_slots, positions],
            positions=positions,
            slot_mapping=token_blocks.astype(np.int64) * block_size + positions % block_size,
            block_table=np.ascontiguousarray(tables[:, slots, : self.blocks.blocks_for(int(ends.max()))]),
            cu_seqlens_q=cu_seqlens_q,
            context_lens=ends,
            logits_rows=np.concatenate(rows),
            previous_rows=previous_rows,
            adapter_ids=adapter_ids if np.count_nonzero(adapter_ids >= 0) else None,
            **self._step_states(slots, ends, num_decodes),
            allowed=None if masks is None else masks.allowed,
            allowed_row=None if masks is None else masks.allowed_row,
            **logit_changes(samples, self._is_changed[sample_slots], self._previous_row[sample_slots] >= 0, num_rows),
            return_logits=needs_logits or any(not sequence.collect_hidden for sequence, _, _, _ in logits_rows),
            **(self._sampling(sample_slots, sample_positions, num_rows) if samples else {}),
        )
        step = Step(
            batch,
            sequences,
            starts,
            samples,
            sample_slots,
            sample_positions,
            logits_rows,
            num_prompt_tokens=int(np.maximum(np.minimum(ends, self._prompt_lens[slots]) - starts, 0).sum()),
            draws_on_host=needs_logits and any(s.draws_on_host for s in samples),
            masks=masks,
            num_left=self._num_left,
        )
        self._num_computed[slots] = ends
        self._num_tokens[sample_slots] += 1
        self._previous_row[sample_slots] = np.arange(len(samples), dtype=np.int32)
        self._in_flight.append(step)
        return step

    def _step_states(self, slots: IndexArray, ends: Int32Array, num_decodes: int) -> dict[str, Any]:
        """States of a step, if there are any; prompts leave snapshots where their chunks end at a border."""
        if not self._states.num_states:
            return {}
        prefixes = [0] * len(slots)
        for i in range(num_decodes, len(slots)) if self._states.interval else ():
            if ends[i] % self._states.interval == 0:
                prefixes[i] = self.blocks.chain_id(int(slots[i]))
        state_in, state_out = self._states.step(slots, prefixes)
        return {"state_in": state_in, "state_out": state_out}

    def _sampling(self, slots: IndexArray, positions: Int32Array, num_rows: int) -> dict[str, Any]:
        """Sampling parameters, one entry per row. Rows that are only collected are sampled greedily and dropped.

        `positions`: positions of the tokens to be sampled. Position and seed determine the random draw.
        """
        random_val = np.zeros(num_rows, np.float32)
        _core.fill_uniform(self._seed[slots], positions.astype(np.uint64), random_val[: len(slots)])
        rest = num_rows - len(slots)
        if slots is not self._slots_of_running or rest:
            return {"random_val": random_val, **self._sampling_params(slots, rest)}
        if self._params_of_running is None:
            self._params_of_running = self._sampling_params(slots, 0)
        return {"random_val": random_val, **self._params_of_running}

    def _sampling_params(self, slots: IndexArray, rest: int) -> dict[str, npt.NDArray[Any]]:
        """Sampling parameters of `slots`, followed by `rest` greedy rows."""

        def entries(per_slot: npt.NDArray[Any], greedy: int) -> npt.NDArray[Any]:
            return np.concatenate((per_slot[slots], np.full(rest, greedy, per_slot.dtype)))

        return {
            "temperature": entries(self._temperature, 0),
            "top_k": entries(self._top_k, 0),
            "top_p": entries(self._top_p, 1),
            "min_p": entries(self._min_p, 0),
            "num_logprobs": entries(self._num_logprobs, -1),
        }
