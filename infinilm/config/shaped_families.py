"""The families whose layers differ in shape: rows of `family_table`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infinilm.config.experts import Routing
from infinilm.config.family import Family
from infinilm.config.family_defaults import GEMMA4_DEFAULTS, GEMMA4_UNIFIED_DEFAULTS
from infinilm.config.layer_shapes import LAYER_KEYS
from infinilm.config.tensor_names import GEMMA4

__all__ = ["SHAPED_FAMILIES"]

_GEMMA4: Mapping[str, Any] = {
    "defaults": GEMMA4_DEFAULTS,
    "qk_norm": "head",
    "v_norm": True,
    "softmax_scale": 1.0,
    "windows": "last_full",
    "post_norms": True,
    "layer_scalars": True,
    "scaled_embedding": True,
    "routing": Routing(shared_gate=False, beside_mlp=True),
    "norm_topk_prob": True,
    "names": GEMMA4,
    "keys": LAYER_KEYS
    | {"final_logit_softcapping", "rope_local_base_freq", "per_layer_config"}
    | {"enable_moe_block", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"},
    "other_keys": {"top_k_experts": ("num_experts_per_tok",)},
    "fixed_keys": {"use_bidirectional_attention": (None, False, "vision")},  # "vision": of pictures alone
}

# Gemma 4 without experts and without vectors of each layer.
_UNIFIED: Mapping[str, Any] = {
    **{key: value for key, value in _GEMMA4.items() if key not in ("routing", "norm_topk_prob", "other_keys")},
    "defaults": GEMMA4_UNIFIED_DEFAULTS,
    "keys": LAYER_KEYS - {"hidden_size_per_layer_input", "vocab_size_per_layer_input"}
    | {"final_logit_softcapping", "rope_local_base_freq", "per_layer_config"},
}

SHAPED_FAMILIES: tuple[Family, ...] = (
    Family(architecture="Gemma4ForCausalLM", model_type="gemma4_text", **_GEMMA4),
    Family(
        architecture="Gemma4ForConditionalGeneration",
        model_type="gemma4",
        text_model_types={"gemma4_text": {}},
        **_GEMMA4,
    ),
    Family(
        architecture="Gemma4UnifiedForConditionalGeneration",
        model_type="gemma4_unified",
        text_model_types={"gemma4_unified_text": {}},
        **_UNIFIED,
    ),
)
