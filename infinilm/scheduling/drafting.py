"""`Drafting`: which drafted tokens a step verifies, and what became of them.

A sequence computes its newest token and, behind it, a draft of the tokens that come next. Each of these rows draws the
token that plain decoding would draw there. A row counts if its own token is known, or if the row before it counts and
has drawn just the token that the row was given as a draft. The draws of rows that count are the next tokens of the
sequence. Keys and values of wrong drafts lie behind the tokens of the sequence, where nothing reads them, and the next
steps write over them.

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
from infinilm.scheduling.running import RunningSequences
from infinilm.scheduling.sequence import Sequence
from infinilm.scheduling.step_builder import StepChoice
from infinilm.scheduling.steps import Step
from infinilm.speculation import MAX_DRAFT_TOKENS, Drafters
from infinilm.speculation.chain import Draft, DrafterChain

__all__ = ["Drafting"]


class Drafting:
    """Asks the drafters of the running sequences, and counts.

    Parameters
    ----------
    drafters : sequence of callable
        Make the drafters of each sequence, in the order in which they are asked (`DrafterChain`).
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

    def __init__(
        self, drafters: SequenceOf[Drafters], vocab_size: int, running: RunningSequences, blocks: BlockManager
    ) -> None:
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
        """Make the drafters of a sequence that enters a slot for the first time, if it may have some."""
        if sequence.collect_logits or sequence.samples_on_host:
            return
        made = []
        for make in self._drafters:
            try:
                made.append(make(sequence))
            except BaseException:  # a drafter may be user code, and this is the engine thread
                logger.exception("a drafter of a request could not be made; the request goes on without it")
        sequence.drafters = DrafterChain(drafter for drafter in made if drafter is not None)

    def choose(self, choice: StepChoice) -> None:
        """Add drafts to a step that is otherwise complete, where it computes newest tokens; all tokens are known."""
        running, blocks = self._running, self._blocks
        for i in self._candidates(choice):
            if choice.budget <= 0:
                return
            sequence = choice.sequences[i]
            slot = sequence.slot
            num_tokens = int(running.num_tokens[slot])
            held = int(blocks.lengths[slot])
            room = (held + max(blocks.headroom(), 0)) * blocks.block_size - num_tokens
            left = int(running.max_num_tokens[slot]) - num_tokens - 1  # the last token is drawn, and not computed
            limit = min(choice.budget, room, left, MAX_DRAFT_TOKENS)
            if limit <= 0:
                continue
            draft = self._ask(sequence, limit)
            if draft is not None:
                end = num_tokens + len(draft.token_ids)
                running.tokens[slot, num_tokens:end] = draft.token_ids
                blocks.grow(slot, end)
                choice.drafts.append((i, draft.token_ids))
                choice.budget -= len(draft.token_ids)

    def _candidates(self, choice: StepChoice) -> list[int]:
        """The sequences of a step that may have a draft, by their index: those in decode, and others with an output.

        These compute tokens of their output again, after a preemption or because their state has not seen them.
        """
        running, num_decodes = self._running, len(choice.decode_slots)
        found: list[int] = np.flatnonzero(running.is_drafted[choice.decode_slots]).tolist()
        for i, count in enumerate(choice.prefill_counts, num_decodes):
            slot = choice.sequences[i].slot
            num_tokens = running.num_tokens[slot]
            is_newest = running.num_computed[slot] + count == num_tokens > running.prompt_lens[slot]
            if is_newest and running.is_drafted[slot]:
                found.append(i)
        return found

    def _ask(self, sequence: Sequence, limit: int) -> Draft | None:
        """The first draft of a sequence that begins with a token that may come next."""
        slot, chain = sequence.slot, sequence.drafters
        assert chain is not None
        num_tokens = int(self._running.num_tokens[slot])
        new: list[int] = self._running.tokens[slot, sequence.num_drafter_tokens : num_tokens].tolist()
        sequence.num_drafter_tokens = num_tokens
        chain.update(new)
        for draft in chain.drafts(lambda _source: limit):
            if token_ids := self._usable(sequence, draft.token_ids):
                return Draft(token_ids, draft.source)
        self._running.is_drafted[slot] = len(chain) > 0  # drafters that fail leave the chain
        return None

    def _usable(self, sequence: Sequence, token_ids: SequenceOf[int]) -> list[int]:
        """The tokens of a draft before the first that cannot come (vocabulary, constraint) or ends the sequence."""
        usable: list[int] = []
        for token_id in token_ids:
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
                self._blocks.trim(sequence.slot, int(self._running.num_tokens[sequence.slot]) - 1)


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
