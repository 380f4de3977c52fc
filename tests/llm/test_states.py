"""Models whose layers keep a state of each sequence: an answer depends on neither chunks, prefixes nor preemption."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from goldens import expected_of, golden
from hypothesis import given, settings, strategies as st

from infinilm import LLM, DistConfig, InferEngine, PagedKVCacheConfig, StaticKVCacheConfig, plan_memory
from infinilm.errors import CacheFullError, ConfigError, RequestError
from infinilm.scheduling.states import StatePool, plan_states, snapshot_interval

NAME = "qwen3-5"
RNG = np.random.default_rng(1)
COMMON = RNG.integers(3, 128, 100).tolist()
OTHER = RNG.integers(3, 128, 66).tolist()
PROMPTS = [[*COMMON[:75], 5], [*COMMON[:75], 9, 4, 7], COMMON[:40], COMMON[:98], [3, 4], OTHER]


def open_llm(folder: Path | None = None, **changes: Any) -> LLM:
    return LLM(
        folder or golden(NAME),
        speculation="off",  # drafts would follow the clock, and so would preemptions
        **{"max_num_seqs": 3, "max_model_len": 160, "use_tqdm": False, "num_threads": 1, **changes},
    )


def answers(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    """Token ids and their log-probabilities, whose bits tell more."""
    outputs = llm.generate(prompts, temperature=0.9, seed=3, max_tokens=20, ignore_eos=True, logprobs=1, use_tqdm=False)
    return [(list(o.outputs[0].token_ids), repr(o.outputs[0].logprobs)) for o in outputs]


@functools.cache
def answers_alone(folder: Path) -> list[Any]:
    """Each prompt by itself, without a prefix cache."""
    with open_llm(folder, enable_prefix_caching=False, max_num_seqs=1) as llm:
        return [answers(llm, [prompt])[0] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    return answers_alone(golden(NAME))


@pytest.mark.parametrize("name", [NAME, "qwen3-5-moe", "qwen3-next", "lfm2", "granite-h", "nemotron-3", "falcon-h1"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_threads": 2},
        {"max_num_batched_tokens": 5},
        {"enable_prefix_caching": False},
        {"kv_cache": PagedKVCacheConfig(num_blocks=48, block_size=4), "max_num_seqs": 4},
        {"kv_cache": StaticKVCacheConfig(3, 160)},
    ],
    ids=repr,
)
def test_together_and_again(settings: dict[str, Any], name: str) -> None:
    """All at once, then from the prefixes of before, then after these are forgotten."""
    expected = answers_alone(golden(name))
    with open_llm(golden(name), **settings) as llm:
        for _ in range(2):
            assert answers(llm, PROMPTS) == expected
        hits = llm.metrics().prefix_hit_rate
        if llm.memory.block_size == 4:  # room for two
            assert llm.metrics().num_preemptions > 0
        else:
            caches = llm.memory.snapshot_interval > 0 and settings.get("enable_prefix_caching", True)
            if not caches or llm.memory.snapshot_interval <= 40:  # larger states may have none within these prompts
                assert (hits > 0) == caches
        llm.reset_cache()
        assert answers(llm, PROMPTS[::-1]) == expected[::-1]


def test_an_abort_leaves_nothing_behind(expected: list[Any]) -> None:
    """Streams that end early at any token, their states and blocks given back."""
    with open_llm(max_num_batched_tokens=7) as llm:
        for stop in range(4):
            for i, _ in enumerate(llm.stream(PROMPTS[3], max_tokens=30, ignore_eos=True)):
                if i == stop:
                    break
        assert answers(llm, PROMPTS) == expected


def test_an_abort_of_a_step_that_another_waits_for(expected: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine refuses the step behind, whose states the aborted one did not leave: it fails no other request."""
    monkeypatch.setattr("infinilm.serving.engine_thread._LOOK_EVERY_SECONDS", 0.001)
    with open_llm(max_num_batched_tokens=8, max_num_seqs=1) as llm:
        engine, results = llm._engine, [lambda _: SimpleNamespace(aborted=True), refuse]

        class Engine:
            def submit(self, batch: Any, late_masks: bool) -> Any:
                pending = engine.submit(batch, late_masks)
                result = results.pop(0) if results else None
                return pending if result is None else Pending(pending, result)

            def __getattr__(self, name: str) -> Any:
                return getattr(engine, name)

        class Pending:
            """Ends when it is aborted, however quick the engine was."""

            def __init__(self, pending: Any, result: Any) -> None:
                self.is_aborted, self._pending, self._result = False, pending, result

            def wait(self, _: float) -> bool:
                cancelled.cancel()
                return self.is_aborted

            def abort(self) -> None:
                self.is_aborted = True

            def result(self) -> Any:
                return self._result(self._pending.result())

        with llm._thread._stepping:
            llm._thread._engine = Engine()  # type: ignore[assignment]
            ends = {"temperature": 0.9, "seed": 3, "max_tokens": 20, "ignore_eos": True, "logprobs": 1}
            cancelled, waiting = (llm.submit(PROMPTS[i], **ends) for i in (3, 4))
        (output,) = waiting.result().outputs
        assert (list(output.token_ids), repr(output.logprobs)) == expected[4]
        assert cancelled.result().outputs[0].finish_reason == "abort" and not results


def refuse(_: Any) -> Any:
    raise RequestError("it was to go on from a state that no step has left")


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3-5-text"])
def test_ranks(name: str) -> None:
    """Two ranks have half the heads, and half the state, each."""
    expected = expected_of(name)
    ids, greedy = expected["input_ids"].tolist(), expected["greedy_ids"].tolist()
    plans = []
    for ranks in (1, 2):
        with LLM(golden(name), tensor_parallel_size=ranks, dtype="float32", max_model_len=128, use_tqdm=False) as llm:
            for _ in range(2):
                (output,) = llm.generate(ids, temperature=0, max_tokens=16, ignore_eos=True, use_tqdm=False)
                assert list(output.outputs[0].token_ids) == greedy
            plans.append(llm.memory)
    assert plans[0].state_bytes == plans[1].state_bytes
    with pytest.raises(ConfigError, match=r"2 key heads of linear attention.*sizes that do: 1, 2"):
        LLM(golden(name), tensor_parallel_size=4)


def test_the_plan_counts_states() -> None:
    plan = plan_memory(golden(NAME), max_num_seqs=5, max_model_len=64, kv_cache="1MB")
    assert plan.num_states == 10 and plan.state_bytes == 3 * 4 * (3 * 80 + 4 * 12 * 8)
    # Rows of 15 drafts: what the convolution reads, k and v, a and b.
    assert plan.num_log_rows == 15 and plan.log_bytes == 15 * 3 * 4 * (80 + 56 + 8)
    assert plan.snapshot_interval == 64  # 7488 bytes are those of 59 tokens
    bytes_of_states = 10 * (plan.state_bytes + plan.log_bytes)
    assert plan.kv_bytes == plan.num_blocks * 16 * plan.kv_bytes_per_token + bytes_of_states <= 1_000_000
    assert "10 states of 32.6 KiB" in str(plan)
    small = plan_memory(golden(NAME), max_num_seqs=5, max_model_len=64, kv_cache="300KB")  # too little for snapshots
    assert (small.num_states, small.snapshot_interval) == (5, 0)
    with pytest.raises(CacheFullError, match=r"states of 5 sequences take 163.1 KiB of it: lower max_num_seqs"):
        plan_memory(golden(NAME), max_num_seqs=5, kv_cache=30_000)


def test_a_row_goes_on_where_it_was_or_begins_anew() -> None:
    ids = expected_of(NAME)["input_ids"][:40]
    whole_ids = ids.copy()
    with InferEngine(golden(NAME), DistConfig(tp_size=1), "cpu", StaticKVCacheConfig(2, 64)) as engine:
        engine.load_weights(golden(NAME), use_tqdm=False)

        def run(begin: int, end: int, cached: int) -> Any:
            both = np.stack([ids, ids[::-1]])[:, begin:end]
            step = InferEngine.Input(both, cache_lengths=[cached] * 2, temperature=0)
            logits = engine.forward(step, return_logits=True).logits
            assert logits is not None
            return logits.numpy().copy()

        whole = run(0, 40, 0)
        for at in (1, 2, 17, 39):
            run(0, at, 0)
            np.testing.assert_array_equal(run(at, 40, at), whole)
        for cached in (39, 41):
            with pytest.raises(
                RequestError, match=rf"go on from {cached} tokens, .* and this one has seen 40; begin at 0"
            ):
                run(10, 11, cached)
        run(0, 17, 0)
        ids[20] = 1000
        with pytest.raises(RequestError, match="1000"):  # refused before a state is touched
            run(17, 40, 17)
        ids[20] = whole_ids[20]
        np.testing.assert_array_equal(run(17, 40, 17), whole)
        with pytest.raises(ConfigError, match="StaticKVCacheConfig alone"):
            engine.reset_cache(PagedKVCacheConfig(num_blocks=4))


class _Model:
    """What each state holds, by the rules of the engine: a tuple of the tokens that it has seen."""

    def __init__(self, num_states: int) -> None:
        self.held: list[Any] = [None] * num_states

    def run(self, state_in: Any, state_out: Any, texts: list[tuple[int, ...]], counts: list[int]) -> None:
        assert len(set(state_out.tolist())) == len(state_out)
        read = [() if s < 0 else self.held[s] for s in state_in.tolist()]
        for before, out, text, count in zip(read, state_out.tolist(), texts, counts, strict=True):
            assert before == text[: len(text) - count]  # what it goes on from is its own past
            others = [s for s, o in zip(state_in.tolist(), state_out.tolist(), strict=True) if o != out]
            assert out not in others  # no sequence reads the state that another writes
        for out, text in zip(state_out.tolist(), texts, strict=True):
            self.held[out] = text


@settings(max_examples=150)
@given(data=st.data(), slots=st.integers(1, 5))
def test_the_pool_never_mixes_states_up(data: st.DataObject, slots: int) -> None:
    """Sequences that begin, go on, leave snapshots and end at random."""
    interval, pool = 2, StatePool(plan_states(slots, with_snapshots=True), slots, 2)
    model, texts = _Model(pool.num_states), dict[int, tuple[int, ...]]()
    known: dict[tuple[int, ...], int] = {}  # prefix -> its id
    for _ in range(data.draw(st.integers(1, 30))):
        for slot in list(texts):
            if data.draw(st.integers(0, 5)) == 0:
                pool.leave(slot)
                del texts[slot]
        if data.draw(st.integers(0, 12)) == 0:
            pool.forget()
        step, counts, prefixes = [], [], []
        for slot in range(slots):
            if slot not in texts and data.draw(st.booleans()):
                wish = tuple(data.draw(st.lists(st.integers(0, 1), max_size=6)))
                borders = [wish[:n] for n in range(interval, len(wish) + 1, interval)]
                ids = [known[b] for b in borders if b in known] if all(b in known for b in borders) else []
                count, state = pool.find(ids, [True] * (len(ids) + 1))
                pool.enter(slot, state, count * interval)
                texts[slot] = wish[: count * interval]
            if slot in texts and data.draw(st.booleans()):
                more = data.draw(st.integers(1, interval - len(texts[slot]) % interval))
                texts[slot] += tuple(data.draw(st.lists(st.integers(0, 1), min_size=more, max_size=more)))
                step.append(slot)
                counts.append(more)
                at_border = len(texts[slot]) % interval == 0 and data.draw(st.booleans())
                prefixes.append(known.setdefault(texts[slot], len(known) + 1) if at_border else 0)
        if step:
            own = [texts[slot] for slot in step]
            model.run(*pool.step(np.array(step, np.intp), prefixes), own, counts)


def test_snapshots_are_as_far_apart_as_they_are_large() -> None:
    assert snapshot_interval(1000, 10, 16, 64) == 112
    assert snapshot_interval(1, 10, 16, 64) == 16
    assert snapshot_interval(1, 10, 16, 1024) == 32  # no more than 32 in the longest sequence
    assert snapshot_interval(1, 10, 16, 1 << 20) == 256  # a step of a prompt ends at each
