"""`MtpHead`: drafts of the MTP head of a checkpoint, those of all sequences of a step together.

The head is a layer of the model's own engine. At position i it reads the hidden state that the model has there and
token i + 1, and says what token i + 2 may be. Hidden states of a step stay on the device until the next one. So behind
each step, once its tokens are known, one step of the head follows over the same positions, prompts among them: it
writes the keys and values that later drafts see, and where a draft is wanted, it draws the first token of it. The
others come one by one, each from the head's own hidden state. Positions of prompts, behind which nothing is drafted,
have a step of their own, which computes keys and values alone. How many tokens are wanted is chosen before, so the head
waits with a step until the next one is chosen, and is made to follow earlier only where a sequence loses its blocks.

Keys and values of the head are those of one more layer of the cache, in the blocks of the sequence. So prefixes, and
what is preempted and computed again, need nothing of their own. In decode, positions are not followed while drafts are
not worth their time, since following takes as long as one more layer, and where a step was made ahead. A sequence that
reads their blocks later sees what these held before. Its drafts are worse, and its answer is the same, since steps
verify drafts.

A head may have several modules, each of which has learned to draft one token (`_follow_in_turn`). All of them follow
all positions, prompts among them, one module behind the other: at position i the first reads token i + 1, and module m
reads token i + 1 + m and what the module before has left there. So a whole draft comes of one position, and another
token of it adds no round. At the newest positions later modules read tokens that are drafts, and where there are none
these positions are left out. The hidden states there are gone once the right tokens are known, so the keys and values
of these modules stay those of a draft that was wrong, or of nothing; drafts that see them are worse.

A head whose layers read keys and values of the model has none that it could write. So it follows nothing, and reads
only the position behind which a draft is wanted, at which all of the chain stays: no keys come with drafted tokens.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence as SequenceOf
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

import numpy as np
import numpy.typing as npt

from infinilm import _core
from infinilm.logs import logger
from infinilm.scheduling.block_manager import BlockManager
from infinilm.scheduling.given_arrays import rope_positions
from infinilm.scheduling.layout import BatchArrays, Layout, most_probable
from infinilm.scheduling.running import RunningSequences
from infinilm.scheduling.sequence import IndexArray, Int32Array, Sequence
from infinilm.scheduling.steps import Step
from infinilm.speculation import MAX_DRAFT_TOKENS, DraftRequest, Round

__all__ = ["MtpDrafter", "MtpEngine", "MtpHead"]

_STORED_APART = 32
"""Positions behind which nothing is drafted: from so many on they have a step of their own.

Their keys and values are computed and no more, which is a small part of a layer.
"""


class MtpEngine(Protocol):
    """What the head needs of an engine (`_core.InferEngine`)."""

    def submit(self, batch: _core.Batch, needs_masks: bool, /) -> _core.PendingStep:
        """Queue a step."""


@dataclass(frozen=True, slots=True)
class _Followed:
    """Positions of a step whose next token is known, a chunk of each sequence.

    What a step computes of wrong drafts lies behind them.
    """

    running: RunningSequences
    blocks: BlockManager
    sequences: list[Sequence]
    slots: IndexArray
    starts: Int32Array
    ends: Int32Array
    first_rows: Int32Array  # of the hidden states of the step, for each chunk

    @staticmethod
    def of(step: Step, running: RunningSequences, blocks: BlockManager) -> _Followed:
        slots = np.array([sequence.slot for sequence in step.sequences], np.intp)
        first_rows = step.batch.arrays()["cu_seqlens_q"].numpy()
        ends = np.minimum(step.starts + np.diff(first_rows), running.num_tokens[slots] - 1)
        is_here = (slots >= 0) & (ends > step.starts)
        return _Followed(
            running,
            blocks,
            [step.sequences[i] for i in np.flatnonzero(is_here).tolist()],
            slots[is_here],
            step.starts[is_here],
            ends[is_here].astype(np.int32),
            first_rows[:-1][is_here],
        )

    def last_of(self, drafting: npt.NDArray[np.bool_]) -> _Followed:
        """The last position of each of these chunks."""
        starts, ends = self.starts, self.ends
        return self.chosen(drafting, ends - np.int32(1), ends, self.first_rows + ends - np.int32(1) - starts)

    def before_last_of(self, drafting: npt.NDArray[np.bool_]) -> _Followed:
        """All positions but the last one of each of these chunks."""
        ends = self.ends - drafting.astype(np.int32)
        return self.chosen(ends > self.starts, self.starts, ends, self.first_rows)

    def until(self, ends: Int32Array) -> _Followed:
        """Up to these ends; chunks of which nothing is left are left out."""
        ends = np.minimum(self.ends, ends)
        return self.chosen(ends > self.starts, self.starts, ends, self.first_rows)

    def in_own_rows(self) -> _Followed:
        """The same positions, whose hidden states are those of a step over them alone."""
        counts = self.ends - self.starts
        first_rows = (counts.cumsum() - counts).astype(np.int32)
        return replace(self, first_rows=first_rows)

    def chosen(
        self, chosen: npt.NDArray[np.bool_], starts: Int32Array, ends: Int32Array, first_rows: Int32Array
    ) -> _Followed:
        """Some of these chunks, with other starts, ends and first rows, which are given for all of them."""
        sequences = [self.sequences[i] for i in np.flatnonzero(chosen).tolist()]
        of = self.slots[chosen], starts[chosen], ends[chosen], first_rows[chosen]
        return _Followed(self.running, self.blocks, sequences, *of)

    @property
    def newest(self) -> list[Sequence]:
        """The sequences whose newest token is behind their chunk, so that a draft may begin there."""
        is_newest = self.ends == self.running.num_tokens[self.slots] - 1
        return [self.sequences[i] for i in np.flatnonzero(is_newest).tolist()]


class MtpHead:
    """Makes an `MtpDrafter` for each sequence, and computes for all of them.

    Parameters
    ----------
    engine : MtpEngine
        Has a model with an MTP head.
    num_tokens : int
        Tokens of a draft at most.
    token_ids : int32 array, optional
        [outputs of the head's lm_head]: their ids in the vocabulary of the model. None: they are the first ids of it.
    keeps_keys : bool
        Its layers have keys and values of their own. Otherwise they read those of layers of the model.
    num_modules : int
        Modules that draft in turn, a token each. One alone drafts any number of them.
    """

    def __init__(
        self,
        engine: MtpEngine,
        num_tokens: int,
        token_ids: Int32Array | None = None,
        *,
        keeps_keys: bool = True,
        num_modules: int = 1,
    ) -> None:
        self._engine: MtpEngine | None = engine  # None: it has failed
        self._num_tokens = num_tokens if num_modules == 1 else min(num_tokens, num_modules)
        self._token_ids = token_ids
        self._keeps_keys = keeps_keys
        self.num_modules = num_modules
        self._followed: _Followed | None = None  # what is to be followed
        self._newest: list[Sequence] = []
        self._drafted: dict[int, tuple[Sequence, list[int]]] = {}  # by slot: whose draft, and its tokens

    def __call__(self, sequence: DraftRequest) -> MtpDrafter:
        """The drafter of a sequence."""
        assert isinstance(sequence, Sequence)  # whose slot says which draft is its
        return MtpDrafter(self, sequence)

    def drafted(self, sequence: Sequence) -> list[int]:
        """The tokens that were drafted behind the newest one of a sequence."""
        owner, token_ids = self._drafted.get(sequence.slot, (None, []))
        return token_ids if owner is sequence else []

    def num_offered(self, sequence: Sequence) -> int:
        """Tokens that it could draft behind the newest one of a sequence; 0: it has not seen the step of that."""
        return self._num_tokens if any(newest is sequence for newest in self._newest) else 0

    def follow(self, step: Step, running: RunningSequences, blocks: BlockManager) -> None:
        """Let the next `prepare` follow a step whose result is known.

        No other step was submitted behind it. Drafts of the step before are forgotten.
        """
        self._drafted.clear()
        if self._engine is not None:
            self._followed = _Followed.of(step, running, blocks)
            self._newest = self._followed.newest

    def pass_over(self) -> None:
        """Let no `prepare` follow the newest step, unless that had tokens of prompts."""
        followed = self._followed
        if followed is not None and not (followed.starts < followed.running.prompt_lens[followed.slots]).any():
            self._followed, self._newest = None, []

    def prepare(self, wanted: SequenceOf[tuple[MtpDrafter, int]], /) -> list[Round] | None:
        """Follow the newest step, and make drafts of so many tokens; see `BatchDrafters`.

        Without a step to be followed it does nothing.
        """
        followed, self._followed, self._newest = self._followed, None, []
        if self._engine is None or followed is None or not followed.sequences:
            return []
        lengths = {drafter.sequence.slot: count for drafter, count in wanted}
        try:
            return self._follow(self._engine, followed, lengths)
        except BaseException:  # the requests go on without drafts, which changes none of their tokens
            logger.exception("the MTP head failed, and drafts nothing from now on")
            self._drafted.clear()
            self._engine = None
            return None

    def _follow(self, engine: MtpEngine, followed: _Followed, lengths: Mapping[int, int]) -> list[Round] | None:
        """`lengths`: by slot, tokens to be drafted, of sequences that have their newest token behind their chunk."""
        if self.num_modules > 1:
            return self._follow_in_turn(engine, followed, lengths)
        is_drafting = np.array([slot in lengths for slot in followed.slots.tolist()], np.bool_)
        follows_prompt = (followed.ends - followed.starts).max() > MAX_DRAFT_TOKENS + 1
        stored = followed.before_last_of(is_drafting)
        if self._keeps_keys and (stored.ends - stored.starts).sum() >= _STORED_APART:
            self._run_chunks(engine, stored, np.zeros(len(stored.sequences), np.bool_))
            followed = followed.last_of(is_drafting)
        elif not self._keeps_keys:
            followed = followed.last_of(is_drafting)
        if not followed.sequences:
            return None if follows_prompt else []
        slots, running = followed.slots, followed.running
        is_drafting = np.array([slot in lengths for slot in slots.tolist()], np.bool_)
        drawn, rows = self._run_chunks(engine, followed, is_drafting)
        by_slot = {sequence.slot: sequence for sequence in followed.sequences}
        drafting, starts = slots[is_drafting], followed.ends[is_drafting] - np.int32(not self._keeps_keys)
        drafts = {slot: [token_id] for slot, token_id in zip(drafting.tolist(), drawn, strict=True)}
        rounds = self._chain(engine, running, followed.blocks, drafting, starts, rows, drafts, lengths)
        self._drafted = {slot: (by_slot[slot], draft) for slot, draft in drafts.items()}
        return None if follows_prompt else rounds

    def _follow_in_turn(self, engine: MtpEngine, followed: _Followed, lengths: Mapping[int, int]) -> list[Round] | None:
        """`_follow` of a head with several modules."""
        follows_prompt = (followed.ends - followed.starts).max() > MAX_DRAFT_TOKENS + 1
        drafts: dict[int, list[int]] = {}
        for module in range(self.num_modules):
            # Each module needs one token more behind a position than the one before. At the newest position that is
            # the token that the module before has drafted, and where it has drafted none, that position is left out.
            counts = [len(drafts.get(slot, ())) for slot in followed.slots.tolist()]
            known = followed.running.num_tokens[followed.slots] + np.array(counts)
            followed = followed.until((known - 1 - module).astype(np.int32))
            if not followed.sequences:
                break
            is_drafting = np.array(
                [lengths.get(slot, 0) > module == len(drafts.get(slot, ())) for slot in followed.slots.tolist()],
                np.bool_,
            )
            drawn, _ = self._run_chunks(engine, followed, is_drafting, module, drafts)
            for index, token_id in zip(np.flatnonzero(is_drafting).tolist(), drawn, strict=True):
                if token_id >= 0:  # otherwise its logits were no distribution
                    sequence = followed.sequences[index]
                    drafts.setdefault(sequence.slot, []).append(token_id)
                    self._drafted[sequence.slot] = (sequence, drafts[sequence.slot])
            followed = followed.in_own_rows()
        return None if follows_prompt else []

    def _run_chunks(
        self,
        engine: MtpEngine,
        followed: _Followed,
        drafting: npt.NDArray[np.bool_],
        module: int = 0,
        drafts: Mapping[int, list[int]] = MappingProxyType({}),
    ) -> tuple[SequenceOf[int], Int32Array]:
        """Follow these positions; returns tokens behind the last one of these chunks, and its row of hidden states.

        `drafts`: by slot, the tokens behind the newest one, of which the module reads some.
        """
        layout = Layout.of_chunks(followed.slots, followed.starts, followed.ends - followed.starts)
        hidden_rows = layout.positions + np.repeat(followed.first_rows - layout.starts, layout.ends - layout.starts)
        token_ids = followed.running.token_ids(layout.token_slots, layout.positions + np.int32(1 + module))
        for slot, draft in drafts.items():
            begin = int(followed.running.num_tokens[slot]) - 1 - module  # the position behind which the draft begins
            is_drafted = (layout.token_slots == slot) & (layout.positions >= begin)
            token_ids[is_drafted] = np.array(draft, np.int32)[layout.positions[is_drafted] - begin]
        rows = layout.cu_seqlens_q[1:][drafting] - np.int32(1)
        positions = self._rope_positions(followed.running, layout, followed.sequences)
        of = hidden_rows.astype(np.int32), rows, positions
        return self._run(engine, layout, followed.blocks, token_ids, *of, module=module), rows

    def _chain(
        self,
        engine: MtpEngine,
        running: RunningSequences,
        blocks: BlockManager,
        slots: IndexArray,
        starts: Int32Array,
        hidden_rows: Int32Array,
        drafts: dict[int, list[int]],
        lengths: Mapping[int, int],
    ) -> list[Round]:
        """Add to the drafts of these slots, which have one token each, the tokens that follow.

        `starts`: the positions that come next, [num_seqs]; `hidden_rows`: of the step before, for each of them;
        `lengths`: by slot, tokens of the whole draft.
        """
        rounds: list[Round] = []
        held = blocks.lengths[slots].tolist()
        most = blocks.block_table.shape[2]
        for slot, start, length in zip(slots.tolist(), starts.tolist(), held, strict=True):
            wanted = min(blocks.blocks_for(start + lengths[slot] - 1), most) if self._keeps_keys else length
            blocks.grow(slot, min(wanted, length + max(blocks.headroom(), 0)) * blocks.block_size)
        try:
            for count in range(1, max(lengths.values(), default=1)):
                begin = time.perf_counter()
                last = np.array([drafts[slot][-1] for slot in slots.tolist()], np.int32)
                # A negative token: its logits were no distribution.
                goes_on = (last >= 0) & (starts < blocks.lengths[slots] * blocks.block_size)
                goes_on &= np.array([lengths[slot] > count for slot in slots.tolist()], np.bool_)
                slots, starts, hidden_rows, last = slots[goes_on], starts[goes_on], hidden_rows[goes_on], last[goes_on]
                if not len(slots):
                    break
                rows = np.arange(len(slots), dtype=np.int32)
                layout = Layout.of_one_token(slots, starts)
                positions = self._rope_positions(running, layout)
                drawn = self._run(engine, layout, blocks, last, hidden_rows, rows, positions)
                for slot, token_id in zip(slots.tolist(), drawn, strict=True):
                    drafts[slot].append(token_id)
                starts, hidden_rows = starts + np.int32(self._keeps_keys), rows
                rounds.append((len(slots), time.perf_counter() - begin))
        finally:
            for slot, length in zip(drafts, held, strict=True):
                blocks.trim(slot, length * blocks.block_size)
        return rounds

    def _rope_positions(
        self, running: RunningSequences, layout: Layout, sequences: SequenceOf[Sequence] = ()
    ) -> BatchArrays:
        if not self._keeps_keys:  # it is turned by the position of its token, which is behind that of the hidden state
            return {"rope_positions": (layout.positions + np.int32(1))[None]}
        return rope_positions(running, layout, sequences)

    def _run(
        self,
        engine: MtpEngine,
        layout: Layout,
        blocks: BlockManager,
        token_ids: Int32Array,
        hidden_rows: Int32Array,
        rows: Int32Array,
        positions_on_axes: BatchArrays,
        *,
        module: int = 0,
    ) -> SequenceOf[int]:
        """Run a step of the head; returns the most probable token of each of `rows`, negative where there is none."""
        batch = _core.Batch(
            input_ids=token_ids,
            positions=layout.positions,
            cu_seqlens_q=layout.cu_seqlens_q,
            context_lens=layout.ends,
            hidden_rows=hidden_rows,
            mtp_module=module,
            logits_rows=rows,
            **positions_on_axes,
            **layout.cache_arrays(blocks),
            **(most_probable(len(rows)) if len(rows) else {}),
        )
        output = engine.submit(batch, False).result()
        if output.ids is None:
            return []
        drawn = output.ids.numpy()
        if self._token_ids is not None:
            drawn = np.where(drawn < 0, drawn, self._token_ids[drawn])
        return list(drawn.tolist())


class MtpDrafter:
    """The drafts of one sequence; see `MtpHead`.

    Parameters
    ----------
    batch : MtpHead
    sequence : Sequence
    """

    name = "mtp"

    def __init__(self, batch: MtpHead, sequence: Sequence) -> None:
        self.batch, self.sequence = batch, sequence
        self.num_at_once = batch.num_modules  # the steps that follow draw them

    @property
    def num_offered(self) -> int:
        """Tokens that the head could draft behind the newest one."""
        return self.batch.num_offered(self.sequence)

    def update(self, token_ids: SequenceOf[int]) -> None:
        """Do nothing: the head follows the steps themselves."""

    def draft(self, limit: int) -> list[int]:
        """What the head expects behind the newest token."""
        return self.batch.drafted(self.sequence)[:limit]
