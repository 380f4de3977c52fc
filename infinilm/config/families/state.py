"""The families whose layers keep a state of each sequence, by the gated delta rule, short convolutions or Mamba: rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infinilm.config.families.defaults import QWEN3_5_DEFAULTS, QWEN3_5_MOE_DEFAULTS, QWEN3_NEXT_DEFAULTS
from infinilm.config.families.dense import GRANITE_KEYS
from infinilm.config.families.experts import DEEPSEEK_ROUTING, EXPERT_COUNT
from infinilm.config.families.family import MULTIMODAL_ROPE_INERT, MULTIMODAL_ROPE_TYPES, Family
from infinilm.config.families.names import GRANITE_HYBRID, LFM2, LFM2_MOE, QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from infinilm.config.sublayers.delta import DELTA_KEYS
from infinilm.config.sublayers.experts import EXPERT_KEYS, Routing
from infinilm.config.sublayers.mamba import MAMBA_KEYS
from infinilm.config.sublayers.short_conv import SHORT_CONV_KEYS

__all__ = ["STATE_FAMILIES"]

_KEYS = DELTA_KEYS | {"partial_rotary_factor"}

# Columns that they share.
_GATED_DELTA: Mapping[str, Any] = {
    "qkv_bias": False,
    "out_bias": False,
    "qk_norm": "head",
    "attention": {"output_gate": True},
    "norm_offset": 1,
    "fixed_keys": {"attn_output_gate": True},
}
_QWEN3_5: Mapping[str, Any] = {
    **_GATED_DELTA,
    "defaults": QWEN3_5_DEFAULTS,
    "names": QWEN3_5,
    "keys": _KEYS,
    "rope_types": MULTIMODAL_ROPE_TYPES,
    "rope_inert": MULTIMODAL_ROPE_INERT,
}
_QWEN3_5_MOE: Mapping[str, Any] = {
    **_QWEN3_5,
    "defaults": QWEN3_5_MOE_DEFAULTS,
    "names": QWEN3_5_MOE,
    "keys": _KEYS | EXPERT_KEYS,
    "other_keys": EXPERT_COUNT,
    "norm_topk_prob": True,
}
_LFM2_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 65536,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "conv_L_cache": 3,
}
_LFM2: Mapping[str, Any] = {
    "qkv_bias": False,
    "out_bias": False,
    "qk_norm": "head",
    "fixed_keys": {"conv_bias": False, "use_pos_enc": True},
    # Sizes that are said twice, and how weights begin in training.
    "ignored_keys": frozenset(
        {
            *("block_dim", "block_norm_eps", "conv_dim", "conv_dim_out", "num_heads"),
            *("block_mlp_init_scale", "block_out_init_scale", "block_use_swiglu", "block_use_xavier_init"),
            "conv_use_xavier_init",
        }
    ),
}
_LFM2_KEYS: Mapping[str, tuple[str, ...]] = {
    "norm_eps": ("rms_norm_eps",),
    "tie_embedding": ("tie_word_embeddings",),
    "theta": ("rope_theta",),
}

_MAMBA_DEFAULTS: Mapping[str, Any] = {"mamba_n_heads": 128, "mamba_d_state": 256}
_MAMBA_IGNORED = frozenset({"mamba_chunk_size"})  # states go from token to token, whatever chunks were trained with

STATE_FAMILIES: tuple[Family, ...] = (
    Family(
        architecture="Qwen3NextForCausalLM",
        model_type="qwen3_next",
        defaults=QWEN3_NEXT_DEFAULTS,
        names=QWEN3_NEXT,
        keys=_KEYS | EXPERT_KEYS,
        other_keys=EXPERT_COUNT,
        **_GATED_DELTA,
    ),
    Family(architecture="Qwen3_5ForCausalLM", model_type="qwen3_5_text", **_QWEN3_5),
    Family(architecture="Qwen3_5MoeForCausalLM", model_type="qwen3_5_moe_text", **_QWEN3_5_MOE),
    Family(
        architecture="Lfm2ForCausalLM",
        model_type="lfm2",
        defaults={**_LFM2_DEFAULTS, "hidden_size": 2560, "intermediate_size": 12288},
        names=LFM2,
        keys=SHORT_CONV_KEYS,
        other_keys={**_LFM2_KEYS, "block_ff_dim": ("intermediate_size",)},
        **_LFM2,
    ),
    Family(
        architecture="Lfm2MoeForCausalLM",
        model_type="lfm2_moe",
        defaults={
            **_LFM2_DEFAULTS,
            "hidden_size": 2048,
            "intermediate_size": 7168,
            "moe_intermediate_size": 1792,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "first_k_dense_replace": 2,
            "norm_topk_prob": True,
        },
        routing=DEEPSEEK_ROUTING,
        names=LFM2_MOE,
        keys=SHORT_CONV_KEYS
        | {"num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "first_k_dense_replace"}
        | {"routed_scaling_factor"},
        other_keys={**_LFM2_KEYS, "num_dense_layers": ("first_k_dense_replace",)},
        **{**_LFM2, "fixed_keys": {**_LFM2["fixed_keys"], "use_expert_bias": True}},
    ),
    Family(
        architecture="GraniteMoeHybridForCausalLM",
        model_type="granitemoehybrid",
        defaults={
            **_MAMBA_DEFAULTS,
            "attention_multiplier": 1.0,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
        routing=Routing(shared_gate=False),
        norm_topk_prob=True,
        names=GRANITE_HYBRID,
        keys=GRANITE_KEYS
        | MAMBA_KEYS
        | {"num_experts", "num_experts_per_tok", "shared_expert_intermediate_size", "norm_topk_prob"}
        | {"no_rope_layers", "position_embedding_type"},
        other_keys={**EXPERT_COUNT, "layers_block_type": ("layer_types",)},
        fixed_keys={"normalization_function": "rmsnorm"},
        ignored_keys=_MAMBA_IGNORED,
    ),
)
