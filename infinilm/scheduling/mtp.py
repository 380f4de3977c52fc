"""`MtpHead`: drafts of the MTP head of a checkpoint, those of all sequences of a step together.

The head is a layer of the model's own engine. At position i it reads the hidden state that the model has there and
token i + 1, and says what token i + 2 may be. Hidden states of a step stay on the device until the next one. So behind
each step, once its tokens are known, one step of the head follows over the same positions, prompts among them: it
writes the keys and values that later drafts see, and where a sequence has its newest token, it draws the first token of
a draft. The others come one by one, each from the head's own hidden state.

Keys and values of the head are those of one more layer of the cache, in the blocks of the sequence. So prefixes, and
what is preempted and computed again, need nothing of their own. A position is not followed where a step was made ahead,
which happens while no running sequence drafts. What reads its block later, by way of the prefix cache, sees what the
block held before. Its drafts are worse, and its answer is the same, since steps verify drafts.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Protocol

import numpy as np

from infinilm import _core
from infinilm.logs import logger
from infinilm.scheduling.block_manager import BlockManager
from infinilm.scheduling.layout import Layout, most_probable
from infinilm.scheduling.running import RunningSequences
from infinilm.scheduling.sequence import IndexArray, Int32Array, Sequence
from infinilm.scheduling.steps import Step
from infinilm.speculation import DraftRequest

__all__ = ["MtpDrafter", "MtpEngine", "MtpHead"]


class MtpEngine(Protocol):
    """What the head needs of an engine (`_core.InferEngine`)."""

    def submit(self, batch: _core.Batch, needs_masks: bool, /) -> _core.PendingStep:
        """Queue a step."""


class MtpHead:
    """Makes an `MtpDrafter` for each sequence, and computes for all of them.

    Parameters
    ----------
    engine : MtpEngine
        Has a model with an MTP head.
    num_tokens : int
        Tokens of a draft at most.
    """

    def __init__(self, engine: MtpEngine, num_tokens: int) -> None:
        self._engine: MtpEngine | None = engine  # None: it has failed
        self._num_tokens = num_tokens
        self._drafted: dict[int, tuple[Sequence, list[int]]] = {}  # by slot: whose draft, and its tokens

    def __call__(self, sequence: DraftRequest) -> MtpDrafter:
        """The drafter of a sequence."""
        assert isinstance(sequence, Sequence)  # whose slot says which draft is its
        return MtpDrafter(self, sequence)

    def drafted(self, sequence: Sequence) -> list[int]:
        """The tokens that were drafted behind the newest one of a sequence."""
        owner, token_ids = self._drafted.get(sequence.slot, (None, []))
        return token_ids if owner is sequence else []

    def follow(self, step: Step, running: RunningSequences, blocks: BlockManager) -> None:
        """Draft from the hidden states of a step whose result is known; no other step was submitted behind it.

        Drafts of the step before are forgotten. It raises nothing.
        """
        self._drafted.clear()
        if self._engine is None:
            return
        try:
            self._follow(self._engine, step, running, blocks)
        except BaseException:  # the requests go on without drafts, which changes none of their tokens
            logger.exception("the MTP head failed, and drafts nothing from now on")
            self._drafted.clear()
            self._engine = None

    def _follow(self, engine: MtpEngine, step: Step, running: RunningSequences, blocks: BlockManager) -> None:
        # Positions whose next token is known. What a step computes of wrong drafts lies behind them.
        slots = np.array([sequence.slot for sequence in step.sequences], np.intp)
        first_rows = step.batch.arrays()["cu_seqlens_q"].numpy()
        ends = np.minimum(step.starts + np.diff(first_rows), running.num_tokens[slots] - 1)
        is_here = (slots >= 0) & (ends > step.starts)
        if not is_here.any():
            return
        slots, ends, first_rows = slots[is_here], ends[is_here], first_rows[:-1][is_here]
        layout = Layout.of_chunks(slots, step.starts[is_here], ends - step.starts[is_here])
        hidden_rows = layout.positions + np.repeat(first_rows - layout.starts, layout.ends - layout.starts)
        is_drafting = running.is_drafted[slots] & (ends == running.num_tokens[slots] - 1)
        token_ids = running.tokens[layout.token_slots, layout.positions + 1]
        rows = layout.cu_seqlens_q[1:][is_drafting] - np.int32(1)
        drawn = self._run(engine, layout, blocks, token_ids, hidden_rows.astype(np.int32), rows)
        by_slot = {sequence.slot: sequence for sequence in step.sequences}
        drafting, ends = slots[is_drafting], ends[is_drafting]
        drafts = {slot: [token_id] for slot, token_id in zip(drafting.tolist(), drawn, strict=True)}
        self._chain(engine, blocks, drafting, ends, rows, drafts)
        self._drafted = {slot: (by_slot[slot], draft) for slot, draft in drafts.items()}

    def _chain(
        self,
        engine: MtpEngine,
        blocks: BlockManager,
        slots: IndexArray,
        starts: Int32Array,
        hidden_rows: Int32Array,
        drafts: dict[int, list[int]],
    ) -> None:
        """Add to the drafts of these slots, which have one token each, the tokens that follow.

        `starts`: the positions that come next, [num_seqs]; `hidden_rows`: of the step before, for each of them.
        """
        held = blocks.lengths[slots].tolist()
        most = blocks.block_table.shape[2]
        for slot, start, length in zip(slots.tolist(), starts.tolist(), held, strict=True):
            wanted = min(blocks.blocks_for(start + self._num_tokens - 1), most)
            blocks.grow(slot, min(wanted, length + max(blocks.headroom(), 0)) * blocks.block_size)
        try:
            for _ in range(1, self._num_tokens):
                last = np.array([drafts[slot][-1] for slot in slots.tolist()], np.int32)
                # A negative token: its logits were no distribution.
                goes_on = (last >= 0) & (starts < blocks.lengths[slots] * blocks.block_size)
                slots, starts, hidden_rows, last = slots[goes_on], starts[goes_on], hidden_rows[goes_on], last[goes_on]
                if not len(slots):
                    return
                rows = np.arange(len(slots), dtype=np.int32)
                layout = Layout.of_one_token(slots, starts)
                drawn = self._run(engine, layout, blocks, last, hidden_rows, rows)
                for slot, token_id in zip(slots.tolist(), drawn, strict=True):
                    drafts[slot].append(token_id)
                starts, hidden_rows = starts + np.int32(1), rows
        finally:
            for slot, length in zip(drafts, held, strict=True):
                blocks.trim(slot, length * blocks.block_size)

    @staticmethod
    def _run(
        engine: MtpEngine,
        layout: Layout,
        blocks: BlockManager,
        token_ids: Int32Array,
        hidden_rows: Int32Array,
        rows: Int32Array,
    ) -> SequenceOf[int]:
        """Run a step of the head; returns the most probable token of each of `rows`, negative where there is none."""
        batch = _core.Batch(
            input_ids=token_ids,
            positions=layout.positions,
            cu_seqlens_q=layout.cu_seqlens_q,
            context_lens=layout.ends,
            hidden_rows=hidden_rows,
            logits_rows=rows,
            **layout.cache_arrays(blocks),
            **(most_probable(len(rows)) if len(rows) else {}),
        )
        output = engine.submit(batch, False).result()
        return [] if output.ids is None else list(output.ids.numpy().tolist())


class MtpDrafter:
    """The drafts of one sequence; see `MtpHead`.

    Parameters
    ----------
    head : MtpHead
    sequence : Sequence
    """

    name = "mtp"

    def __init__(self, head: MtpHead, sequence: Sequence) -> None:
        self._head, self._sequence = head, sequence

    def update(self, token_ids: SequenceOf[int]) -> None:
        """Do nothing: the head follows the steps themselves."""

    def draft(self, limit: int) -> list[int]:
        """What the head expects behind the newest token."""
        return self._head.drafted(self._sequence)[:limit]
