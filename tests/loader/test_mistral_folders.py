"""Folders of Mistral AI's own tools (consolidated.safetensors, params.json) and the same models in the usual form."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from goldens import config_of, golden
from loader.test_sources import load_bits, logits
from quantised_files.writers import E4M3, bf16, save

from infinilm import LLM, AutoConfig, plan_memory
from infinilm.checkpoint.opening import open_checkpoint
from infinilm.checkpoint.pack_writer import pack_model
from infinilm.checkpoint.sources import Source
from infinilm.errors import ConfigError, WeightError
from infinilm.hub import skipped_files
from infinilm.mistral_params import config_of_params

NAMES = {
    **{f"self_attn.{part}_proj": f"attention.w{part}" for part in "qkvo"},
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "block_sparse_moe": "feed_forward",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "embed_tokens": "tok_embeddings",
    "lm_head": "output",
}


def turned(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """From halves of a head that RoPE turns together to neighbours."""
    heads = rows.reshape(-1, 2, head_dim // 2, rows.shape[1])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(rows.shape)


def params_of(config: dict[str, Any], head_dim: int) -> dict[str, Any]:
    params = {
        "dim": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "head_dim": head_dim,
        "hidden_dim": config["intermediate_size"],
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "norm_eps": config["rms_norm_eps"],
        "vocab_size": config["vocab_size"],
        "max_position_embeddings": config["max_position_embeddings"],
        "tied_embeddings": config.get("tie_word_embeddings", False),
        "rope_theta": config.get("rope_theta", 1e6),
        "sliding_window": config.get("sliding_window"),
        "vision_encoder": {"hidden_size": 8},
    }
    if "layer_types" in config:
        window = config["sliding_window"]
        params["sliding_window"] = [None if kind == "full_attention" else window for kind in config["layer_types"]]
    if "num_local_experts" in config:
        params["moe"] = {"num_experts": config["num_local_experts"], "num_experts_per_tok": 2}
    if rope := config.get("rope_parameters"):
        original = rope["original_max_position_embeddings"]
        params["yarn"] = {"original_max_position_embeddings": original, "factor": rope["factor"], "beta": 32}
        params["yarn"] |= {"alpha": 1, "apply_scale": False}
        params["llama_4_scaling"] = {"original_max_position_embeddings": original, "beta": rope["llama_4_scaling_beta"]}
    return params


def consolidated(name: str, folder: Path) -> Path:
    """The model of a golden as Mistral AI's own tools have it."""
    config, read = config_of(name), AutoConfig.from_pretrained(golden(name))
    config["rms_norm_eps"], head_dim = read.rms_norm_eps, read.head_dim
    tensors = {"vision_encoder.ln_pre.weight": np.ones(8, np.float32)}
    for file in golden(name).glob("*.safetensors"):
        for key, array in load_bits(file).items():
            if key.endswith(("q_proj.weight", "k_proj.weight")):
                array = turned(array, head_dim)
            for theirs, own in NAMES.items():
                key = re.sub(rf"\b{re.escape(theirs)}\b", own, key)
            tensors[key.removeprefix("model.")] = array
    folder.mkdir()
    (folder / "params.json").write_text(json.dumps(params_of(config, head_dim)))
    save(folder / "consolidated.safetensors", {key: ("F32", np.float32(array)) for key, array in tensors.items()})
    return folder


@pytest.mark.parametrize("name", ["mistral-head-dim", "ministral", "ministral3-long", "mixtral"])
def test_the_same_model(name: str, tmp_path: Path) -> None:
    """The same bits, also where Hugging Face's config.json stands beside such weights."""
    folder, expected = consolidated(name, tmp_path / "own"), logits(golden(name))
    np.testing.assert_array_equal(logits(folder), expected)
    shutil.copy(golden(name) / "config.json", folder)
    np.testing.assert_array_equal(logits(folder), expected)


def test_what_else_reads_a_folder(tmp_path: Path) -> None:
    folder, usual = consolidated("ministral3-long", tmp_path / "own"), golden("ministral3-long")
    assert plan_memory(folder).weight_bytes == 2 * plan_memory(usual).weight_bytes  # float32, and bfloat16
    pack_model(folder, tmp_path / "packed", dtype="float32", use_tqdm=False)
    np.testing.assert_array_equal(logits(tmp_path / "packed"), logits(usual))
    with LLM(folder, dtype="float32", tensor_parallel_size=2, max_model_len=64, use_tqdm=False) as llm:
        got = llm.forward(list(range(3, 43)))
    np.testing.assert_allclose(got, logits(folder), atol=1e-5)


def test_fp8(tmp_path: Path) -> None:
    codes = np.random.default_rng(0).integers(0, 0x7F, (32, 64)).astype(np.uint8)
    tensors = {
        "layers.0.attention.wv.weight": ("F8_E4M3", codes),
        "layers.0.attention.wv.qscale_weight": ("BF16", bf16(np.float32(0.25))),
        "layers.0.attention.wv.qscale_act": ("BF16", bf16(np.float32(0.5))),
    }
    (tmp_path / "params.json").write_text('{"quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}}')
    save(tmp_path / "consolidated.safetensors", tensors)
    with open_checkpoint(tmp_path) as checkpoint:
        assert list(checkpoint.tensors) == ["layers.0.attention.wv.weight"]
        got = checkpoint.read(Source("layers.0.attention.wv.weight", 0, 32), "float32")
    np.testing.assert_array_equal(got, E4M3[codes] * 0.25)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported; supported: 'transformer'"),
        ({"yarn": 4}, "yarn must be an object; got 4"),
        ({"yarn": {"gamma": 1}}, "yarn: gamma is not supported; supported: factor, original_max"),
        ({"sliding_window": [4, None, 8]}, r"sliding_window has several sizes, \[4, 8\]"),
        ({"moe": {"num_experts": 4, "num_experts_per_tok": 2, "route_every_n": 2}}, "moe: route_every_n must be 1"),
        ({"quantization": {"qformat_weight": "int4"}}, "qformat_weight must be 'fp8_e4m3'; got"),
        ({"use_biases": True}, "attention_bias is True, but in MistralForCausalLM it is always False"),
        ({"dim": "wide"}, "hidden_size must be an integer"),
        ({"n_layers": "many", "sliding_window": [4]}, "n_layers must be a number of layers; got 'many'"),
    ],
)
def test_bad_params(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    params = params_of(config_of("mistral-head-dim") | {"rms_norm_eps": 1e-6}, 32) | changes
    (tmp_path / "params.json").write_text(json.dumps(params))
    with pytest.raises(ConfigError, match=rf"params\.json.*{message}"):
        AutoConfig.from_pretrained(tmp_path)


def test_latent_attention_and_its_experts() -> None:
    """The keys of Mistral Large 3 and Small 4."""
    moe = {"num_experts": 8, "num_experts_per_tok": 2, "expert_hidden_dim": 24, "num_shared_experts": 1}
    moe |= {"routed_scale": 1.0, "first_k_dense_replace": 1, "num_expert_groups": 1, "num_expert_groups_per_tok": 1}
    sizes = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    config = config_of_params({"dim": 64, "n_layers": 2, "moe": moe, **sizes, "yarn": {"factor": 8.0}})
    assert config["architectures"] == ["Mistral4ForCausalLM"]
    assert {"num_local_experts": 8, "moe_intermediate_size": 24, "n_shared_experts": 1}.items() <= config.items()
    assert config["rope_parameters"] == {
        **{"rope_type": "yarn", "factor": 8.0, "rope_theta": 10000.0},
        **{"mscale": 1.0, "mscale_all_dim": 1.0},
    }


def test_a_layer_that_lacks_a_tensor(tmp_path: Path) -> None:
    folder = consolidated("mistral-head-dim", tmp_path / "own")
    tensors = load_bits(folder / "consolidated.safetensors")
    tensors.pop("layers.1.feed_forward.w3.weight")
    save(folder / "consolidated.safetensors", {key: ("F32", array) for key, array in tensors.items()})
    with pytest.raises(WeightError, match=r"1 missing from the files: layers\.1\.feed_forward\.w3\.weight"):
        logits(folder)


def test_what_is_fetched_of_the_hub() -> None:
    """These weights where there are no others."""
    own = ["params.json", "consolidated.safetensors", "tekken.json"]
    assert "consolidated*" not in skipped_files(own)
    assert "consolidated*" not in skipped_files([*own, "original/model.safetensors"])
    assert "consolidated*" in skipped_files([*own, "model-00001-of-00002.safetensors"])
    assert "consolidated*" in skipped_files(["consolidated.safetensors"])
