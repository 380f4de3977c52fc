"""Write tests/golden: tiny random checkpoints with what transformers computes from them; rope frequencies.

Needs torch and transformers 5.x; run once, from the repository root (the tests need neither):

    python tools/make_golden.py [name ...]

Per checkpoint: config.json (as written here, in 4.x or 5.x spelling), safetensors, and expected.npz with
`input_ids` [n], `logits` float32 [n, vocab_size], `greedy_ids` [16], `max_model_len`. All is computed in
float32 from the weights as stored, eager attention, greedy tokens by full recomputation. Rope types whose
frequencies depend on the length in transformers are frozen at those for max_model_len tokens, see
infinilm/config/rope.py. A seed is accepted only if every greedy token leads by 1e-3 of the largest logit.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden"
NUM_GREEDY = 16
MIN_LEAD = 1e-3

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}


# Of checkpoints that have a tensor for each expert: where experts are in a layer, and their gate, up and down.
EXPERT_NAMES = {
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    "qwen3-moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "qwen3-next": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "glm4-moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "minimax-m2": ("block_sparse_moe", "w1", "w3", "w2"),
    "ernie4-5-moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "deepseek-v3": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "kimi-k2": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "kimi-k25": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "olmoe": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "solar-open": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "hunyuan-moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
}


_LLAMA_NAMES = ("num_hidden_layers", "hidden_act")


def sizes(vocab: int, hidden: int, inter: int, layers: int, heads: int, kv_heads: int | None = None) -> dict[str, Any]:
    values = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "hidden_act": "silu",
    }
    return values if kv_heads is None else {**values, "num_key_value_heads": kv_heads}


def spread(length: int, last: float) -> list[float]:
    """Longrope factors that grow with the wavelength, as searched ones do."""
    return [round(1.0 + (last - 1.0) * (i / (length - 1)) ** 2, 4) for i in range(length)]


# Of models that also see: tokens that no prompt here has.
NO_IMAGES = {"image_token_id": 0, "video_token_id": 1, "vision_start_token_id": 2, "vision_end_token_id": 2}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

LONGROPE = {
    "rope_type": "longrope",
    "short_factor": spread(8, 1.5),
    "long_factor": spread(8, 6.0),
    "original_max_position_embeddings": 32,
}

TINY_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 48,
    "patch_size": 4,
    "spatial_merge_size": 1,
}

TINY_SIGLIP = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}

SMALL_LLAMA = {
    "model_type": "llama",
    **sizes(160, 64, 72, 2, 4, 2),
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}

TINY_PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 16,
    "intermediate_size": 16,
    "head_dim": 8,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "image_size": 16,
    "patch_size": 4,
    "num_channels": 3,
    "hidden_act": "gelu",
}

PHI4_MINI = {
    "model_type": "phi3",
    "architectures": ["Phi3ForCausalLM"],
    **sizes(160, 64, 72, 2, 4, 2),
    "max_position_embeddings": 128,
    "original_max_position_embeddings": 32,
    "partial_rotary_factor": 0.75,
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "longrope", "short_factor": spread(6, 1.5), "long_factor": spread(6, 6.0)},
    "sliding_window": 256,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}

# A small gated delta rule, with sizes that no vector has.
SMALL_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}

# Names of tensors as published checkpoints have them, where the module of transformers 5 has others.
STORED_NAMES: dict[str, dict[str, str]] = {
    "qwen2-vl": {"model.language_model.": "model.", "model.visual.": "visual."},
    "qwen2-5-vl": {"model.language_model.": "model.", "model.visual.": "visual."},
    "kimi-k25": {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    "gemma3": {
        "model.language_model.": "language_model.model.",
        "model.vision_tower.": "vision_tower.",
        "model.multi_modal_projector.": "multi_modal_projector.",
    },
    "mistral3": {
        "model.language_model.": "language_model.model.",
        "model.vision_tower.": "vision_tower.",
        "model.multi_modal_projector.": "multi_modal_projector.",
        "lm_head.": "language_model.lm_head.",
    },
}

# The same within a name.
STORED_PARTS: dict[str, dict[str, str]] = {
    name: {
        ".block_sparse_moe.experts.gate_up_proj": ".block_sparse_moe.input_linear.weight",
        ".block_sparse_moe.experts.down_proj": ".block_sparse_moe.output_linear.weight",
        ".block_sparse_moe.router.weight": ".block_sparse_moe.router.layer.weight",
    }
    for name in ("granite-moe", "granite-moe-shared")
}

# name -> (config.json, stored dtype, prompt tokens, max_model_len, files)
SLIDING, FULL = "sliding_attention", "full_attention"
SMALL_GEMMA4 = {
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 16,
    "global_head_dim": 24,
    "sliding_window": 9,
    "max_position_embeddings": 256,
    "rope_parameters": {
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 10000.0},
        SLIDING: {"rope_type": "default", "rope_theta": 100.0},
    },
    "tie_word_embeddings": True,
}
TINY_GEMMA4_VISION = {
    "model_type": "gemma4_vision",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "patch_size": 2,
    "position_embedding_size": 4,
}

# Kimi K2, as the family of DeepSeek V3 has it.
SMALL_KIMI_K2 = {
    "model_type": "kimi_k2",
    "architectures": ["DeepseekV3ForCausalLM"],
    **sizes(128, 32, 40, 3, 4, 4),
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.827,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 256,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

CHECKPOINTS: dict[str, tuple[dict[str, Any], torch.dtype, int, int, int]] = {
    "llama-mha": (
        {
            **LLAMA,
            **sizes(160, 40, 64, 2, 4),
            "max_position_embeddings": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "rope_scaling": None,
            "torch_dtype": "float32",
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "transformers_version": "4.44.0",
        },
        torch.float32,
        24,
        128,
        1,
    ),
    "llama-llama3-rope-tied": (
        {
            **LLAMA,
            **sizes(192, 64, 96, 2, 8, 2),
            "max_position_embeddings": 256,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
            "dtype": "bfloat16",
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": [2, 3],
        },
        torch.bfloat16,
        32,
        256,
        1,
    ),
    "llama-linear-rope": (
        {
            **LLAMA,
            **sizes(150, 48, 96, 2, 6, 3),
            "max_position_embeddings": 128,
            "rope_theta": 10000.0,
            "rope_scaling": {"type": "linear", "factor": 4.0},
            "torch_dtype": "bfloat16",
        },
        torch.bfloat16,
        28,
        128,
        1,
    ),
    "llama-dynamic-rope": (
        {
            **LLAMA,
            **sizes(150, 48, 96, 2, 6, 2),
            "max_position_embeddings": 16,
            "rope_theta": 10000.0,
            "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
            "torch_dtype": "bfloat16",
        },
        torch.bfloat16,
        24,
        96,
        1,
    ),
    "llama-yarn-rope": (
        {
            **LLAMA,
            **sizes(150, 64, 80, 2, 4, 2),
            "max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 8.0,
                "beta_slow": 0.5,
            },
            "dtype": "bfloat16",
        },
        torch.bfloat16,
        40,
        128,
        1,
    ),
    "llama-longrope-short": (
        {
            **LLAMA,
            **sizes(150, 48, 80, 2, 3, 1),
            "max_position_embeddings": 128,
            "rope_parameters": {**LONGROPE, "rope_theta": 10000.0},
            "dtype": "bfloat16",
        },
        torch.bfloat16,
        16,
        32,
        1,
    ),
    "llama-longrope-long": (
        {
            **LLAMA,
            **sizes(150, 48, 80, 2, 3, 1),
            "max_position_embeddings": 128,
            "rope_theta": 10000.0,
            "rope_scaling": LONGROPE,
            "torch_dtype": "bfloat16",
        },
        torch.bfloat16,
        40,
        128,
        1,
    ),
    "llama-biases": (
        {
            **LLAMA,
            **sizes(150, 48, 76, 2, 4, 2),
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "dtype": "bfloat16",
        },
        torch.bfloat16,
        24,
        128,
        1,
    ),
    "llama-odd-mqa": (
        {
            **LLAMA,
            **sizes(131, 40, 52, 3, 2, 1),
            "max_position_embeddings": 97,
            "rope_theta": 12345.0,
            "torch_dtype": "float32",
        },
        torch.float32,
        31,
        97,
        1,
    ),
    "llama-sharded": (
        {
            **LLAMA,
            **sizes(200, 48, 72, 3, 6, 3),
            "max_position_embeddings": 128,
            "rope_theta": 10000.0,
            "torch_dtype": "float16",
        },
        torch.float16,
        24,
        128,
        3,
    ),
    "mistral-window": (
        {
            **MISTRAL,
            **sizes(160, 56, 88, 2, 7, 1),
            "max_position_embeddings": 128,
            "rope_theta": 10000.0,
            "sliding_window": 7,
            "torch_dtype": "bfloat16",
        },
        torch.bfloat16,
        32,
        128,
        1,
    ),
    "mistral-head-dim": (
        {
            **MISTRAL,
            **sizes(160, 44, 72, 2, 4, 2),
            "head_dim": 32,
            "max_position_embeddings": 128,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "torch_dtype": "float16",
        },
        torch.float16,
        32,
        128,
        1,
    ),
    "qwen2": (
        {
            **QWEN2,
            **sizes(224, 64, 88, 2, 4, 1),
            "max_position_embeddings": 128,
            "rope_theta": 1000000.0,
            "sliding_window": 8,
            "use_sliding_window": False,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        torch.bfloat16,
        32,
        128,
        1,
    ),
    "qwen2-sliding": (
        {
            **QWEN2,
            **sizes(160, 48, 72, 3, 6, 2),
            "max_position_embeddings": 128,
            "rope_theta": 10000.0,
            "sliding_window": 5,
            "use_sliding_window": True,
            "max_window_layers": 1,
            "torch_dtype": "bfloat16",
        },
        torch.bfloat16,
        30,
        128,
        1,
    ),
    "qwen3": (
        {
            **QWEN3,
            **sizes(224, 56, 80, 2, 4, 2),
            "head_dim": 24,
            "max_position_embeddings": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
        },
        torch.bfloat16,
        32,
        128,
        1,
    ),
    "granite": (
        {
            "model_type": "granite",
            "architectures": ["GraniteForCausalLM"],
            **sizes(160, 64, 88, 3, 4, 2),
            "max_position_embeddings": 128,
            "rope_theta": 10000.0,
            "embedding_multiplier": 1.7,
            "attention_multiplier": 0.4,
            "residual_multiplier": 0.8,
            "logits_scaling": 0.7,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        },
        torch.bfloat16,
        24,
        128,
        1,
    ),
    "smollm3": (
        {
            "model_type": "smollm3",
            "architectures": ["SmolLM3ForCausalLM"],
            **sizes(160, 64, 88, 3, 4, 2),
            "max_position_embeddings": 128,
            "rope_theta": 10000.0,
            "no_rope_layer_interval": 2,
            "no_rope_layers": [1, 0, 1],
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
        torch.bfloat16,
        24,
        128,
        1,
    ),
    "olmo2": (
        {
            "model_type": "olmo2",
            "architectures": ["Olmo2ForCausalLM"],
            **sizes(160, 64, 88, 3, 4, 2),
            "max_position_embeddings": 128,
            "rope_theta": 10000.0,
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
        torch.bfloat16,
        24,
        128,
        1,
    ),
    "qwen3-layer-types": (
        {
            **QWEN3,
            **sizes(160, 48, 72, 3, 4, 4),
            "head_dim": 16,
            "attention_bias": True,
            "max_position_embeddings": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "sliding_window": 6,
            "use_sliding_window": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "dtype": "bfloat16",
        },
        torch.bfloat16,
        30,
        128,
        1,
    ),
    "qwen2-5-vl": (
        {
            "model_type": "qwen2_5_vl",
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            **sizes(160, 48, 72, 2, 6, 2),
            "max_position_embeddings": 128,
            "max_window_layers": 2,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]},
            "sliding_window": 32,
            "use_sliding_window": False,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
            **NO_IMAGES,
            "vision_config": {
                "model_type": "qwen2_5_vl",
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_heads": 2,
                "out_hidden_size": 48,
                "patch_size": 4,
                "spatial_merge_size": 1,
                "fullatt_block_indexes": [0],
            },
        },
        torch.bfloat16,
        28,
        128,
        1,
    ),
    "qwen3-vl": (
        {
            "model_type": "qwen3_vl",
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "tie_word_embeddings": True,
            **NO_IMAGES,
            "text_config": {
                "model_type": "qwen3_vl_text",
                **sizes(160, 48, 72, 2, 4, 2),
                "head_dim": 16,
                "max_position_embeddings": 128,
                "rope_theta": 1000000.0,
                "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [4, 2, 2]},
                "dtype": "bfloat16",
                "bos_token_id": 1,
                "eos_token_id": 2,
            },
            "vision_config": {
                "model_type": "qwen3_vl",
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_heads": 2,
                "out_hidden_size": 48,
                "patch_size": 4,
                "spatial_merge_size": 1,
                "num_position_embeddings": 4,
                "deepstack_visual_indexes": [],
            },
        },
        torch.bfloat16,
        28,
        128,
        1,
    ),
    "mistral3": (
        {
            "model_type": "mistral3",
            "architectures": ["Mistral3ForConditionalGeneration"],
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "image_token_index": 0,
            "multimodal_projector_bias": False,
            "projector_hidden_act": "gelu",
            "spatial_merge_size": 1,
            "vision_feature_layer": -1,
            "text_config": {
                "model_type": "mistral",
                **sizes(160, 48, 72, 2, 4, 2),
                "head_dim": 16,
                "max_position_embeddings": 128,
                "rms_norm_eps": 1e-5,
                "rope_theta": 1000000000.0,
                "sliding_window": None,
            },
            "vision_config": TINY_PIXTRAL,
        },
        torch.bfloat16,
        28,
        128,
        2,
    ),
    "phi3": (
        {
            "model_type": "phi3",
            "architectures": ["Phi3ForCausalLM"],
            **sizes(160, 48, 72, 2, 6, 2),
            "max_position_embeddings": 128,
            "original_max_position_embeddings": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "rope_scaling": None,
            "sliding_window": 9,
            "attention_bias": False,
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 2,
        },
        torch.bfloat16,
        28,
        128,
        1,
    ),
    "phi4-mini-short": (
        {**PHI4_MINI, "tie_word_embeddings": True},
        torch.bfloat16,
        16,
        32,
        1,
    ),
    "phi4-mini-long": (
        {**PHI4_MINI, "tie_word_embeddings": True},
        torch.bfloat16,
        40,
        128,
        1,
    ),
    "glm": (
        {
            "model_type": "glm",
            "architectures": ["GlmForCausalLM"],
            **sizes(160, 48, 72, 2, 4, 2),
            "head_dim": 16,
            "attention_bias": True,
            "max_position_embeddings": 128,
            "rms_norm_eps": 1.5625e-7,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "eos_token_id": [2],
            "pad_token_id": 2,
        },
        torch.bfloat16,
        28,
        128,
        1,
    ),
    "glm4": (
        {
            "model_type": "glm4",
            "architectures": ["Glm4ForCausalLM"],
            **sizes(160, 48, 72, 2, 4, 2),
            "head_dim": 24,
            "attention_bias": False,
            "max_position_embeddings": 128,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "eos_token_id": [2],
            "pad_token_id": 2,
        },
        torch.bfloat16,
        28,
        128,
        1,
    ),
    "ministral": (
        {
            "model_type": "ministral",
            "architectures": ["MinistralForCausalLM"],
            **sizes(160, 48, 72, 3, 4, 2),
            "head_dim": 16,
            "max_position_embeddings": 128,
            "rope_theta": 100000.0,
            "sliding_window": 6,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "torch_dtype": "bfloat16",
        },
        torch.bfloat16,
        30,
        128,
        1,
    ),
    "ministral3": (
        {
            "model_type": "mistral3",
            "architectures": ["Mistral3ForConditionalGeneration"],
            "dtype": "bfloat16",
            "tie_word_embeddings": True,
            "image_token_index": 0,
            "text_config": {
                "model_type": "ministral3",
                **sizes(160, 48, 72, 2, 4, 2),
                "head_dim": 16,
                "max_position_embeddings": 48,
                "rms_norm_eps": 1e-5,
                "rope_parameters": {
                    "type": "yarn",
                    "rope_type": "yarn",
                    "rope_theta": 1000000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 48,
                    "max_position_embeddings": 192,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                    "llama_4_scaling_beta": 0.1,
                },
                "sliding_window": None,
                "tie_word_embeddings": True,
            },
            "vision_config": TINY_PIXTRAL,
        },
        torch.bfloat16,
        28,
        48,
        1,
    ),
    "gemma": (
        {
            "model_type": "gemma",
            "architectures": ["GemmaForCausalLM"],
            **sizes(160, 56, 72, 2, 4, 1),
            "head_dim": 16,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 128,
            "torch_dtype": "bfloat16",
        },
        torch.bfloat16,
        24,
        128,
        1,
    ),
    "gemma2": (
        {
            "model_type": "gemma2",
            "architectures": ["Gemma2ForCausalLM"],
            **sizes(160, 48, 72, 3, 4, 2),
            "head_dim": 16,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 128,
            "query_pre_attn_scalar": 1,
            "sliding_window": 8,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 6.0,
            "cache_implementation": "hybrid",
            "torch_dtype": "bfloat16",
        },
        torch.bfloat16,
        24,
        128,
        1,
    ),
    "gemma3": (
        {
            "model_type": "gemma3",
            "architectures": ["Gemma3ForConditionalGeneration"],
            "boi_token_index": 0,
            "eoi_token_index": 1,
            "image_token_index": 2,
            "mm_tokens_per_image": 4,
            "text_config": {
                "model_type": "gemma3_text",
                **sizes(160, 48, 72, 3, 4, 2),
                "head_dim": 16,
                "hidden_act": "gelu_pytorch_tanh",
                "hidden_activation": "gelu_pytorch_tanh",
                "max_position_embeddings": 128,
                "query_pre_attn_scalar": 12,
                "rope_theta": 1000000.0,
                "rope_local_base_freq": 10000.0,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                "sliding_window": 8,
                "sliding_window_pattern": 3,
                "dtype": "bfloat16",
            },
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_attention_heads": 2,
                "num_hidden_layers": 1,
                "image_size": 16,
                "patch_size": 4,
            },
        },
        torch.bfloat16,
        24,
        128,
        1,
    ),
    "mixtral": (
        {
            "model_type": "mixtral",
            "architectures": ["MixtralForCausalLM"],
            **sizes(160, 48, 40, 2, 4, 2),
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 128,
            "rope_theta": 10000.0,
            "sliding_window": None,
            "torch_dtype": "bfloat16",
        },
        torch.bfloat16,
        24,
        128,
        1,
    ),
    "qwen2-moe": (
        {
            "model_type": "qwen2_moe",
            "architectures": ["Qwen2MoeForCausalLM"],
            **sizes(128, 48, 64, 3, 4, 2),
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
            "max_position_embeddings": 128,
            "rope_theta": 10000.0,
            "sliding_window": 32768,
            "use_sliding_window": False,
            "max_window_layers": 21,
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        torch.bfloat16,
        24,
        128,
        1,
    ),
    "qwen3-moe": (
        {
            "model_type": "qwen3_moe",
            "architectures": ["Qwen3MoeForCausalLM"],
            **sizes(128, 48, 64, 2, 4, 2),
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "max_position_embeddings": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "sliding_window": None,
            "use_sliding_window": False,
            "dtype": "bfloat16",
        },
        torch.bfloat16,
        24,
        128,
        1,
    ),
    "gemma3-text": (
        {
            "model_type": "gemma3_text",
            "architectures": ["Gemma3ForCausalLM"],
            **sizes(150, 40, 56, 3, 4, 1),
            "head_dim": 16,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 128,
            "query_pre_attn_scalar": 16,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 8,
            "dtype": "bfloat16",
        },
        torch.bfloat16,
        24,
        128,
        1,
    ),
    "starcoder2": (
        {
            "model_type": "starcoder2",
            "architectures": ["Starcoder2ForCausalLM"],
            **sizes(160, 64, 96, 2, 4, 2),
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 128,
            "norm_epsilon": 1e-5,
            "norm_type": "layer_norm",
            "mlp_type": "default",
            "rope_theta": 10000.0,
            "sliding_window": 10,
            "use_bias": True,
            "residual_dropout": 0.1,
            "embedding_dropout": 0.1,
            "torch_dtype": "bfloat16",
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        torch.bfloat16,
        28,
        128,
        1,
    ),
    "cohere": (
        {
            "model_type": "cohere",
            "architectures": ["CohereForCausalLM"],
            **sizes(160, 64, 72, 2, 4, 2),
            "layer_norm_eps": 1e-5,
            "logit_scale": 1.3,
            "max_position_embeddings": 128,
            "rope_theta": 10000.0,
            "use_qk_norm": False,
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
        torch.bfloat16,
        24,
        128,
        1,
    ),
    "cohere2": (
        {
            "model_type": "cohere2",
            "architectures": ["Cohere2ForCausalLM"],
            **sizes(160, 64, 80, 3, 4, 2),
            "layer_norm_eps": 1e-5,
            "logit_scale": 1.25,
            "max_position_embeddings": 128,
            "rope_theta": 50000.0,
            "sliding_window": 9,
            "sliding_window_pattern": 3,
            "cache_implementation": "hybrid",
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
        torch.bfloat16,
        28,
        128,
        1,
    ),
    "olmo3": (
        {
            "model_type": "olmo3",
            "architectures": ["Olmo3ForCausalLM"],
            **sizes(160, 64, 80, 3, 4, 2),
            "max_position_embeddings": 128,
            "rms_norm_eps": 1e-6,
            "rope_theta": 500000,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "attention_factor": 1.2,
                "beta_fast": 8.0,
                "beta_slow": 0.5,
            },
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 9,
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
        torch.bfloat16,
        28,
        128,
        1,
    ),
    "gpt-oss": (
        {
            "model_type": "gpt_oss",
            "architectures": ["GptOssForCausalLM"],
            **sizes(160, 48, 24, 2, 4, 2),
            "head_dim": 16,
            "attention_bias": True,
            "experts_per_token": 2,
            "num_experts_per_tok": 2,
            "num_local_experts": 5,
            "swiglu_limit": 7.0,
            "initial_context_length": 32,
            "max_position_embeddings": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 9,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
        torch.bfloat16,
        28,
        128,
        1,
    ),
    "granite4": (
        {
            "model_type": "granitemoehybrid",
            "architectures": ["GraniteMoeHybridForCausalLM"],
            **sizes(160, 64, 88, 3, 4, 2),
            "shared_intermediate_size": 88,
            "layer_types": ["attention", "attention", "attention"],
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "position_embedding_type": "rope",
            "normalization_function": "rmsnorm",
            "max_position_embeddings": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "embedding_multiplier": 1.7,
            "attention_multiplier": 0.4,
            "residual_multiplier": 0.8,
            "logits_scaling": 0.7,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        torch.bfloat16,
        24,
        128,
        1,
    ),
    "qwen2-vl": (
        {
            "model_type": "qwen2_vl",
            "architectures": ["Qwen2VLForConditionalGeneration"],
            **sizes(160, 64, 72, 2, 4, 2),
            "max_position_embeddings": 128,
            "max_window_layers": 2,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]},
            "sliding_window": 32,
            "use_sliding_window": False,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
            **NO_IMAGES,
            "vision_config": {
                "model_type": "qwen2_vl",
                "depth": 1,
                "embed_dim": 16,
                "hidden_size": 64,
                "mlp_ratio": 1,
                "num_heads": 2,
                "patch_size": 4,
                "spatial_merge_size": 1,
            },
        },
        torch.bfloat16,
        28,
        128,
        1,
    ),
    "qwen3-vl-moe": (
        {
            "model_type": "qwen3_vl_moe",
            "architectures": ["Qwen3VLMoeForConditionalGeneration"],
            "tie_word_embeddings": False,
            **NO_IMAGES,
            "text_config": {
                "model_type": "qwen3_vl_moe_text",
                **sizes(128, 48, 64, 2, 4, 2),
                "head_dim": 16,
                "num_experts": 6,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
                "norm_topk_prob": True,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
                "max_position_embeddings": 128,
                "rope_theta": 1000000.0,
                "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [4, 2, 2]},
                "dtype": "bfloat16",
                "bos_token_id": 1,
                "eos_token_id": 2,
            },
            "vision_config": {
                **TINY_VISION,
                "model_type": "qwen3_vl_moe",
                "num_position_embeddings": 4,
                "deepstack_visual_indexes": [],
            },
        },
        torch.bfloat16,
        28,
        128,
        1,
    ),
    "glm4v": (
        {
            "model_type": "glm4v",
            "architectures": ["Glm4vForConditionalGeneration"],
            "tie_word_embeddings": False,
            "image_token_id": 0,
            "video_token_id": 1,
            "image_start_token_id": 2,
            "image_end_token_id": 2,
            "video_start_token_id": 2,
            "video_end_token_id": 2,
            "text_config": {
                "model_type": "glm4v_text",
                **sizes(160, 64, 72, 2, 4, 2),
                "attention_bias": True,
                "max_position_embeddings": 128,
                "rms_norm_eps": 1e-5,
                "partial_rotary_factor": 0.5,
                "rope_theta": 10000.0,
                "rope_scaling": {"type": "default", "mrope_section": [2, 1, 1]},
                "dtype": "bfloat16",
                "eos_token_id": [2],
            },
            "vision_config": {**TINY_VISION, "out_hidden_size": 64, "model_type": "glm4v", "image_size": 16},
        },
        torch.bfloat16,
        28,
        128,
        1,
    ),
    "idefics3": (
        {
            "model_type": "idefics3",
            "architectures": ["Idefics3ForConditionalGeneration"],
            "image_token_id": 0,
            "scale_factor": 2,
            "tie_word_embeddings": False,
            "text_config": SMALL_LLAMA,
            "vision_config": {**TINY_SIGLIP, "model_type": "idefics3_vision"},
        },
        torch.bfloat16,
        24,
        128,
        1,
    ),
    "smolvlm": (
        {
            "model_type": "smolvlm",
            "architectures": ["SmolVLMForConditionalGeneration"],
            "image_token_id": 0,
            "scale_factor": 2,
            "tie_word_embeddings": True,
            "text_config": {**SMALL_LLAMA, "tie_word_embeddings": True},
            "vision_config": {**TINY_SIGLIP, "model_type": "smolvlm_vision"},
        },
        torch.bfloat16,
        24,
        128,
        1,
    ),
    "ministral3-long": (
        {
            "model_type": "ministral3",
            "architectures": ["Ministral3ForCausalLM"],
            **sizes(160, 48, 72, 2, 4, 2),
            "head_dim": 16,
            "max_position_embeddings": 128,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "type": "yarn",
                "rope_type": "yarn",
                "rope_theta": 1000000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 16,
                "max_position_embeddings": 128,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.4,
            },
            "sliding_window": None,
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
        },
        torch.bfloat16,
        60,
        128,
        1,
    ),
    "qwen2-moe-window": (
        {
            "model_type": "qwen2_moe",
            "architectures": ["Qwen2MoeForCausalLM"],
            **sizes(96, 32, 32, 4, 2, 1),
            "num_experts": 3,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "max_position_embeddings": 128,
            "rope_theta": 10000.0,
            "sliding_window": 9,
            "use_sliding_window": True,
            "max_window_layers": 2,
            "torch_dtype": "bfloat16",
        },
        torch.bfloat16,
        28,
        128,
        1,
    ),
    "qwen3-moe-window": (
        {
            "model_type": "qwen3_moe",
            "architectures": ["Qwen3MoeForCausalLM"],
            **sizes(96, 32, 32, 2, 2, 1),
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "norm_topk_prob": True,
            "max_position_embeddings": 128,
            "rope_theta": 10000.0,
            "sliding_window": 9,
            "use_sliding_window": True,
            "max_window_layers": 48,
            "torch_dtype": "bfloat16",
        },
        torch.bfloat16,
        28,
        128,
        1,
    ),
    "glm4-moe": (
        {
            "model_type": "glm4_moe",
            "architectures": ["Glm4MoeForCausalLM"],
            **sizes(96, 32, 40, 3, 4, 2),
            "head_dim": 16,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
            "max_position_embeddings": 128,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        },
        torch.bfloat16,
        24,
        128,
        1,
    ),
    "dots1": (
        {
            "model_type": "dots1",
            "architectures": ["Dots1ForCausalLM"],
            **sizes(96, 32, 40, 2, 4, 2),
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": False,
            "first_k_dense_replace": 1,
            "max_position_embeddings": 128,
            "sliding_window": None,
            "torch_dtype": "bfloat16",
        },
        torch.bfloat16,
        24,
        128,
        1,
    ),
    "minimax-m2": (
        {
            "model_type": "minimax_m2",
            "architectures": ["MiniMaxM2ForCausalLM"],
            **sizes(96, 32, 24, 2, 4, 2),
            "head_dim": 16,
            "rotary_dim": 8,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "max_position_embeddings": 128,
            "rope_theta": 10000.0,
            "torch_dtype": "bfloat16",
        },
        torch.bfloat16,
        24,
        128,
        1,
    ),
    "ernie4-5": (
        {
            "model_type": "ernie4_5",
            "architectures": ["Ernie4_5ForCausalLM"],
            **sizes(160, 48, 72, 2, 4, 2),
            "head_dim": 16,
            "use_bias": True,
            "max_position_embeddings": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
        },
        torch.bfloat16,
        24,
        128,
        1,
    ),
    "ernie4-5-moe": (
        {
            "model_type": "ernie4_5_moe",
            "architectures": ["Ernie4_5_MoeForCausalLM"],
            **sizes(96, 32, 40, 3, 4, 2),
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_intermediate_size": 16,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 1,
            "moe_layer_interval": 1,
            "use_bias": False,
            "max_position_embeddings": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
        },
        torch.bfloat16,
        24,
        128,
        1,
    ),
    "mixtral-window": (
        {
            "model_type": "mixtral",
            "architectures": ["MixtralForCausalLM"],
            **sizes(96, 32, 24, 2, 4, 2),
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 128,
            "rope_theta": 10000.0,
            "sliding_window": 9,
            "torch_dtype": "bfloat16",
        },
        torch.bfloat16,
        28,
        128,
        1,
    ),
    "qwen3-next": (
        {
            "model_type": "qwen3_next",
            "architectures": ["Qwen3NextForCausalLM"],
            **sizes(128, 40, 48, 3, 4, 2),
            "head_dim": 16,
            **SMALL_DELTA,
            "full_attention_interval": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "decoder_sparse_step": 1,
            "max_position_embeddings": 256,
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000.0,
            "torch_dtype": "bfloat16",
        },
        torch.bfloat16,
        68,
        256,
        1,
    ),
    "qwen3-5-text": (
        {
            "model_type": "qwen3_5_text",
            "architectures": ["Qwen3_5ForCausalLM"],
            **sizes(128, 40, 48, 4, 4, 1),
            "head_dim": 16,
            **SMALL_DELTA,
            "linear_value_head_dim": 20,
            "max_position_embeddings": 256,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
        },
        torch.bfloat16,
        40,
        256,
        1,
    ),
    "qwen3-5": (
        {
            "model_type": "qwen3_5",
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "tie_word_embeddings": False,
            **NO_IMAGES,
            "text_config": {
                "model_type": "qwen3_5_text",
                **sizes(128, 48, 56, 4, 4, 2),
                "head_dim": 16,
                **SMALL_DELTA,
                "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
                "attn_output_gate": True,
                "mamba_ssm_dtype": "float32",
                "mtp_num_hidden_layers": 0,
                "max_position_embeddings": 256,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "partial_rotary_factor": 0.5,
                    "mrope_interleaved": True,
                    "mrope_section": [2, 1, 1],
                },
                "dtype": "bfloat16",
                "eos_token_id": 2,
            },
            "vision_config": {**TINY_VISION, "model_type": "qwen3_5_vision", "num_position_embeddings": 4},
        },
        torch.bfloat16,
        70,
        256,
        1,
    ),
    "qwen3-5-moe": (
        {
            "model_type": "qwen3_5_moe",
            "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "tie_word_embeddings": False,
            **NO_IMAGES,
            "text_config": {
                "model_type": "qwen3_5_moe_text",
                "vocab_size": 128,
                "hidden_size": 48,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 16,
                **SMALL_DELTA,
                "layer_types": ["linear_attention", "full_attention", "linear_attention"],
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 16,
                "shared_expert_intermediate_size": 16,
                "max_position_embeddings": 256,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "partial_rotary_factor": 0.25,
                    "mrope_interleaved": True,
                    "mrope_section": [1, 1, 0],
                },
                "dtype": "bfloat16",
            },
            "vision_config": {**TINY_VISION, "model_type": "qwen3_5_moe_vision", "num_position_embeddings": 4},
        },
        torch.bfloat16,
        24,
        256,
        1,
    ),
    "qwen3-5-moe-text": (
        {
            "model_type": "qwen3_5_moe_text",
            "architectures": ["Qwen3_5MoeForCausalLM"],
            "vocab_size": 96,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            **SMALL_DELTA,
            "layer_types": ["linear_attention", "full_attention"],
            "num_experts": 3,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "max_position_embeddings": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
            "dtype": "bfloat16",
        },
        torch.bfloat16,
        28,
        128,
        1,
    ),
    "seed-oss": (
        {
            "model_type": "seed_oss",
            "architectures": ["SeedOssForCausalLM"],
            **sizes(150, 48, 72, 2, 4, 2),
            "head_dim": 16,
            "attention_bias": True,
            "attention_out_bias": False,
            "attention_dropout": 0.1,
            "residual_dropout": 0.1,
            "max_position_embeddings": 128,
            "rope_scaling": {"rope_type": "default"},
            "rope_theta": 10000.0,
            "torch_dtype": "bfloat16",
        },
        torch.bfloat16,
        24,
        128,
        1,
    ),
    "internlm3": (
        {
            "model_type": "internlm3",
            "architectures": ["InternLM3ForCausalLM"],
            **sizes(150, 48, 72, 2, 4, 2),
            "head_dim": 16,
            "qkv_bias": True,
            "bias": True,
            "max_position_embeddings": 64,
            "rope_theta": 10000.0,
            "rope_scaling": {"rope_type": "dynamic", "factor": 6.0},
            "torch_dtype": "bfloat16",
        },
        torch.bfloat16,
        24,
        128,
        1,
    ),
    "iquestcoder": (
        {
            "model_type": "iquestcoder",
            "architectures": ["IQuestCoderForCausalLM"],
            **sizes(96, 32, 40, 2, 2, 1),
            "head_dim": 16,
            "clip_qkv": None,
            "use_sliding_window": False,
            "max_position_embeddings": 128,
            "rope_theta": 10000.0,
            "torch_dtype": "bfloat16",
        },
        torch.bfloat16,
        20,
        128,
        1,
    ),
    "helium": (
        {
            "model_type": "helium",
            "architectures": ["HeliumForCausalLM"],
            **sizes(150, 64, 72, 2, 4, 2),
            "head_dim": 16,
            "max_position_embeddings": 128,
            "rope_theta": 10000.0,
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
        torch.bfloat16,
        24,
        128,
        1,
    ),
    "stablelm": (
        {
            "model_type": "stablelm",
            "architectures": ["StableLmForCausalLM"],
            **sizes(150, 64, 72, 2, 4, 4),
            "use_qkv_bias": True,
            "qk_layernorm": False,
            "use_parallel_residual": False,
            "partial_rotary_factor": 0.25,
            "layer_norm_eps": 1e-5,
            "max_position_embeddings": 128,
            "rope_theta": 10000.0,
            "torch_dtype": "bfloat16",
        },
        torch.bfloat16,
        24,
        128,
        1,
    ),
    "arcee": (
        {
            "model_type": "arcee",
            "architectures": ["ArceeForCausalLM"],
            **sizes(150, 64, 96, 2, 4, 2),
            "hidden_act": "relu2",
            "max_position_embeddings": 128,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
            },
            "rope_theta": 10000.0,
            "torch_dtype": "bfloat16",
        },
        torch.bfloat16,
        24,
        128,
        1,
    ),
    "nemotron": (
        {
            "model_type": "nemotron",
            "architectures": ["NemotronForCausalLM"],
            **sizes(150, 48, 96, 2, 4, 2),
            "head_dim": 16,
            "hidden_act": "relu2",
            "partial_rotary_factor": 0.5,
            "norm_eps": 1e-5,
            "max_position_embeddings": 128,
            "rope_theta": 10000.0,
            "torch_dtype": "bfloat16",
        },
        torch.bfloat16,
        24,
        128,
        1,
    ),
    "jais2": (
        {
            "model_type": "jais2",
            "architectures": ["Jais2ForCausalLM"],
            **sizes(150, 48, 96, 2, 4, 4),
            "head_dim": 16,
            "hidden_act": "relu2",
            "layer_norm_eps": 1e-5,
            "max_position_embeddings": 128,
            "rope_theta": 10000.0,
            "torch_dtype": "bfloat16",
        },
        torch.bfloat16,
        24,
        128,
        1,
    ),
    "exaone4": (
        {
            "model_type": "exaone4",
            "architectures": ["Exaone4ForCausalLM"],
            **sizes(150, 48, 72, 4, 4, 2),
            "head_dim": 16,
            "sliding_window": 6,
            "sliding_window_pattern": "LLLG",
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "max_position_embeddings": 128,
            "rope_theta": 10000.0,
            "rope_scaling": LLAMA3_ROPE,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
        },
        torch.bfloat16,
        24,
        128,
        1,
    ),
    "exaone4-full": (
        {
            "model_type": "exaone4",
            "architectures": ["Exaone4ForCausalLM"],
            **sizes(96, 32, 40, 2, 2, 1),
            "head_dim": 16,
            "sliding_window": None,
            "sliding_window_pattern": None,
            "layer_types": ["full_attention"] * 2,
            "max_position_embeddings": 128,
            "rope_theta": 10000.0,
            "torch_dtype": "bfloat16",
        },
        torch.bfloat16,
        20,
        128,
        1,
    ),
    "hunyuan": (
        {
            "model_type": "hunyuan_v1_dense",
            "architectures": ["HunYuanDenseV1ForCausalLM"],
            **sizes(150, 48, 72, 2, 4, 2),
            "head_dim": 16,
            "attention_head_dim": 16,
            "use_qk_norm": True,
            "use_cla": False,
            "num_experts": 1,
            "kv_lora_rank": 512,
            "max_position_embeddings": 128,
            "rms_norm_eps": 1e-5,
            "rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1},
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
        },
        torch.bfloat16,
        24,
        128,
        1,
    ),
    "hunyuan-moe": (
        {
            "model_type": "hunyuan_v1_moe",
            "architectures": ["HunYuanMoEV1ForCausalLM"],
            **sizes(150, 48, 24, 2, 4, 2),
            "head_dim": 16,
            "num_experts": 5,
            "moe_topk": [2, 2],
            "moe_intermediate_size": [24, 24],
            "num_shared_expert": [1, 1],
            "use_mixed_mlp_moe": True,
            "use_qk_norm": True,
            "max_position_embeddings": 128,
            "rms_norm_eps": 1e-5,
            "rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0},
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
        },
        torch.bfloat16,
        24,
        128,
        1,
    ),
    "internlm2": (
        {
            "model_type": "internlm2",
            "architectures": ["InternLM2ForCausalLM"],
            **sizes(150, 64, 72, 2, 8, 2),
            "bias": False,
            "max_position_embeddings": 128,
            "rms_norm_eps": 1e-5,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "torch_dtype": "bfloat16",
        },
        torch.bfloat16,
        24,
        128,
        1,
    ),
    "baichuan": (
        {
            "model_type": "baichuan",
            "architectures": ["BaiChuanForCausalLM"],
            **sizes(96, 32, 40, 2, 2),
            "max_position_embeddings": 128,
            "torch_dtype": "bfloat16",
        },
        torch.bfloat16,
        20,
        128,
        1,
    ),
    "olmoe": (
        {
            "model_type": "olmoe",
            "architectures": ["OlmoeForCausalLM"],
            **sizes(96, 64, 24, 2, 4, 4),
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "clip_qkv": None,
            "max_position_embeddings": 128,
            "rope_theta": 10000.0,
            "torch_dtype": "bfloat16",
        },
        torch.bfloat16,
        24,
        128,
        1,
    ),
    "solar-open": (
        {
            "model_type": "solar_open",
            "architectures": ["SolarOpenForCausalLM"],
            **{key: size for key, size in sizes(150, 48, 0, 2, 4, 2).items() if key != "intermediate_size"},
            "head_dim": 16,
            "moe_intermediate_size": 24,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            "max_position_embeddings": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "dtype": "bfloat16",
        },
        torch.bfloat16,
        24,
        128,
        1,
    ),
    "granite-moe": (
        {
            "model_type": "granitemoe",
            "architectures": ["GraniteMoeForCausalLM"],
            **sizes(96, 64, 24, 2, 4, 2),
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 128,
            "rope_theta": 10000.0,
            "embedding_multiplier": 1.7,
            "attention_multiplier": 0.4,
            "residual_multiplier": 0.8,
            "logits_scaling": 0.7,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
        },
        torch.bfloat16,
        24,
        128,
        1,
    ),
    "granite-moe-shared": (
        {
            "model_type": "granitemoeshared",
            "architectures": ["GraniteMoeSharedForCausalLM"],
            **sizes(96, 64, 24, 2, 4, 2),
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 40,
            "max_position_embeddings": 128,
            "rope_theta": 10000.0,
            "embedding_multiplier": 1.7,
            "attention_multiplier": 0.4,
            "residual_multiplier": 0.8,
            "logits_scaling": 0.7,
            "torch_dtype": "bfloat16",
        },
        torch.bfloat16,
        24,
        128,
        1,
    ),
    "gemma4-text": (  # as E2B: its last layers read the keys and values of others, and have MLPs twice as wide
        {
            "model_type": "gemma4_text",
            "architectures": ["Gemma4ForCausalLM"],
            **sizes(128, 40, 44, 5, 4, 2),
            **SMALL_GEMMA4,
            "layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL],
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 136,
            "final_logit_softcapping": 30.0,
            "torch_dtype": "bfloat16",
        },
        torch.bfloat16,
        39,
        256,
        1,
    ),
    "gemma4": (  # as 31B
        {
            "model_type": "gemma4",
            "architectures": ["Gemma4ForConditionalGeneration"],
            "text_config": {
                "model_type": "gemma4_text",
                **sizes(128, 40, 44, 4, 4, 2),
                **SMALL_GEMMA4,
                "layer_types": [SLIDING, FULL, SLIDING, FULL],
                "num_global_key_value_heads": 1,
                "attention_k_eq_v": True,
                "hidden_size_per_layer_input": 0,
                "use_bidirectional_attention": "vision",
                "final_logit_softcapping": 30.0,
                "dtype": "bfloat16",
            },
            "vision_config": TINY_GEMMA4_VISION,
            "audio_config": None,
            "tie_word_embeddings": True,
        },
        torch.bfloat16,
        33,
        256,
        1,
    ),
    "gemma4-moe": (  # as 26B-A4B; what differs from layer to layer as transformers 5.23 writes it
        {
            "model_type": "gemma4_text",
            "architectures": ["Gemma4ForCausalLM"],
            **sizes(96, 40, 28, 3, 4, 2),
            **{key: value for key, value in SMALL_GEMMA4.items() if key != "global_head_dim"},
            "layer_types": [SLIDING, FULL, FULL],
            "per_layer_config": {layer: {"head_dim": 24, "num_key_value_heads": 1} for layer in ("1", "2")},
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 20,
            "dtype": "bfloat16",
        },
        torch.bfloat16,
        41,
        256,
        1,
    ),
    "deepseek-v3": (
        {
            "model_type": "deepseek_v3",
            "architectures": ["DeepseekV3ForCausalLM"],
            **sizes(96, 32, 40, 3, 4, 4),
            "q_lora_rank": 20,
            "kv_lora_rank": 24,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "num_nextn_predict_layers": 1,
            "max_position_embeddings": 128,
            "rope_theta": 10000.0,
            "rope_scaling": {
                "type": "yarn",
                "factor": 8,
                "original_max_position_embeddings": 16,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        },
        torch.bfloat16,
        40,
        128,
        1,
    ),
    "deepseek-v2": (
        {
            "model_type": "deepseek_v2",
            "architectures": ["DeepseekV2ForCausalLM"],
            **sizes(96, 32, 40, 2, 4, 4),
            "q_lora_rank": None,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_shared_experts": 2,
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "norm_topk_prob": False,
            "first_k_dense_replace": 1,
            "scoring_func": "softmax",
            "topk_method": "group_limited_greedy",
            "max_position_embeddings": 128,
            "rope_theta": 10000.0,
            "rope_scaling": {
                "type": "yarn",
                "factor": 40,
                "original_max_position_embeddings": 4,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 0.707,
                "mscale_all_dim": 0.5,
            },
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        },
        torch.bfloat16,
        24,
        128,
        1,
    ),
    "glm4-moe-lite": (
        {
            "model_type": "glm4_moe_lite",
            "architectures": ["Glm4MoeLiteForCausalLM"],
            **sizes(96, 32, 40, 3, 4, 4),
            "attention_bias": True,
            "q_lora_rank": 16,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 16,
            "v_head_dim": 24,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.8,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "max_position_embeddings": 128,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        },
        torch.bfloat16,
        24,
        128,
        1,
    ),
    "youtu": (
        {
            "model_type": "youtu",
            "architectures": ["YoutuForCausalLM"],
            **sizes(160, 48, 72, 2, 6, 6),
            "q_lora_rank": 24,
            "kv_lora_rank": 40,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "rope_interleave": False,
            "max_position_embeddings": 128,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "float16",
        },
        torch.float16,
        24,
        128,
        1,
    ),
    "baichuan2": (
        {
            "model_type": "baichuan",
            "architectures": ["BaichuanForCausalLM"],
            **sizes(96, 48, 40, 2, 3),
            "max_position_embeddings": 128,
            "model_max_length": 128,
            "z_loss_weight": 0,
            "torch_dtype": "bfloat16",
        },
        torch.bfloat16,
        20,
        128,
        1,
    ),
    "exaone": (
        {
            "model_type": "exaone",
            "architectures": ["ExaoneForCausalLM"],
            **{key: size for key, size in sizes(150, 48, 72, 2, 6, 2).items() if key not in _LLAMA_NAMES},
            "num_layers": 2,
            "activation_function": "silu",
            "embed_dropout": 0.0,
            "layer_norm_epsilon": 1e-5,
            "max_position_embeddings": 128,
            "rope_scaling": LLAMA3_ROPE,
            "rope_theta": 10000.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "tie_word_embeddings": True,
            "torch_dtype": "float32",
        },
        torch.float32,
        24,
        128,
        1,
    ),
    "minicpm": (
        {
            "model_type": "minicpm",
            "architectures": ["MiniCPMForCausalLM"],
            **sizes(150, 64, 72, 3, 4, 2),
            "scale_emb": 1.5,
            "scale_depth": 1.4,
            "dim_model_base": 32,
            "tie_word_embeddings": False,
            "max_position_embeddings": 128,
            "rms_norm_eps": 1e-5,
            "rope_scaling": None,
            "torch_dtype": "bfloat16",
        },
        torch.bfloat16,
        24,
        128,
        1,
    ),
    "mimo": (
        {
            "model_type": "mimo",
            "architectures": ["MiMoForCausalLM"],
            **sizes(150, 48, 72, 2, 4, 2),
            "head_dim": 16,
            "attention_bias": True,
            "max_position_embeddings": 128,
            "num_nextn_predict_layers": 1,
            "rms_norm_eps": 1e-5,
            "rope_theta": 640000,
            "sliding_window": 128,
            "max_window_layers": 2,
            "use_sliding_window": False,
            "torch_dtype": "bfloat16",
        },
        torch.bfloat16,
        24,
        128,
        1,
    ),
    "llama4": (
        {
            "model_type": "llama4",
            "architectures": ["Llama4ForConditionalGeneration"],
            "boi_token_index": 0,
            "eoi_token_index": 0,
            "image_token_index": 0,
            "text_config": {
                "model_type": "llama4_text",
                **sizes(128, 48, 24, 4, 4, 2),
                "head_dim": 16,
                "intermediate_size_mlp": 40,
                "num_local_experts": 4,
                "num_experts_per_tok": 1,
                "interleave_moe_layer_step": 2,
                "moe_layers": [1, 3],
                "no_rope_layers": [1, 1, 1, 0],
                "no_rope_layer_interval": 4,
                "use_qk_norm": True,
                "attention_chunk_size": 10,
                "attn_temperature_tuning": True,
                "floor_scale": 6,
                "attn_scale": 0.4,
                "max_position_embeddings": 128,
                "rms_norm_eps": 1e-5,
                "rope_theta": 500000.0,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 16.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 1.0,
                    "original_max_position_embeddings": 32,
                },
                "router_jitter_noise": 0.0,
                "for_llm_compressor": False,
                "torch_dtype": "bfloat16",
            },
            "vision_config": {
                "model_type": "llama4_vision_model",
                "hidden_size": 16,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 1,
                "image_size": 8,
                "patch_size": 4,
                "projector_input_dim": 8,
                "projector_output_dim": 8,
                "vision_output_dim": 8,
            },
        },
        torch.bfloat16,
        28,
        128,
        1,
    ),
    "llama4-text": (
        {
            "model_type": "llama4_text",
            "architectures": ["Llama4ForCausalLM"],
            **sizes(96, 32, 16, 2, 2, 1),
            "head_dim": 16,
            "intermediate_size_mlp": 24,
            "num_local_experts": 3,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
            "no_rope_layers": [],
            "no_rope_layer_interval": 2,
            "use_qk_norm": False,
            "attention_chunk_size": 64,
            "attn_temperature_tuning": False,
            "max_position_embeddings": 128,
            "rope_theta": 10000.0,
            "torch_dtype": "float16",
        },
        torch.float16,
        20,
        128,
        1,
    ),
    "falcon3": (  # heads larger than hidden_size / heads, as those of 1B and 3B
        {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "activation": "swiglu",
            "attention_bias": False,
            **sizes(131, 48, 72, 2, 2, 1),
            "head_dim": 64,
            "max_position_embeddings": 256,
            "mlp_bias": False,
            "rms_norm_eps": 1e-6,
            "rope_scaling": None,
            "rope_theta": 1000042,
            "eos_token_id": 11,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        },
        torch.bfloat16,
        40,
        128,
        1,
    ),
    # The families with layers of other shapes, and with groups of experts, in sizes that GPUs take.
    "gemma4-e2b": (
        {
            "model_type": "gemma4",
            "architectures": ["Gemma4ForConditionalGeneration"],
            "text_config": {
                "model_type": "gemma4_text",
                **sizes(96, 32, 40, 6, 4, 1),
                **SMALL_GEMMA4,
                "global_head_dim": 32,
                "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
                "num_kv_shared_layers": 3,
                "use_double_wide_mlp": True,
                "hidden_size_per_layer_input": 16,
                "vocab_size_per_layer_input": 96,
                "attention_k_eq_v": False,
                "num_global_key_value_heads": None,
                "enable_moe_block": False,
                "num_experts": None,
                "top_k_experts": None,
                "use_bidirectional_attention": None,
                "final_logit_softcapping": 30.0,
                "dtype": "bfloat16",
            },
            "vision_config": TINY_GEMMA4_VISION,
            "audio_config": None,
            "tie_word_embeddings": True,
        },
        torch.bfloat16,
        41,
        256,
        1,
    ),
    "gemma4-a4b": (
        {
            "model_type": "gemma4_text",
            "architectures": ["Gemma4ForCausalLM"],
            **sizes(96, 32, 40, 4, 4, 2),
            **SMALL_GEMMA4,
            "global_head_dim": 32,
            "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
            "final_logit_softcapping": 30.0,
            "dtype": "bfloat16",
        },
        torch.bfloat16,
        41,
        256,
        1,
    ),
    "kimi-k2": (
        SMALL_KIMI_K2,
        torch.bfloat16,
        40,
        128,
        1,
    ),
    "kimi-k25": (  # the text part as the hub has it
        {
            "model_type": "kimi_k25",
            "architectures": ["KimiK25ForConditionalGeneration"],
            "text_config": SMALL_KIMI_K2,
            "vision_config": {
                "model_type": "kimi_k25_vision",
                "patch_size": 2,
                "pos_emb_height": 4,
                "pos_emb_width": 4,
                "num_attention_heads": 1,
                "num_hidden_layers": 1,
                "hidden_size": 8,
                "intermediate_size": 8,
            },
            "projection_hidden_size": 8,
            "tie_word_embeddings": False,
        },
        torch.bfloat16,
        40,
        128,
        1,
    ),
    "gemma4-unified": (  # as 12B
        {
            "model_type": "gemma4_unified",
            "architectures": ["Gemma4UnifiedForConditionalGeneration"],
            "text_config": {
                "model_type": "gemma4_unified_text",
                **sizes(96, 32, 40, 4, 4, 2),
                **SMALL_GEMMA4,
                "global_head_dim": 32,
                "layer_types": [SLIDING, FULL, SLIDING, FULL],
                "num_global_key_value_heads": 1,
                "attention_k_eq_v": True,
                "use_bidirectional_attention": "vision",
                "final_logit_softcapping": 30.0,
                "dtype": "bfloat16",
            },
            "vision_config": {
                "model_type": "gemma4_unified_vision",
                "patch_size": 2,
                "mm_embed_dim": 8,
                "mm_posemb_size": 4,
                "output_proj_dims": 32,
            },
            "audio_config": {"model_type": "gemma4_unified_audio", "audio_embed_dim": 8},
            "tie_word_embeddings": True,
        },
        torch.bfloat16,
        33,
        256,
        1,
    ),
}


def model_class(config: Any) -> Any:
    """The class of a model, which for those that also see is not one of `AutoModelForCausalLM`."""
    own = getattr(transformers, config.architectures[0], None)
    return own or transformers.AutoModelForCausalLM._model_mapping[type(config)]


def text_model(model: Any) -> Any:
    if not hasattr(model, "model"):  # of Llama 4
        return model.language_model.model
    return getattr(model.model, "language_model", getattr(model.model, "text_model", model.model))


def random_weights(folder: Path, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """Weights of about unit gain everywhere: logits far from flat, attention far from uniform."""
    config = AutoConfig.from_pretrained(folder)
    model = model_class(config)(config).float()
    tied = model.config.tie_word_embeddings
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, parameter in sorted(model.state_dict().items()):
        if tied and name == "lm_head.weight":
            continue
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith(
            (
                "q_norm.weight", "k_norm.weight", "query_layernorm.weight", "key_layernorm.weight",
                "q_a_layernorm.weight",
            )
        ):  # fmt: skip
            # Scores of unit variance would be too flat; in Gemma 4 they are not divided by the root of head_dim.
            value = 0.7 + 0.15 * noise if "gemma4" in config.model_type else 1.5 + 0.3 * noise
        elif name.endswith(("norm.weight", "router.scale", "expert_scale")) or "layernorm_" in name:
            value = 1.0 + 0.2 * noise
        elif name.endswith("layer_scalar"):
            value = 0.8 + 0.1 * noise
        elif name.endswith("embed_tokens_per_layer.weight"):
            value = noise
        elif name.endswith("A_log"):
            value = 0.7 * noise - 1.0  # states that remember some tokens
        elif name.endswith("bias"):
            value = 0.3 * noise
        elif name.endswith("embed_tokens.weight"):
            value = noise / (math.sqrt(parameter.shape[1]) if tied else 1.0)
        else:
            gain = 1.5 if any(part in name for part in ("q_proj", "k_proj", "qkv_proj", "lm_head")) else 1.0
            inputs = parameter.shape[-1] if ".experts." in name else parameter[0].numel()
            if ".experts." in name and config.model_type == "gpt_oss":  # [experts, inputs, outputs]; some are clamped
                gain, inputs = 4.0 if "gate_up" in name else 1.0, parameter.shape[-2]
            if ".experts." in name and "llama4" in config.model_type:
                inputs = parameter.shape[-2]
            value = gain * noise / math.sqrt(inputs)
        for prefix, stored in STORED_NAMES.get(folder.name, {}).items():
            if name.startswith(prefix):
                name = stored + name.removeprefix(prefix)
                break
        for part, stored in STORED_PARTS.get(folder.name, {}).items():
            name = name.replace(part, stored)
        if config.model_type == "qwen3_vl_moe" and ".experts." in name:  # [experts, inputs, outputs] in published ones
            value = value.transpose(1, 2)
        for own, tensor in experts_apart(folder.name, name, value):
            weights[own] = tensor.to(dtype).contiguous()
    return weights


def experts_apart(checkpoint: str, name: str, value: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The tensors of each expert, as older versions of transformers write what newer ones have stacked."""
    parts = EXPERT_NAMES.get(checkpoint)
    if parts is None or ".mlp.experts." not in name:
        if parts:
            name = name.replace(".mlp.gate.moe_statics.", ".mlp.moe_statics.").replace(".mlp.", f".{parts[0]}.")
        return [(name, value)]
    folder, gate, up, down = parts
    own = {"gate_up_proj": (gate, up), "down_proj": (down,)}[name.rpartition(".")[2]]
    at = f"{name.partition('.mlp.')[0]}.{folder}.experts"
    return [
        (f"{at}.{expert}.{part}.weight", tensor)
        for expert, matrix in enumerate(value)
        for part, tensor in zip(own, matrix.chunk(len(own)), strict=True)
    ]


# Families whose code is on the hub and not in transformers: the math of Llama, Granite or Qwen2, under other names.
# Baichuan 2 divides the rows of lm_head by their lengths (`NormHead`), MiniCPM says multipliers otherwise.
INTERNLM2 = {
    ".self_attn.o_proj.": ".attention.wo.",
    ".mlp.gate_proj.": ".feed_forward.w1.",
    ".mlp.up_proj.": ".feed_forward.w3.",
    ".mlp.down_proj.": ".feed_forward.w2.",
    ".input_layernorm.": ".attention_norm.",
    ".post_attention_layernorm.": ".ffn_norm.",
    "model.embed_tokens.": "model.tok_embeddings.",
    "lm_head.": "output.",
}
EXAONE = {
    ".self_attn.o_proj.": ".attn.attention.out_proj.",
    ".self_attn.": ".attn.attention.",
    ".mlp.gate_proj.": ".mlp.c_fc_0.",
    ".mlp.up_proj.": ".mlp.c_fc_1.",
    ".mlp.down_proj.": ".mlp.c_proj.",
    ".input_layernorm.": ".ln_1.",
    ".post_attention_layernorm.": ".ln_2.",
    "model.embed_tokens.": "transformer.wte.",
    "model.norm.": "transformer.ln_f.",
    "model.layers.": "transformer.h.",
}
# By name: what the tensor of q, k and v is called, other names, and the config.json of the same math.
AS_OTHERS: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "internlm2": ("attention.wqkv", INTERNLM2, LLAMA),
    "baichuan": ("self_attn.W_pack", {}, LLAMA),
    "baichuan2": ("self_attn.W_pack", {}, LLAMA),
    "exaone": (
        "",
        EXAONE,
        {**LLAMA, "num_hidden_layers": 2, "intermediate_size": 72, "hidden_act": "silu", "rms_norm_eps": 1e-5},
    ),
    "minicpm": (
        "",
        {},
        {
            "model_type": "granite",
            "architectures": ["GraniteForCausalLM"],
            "embedding_multiplier": 1.5,
            "residual_multiplier": 1.4 * 3**-0.5,
            "logits_scaling": 64 / 32,
            "attention_multiplier": 16**-0.5,
        },
    ),
    "mimo": ("", {}, QWEN2),
    "kimi-k2": ("", {}, {"model_type": "deepseek_v3"}),
    "kimi-k25": ("", {}, {"architectures": ["Kimi_K25ForConditionalGeneration"]}),
}


def under_own_names(weights: dict[str, torch.Tensor], name: str, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What a checkpoint of such a family has of these weights; in some, q, k and v are one tensor."""
    qkv_name, renamed, _ = AS_OTHERS[name]
    groups = config.get("num_key_value_heads", 1) if name == "internlm2" else 1  # rows of each kv head by themselves
    own = {}
    for key, value in weights.items():
        if qkv_name and ".q_proj." in key:
            parts = [weights[key.replace("q_proj", part)].chunk(groups) for part in ("q_proj", "k_proj", "v_proj")]
            qkv = torch.cat([part for group in zip(*parts, strict=True) for part in group])
            own[key.replace("self_attn.q_proj", qkv_name)] = qkv
        elif not qkv_name or (".k_proj." not in key and ".v_proj." not in key):
            for part, stored in renamed.items():
                key = key.replace(part, stored)
            own[key] = value.clone()
    if name == "mimo":  # as published ones, with a layer that guesses at later tokens
        own["model.mtp_layers.0.input_proj.weight"] = torch.zeros(4, 8, dtype=weights["model.norm.weight"].dtype)
    return own


def write_weights(folder: Path, weights: dict[str, torch.Tensor], files: int) -> None:
    if files == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(weights)
    shards = {f"model-{i + 1:05}-of-{files:05}.safetensors": names[i::files] for i in range(files)}
    for file, members in shards.items():
        save_file({name: weights[name] for name in members}, folder / file, metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": sum(w.numel() * w.element_size() for w in weights.values())},
        "weight_map": {name: file for file, members in shards.items() for name in members},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1, sort_keys=True) + "\n")


def freeze_rope(model: Any, max_model_len: int) -> None:
    """Make the frequencies those of `max_model_len` tokens, whatever the length of the input."""
    rotary, config = text_model(model).rotary_emb, model.config.get_text_config()
    if rotary.rope_type in ("dynamic", "longrope"):
        inv_freq, rotary.attention_scaling = ROPE_INIT_FUNCTIONS[rotary.rope_type](
            config, torch.device("cpu"), seq_len=max_model_len
        )
        rotary.inv_freq = inv_freq
        rotary.rope_type = "frozen"


@torch.no_grad()
def expected(folder: Path, prompt: int, max_model_len: int, seed: int) -> dict[str, Any] | None:
    """What transformers computes from `folder`, or None if a greedy token leads by too little."""
    config = AutoConfig.from_pretrained(folder)
    model, info = model_class(config).from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    if any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        raise RuntimeError(f"{folder.name}: {info}")
    model.eval()
    freeze_rope(model, max_model_len)
    generator = torch.Generator().manual_seed(seed + 1)
    ids = torch.randint(3, model.config.get_text_config().vocab_size, (prompt,), generator=generator).tolist()
    result = model(torch.tensor([ids]), use_cache=False, output_attentions=True)
    logits = result.logits[0]
    peak = max(layer[0, :, -1].amax(-1).mean().item() for layer in result.attentions)
    if logits.std() < 0.5 or peak < 0.25:
        raise RuntimeError(f"{folder.name}: too flat (logits {logits.std():.2f}, attention {peak:.2f})")

    tokens = list(ids)
    for _ in range(NUM_GREEDY):
        last = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        best = last.topk(2).values
        if (best[0] - best[1]) / last.abs().max() < MIN_LEAD:
            return None
        tokens.append(int(last.argmax()))
    return {
        "input_ids": np.array(ids, np.int32),
        "logits": logits.numpy(),
        "greedy_ids": np.array(tokens[prompt:], np.int32),
        "max_model_len": np.int64(max_model_len),
    }


def make_checkpoint(name: str) -> None:
    config, dtype, prompt, max_model_len, files = CHECKPOINTS[name]
    folder = GOLDEN / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    said = {**config, **AS_OTHERS[name][2]} if name in AS_OTHERS else config
    (folder / "config.json").write_text(json.dumps(said, indent=1) + "\n")
    first = 1000 * list(CHECKPOINTS).index(name)
    for seed in range(first, first + 100):
        weights = random_weights(folder, dtype, seed)
        head = weights.get("lm_head.weight")
        if name == "baichuan2":
            weights["lm_head.weight"] = torch.nn.functional.normalize(head.float())
        write_weights(folder, weights, files)
        result = expected(folder, prompt, max_model_len, seed)
        if result is not None:
            break
    else:
        raise RuntimeError(f"{name}: no seed of 100 has a clear lead in every greedy step")
    if name in AS_OTHERS:
        if name == "baichuan2":
            weights["lm_head.weight"] = head
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        write_weights(folder, under_own_names(weights, name, config), files)
    np.savez_compressed(folder / "expected.npz", **result)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{name}: seed {seed}, {size // 1024} KiB, greedy {result['greedy_ids'].tolist()}")


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
        "olmo3": transformers.Olmo3Config(),
        "gpt_oss": transformers.GptOssConfig(),
        "cohere": transformers.CohereConfig(),
        "cohere2": transformers.Cohere2Config(),
        "gemma3": transformers.Gemma3Config().text_config,
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
        "olmoe": transformers.OlmoeConfig(),
        "solar_open": transformers.SolarOpenConfig(),
        "granitemoe": transformers.GraniteMoeConfig(),
        "granitemoeshared": transformers.GraniteMoeSharedConfig(),
    }
    keys = (
        *sizes(0, 0, 0, 0, 0, 0),
        *("head_dim", "max_position_embeddings", "rms_norm_eps", "attention_bias", "mlp_bias"),
        *("tie_word_embeddings", "bos_token_id", "eos_token_id", "rope_parameters", "layer_types"),
    )
    return {
        name: {key: getattr(config, key) for key in keys if hasattr(config, key)} for name, config in configs.items()
    }


README = f"""# Golden checkpoints

Made by `python tools/make_golden.py` with torch {torch.__version__}, transformers {transformers.__version__},
numpy {np.__version__}; its header says what is in each folder. `rope.json` holds rotary frequencies and
`defaults.json` the defaults of the configuration classes, both of the same transformers. Nothing here is
edited by hand.
"""


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[1:] or CHECKPOINTS:
        make_checkpoint(name)
    rows = ",\n".join(json.dumps(row) for row in rope_golden())
    (GOLDEN / "rope.json").write_text(f"[\n{rows}\n]\n")
    (GOLDEN / "defaults.json").write_text(json.dumps(defaults_golden(), indent=1) + "\n")
    (GOLDEN / "README.md").write_text(README)


if __name__ == "__main__":
    main()
