"""Whole models in a cache that is too small for all that runs: answers are those of each request alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llm import tiny

import infinilm
from infinilm import LLM, SamplingParams

BLOCK_BYTES = 16 * 2 * 2 * (2 * 8) * 4  # 16 tokens; K and V of 2 layers, 2 heads of 8, float32


def make_requests() -> tuple[list[list[int]], list[SamplingParams]]:
    rng = np.random.default_rng(3)
    base = rng.integers(0, 256, 60).tolist()
    prompts = [base[: rng.integers(1, 60)] + rng.integers(0, 256, rng.integers(1, 20)).tolist() for _ in range(16)]
    params = [
        SamplingParams(temperature=float(i % 3), seed=i, max_tokens=int(rng.integers(10, 45)), ignore_eos=True)
        for i in range(16)
    ]
    return prompts, params


def tokens(outputs: list[infinilm.RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module", params=[{}, {"model_type": "mistral", "sliding_window": 24}], ids=["full", "window"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes: dict[str, Any] = dict(request.param)
    if changes:
        changes["architectures"] = ["MistralForCausalLM"]
    return tiny.make_checkpoint(tmp_path_factory.mktemp("pool") / "tiny", **changes)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[list[list[int]]]:
    prompts, params = make_requests()
    with LLM(folder, enable_prefix_caching=False, use_tqdm=False) as model:
        yield [tokens(model.generate([p], s, use_tqdm=False))[0] for p, s in zip(prompts, params, strict=True)]
        assert model._thread.scheduler.stats.prefix_hit_rate == 0


@pytest.mark.parametrize("num_blocks", [8, 12, 40])
@pytest.mark.parametrize("caching", [True, False])
def test_answers_do_not_depend_on_the_pool(
    folder: Path, alone: list[list[int]], num_blocks: int, caching: bool
) -> None:
    prompts, params = make_requests()
    settings: dict[str, Any] = {"max_num_batched_tokens": 48, "max_num_seqs": 12, "use_tqdm": False}
    settings["speculation"] = "off"  # drafts would follow the clock, and so would preemptions
    with LLM(folder, kv_cache=num_blocks * BLOCK_BYTES, enable_prefix_caching=caching, **settings) as model:
        assert model.memory.num_blocks == num_blocks
        assert tokens(model.generate(prompts, params, use_tqdm=False)) == alone
        stats = model._thread.scheduler.stats
        outputs = model.generate(prompts, params, use_tqdm=False)
        assert tokens(outputs) == alone
        assert model._thread.scheduler.stats.num_used_blocks == 0
    if num_blocks == 8:
        assert stats.num_preemptions > 0
    if num_blocks == 40:
        assert (stats.prefix_hit_rate > 0) == caching
        assert any(output.metrics.cached_tokens for output in outputs if output.metrics) == caching
