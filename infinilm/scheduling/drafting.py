"""`Drafting`: which drafted tokens a step verifies, and what became of them.

A sequence in decode computes its newest token and, behind it, a draft of the tokens that come next. Each of these rows
draws the token that plain decoding would draw there. A row counts if its own token is known, or if the row before it
counts and has drawn just the token that the row was given as a draft. The draws of rows that count are the next tokens
of the sequence. Keys and values of wrong drafts lie behind the tokens of the sequence, where nothing reads them, and
the next steps write over them.

Drafts get what is left: tokens of the step's budget that no prompt takes, and blocks above the watermark. They are
chosen last and their blocks go back with the result, so that no sequence waits or is preempted for a draft. How much of
a draft is worth its time is measured (`infinilm.speculation.lengths`), unless lengths are fixed.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence as SequenceOf

import numpy as np

from infinilm.logs import logger
from infinilm.scheduling.block_manager import BlockManager
from infinilm.scheduling.masks import KNOWN
from infinilm.scheduling.matcher import Matcher
from infinilm.scheduling.running import RunningSequences
from infinilm.scheduling.sequence import IndexArray, Int32Array, Sequence
from infinilm.scheduling.step_builder import StepChoice
from infinilm.scheduling.steps import Step
from infinilm.speculation import MAX_DRAFT_TOKENS, Drafters
from infinilm.speculation.lengths import Acceptance, Lengths, Offer

__all__ = ["Drafting"]


class Drafting:
    """Asks the drafters of the running sequences, and counts.

    Parameters
    ----------
    drafters : callable
        Makes the drafter of each sequence.
    vocab_size : int
    running : RunningSequences
    blocks : BlockManager
    lengths : Lengths or None
        Chooses how many tokens of each draft are verified; None: all of them.

    Attributes
    ----------
    lengths : Lengths or None
    num_drafts, num_draft_tokens : int
        Drafts that steps have verified so far, and their tokens.
    accepted_at : list of int
        How often the token at each position of a draft was right, from 0.
    """

    def __init__(
        self,
        drafters: Drafters,
        vocab_size: int,
        running: RunningSequences,
        blocks: BlockManager,
        lengths: Lengths | None = None,
    ) -> None:
        self._drafters = drafters
        self.lengths = lengths
        self._vocab_size = vocab_size
        self._running = running
        self._blocks = blocks
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.accepted_at = [0] * MAX_DRAFT_TOKENS

    @property
    def needs_results(self) -> bool:
        """Whether a step that could be made ahead waits for the newest tokens, which drafters draft from."""
        is_drafted = self._running.is_drafted[self._running.slots]
        if not is_drafted.any():
            return False
        return self.lengths is None or self.lengths.waits(len(is_drafted))

    def enter(self, sequence: Sequence) -> None:
        """Make the drafter of a sequence that enters a slot for the first time, if it may have one."""
        if sequence.collect_logits or sequence.samples_on_host or not sequence.params.max_draft_tokens:
            return
        try:
            sequence.drafter = self._drafters(sequence)
        except BaseException:  # a drafter may be user code, and this is the engine thread
            logger.exception("no drafter could be made for a request, which goes on without drafts")

    def choose(self, choice: StepChoice) -> None:
        """Add drafts to the sequences in decode of a step that is otherwise complete; their tokens are all known."""
        running, num_seqs = self._running, len(choice.decode_slots)
        if not num_seqs or choice.budget <= 0 or not (self.lengths is None or self.lengths.asks(num_seqs)):
            return
        choice.is_asked = True
        drafts: list[tuple[int, list[int]]] = []
        drafted = np.flatnonzero(running.is_drafted[choice.decode_slots])
        rooms = self._rooms(choice.decode_slots[drafted], choice.budget)
        for i, room in zip(drafted.tolist(), rooms.tolist(), strict=True):
            sequence = choice.sequences[i]
            limit = min(room, sequence.params.max_draft_tokens)
            if limit > 0 and (token_ids := self._ask(sequence, limit)):
                drafts.append((i, token_ids))
        if self.lengths is not None and drafts:
            offers = [Offer(self._acceptance(choice.sequences[i]), len(token_ids)) for i, token_ids in drafts]
            chosen = self.lengths.choose(num_seqs, offers, sum(choice.prefill_counts))
            drafts = [(i, token_ids[:length]) for (i, token_ids), length in zip(drafts, chosen, strict=True)]
        for i, token_ids in drafts:
            if not token_ids:
                continue
            slot = choice.sequences[i].slot
            room = int(self._rooms(choice.decode_slots[i : i + 1], choice.budget)[0])
            del token_ids[max(room, 0) :]  # drafts before it have taken tokens and blocks
            if token_ids:
                begin = int(running.num_tokens[slot])
                end = begin + len(token_ids)
                running.tokens[slot, begin:end] = token_ids
                self._blocks.grow(slot, end)
                choice.drafts.append((i, token_ids))
                choice.budget -= len(token_ids)

    def _rooms(self, slots: IndexArray, budget: int) -> Int32Array:
        """Tokens that a draft may have, [len(slots)], given what is left of the step and of the blocks; none if <= 0.

        Each may have as many if the others have none.
        """
        running, blocks = self._running, self._blocks
        num_tokens = running.num_tokens[slots]
        room = (blocks.lengths[slots] + max(blocks.headroom(), 0)) * blocks.block_size - num_tokens
        left = running.max_num_tokens[slots] - num_tokens - 1  # the last token is drawn, and not computed
        rooms: Int32Array = np.minimum(np.minimum(room, left), min(budget, MAX_DRAFT_TOKENS))
        return rooms

    def _acceptance(self, sequence: Sequence) -> Acceptance:
        """How often the drafts of a sequence were right that came from the source of its newest draft."""
        assert self.lengths is not None
        source = sequence.draft_source
        if (found := sequence.acceptance.get(source)) is None:
            found = sequence.acceptance[source] = self.lengths.acceptance(source)
        return found

    def _ask(self, sequence: Sequence, limit: int) -> list[int]:
        """The draft of a sequence. One whose drafter fails goes on without drafts, which changes none of its tokens."""
        slot, drafter = sequence.slot, sequence.drafter
        assert drafter is not None
        try:
            num_tokens = int(self._running.num_tokens[slot])
            new: list[int] = self._running.tokens[slot, sequence.num_drafter_tokens : num_tokens].tolist()
            sequence.num_drafter_tokens = num_tokens
            drafter.update(new)
            token_ids = drafter.draft(limit)[:limit]
            if not len(token_ids):
                return []
            sequence.draft_source = str(getattr(drafter, "name", "")), int(getattr(drafter, "evidence", 0))
            return self._usable(sequence, token_ids)
        except BaseException:  # as above
            logger.exception("the drafter of a request failed, which goes on without drafts")
            sequence.drafter = None
            self._running.is_drafted[slot] = False
            return []

    def _usable(self, sequence: Sequence, token_ids: SequenceOf[int]) -> list[int]:
        """The tokens of a draft before the first that cannot come (vocabulary, constraint) or ends the sequence."""
        usable: list[int] = []
        for token_id in map(int, token_ids):
            if not 0 <= token_id < self._vocab_size or token_id in sequence.stop_token_ids:
                break
            usable.append(token_id)
        if usable and sequence.constraint is not None:
            del usable[_num_followed(sequence.constraint, usable) :]
        return usable

    def settle(self, step: Step, rows: SequenceOf[int]) -> None:
        """Count the drafts of a step, give back the blocks of wrong ones; `rows`: those that count, in order."""
        assert step.drafts is not None
        drafts, counting = step.drafts, set(rows)
        begins = [row for row, token_id in enumerate(drafts) if token_id == KNOWN]
        for begin, end in itertools.pairwise([*begins, len(drafts)]):
            if (num_tokens := end - begin - 1) == 0:
                continue
            sequence = step.samples[begin]
            num_accepted = sum(row in counting for row in range(begin + 1, end))
            self.num_drafts += 1
            self.num_draft_tokens += num_tokens
            sequence.num_draft_tokens += num_tokens
            sequence.num_accepted_tokens += num_accepted
            for place in range(num_accepted):
                self.accepted_at[place] += 1
            if self.lengths is not None:
                self._acceptance(sequence).add(num_tokens, num_accepted)
            if sequence.slot >= 0:
                self._blocks.trim(sequence.slot, int(self._running.num_computed[sequence.slot]))

    def observe(self, step: Step, num_tokens: int, seconds: float) -> None:
        """Learn from the time of a step, from the results of the step before it to its own, and its `num_tokens`."""
        if self.lengths is not None and step.num_decodes == len(step.sequences):
            self.lengths.record(step.num_decodes, step.num_drafted, num_tokens, seconds)


def _num_followed(matcher: Matcher, token_ids: SequenceOf[int]) -> int:
    """How many of these tokens a matcher takes in without an end behind them; `matcher` stays as it is.

    Grammars refuse a token that does not fit, which ends the draft here. What other matchers take in and do not allow
    is found by the masks of the step (`StepMasks`), which cost much more and are made only once.
    """
    count = 0
    # A matcher may be user code. If it fails without drafts as well, its request ends then.
    with contextlib.suppress(BaseException):
        matcher = matcher.copy()
        for token_id in token_ids:
            matcher.advance(token_id)
            if matcher.is_finished:
                break
            count += 1
    return count
