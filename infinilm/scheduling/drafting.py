"""`Drafting`: which drafted tokens a step verifies, and what became of them.

A sequence in decode computes its newest token and, behind it, a draft of the tokens that come next. Each of these rows
draws the token that plain decoding would draw there. A row counts if its own token is known, or if the row before it
counts and has drawn just the token that the row was given as a draft. The draws of rows that count are the next tokens
of the sequence. Keys and values of wrong drafts lie behind the tokens of the sequence, where nothing reads them, and
the next steps write over them.

Drafts get what is left: tokens of the step's budget that no prompt takes, and blocks above the watermark. They are
chosen last and their blocks go back with the result, so that no sequence waits or is preempted for a draft.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence as SequenceOf

import numpy as np

from infinilm.logs import logger
from infinilm.scheduling.block_manager import BlockManager
from infinilm.scheduling.masks import KNOWN
from infinilm.scheduling.matcher import Matcher
from infinilm.scheduling.mtp import MtpHead
from infinilm.scheduling.running import RunningSequences
from infinilm.scheduling.sequence import Sequence
from infinilm.scheduling.step_builder import StepChoice
from infinilm.scheduling.steps import Step
from infinilm.speculation import MAX_DRAFT_TOKENS, BatchDrafters, Drafters

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

    Attributes
    ----------
    num_drafts, num_draft_tokens : int
        Drafts that steps have verified so far, and their tokens.
    accepted_at : list of int
        How often the token at each position of a draft was right, from 0.
    """

    def __init__(self, drafters: Drafters, vocab_size: int, running: RunningSequences, blocks: BlockManager) -> None:
        self._drafters = drafters
        self._vocab_size = vocab_size
        self._running = running
        self._blocks = blocks
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.accepted_at = [0] * MAX_DRAFT_TOKENS

    @property
    def is_any_drafted(self) -> bool:
        """Whether a running sequence has a drafter, which needs the newest token before it can draft."""
        return bool(self._running.is_drafted[self._running.slots].any())

    def enter(self, sequence: Sequence) -> None:
        """Make the drafter of a sequence that enters a slot for the first time, if it may have one."""
        if sequence.collect_logits or sequence.samples_on_host:
            return
        try:
            sequence.drafter = self._drafters(sequence)
        except BaseException:  # a drafter may be user code, and this is the engine thread
            logger.exception("no drafter could be made for a request, which goes on without drafts")

    def learn(self, step: Step) -> None:
        """Let an MTP head follow a step whose result was taken in, before the next one is submitted."""
        if isinstance(self._drafters, MtpHead):
            self._drafters.follow(step, self._running, self._blocks)

    def choose(self, choice: StepChoice) -> None:
        """Add drafts to the sequences in decode of a step that is otherwise complete; their tokens are all known."""
        running, blocks = self._running, self._blocks
        if isinstance(self._drafters, BatchDrafters):
            self._prepare(self._drafters, choice)
        for i in np.flatnonzero(running.is_drafted[choice.decode_slots]).tolist():
            if choice.budget <= 0:
                return
            slot, sequence = int(choice.decode_slots[i]), choice.sequences[i]
            num_tokens = int(running.num_tokens[slot])
            held = int(blocks.lengths[slot])
            room = (held + max(blocks.headroom(), 0)) * blocks.block_size - num_tokens
            left = int(running.max_num_tokens[slot]) - num_tokens - 1  # the last token is drawn, and not computed
            limit = min(choice.budget, room, left, MAX_DRAFT_TOKENS)
            if limit <= 0:
                continue
            token_ids = self._ask(sequence, limit)
            if token_ids:
                end = num_tokens + len(token_ids)
                running.tokens[slot, num_tokens:end] = token_ids
                blocks.grow(slot, end)
                choice.drafts.append((i, token_ids))
                choice.budget -= len(token_ids)

    def _prepare(self, drafters: BatchDrafters, choice: StepChoice) -> None:
        """Let drafters that compute together do so, for all sequences that will be asked."""
        try:
            for i in np.flatnonzero(self._running.is_drafted[choice.decode_slots]).tolist():
                self._update(choice.sequences[i])
            drafters.prepare()
        except BaseException:  # as above
            logger.exception("drafts that are made together failed, and the step has none")

    def _update(self, sequence: Sequence) -> None:
        """Give the drafter of a sequence the tokens that it has not taken in."""
        drafter, num_tokens = sequence.drafter, int(self._running.num_tokens[sequence.slot])
        assert drafter is not None
        new: list[int] = self._running.tokens[sequence.slot, sequence.num_drafter_tokens : num_tokens].tolist()
        if new:
            sequence.num_drafter_tokens = num_tokens
            drafter.update(new)

    def _ask(self, sequence: Sequence, limit: int) -> list[int]:
        """The draft of a sequence. One whose drafter fails goes on without drafts, which changes none of its tokens."""
        slot, drafter = sequence.slot, sequence.drafter
        assert drafter is not None
        try:
            self._update(sequence)
            return self._usable(sequence, drafter.draft(limit)[:limit])
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
        first, counting = 0, set(rows)
        for row, token_id in enumerate(step.drafts):
            if token_id == KNOWN:
                first = row
                continue
            sequence = step.samples[row]
            self.num_drafts += row == first + 1
            self.num_draft_tokens += 1
            sequence.num_draft_tokens += 1
            if row in counting:
                self.accepted_at[row - first - 1] += 1
                sequence.num_accepted_tokens += 1
            if sequence.slot >= 0:
                self._blocks.trim(sequence.slot, int(self._running.num_computed[sequence.slot]))


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
