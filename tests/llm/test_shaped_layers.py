"""Layers that differ in shape, share keys and values, or have vectors of their own: Gemma 4, from prompt to plan."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from goldens import expected_of, golden
from lora.adapters import make_adapter
from quantised_files.writers import save
from reference.checkpoint import read_checkpoint
from safetensors.numpy import save_file

from infinilm import LLM, ConfigError, HookRegistry, PagedKVCacheConfig, plan_memory
from infinilm.checkpoint import Checkpoint
from infinilm.checkpoint.safetensors_header import DTYPE_CODES
from infinilm.engine.hooks import SITES
from infinilm.models.reference import ReferenceModel

NAMES = ("gemma4-text", "gemma4", "gemma4-moe")


def expected(name: str) -> tuple[list[int], list[int]]:
    outputs = expected_of(name)
    return outputs["input_ids"].tolist(), outputs["greedy_ids"].tolist()


def answers(name: str, prompts: list[list[int]], **options: Any) -> list[tuple[list[int], str]]:
    settings = {"dtype": "float32", "max_model_len": 128, "speculation": "off"}  # drafts would follow the clock
    with LLM(golden(name), use_tqdm=False, **settings, **options) as llm:
        results = llm.generate(prompts, temperature=0, max_tokens=16, ignore_eos=True, logprobs=1, use_tqdm=False)
        assert (llm.metrics().num_preemptions > 0) == ("kv_cache" in options)
        return [(list(result.outputs[0].token_ids), repr(result.outputs[0].logprobs)) for result in results]


@pytest.mark.parametrize("name", NAMES)
def test_answers_do_not_depend_on_chunks_neighbours_prefixes_or_memory(name: str) -> None:
    ids, greedy = expected(name)
    prompts = [ids, ids[:30] + ids[:7], ids, ids[5:], ids[:33]]
    alone = [answers(name, [prompt])[0] for prompt in prompts]
    assert alone[0][0] == greedy
    for options in (
        {},
        {"max_num_batched_tokens": 5},
        {"enable_prefix_caching": False},
        {"kv_cache": PagedKVCacheConfig(block_size=4, num_blocks=34)},  # some are set back, and computed again
    ):
        assert answers(name, prompts, **options) == alone


def test_the_text_part_of_a_model_that_also_sees(tmp_path: Path) -> None:
    """As Gemma 4 26B-A4B is published: layers of experts, under names of the text part, beside what sees."""
    plain = golden("gemma4-a4b")
    text = json.loads((plain / "config.json").read_text())
    outer = json.loads((golden("gemma4") / "config.json").read_text())
    del text["architectures"]
    outer["text_config"] = text | {"use_bidirectional_attention": "vision"}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    with Checkpoint(plain) as checkpoint:
        tensors = {
            name.replace("model.", "model.language_model.", 1): (DTYPE_CODES[info.dtype], checkpoint.array(name))
            for name, info in checkpoint.tensors.items()
        }
    save(tmp_path / "model.safetensors", tensors | {"model.vision_tower.std_scale": ("F32", np.ones(8, np.float32))})
    ids, greedy = expected("gemma4-a4b")
    logits = []
    for folder in (plain, tmp_path):
        with LLM(folder, dtype="float32", max_model_len=128, use_tqdm=False) as llm:
            logits.append(llm.forward(ids).tobytes())
            (output,) = llm.generate(ids, temperature=0, max_tokens=16, ignore_eos=True, use_tqdm=False)
            assert list(output.outputs[0].token_ids) == greedy
    assert logits[0] == logits[1]


@pytest.mark.parametrize("name", NAMES)
def test_hooks_see_what_the_reference_computes(name: str) -> None:
    ids, _ = expected(name)
    reference: dict[str, Any] = {}
    model = ReferenceModel.from_pretrained(golden(name))
    model.forward(ids, tap=lambda site, layer, value: reference.__setitem__(site, value.copy()))
    seen: dict[str, Any] = {}
    hooks = HookRegistry()
    for pattern in ("layer*", "embedding"):
        hooks.register_hook(
            pattern, lambda site, value, layer: seen.setdefault(site, value.numpy().copy()) is None or None
        )
    # One rank: hooks see the heads of a rank.
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "tensor_parallel_size": 1}
    with LLM(golden(name), **options, hooks=hooks, use_tqdm=False) as llm:
        llm.generate(ids, temperature=0, max_tokens=1, use_tqdm=False)
    assert seen.keys() == reference.keys() - {"final_norm", "logits"}
    for site, value in seen.items():
        np.testing.assert_allclose(
            value, reference[site], rtol=0, atol=3e-5 * np.abs(reference[site]).max(), err_msg=site
        )
    new = {site.name for site in SITES} & {site.partition("_")[2] for site in seen}
    own = {
        "gemma4-text": {"v_norm", "mlp_residual", "per_layer_input", "per_layer_projection"},
        "gemma4": {"v_norm"},
        "gemma4-moe": {"router_logits", "experts", "down_proj", "pre_feedforward_layernorm_2"},
    }
    assert own[name] <= new and ("layer3_k_proj" in seen) == (name == "gemma4")


@pytest.mark.parametrize("name", NAMES)
def test_adapters(name: str, tmp_path: Path) -> None:
    """One of k_proj changes the values, too, where these are keys; one of an MLP leaves the experts beside it alone."""
    base = tmp_path / "base"
    shutil.copytree(golden(name), base)
    text = {key: value for key, value in read_checkpoint(base).items() if "vision" not in key}
    save_file({key: np.ascontiguousarray(value) for key, value in text.items()}, base / "model.safetensors")
    linears = tmp_path / "linears"
    linears.mkdir()
    own = {key: np.ascontiguousarray(value) for key, value in text.items() if "experts" not in key}
    save_file(own, linears / "model.safetensors")
    adapter, (ids, _) = make_adapter(tmp_path / "adapter", linears), expected(name)
    model = ReferenceModel.from_pretrained(base, dtype="float64", max_model_len=128)
    plain = model.forward(ids)
    model.merge_lora(adapter)
    want = model.forward(ids)
    assert np.abs(want - plain).max() > 0.05 * np.abs(want).max()
    for ranks in (1, 2):
        options: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "use_tqdm": False}
        with LLM(base, lora={"x": adapter}, tensor_parallel_size=ranks, **options) as llm:
            assert np.abs(llm.forward(ids, lora="x") - want).max() < 3e-5 * np.abs(want).max()
            assert np.abs(llm.forward(ids) - plain).max() < 3e-5 * np.abs(want).max()


def test_the_plan_counts_shared_keys_and_values_once() -> None:
    plan = plan_memory(golden("gemma4-text"), max_num_seqs=2, max_model_len=64, dtype="float32", kv_cache="1MB")
    assert plan.kv_bytes_per_token == 4 * 2 * 2 * (16 + 16 + 24)  # of layers 0, 1 and 2
    with LLM(golden("gemma4-text"), dtype="float32", max_model_len=64, kv_cache="1MB", use_tqdm=False) as llm:
        assert llm.memory.kv_bytes_per_token == plan.kv_bytes_per_token
        assert llm.memory.weight_bytes == plan.weight_bytes


def test_ranks_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="tensor parallelism of 3 does not fit"):
        LLM(golden("gemma4-moe"), tensor_parallel_size=3, use_tqdm=False)
