"""`Drafting`: which drafted tokens a step verifies, and what became of them.

A sequence computes its newest token and, behind it, a draft of the tokens that come next. Each of these rows draws the
token that plain decoding would draw there. A row counts if its own token is known, or if the row before it counts and
has drawn just the token that the row was given as a draft. The draws of rows that count are the next tokens of the
sequence. Keys and values of wrong drafts lie behind the tokens of the sequence, where nothing reads them, and the next
steps write over them.

Drafts get what is left: tokens of the step's budget that no prompt takes, and blocks above the watermark. They are
chosen last and their blocks go back with the result, so that no sequence waits or is preempted for a draft. How much of
a draft is worth its time is measured (`infinilm.speculation.lengths`), unless lengths are fixed. Drafts that a model
makes are made once that is known.

A sequence that replays a known answer (`Sequence.replay`) has the whole answer as its draft. All of it is verified, as
much in a step as there is room for, and it is not counted among the drafts.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import numpy as np

from infinilm.logs import logger
from infinilm.scheduling.block_manager import BlockManager
from infinilm.scheduling.masks import KNOWN
from infinilm.scheduling.matcher import Matcher
from infinilm.scheduling.mtp import MtpHead
from infinilm.scheduling.running import RunningSequences
from infinilm.scheduling.sequence import ENDED, IndexArray, Int32Array, Sequence
from infinilm.scheduling.step_builder import StepChoice
from infinilm.scheduling.steps import Step
from infinilm.speculation import MAX_DRAFT_TOKENS, BatchDrafter, Drafters
from infinilm.speculation.chain import Draft, DrafterChain
from infinilm.speculation.lengths import Acceptance, Lengths, Offer, Source
from infinilm.speculation.replay import follow_replay

__all__ = ["MAX_REPLAYED_TOKENS", "Drafting"]

MAX_REPLAYED_TOKENS = 255
"""Drafted tokens of a step that replay known answers at most: the logits of each take the memory of a vocabulary."""


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
    most_tokens : int
        A draft has no more, and neither has a known answer.

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
        most_tokens: int = MAX_REPLAYED_TOKENS,
    ) -> None:
        self._most_tokens = most_tokens
        self._drafters = drafters
        self._heads = [make for make in drafters if isinstance(make, MtpHead)]
        self.lengths = lengths
        self._vocab_size = vocab_size
        self._running = running
        self._blocks = blocks
        self._replaying: set[Sequence] = set()
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.accepted_at = [0] * MAX_DRAFT_TOKENS

    @property
    def needs_results(self) -> bool:
        """Whether a step that could be made ahead waits for the newest tokens, which drafters draft from."""
        if self._replays():
            return True
        running, slots = self._running, self._running.slots
        is_drafted = running.is_drafted[slots]
        if not is_drafted.any():
            return False
        # Heads follow prompts in any case, since drafts read what they leave for long.
        if self._heads and (is_drafted & (running.num_computed[slots] <= running.prompt_lens[slots])).any():
            return True
        return self.lengths is None or self.lengths.waits(len(is_drafted))

    def enter(self, sequence: Sequence) -> None:
        """Make the drafters of a sequence that enters a slot for the first time, if it may have some."""
        if sequence.collect_logits or sequence.samples_on_host:
            return
        if sequence.replay is not None:
            self._replaying.add(sequence)
        elif not sequence.params.max_draft_tokens:
            return
        made = []
        for make in [follow_replay] if sequence.replay is not None else self._drafters:
            try:
                made.append(make(sequence))
            except BaseException:  # a drafter may be user code, and this is the engine thread
                logger.exception("a drafter of a request could not be made; the request goes on without it")
        sequence.drafters = DrafterChain(drafter for drafter in made if drafter is not None)

    def _replays(self) -> bool:
        """Whether a sequence that has a slot replays an answer."""
        self._replaying = {sequence for sequence in self._replaying if sequence.request is not ENDED}
        return any(sequence.slot >= 0 for sequence in self._replaying)

    def learn(self, step: Step) -> None:
        """Take in a step whose result was taken in; MTP heads follow it when drafts of the next are chosen."""
        for head in self._heads:
            head.follow(step, self._running, self._blocks)

    def catch_up(self) -> bool:
        """Let MTP heads follow that step now, if they have not; returns whether this took as long as it mostly does.

        Called before the next step is submitted, and before a sequence loses its blocks.
        """
        return all([head.prepare(()) is not None for head in self._heads])

    def choose(self, choice: StepChoice) -> None:
        """Add drafts to a step that is otherwise complete, where it computes newest tokens; all tokens are known."""
        candidates = self._candidates(choice)
        if self._replaying:
            self._replay(choice, candidates)
            candidates = [i for i in candidates if choice.sequences[i].replay is None]
        num_seqs = len(choice.decode_slots) + choice.num_recomputed
        if candidates and self.lengths is not None and not self.lengths.asks(num_seqs):
            for head in self._heads:
                head.pass_over()
        elif candidates and choice.budget > 0:
            choice.is_asked = True
            self._choose(choice, candidates, num_seqs)
        choice.is_typical &= self.catch_up()

    def _replay(self, choice: StepChoice, candidates: SequenceOf[int]) -> None:
        """Add what known answers go on with, of those of `candidates` that are replayed."""
        left = MAX_REPLAYED_TOKENS
        for i in candidates:
            sequence = choice.sequences[i]
            if sequence.replay is None:
                continue
            limit = min(int(self._rooms(np.array([sequence.slot], np.intp), choice.budget)[0]), left)
            if limit > 0 and (draft := self._ask(sequence, limit)) is not None:
                self._add(choice, i, draft.token_ids)
                choice.is_typical = False
                left -= draft.num_tokens

    def _add(self, choice: StepChoice, i: int, token_ids: list[int]) -> None:
        """Add a draft of the sequence with this index, for which there is room."""
        slot = choice.sequences[i].slot
        begin = int(self._running.num_tokens[slot])
        end = begin + len(token_ids)
        self._running.tokens[slot, begin:end] = token_ids
        self._blocks.grow(slot, end)
        choice.drafts.append((i, token_ids))
        choice.budget -= len(token_ids)

    def _choose(self, choice: StepChoice, candidates: SequenceOf[int], num_seqs: int) -> None:
        slots = np.array([choice.sequences[i].slot for i in candidates], np.intp)
        offered: list[tuple[int, Draft]] = []
        for i, room in zip(candidates, self._rooms(slots, choice.budget).tolist(), strict=True):
            sequence = choice.sequences[i]
            limit = min(room, sequence.params.max_draft_tokens)
            if limit > 0 and (draft := self._ask(sequence, limit)) is not None:
                offered.append((i, draft))
        for i, token_ids in self._made(choice, offered, self._lengths(choice, num_seqs, offered)):
            if not token_ids:
                continue
            slot = choice.sequences[i].slot
            room = int(self._rooms(np.array([slot], np.intp), choice.budget)[0])
            del token_ids[max(room, 0) :]  # drafts before it have taken tokens and blocks
            if token_ids:
                self._add(choice, i, token_ids)

    def _candidates(self, choice: StepChoice) -> list[int]:
        """The sequences of a step that may have a draft, by their index: those in decode, and others with an output.

        These compute tokens of their output again, after a preemption. They are counted in `choice.num_recomputed`. A
        known answer is also computed behind the last token of its prompt.
        """
        running, num_decodes = self._running, len(choice.decode_slots)
        found: list[int] = np.flatnonzero(running.is_drafted[choice.decode_slots]).tolist()
        for i, count in enumerate(choice.prefill_counts, num_decodes):
            slot = choice.sequences[i].slot
            num_tokens = running.num_tokens[slot]
            if running.num_computed[slot] + count < num_tokens:
                continue
            has_output = bool(num_tokens > running.prompt_lens[slot])
            choice.num_recomputed += has_output
            if running.is_drafted[slot] and (has_output or choice.sequences[i].replay is not None):
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
        rooms: Int32Array = np.minimum(np.minimum(room, left), min(budget, self._most_tokens))
        return rooms

    def _lengths(self, choice: StepChoice, num_seqs: int, offered: SequenceOf[tuple[int, Draft]]) -> list[int]:
        """How many tokens of each draft the step verifies, [len(offered)]."""
        if self.lengths is None or not offered:
            return [draft.num_tokens for _, draft in offered]
        offers = []
        for i, draft in offered:
            offer = Offer(self._acceptance(choice.sequences[i], draft.source), draft.num_tokens)
            if draft.maker is not None:
                offer.made_by, offer.num_at_once = draft.maker.name, draft.maker.num_at_once
            offers.append(offer)
        return self.lengths.choose(num_seqs, offers, sum(choice.prefill_counts) - choice.num_recomputed)

    def _made(
        self, choice: StepChoice, offered: SequenceOf[tuple[int, Draft]], lengths: SequenceOf[int]
    ) -> list[tuple[int, list[int]]]:
        """The tokens of these drafts, of so many at most, each with the index of its sequence."""
        wanted = [(draft.maker, n) for (_, draft), n in zip(offered, lengths, strict=True) if draft.maker and n]
        if wanted:
            self._prepare(choice, wanted)
        drafts: list[tuple[int, list[int]]] = []
        for (i, draft), length in zip(offered, lengths, strict=True):
            token_ids = draft.token_ids[:length]
            if draft.maker is not None and length:
                sequence = choice.sequences[i]
                assert sequence.drafters is not None
                token_ids = self._usable(sequence, sequence.drafters.made(draft, length))
            drafts.append((i, token_ids))
        return drafts

    def _prepare(self, choice: StepChoice, wanted: SequenceOf[tuple[BatchDrafter, int]]) -> None:
        """Let drafters that compute together do so, and note what that took."""
        for batch in {id(maker.batch): maker.batch for maker, _ in wanted}.values():
            own = [(maker, length) for maker, length in wanted if maker.batch is batch]
            try:
                rounds = batch.prepare(own)
            except BaseException:  # as above
                logger.exception("drafts that are made together failed, and the step has none of them")
                continue
            choice.is_typical &= rounds is not None
            for num_seqs, seconds in rounds or ():
                choice.drafting_seconds += seconds
                if self.lengths is not None:
                    self.lengths.record_round(own[0][0].name, num_seqs, seconds)

    def _acceptance(self, sequence: Sequence, source: Source) -> Acceptance:
        """How often drafts of a source were right in a sequence."""
        assert self.lengths is not None
        if (found := sequence.acceptance.get(source)) is None:
            found = sequence.acceptance[source] = self.lengths.acceptance(source)
        return found

    def _update(self, sequence: Sequence) -> DrafterChain:
        """Give the drafters of a sequence the tokens that they have not taken in; returns them."""
        chain, num_tokens = sequence.drafters, int(self._running.num_tokens[sequence.slot])
        assert chain is not None
        new: list[int] = self._running.tokens[sequence.slot, sequence.num_drafter_tokens : num_tokens].tolist()
        if sequence.given is not None:
            of_prompt = sequence.prompt_token_ids[sequence.num_drafter_tokens : num_tokens].tolist()
            new[: len(of_prompt)] = of_prompt
        if new:
            sequence.num_drafter_tokens = num_tokens
            chain.update(new)
        return chain

    def _ask(self, sequence: Sequence, limit: int) -> Draft | None:
        """The first draft of a sequence that begins with a token that may come next.

        A draft that is still to be made takes the place of one that is there if more of it is expected to be right.
        """
        chain = self._update(sequence)
        best: Draft | None = None
        for draft in chain.drafts(lambda _source: limit):
            if draft.maker is None:
                if best is not None or not (token_ids := self._usable(sequence, draft.token_ids)):
                    continue
                draft = replace(draft, token_ids=token_ids, num_tokens=len(token_ids))
            if best is None or self._expected(sequence, draft) > self._expected(sequence, best):
                best = draft
            if not chain.has_makers or self.lengths is None:
                break
        if best is None:
            self._running.is_drafted[sequence.slot] = len(chain) > 0  # drafters that fail leave the chain
        else:
            sequence.draft_source = best.source
        return best

    def _expected(self, sequence: Sequence, draft: Draft) -> float:
        return self._acceptance(sequence, draft.source).expected(draft.num_tokens)

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
            if sequence.replay is None:
                self._count(sequence, num_tokens, sum(row in counting for row in range(begin + 1, end)))
            if sequence.slot >= 0:
                self._blocks.trim(sequence.slot, int(self._running.num_tokens[sequence.slot]) - 1)

    def _count(self, sequence: Sequence, num_tokens: int, num_accepted: int) -> None:
        """Count a draft of a sequence, the first tokens of which were right."""
        self.num_drafts += 1
        self.num_draft_tokens += num_tokens
        sequence.num_draft_tokens += num_tokens
        sequence.num_accepted_tokens += num_accepted
        for place in range(num_accepted):
            self.accepted_at[place] += 1
        if self.lengths is not None:
            self._acceptance(sequence, sequence.draft_source).add(num_tokens, num_accepted)

    def observe(self, step: Step, num_tokens: int, seconds: float) -> None:
        """Learn from the time of a step, from the results of the step before it to its own, and its `num_tokens`."""
        if self.lengths is not None and step.is_typical and step.num_newest == len(step.sequences):
            self.lengths.record(step.num_newest, step.num_drafted, num_tokens, seconds, step.drafting_seconds)


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
