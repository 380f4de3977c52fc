"""Families whose layers differ in shape: rows of the table."""

from __future__ import annotations

from infinilm.config.families.defaults import GEMMA3N_DEFAULTS, GEMMA4_DEFAULTS
from infinilm.config.families.family import Family
from infinilm.config.families.names import GEMMA3N, GEMMA4
from infinilm.config.sublayers.altup import ALTUP_KEYS
from infinilm.config.sublayers.experts import Routing
from infinilm.config.sublayers.layer_shapes import LAYER_KEYS

__all__ = ["SHAPED_FAMILIES"]

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
)
