"""Make tests/golden/rope.json and defaults.json: rotary frequencies and defaults of configurations of transformers.

Called by make_golden.py; needs torch and transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def spread(length: int, last: float) -> list[float]:
    """Longrope factors that grow with the wavelength, as searched ones do."""
    return [round(1.0 + (last - 1.0) * (i / (length - 1)) ** 2, 4) for i in range(length)]


# (head_dim, rope_theta, rope parameters, max_position_embeddings, max_model_len)
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
_PHI = {
    "rope_type": "longrope",
    "short_factor": spread(48, 2.0),
    "long_factor": spread(48, 40.0),
    "original_max_position_embeddings": 4096,
}
ROPES: list[tuple[int, float, dict[str, Any], int, int]] = [
    (128, 10000.0, {"rope_type": "default"}, 2048, 2048),
    (64, 500000.0, {"rope_type": "default"}, 8192, 4096),
    (80, 1000000.0, {"rope_type": "default"}, 32768, 32768),
    (20, 12345.0, {"rope_type": "default"}, 97, 97),
    (128, 10000.0, {"rope_type": "linear", "factor": 4.0}, 16384, 16384),
    (96, 10000.0, {"rope_type": "linear", "factor": 2.7}, 4096, 4096),
    (128, 10000.0, {"rope_type": "dynamic", "factor": 2.0}, 4096, 2048),
    (128, 10000.0, {"rope_type": "dynamic", "factor": 2.0}, 4096, 16384),
    (96, 10000.0, {"rope_type": "dynamic", "factor": 4.0}, 2048, 10000),
    (128, 500000.0, _LLAMA3, 131072, 131072),
    (64, 500000.0, {**_LLAMA3, "factor": 32.0}, 131072, 131072),
    (128, 1000000.0, _YARN, 131072, 131072),
    (128, 10000.0, {**_YARN, "factor": 40, "mscale": 1.0, "mscale_all_dim": 0.707}, 163840, 163840),
    (
        64,
        150000.0,
        {**_YARN, "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096},
        131072,
        9999,
    ),
    (80, 10000.0, {**_YARN, "attention_factor": 1.25, "beta_fast": 16, "beta_slow": 2}, 65536, 65536),
    (96, 10000.0, _PHI, 131072, 4096),
    (96, 10000.0, _PHI, 131072, 131072),
    (96, 10000.0, {**_PHI, "factor": 8.0}, 4096, 5000),
    (96, 10000.0, {**_PHI, "attention_factor": 1.5}, 131072, 4097),
    (512, 1000000.0, {"rope_type": "proportional", "partial_rotary_factor": 0.25}, 131072, 131072),
    (28, 10000.0, {"rope_type": "proportional", "partial_rotary_factor": 0.4, "factor": 3.0}, 4096, 4096),
    (128, 10000.0, {"rope_type": "ntk_alpha", "alpha": 1000.0}, 32768, 32768),
]


def rope_golden() -> list[dict[str, Any]]:
    rows = []
    for head_dim, theta, parameters, positions, max_model_len in ROPES:
        of_hunyuan = parameters["rope_type"] == "ntk_alpha"  # its config.json says "dynamic"
        kind = {"rope_type": "dynamic", "factor": 1.0} if of_hunyuan else {}
        config_class = transformers.HunYuanDenseV1Config if of_hunyuan else transformers.LlamaConfig
        config = config_class(
            hidden_size=2 * head_dim,
            num_attention_heads=2,
            head_dim=head_dim,
            max_position_embeddings=positions,
            rope_parameters={**parameters, **kind, "rope_theta": theta},
        )
        if of_hunyuan:
            rotary = transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense.HunYuanDenseV1RotaryEmbedding
            inv_freq, factor = rotary.compute_ntk_alpha_rope_parameters(config)
        elif parameters["rope_type"] == "default":
            rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
            inv_freq, factor = rotary.compute_default_rope_parameters(config)
        else:
            init = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
            inv_freq, factor = init(config, torch.device("cpu"), seq_len=max_model_len)
        rows.append(
            {
                "head_dim": head_dim,
                "rope_theta": theta,
                "parameters": parameters,
                "max_position_embeddings": positions,
                "max_model_len": max_model_len,
                "inv_freq": inv_freq.tolist(),
                "attention_factor": float(factor),
            }
        )
    return rows


def defaults_golden() -> dict[str, dict[str, Any]]:
    """What the config classes of transformers fill in where config.json says nothing."""
    configs = {
        "llama": transformers.LlamaConfig(),
        "mistral": transformers.MistralConfig(),
        "qwen2": transformers.Qwen2Config(),
        "qwen3": transformers.Qwen3Config(),
        "qwen2_5_vl": transformers.Qwen2_5_VLConfig().text_config,
        "qwen3_vl": transformers.Qwen3VLConfig().text_config,
        "mistral3": transformers.Mistral3Config().text_config,
        "ministral": transformers.MinistralConfig(),
        "ministral3": transformers.Ministral3Config(),
        "phi3": transformers.Phi3Config(),
        "glm": transformers.GlmConfig(),
        "glm4": transformers.Glm4Config(),
        "gemma": transformers.GemmaConfig(),
        "gemma2": transformers.Gemma2Config(),
        "gemma3_text": transformers.Gemma3TextConfig(),
        "starcoder2": transformers.Starcoder2Config(),
        "qwen2_vl": transformers.Qwen2VLConfig().text_config,
        "qwen3_vl_moe": transformers.Qwen3VLMoeConfig().text_config,
        "glm4v": transformers.Glm4vConfig().text_config,
        "nanochat": transformers.NanoChatConfig(),
        "olmo": transformers.OlmoConfig(),
        "olmo3": transformers.Olmo3Config(),
        "olmo_hybrid": transformers.OlmoHybridConfig(),
        "phimoe": transformers.PhimoeConfig(),
        "gpt_oss": transformers.GptOssConfig(),
        "cohere": transformers.CohereConfig(),
        "cohere2": transformers.Cohere2Config(),
        "gemma3": transformers.Gemma3Config().text_config,
        "gemma3n_text": transformers.Gemma3nTextConfig(),
        "gemma4_text": transformers.Gemma4TextConfig(per_layer_config={}),  # of layers with a window
        "gemma4_unified": transformers.Gemma4UnifiedTextConfig(per_layer_config={}),
        "glm4_moe": transformers.Glm4MoeConfig(),
        "dots1": transformers.Dots1Config(),
        "minimax_m2": transformers.MiniMaxM2Config(),
        "ernie4_5": transformers.Ernie4_5Config(),
        "ernie4_5_moe": transformers.Ernie4_5_MoeConfig(),
        "qwen3_next": transformers.Qwen3NextConfig(),
        "qwen3_5_text": transformers.Qwen3_5TextConfig(),
        "qwen3_5_moe_text": transformers.Qwen3_5MoeTextConfig(),
        "deepseek_v3": transformers.DeepseekV3Config(),
        "glm4_moe_lite": transformers.Glm4MoeLiteConfig(),
        "youtu": transformers.YoutuConfig(),
        "seed_oss": transformers.SeedOssConfig(),
        "internlm3": transformers.InternLM3Config(),
        "iquestcoder": transformers.IQuestCoderConfig(),
        "helium": transformers.HeliumConfig(),
        "stablelm": transformers.StableLmConfig(),
        "arcee": transformers.ArceeConfig(),
        "hunyuan_v1_dense": transformers.HunYuanDenseV1Config(),
        "hunyuan_v1_moe": transformers.HunYuanMoEV1Config(),
        "nemotron": transformers.NemotronConfig(),
        "jais2": transformers.Jais2Config(),
        "exaone4": transformers.Exaone4Config(),
        "cwm": transformers.CwmConfig(),
        "vaultgemma": transformers.VaultGemmaConfig(),
        "flex_olmo": transformers.FlexOlmoConfig(),
        "exaone_moe": transformers.ExaoneMoeConfig(),
        "afmoe": transformers.AfmoeConfig(),
        "mimo_v2_flash": transformers.MiMoV2FlashConfig(),
        "hyperclovax": transformers.HyperCLOVAXConfig(),
        "mellum": transformers.MellumConfig(),
        "olmoe": transformers.OlmoeConfig(),
        "solar_open": transformers.SolarOpenConfig(),
        "granitemoe": transformers.GraniteMoeConfig(),
        "granitemoeshared": transformers.GraniteMoeSharedConfig(),
        "axk1": transformers.AXK1Config(),
        "bailing_hybrid": transformers.BailingHybridConfig(),
        "glm_ocr": transformers.GlmOcrConfig().text_config,
        "phi4_multimodal": transformers.Phi4MultimodalConfig(),
    }
    keys = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("hidden_act", "num_key_value_heads"),
        *("head_dim", "max_position_embeddings", "rms_norm_eps", "attention_bias", "mlp_bias"),
        *("tie_word_embeddings", "bos_token_id", "eos_token_id", "rope_parameters", "layer_types"),
    )
    return {
        name: {key: getattr(config, key) for key in keys if hasattr(config, key)} for name, config in configs.items()
    }


def write_facts(folder: Path) -> None:
    rows = ",\n".join(json.dumps(row) for row in rope_golden())
    (folder / "rope.json").write_text(f"[\n{rows}\n]\n")
    (folder / "defaults.json").write_text(json.dumps(defaults_golden(), indent=1) + "\n")
