"""Families whose layers differ in shape: rows of the table."""

from __future__ import annotations

from infinilm.config.families.defaults import GEMMA4_DEFAULTS
from infinilm.config.families.family import Family
from infinilm.config.families.names import GEMMA4
from infinilm.config.sublayers.experts import Routing
from infinilm.config.sublayers.layer_shapes import LAYER_KEYS

__all__ = ["SHAPED_FAMILIES"]

SHAPED_FAMILIES: tuple[Family, ...] = (
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
