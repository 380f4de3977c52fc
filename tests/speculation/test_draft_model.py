"""Drafts of a smaller model: the model itself drafts what it will say, another one changes no bit."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llm import tiny

from infinilm import LLM, ConfigError, PagedKVCacheConfig, RequestLimits, StaticKVCacheConfig, plan_memory
from infinilm.scheduling.block_manager import BlockManager
from infinilm.scheduling.draft_model import DraftModel
from infinilm.speculation import BatchDrafter
from infinilm.speculation.lengths import Lengths
from infinilm.speculation.settings import DraftModelSettings, read_speculation
from speculation.drafters import AnyLengths, counts, told, use_lengths
from speculation.test_requests import FULL, KINDS

PROMPTS: list[Any] = ["the", "Once upon a time there was an answer", [1, 2, 3], "a " * 25, [7] * 33]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, "logprobs": 1, "use_tqdm": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of another shape, of the same line."""
    return tiny.make_checkpoint(
        tmp_path_factory.mktemp("other") / "tiny", num_hidden_layers=1, intermediate_size=32, max_position_embeddings=72
    )


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[LLM]:
    with LLM(folder, use_tqdm=False) as made:
        yield made


def drafting(folder: Path, model: Path, num_tokens: int = 4, **settings: Any) -> LLM:
    """All of each draft is verified, so that numbers of tokens do not depend on the clock."""
    speculation = {"method": "draft_model", "model": model, "num_tokens": num_tokens, "adaptive": False}
    return LLM(folder, speculation=speculation, use_tqdm=False, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_tokens": 1},
        {"num_tokens": 15},
        {"max_num_batched_tokens": 9, "max_num_seqs": 3},
        {"kv_cache": PagedKVCacheConfig(num_blocks=14, block_size=16), "max_num_batched_tokens": 48},
        {"kv_cache": PagedKVCacheConfig(num_blocks=60, block_size=5), "enable_prefix_caching": False},
        {"kv_cache": StaticKVCacheConfig(max_batch_size=3, max_cache_len=100), "max_model_len": 100},
    ],
    ids=repr,
)
def test_the_model_itself_is_always_right(folder: Path, plain: LLM, settings: dict[str, Any]) -> None:
    """So the draft model sees the same tokens at the same positions, behind chunks, prefixes and preemptions."""
    expected = told(plain.generate(PROMPTS, **GREEDY))
    with drafting(folder, folder, **settings) as llm:
        for _ in range(2):  # the second time with prefixes
            assert told(llm.generate(PROMPTS, **GREEDY)) == expected
        drafted, accepted = counts(llm)
    assert drafted == accepted > 100


def test_tokens_of_a_step(folder: Path) -> None:
    with drafting(folder, folder, num_tokens=7) as llm:
        before = llm.metrics().num_steps
        llm.generate([1, 2, 3], **GREEDY | {"max_tokens": 41})
        assert llm.metrics().num_steps - before == 1 + 40 // 8  # the prompt, and eight tokens of each step


@pytest.fixture(scope="module")
def helped(folder: Path, other: Path) -> Iterator[LLM]:
    with drafting(folder, other, limits=RequestLimits(max_logprobs=200)) as made:
        yield made


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[LLM]:
    with LLM(folder, use_tqdm=False, limits=RequestLimits(max_logprobs=200)) as made:
        yield made


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "adapter"])
def test_another_model_changes_no_bit(helped: LLM, alone: LLM, kind: str) -> None:
    sampling: dict[str, Any] = FULL | KINDS[kind]
    assert told(helped.generate(PROMPTS, **sampling)) == told(alone.generate(PROMPTS, **sampling))


@pytest.mark.parametrize("lengths", [Lengths(), AnyLengths(), AnyLengths(1)], ids=["measured", "any", "other"])
def test_lengths_that_are_chosen_before(folder: Path, other: Path, plain: LLM, lengths: Lengths) -> None:
    """The draft model makes drafts of those lengths, and lags behind where they are 0."""
    for model in (folder, other):
        with drafting(folder, model) as llm:
            use_lengths(llm, lengths)
            for _ in range(3):
                assert told(llm.generate(PROMPTS, **GREEDY)) == told(plain.generate(PROMPTS, **GREEDY))
            drafted, accepted = counts(llm)
            assert drafted > 0
            assert model is not folder or drafted == accepted


def test_it_was_seldom_right(helped: LLM) -> None:
    drafted, accepted = counts(helped)
    assert drafted > accepted > 0


def test_longer_than_the_draft_model(folder: Path, other: Path, plain: LLM) -> None:
    sampling = GREEDY | {"max_tokens": 100}
    with drafting(folder, other) as llm:
        assert told(llm.generate([5, 6], **sampling)) == told(plain.generate([5, 6], **sampling))
        assert 70 <= counts(llm)[0] <= 4 * 72


def test_a_cache_of_another_size(folder: Path, plain: LLM) -> None:
    with drafting(folder, folder) as llm:
        llm.generate(PROMPTS, **GREEDY)
        llm.reset_cache(PagedKVCacheConfig(num_blocks=30, block_size=16))
        assert told(llm.generate(PROMPTS, **GREEDY)) == told(plain.generate(PROMPTS, **GREEDY))
        drafted, accepted = counts(llm)
        assert drafted == accepted > 0


def test_a_sequence_that_has_ended_gives_its_slot_back() -> None:
    model = DraftModel(
        Failing(), BlockManager(4, 4, 1, 16), num_tokens=2, vocab_size=9, max_model_len=16, max_num_batched_tokens=8
    )
    request: Any = None
    first, second = model(request), model(request)
    assert isinstance(first, BatchDrafter)
    busy: set[int] = set()
    first.update([1, 2, 3])
    assert model._has_place(first, busy)
    second.update([1])
    assert not model._has_place(second, busy), "the only slot is in use"
    assert model._has_place(second, set())
    assert (first.slot, first.num_computed, second.slot) == (-1, 0, 0)
    del second
    gc.collect()
    first.update([4])
    model.prepare([(first, 1)])
    assert next(iter(model._holders.values()))() is first


class Failing:
    def forward(self, batch: Any) -> Any:
        raise MemoryError("no more of it")


def test_a_draft_model_that_fails(folder: Path, plain: LLM, caplog: pytest.LogCaptureFixture) -> None:
    with drafting(folder, folder) as llm:
        drafters: Any = llm._thread.scheduler._drafting
        drafters._drafters[-1]._engine = Failing()
        assert told(llm.generate(PROMPTS, **GREEDY)) == told(plain.generate(PROMPTS, **GREEDY))
        assert counts(llm) == (0, 0)
    assert caplog.text.count("the draft model failed") == 1


def test_its_memory_is_planned(folder: Path, other: Path) -> None:
    settings: dict[str, Any] = {"memory": "1GiB", "device": "cpu"}
    alone, own = plan_memory(folder, **settings), plan_memory(other, **settings)
    both = plan_memory(folder, speculation={"model": other}, **settings)
    for name in ("weight_bytes", "workspace_bytes", "kv_bytes_per_token"):
        assert getattr(both, name) == getattr(alone, name) + getattr(own, name)
    assert both.num_blocks == alone.num_blocks  # here the sequences decide


# ---- bad input ----


def test_settings() -> None:
    read = read_speculation({"model": "a", "num_speculative_tokens": 3})
    assert read.model == DraftModelSettings("a", 3) and read.is_adaptive
    assert not read_speculation({"model": "a", "adaptive": False}).is_adaptive
    with pytest.raises(ConfigError, match="needs a 'model'"):
        read_speculation("draft_model")
    with pytest.raises(ConfigError, match=r"'min_match' is not supported; with the method 'draft_model' .*'model'"):
        read_speculation({"model": "a", "min_match": 3})
    with pytest.raises(ConfigError, match="'model' is not supported; with the method 'lookup'"):
        read_speculation({"method": "lookup", "model": "a"})
    with pytest.raises(ConfigError, match="model must be a folder, a file or a hub id, got 3"):
        read_speculation({"model": 3})
    with pytest.raises(ConfigError, match=r"num_tokens must be an int in 1\.\.15, got 16"):
        read_speculation({"model": "a", "num_tokens": 16})


def test_another_vocabulary(folder: Path, tmp_path: Path) -> None:
    """The ids of two tokens are exchanged; or there is no tokenizer, and the sizes differ."""
    swapped = tiny.make_checkpoint(tmp_path / "swapped")
    file = swapped / "tokenizer.json"
    file.write_text(file.read_text().replace('"th": 256', '"th": 257').replace('"the": 257', '"the": 256'))
    with pytest.raises(ConfigError, match=r"another vocabulary .*: token 256 is 'the' there and 'th' here"):
        drafting(folder, swapped)
    larger = tiny.make_checkpoint(tmp_path / "larger", tokenizer=False, vocab_size=280)
    with pytest.raises(ConfigError, match=r"another vocabulary .*: it has 280 tokens, and the model 270"):
        drafting(folder, larger)
    with pytest.raises(FileNotFoundError, match="absent"):
        drafting(folder, tmp_path / "absent")


def test_a_larger_vocabulary_of_padding(folder: Path, plain: LLM, tmp_path: Path) -> None:
    """Ids that only one of them has are left alone."""
    larger, smaller = (
        tiny.make_checkpoint(tmp_path / str(size), vocab_size=size, hidden_size=16) for size in (300, 269)
    )
    expected = told(plain.generate(PROMPTS, **GREEDY))
    for model in (larger, smaller):
        with drafting(folder, model) as llm:
            assert told(llm.generate(PROMPTS, **GREEDY)) == expected
            assert counts(llm)[0] > 0
            ids = np.array([269, 1])  # the smaller one does not have the first
            assert told(llm.generate([ids], **GREEDY)) == told(plain.generate([ids], **GREEDY))


def test_pipelines_have_no_draft_model(folder: Path) -> None:
    with pytest.raises(ConfigError, match="nothing is drafted in a pipeline"):
        drafting(folder, folder, pipeline_parallel_size=2)
