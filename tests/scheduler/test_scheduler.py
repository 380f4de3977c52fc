"""The scheduler and its blocks alone: whatever arrives, every sequence reads its own prefix and nothing leaks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from covering import covering_array

import infinilm.scheduling.scheduler as sched
from infinilm import CacheFullError
from infinilm.scheduling.block_group import blocks_of_window
from infinilm.scheduling.block_manager import BlockManager
from infinilm.scheduling.sequence import Sequence
from scheduler.simulation import (
    VOCAB_SIZE,
    Engine,
    check_blocks,
    check_empty,
    has_ended,
    make_sequence,
    tokens_alone,
    without_core,
)

MAX_LEN = 60


@pytest.fixture(autouse=True)
def plain_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    without_core(monkeypatch)


def make_scheduler(num_blocks: int = 40, block_size: int = 4, **settings: Any) -> sched.Scheduler:
    defaults = {"max_num_seqs": 6, "max_model_len": MAX_LEN, "max_num_batched_tokens": 16}
    return sched.Scheduler(num_blocks, block_size, **(defaults | settings))


def random_prompt(rng: np.random.Generator, bases: list[list[int]]) -> list[int]:
    base = bases[rng.integers(len(bases))]
    shared = base[: rng.integers(0, len(base))] if rng.random() < 0.7 else []
    tail: list[int] = rng.integers(0, VOCAB_SIZE, rng.integers(1, 12)).tolist()
    return shared + tail if rng.random() < 0.8 or not shared else shared


def drain(engine: Engine, alive: list[Sequence]) -> None:
    while engine.scheduler.has_work:
        for sequence, _, _ in engine.step():
            if has_ended(sequence):
                engine.scheduler.remove(sequence)
                alive.remove(sequence)


POOLS = ["tiny", "small", "roomy"]
CONFIGS = covering_array(
    [1, 4, 16],  # block_size
    [(0, 0), (1, 0), (9, 0), (9, 1), (9, 4)],  # sliding_window; as many windows fit into a second group; 0: none
    [True, False],  # prefix caching
    POOLS,
    [(1, 1), (1, 2), (3, 3)],  # stages, steps in flight
    strength=3,
)


@pytest.mark.parametrize(("size", "windows", "caching", "pool", "steps"), CONFIGS)
def test_anything_that_arrives_is_served_right(
    size: int, windows: tuple[int, int], caching: bool, pool: str, steps: tuple[int, int]
) -> None:
    window, num_windows = windows
    rng = np.random.default_rng([size, window, num_windows, caching, POOLS.index(pool), *steps])
    in_window = blocks_of_window(window, size)
    least = min(-(-MAX_LEN // size), MAX_LEN if num_windows or not window else in_window)
    scheduler = make_scheduler(
        {"tiny": least, "small": least + 60 // size, "roomy": 400}[pool],
        size,
        max_num_batched_tokens=int(rng.integers(6, 40)) * (1 if steps[0] == 1 else 4 * steps[0]),
        enable_prefix_caching=caching,
        sliding_window=window,
        num_window_blocks=num_windows * in_window,
        num_stages=steps[0],
    )
    engine = Engine(scheduler, steps[1])
    bases = [rng.integers(0, VOCAB_SIZE, 45).tolist() for _ in range(3)]
    arrived: list[Sequence] = []
    alive: list[Sequence] = []
    cancelled = 0
    work = 0
    while len(arrived) < 60 or scheduler.has_work:
        for _ in range(int(rng.integers(0, 4)) if len(arrived) < 60 else 0):
            prompt = random_prompt(rng, bases)
            sequence = make_sequence(
                prompt,
                int(rng.integers(1, MAX_LEN - len(prompt) + 1)),
                is_plain=rng.random() < 0.7,
                is_streamed=rng.random() < 0.5,
                stop_token_ids=frozenset(rng.integers(0, VOCAB_SIZE, rng.integers(0, 3)).tolist()),
            )
            work += len(prompt) + sequence.params.max_tokens
            arrived.append(sequence)
            alive.append(sequence)
            scheduler.add(sequence)
        if alive and rng.random() < 0.03:
            sequence = alive.pop(int(rng.integers(len(alive))))
            scheduler.remove(sequence)
            scheduler.remove(sequence)  # twice does no harm
            cancelled += 1
        if steps[0] == 1 and engine.may_abort() and rng.random() < 0.03:  # no request wants the steps in flight
            for sequence in engine.abort():
                scheduler.remove(sequence)
                if sequence in alive:
                    alive.remove(sequence)
                    cancelled += 1
            check_blocks(scheduler)
        if steps[0] > 1:
            check_blocks(scheduler)
        if rng.random() < 0.01:
            scheduler.reset_prefix_cache()
        if not scheduler.has_work:
            continue
        for sequence, _, _ in engine.step():
            if has_ended(sequence):
                scheduler.remove(sequence)
                alive.remove(sequence)
        order = [arrived.index(s) for s in (*scheduler.running, *scheduler.waiting)]
        assert order == sorted(order), "somebody overtook"
        assert engine.num_steps <= steps[1] * work, "somebody starves"
    check_empty(scheduler)
    assert not alive
    first = [s.first_scheduled for s in arrived if s.first_scheduled]
    assert first == sorted(first)
    done = [s for s in arrived if has_ended(s)]
    assert len(done) >= len(arrived) - cancelled
    for sequence in arrived:
        expected = tokens_alone(sequence.prompt_token_ids.tolist(), len(sequence.output_token_ids))
        assert sequence.output_token_ids == expected
        assert sequence.stop_token_ids.isdisjoint(expected[:-1]), "it went on after its end"
    assert (scheduler.stats.prefix_hit_rate > 0.05) == caching or pool == "tiny" or window
    assert (scheduler.num_preemptions > 0) or pool != "small" or window
    assert scheduler.num_preemptions == sum(s.num_preemptions for s in arrived)


def test_a_prefix_is_shared_and_the_last_token_computed() -> None:
    scheduler = make_scheduler()
    engine = Engine(scheduler)
    prompt = list(range(12))
    for expected in (0, 8, 8):  # of three full blocks, the last is computed anew: a token must be
        sequence = make_sequence(prompt, 3)
        scheduler.add(sequence)
        drain(engine, [sequence])
        assert sequence.cached_tokens == expected
    assert scheduler.stats.prefix_hit_rate == pytest.approx(16 / 36)
    scheduler.reset_prefix_cache()
    sequence = make_sequence(prompt, 1)
    scheduler.add(sequence)
    drain(engine, [sequence])
    assert sequence.cached_tokens == 0


def test_a_step_is_not_undone_when_a_sequence_of_it_has_left() -> None:
    """A slot of -1 is none: before, the last slot lost its count of computed tokens."""
    scheduler = make_scheduler(max_num_batched_tokens=100)
    sequences = [make_sequence(list(range(first, first + 12)), 5) for first in (0, 20)]
    for sequence in sequences:
        scheduler.add(sequence)
    step = scheduler.schedule(1.0)
    assert step is not None and step.sequences == sequences
    scheduler.remove(sequences[1])
    computed = scheduler._running.num_computed.copy()
    with pytest.raises(AssertionError, match="a sequence left before its step was undone"):
        scheduler.undo(step)
    np.testing.assert_array_equal(scheduler._running.num_computed, computed)


def test_equal_prompts_of_one_step_are_computed_once() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=100)
    engine = Engine(scheduler)
    sequences = [make_sequence(list(range(21)), 5) for _ in range(4)]
    for sequence in sequences:
        scheduler.add(sequence)
    engine.step()
    assert [s.cached_tokens for s in sequences] == [0, 20, 20, 20]
    assert scheduler.stats.num_used_blocks == 5 + 4
    drain(engine, sequences)
    check_empty(scheduler)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("fail_at", ["build", "forward"])
def test_what_a_failed_step_did_not_compute_is_not_shared(
    monkeypatch: pytest.MonkeyPatch, fail_at: str, ahead: bool
) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=100)
    engine = Engine(scheduler, 1 + ahead)
    old = make_sequence(list(range(50, 57)), 20)
    scheduler.add(old)
    engine.step()
    for _ in range(2):
        scheduler.add(make_sequence(list(range(21)), 5))
    if fail_at == "build":
        with monkeypatch.context() as patch:
            patch.setattr(scheduler._builder, "build", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                scheduler.schedule(0.0)
        assert scheduler.running == [old]
        assert len(scheduler.waiting) == 2
        remaining = [old, *scheduler.waiting]
    else:
        step = scheduler.schedule(0.0)
        assert step is not None
        if ahead:  # the step before has failed
            assert step.batch.previous_rows is not None
            step, _ = engine.in_flight.popleft()
            engine.cache.clear()
        for sequence in step.sequences:
            scheduler.remove(sequence)
        scheduler.recompute_all()
        remaining = [*scheduler.waiting, make_sequence(list(range(21)), 5)]
        assert len(remaining) == (3 if ahead else 1)
        scheduler.add(remaining[-1])
    check_blocks(scheduler)
    drain(engine, remaining)
    check_empty(scheduler)


def test_removing_one_of_many_looks_at_no_others() -> None:
    compared = 0

    class Counting(Sequence):
        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return self is other

        def __hash__(self) -> int:
            return id(self)

    scheduler = make_scheduler()
    sequences = [Counting(s.prompt_token_ids, s.params, s.seed) for s in [make_sequence([1, 2], 3)] * 500]
    for sequence in sequences:
        scheduler.add(sequence)
    for sequence in sequences[:100:-1]:
        scheduler.remove(sequence)
        scheduler.remove(sequence)  # again: nothing happens
    assert compared < 10 * len(sequences)
    assert [id(s) for s in scheduler.waiting] == [id(s) for s in sequences[:101]]


def test_a_collision_of_hashes_shares_nothing() -> None:
    class Same(bytes):
        def __hash__(self) -> int:
            return 1

    class Tokens:
        """Looks like an array of tokens; all its keys have one hash."""

        def __init__(self, array: np.ndarray) -> None:
            self.array = array

        def __len__(self) -> int:
            return len(self.array)

        def __getitem__(self, at: slice) -> Any:
            return SimpleNamespace(tobytes=lambda: Same(self.array[at].tobytes()))

    manager = BlockManager(20, 2, 2, 10)
    first, second = (Tokens(np.array(t, np.int32)) for t in ([1, 2, 3, 4, 5], [6, 7, 3, 4, 5]))
    for slot, tokens in enumerate((first, second)):
        manager.grow(slot, 5)
        manager.remember(slot, tokens, 5)  # type: ignore[arg-type]
    for slot, tokens in enumerate((first, second)):
        found = [manager.groups[0].share([chain_id])[0] for chain_id in manager.find_prefix(tokens)]  # type: ignore[arg-type]
        assert found == manager.block_table[0, slot, :2].tolist()


def test_the_least_recently_used_prefix_goes_first() -> None:
    manager = BlockManager(4, 2, 1, 8)
    prompts = [np.array([i, i, i, i, 9], np.int32) for i in range(2)]
    for prompt in prompts:
        manager.grow(0, 4)
        manager.remember(0, prompt, 4)
        manager.free(0, 4)
    manager.share(0, manager.find_prefix(prompts[0]))  # used again
    manager.free(0, 4)
    manager.grow(0, 2)
    assert [len(manager.find_prefix(p)) for p in prompts] == [2, 1]
    manager.grow(0, 4)
    assert [len(manager.find_prefix(p)) for p in prompts] == [2, 0]


def test_windows_bound_the_blocks_of_a_sequence() -> None:
    scheduler = make_scheduler(num_blocks=4, sliding_window=8)
    engine = Engine(scheduler)
    sequence = make_sequence(list(range(30)), 30)
    scheduler.add(sequence)
    drain(engine, [sequence])
    check_empty(scheduler)


@pytest.mark.parametrize("ahead", [False, True])
def test_windows_bound_the_blocks_of_a_sequence_beside_layers_that_keep_all(ahead: bool) -> None:
    size, window, chunk = 4, 8, 12
    scheduler = make_scheduler(sliding_window=window, num_window_blocks=40, max_num_batched_tokens=chunk)
    engine = Engine(scheduler, 1 + ahead)
    sequence = make_sequence(list(range(30)), 30)
    scheduler.add(sequence)
    most = 0
    while not has_ended(sequence):
        engine.step()
        keeps_all, keeps_window = scheduler.blocks.groups
        assert keeps_all.num_used == scheduler.blocks.blocks_for(int(scheduler.blocks.lengths[0]) * size)
        most = max(most, keeps_window.num_used)
    assert 2 < most <= -(-(window + chunk) // size) + 1
    scheduler.remove(sequence)
    check_empty(scheduler)


def test_a_prefix_whose_windows_are_gone_is_not_begun_with() -> None:
    """It is found up to where the second group has what the next token sees."""
    scheduler = make_scheduler(sliding_window=6, num_window_blocks=9)
    blocks, engine = scheduler.blocks, Engine(scheduler)
    prompt = list(range(40))
    first = make_sequence(prompt, 1)
    scheduler.add(first)
    drain(engine, [first])
    chain = blocks.find_prefix(np.array(prompt, np.int32))
    assert len(chain) == 9  # the last token is always computed
    known = [blocks.groups[1].knows(chain_id) for chain_id in chain]
    assert not all(known) and known[-1]
    behind = range(1, len(chain) + 1)  # the next token sees five before it: two blocks
    assert blocks.starts(chain) == [True, *(all(known[max(n - 2, 0) : n]) for n in behind)]
    scheduler.add(make_sequence(list(range(50, 86)), 1))  # takes windows of others
    other = scheduler.waiting.copy()
    drain(engine, list(other))
    again = make_sequence(prompt, 1)
    scheduler.add(again)
    drain(engine, [again])
    assert again.output_token_ids == first.output_token_ids
    assert again.cached_tokens < 36
    third = make_sequence(prompt, 1)
    scheduler.add(third)
    drain(engine, [third])
    assert third.cached_tokens == 36, "what was computed again is known again"
    check_empty(scheduler)


def test_logits_are_collected_once_also_after_preemption() -> None:
    scheduler = make_scheduler(num_blocks=8, max_num_seqs=2, max_num_batched_tokens=2)
    engine = Engine(scheduler)
    old = make_sequence(list(range(9)), 20)
    collecting = make_sequence(list(range(16)), 1, collect_logits=True)
    for sequence in (old, collecting):
        scheduler.add(sequence)
    while collecting.num_collected < 16:
        for sequence, _, _ in engine.step():
            if has_ended(sequence):
                scheduler.remove(sequence)
    scheduler.remove(collecting)
    assert collecting.num_preemptions
    assert collecting.cached_tokens == 0
    assert sum(len(rows) for rows in collecting.logits) == 16


def test_what_can_never_fit_is_refused() -> None:
    scheduler = make_scheduler(num_blocks=4, max_model_len=40)
    with pytest.raises(CacheFullError, match="max_model_len"):
        scheduler.add(make_sequence([1] * 41, 1))
    with pytest.raises(CacheFullError, match=r"needs 5 blocks of 4 tokens, but .* has 4 .*kv_cache"):
        scheduler.add(make_sequence([1] * 10, 7))
    sequence = make_sequence([1] * 10, 6)
    scheduler.add(sequence)
    drain(Engine(scheduler), [sequence])
    check_empty(scheduler)


def test_cancelled_while_the_step_runs() -> None:
    scheduler = make_scheduler()
    engine = Engine(scheduler)
    sequences = [make_sequence(list(range(i, i + 7)), 4) for i in range(3)]
    for sequence in sequences:
        scheduler.add(sequence)
    step = scheduler.schedule(0.0)
    assert step is not None
    output = engine.forward(step)
    scheduler.remove(sequences[1])
    assert [s for s, _, _ in scheduler.update(step, output, 1.0).request_tokens] == [sequences[0]]
    sequences.pop(1)
    drain(engine, sequences)
    check_empty(scheduler)


def test_stats() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    for i in range(2):
        scheduler.add(make_sequence([i] * 9, 2))
    Engine(scheduler).step()
    stats = scheduler.stats
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks, stats.num_blocks) == (1, 1, 3, 40)
    assert (stats.prefix_hit_rate, stats.num_preemptions) == (0, 0)
