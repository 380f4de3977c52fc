"""`Lengths`: how many tokens of each draft a step verifies, so that most tokens come per second.

Two things are measured while requests run. `Acceptance` is how often drafts are right, of each sequence and source;
drafts for which more speaks, such as a longer match, count as another source. `StepTimes` is how long a step takes, by
the number of its sequences and of the drafted tokens among its rows. From both follows what a length is worth: a step
of n sequences that verifies some drafted tokens gives n tokens and those that are expected to be right, in the time of
a step of that size. The lengths of a step are those with the best rate.

Some drafts are made only once their length is chosen, since a model makes them, token by token for all sequences
together. The time of such a round is measured, too, and is part of what a length costs.

Clocks may steer lengths because no answer depends on them. SmartSpec (Liu et al., https://arxiv.org/abs/2406.14066)
chooses one length for a whole batch in this way, from a cost model that is fitted beforehand.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

__all__ = ["Acceptance", "Lengths", "Offer", "Source", "StepTimes"]

Source = tuple[str, int]
"""Where a draft comes from: the name of a drafter, and how much speaks for the draft, on a scale of that drafter."""

FloatArray = npt.NDArray[np.float64]
IndexArray = npt.NDArray[np.intp]

# An average begins here: high enough for drafts of a new source to be tried.
_FIRST, _NEXT = 0.4, 0.8

# An earlier draft counts this much less than the one behind it: in a sequence, and in all sequences of a source.
_DECAY, _SHARED_DECAY = 0.9, 0.98
_WEIGHT, _SHARED_WEIGHT = 2.0, 4.0  # drafts that the average of the source counts as, and where this begins

_NUM_KEPT = 8  # last times of a size
_NUM_FIRST = 4  # times of steps of so many sequences that are measured before any draft is verified
_EXACT = 16  # larger sizes share their times with those of the same leading four bits

_TRIED = 16  # tokens of a step that are tried with any number of sequences, if its time is not known

_WORTH = 1.02  # a smaller gain in tokens per second is within what clocks tell wrong
_TRY_EVERY = 32  # steps with drafts, of which one has any length, to see what such a step takes
_TRY_ABOVE = 0.8  # of the best rate is expected of the lengths that are tried
_UNDRAFTED_EVERY = 128  # steps with drafts, of which one has none
_PROBE_EVERY = 32  # steps
_PROBE_SHARE = 0.004  # of the time may go to probes
_PROBE_COST = 0.25  # of the time of a step that a probe may add to it, if it verifies more than one token

# Weight of the newest step in the average of what drafts gain: of each of its sequences, and at most.
_RECENT, _MOST_RECENT = 1 / 16, 1 / 4
_TOLERATED = 0.003  # loss by waiting for results that is not worth a choice


class Acceptance:
    """How often drafted tokens are right, if those before them are: the first of a draft, and the next ones.

    Two rates, because a draft that begins right mostly goes on right: where text repeats itself, the first token says
    whether it does. Both are averages over recent drafts.

    Parameters
    ----------
    shared : Acceptance or None
        The average of the source, which those of its sequences begin with and return to; None: this is it.

    Attributes
    ----------
    num_refused : int
        Drafts of which nothing was verified, since the last one that was.
    """

    def __init__(self, shared: Acceptance | None = None) -> None:
        self._shared = shared
        self._first = self._next = self._num_first = self._num_next = 0.0
        self.num_refused = 0

    @property
    def rates(self) -> tuple[float, float]:
        """Probabilities that the first token is right, and that a next one is."""
        first, following, weight = _FIRST, _NEXT, _SHARED_WEIGHT
        if self._shared is not None:
            (first, following), weight = self._shared.rates, _WEIGHT
        return (
            (self._first + weight * first) / (self._num_first + weight),
            (self._next + weight * following) / (self._num_next + weight),
        )

    def expected(self, num_tokens: int) -> float:
        """How many tokens of a draft of so many are expected to be right."""
        first, following = self.rates
        return first * sum(following**place for place in range(num_tokens))

    def refuse(self) -> None:
        """Nothing of a draft was verified. What earlier ones came to counts less, as if it had been."""
        self._first *= _DECAY
        self._num_first *= _DECAY
        self._next *= _DECAY
        self._num_next *= _DECAY
        self.num_refused += 1

    def add(self, num_tokens: int, num_accepted: int) -> None:
        """Take in what became of a draft: `num_accepted` of its `num_tokens` >= 1 were right."""
        decay = _DECAY if self._shared is not None else _SHARED_DECAY
        self._first = decay * self._first + (num_accepted > 0)
        self._num_first = decay * self._num_first + 1
        self._next = decay * self._next + max(num_accepted - 1, 0)
        self._num_next = decay * self._num_next + (min(num_accepted + 1, num_tokens) - 1 if num_accepted else 0)
        self.num_refused = 0
        if self._shared is not None:
            self._shared.add(num_tokens, num_accepted)


@dataclass(slots=True)
class _Times:
    """The last times of steps of one size."""

    last: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_KEPT))

    @property
    def typical(self) -> float:
        """The lower quartile: a step is late for many reasons, and early for none."""
        return sorted(self.last)[len(self.last) // 4]


def _bucket(size: int) -> int:
    """Sizes that share their times have the same bucket, the least of them."""
    shift = max(size.bit_length() - 4, 0) if size >= _EXACT else 0
    return size >> shift << shift


class TokenTimes:
    """Seconds of steps by the number of their tokens, as far as they are measured.

    No size takes longer than a larger one, nor longer for a token than a smaller one, and sizes between measured ones
    are interpolated. Beyond the largest, a fourth more and up to 16, each token costs what the last ones before it did,
    and never more than in proportion. That is rather too little, since the time of a step bends upwards where
    memory no longer bounds it but arithmetic; so larger steps are tried where they may gain. Still more tokens cost in
    proportion.

    Parameters
    ----------
    base : int
        Tokens that each of these steps has, whose sizes are told apart by the others.
    """

    def __init__(self, base: int = 0) -> None:
        self._base = base
        self._times: dict[int, _Times] = {}  # by the bucket of the others
        self._known: tuple[FloatArray, FloatArray] | None = None

    def add(self, num_tokens: int, seconds: float) -> None:
        """Take in the time of a step."""
        self._times.setdefault(_bucket(num_tokens - self._base), _Times()).last.append(seconds)
        self._known = None

    def num_measured(self, num_tokens: int) -> int:
        """How many of the last times of a size are known."""
        times = self._times.get(_bucket(num_tokens - self._base))
        return 0 if times is None else len(times.last)

    @property
    def known(self) -> tuple[FloatArray, FloatArray]:
        """The measured sizes and their seconds, [num_sizes] each, once there is one."""
        if self._known is None:
            others = sorted(self._times)
            sizes = self._base + np.array(others, np.float64)
            seconds = np.array([self._times[bucket].typical for bucket in others])
            seconds = np.minimum.accumulate(seconds[::-1])[::-1]
            self._known = sizes, np.minimum.accumulate(seconds / sizes) * sizes
        return self._known

    def at(self, num_tokens: FloatArray) -> FloatArray:
        """Seconds for so many tokens, [len(num_tokens)]; without a measured size any, as only ratios count."""
        if not self._times:
            return np.ones(len(num_tokens))
        sizes, seconds = self.known
        slope = 0.0 if len(sizes) == 1 else float((seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]))
        near = max(1.25 * float(sizes[-1]), _TRIED)
        beyond = np.clip(num_tokens, sizes[-1], near) - sizes[-1]
        slope = min(slope, float(seconds[-1] / sizes[-1]))
        found: FloatArray = (np.interp(num_tokens, sizes, seconds) + slope * beyond) * np.maximum(1, num_tokens / near)
        return found


class StepTimes:
    """Seconds of a step, by its sequences and its drafted tokens, as far as they are measured.

    All steps together make one curve over their tokens (`TokenTimes`). Steps of so many sequences take some factor more
    or less, for instance by their attention, which is measured where such steps were and interpolated between. So a
    number of sequences that has not run yet is not explored anew.
    """

    def __init__(self) -> None:
        self._all = TokenTimes()
        self._own: dict[int, TokenTimes] = {}  # by sequences
        self._num_drafted: dict[int, int] = {}  # the same: steps with drafted tokens since the last one without

    def add(self, num_seqs: int, num_drafted: int, seconds: float) -> None:
        """Take in the time of a step."""
        key = _bucket(num_seqs)
        self._all.add(num_seqs + num_drafted, seconds)
        self._own.setdefault(key, TokenTimes(key)).add(key + num_drafted, seconds)
        self._num_drafted[key] = self._num_drafted.get(key, 0) + 1 if num_drafted else 0

    def curve(self, num_seqs: int, start: int, count: int) -> FloatArray:
        """Seconds of steps with `start`, .., `start + count` tokens besides one of each sequence, [count + 1]."""
        key = _bucket(num_seqs)
        num_tokens = key + np.arange(start, start + count + 1, dtype=np.float64)
        seconds = self._all.at(num_tokens)
        if key in self._own:
            sizes, measured = self._own[key].known
            seconds = seconds * np.interp(num_tokens, sizes, measured / self._all.at(sizes))
        curve: FloatArray = np.maximum.accumulate(seconds)
        return curve

    def is_due(self, num_seqs: int) -> bool:
        """Whether a step of so many sequences without drafted tokens is to be timed, as at first and now and then."""
        key = _bucket(num_seqs)
        own = self._own.get(key)
        return own is None or own.num_measured(key) < _NUM_FIRST or self._num_drafted[key] >= _UNDRAFTED_EVERY


class RoundTimes:
    """Seconds of a round of drafting, by the sequences that get a token of it.

    They grow as those of steps do (`TokenTimes`). The first rounds cost nothing here, since they are late for reasons
    of their own, and a length that seemed too dear would not be tried again.
    """

    def __init__(self) -> None:
        self._num_rounds = 0
        self._times = TokenTimes()

    def add(self, num_seqs: int, seconds: float) -> None:
        """Take in the time of a round."""
        self._num_rounds += 1
        self._times.add(num_seqs, seconds)

    def increments(self, num_seqs: int) -> FloatArray:
        """Seconds that each further sequence adds to a round, [num_seqs]."""
        if self._num_rounds <= _NUM_FIRST:
            return np.zeros(num_seqs)
        return np.diff(self._times.at(np.arange(1, num_seqs + 1, dtype=np.float64)), prepend=0)


@dataclass(slots=True)
class Offer:
    """A draft that a step may verify any beginning of.

    Attributes
    ----------
    acceptance : Acceptance
        The one of its sequence and source.
    num_tokens : int
        >= 1
    made_by : str or None
        The name of the drafter that makes it once its length is chosen; None: it is there.
    num_at_once : int
        Tokens at its beginning that need no round of drafting.
    """

    acceptance: Acceptance
    num_tokens: int
    made_by: str | None = None
    num_at_once: int = 0


class Lengths:
    """Chooses lengths for the drafts of each step, and whether drafters are asked at all.

    A step that may verify drafts waits for the results of the step before it, while other steps are made ahead
    (`infinilm.serving.engine_thread`). Where that loses more time than drafts have gained lately, drafters are asked in
    one step of 32.

    Now and then a draft that is not worth its time is verified nevertheless, at least by its first token, to see
    whether it would be worth it now. Such probes come at most once in 32 steps and take at most 0.4% of the time.
    """

    def __init__(self) -> None:
        self._times = StepTimes()
        self._plain: dict[int, _Times] = {}  # by sequences: of steps for which no drafter was asked
        self._sources: dict[Source, Acceptance] = {}
        self._rounds: dict[str, RoundTimes] = {}  # by name of the drafter
        self._gain = 0.1  # of a step with drafts over the same step without: tokens, less time, both in steps
        self._until_probe = 0  # steps
        self._until_trial = 0  # steps
        self._since_asked = 0  # steps
        self._rng = random.Random(0)

    def acceptance(self, source: Source) -> Acceptance:
        """A new average, for the drafts that a sequence gets from a source."""
        return Acceptance(self._sources.setdefault(source, Acceptance()))

    @property
    def rates(self) -> Mapping[Source, tuple[float, float]]:
        """By source, how probably the first token of a draft is right, and a next one, lately."""
        return {source: shared.rates for source, shared in self._sources.items()}

    def asks(self, num_seqs: int) -> bool:
        """Whether the drafters of a step of so many sequences are asked."""
        plain = self._plain.get(_bucket(num_seqs))
        if plain is None or self._since_asked >= _PROBE_EVERY or self._times.is_due(num_seqs):
            return True
        loss = float(self._times.curve(num_seqs, 0, 0)[0]) / plain.typical - 1
        return loss <= max(self._gain, _TOLERATED)

    def waits(self, num_seqs: int) -> bool:
        """Whether a step that could be made ahead waits for results, so that drafters can be asked.

        The first steps of so many sequences do not wait, since their time is what others are compared with.
        """
        plain = self._plain.get(_bucket(num_seqs))
        return plain is not None and len(plain.last) >= _NUM_KEPT // 2 and self.asks(num_seqs)

    def choose(self, num_seqs: int, offers: Sequence[Offer], num_prompt_tokens: int = 0) -> list[int]:
        """How many tokens of each draft to verify, [len(offers)].

        The first steps of so many sequences verify none, since their time is what others are compared with.

        Parameters
        ----------
        num_seqs : int
            Sequences in decode, with drafts or without.
        offers : sequence of Offer
        num_prompt_tokens : int
            Tokens of prompts that the step computes besides.
        """
        if self._times.is_due(num_seqs):
            return [0] * len(offers)
        counts = np.array([offer.num_tokens for offer in offers])
        rates = np.array([offer.acceptance.rates for offer in offers])
        places = np.arange(counts.max())
        # [len(offers), places]: the probability that this token and all before it are right, so falling in each row.
        gains = rates[:, :1] * rates[:, 1:] ** places
        seconds = self._times.curve(num_seqs, num_prompt_tokens, int(counts.sum()))
        rate, order = np.zeros(1), np.zeros(0, np.intp)
        for lengths_at_most in self._longest(offers, counts):
            # [number of tokens]: the most probable first, so that those of a draft are in order.
            tokens = np.where(places < lengths_at_most[:, None], gains, 0)
            found = np.argsort(-tokens, axis=None, kind="stable")[: int(lengths_at_most.sum())]
            gained = np.concatenate(([0.0], np.cumsum(tokens.ravel()[found])))
            took = seconds[: len(gained)] + self._drafting(offers, found // len(places), found % len(places))
            found_rate = (num_seqs + gained) / took
            found_rate[0] *= _WORTH
            if found_rate.max() > rate.max():
                rate, order = found_rate, found
        best = int(np.argmax(rate))
        self._until_trial -= 1
        if best and self._until_trial <= 0:
            best = self._rng.choice(np.flatnonzero(rate >= _TRY_ABOVE * rate[best]).tolist())
            self._until_trial = _TRY_EVERY
        lengths: list[int] = np.bincount(order[:best] // len(places), minlength=len(offers)).tolist()
        if 0 in lengths:
            self._probe(lengths, offers, seconds)
        return lengths

    def _longest(self, offers: Sequence[Offer], counts: IndexArray) -> Iterator[IndexArray]:
        """What lengths are chosen below, [len(offers)] each: all of `counts`, and with fewer rounds of drafting.

        The first token of a round takes most of its time, so a choice token by token would not see what it gains.
        """
        is_made = np.array([offer.made_by in self._rounds for offer in offers])
        yield counts
        most = int(counts[is_made].max(initial=0))
        while most:
            most //= 2
            yield np.where(is_made, np.minimum(counts, most), counts)

    def _drafting(self, offers: Sequence[Offer], drafts: IndexArray, places: IndexArray) -> FloatArray:
        """Seconds of making the first of these tokens, none to all of them, [len(drafts) + 1].

        `drafts`: which offer each token belongs to, `places`: where in its draft it is, [number of tokens] both.
        """
        added = np.zeros(len(drafts) + 1)
        for name in {offer.made_by for offer in offers if offer.made_by is not None} & self._rounds.keys():
            num_at_once = np.array([o.num_at_once if o.made_by == name else len(places) for o in offers])
            needs_round = places >= num_at_once[drafts]
            increments = self._rounds[name].increments(len(offers))
            for place in np.unique(places[needs_round]).tolist():
                tokens = np.flatnonzero(needs_round & (places == place))
                added[tokens + 1] = increments[: len(tokens)]
        return np.cumsum(added)

    def _probe(self, lengths: list[int], offers: Sequence[Offer], seconds: FloatArray) -> None:
        """Verify the first tokens of refused drafts, if it is time to: of those first that were refused most often."""
        self._until_probe -= 1
        refused = [i for i, length in enumerate(lengths) if length == 0]
        if self._until_probe > 0:
            for i in refused:
                offers[i].acceptance.refuse()
            return
        begin = sum(lengths)
        refused.sort(key=lambda i: -offers[i].acceptance.num_refused)
        first = np.zeros(len(refused), np.intp)
        seconds = seconds[begin : begin + len(refused) + 1] + self._drafting(offers, np.array(refused), first)
        affordable = int(np.searchsorted(seconds, (1 + _PROBE_COST) * seconds[0], "right")) - 1
        num_probed = min(max(affordable, 1), len(refused))
        for i in refused[:num_probed]:
            lengths[i] = 1
        cost = float(seconds[num_probed] / seconds[0]) - 1
        self._until_probe = max(_PROBE_EVERY, int(cost / _PROBE_SHARE))

    def record_round(self, name: str, num_seqs: int, seconds: float) -> None:
        """Take in a round of the drafter of this name, which has made a token more for so many sequences."""
        self._rounds.setdefault(name, RoundTimes()).add(num_seqs, seconds)

    def record(
        self, num_seqs: int, num_drafted: int | None, num_tokens: int, seconds: float, drafting: float = 0.0
    ) -> None:
        """Take in a step that had no prompts.

        Parameters
        ----------
        num_seqs : int
            Sequences in decode.
        num_drafted : int or None
            Tokens of drafts that it verified, 0 if drafters had nothing; None: they were not asked.
        num_tokens : int
            Tokens that came of it.
        seconds : float
            From the results of the step before to its own.
        drafting : float
            The part of them that rounds of drafting took.
        """
        if num_drafted is None:
            self._since_asked += 1
            self._until_probe -= 1
            self._plain.setdefault(_bucket(num_seqs), _Times()).last.append(seconds)
            return
        self._since_asked = 0
        self._times.add(num_seqs, num_drafted, seconds - drafting)
        gain = num_tokens / num_seqs - 1
        if num_drafted:
            curve = self._times.curve(num_seqs, 0, num_drafted)
            gain -= float((curve[-1] + drafting) / curve[0]) - 1
        self._gain += min(_RECENT * num_seqs, _MOST_RECENT) * (gain - self._gain)
