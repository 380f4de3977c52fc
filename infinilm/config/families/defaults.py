"""Defaults of the configuration classes of transformers for absent keys of config.json: columns of the table.

`tests/golden/defaults.json` proves them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infinilm.config.fields import COMMON_DEFAULTS
from infinilm.config.sublayers.experts import ExpertConfig
from infinilm.config.sublayers.latent import LATENT_KEYS
from infinilm.config.sublayers.sizes import defaults_of

__all__ = [
    "COHERE_DEFAULTS",
    "DEEPSEEK_V2_DEFAULTS",
    "DEEPSEEK_V3_DEFAULTS",
    "ERNIE_DEFAULTS",
    "GEMMA2_DEFAULTS",
    "GEMMA3N_DEFAULTS",
    "GEMMA3_DEFAULTS",
    "GEMMA4_DEFAULTS",
    "GEMMA4_UNIFIED_DEFAULTS",
    "GEMMA_DEFAULTS",
    "GLM4_MOE_LITE_DEFAULTS",
    "GLM_DEFAULTS",
    "GPT_OSS_DEFAULTS",
    "MINISTRAL3_DEFAULTS",
    "MISTRAL_DEFAULTS",
    "QWEN2_VL_DEFAULTS",
    "QWEN3_5_DEFAULTS",
    "QWEN3_5_MOE_DEFAULTS",
    "QWEN3_NEXT_DEFAULTS",
    "QWEN3_VL_MOE_DEFAULTS",
    "QWEN_DEFAULTS",
    "QWEN_MOE_DEFAULTS",
    "TEXT_DEFAULTS",
]

# The same for Qwen2 and Qwen3, but for the rows that differ.
QWEN_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "bos_token_id": (),
    "eos_token_id": (),
}

QWEN_MOE_DEFAULTS: Mapping[str, Any] = {
    **QWEN_DEFAULTS,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
}

# Defaults of a text_config whose family has others when it stands alone.
TEXT_DEFAULTS: Mapping[str, Any] = {
    key: COMMON_DEFAULTS[key]
    for key in (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "head_dim",
        "rms_norm_eps",
        "rope_theta",
    )
}

MISTRAL_DEFAULTS: Mapping[str, Any] = {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}

MINISTRAL3_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 131072,
    "intermediate_size": 14336,
    "num_hidden_layers": 34,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}

GLM_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 151552,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-7,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "bos_token_id": (),
    "eos_token_id": (151329, 151336, 151338),
}

GEMMA_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 256000,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": (2,),
    "eos_token_id": (1,),
}
GEMMA2_DEFAULTS: Mapping[str, Any] = {
    **GEMMA_DEFAULTS,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "use_sliding_window": True,
    "sliding_window_pattern": 2,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
GEMMA3_DEFAULTS: Mapping[str, Any] = {
    **GEMMA2_DEFAULTS,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "sliding_window_pattern": 6,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
GEMMA3N_DEFAULTS: Mapping[str, Any] = {
    **{key: value for key, value in GEMMA3_DEFAULTS.items() if key != "query_pre_attn_scalar"},
    "vocab_size": 262400,
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 35,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "sliding_window": 512,
    "sliding_window_pattern": 5,
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "num_kv_shared_layers": 15,
    "altup_num_inputs": 4,
    "laurel_rank": 64,
}
GEMMA4_DEFAULTS: Mapping[str, Any] = {
    **{key: value for key, value in GEMMA3_DEFAULTS.items() if key != "query_pre_attn_scalar"},
    "vocab_size": 262144,
    "num_hidden_layers": 30,
    "rope_scaling": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    "sliding_window": 512,
    "global_head_dim": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "norm_topk_prob": True,
}
GEMMA4_UNIFIED_DEFAULTS: Mapping[str, Any] = {
    **{key: value for key, value in GEMMA4_DEFAULTS.items() if "per_layer" not in key and key != "norm_topk_prob"},
    "max_position_embeddings": 262144,
    "sliding_window": 1024,
}

COHERE_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "logits_scaling": 16.0,  # logit_scale 0.0625
    "tie_word_embeddings": True,
    "bos_token_id": (5,),
    "eos_token_id": (255001,),
}

ERNIE_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 103424,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}

GPT_OSS_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "attention_bias": True,
    "sliding_window": 128,
    "use_sliding_window": True,
    "sliding_window_pattern": 2,
    "num_experts": 128,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "bos_token_id": (),
    "eos_token_id": (),
}

QWEN2_VL_DEFAULTS: Mapping[str, Any] = {
    **QWEN_DEFAULTS,
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "max_window_layers": 80,
    "attention_bias": True,
    "bos_token_id": (151643,),
    "eos_token_id": (151645,),
}

QWEN3_VL_MOE_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 128000,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": True,
    "bos_token_id": (),
    "eos_token_id": (),
}

QWEN3_NEXT_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "bos_token_id": (),
    "eos_token_id": (),
}
QWEN3_5_MOE_DEFAULTS: Mapping[str, Any] = {
    **QWEN3_NEXT_DEFAULTS,
    "vocab_size": 248320,
    "intermediate_size": 512,
    "num_hidden_layers": 40,
    "num_experts": 256,
    "num_experts_per_tok": 8,
}
QWEN3_5_DEFAULTS: Mapping[str, Any] = {
    **{key: value for key, value in QWEN3_NEXT_DEFAULTS.items() if key not in defaults_of(ExpertConfig)},
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
}

DEEPSEEK_V3_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "max_position_embeddings": 4096,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "bos_token_id": (0,),
    "eos_token_id": (1,),
}
DEEPSEEK_V2_DEFAULTS: Mapping[str, Any] = {
    **{key: value for key, value in DEEPSEEK_V3_DEFAULTS.items() if key in LATENT_KEYS},
    "vocab_size": 102400,
    "num_experts": 64,
    "moe_intermediate_size": 1407,
    "n_shared_experts": 2,
}
GLM4_MOE_LITE_DEFAULTS: Mapping[str, Any] = {
    **DEEPSEEK_V3_DEFAULTS,
    "vocab_size": 154880,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "num_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.8,
}
