"""Folders of PEFT: what PEFT computes from them, and what is refused by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from goldens import golden
from llm import tiny

from infinilm import LLM, AutoConfig, ReferenceModel
from infinilm.errors import ConfigError, WeightError
from infinilm.lora import read_adapter
from infinilm.lora.settings import LoraSettings
from lora.adapters import make_adapter

TESTS = Path(__file__).resolve().parents[1]
GOLDEN = sorted(folder for folder in (TESTS / "lora" / "golden").iterdir() if folder.is_dir())


@pytest.mark.parametrize("folder", GOLDEN, ids=lambda folder: folder.name)
def test_logits_equal_those_of_peft(folder: Path) -> None:
    """With the adapter beside the model, merged into it, and in the numpy model; on one rank and on two."""
    with np.load(folder / "expected.npz") as file:
        base, ids, want = golden(str(file["base"])), file["input_ids"], file["logits"]

    def assert_near(got: Any, tolerance: float = 1e-4) -> None:
        assert np.abs(got - want).max() < tolerance * np.abs(want).max()

    model = ReferenceModel.from_pretrained(base, dtype="float64")
    model.merge_lora(folder)
    assert_near(model.forward(ids))
    options: dict[str, Any] = {"dtype": "float32", "kv_cache_dtype": "float32", "use_tqdm": False}
    with LLM(base, merge_lora=folder, **options) as llm:  # which rounds the sum as the weights are
        assert_near(llm.forward(ids), 1e-4 if model.config.dtype == "float32" else 3e-2)
    for num_ranks in (1, 2) if model.config.num_attention_heads % 2 == 0 else (1,):
        with LLM(base, lora={"x": folder}, tensor_parallel_size=num_ranks, **options) as llm:
            assert_near(llm.forward(ids, lora="x"))
            assert np.abs(llm.forward(ids) - want).max() > 0.1 * np.abs(want).max()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_checkpoint(tmp_path_factory.mktemp("lora") / "base")


NOT_SUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "peft_type: expected 'LORA'"),
    ({"use_dora": True}, "use_dora: DoRA"),
    ({"bias": "all"}, "bias: biases"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out: "),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save: whole modules"),
    ({"target_parameters": ["experts.down_proj"]}, "target_parameters: "),
    ({"layer_replication": [[0, 2]]}, "layer_replication: "),
    ({"init_lora_weights": "pissa"}, "init_lora_weights: "),
    ({"r": 0}, "r: expected a positive integer; got 0"),
    ({"r": None}, "r: expected a positive integer; got None"),
    ({"lora_alpha": "8"}, "lora_alpha: expected a positive number; got '8'"),
    ({"rank_pattern": {"(": 2}}, r"rank_pattern: '\(' is no regular expression"),
    ({"alpha_pattern": [1]}, "alpha_pattern: expected an object"),
    ({"target_modules": None}, "target_modules: expected names"),
    ({"rank_pattern": {r"(a)\1": 2}}, "rank_pattern: regular expressions with groupref are not supported"),
    ({"target_modules": "("}, r"target_modules: '\(' is no regular expression"),
]


@pytest.mark.parametrize(
    ("targets", "ranks", "module", "is_target", "rank"),
    [
        ("(?i)MODEL.*Q_PROJ", {"(?i)Q_PROJ": 3}, "model.layers.0.self_attn.q_proj", True, 3),
        ("([a-z_.0-9]+)*[A-Z]", {"([a-z_.0-9]+)*[A-Z]": 3}, f"model.{'a' * 90}.q_proj", False, 2),
        ("all-linear", {"attn.q_proj": 3, "0.self_attn.q_proj": 4}, "model.layers.0.self_attn.q_proj", True, 4),
    ],
)
def test_patterns_of_modules(
    base: Path, tmp_path: Path, targets: str, ranks: dict[str, int], module: str, is_target: bool, rank: int
) -> None:
    """No pattern takes long, and each may begin with flags."""
    folder = make_adapter(tmp_path / "a", base)
    path = folder / "adapter_config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"r": 2, "target_modules": targets, "rank_pattern": ranks})
    )
    settings = LoraSettings.read(folder)
    assert (settings.is_target(module), settings.rank_of(module)) == (is_target, rank)


@pytest.mark.parametrize(("settings", "message"), NOT_SUPPORTED, ids=lambda value: str(value)[:30])
def test_keys_that_are_not_supported(base: Path, tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    folder = make_adapter(tmp_path / "a", base, **settings) if "target_modules" not in settings else tmp_path / "a"
    if "target_modules" in settings:
        make_adapter(folder, base)
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(ConfigError, match=message) as caught:
        read_adapter(folder, AutoConfig.from_pretrained(base))
    assert str(folder / "adapter_config.json") in str(caught.value)


Q = "base_model.model.model.layers.0.self_attn.q_proj"
PAIR = {"lora_A": (4, 32), "lora_B": (32, 4)}


def pair(module: str, a: tuple[int, int], b: tuple[int, int], dtype: Any = np.float32) -> dict[str, Any]:
    at = f"base_model.model.{module}"
    return {f"{at}.lora_A.weight": np.zeros(a, dtype), f"{at}.lora_B.weight": np.zeros(b, dtype)}


BAD_TENSORS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (pair("lm_head", (4, 32), (270, 4)), {}, r"'base_model.model.lm_head.lora_A.weight' is of a module"),
    (pair("model.layers.9.mlp.up_proj", (4, 32), (48, 4)), {}, r"layers\.9\.mlp\.up_proj.* is of a module"),
    ({f"{Q}.lora_magnitude_vector": np.zeros(3, np.float32)}, {}, "lora_magnitude_vector' is not supported"),
    ({"base_model.model.model.embed_tokens.lora_embedding_A": np.zeros((4, 9), np.float32)}, {}, "embedding_A' is not"),
    (pair("model.layers.0.self_attn.q_proj", (4, 31), (32, 4)), {}, r"expected shape \[4, 32\].*got \[4, 31\]"),
    (pair("model.layers.0.self_attn.q_proj", (4, 32), (32, 5)), {}, r"expected shape \[32, 4\].*got \[32, 5\]"),
    (pair("model.layers.0.self_attn.q_proj", (5, 32), (32, 5)), {}, r"expected shape \[4, 32\], of rank 4"),
    (pair("model.layers.0.self_attn.q_proj", (4, 32), (32, 4), np.int32), {}, "expected a floating dtype, got int32"),
    ({f"{Q}.lora_A.weight": np.zeros((4, 32), np.float32)}, {}, "has no partner"),
    (pair("model.layers.0.mlp.up_proj", (4, 32), (48, 4)), {"target_modules": ["k_proj"]}, "of no module that target"),
    ({}, {"target_modules": ["k_proj", "v_proj"]}, "no tensor is of 'v_proj', which target_modules"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "settings", "message"), BAD_TENSORS, ids=lambda value: str(value)[-40:])
def test_tensors_that_do_not_fit(
    base: Path, tmp_path: Path, more: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    settings = {"target_modules": "all-linear"} | settings
    folder = make_adapter(tmp_path / "a", base, targets=["k_proj"], more=more)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(WeightError, match=message):
        read_adapter(folder, AutoConfig.from_pretrained(base))


def test_folders_that_are_none(base: Path, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(base)
    with pytest.raises(FileNotFoundError, match=r"expected the folder of a LoRA adapter .*adapter_config.json"):
        read_adapter(base, config)
    folder = make_adapter(tmp_path / "a", base)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(WeightError, match=r"no such file \(adapter_model.bin is not read; .*safe_serialization"):
        read_adapter(folder, config)


def test_experts_are_refused_and_attention_beside_them_is_not(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    sizes |= {"norm_topk_prob": True, "shared_expert_intermediate_size": 0, "qkv_bias": False}
    names: dict[str, Any] = {"model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"]}
    moe = tiny.make_checkpoint(tmp_path / "moe", weights=False, **names, **sizes)
    config = AutoConfig.from_pretrained(moe)
    model = tiny.make_checkpoint(tmp_path / "weights", **names, **sizes)
    with pytest.raises(WeightError, match=r"experts\.0\.down_proj.*is of a module that requests cannot have"):
        read_adapter(make_adapter(tmp_path / "a", model), config)
    attention = make_adapter(tmp_path / "b", model, targets=["q_proj", "o_proj"])
    assert len(read_adapter(attention, config).weights) == 4
    ids = [5, 9, 33, 40, 2]
    oracle = ReferenceModel.from_pretrained(model, dtype="float64")
    plain = oracle.forward(ids)
    oracle.merge_lora(attention)
    want = oracle.forward(ids)
    assert np.abs(want - plain).max() > 0.1 * np.abs(want).max()
    for num_ranks in (1, 2):
        with LLM(model, lora={"x": attention}, tensor_parallel_size=num_ranks, use_tqdm=False) as llm:
            assert np.abs(llm.forward(ids, lora="x") - want).max() < 2e-5 * np.abs(want).max()
            assert np.abs(llm.forward(ids) - plain).max() < 2e-5 * np.abs(plain).max()
