"""What holds of every golden checkpoint, so that a new family cannot be forgotten: each site is as in the numpy model,
and no bit of an answer depends on hooks, on other requests, on chunks, on threads or on the prefix cache.

Logits against transformers: tests/model. Ranks: tests/dist. GPUs: tests/cuda.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from goldens import GOLDENS, expected_of, golden

from infinilm import LLM, AutoConfig, ConfigError, HookRegistry, ReferenceModel, _core, compare
from infinilm.config.spec import build_spec

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6, "logprobs": 1, "ignore_eos": True, "use_tqdm": False}


def told(outputs: Any) -> list[Any]:
    """Tokens and their log-probabilities, which have the bits of the logits."""
    return [(list(output.outputs[0].token_ids), output.outputs[0].logprobs) for output in outputs]


def assert_hit(llm: LLM, output: Any, ids: list[int]) -> None:
    """All but the last token of a prompt that was there before: whole blocks, or up to the last state that is kept."""
    every = llm.memory.snapshot_interval or llm.memory.block_size
    assert output.metrics.cached_tokens == (len(ids) - 1) // every * every


@pytest.mark.one_rank
@pytest.mark.parametrize("name", GOLDENS)
def test_sites_and_bits(name: str) -> None:
    folder, expected = golden(name), expected_of(name)
    ids, max_model_len = expected["input_ids"].tolist(), int(expected["max_model_len"])
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": max_model_len}
    settings |= {"tensor_parallel_size": 1, "use_tqdm": False}  # hooks see the heads of a rank
    prompts = [ids, ids[:3], [*ids[:17], 5], ids[::-1]]
    with LLM(folder, max_num_seqs=1, num_threads=1, enable_prefix_caching=False, **settings) as llm:
        alone = [told(llm.generate(prompt, **GREEDY))[0] for prompt in prompts]
        logits = llm.forward(ids)
        oracle = ReferenceModel.from_pretrained(folder, dtype="float64", max_model_len=max_model_len)
        result = compare(llm, oracle, ids)
        assert result.equal and not result.unmatched, str(result)

    hooks = HookRegistry()
    calls: list[str] = []
    handle = hooks.register_hook("*", lambda name, _tensor, _layer: calls.append(name))
    with LLM(folder, max_num_seqs=3, num_threads=2, max_num_batched_tokens=7, hooks=hooks, **settings) as llm:
        assert np.array_equal(llm.forward(ids), logits) and calls[0] == "embedding"
        handle.remove()
        outputs = llm.generate(prompts, return_receipt=True, **GREEDY)
        assert told(outputs) == alone
        assert all(llm.verify([output.outputs[0].receipt for output in outputs], use_tqdm=False))
        again = llm.generate(ids, **GREEDY)
        assert told(again) == alone[:1]
        assert_hit(llm, again[0], ids)
        every = llm.memory.snapshot_interval
        if every >= len(ids):  # states are kept some hundred tokens apart
            longer = np.resize(ids, every + 5).tolist()
            first, again = (llm.generate(longer, **GREEDY) for _ in range(2))
            assert told(again) == told(first)
            assert_hit(llm, again[0], longer)


def test_a_prompt_of_several_chunks(tmp_path: Path) -> None:
    """Attention in chunks that end inside of what kernels take at a time."""
    folder = shutil.copytree(golden("llama4"), tmp_path / "llama4")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= {"attention_chunk_size": 300, "max_position_embeddings": 1024}
    (folder / "config.json").write_text(json.dumps(config))
    ids = np.random.default_rng(3).integers(0, 128, 700).tolist()
    want = ReferenceModel.from_pretrained(folder, dtype="float64").forward(ids)
    with LLM(folder, dtype="float32", num_threads=1, use_tqdm=False) as whole:
        logits = whole.forward(ids)
        token = whole.generate(ids, **GREEDY)
    assert np.abs(logits - want).max() < 2e-5 * np.abs(want).max()
    with LLM(folder, dtype="float32", num_threads=3, max_num_batched_tokens=90, use_tqdm=False) as parts:
        assert np.array_equal(parts.forward(ids), logits) and told(parts.generate(ids, **GREEDY)) == told(token)


def test_what_gpus_have_no_kernels_for_is_refused_by_its_name() -> None:
    config = AutoConfig.from_pretrained(golden("qwen3-next"))
    config.linear_value_head_dim = 7
    spec = build_spec(config, dtype="float32", max_model_len=64)
    with pytest.raises(ConfigError, match="models with states of an odd number of columns do not run on cuda:0"):
        _core.InferEngine(spec, ["cuda:0"])
