"""The KV cache of an `LLM`: what `kv_cache` may be, `reset_cache`, and what they refuse."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import infinilm
from infinilm import LLM, PagedKVCacheConfig, StaticKVCacheConfig
from llm.support import one

SETTINGS: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "use_tqdm": False}
PROMPTS = [[1, 2, 3, *range(5, 5 + i)] for i in range(6)]


def token_ids(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, **SETTINGS)]


@pytest.mark.parametrize(
    ("config", "num_blocks", "block_size", "num_seqs", "max_len"),
    [
        (PagedKVCacheConfig(num_blocks=7, block_size=5), 7, 5, 64, 35),
        (PagedKVCacheConfig(num_blocks=1000), 1000, 16, 64, 128),  # as it is, also where less would do
        (StaticKVCacheConfig(3, 40), 3, 40, 3, 40),
        (StaticKVCacheConfig(2), 2, 128, 2, 128),
    ],
)
def test_cache_configs(
    llm: LLM,
    folder: Path,
    config: infinilm.CacheConfig,
    num_blocks: int,
    block_size: int,
    num_seqs: int,
    max_len: int,
) -> None:
    with LLM(folder, kv_cache=config) as model:
        memory = model.memory
        assert (memory.num_blocks, memory.block_size, memory.max_num_seqs) == (num_blocks, block_size, num_seqs)
        assert memory.max_model_len == model.max_model_len == max_len
        assert memory.kv_budget_bytes == memory.kv_bytes == num_blocks * block_size * memory.kv_bytes_per_token
        assert token_ids(model) == token_ids(llm)
        assert model.metrics().num_blocks == num_blocks


def test_a_cache_in_bytes(folder: Path) -> None:
    with LLM(folder) as model:
        block_bytes = model.memory.kv_bytes_per_token // len(model.devices) * 4  # of one rank
    with LLM(folder, kv_cache=PagedKVCacheConfig(block_bytes * 9 + 1, block_size=4)) as model:
        assert (model.memory.num_blocks, model.max_model_len) == (9, 36)


def test_what_does_not_fit(folder: Path) -> None:
    with pytest.raises(infinilm.CacheFullError, match=r"max_model_len <= 40 or raise max_cache_len \(now 3 blocks of"):
        LLM(folder, kv_cache=StaticKVCacheConfig(3, 40), max_model_len=41)
    with pytest.raises(infinilm.CacheFullError, match=r"max_model_len <= 8 or raise kv_cache \(now 2 blocks of 4"):
        LLM(folder, kv_cache=PagedKVCacheConfig(num_blocks=2, block_size=4), max_model_len=9)
    with pytest.raises(infinilm.CacheFullError, match="one block needs"):
        LLM(folder, kv_cache=PagedKVCacheConfig(1))
    with pytest.raises(infinilm.CacheFullError, match=r"no room for a KV cache of \d+ bytes: .*; lower kv_cache"):
        LLM(folder, kv_cache=PagedKVCacheConfig(num_blocks=2**40))


def test_reset_forgets_prefixes(folder: Path) -> None:
    prompt = list(range(5, 45))
    with LLM(folder) as model:

        def cached() -> int:
            metrics = model.generate(prompt, **SETTINGS)[0].metrics
            assert metrics is not None
            return metrics.cached_tokens

        assert [cached(), cached()] == [0, 32]
        model.reset_cache()
        assert [cached(), cached()] == [0, 32]
        model.close()
        with pytest.raises(infinilm.EngineDeadError):
            model.reset_cache()


def test_reset_while_requests_run(folder: Path) -> None:
    with LLM(folder) as model:
        expected = one(model, [1, 2, 3], temperature=0, max_tokens=60, ignore_eos=True)
        stream = model.stream([1, 2, 3], temperature=0, max_tokens=60, ignore_eos=True)
        found = [next(stream).token_id]
        model.reset_cache()
        with pytest.raises(infinilm.InfinilmError, match="busy"):
            model.reset_cache("1MiB")
        assert found + [event.token_id for event in stream] == list(expected.token_ids)


def test_reset_changes_the_size(folder: Path) -> None:
    with LLM(folder, kv_cache="1MiB", max_model_len=60, max_num_seqs=4) as model:
        before = token_ids(model)
        for size in (
            PagedKVCacheConfig(num_blocks=13, block_size=5),
            StaticKVCacheConfig(2, 64),
            "64KiB",
            2**20,
            "1%",
        ):
            model.reset_cache(size)
            metrics = model.metrics()
            assert (metrics.num_used_blocks, metrics.num_blocks) == (0, model.memory.num_blocks)
            assert token_ids(model) == before
            assert model.max_model_len == model.memory.max_model_len == 60
        assert model.memory.max_num_seqs == 4  # also after a cache that had two rows
        memory = model.memory
        for bad, error in (
            (StaticKVCacheConfig(9, 59), infinilm.CacheFullError),
            (PagedKVCacheConfig(num_blocks=2**40), infinilm.CacheFullError),
            ("1KiB", infinilm.CacheFullError),
            ("much", infinilm.ConfigError),
        ):
            with pytest.raises(error):
                model.reset_cache(bad)
            assert model.memory is memory
            assert token_ids(model) == before


def test_reset_from_several_threads(folder: Path) -> None:
    """Whatever they hit, every request is answered, and alike."""
    with LLM(folder) as model:
        before = token_ids(model)
        stop = threading.Event()

        def reset() -> None:
            while not stop.is_set():
                model.reset_cache()

        threads = [threading.Thread(target=reset) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(5):
                assert token_ids(model) == before
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert model.metrics().num_used_blocks == 0


@pytest.mark.parametrize("quantization", ["fp4", 8, True])
def test_unknown_quantization_is_refused(folder: Path, quantization: Any) -> None:
    with pytest.raises(infinilm.ConfigError, match="quantization: expected None, 'int8', 'int4' or 'fp8', got"):
        LLM(folder, quantization=quantization)
