"""`Drafting`: which drafted tokens a step verifies, and what became of them.

A sequence computes its newest token and, behind it, a draft of the tokens that come next. Each of these rows draws the
token that plain decoding would draw there. A row counts if its own token is known, or if the row before it counts and
has drawn just the token that the row was given as a draft. The draws of rows that count are the next tokens of the
sequence. Keys and values of wrong drafts lie behind the tokens of the sequence, where nothing reads them, and the next
steps write over them.

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
from infinilm.scheduling.mtp import MtpHead
from infinilm.scheduling.running import RunningSequences
from infinilm.scheduling.sequence import IndexArray, Int32Array, Sequence
from infinilm.scheduling.step_builder import StepChoice
from infinilm.scheduling.steps import Step
from infinilm.speculation import MAX_DRAFT_TOKENS, BatchDrafters, Drafters
from infinilm.speculation.chain import DrafterChain
from infinilm.speculation.lengths import Acceptance, Lengths, Offer

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
        drafters: SequenceOf[Drafters],
        vocab_size: int,
        running: RunningSequences,
        blocks: BlockManager,
        lengths: Lengths | None = None,
    ) -> None:
        self._drafters = drafters
        self._together = [make for make in drafters if isinstance(make, BatchDrafters)]
        self._heads = [make for make in drafters if isinstance(make, MtpHead)]
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
        """Make the drafters of a sequence that enters a slot for the first time, if it may have some."""
        if sequence.collect_logits or sequence.samples_on_host or not sequence.params.max_draft_tokens:
            return
        made = []
        for make in self._drafters:
            try:
                made.append(make(sequence))
            except BaseException:  # a drafter may be user code, and this is the engine thread
                logger.exception("a drafter of a request could not be made; the request goes on without it")
        sequence.drafters = DrafterChain(drafter for drafter in made if drafter is not None)

    def learn(self, step: Step) -> None:
        """Let MTP heads follow a step whose result was taken in, before the next one is submitted."""
        for head in self._heads:
            head.follow(step, self._running, self._blocks)

    def choose(self, choice: StepChoice) -> None:
        """Add drafts to a step that is otherwise complete, where it computes newest tokens; all tokens are known."""
        candidates = self._candidates(choice)
        num_seqs = len(choice.decode_slots) + choice.num_recomputed
        if not candidates or choice.budget <= 0 or not (self.lengths is None or self.lengths.asks(num_seqs)):
            return
        choice.is_asked = True
        if self._together:
            self._prepare([choice.sequences[i] for i in candidates])
        slots = np.array([choice.sequences[i].slot for i in candidates], np.intp)
        drafts: list[tuple[int, list[int]]] = []
        for i, room in zip(candidates, self._rooms(slots, choice.budget).tolist(), strict=True):
            sequence = choice.sequences[i]
            limit = min(room, sequence.params.max_draft_tokens)
            if limit > 0 and (token_ids := self._ask(sequence, limit)):
                drafts.append((i, token_ids))
        if self.lengths is not None and drafts:
            offers = [Offer(self._acceptance(choice.sequences[i]), len(token_ids)) for i, token_ids in drafts]
            num_others = sum(choice.prefill_counts) - choice.num_recomputed
            chosen = self.lengths.choose(num_seqs, offers, num_others)
            drafts = [(i, token_ids[:length]) for (i, token_ids), length in zip(drafts, chosen, strict=True)]
        for i, token_ids in drafts:
            if not token_ids:
                continue
            slot = choice.sequences[i].slot
            room = int(self._rooms(np.array([slot], np.intp), choice.budget)[0])
            del token_ids[max(room, 0) :]  # drafts before it have taken tokens and blocks
            if token_ids:
                begin = int(self._running.num_tokens[slot])
                end = begin + len(token_ids)
                self._running.tokens[slot, begin:end] = token_ids
                self._blocks.grow(slot, end)
                choice.drafts.append((i, token_ids))
                choice.budget -= len(token_ids)

    def _candidates(self, choice: StepChoice) -> list[int]:
        """The sequences of a step that may have a draft, by their index: those in decode, and others with an output.

        These compute tokens of their output again, after a preemption or because their state has not seen them. They
        are counted in `choice.num_recomputed`.
        """
        running, num_decodes = self._running, len(choice.decode_slots)
        found: list[int] = np.flatnonzero(running.is_drafted[choice.decode_slots]).tolist()
        for i, count in enumerate(choice.prefill_counts, num_decodes):
            slot = choice.sequences[i].slot
            num_tokens = running.num_tokens[slot]
            if running.num_computed[slot] + count == num_tokens > running.prompt_lens[slot]:
                choice.num_recomputed += 1
                if running.is_drafted[slot]:
                    found.append(i)
        return found

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

    def _prepare(self, sequences: SequenceOf[Sequence]) -> None:
        """Let drafters that compute together do so, for all sequences that will be asked."""
        for sequence in sequences:
            self._update(sequence)
        for drafters in self._together:
            try:
                drafters.prepare()
            except BaseException:  # as above
                logger.exception("drafts that are made together failed, and the step has none of them")

    def _update(self, sequence: Sequence) -> DrafterChain:
        """Give the drafters of a sequence the tokens that they have not taken in; returns them."""
        chain, num_tokens = sequence.drafters, int(self._running.num_tokens[sequence.slot])
        assert chain is not None
        new: list[int] = self._running.tokens[sequence.slot, sequence.num_drafter_tokens : num_tokens].tolist()
        if new:
            sequence.num_drafter_tokens = num_tokens
            chain.update(new)
        return chain

    def _ask(self, sequence: Sequence, limit: int) -> list[int]:
        """The first draft of a sequence that begins with a token that may come next."""
        chain = self._update(sequence)
        for draft in chain.drafts(lambda _source: limit):
            if token_ids := self._usable(sequence, draft.token_ids):
                sequence.draft_source = draft.source
                return token_ids
        self._running.is_drafted[sequence.slot] = len(chain) > 0  # drafters that fail leave the chain
        return []

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
                self._blocks.trim(sequence.slot, int(self._running.num_tokens[sequence.slot]) - 1)

    def observe(self, step: Step, num_tokens: int, seconds: float) -> None:
        """Learn from the time of a step, from the results of the step before it to its own, and its `num_tokens`."""
        if self.lengths is not None and step.num_newest == len(step.sequences):
            self.lengths.record(step.num_newest, step.num_drafted, num_tokens, seconds)


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
