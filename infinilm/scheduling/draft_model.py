"""`DraftModel`: drafts that a smaller model computes, those of all sequences of a step together.

The draft model has an engine and a cache of its own, with a block table and prefixes as the model has them. Before a
step, it computes the tokens that it has not seen of each sequence in one batch, and then one token after another of all
drafts, always the most probable one: a draft that is a sample of its own would be right less often. Keys and values of
drafted tokens that turned out right stay; what lies behind the first wrong one is computed again.

It follows prompts lazily, in chunks, between the steps of the model, and has nothing to offer for a sequence until it
has caught up. Sequences that have not drafted for the longest time make room for others.
"""

from __future__ import annotations

import time
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from infinilm import _core
from infinilm.logs import logger
from infinilm.scheduling.block_manager import BlockManager
from infinilm.scheduling.layout import Layout, most_probable
from infinilm.speculation import MAX_DRAFT_TOKENS, DraftRequest, Round

__all__ = ["DraftEngine", "DraftModel", "DraftModelDrafter"]


class DraftEngine(Protocol):
    """What a draft model needs of an engine (`_core.InferEngine`)."""

    def forward(self, batch: _core.Batch, /) -> _core.StepOutput:
        """Run a step and wait for its result."""


class DraftModel:
    """Makes a `DraftModelDrafter` for each sequence, and computes for all of them.

    Parameters
    ----------
    engine : DraftEngine
        Has a cache of `blocks`.
    blocks : BlockManager
        Its slots are those of the sequences that draft at the same time.
    num_tokens : int
        Tokens of a draft at most.
    vocab_size : int
        Ids that the draft model knows; a sequence with an id beyond it drafts nothing from there on.
    max_model_len : int
        Tokens that the draft model may see.
    max_num_batched_tokens : int
        Tokens of one of its steps.
    """

    def __init__(
        self,
        engine: DraftEngine,
        blocks: BlockManager,
        *,
        num_tokens: int,
        vocab_size: int,
        max_model_len: int,
        max_num_batched_tokens: int,
    ) -> None:
        self._engine: DraftEngine | None = engine  # None: it has failed
        self._blocks = blocks
        self._num_tokens = num_tokens
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._max_num_batched_tokens = max_num_batched_tokens
        max_num_seqs = len(blocks.lengths)
        self._tokens = np.zeros((max_num_seqs, max_model_len), np.int32)  # what slots hold keys and values of
        self._free_slots = list(range(max_num_seqs))[::-1]
        # Who has a slot, the longest unused first. Sequences end without a word to their drafters.
        self._holders: OrderedDict[int, weakref.ref[DraftModelDrafter]] = OrderedDict()

    def __call__(self, sequence: DraftRequest) -> DraftModelDrafter:
        """The drafter of a sequence."""
        return DraftModelDrafter(self)

    def num_offered(self, drafter: DraftModelDrafter) -> int:
        """Tokens that it could draft behind those of a drafter."""
        fits = len(drafter.tokens) <= self._max_model_len
        return self._num_tokens if fits and self._engine is not None else 0

    def prepare(self, wanted: Sequence[tuple[DraftModelDrafter, int]], /) -> list[Round] | None:
        """Make drafts of so many tokens, for sequences that it has caught up with; see `BatchDrafters`."""
        if self._engine is None:
            return []
        try:
            return self._draft(self._engine, dict(wanted))
        except BaseException:  # the requests go on without drafts, which changes none of their tokens
            logger.exception("the draft model failed, and drafts nothing from now on")
            self._engine = None
            return None

    def _draft(self, engine: DraftEngine, asked: Mapping[DraftModelDrafter, int]) -> list[Round] | None:
        begin = time.perf_counter()
        for slot, holder in list(self._holders.items()):
            if holder() is None:
                self._empty(slot)
        for drafter in asked:
            if drafter.slot >= 0:
                self._holders.move_to_end(drafter.slot)
        busy = {drafter.slot for drafter in asked}
        budget, chunks = self._max_num_batched_tokens, []
        # Those that lack least come first, so that a long prompt does not hold up the others.
        for drafter in sorted(asked, key=lambda drafter: len(drafter.tokens) - drafter.num_computed):
            if budget > 0 and self._has_place(drafter, busy):
                count = min(len(drafter.tokens) - drafter.num_computed, budget)
                budget -= count
                chunks.append((drafter, count))
        if not chunks:
            return []
        ids = self._run(engine, chunks)
        for drafter, _ in chunks:
            self._blocks.remember(drafter.slot, self._tokens[drafter.slot], drafter.num_computed)
        drafting = []
        for (drafter, _), token_id in zip(chunks, ids, strict=True):
            if drafter.num_computed == len(drafter.tokens):  # it has caught up
                drafter.drafted = [token_id]
                drafting.append(drafter)
        rounds = [(len(chunks), time.perf_counter() - begin)]
        for length in range(2, max(asked.values()) + 1):
            begin = time.perf_counter()
            drafting = [d for d in drafting if asked[d] >= length and d.num_computed < self._max_model_len]
            if not drafting:
                break
            for drafter in drafting:
                self._tokens[drafter.slot, drafter.num_computed] = drafter.drafted[-1]
            for drafter, token_id in zip(drafting, self._run(engine, [(d, 1) for d in drafting]), strict=True):
                drafter.drafted.append(token_id)
            rounds.append((len(drafting), time.perf_counter() - begin))
        follows_prompt = any(count > MAX_DRAFT_TOKENS + 1 for _, count in chunks)
        return None if follows_prompt else rounds

    def _run(self, engine: DraftEngine, chunks: Sequence[tuple[DraftModelDrafter, int]]) -> list[int]:
        """Compute so many of the tokens of each; returns the most probable token behind each chunk."""
        slots = np.array([drafter.slot for drafter, _ in chunks], np.intp)
        starts = np.array([drafter.num_computed for drafter, _ in chunks], np.int32)
        layout = Layout.of_chunks(slots, starts, np.array([count for _, count in chunks], np.int32))
        output = engine.forward(
            _core.Batch(
                input_ids=self._tokens[layout.token_slots, layout.positions],
                positions=layout.positions,
                cu_seqlens_q=layout.cu_seqlens_q,
                context_lens=layout.ends,
                logits_rows=layout.cu_seqlens_q[1:] - np.int32(1),
                **layout.cache_arrays(self._blocks),
                **most_probable(len(chunks)),
            )
        )
        for drafter, count in chunks:
            drafter.num_computed += count
        assert output.ids is not None  # because there are sampling parameters
        return list(output.ids.numpy().tolist())

    # ---- places in the cache ----

    def _has_place(self, drafter: DraftModelDrafter, busy: set[int]) -> bool:
        """Whether the slot of a drafter, which may be a new one, holds its tokens and has blocks for its draft.

        `busy`: the slots of the drafters that are asked now, to which its own is added.
        """
        num_tokens, blocks = len(drafter.tokens), self._blocks
        new = np.array(drafter.tokens[drafter.num_known :], np.int32)
        if num_tokens > self._max_model_len or (len(new) and new.max() >= self._vocab_size):
            return False
        if drafter.slot < 0:
            if not self._free_slots and not self._make_room(busy):
                return False
            drafter.slot = self._free_slots.pop()
            self._holders[drafter.slot] = weakref.ref(drafter)
            busy.add(drafter.slot)
            chain = blocks.find_prefix(new)
            blocks.share(drafter.slot, chain)
            drafter.num_computed = len(chain) * blocks.block_size
        else:
            # So many tokens of the draft were right. The last token is always computed, for the logits behind it.
            end = min(drafter.num_computed, num_tokens - 1)
            begin = min(drafter.num_known, end)
            is_wrong = self._tokens[drafter.slot, begin:end] != new[: end - begin]
            drafter.num_computed = begin + int(is_wrong.argmax()) if is_wrong.any() else end
        self._tokens[drafter.slot, drafter.num_known : num_tokens] = new
        drafter.num_known = num_tokens
        end = min(num_tokens + self._num_tokens - 1, self._max_model_len)
        while blocks.blocks_for(end) - int(blocks.lengths[drafter.slot]) > blocks.num_free:
            if not self._make_room(busy):
                return False
        blocks.grow(drafter.slot, end)
        return True

    def _make_room(self, busy: set[int]) -> bool:
        """Empty the slot that has drafted nothing for the longest time; False: all are `busy`."""
        slot = next((slot for slot in self._holders if slot not in busy), None)
        if slot is None:
            return False
        drafter = self._holders[slot]()
        self._empty(slot)
        if drafter is not None:
            drafter.slot, drafter.num_computed, drafter.num_known = -1, 0, 0
        return True

    def _empty(self, slot: int) -> None:
        del self._holders[slot]
        self._blocks.free(slot, self._max_model_len)  # what is remembered is computed
        self._free_slots.append(slot)


class DraftModelDrafter:
    """The drafts of one sequence; see `DraftModel`.

    Parameters
    ----------
    batch : DraftModel

    Attributes
    ----------
    tokens : array of int
        Prompt and output.
    drafted : list of int
        The tokens that the draft model expects behind them.
    slot : int
        Its place in the cache of the draft model; -1: it has none.
    num_known : int
        How many of `tokens` are written in the slot.
    num_computed : int
        Tokens of the slot that have keys and values, those of the draft included.
    """

    name = "draft_model"
    num_at_once = 0

    def __init__(self, batch: DraftModel) -> None:
        self.batch = batch
        self.tokens = array("i")
        self.drafted: list[int] = []
        self.slot = -1
        self.num_known = self.num_computed = 0

    def update(self, token_ids: Sequence[int]) -> None:
        """Take in the next tokens of the text, behind which nothing is drafted yet."""
        self.tokens.extend(token_ids)
        self.drafted = []

    @property
    def num_offered(self) -> int:
        """Tokens that the draft model could draft."""
        return self.batch.num_offered(self)

    def draft(self, limit: int) -> list[int]:
        """The most probable tokens of the draft model; none while it has not caught up."""
        return self.drafted[:limit]
