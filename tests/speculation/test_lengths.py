"""Lengths of drafts by simulation: an engine whose times and texts are known, against the best that could be chosen."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from infinilm.speculation.lengths import Acceptance, Lengths, Offer, StepTimes

MOST = 15
Seconds = Callable[[int, int], float]  # of sequences and drafted tokens


def flat(num_seqs: int, num_drafted: int) -> float:
    """Bound by memory: a token more costs next to nothing."""
    return 0.05 * (1 + 0.02 * (num_seqs + num_drafted - 1))


def steep(num_seqs: int, num_drafted: int) -> float:
    """Bound by arithmetic: a token costs what a token costs."""
    return 0.05 * (num_seqs + num_drafted)


def edged(num_seqs: int, num_drafted: int) -> float:
    """The first token more is dear, and those behind it fill up a tile."""
    return 0.05 * (1 + 0.9 * -(-(num_seqs + num_drafted - 1) // 8))


class Simulation:
    """Sequences whose drafts are right with known probabilities, in an engine whose times are known but for noise.

    `rates`: of each sequence that the first token of a draft is right, and a next one; None: it has no drafts.
    `rounds`: the seconds in which a token is drafted for so many sequences, once lengths are chosen; None: drafts are
    there. `num_at_once`: tokens of a draft that need no round.
    """

    def __init__(
        self,
        seconds: Seconds,
        rates: list[tuple[float, float] | None],
        noise: float = 0.0,
        rounds: Callable[[int], float] | None = None,
        num_at_once: int = 0,
    ) -> None:
        self.rounds, self.num_at_once = rounds, num_at_once
        self.lengths, self.seconds, self.rates, self.noise = Lengths(), seconds, rates, noise
        self.rng = random.Random(0)
        self.acceptance = [self.lengths.acceptance(("test", 0)) for _ in rates]
        self.num_tokens, self.time, self.waits_cost, self.has_draft = 0, 0.0, 0.0, 1.0
        self.drafted: list[int] = []

    def accepted(self, rates: tuple[float, float], length: int) -> int:
        count = 0
        while count < length and self.rng.random() < rates[count > 0]:
            count += 1
        return count

    def step(self) -> None:
        """One step, made ahead of the results if lengths do not wait for them, which saves `waits_cost` of it."""
        num_seqs, lengths = len(self.rates), self.lengths
        asked = [i for i, rates in enumerate(self.rates) if rates is not None and self.rng.random() < self.has_draft]
        waits = lengths.waits(num_seqs) if self.waits_cost else lengths.asks(num_seqs)
        chosen: list[int] = []
        if waits and asked:
            made_by = None if self.rounds is None else "model"
            offers = [Offer(self.acceptance[i], MOST, made_by, self.num_at_once) for i in asked]
            chosen = lengths.choose(num_seqs, offers)
            assert len(chosen) == len(asked)
            assert all(0 <= length <= MOST for length in chosen)
        num_tokens = num_seqs
        for i, length in zip(asked, chosen, strict=False):
            if length:
                rates = self.rates[i]
                assert rates is not None
                count = self.accepted(rates, length)
                self.acceptance[i].add(length, count)
                num_tokens += count
        drafting = 0.0
        for place in range(self.num_at_once, max(chosen, default=0)):
            assert self.rounds is not None or not made_by
            if self.rounds is not None:
                count = sum(length > place for length in chosen)
                lengths.record_round("model", count, took := self.rounds(count))
                drafting += took
        seconds = self.seconds(num_seqs, sum(chosen)) * (1 + self.waits_cost * waits) + drafting
        self.num_tokens, self.time = self.num_tokens + num_tokens, self.time + seconds
        self.drafted.append(sum(chosen))
        if self.rng.random() < self.noise:
            seconds *= self.rng.choice([1.3, 2, 10])
        lengths.record(num_seqs, sum(chosen) if waits else None, num_tokens, seconds, drafting)

    def rate(self, num_steps: int) -> float:
        """Tokens a second of so many steps, by the clock of the engine without the noise that is measured."""
        self.num_tokens, self.time = 0, 0.0
        for _ in range(num_steps):
            self.step()
        return self.num_tokens / self.time


def best_rate(seconds: Seconds, rates: list[tuple[float, float] | None]) -> float:
    """The most tokens a second that lengths could give which know everything."""
    gains = sorted((r[0] * r[1] ** k for r in rates if r is not None for k in range(MOST)), reverse=True)
    tokens = np.concatenate(([0.0], np.cumsum(gains))) + len(rates)
    return max(float(count) / seconds(len(rates), drafted) for drafted, count in enumerate(tokens))


@pytest.mark.parametrize("noise", [0.0, 0.15])
@pytest.mark.parametrize("seconds", [flat, steep, edged])
@pytest.mark.parametrize(
    "rates",
    [
        [(0.95, 0.98)],
        [(0.6, 0.8)],
        [(0.05, 0.5)],
        [(0.95, 0.98), (0.05, 0.2), None, None],
        [(0.3, 0.7)] * 8,
        [(0.02, 0.1)] * 32,
        [(0.9, 0.95)] * 32,
    ],
    ids=["copies", "half", "never", "mixed", "some", "none of many", "all of many"],
)
def test_rates_come_near_the_best(seconds: Seconds, rates: list[Any], noise: float) -> None:
    simulation = Simulation(seconds, rates, noise)
    simulation.rate(300)
    best, plain = best_rate(seconds, rates), len(rates) / seconds(len(rates), 0)
    found = simulation.rate(500)
    assert found > (0.88 if noise else 0.92) * best
    assert found > (0.95 if noise else 0.98) * plain


def best_rate_of_rounds(simulation: Simulation) -> float:
    """As `best_rate` for sequences that are all alike, whose drafts are made by rounds: one length of all, or of some.

    `Simulation.rounds` is affine here, so that it is best for all that draft to have the same length, or one less.
    """
    assert simulation.rounds is not None
    num_seqs, found = len(simulation.rates), 0.0
    (rates,) = set(simulation.rates)
    assert rates is not None
    for num_drafting in range(num_seqs + 1):
        tokens, seconds = float(num_seqs), 0.0
        for length in range(MOST + 1):
            if length:
                tokens += num_drafting * rates[0] * rates[1] ** (length - 1)
                seconds += simulation.rounds(num_drafting) * (length > simulation.num_at_once)
            total = seconds + simulation.seconds(num_seqs, length * num_drafting)
            found = max(found, tokens / total)
    return found


@pytest.mark.parametrize("num_at_once", [0, 1])
@pytest.mark.parametrize("share", [0.05, 0.3])
@pytest.mark.parametrize("seconds", [flat, steep, edged])
@pytest.mark.parametrize("rates", [[(0.95, 0.95)], [(0.1, 0.5)], [(0.75, 0.75)] * 8], ids=["copies", "never", "eight"])
def test_drafts_that_cost_time(seconds: Seconds, share: float, rates: list[Any], num_at_once: int) -> None:
    """`share`: of the time of a step that a round takes.

    Where a first token is dear, probes are rare, and 250 steps are not always enough to learn that drafts are right.
    """

    def rounds(num_seqs: int) -> float:
        return share * seconds(1, 0) * (0.9 + 0.1 * num_seqs)

    simulation = Simulation(seconds, rates, 0.05, rounds, num_at_once)
    simulation.rate(250)
    found = simulation.rate(350)
    assert found > 0.8 * best_rate_of_rounds(simulation)
    assert found > 0.96 * len(rates) / seconds(len(rates), 0)


def test_rounds_that_are_late_at_first_are_tried_again() -> None:
    late = iter([50.0] * 4)
    simulation = Simulation(flat, [(0.9, 0.9)], rounds=lambda num_seqs: next(late, 0.001))
    simulation.rate(300)
    assert simulation.rate(500) > 0.9 * best_rate_of_rounds(simulation)


def test_lengths_of_drafts_that_cost_time_and_of_others() -> None:
    """A draft that is there is verified, and one that would take longer to make than a step is not made."""
    lengths = Lengths()
    for _ in range(4):
        lengths.record(2, 0, 2, 0.1)
    for _ in range(8):
        lengths.record_round("model", 1, 0.2)
    free, dear = lengths.acceptance(("lookup", 5)), lengths.acceptance(("model", 0))
    for _ in range(20):
        free.add(8, 8)
        dear.add(8, 8)
    for _ in range(100):
        lengths.choose(2, [Offer(free, 8)])
    chosen = [lengths.choose(2, [Offer(free, 8), Offer(dear, 8, "model")]) for _ in range(20)]
    assert [8, 0] in chosen
    assert sum(length > 0 for _, length in chosen) <= 2, "a trial"


@pytest.mark.parametrize("num_seqs", [1, 8, 32])
def test_trying_costs_little(num_seqs: int) -> None:
    """Drafts that are always wrong, from the first step on, where each of them costs as much as a token."""
    simulation = Simulation(steep, [(0.0, 0.0)] * num_seqs)
    assert simulation.rate(1000) > 0.95 * num_seqs / steep(num_seqs, 0)
    assert simulation.rate(1000) > 0.98 * num_seqs / steep(num_seqs, 0)


def test_a_change_is_noticed() -> None:
    """Drafts that were of no use for long, and then are right, as where an answer begins to quote."""
    simulation = Simulation(edged, [(0.0, 0.0)] * 4)
    simulation.rate(1000)
    simulation.rates = [(0.97, 0.97)] * 4
    simulation.rate(1500)
    assert simulation.rate(500) > 0.9 * best_rate(edged, simulation.rates)


def test_drafters_are_asked_until_it_is_known_what_that_costs() -> None:
    """Steps that were made ahead tell nothing of it."""
    lengths, offer = Lengths(), Offer(Acceptance(), MOST)
    assert not lengths.waits(2)
    for _ in range(4):
        lengths.record(2, None, 2, 0.004)
    while lengths.choose(2, [offer]) == [0]:
        assert lengths.waits(2)
        lengths.record(2, 0, 2, 0.005)
    assert not lengths.waits(2), "a fourth more time is more than drafts are known to gain"
    for _ in range(32):
        lengths.record(2, None, 2, 0.004)
    assert lengths.waits(2), "one step of 32 asks"


@pytest.mark.parametrize("cost", [0.05, 0.3])
def test_steps_are_made_ahead_where_drafts_gain_nothing(cost: float) -> None:
    simulation = Simulation(flat, [(0.0, 0.0)] * 2)
    simulation.waits_cost, simulation.has_draft = cost, 0.2
    simulation.rate(1000)
    assert simulation.rate(2000) > 0.98 * 2 / flat(2, 0)
    simulation.rates, simulation.has_draft = [(0.95, 0.95)] * 2, 1.0
    simulation.rate(300)
    assert simulation.rate(500) > 0.93 * best_rate(flat, simulation.rates) / (1 + cost)


def bent(num_seqs: int, num_drafted: int) -> float:
    """Bound by memory up to some eight tokens, and then by arithmetic."""
    num_tokens = num_seqs + num_drafted
    return 0.03 * max(1 + 0.01 * num_tokens, 0.12 * num_tokens)


@pytest.mark.parametrize("cost", [1e-9, 0.03])
def test_a_new_number_of_sequences_is_not_explored_anew(cost: float) -> None:
    """Behind code edits of one sequence, prose by other numbers of them, in which few drafts are right."""
    simulation = Simulation(bent, [(0.9, 0.95)], 0.05)
    simulation.waits_cost = cost
    simulation.rate(200)
    simulation.has_draft = 0.25
    for num_seqs in (8, 32, 24, 12):
        simulation.rates = [(0.15, 0.37)] * num_seqs
        simulation.acceptance = [simulation.lengths.acceptance(("prose", 0)) for _ in range(num_seqs)]
        assert simulation.rate(64) > 0.985 * num_seqs / bent(num_seqs, 0)


def test_times_of_other_numbers_of_sequences() -> None:
    """Tokens cost what they cost elsewhere, times what such steps take more."""
    times = StepTimes()
    for num_drafted in range(16):
        times.add(1, num_drafted, 1.0 + num_drafted)
    np.testing.assert_allclose(times.curve(4, 0, 8), np.arange(4.0, 13))
    times.add(4, 0, 8.0)
    assert times.curve(4, 0, 8)[0] == 8, "its own"
    np.testing.assert_allclose(times.curve(1, 0, 2), [1, 2, 3])


@given(
    st.lists(st.tuples(st.integers(0, 80), st.floats(1e-4, 10)), max_size=40),
    st.integers(1, 100),
    st.integers(0, 300),
    st.integers(0, 300),
)
def test_times_never_fall(measured: list[tuple[int, float]], num_seqs: int, start: int, count: int) -> None:
    times = StepTimes()
    for num_drafted, seconds in measured:
        times.add(num_seqs, num_drafted, seconds)
    curve = times.curve(num_seqs, start, count)
    assert curve.shape == (count + 1,)
    assert (curve > 0).all()
    assert (np.diff(curve) >= -1e-12 * curve[1:]).all()


def test_times_are_those_that_were_measured() -> None:
    times = StepTimes()
    for seconds in (1.0, 9.0, 1.0, 30.0):
        times.add(2, 0, seconds)
        times.add(2, 4, 2 * seconds)
        times.add(2, 20, 4 * seconds)
    np.testing.assert_allclose(times.curve(2, 0, 4), [1, 1.25, 1.5, 1.75, 2])
    # 22 tokens take 4. Up to a fourth more cost what the last 16 did, and still more cost in proportion.
    np.testing.assert_allclose(times.curve(2, 20, 22)[[0, 4, -1]], [4, 4.5, (4 + 5.5 / 8) * 44 / 27.5])
    times.add(2, 8, 0.5)
    assert (times.curve(2, 0, 8) == 0.5).all(), "no step takes longer than a larger one"


@given(st.lists(st.tuples(st.integers(1, 15), st.integers(0, 15)), max_size=50))
@settings(max_examples=50)
def test_rates_are_probabilities(drafts: list[tuple[int, int]]) -> None:
    shared = Acceptance()
    one, other = Acceptance(shared), Acceptance(shared)
    for num_tokens, num_accepted in drafts:
        one.add(num_tokens, min(num_accepted, num_tokens))
        assert all(0 < rate < 1 for acceptance in (shared, one, other) for rate in acceptance.rates)
    if drafts and all(num_accepted == 0 for _, num_accepted in drafts):
        assert one.rates[0] < other.rates[0] < Acceptance().rates[0]
