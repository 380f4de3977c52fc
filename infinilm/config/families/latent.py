"""The families with latent attention (MLA): rows of the table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from infinilm.config.families.defaults import (
    DEEPSEEK_V2_DEFAULTS,
    DEEPSEEK_V3_DEFAULTS,
    GLM4_MOE_LITE_DEFAULTS,
    MINISTRAL3_DEFAULTS,
)
from infinilm.config.families.dense import MINICPM_KEYS, MINISTRAL3_ROPE_INERT
from infinilm.config.families.experts import DEEPSEEK_FIXED, DEEPSEEK_ROUTING, ROUTED_COUNT
from infinilm.config.families.family import Family
from infinilm.config.families.names import AX_K1, DEEPSEEK_MOE
from infinilm.config.sublayers.experts import DEEPSEEK_KEYS, Routing
from infinilm.config.sublayers.indexer import INDEXER_KEYS
from infinilm.config.sublayers.latent import LATENT_KEYS

__all__ = ["LATENT_FAMILIES"]

# Columns that they share. A bias is one of the projections to latents, and of o_proj.
_LATENT: Mapping[str, Any] = {"rope_pairs": "neighbours", "keys": LATENT_KEYS}
_EXPERTS: Mapping[str, Any] = {
    **_LATENT,
    "names": DEEPSEEK_MOE,
    "keys": LATENT_KEYS | DEEPSEEK_KEYS,
    "other_keys": ROUTED_COUNT,
}

# DeepSeek V3's, with an indexer. `layer_types` says that each layer has one.
_INDEXED: Mapping[str, Any] = {
    **_EXPERTS,
    "keys": _EXPERTS["keys"] | {"mlp_layer_types", "mlp_only_layers"} | INDEXER_KEYS,
    "ignored_keys": frozenset({"layer_types"}),
}
_SHARED_CHOICE = INDEXER_KEYS - {"index_topk", "index_n_heads", "index_head_dim"}

LATENT_FAMILIES: tuple[Family, ...] = (
    Family(
        architecture="DeepseekV2ForCausalLM",
        model_type="deepseek_v2",
        defaults=DEEPSEEK_V2_DEFAULTS,
        routing=Routing(shared_gate=False, group_best=1),
        fixed_keys={
            "scoring_func": "softmax",
            "moe_layer_freq": 1,
            "norm_topk_prob": False,
            "mlp_bias": False,
        },
        **{**_EXPERTS, "keys": _EXPERTS["keys"] - {"norm_topk_prob", "rope_interleave"} | {"topk_method"}},
    ),
    Family(
        architecture="DeepseekV3ForCausalLM",
        model_type="deepseek_v3",
        other_model_types=("kimi_k2",),
        defaults=DEEPSEEK_V3_DEFAULTS,
        routing=DEEPSEEK_ROUTING,
        fixed_keys=DEEPSEEK_FIXED,
        **_EXPERTS,
    ),
    Family(
        architecture="DeepseekV32ForCausalLM",
        model_type="deepseek_v32",
        defaults={
            **DEEPSEEK_V3_DEFAULTS,
            "max_position_embeddings": 163840,
            "index_topk": 2048,
            "index_n_heads": 64,
            "index_head_dim": 128,
        },
        routing=DEEPSEEK_ROUTING,
        fixed_keys=DEEPSEEK_FIXED,
        indexer_turns_neighbours=False,
        **{**_INDEXED, "keys": _INDEXED["keys"] - _SHARED_CHOICE},
    ),
    Family(  # GLM-5
        architecture="GlmMoeDsaForCausalLM",
        model_type="glm_moe_dsa",
        defaults={
            **DEEPSEEK_V3_DEFAULTS,
            "vocab_size": 154880,
            "hidden_size": 6144,
            "intermediate_size": 12288,
            "num_hidden_layers": 78,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "max_position_embeddings": 202752,
            "rms_norm_eps": 1e-5,
            "q_lora_rank": 2048,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "n_group": 1,
            "topk_group": 1,
            "index_topk": 2048,
            "index_n_heads": 32,
            "index_head_dim": 128,
        },
        routing=DEEPSEEK_ROUTING,
        fixed_keys=DEEPSEEK_FIXED,
        **_INDEXED,
    ),
    Family(
        architecture="Glm4MoeLiteForCausalLM",
        model_type="glm4_moe_lite",
        defaults=GLM4_MOE_LITE_DEFAULTS,
        routing=DEEPSEEK_ROUTING,
        fixed_keys=DEEPSEEK_FIXED,
        **{**_EXPERTS, "keys": _EXPERTS["keys"] | {"mlp_layer_types", "mlp_only_layers"}},
    ),
    Family(
        architecture="AXK1ForCausalLM",
        model_type="axk1",
        other_model_types=("AXK1",),  # on the hub
        defaults={
            **DEEPSEEK_V3_DEFAULTS,
            "vocab_size": 163840,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "max_position_embeddings": 32768,
            "num_experts": 192,
            "first_k_dense_replace": 1,
            "bos_token_id": (163691,),
            "eos_token_id": (163691,),
        },
        routing=replace(DEEPSEEK_ROUTING, post_norm=True),
        fixed_keys={**DEEPSEEK_FIXED, "topk_method": ("noaux_tc", None)},
        **{
            **_EXPERTS,
            "names": AX_K1,
            "keys": _EXPERTS["keys"] | {"mlp_layer_types", "mlp_only_layers"},
        },
    ),
    Family(  # Mistral Small 4
        architecture="Mistral4ForCausalLM",
        model_type="mistral4",
        defaults={
            "vocab_size": 131072,
            "intermediate_size": 12288,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 36,
            "num_key_value_heads": 32,
            "n_shared_experts": 1,
            "num_experts": 128,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
            "kv_lora_rank": 256,
            "q_lora_rank": 1024,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 64,
            "v_head_dim": 128,
            "max_position_embeddings": 1048576,
            "pad_token_id": 11,
            "rope_scaling": {
                **MINISTRAL3_DEFAULTS["rope_scaling"],
                "factor": 128.0,
                "original_max_position_embeddings": 8192,
            },
        },
        routing=Routing(shared_gate=False),
        **{**_EXPERTS, "keys": _EXPERTS["keys"] | {"llama_4_scaling_beta"}},
        # Here head_dim is that of a query, of which RoPE turns a part.
        ignored_keys=frozenset({"head_dim"}),
        rope_inert=MINISTRAL3_ROPE_INERT | {"partial_rotary_factor"},
    ),
    Family(  # with MiniCPM's multipliers
        architecture="MiniCPM3ForCausalLM",
        model_type="minicpm3",
        defaults={
            "vocab_size": 73448,
            "hidden_size": 2560,
            "intermediate_size": 6400,
            "num_hidden_layers": 62,
            "num_attention_heads": 40,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "kv_lora_rank": 256,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 1.4 / 62**0.5,
            "logits_scaling": 10.0,
        },
        keys=(LATENT_KEYS - {"rope_interleave"}) | MINICPM_KEYS,
    ),
    Family(
        architecture="YoutuForCausalLM",
        model_type="youtu",
        defaults={key: value for key, value in DEEPSEEK_V3_DEFAULTS.items() if key in LATENT_KEYS}
        | {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
            "bos_token_id": (128000,),
            "eos_token_id": (128001,),
        },
        **_LATENT,
    ),
)
