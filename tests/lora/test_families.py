"""Adapters of what families have besides q, k, v, o and a dense MLP: latents, the delta rule, vectors of each layer,
experts of all tokens. Held against the numpy model of a checkpoint whose tensors have the change.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from goldens import golden

from infinilm import LLM, AutoConfig, ReferenceModel, plan_memory
from infinilm.errors import WeightError
from infinilm.lora import read_adapter
from lora.adapters import OF_REQUESTS, changed_model, make_adapter, text_model

NAMES = ("deepseek-v2", "deepseek-v3", "glm4-moe-lite", "gemma4-text", "qwen2-moe", "qwen3-5", "qwen3-next")
OF_WEIGHTS = r"(?!.*(?:embed_|lm_head)).*"
IDS = [5, 9, 33, 40, 2, 61, 7, 7, 18]
OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_cache_dtype": "float32", "max_model_len": 64, "use_tqdm": False}
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4, "logprobs": 1, "ignore_eos": True}


def logits_of(folder: Path) -> Any:
    return ReferenceModel.from_pretrained(folder, dtype="float64", max_model_len=64).forward(IDS)


def assert_near(got: Any, want: Any) -> None:
    assert np.abs(got - want).max() < 1e-4 * np.abs(want).max()


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    at = tmp_path_factory.mktemp("families")
    return {name: text_model(at / name, golden(name)) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_changed_weights(bases: dict[str, Path], tmp_path: Path, name: str) -> None:
    """Every linear that adapters can change, on one rank and on two; without an adapter nothing changes."""
    base = bases[name]
    adapter = make_adapter(tmp_path / "adapter", base, rank=3, targets=OF_REQUESTS)
    config = AutoConfig.from_pretrained(base)
    want, plain = logits_of(changed_model(tmp_path / "changed", base, adapter)), logits_of(base)
    assert np.abs(want - plain).max() > 0.1 * np.abs(want).max()
    for num_ranks in (1, 2):
        with LLM(base, tensor_parallel_size=num_ranks, **OPTIONS) as llm:
            without = llm.forward(IDS)
        with LLM(base, lora={"x": adapter}, tensor_parallel_size=num_ranks, **OPTIONS) as llm:
            assert_near(llm.forward(IDS, lora="x"), want)
            assert llm.forward(IDS).tobytes() == without.tobytes()
    weights = read_adapter(adapter, config).weights
    at_least = sum(weight.a.nbytes + weight.b.nbytes for weight in weights.values())
    plans = [plan_memory(base, device="cpu", lora=lora, max_model_len=64) for lora in ({}, {"x": adapter})]
    assert plans[1].weight_bytes - plans[0].weight_bytes >= at_least


@pytest.mark.parametrize("name", NAMES)
def test_merged(bases: dict[str, Path], tmp_path: Path, name: str) -> None:
    """All linears of layers, experts and routers with them; the numpy model merges alike."""
    base = bases[name]
    adapter = make_adapter(tmp_path / "adapter", base, rank=2, targets=OF_WEIGHTS, seed=1)
    want = logits_of(changed_model(tmp_path / "changed", base, adapter))
    with LLM(base, merge_lora=adapter, **OPTIONS) as llm:
        assert_near(llm.forward(IDS), want)
    model = ReferenceModel.from_pretrained(base, dtype="float64", max_model_len=64)
    model.merge_lora(adapter)
    assert_near(model.forward(IDS), want)


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-next"])
def test_a_request_does_not_depend_on_its_company(bases: dict[str, Path], tmp_path: Path, name: str) -> None:
    """Bit for bit: several adapters in a step, and none, in chunks and with prefixes that the cache knows."""
    base = bases[name]
    adapters = {
        "all": make_adapter(tmp_path / "all", base, targets=OF_REQUESTS),
        "wide": make_adapter(tmp_path / "wide", base, rank=40, targets=r".*\.(?:o_proj|out_proj|kv_b_proj|in_proj_ba)"),
    }
    names = [None, "all", "wide", "all"]
    prompts = [[*range(3, 3 + length)] for length in (9, 33, 20, 2)]
    with LLM(base, lora=adapters, **OPTIONS) as llm:
        alone = [llm.generate(prompt, lora=own, **GREEDY)[0] for prompt, own in zip(prompts, names, strict=True)]
    with LLM(base, lora=adapters, num_threads=2, max_num_batched_tokens=7, **OPTIONS) as llm:
        for _ in range(2):
            requests = [llm.submit(prompt, lora=own, **GREEDY) for prompt, own in zip(prompts, names, strict=True)]
            for request, want in zip(requests, alone, strict=True):
                (got,), (choice,) = request.result().outputs, want.outputs
                assert (got.token_ids, got.logprobs) == (choice.token_ids, choice.logprobs)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("deepseek-v3", r".*layers\.1\.mlp\.experts\.0\.up_proj"),
        ("deepseek-v3", r".*layers\.1\.mlp\.gate"),
        ("qwen3-next", r".*layers\.0\.mlp\.shared_expert_gate"),
    ],
)
def test_what_can_only_be_merged(bases: dict[str, Path], tmp_path: Path, name: str, module: str) -> None:
    adapter = make_adapter(tmp_path / "adapter", bases[name], targets=module)
    config = AutoConfig.from_pretrained(bases[name])
    assert read_adapter(adapter, config, merged=True).weights
    with pytest.raises(
        WeightError, match=rf"{module}\.lora_A.weight' is of a module that requests cannot .*merge_lora"
    ):
        read_adapter(adapter, config)


def test_adapters_of_other_sizes(bases: dict[str, Path], tmp_path: Path) -> None:
    """A, B of another kv_b_proj, and of a joined in_proj_qkvz."""
    with pytest.raises(WeightError, match=r"kv_b_proj.lora_A.weight': expected shape \[4, 24\], .*got \[4, 32\]"):
        read_adapter(
            make_adapter(tmp_path / "a", bases["glm4-moe-lite"], targets=["kv_b_proj"]),
            AutoConfig.from_pretrained(bases["deepseek-v3"]),
        )
    with pytest.raises(WeightError, match=r"in_proj_qkv\.lora_A\.weight' is of a module that an adapter cannot change"):
        read_adapter(
            make_adapter(tmp_path / "b", bases["qwen3-5"], targets=["in_proj_qkv"]),
            AutoConfig.from_pretrained(bases["qwen3-next"]),
        )
