"""Layers with a window have blocks of their own beside layers that keep all keys: less memory, the same answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from goldens import golden
from quantised_files.conversion import resized

from infinilm import LLM, PagedKVCacheConfig, plan_memory
from infinilm.cli.main import main

# Windows of 8, 9 and 9; with shared keys and values, and experts of 8 heads with sinks.
NAMES = ("gemma3-text", "gemma4-e2b", "gpt-oss")
SIZE = 4  # tokens of a block
LONGEST = 128


def prompts() -> list[list[int]]:
    """Some begin alike: within a block, behind some, and behind many windows."""
    base = [(7 * i * i + 3 * i + 5) % 90 + 3 for i in range(60)]
    return [
        base,
        [*base[:23], 5, 6, 7],
        base[:24] + base[:9],
        base,
        base[:50] + [9] * 9,
        base[1:40],
        base[:7],
        base[:51],
    ]


def answers(llm: LLM, which: list[list[int]]) -> list[str]:
    results = llm.generate(which, temperature=0, max_tokens=40, ignore_eos=True, logprobs=1, use_tqdm=False)
    return [f"{result.outputs[0].token_ids} {result.outputs[0].logprobs!r}" for result in results]


def open_llm(name: str, num_blocks: int, **options: Any) -> LLM:
    """With a second group of layers if there are few sequences."""
    settings = {"dtype": "float32", "max_model_len": LONGEST, "max_num_batched_tokens": 16, "use_tqdm": False}
    settings["speculation"] = "off"  # drafts would follow the clock, and so would preemptions
    cache = PagedKVCacheConfig(block_size=SIZE, num_blocks=num_blocks)
    return LLM(golden(name), kv_cache=cache, **(settings | options))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_answers_are_those_of_a_cache_that_keeps_all(name: str, ranks: int) -> None:
    asked = prompts()
    parallel: dict[str, Any] = {"tensor_parallel_size": ranks}
    with open_llm(name, LONGEST // SIZE, enable_prefix_caching=False, max_num_seqs=64, **parallel) as llm:
        assert llm.memory.num_window_blocks == 0
        expected = [answers(llm, [prompt])[0] for prompt in asked]
        expected_logits = llm.forward(asked[0]).tobytes()
    for num_blocks, options in (
        (200, {"max_num_seqs": 3}),
        (200, {"max_num_seqs": 3, "max_num_batched_tokens": 5, "enable_prefix_caching": False}),
        (34, {"max_num_seqs": 2, "max_num_batched_tokens": 7}),  # some are set back, and computed again
        *([] if "gemma4" in name else [(200, {"max_num_seqs": 4, "pipeline_parallel_size": 2})]),
    ):
        with open_llm(name, num_blocks, **options, **parallel) as llm:
            assert 0 < llm.memory.num_window_blocks < llm.memory.num_blocks == num_blocks
            assert [answers(llm, [prompt])[0] for prompt in asked] == expected
            assert answers(llm, asked) == expected
            assert llm.forward(asked[0]).tobytes() == expected_logits
            metrics = llm.metrics()
            assert (metrics.num_used_blocks, metrics.cache_usage) == (0, 0)
            assert (metrics.prefix_hit_rate > 0.1) == options.get("enable_prefix_caching", True)
            assert (metrics.num_preemptions > 0) == (num_blocks == 34)


def test_more_sequences_fit() -> None:
    """In memory for two sequences of the full length if all layers kept all keys."""
    budget = 2 * LONGEST * plan_memory(golden("gemma3-text"), dtype="float32", kv_cache="1MB").kv_bytes_per_token
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": LONGEST, "max_num_batched_tokens": 16}
    settings["tensor_parallel_size"] = 1  # two ranks would have the one head of keys twice
    plan = plan_memory(golden("gemma3-text"), kv_cache=budget, max_num_seqs=3, **settings)
    assert plan.num_full_seqs == 3 and plan.kv_bytes <= budget
    assert f"{plan.num_window_blocks} of layers that keep a window" in str(plan)
    with LLM(golden("gemma3-text"), kv_cache=budget, max_num_seqs=3, **settings, use_tqdm=False) as llm:
        assert llm.memory.num_window_blocks == plan.num_window_blocks
        llm.generate([[i] * 60 for i in range(3)], max_tokens=LONGEST, ignore_eos=True, use_tqdm=False)
        assert llm.metrics().num_preemptions == 0
        llm.reset_cache(PagedKVCacheConfig(block_size=SIZE, num_blocks=LONGEST // SIZE))
        assert (llm.memory.num_blocks, llm.memory.num_window_blocks) == (32, 2 * 3 * 3 + 4)
        llm.generate([[1] * 60], max_tokens=LONGEST, ignore_eos=True, use_tqdm=False)


def test_the_command_says_what_layers_with_a_window_take(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = resized(golden("gemma3-text"), tmp_path / "long", max_position_embeddings=4096)
    assert main(["plan", str(model), "--max-num-seqs", "2", "--kv-cache", "1MB", "--dtype", "float32"]) == 0
    text = capsys.readouterr().out
    per_token, of_window = 3 * 2 * 2 * 8 * 4, 2 * 2 * 2 * 8 * 4  # three layers, of which two have a window of 8 tokens
    step, windows = 2048 // 16, 2  # a window lies in two blocks
    plan = plan_memory(model, max_num_seqs=2, kv_cache="1MB", dtype="float32")
    assert (plan.kv_bytes_per_token, plan.window_bytes_per_token) == (per_token, of_window)
    assert plan.num_window_blocks == step + windows
    assert f"{of_window} B of these in layers that keep a window of 8 tokens: {step + windows} blocks" in text


def test_a_longer_sequence_fits() -> None:
    """Where the length is what the memory allows, layers with a window leave more of it to the others."""
    per_token = plan_memory(golden("gemma3-text"), dtype="float32", kv_cache="1MB").kv_bytes_per_token
    plan = plan_memory(golden("gemma3-text"), dtype="float32", kv_cache=64 * per_token, max_num_seqs=1)
    assert plan.max_model_len == 64  # less than the tokens of a step: nothing to save
    plan = plan_memory(
        golden("gemma3-text"), dtype="float32", kv_cache=64 * per_token, max_num_seqs=1, max_num_batched_tokens=1
    )
    assert plan.max_model_len > 64
    assert plan.kv_bytes <= 64 * per_token
