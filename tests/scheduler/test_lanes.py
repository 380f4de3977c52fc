"""Lanes: a step computes sequences of one lane, and no token depends on which."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from infinilm.scheduling import scheduler as sched
from infinilm.scheduling.sequence import Lane, Sequence
from scheduler.simulation import Engine, check_blocks, check_empty, make_sequence, tokens_alone, without_core


def bulk(prompt: list[int]) -> Sequence:
    return make_sequence(prompt, 1, collect_logits=True, lane=Lane.BULK)


class LaneEngine(Engine):
    """Chooses what lane each step is of, and how many tokens of prompts it may have."""

    def lane_step(self, lane: Lane, most: int | None) -> tuple[Any, Any]:
        step = self.scheduler.schedule(float(self.num_steps + 1), lane=lane, max_prompt_tokens=most)
        assert step is not None, "there is work, and no step"
        self.num_steps += 1
        check_blocks(self.scheduler)
        return step, self.forward(step)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_steps_of_lanes(data: st.DataObject) -> None:
    """With any order of lanes and sizes of steps, in pools so small that sequences of one lane push out the other.

    Steps that a query may interrupt are taken back now and then: each text has one such step at most.
    """
    with pytest.MonkeyPatch.context() as patch:
        without_core(patch)
        whole = data.draw(st.booleans())
        scheduler = sched.Scheduler(
            data.draw(st.integers(6, 30)),
            4,
            max_num_seqs=data.draw(st.integers(1, 4)),
            max_model_len=24,
            max_num_batched_tokens=24,
            whole_prompts=whole,
        )
        asked: list[Lane | None] = []  # the lanes of which sequences were looked for, one after the other
        choose = scheduler._choose

        def look(choice: Any, now: float, lane: Lane | None, most: int | None) -> bool:
            asked.append(lane)
            return choose(choice, now, lane, most)

        patch.setattr(scheduler, "_choose", look)
        engine = LaneEngine(scheduler)
        answers: list[tuple[Sequence, list[int]]] = []
        collected: dict[Sequence, int] = {}
        interrupted: set[Sequence] = set()
        arrivals = data.draw(st.lists(st.tuples(st.booleans(), st.integers(1, 20)), min_size=1, max_size=8))
        while arrivals or scheduler.has_work:
            if arrivals and (not scheduler.has_work or data.draw(st.booleans())):
                is_bulk, length = arrivals.pop()
                prompt = [(7 * length + i) % 97 for i in range(length)]
                sequence = bulk(prompt) if is_bulk or whole else make_sequence(prompt, min(4, 24 - length))
                if sequence.collect_logits:
                    sequence.lane = data.draw(st.sampled_from(Lane)) if whole else Lane.BULK
                    collected[sequence] = 0
                else:
                    answers.append((sequence, prompt))
                scheduler.add(sequence)
                continue
            lanes = scheduler.lanes
            lane, most = data.draw(st.sampled_from(lanes)), data.draw(st.none() | st.integers(1, 9))
            step, output = engine.lane_step(lane, most)
            others = {sequence.lane for sequence in step.sequences}
            assert others == {lane} or asked[-1] is None, "a step of one lane, or of all where that lane cannot run"
            if scheduler.may_interrupt(step) and data.draw(st.booleans()):
                assert whole and others == {Lane.BULK} and not interrupted.intersection(step.sequences)
                interrupted.update(step.sequences)
                for gone in [one for one in step.sequences if data.draw(st.booleans())]:  # cancelled meanwhile
                    scheduler.remove(gone)
                    del collected[gone]
                scheduler.undo(step)
                continue
            if most is not None and lane in others and not whole:
                # A prompt with one token left is computed like a token that was sampled, whatever the limit is.
                assert step.num_prompt_tokens < most + len(step.sequences)
            for sequence, row, _ in scheduler.update(step, output, float(engine.num_steps)).request_tokens:
                if len(sequence.output_token_ids) >= (sequence.params.max_tokens or 0):
                    scheduler.remove(sequence)
                assert row >= 0
            for sequence, position, a, b in step.logits_rows:  # one that was preempted begins anew
                collected[sequence] = max(collected[sequence], position + b - a)
                if collected[sequence] == len(sequence.prompt_token_ids):
                    scheduler.remove(sequence)
        check_empty(scheduler)
        assert not scheduler.lanes
        for sequence, prompt in answers:
            assert sequence.output_token_ids == tokens_alone(prompt, len(sequence.output_token_ids))


def test_a_query_overtakes_bulk_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also prompts that wait in front of it, and one that is half done; what came first is not forgotten."""
    without_core(monkeypatch)
    scheduler = sched.Scheduler(64, 4, max_num_seqs=4, max_model_len=64, max_num_batched_tokens=64)
    engine = LaneEngine(scheduler)
    passages = [bulk(list(range(i, i + 30))) for i in range(3)]
    for passage in passages:
        scheduler.add(passage)
    step, output = engine.lane_step(Lane.BULK, 8)
    assert step.sequences == passages[:1] and step.num_prompt_tokens == 8
    scheduler.update(step, output, 1.0)
    query = make_sequence([1, 2, 3], 1, collect_logits=True)
    scheduler.add(query)
    assert set(scheduler.lanes) == set(Lane)
    step, output = engine.lane_step(Lane.INTERACTIVE, 8)
    assert step.sequences == [query]
    scheduler.update(step, output, 2.0)
    scheduler.remove(query)
    assert scheduler.lanes == (Lane.BULK,)
    step, _ = engine.lane_step(Lane.BULK, 8)
    assert step.sequences == passages[:1] and int(step.starts[0]) == 8


def test_without_lanes_the_order_is_that_of_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    without_core(monkeypatch)
    scheduler = sched.Scheduler(64, 4, max_num_seqs=4, max_model_len=64, max_num_batched_tokens=64)
    sequences = [bulk([1, 2]), make_sequence([3, 4], 2), bulk([5, 6])]
    for sequence in sequences:
        scheduler.add(sequence)
    step = scheduler.schedule(1.0)
    assert step is not None and step.sequences == sequences
    assert np.array_equal(step.starts, [0, 0, 0]) and isinstance(step.batch, SimpleNamespace)
