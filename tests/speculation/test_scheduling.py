"""What the scheduler does with drafts, on an engine that knows what every slot of the cache must hold."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scheduler.simulation import (
    VOCAB_SIZE,
    Engine,
    check_blocks,
    check_empty,
    has_ended,
    make_sequence,
    next_token,
    prefixes_of,
    tokens_alone,
    without_core,
)

from infinilm.scheduling.scheduler import Scheduler
from infinilm.scheduling.sequence import Sequence
from infinilm.scheduling.states import plan_states
from infinilm.scheduling.steps import Step
from infinilm.speculation import MAX_DRAFT_TOKENS


class Oracle:
    """Drafts what will come, and anything else at every `wrong_every`th place; 0: never."""

    name = "oracle"

    def __init__(self, wrong_every: int, length: int) -> None:
        self.wrong_every, self.length = wrong_every, length
        self.tokens: list[int] = []

    def update(self, token_ids: Any) -> None:
        self.tokens += token_ids

    def draft(self, limit: int) -> list[int]:
        prefix = prefixes_of(self.tokens)[-1]
        tokens = [next_token(prefix), *tokens_alone([*self.tokens, next_token(prefix)], limit)][: self.length]
        for i in range(len(tokens)):
            if self.wrong_every and (len(self.tokens) + i) % self.wrong_every == 0:
                tokens[i] = (tokens[i] + 1) % VOCAB_SIZE
        return tokens[:limit]


class DraftingEngine(Engine):
    """Knows, too, which tokens every state has seen, of a model that keeps states."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self.states: dict[int, list[int]] = {-1: []}
        self.logs: dict[int, list[int]] = {-1: []}

    def forward(self, step: Step) -> Any:
        if hasattr(step.batch, "state_in"):
            self._go_on(step, step.batch)
        return super().forward(step)

    def _go_on(self, step: Step, batch: Any) -> None:
        """A state goes on from the past of its sequence, first through its log, and sees no draft."""
        starts, counts = step.starts.tolist(), np.diff(batch.cu_seqlens_q)
        seen = getattr(batch, "state_tokens", counts)
        replayed = getattr(batch, "num_replayed", np.zeros_like(counts)).tolist()
        assert hasattr(batch, "state_tokens") == (step.drafts is not None)
        assert hasattr(batch, "num_replayed") == (step.drafts is not None or any(replayed))
        assert (seen >= 1).all() and (counts - MAX_DRAFT_TOKENS <= seen).all() and (seen <= counts).all()
        written: dict[int, list[int]] = {}
        for i, (before, after) in enumerate(zip(batch.state_in.tolist(), batch.state_out.tolist(), strict=True)):
            own = [*step.sequences[i].prompt_token_ids.tolist(), *step.sequences[i].output_token_ids]
            assert 0 <= replayed[i] <= len(self.logs[before])
            assert self.states[before] + self.logs[before][: replayed[i]] == own[: starts[i]]
            drafts = batch.input_ids[batch.cu_seqlens_q[i] + seen[i] : batch.cu_seqlens_q[i + 1]]
            self.logs[after] = drafts.tolist()
            written[after] = own[: starts[i] + seen[i]]
            assert after == before or after not in batch.state_in
        self.states |= written

    def update(self, step: Step, output: Any) -> list[tuple[Sequence, int, int]]:
        now = float(self.num_steps)
        sampled = self.scheduler.update(step, output, now)
        for sequence, _, token_id in sampled.appended_later:
            if not has_ended(sequence):
                sequence.append(token_id, now)
        for sequence in dict.fromkeys(step.samples):
            running, blocks, slot = self.scheduler._running, self.scheduler.blocks, sequence.slot
            if slot >= 0:
                assert len(sequence.token_times) == len(sequence.output_token_ids)
                behind = running.num_tokens[slot] - running.num_computed[slot]
                assert behind == 1
                assert blocks.lengths[slot] == blocks.blocks_for(int(running.num_tokens[slot]) - 1)
        check_blocks(self.scheduler)
        return sampled.request_tokens


SETTINGS = st.fixed_dictionaries(
    {
        "num_blocks": st.sampled_from([12, 20, 100]),
        "max_num_seqs": st.integers(1, 5),
        "max_num_batched_tokens": st.sampled_from([1, 8, 100]),
        "enable_prefix_caching": st.booleans(),
        "sliding_window": st.sampled_from([0, 5]),
        "snapshot_interval": st.sampled_from([0, 0, 4, 8]),  # 0: the model keeps no states
    }
)


@settings(max_examples=max(150, settings.default.max_examples))
@given(chosen=SETTINGS, seed=st.integers(0, 2**32), is_plain=st.booleans())
def test_tokens_are_those_without_drafts(chosen: dict[str, Any], seed: int, is_plain: bool) -> None:
    rng = random.Random(seed)
    oracles: list[Oracle] = []

    def make(_sequence: Any) -> Oracle | None:
        oracles.append(Oracle(rng.choice([0, 0, 1, 2, 3, 7]), rng.choice([1, 3, 20])))
        return oracles[-1] if rng.random() < 0.9 else None

    with pytest.MonkeyPatch.context() as patch:
        without_core(patch)
        num_states = plan_states(chosen["max_num_seqs"], with_snapshots=True) if chosen["snapshot_interval"] else 0
        chosen = {"block_size": 4, "max_model_len": 48, "num_states": num_states, **chosen}
        engine = DraftingEngine(Scheduler(**chosen, drafters=[make], vocab_size=VOCAB_SIZE))
        sequences = []
        for _ in range(rng.randint(1, 8)):
            prompt = [rng.randrange(3) for _ in range(rng.randint(1, 20))]
            ends = frozenset(rng.sample(range(VOCAB_SIZE), 3))
            sequences.append(make_sequence(prompt, rng.randint(1, 28), is_plain=is_plain, stop_token_ids=ends))
            engine.scheduler.add(sequences[-1])
        while engine.scheduler.has_work:
            engine.step()
            for sequence in engine.scheduler.running.copy():
                if has_ended(sequence):
                    engine.scheduler.remove(sequence)
        check_empty(engine.scheduler)
    for sequence in sequences:
        expected = tokens_alone(sequence.prompt_token_ids.tolist(), sequence.params.max_tokens or 0)
        ends_at = [i for i, token_id in enumerate(expected) if token_id in sequence.stop_token_ids]
        assert sequence.output_token_ids == expected[: min(ends_at, default=len(expected)) + 1]


def run(scheduler: Scheduler, *sequences: Sequence, engine: DraftingEngine | None = None) -> list[Step]:
    """Run sequences to their ends; returns all steps."""
    engine, steps = engine or DraftingEngine(scheduler), []
    for sequence in sequences:
        scheduler.add(sequence)
    while scheduler.has_work:
        step = scheduler.schedule(0.0)
        assert step is not None
        steps.append(step)
        engine.update(step, engine.forward(step))
        for sequence in scheduler.running.copy():
            if has_ended(sequence):
                scheduler.remove(sequence)
    return steps


def make_scheduler(**more: Any) -> Scheduler:
    defaults: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 128, "max_num_batched_tokens": 64}
    return Scheduler(**{"num_blocks": 100, "block_size": 4, **defaults, "vocab_size": VOCAB_SIZE, **more})


def test_drafts_take_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    without_core(monkeypatch)
    scheduler = make_scheduler(drafters=[lambda _: Oracle(0, 99)], max_num_batched_tokens=10)
    steps = run(scheduler, make_sequence([1, 2], 40, is_plain=True), make_sequence([3] * 25, 40, is_plain=True))
    sizes = [len(step.batch.input_ids) for step in steps]
    assert max(sizes) == 10
    assert steps[1].num_prompt_tokens == 9 and steps[1].drafts is None, "prompts come before drafts"
    assert max(sum(s is step.samples[0] for s in step.samples) for step in steps) == 10


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 17, 18, 40])
def test_drafts_end_with_the_sequence(monkeypatch: pytest.MonkeyPatch, max_tokens: int) -> None:
    """The last token is drawn and never computed."""
    without_core(monkeypatch)
    scheduler = make_scheduler(drafters=[lambda _: Oracle(0, 99)])
    steps = run(scheduler, make_sequence([1, 2], max_tokens, is_plain=True))
    assert [step.batch.context_lens.tolist() for step in steps][-1] == [1 + max_tokens]
    assert len(steps) == 1 + -(-(max_tokens - 1) // (MAX_DRAFT_TOKENS + 1))


def test_only_verified_tokens_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later prompt that goes on with what was drafted wrongly finds the blocks before that alone."""
    without_core(monkeypatch)
    scheduler = make_scheduler(drafters=[lambda _: Oracle(1, 99)])
    answer, engine = tokens_alone([1, 2], 30), DraftingEngine(scheduler)
    run(scheduler, make_sequence([1, 2], 30, is_plain=True), engine=engine)
    wrong = [1, 2, *answer[:9], (answer[9] + 1) % VOCAB_SIZE, *answer[10:]]
    for prompt, cached in (([1, 2, *answer], 28), (wrong, 8)):
        sequence = make_sequence(prompt, 1, is_plain=True)
        run(scheduler, sequence, engine=engine)
        assert sequence.cached_tokens == cached
    assert scheduler.stats.num_draft_tokens > 0 == sum(scheduler.stats.accepted_at)


def test_nobody_is_preempted_for_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    without_core(monkeypatch)
    scheduler = make_scheduler(drafters=[lambda _: Oracle(1, 99)], num_blocks=10, max_num_seqs=2)
    run(scheduler, *(make_sequence([i] * 4, 17, is_plain=True) for i in range(2)))
    assert scheduler.num_preemptions == 0
    assert scheduler.stats.num_draft_tokens > 0


def test_states_replay_drafts_a_step_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with states computes the rows that others do, and names what was right of the draft before."""
    without_core(monkeypatch)
    runs = []
    for states in ({}, {"num_states": 8, "snapshot_interval": 64}):
        scheduler = make_scheduler(drafters=[lambda _: Oracle(5, 7)], **states)
        runs.append(run(scheduler, make_sequence([1, 2], 30, is_plain=True)))
    plain, steps = runs
    assert [step.batch.input_ids.tolist() for step in steps] == [step.batch.input_ids.tolist() for step in plain]
    num_accepted = [after.starts[0] - before.starts[0] - 1 for before, after in itertools.pairwise(steps[1:])]
    assert [step.batch.num_replayed[0] for step in steps[2:]] == num_accepted
    assert sum(num_accepted) > 10


def test_an_aborted_step_with_drafts_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    without_core(monkeypatch)
    scheduler = make_scheduler(drafters=[lambda _: Oracle(0, 99)])
    engine = DraftingEngine(scheduler)
    sequence = make_sequence([1, 2], 40, is_plain=True)
    scheduler.add(sequence)
    engine.step()
    step = scheduler.schedule(1.0)
    assert step is not None and step.drafts is not None
    scheduler.undo(step)
    scheduler.remove(sequence)
    check_empty(scheduler)
    np.testing.assert_array_equal(scheduler.blocks.lengths, 0)
