"""Families whose layers differ in shape: rows of the table."""

from __future__ import annotations

from dataclasses import replace

from infinilm.config.families.defaults import GEMMA3N_DEFAULTS, GEMMA4_DEFAULTS
from infinilm.config.families.experts import DEEPSEEK_ROUTING
from infinilm.config.families.family import Family
from infinilm.config.families.names import GEMMA3N, GEMMA4, LAGUNA, STEP
from infinilm.config.sublayers.altup import ALTUP_KEYS
from infinilm.config.sublayers.experts import LIMIT_KEYS, Routing
from infinilm.config.sublayers.layer_shapes import LAYER_KEYS

__all__ = ["SHAPED_FAMILIES"]

# Experts as those of DeepSeek V3 without groups, and layers with a window that have heads and RoPE of their own.
_OF_WINDOWS = frozenset(
    {
        *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"),
        *("norm_topk_prob", "routed_scaling_factor", "mlp_layer_types", "mlp_only_layers"),
        *("swa_num_attention_heads", "swa_num_key_value_heads", "swa_partial_rotary_factor"),
        *("rope_local_base_freq", "partial_rotary_factor"),
    }
)

SHAPED_FAMILIES: tuple[Family, ...] = (
    Family(
        architecture="Gemma3nForCausalLM",
        model_type="gemma3n_text",
        defaults=GEMMA3N_DEFAULTS,
        qk_norm="head",
        attention={"v_norm": True},
        softmax_scale=1.0,
        windows="layer_types",
        post_norms=True,
        scaled_embedding=True,
        names=GEMMA3N,
        keys=ALTUP_KEYS
        | {"num_kv_shared_layers", "hidden_size_per_layer_input", "vocab_size_per_layer_input"}
        | {"final_logit_softcapping", "rope_local_base_freq"},
        fixed_keys={"altup_active_idx": (None, 0), "altup_correct_scale": (None, True)},
        ignored_keys=frozenset({"altup_coef_clip"}),  # it bounds coefficients in training alone
    ),
    Family(
        architecture="Gemma4ForCausalLM",
        model_type="gemma4_text",
        defaults=GEMMA4_DEFAULTS,
        qk_norm="head",
        attention={"v_norm": True},
        softmax_scale=1.0,
        windows="last_full",
        spans_in_windows=True,
        post_norms=True,
        layer_scalars=True,
        scaled_embedding=True,
        routing=Routing(shared_gate=False, beside_mlp=True),
        norm_topk_prob=True,
        names=GEMMA4,
        keys=LAYER_KEYS
        | {"final_logit_softcapping", "rope_local_base_freq", "per_layer_config"}
        | {"enable_moe_block", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"},
        other_keys={"top_k_experts": ("num_experts_per_tok",)},
        fixed_keys={"use_bidirectional_attention": (None, False, "vision")},  # "vision": of pictures alone
    ),
    Family(
        architecture="LagunaForCausalLM",
        model_type="laguna",
        defaults={
            "vocab_size": 100352,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 40,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rope_theta": 500000.0,
            "rope_local_base_freq": 10000.0,
            "partial_rotary_factor": 0.5,
            "swa_partial_rotary_factor": 1.0,
            "sliding_window": 512,
            "use_sliding_window": True,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "bos_token_id": (),
            "eos_token_id": (),
        },
        qkv_bias=False,
        out_bias=False,
        qk_norm="head",
        attention={"output_gate": True, "softplus_gate": True},
        windows="layer_types",
        routing=DEEPSEEK_ROUTING,
        norm_topk_prob=True,
        names=LAGUNA,
        keys=_OF_WINDOWS | {"num_attention_heads_per_layer", "first_k_dense_replace", "gating"},
        other_keys={"moe_routed_scaling_factor": ("routed_scaling_factor",)},
        fixed_keys={
            "moe_apply_router_weight_on_input": (None, False),
            "moe_router_logit_softcapping": (None, 0),
        },
    ),
    # Step 3.5, and the text part of Step 3.7: layers with a window have heads of q and a part of RoPE of their own.
    Family(
        architecture="Step3p5ForCausalLM",
        model_type="step3p5",
        defaults={
            "vocab_size": 128815,
            "intermediate_size": 11264,
            "num_hidden_layers": 45,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 128000,
            "rms_norm_eps": 1e-5,
            "use_sliding_window": True,
            "num_experts": 288,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1280,
            "shared_expert_intermediate_size": 1280,
            "norm_topk_prob": True,
            "use_qk_norm": True,
            "bos_token_id": (),
            "eos_token_id": (),
        },
        qkv_bias=False,
        out_bias=False,
        qk_norm="head",
        attention={"output_gate": True, "gate_by_head": True},
        windows="layer_types",
        # step3p5_mtp.py of SGLang and of vLLM. The MLPs of these layers have no limits: src/models/step35.cpp of
        # llama.cpp.
        routing=replace(DEEPSEEK_ROUTING, dense_head=True),
        windowed_head=True,
        head_before_norm=True,
        norm_topk_prob=True,
        norm_offset=1,
        names=STEP,
        keys=LIMIT_KEYS
        | _OF_WINDOWS
        | {"moe_layers_enum", "per_layer_config", "query_pre_attn_scalar", "use_qk_norm", "v_head_dim"},
        other_keys={
            "num_attention_groups": ("num_key_value_heads",),
            "moe_num_experts": ("num_experts",),
            "n_routed_experts": ("num_experts",),
            "moe_top_k": ("num_experts_per_tok",),
            "share_expert_dim": ("shared_expert_intermediate_size",),
            "share_expert_dims": ("shared_expert_intermediate_size",),
            "moe_router_scaling_factor": ("routed_scaling_factor",),
            "num_sliding_attention_heads": ("swa_num_attention_heads",),
        },
        fixed_keys={
            "moe_router_activation": "sigmoid",
            "norm_expert_weight": True,
            "use_moe_router_bias": True,
            "use_moe": True,
            "moe_every_n_layer": 1,
            "moe_layer_offset": 0,
            "use_head_wise_attn_gate": True,
            "gating": (True, "per-head"),
            "zero_centered": True,
            "sink": False,
            "att_impl_type": "GQA",
            "use_rope_layers": ([], None),
            "yarn_only_types": (["full_attention"],),
        },
        # Where the router is computed in 32 bits, which it always is; what the layers behind the last are like; keys of
        # the class that this one derives from in transformers.
        ignored_keys=frozenset({"need_fp32_gate", "max_seq_len", "mtp_layer_types", "mtp_mlp_layer_types"})
        | {"num_local_experts"},
    ),
)
