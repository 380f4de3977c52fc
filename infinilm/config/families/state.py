"""The families whose layers keep a state of each sequence, the gated delta rule: rows of the table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infinilm.config.families.defaults import QWEN3_5_DEFAULTS, QWEN3_5_MOE_DEFAULTS, QWEN3_NEXT_DEFAULTS
from infinilm.config.families.experts import EXPERT_COUNT
from infinilm.config.families.family import MULTIMODAL_ROPE_INERT, MULTIMODAL_ROPE_TYPES, Family
from infinilm.config.families.names import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from infinilm.config.sublayers.delta import DELTA_KEYS
from infinilm.config.sublayers.experts import EXPERT_KEYS

__all__ = ["STATE_FAMILIES"]

_KEYS = DELTA_KEYS | {"partial_rotary_factor"}

# Columns that they share.
_GATED_DELTA: Mapping[str, Any] = {
    "qkv_bias": False,
    "out_bias": False,
    "qk_norm": "head",
    "output_gate": True,
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
)
