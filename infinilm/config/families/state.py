"""The families whose layers keep a state of each sequence, by the delta rule, short convolutions or Mamba: rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infinilm.config.families.defaults import QWEN3_5_DEFAULTS, QWEN3_5_MOE_DEFAULTS, QWEN3_NEXT_DEFAULTS
from infinilm.config.families.dense import GRANITE_KEYS
from infinilm.config.families.experts import DEEPSEEK_ROUTING, EXPERT_COUNT, ROUTED_COUNT
from infinilm.config.families.family import MULTIMODAL_ROPE_INERT, MULTIMODAL_ROPE_TYPES, Family
from infinilm.config.families.names import (
    BAILING_HYBRID,
    BAMBA,
    FALCON_H1,
    GRANITE_HYBRID,
    KIMI_LINEAR,
    LFM2,
    LFM2_MOE,
    NEMOTRON_H,
    OLMO_HYBRID,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_NEXT,
    ZAMBA2,
)
from infinilm.config.sublayers.delta import DELTA_KEYS
from infinilm.config.sublayers.experts import DEEPSEEK_KEYS, EXPERT_KEYS, LIMIT_KEYS, Routing
from infinilm.config.sublayers.latent import LATENT_KEYS
from infinilm.config.sublayers.mamba import MAMBA_KEYS, MultiplierConfig
from infinilm.config.sublayers.shared_block import SHARED_BLOCK_KEYS
from infinilm.config.sublayers.short_conv import SHORT_CONV_KEYS
from infinilm.config.sublayers.sizes import defaults_of

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
    Family(  # with latent attention in the other layers
        architecture="KimiLinearForCausalLM",
        model_type="kimi_linear",
        defaults={
            "vocab_size": 163840,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "moe_intermediate_size": 1024,
            "num_hidden_layers": 27,
            "num_key_value_heads": 32,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.446,
            "norm_topk_prob": True,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "linear_num_key_heads": 32,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "max_position_embeddings": 1048576,
            "rms_norm_eps": 1e-5,
            "pad_token_id": 163839,
            "bos_token_id": (163584,),
            "eos_token_id": (163586,),
        },
        positions="none",
        decay="of_element",
        routing=DEEPSEEK_ROUTING,
        names=KIMI_LINEAR,
        keys=LATENT_KEYS
        | DEEPSEEK_KEYS
        | DELTA_KEYS
        | {"mlp_layer_types", "mlp_only_layers", "linear_attn_config"} - {"rope_interleave"},
        other_keys={
            "num_experts_per_token": ("num_experts_per_tok",),
            "num_shared_experts": ("n_shared_experts",),
            "moe_renormalize": ("norm_topk_prob",),
            "num_expert_group": ("n_group",),
            "model_max_length": ("max_position_embeddings",),
            "linear_num_heads": ("linear_num_key_heads", "linear_num_value_heads"),
            "linear_head_dim": ("linear_key_head_dim", "linear_value_head_dim"),
        },
        fixed_keys={"moe_router_activation_func": "sigmoid", "mla_use_nope": True, "moe_layer_freq": 1},
        # head_dim is of no math, and nothing is turned.
        ignored_keys=frozenset({"head_dim", "use_grouped_topk", "rope_theta", "rope_scaling"}),
    ),
    Family(
        architecture="BailingHybridForCausalLM",
        model_type="bailing_hybrid",
        saved_architecture="BailingMoeV3ForCausalLM",
        defaults={
            "vocab_size": 157184,
            "hidden_size": 2560,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 42,
            "num_key_value_heads": 32,
            "num_experts": 512,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_group": 8,
            "topk_group": 4,
            "first_k_dense_replace": 2,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "kda_lower_bound": -5.0,
            "full_attention_interval": 6,
            "max_position_embeddings": 262144,
            "rope_theta": 6000000.0,
            "pad_token_id": 156892,
            "bos_token_id": (),
            "eos_token_id": (156895,),
        },
        rope_pairs="neighbours",
        decay="of_element",
        delta={"gate_rank": 0},
        latent={"head_gate": True},
        routing=DEEPSEEK_ROUTING,
        names=BAILING_HYBRID,
        keys=LATENT_KEYS
        | DEEPSEEK_KEYS
        | DELTA_KEYS
        | LIMIT_KEYS
        | {"mlp_layer_types", "mlp_only_layers", "kda_lower_bound"} - {"rope_interleave"},
        other_keys={
            "num_local_experts": ("num_experts",),
            "num_experts_per_token": ("num_experts_per_tok",),
            "num_shared_experts": ("n_shared_experts",),
            "moe_renormalize": ("norm_topk_prob",),
            "num_expert_group": ("n_group",),
            "model_max_length": ("max_position_embeddings",),
            "layer_group_size": ("full_attention_interval",),
            "expert_swiglu_limit_list": ("swiglu_limits",),
            "share_expert_swiglu_limit_list": ("swiglu_limits_shared",),
        },
        fixed_keys={"scoring_func": "sigmoid", "score_function": "sigmoid", "moe_router_enable_expert_bias": True},
        ignored_keys=frozenset({"mtp_loss_scaling_factor"}),
    ),
    Family(
        architecture="OlmoHybridForCausalLM",
        model_type="olmo_hybrid",
        defaults={
            "vocab_size": 100352,
            "hidden_size": 3840,
            "num_attention_heads": 30,
            "max_position_embeddings": 65536,
            "pad_token_id": 100277,
            "bos_token_id": (),
            "eos_token_id": (100257,),
            "linear_conv_kernel_dim": 4,
            "linear_allow_neg_eigval": True,
        },
        qk_norm="all",
        attention_norms_behind=True,
        delta={"apart": True, "norm_eps": 1e-5},
        names=OLMO_HYBRID,
        keys=DELTA_KEYS - {"full_attention_interval"} | {"linear_allow_neg_eigval", "no_rope_layers"},
        # How weights begin in training.
        ignored_keys=frozenset(
            {"linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor"}
        ),
    ),
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
    Family(
        architecture="NemotronHForCausalLM",
        model_type="nemotron_h",
        defaults={
            "vocab_size": 131072,
            "intermediate_size": 21504,
            "num_hidden_layers": 4,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "hidden_act": "relu2",
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "pad_token_id": 0,
            "mamba_n_heads": 128,
            "mamba_d_head": 64,
            "mamba_n_groups": 8,
            "mamba_d_state": 128,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688,
            "shared_expert_intermediate_size": 7688,
            "norm_topk_prob": True,
        },
        qkv_bias=False,
        out_bias=False,
        mlp_bias="mlp_bias",
        gated_mlp=False,
        positions="none",
        lone_sublayers=True,
        routing=DEEPSEEK_ROUTING,
        names=NEMOTRON_H,
        keys=MAMBA_KEYS
        | {"num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"}
        | {"norm_topk_prob", "n_group", "topk_group", "routed_scaling_factor", "mlp_only_layers"}
        | {"hybrid_override_pattern", "moe_latent_size"},
        other_keys={
            **EXPERT_COUNT,
            **ROUTED_COUNT,
            "layers_block_type": ("layer_types",),
            "layer_norm_epsilon": ("rms_norm_eps",),
            "norm_eps": ("rms_norm_eps",),
            "attention_head_dim": ("head_dim",),
            "mlp_hidden_act": ("hidden_act",),
            "moe_shared_expert_intermediate_size": ("shared_expert_intermediate_size",),
            "mamba_num_heads": ("mamba_n_heads",),
            "mamba_head_dim": ("mamba_d_head",),
            "n_groups": ("mamba_n_groups",),
            "ssm_state_size": ("mamba_d_state",),
            "conv_kernel": ("mamba_d_conv",),
            "use_conv_bias": ("mamba_conv_bias",),
            "use_bias": ("mamba_proj_bias",),
        },
        fixed_keys={"mamba_hidden_act": "silu"},
        # How weights and steps begin in training, sizes that follow from others, and how other engines compute.
        ignored_keys=_MAMBA_IGNORED
        | {"chunk_size", "expand", "time_step_floor", "time_step_max", "time_step_min", "time_step_rank"}
        | {"rescale_prenorm_residual", "residual_in_fp32", "use_mamba_kernels", "mamba_ssm_cache_dtype"}
        | {"n_shared_experts", "moe_shared_expert_overlap", "mtp_layers_block_type", "mtp_hybrid_override_pattern"},
    ),
    Family(
        architecture="FalconH1ForCausalLM",
        model_type="falcon_h1",
        defaults={
            **_MAMBA_DEFAULTS,
            "vocab_size": 128000,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "pad_token_id": 0,
            "mamba_d_ssm": 1024,
            "mamba_rms_norm": False,
            "mamba_norm_before_gate": True,
        },
        attention_beside=True,
        names=FALCON_H1,
        keys=MAMBA_KEYS
        | frozenset(defaults_of(MultiplierConfig))
        | {"mamba_d_ssm", "mamba_rms_norm", "mamba_norm_before_gate"}
        | {"ssm_multipliers", "ssm_in_multiplier", "ssm_out_multiplier"}
        | {"embedding_multiplier", "logits_scaling", "lm_head_multiplier"},
        # Biases of both, of which published models have none, would be multiplied in other places.
        fixed_keys={"projectors_bias": False, "attention_bias": False},
        ignored_keys=_MAMBA_IGNORED
        | {"mamba_use_mlp", "attn_layer_indices", "mlp_expansion_factor", "layers_block_type", "layer_types"},
    ),
    Family(
        architecture="BambaForCausalLM",
        model_type="bamba",
        defaults={
            **_MAMBA_DEFAULTS,
            "vocab_size": 128000,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-5,
            "pad_token_id": 0,
            "partial_rotary_factor": 0.5,
        },
        mlp_bias="mlp_bias",
        names=BAMBA,
        keys=MAMBA_KEYS | {"partial_rotary_factor", "attn_layer_indices"},
        ignored_keys=_MAMBA_IGNORED | {"z_loss_coefficient", "layers_block_type", "attn_rotary_emb"},
    ),
    Family(
        architecture="Zamba2ForCausalLM",
        model_type="zamba2",
        defaults={
            "hidden_size": 2560,
            "num_hidden_layers": 54,
            "hidden_act": "gelu",
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "pad_token_id": 0,
            "mamba_n_heads": 8,
            "mamba_d_state": 64,
            "num_mem_blocks": 1,
            "adapter_rank": 128,
        },
        qkv_bias=False,
        out_bias=False,
        lone_sublayers=True,
        names=ZAMBA2,
        keys=MAMBA_KEYS | SHARED_BLOCK_KEYS | {"no_rope_layers", "query_pre_attn_scalar"},
        other_keys={
            "layers_block_type": ("layer_types",),
            "attention_head_dim": ("head_dim",),
            "mamba_ngroups": ("mamba_n_groups",),
            "n_mamba_heads": ("mamba_n_heads",),
        },
        # The norm of what Mamba gives has the last, whatever the others have.
        fixed_keys={
            "add_bias_linear": False,
            "use_conv_bias": True,
            "use_long_context": False,
            "tie_word_embeddings": True,  # transformers shares no block, either, where it is false
            "use_shared_mlp_adapter": True,
            "rms_norm_eps": 1e-5,
        },
        # How weights and steps begin in training, sizes that follow from others, and how other engines compute.
        ignored_keys=_MAMBA_IGNORED
        | {"chunk_size", "time_step_floor", "time_step_max", "mamba_headdim", "use_mamba_kernels", "use_mem_eff_path"}
        | {"attention_hidden_size", "kv_channels", "num_query_groups", "hybrid_layer_ids", "ft_use_shared_block"},
    ),
)
