"""The scheduler chooses the tokens of the next step: continuous batching over the blocks of a paged KV cache.

The engine thread calls `schedule`, runs the batch on the engine, and passes the sampled ids to `update`. One step goes
through five hands:

- choose: `Scheduler` picks one token of each sequence that decodes, then chunks of prompts, oldest first, then waiting
  sequences while slots and blocks are free;
- build: `StepBuilder` makes the batch from the arrays of `RunningSequences`;
- states: `StatePool` names the states of models that keep one for each sequence;
- masks: `StepMasks` says which tokens constraints allow, and is filled in later, while the step runs;
- update: `take_tokens` appends the new tokens to their sequences. Where the host chooses them, as in a beam search, the
  sequence waits behind the step, and is continued (`append`), forked (`fork`) or removed between two steps.

Where sequences have drafts, `Drafting` adds these to a step that is otherwise chosen, and each counts the more tokens
the more of its draft was right.

`schedule` advances the sequences to what they will be after the step, so that it may be called one step ahead. The
newest token of a sequence is not known then, and the batch names the row of the step before that samples it. With a
pipeline, as many steps are in flight as it has stages, and a sequence waits until its newest token is known: sequences
that decode are divided over the steps.

When blocks run out, and no step is in flight that may free some, the youngest sequence is preempted: it frees its
blocks, waits at the front of the queue, and is computed again later, mostly from the prefix cache. None of this changes
the tokens of a sequence.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from infinilm import _core
from infinilm.errors import CacheFullError
from infinilm.scheduling.block_manager import BlockManager
from infinilm.scheduling.drafting import MAX_REPLAYED_TOKENS, Drafting
from infinilm.scheduling.lone_text import LoneTextBatches
from infinilm.scheduling.results import collect_rows, take_tokens
from infinilm.scheduling.running import NO_LIMIT, RunningSequences
from infinilm.scheduling.sequence import IndexArray, Int32Array, Lane, Sequence
from infinilm.scheduling.states import NUM_LOG_ROWS, StatePool
from infinilm.scheduling.step_builder import StepBuilder, StepChoice
from infinilm.scheduling.steps import SampledTokens, SchedulerStats, Step, tokens_of_a_step
from infinilm.speculation import Drafters
from infinilm.speculation.lengths import Lengths

__all__ = ["MAX_COLLECTED_ROWS", "SEGMENT_BLOCKS", "FoundSegment", "Scheduler"]

# Rows of logits that a step brings to the host for sequences that collect them: 128 MiB with a vocabulary of 131,072.
MAX_COLLECTED_ROWS = 256

# A segment of a prefix that is kept elsewhere has so many at least: some megabytes, so that a disk reads and writes at
# its full rate.
SEGMENT_BLOCKS = 16


class FoundSegment(NamedTuple):
    """Where a segment of a prefix lies in the cache."""

    present: tuple[tuple[int, ...], ...]  # of each group, which blocks of the segment are known, from 0
    blocks: list[list[int]]  # of each group, the numbers of these in the cache
    state: int | None  # the snapshot behind it, in models that keep a state of each sequence


class Scheduler:
    """First come, first served; decodes go first, then the chunks of prompts, oldest first.

    Parameters
    ----------
    num_blocks, block_size, max_num_seqs, max_model_len, enable_prefix_caching, sliding_window, num_window_blocks
        See `BlockManager`. The request of a sequence removes it when it has `max_model_len` tokens.
    max_num_batched_tokens
        Tokens a step computes at most, see `tokens_of_a_step`.
    num_states, snapshot_interval
        See `StatePool`; 0 states: the model keeps none.
    whole_prompts
        Each prompt is computed in one step, since its tokens see those behind them, and is done then: an encoder. None
        has more than `max_num_batched_tokens`. There are no prefixes to find, all rows that are collected fit, and
        nothing is drafted.
    num_stages
        Stages of a pipeline, and steps that may be in flight; 1: there is no pipeline.
    drafters, vocab_size
        Make the drafters of each sequence, of tokens below `vocab_size`. None of them: nothing is drafted. Nor is it in
        a pipeline.
    is_adaptive
        How much of each draft is verified follows from what is measured (`Lengths`); otherwise it is all.
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
        whole_prompts: bool = False,
        num_stages: int = 1,
        drafters: SequenceOf[Drafters] = (),
        vocab_size: int = 0,
        is_adaptive: bool = False,
    ) -> None:
        self.max_model_len = max_model_len
        self.max_num_batched_tokens = tokens_of_a_step(max_num_batched_tokens, max_num_seqs, num_stages)
        self._num_stages = num_stages
        self._whole_prompts = whole_prompts
        # An ordered set in order of arrival, from which any sequence may be removed. All of them are younger than the
        # running ones.
        self.waiting: OrderedDict[Sequence, None] = OrderedDict()
        self.num_preemptions = 0
        self._num_bulk = 0  # sequences of that lane, waiting or running
        self.blocks = BlockManager(
            num_blocks,
            block_size,
            max_num_seqs,
            max_model_len,
            enable_prefix_caching=enable_prefix_caching and not whole_prompts,
            sliding_window=sliding_window,
            num_window_blocks=num_window_blocks,
        )
        self._states = StatePool(num_states, max_num_seqs, snapshot_interval if enable_prefix_caching else 0)
        self._running = RunningSequences(max_num_seqs, max_model_len)
        self._drafting: Drafting | None = None
        if drafters and num_stages == 1 and not whole_prompts:
            lengths = Lengths() if is_adaptive else None
            most = NUM_LOG_ROWS if num_states else MAX_REPLAYED_TOKENS
            self._drafting = Drafting(drafters, vocab_size, self._running, self.blocks, lengths, most)
        self._builder = StepBuilder(self._running, self.blocks, self._states)
        self._lone_texts: LoneTextBatches | None = None
        if whole_prompts:
            self._lone_texts = LoneTextBatches(self.blocks, min(max_model_len, self.max_num_batched_tokens))
        self._in_flight: list[Step] = []  # steps without a result yet, the oldest first
        self._last: Step | None = None  # the step whose result came last, if no other was made since

    # ---- for the engine thread ----

    @property
    def running(self) -> list[Sequence]:
        """The sequences that have slots, in order of arrival."""
        return self._running.sequences

    @property
    def has_work(self) -> bool:
        """Whether any sequence is waiting or running."""
        return bool(self.waiting or self.running)

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """The lanes that have sequences."""
        num_others = len(self.waiting) + len(self.running) - self._num_bulk
        return (Lane.INTERACTIVE,) * (num_others > 0) + (Lane.BULK,) * (self._num_bulk > 0)

    def may_interrupt(self, step: Step) -> bool:
        """Whether the step may be aborted for a query: it is bulk work of whole prompts, and was not aborted before.

        So each prompt is computed twice at most, however many queries come.
        """
        return self._whole_prompts and all(
            sequence.lane is Lane.BULK and not sequence.num_preemptions for sequence in step.sequences
        )

    @property
    def needs_results(self) -> bool:
        """Whether a step that could be made ahead waits for those in flight.

        Sequences draft from what these give, or all prompts of an encoder are in them.
        """
        if self._whole_prompts:
            return not self.waiting
        return self._drafting is not None and self._drafting.needs_results

    def lone_batch(self, sequence: Sequence) -> _core.Batch | None:
        """The batch of a short text of an encoder that is not queued, to be computed before there is other work.

        Nothing changes here, so that a thread which computes the batch may be interrupted. None: the sequence is to be
        queued.
        """
        return None if self._lone_texts is None or self.has_work else self._lone_texts.make(sequence)

    @property
    def stats(self) -> SchedulerStats:
        """Counters; may be read while a step runs."""
        drafting = self._drafting
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_used_blocks=self.blocks.groups[0].num_used,
            num_blocks=self.blocks.groups[0].num_blocks,
            cache_usage=max(group.num_used / group.num_blocks for group in self.blocks.groups),
            prefix_hit_rate=self.blocks.hit_rate,
            num_preemptions=self.num_preemptions,
            num_drafts=0 if drafting is None else drafting.num_drafts,
            num_draft_tokens=0 if drafting is None else drafting.num_draft_tokens,
            accepted_at=() if drafting is None else tuple(drafting.accepted_at),
        )

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; it is admitted when a slot and enough blocks are free.

        Raises
        ------
        CacheFullError
            The sequence could never run to its end, not even alone.
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
        self._num_bulk += sequence.lane is Lane.BULK

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that has finished or was cancelled; its slot and blocks are free at once."""
        if sequence.slot >= 0 or sequence in self.waiting:
            self._num_bulk -= sequence.lane is Lane.BULK
        if sequence.slot >= 0:
            self._leave_slot(sequence)
        else:
            self.waiting.pop(sequence, None)
        sequence.adapter = None

    def schedule(
        self,
        now: float,
        *,
        may_draft: bool = True,
        lane: Lane | None = None,
        max_prompt_tokens: int | None = None,
    ) -> Step | None:
        """Choose and build the next step; None if nothing is to be computed, or nothing before a step in flight ends.

        At most one step may be in flight, or one less than there are stages; results go to `update` in order.

        Parameters
        ----------
        now
            Seconds, perf_counter.
        may_draft
            Whether the step may hold tokens that sequences turn out not to have.
        lane
            The step computes sequences of this lane, if one of them can be computed; None: of all lanes.
        max_prompt_tokens
            Tokens of prompts that it computes at most, but for a whole prompt of an encoder; None: what else fits.
        """
        self.rest()
        choice = StepChoice(self.max_num_batched_tokens)
        try:
            if not self._choose(choice, now, lane, max_prompt_tokens):
                return None
            if self._drafting is not None and not self._in_flight:
                if may_draft:
                    self._drafting.choose(choice)
                else:
                    self._drafting.catch_up()
            step = self._builder.build(choice, is_ahead=bool(self._in_flight) and self._num_stages == 1)
        except BaseException:  # tokens that will not be computed must not stay in the prefix cache
            for sequence in reversed(choice.admitted):
                self._preempt(sequence)
            for sequence in self.running:
                self.blocks.forget_uncomputed(sequence.slot, int(self._running.num_computed[sequence.slot]))
            raise
        self._in_flight.append(step)
        return step

    def rest(self) -> None:
        """Learn from the step whose result came last, and let go of it; before a step, or where there is no work."""
        last, self._last = self._last, None
        if self._drafting is not None and last is not None and not self._in_flight:
            self._drafting.learn(last)

    def update(
        self,
        step: Step,
        output: _core.StepOutput,
        now: float,
        ids: Int32Array | None = None,
        hidden: npt.NDArray[np.float32] | None = None,
    ) -> SampledTokens:
        """Take in the result of a step, which came at `now` (seconds, perf_counter).

        `ids`: [num_rows], used instead of those in `output`. A negative id is no token, and the caller removes the
        sequence. `hidden`: [num_rows, hidden_size], the output of the final norm, if the step collects it.
        """
        self._in_flight.remove(step)
        self._last = step if self._drafting is not None else None
        if step.logits_rows:
            collect_rows(step, output, hidden)
        if not step.samples:
            return SampledTokens(0, [], [])
        if ids is None:
            assert output.ids is not None  # because there are samples
            ids = output.ids.numpy()
        rows = step.rows_that_count(ids)
        held: list[int] = []
        if step.is_held:
            held = [row for row in rows if (one := step.samples[row]).is_held and one.slot >= 0]
            self._running.hold(step.slots[held])
            rows = [row for row in rows if not step.samples[row].is_held]
        sampled = take_tokens(self._running, step, ids, now, rows)
        sampled.held.extend((step.samples[row], row) for row in held)
        if self._drafting is not None and step.drafts is not None:
            self._drafting.settle(step, rows)
        return sampled

    def append(self, sequence: Sequence, token_id: int, now: float) -> None:
        """Give a held sequence the token that the host has chosen, at `now` (seconds, perf_counter)."""
        sequence.append(token_id, now)
        if sequence.slot >= 0:
            self._running.append(sequence.slot, token_id)
        elif sequence not in self.waiting:
            self._wait_first(sequence)

    def fork(
        self, sequence: Sequence, branch: Sequence, copy_block: Callable[[int, int, int], object], now: float
    ) -> None:
        """Let a held sequence begin with all tokens of another one, and a token of its own.

        Blocks and states are shared. Where they are not here any more, while a step is in flight (in a pipeline), or if
        nothing is free for the branch, it waits, and begins behind the longest known prefix as any other sequence does.
        Its bits are the same.

        Parameters
        ----------
        sequence, branch
            The branch has the tokens of the sequence and one more.
        copy_block
            See `BlockManager.fork`.
        now
            Seconds, perf_counter.
        """
        running, slot, num_tokens = self._running, sequence.slot, sequence.num_tokens
        branch.first_scheduled = now
        is_here = slot >= 0 and int(running.num_computed[slot]) == num_tokens and not self._in_flight
        if not is_here or not running.has_free_slot or not self.blocks.can_fork(num_tokens):
            self._wait_first(branch)
            return
        running.write_tokens(branch)
        other = running.enter(branch, num_tokens, self._final_length(branch), behind=sequence)
        self._states.fork(slot, other)
        self.blocks.fork(slot, other, num_tokens, copy_block)

    def observe(self, step: Step, num_tokens: int, seconds: float) -> None:
        """Learn what a step has cost and given, which steers how much is drafted.

        Parameters
        ----------
        step
            One that has been taken in.
        num_tokens
            Tokens that came of it.
        seconds
            From the results of the step before it to its own; from when it was made, if nothing ran before it.
        """
        if self._drafting is not None:
            self._drafting.observe(step, num_tokens, seconds)

    def undo(self, step: Step) -> None:
        """Take back an aborted step, so that no prefix keeps its tokens.

        Its sequences must still be here, but for whole prompts, which leave nothing that others could read. The newest
        of several steps is undone first.
        """
        here = [
            (sequence, start)
            for sequence, start in zip(step.sequences, step.starts.tolist(), strict=True)
            if sequence.slot >= 0
        ]
        assert self._whole_prompts or len(here) == len(step.sequences), "a sequence left before its step was undone"
        for sequence, start in here:
            self._running.num_computed[sequence.slot] = start
            self.blocks.forget_uncomputed(sequence.slot, start)
        self._states.forget()  # the snapshots that the step was to leave are among these
        self._in_flight.remove(step)
        if self._whole_prompts:  # nothing of them is computed, so they wait, and others may have their places
            for sequence, _ in reversed(here):
                self._preempt(sequence)

    def recompute_all(self) -> None:
        """Preempt all sequences and empty the prefix cache, after a failed step; no step may be in flight."""
        while self.running:
            self._preempt(self.running[-1])
        self.reset_prefix_cache()
        self._in_flight.clear()
        self._last = None

    def reset_prefix_cache(self) -> None:
        """Forget the prefixes of all prompts, as after a change of weights."""
        self.blocks.reset_prefix_cache()
        self._states.forget()

    # ---- prefixes that are kept elsewhere ----

    @property
    def segment_tokens(self) -> int:
        """Tokens of a segment of a prefix, which is kept and brought back as one, with the state behind it."""
        least, interval = SEGMENT_BLOCKS * self.blocks.block_size, self._states.interval
        return -(-least // interval) * interval if interval else least

    @property
    def has_states(self) -> bool:
        """Whether the model keeps a state of each sequence, without which no sequence begins behind a prefix."""
        return self._states.num_states > 0

    def touch_known(self, tokens: Int32Array, adapter_id: int = -1) -> int:
        """Tokens of a prompt behind which a sequence could begin now.

        Their blocks count as used just now: the sequence waits, and others that begin before it would take them.
        """
        chain = self.blocks.find_prefix(tokens, adapter_id)
        for group in self.blocks.groups:
            group.touch(reversed(chain))
        return self._states.find(chain, self.blocks.starts(chain))[0] * self.blocks.block_size

    def find_segment(self, ids: SequenceOf[int]) -> FoundSegment | None:
        """Where a segment lies whose blocks these prefixes end with; None: it is not whole any more.

        `ids`: a part of what `BlockManager.find_prefix` gave once. They are never used again for other prefixes.
        """
        groups = self.blocks.groups
        if not all(map(groups[0].knows, ids)):
            return None
        present = tuple(tuple(i for i, one in enumerate(ids) if group.knows(one)) for group in groups)
        blocks = [[group.block_of(ids[i]) for i in there] for group, there in zip(groups, present, strict=True)]
        return FoundSegment(present, blocks, self._states.snapshot_of(ids[-1]))

    def find_known(self, tokens: Int32Array, adapter_id: int = -1) -> tuple[int, FoundSegment | None]:
        """How many of these tokens a sequence could begin behind now, and where their blocks and state lie."""
        chain = self.blocks.find_prefix(np.append(tokens, np.int32(0)), adapter_id)  # the last one counts, too
        count = self._states.find(chain, self.blocks.starts(chain))[0]
        return count * self.blocks.block_size, self.find_segment(chain[:count]) if count else None

    def adopt(
        self,
        tokens: Int32Array,
        end: int,
        present: SequenceOf[SequenceOf[int]],
        write_blocks: Callable[[int, Int32Array], object],
        write_state: Callable[[int], object] | None,
        adapter_id: int = -1,
        *,
        begin: int | None = None,
    ) -> bool:
        """Make the segment of a prefix known that ends behind `end` tokens; whether there was room for it.

        `tokens`: [end + 1 or more]; `present`, `write_blocks`: see `BlockManager.adopt`; `write_state` fills the state
        behind the segment; None: it was not kept, and no sequence begins there. `begin`: the tokens before the segment,
        in whole blocks; None: it has `segment_tokens`.
        """
        size, begin = self.blocks.block_size, end - self.segment_tokens if begin is None else begin
        chain = self.blocks.find_prefix(tokens[: begin + 1], adapter_id)
        if len(chain) * size < begin:  # it was lost meanwhile
            return False
        ids = self.blocks.adopt(chain, tokens[begin:end], present, write_blocks, adapter_id)
        if ids is None:
            return False
        if write_state is not None and (state := self._states.adopt(ids[-1])) is not None:
            write_state(state)
        return True

    # ---- choosing ----

    def _choose(self, choice: StepChoice, now: float, lane: Lane | None, max_prompt_tokens: int | None) -> bool:
        """Choose all but drafts; returns whether there is anything to compute."""
        preempted = self._choose_decodes(choice, lane)
        if preempted is None:
            return False
        if max_prompt_tokens is not None:
            choice.budget = min(choice.budget, max_prompt_tokens)
        if self._choose_prefills(choice, lane) and not preempted:
            self._admit(choice, now, lane)
        if choice.sequences or self._in_flight:
            return bool(choice.sequences)
        if lane is not None:
            return self._choose(choice, now, None, max_prompt_tokens)  # such as where the other lane holds all blocks
        # What is held may wait for the tokens of others, for which there is no slot or no block.
        held = next((one for one in reversed(self.running) if self._running.is_held(one)), None)
        if held is None:
            return False
        self._preempt(held)
        return self._choose(choice, now, None, max_prompt_tokens)

    def _choose_decodes(self, choice: StepChoice, lane: Lane | None) -> bool | None:
        """Add one token of every sequence in decode, with a new block where the last is full.

        Returns whether a sequence was preempted. None: a preemption is needed, but a step in flight may end sequences
        and so free blocks, so wait for it.
        """
        if not self.running:
            return False
        running, blocks, preempted = self._running, self.blocks, False
        slots = running.slots
        num_tokens, num_computed = running.num_tokens[slots], running.num_computed[slots]
        # One token to compute, and one to come after it.
        is_decode = (num_tokens - num_computed == 1) & (num_tokens < running.max_num_tokens[slots])
        if self._num_stages > 1:  # a token that is not known yet waits, and the other steps need sequences as well
            is_decode &= running.previous_row[slots] < 0
            is_decode &= np.cumsum(is_decode) <= -(-len(slots) // self._num_stages)
        if lane is not None:
            is_decode &= running.is_bulk[slots] == (lane is Lane.BULK)
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
        choice.decode_slots = decode_slots
        if len(decode_slots) == len(slots):
            choice.sequences = self.running.copy()
        else:
            choice.sequences = [self.running[i] for i in is_decode.nonzero()[0].tolist()]
        choice.budget -= len(choice.sequences)
        return preempted

    def _choose_prefills(self, choice: StepChoice, lane: Lane | None) -> bool:
        """Add chunks of running prompts; returns whether each prompt got all it asked for."""
        if len(choice.sequences) == len(self.running):
            return True
        slots, num_computed_of = self._running.slots, self._running.num_computed
        is_prefill = self._running.num_tokens[slots] - num_computed_of[slots] > 1
        if lane is not None:
            is_prefill &= self._running.is_bulk[slots] == (lane is Lane.BULK)
        for sequence in [self.running[i] for i in is_prefill.nonzero()[0].tolist()]:
            if sequence.slot < 0:  # preempted below
                break
            num_computed = int(num_computed_of[sequence.slot])
            room = self.blocks.room(sequence.slot) - num_computed
            chunk, is_whole = _chunk_of(sequence, num_computed)
            least = chunk if is_whole else 1
            # At least one sequence must make progress.
            while room < least and not choice.sequences and not self._in_flight and self.running[-1] is not sequence:
                self._preempt(self.running[-1])
                room = self.blocks.room(sequence.slot) - num_computed
            most = min(self._most_tokens(choice, sequence, num_computed), chunk)
            # A chunk that is taken whole may be longer than what is left, if nothing else is computed.
            budget = choice.budget if choice.sequences or not is_whole else self.max_num_batched_tokens
            count = min(most, budget, room)
            if is_whole and count < chunk:
                count = 0
            if count > 0:
                self._add_chunk(choice, sequence, count)
            if count < most:
                return False
        return True

    def _admit(self, choice: StepChoice, now: float, lane: Lane | None) -> None:
        """Admit waiting sequences while there are slots, budget, and blocks for a first chunk above the watermark."""
        running, blocks = self._running, self.blocks
        if self.waiting and running.has_free_slot and choice.budget > 0:
            self._remember_decoded(choice.decode_slots, running.num_computed[choice.decode_slots] + 1)
        while self.waiting and running.has_free_slot and choice.budget > 0:
            sequence, is_alone = self._next_waiting(lane), not choice.sequences
            if sequence is None:
                return
            if self._rows_left(choice, sequence) == 0 or (not is_alone and blocks.headroom() <= 0):
                return
            tokens = running.write_tokens(sequence)
            # A sequence that collects logits must compute every token.
            chain = [] if sequence.collect_logits else blocks.find_prefix(tokens, sequence.adapter_id)
            num_known, state = self._states.find(chain, blocks.starts(chain))
            chain = chain[:num_known]
            num_cached = num_known * blocks.block_size
            chunk, is_whole = _chunk_of(sequence, num_cached)
            if self._whole_prompts:
                chunk, is_whole = sequence.num_tokens, True
            # A chunk that is taken whole may be longer than what is left, if nothing else is computed.
            budget = self.max_num_batched_tokens if is_whole and is_alone else choice.budget
            count = min(self._most_tokens(choice, sequence, num_cached), chunk, budget)
            if is_whole and count < chunk:  # the next step has room
                return
            needed = blocks.blocks_for(num_cached + count) - num_known
            if not is_alone and needed > blocks.headroom(chain):
                return
            del self.waiting[sequence]
            self._enter_slot(sequence, chain, state, now)
            choice.admitted.append(sequence)
            room = blocks.room(sequence.slot) - num_cached
            count = min(count, 0 if is_whole and room < count else room)
            if count <= 0:  # only while other sequences hold all blocks
                self._preempt(sequence)
                choice.admitted.pop()
                return
            self._add_chunk(choice, sequence, count)

    def _next_waiting(self, lane: Lane | None) -> Sequence | None:
        """The oldest waiting sequence of a lane."""
        if lane is None or self.lanes == (lane,):
            return next(iter(self.waiting))
        return next((sequence for sequence in self.waiting if sequence.lane is lane), None)

    def _most_tokens(self, choice: StepChoice, sequence: Sequence, num_computed: int) -> int:
        """Tokens that a sequence wants of a step: up to the next snapshot, and the rows that may still be collected."""
        snapshot = self._states.tokens_to_snapshot(num_computed)
        return min(sequence.num_tokens - num_computed, self._rows_left(choice, sequence), snapshot)

    def _rows_left(self, choice: StepChoice, sequence: Sequence) -> int:
        """Tokens of this sequence that the step has room for, given the limit of collected logits."""
        if self._whole_prompts or not sequence.collect_logits:
            return NO_LIMIT
        return MAX_COLLECTED_ROWS - choice.num_collected_rows

    def _add_chunk(self, choice: StepChoice, sequence: Sequence, count: int) -> None:
        slot, running = sequence.slot, self._running
        end = int(running.num_computed[slot]) + count
        self.blocks.grow(slot, end)
        self.blocks.remember(slot, running.tokens[slot], end)
        choice.sequences.append(sequence)
        choice.prefill_counts.append(count)
        choice.num_collected_rows += count if sequence.collect_logits else 0
        choice.budget -= count

    def _remember_decoded(self, slots: IndexArray, ends: Int32Array) -> None:
        """Add the blocks that decodes have filled to the prefix cache; not done in every step.

        `ends`: [len(slots)], tokens that are computed, or that the step which is being made computes.
        """
        running, blocks = self._running, self.blocks
        if blocks.enable_prefix_caching:
            num_known = running.num_tokens[slots] - (running.previous_row[slots] >= 0)
            full = np.minimum(np.minimum(num_known, ends) // blocks.block_size, blocks.lengths[slots])
            while np.count_nonzero(is_behind := full > blocks.num_remembered[slots]):
                slots, full = slots[is_behind], full[is_behind]
                blocks.remember_next(slots, running.tokens)

    # ---- slots ----

    def _final_length(self, sequence: Sequence) -> int:
        """Tokens, prompt and output, at which a sequence ends at the latest."""
        new = sequence.params.max_tokens
        return self.max_model_len if new is None else min(len(sequence.prompt_token_ids) + new, self.max_model_len)

    def _enter_slot(self, sequence: Sequence, chain: list[int], state: int, now: float) -> None:
        """Let a sequence run, behind a known prefix and its state; see `BlockManager.find_prefix`."""
        num_cached = len(chain) * self.blocks.block_size
        final_length = NO_LIMIT if sequence.collect_logits else self._final_length(sequence)
        if self._drafting is not None and not sequence.first_scheduled:
            self._drafting.enter(sequence)
        slot = self._running.enter(sequence, num_cached, final_length)
        self.blocks.share(slot, chain, sequence.adapter_id)
        self._states.enter(slot, state, num_cached)
        if not sequence.first_scheduled:
            sequence.first_scheduled = now
            if not sequence.collect_logits:
                sequence.cached_tokens = min(num_cached, len(sequence.prompt_token_ids))
                self.blocks.num_queried_tokens += sequence.num_tokens
                self.blocks.num_hit_tokens += num_cached

    def _leave_slot(self, sequence: Sequence) -> None:
        slot, running = sequence.slot, self._running
        num_computed = int(running.num_computed[slot])
        self.blocks.remember(slot, running.tokens[slot], min(running.num_known(slot), num_computed))
        self.blocks.free(slot, num_computed)
        self._states.leave(slot)
        running.leave(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """Free the blocks of the youngest running sequence and move it to the front of the waiting queue."""
        if self._drafting is not None:
            self._drafting.catch_up()
        is_held = self._running.is_held(sequence)
        self._leave_slot(sequence)
        if not is_held:  # otherwise there is nothing to compute before `append`
            self._wait_first(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1

    def _wait_first(self, sequence: Sequence) -> None:
        """Let a sequence wait that is older than all that wait."""
        self.waiting[sequence] = None
        self.waiting.move_to_end(sequence, last=False)


def _chunk_of(sequence: Sequence, begin: int) -> tuple[int, bool]:
    """See `GivenTokens.chunk`."""
    return (NO_LIMIT, False) if sequence.given is None else sequence.given.chunk(begin)
