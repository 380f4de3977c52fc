"""Families that also see or hear, of which the text part is computed: a text family with other names of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from infinilm.config.families.defaults import (
    GEMMA4_UNIFIED_DEFAULTS,
    GLM_DEFAULTS,
    MINISTRAL3_DEFAULTS,
    MISTRAL_DEFAULTS,
    QWEN2_VL_DEFAULTS,
    QWEN3_VL_MOE_DEFAULTS,
    QWEN_DEFAULTS,
    TEXT_DEFAULTS,
)
from infinilm.config.families.dense import DENSE_FAMILIES, MINISTRAL3_ROPE_INERT
from infinilm.config.families.experts import EXPERT_COUNT, EXPERT_FAMILIES
from infinilm.config.families.family import MULTIMODAL_ROPE_INERT, MULTIMODAL_ROPE_TYPES, Family
from infinilm.config.families.latent import LATENT_FAMILIES
from infinilm.config.families.names import (
    GEMMA3,
    GLM4V,
    GLM4V_MOE,
    GLM_OCR,
    IDEFICS3,
    KIMI_K25,
    MISTRAL3,
    PHI4_MULTIMODAL,
    QWEN_VL,
    QWEN_VL_MOE,
)
from infinilm.config.families.norms import NORM_FAMILIES
from infinilm.config.families.shaped import SHAPED_FAMILIES
from infinilm.config.families.state import STATE_FAMILIES
from infinilm.config.sublayers.experts import EXPERT_KEYS, Routing
from infinilm.config.sublayers.layer_shapes import LAYER_KEYS

__all__ = ["MULTIMODAL_FAMILIES"]

_TEXT: Mapping[str, Family] = {
    family.architecture: family
    for families in (
        DENSE_FAMILIES,
        NORM_FAMILIES,
        EXPERT_FAMILIES,
        STATE_FAMILIES,
        LATENT_FAMILIES,
        SHAPED_FAMILIES,
    )
    for family in families
}


def _with_text_of(
    text: str, architecture: str, model_type: str, text_model_types: tuple[str, ...] = (), **columns: Any
) -> Family:
    """Return the row of a model whose text part is that of the architecture `text`."""
    family = _TEXT[text]
    kinds: Mapping[str, Mapping[str, Any]] = {kind: {} for kind in text_model_types or (family.model_type,)}
    return replace(family, architecture=architecture, model_type=model_type, text_model_types=kinds, **columns)


_QWEN2_VL = Family(
    architecture="Qwen2VLForConditionalGeneration",
    model_type="qwen2_vl",
    defaults=QWEN2_VL_DEFAULTS,
    qkv_bias=True,
    out_bias=False,
    windows="layer_types",
    names=QWEN_VL,
    rope_types=MULTIMODAL_ROPE_TYPES,
    rope_inert=MULTIMODAL_ROPE_INERT,
    text_model_types={"qwen2_vl_text": {}},
)

_GLM4V = Family(
    architecture="Glm4vForConditionalGeneration",
    model_type="glm4v",
    other_model_types=("glm4v_text",),  # in GLM-4.6V
    defaults={
        **GLM_DEFAULTS,
        "head_dim": None,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 1.0,
        "bos_token_id": (),
        "eos_token_id": (),
    },
    qkv_bias=True,
    out_bias=False,
    post_norms=True,
    rope_pairs="neighbours",
    names=GLM4V,
    keys=frozenset({"partial_rotary_factor"}),
    rope_types=MULTIMODAL_ROPE_TYPES,
    rope_inert=MULTIMODAL_ROPE_INERT,
    text_model_types={"glm4v_text": {}},
)

MULTIMODAL_FAMILIES: tuple[Family, ...] = (
    # With the text part of a family that is also published alone.
    _with_text_of("LlamaForCausalLM", "Idefics3ForConditionalGeneration", "idefics3", names=IDEFICS3),
    _with_text_of("LlamaForCausalLM", "SmolVLMForConditionalGeneration", "smolvlm", names=IDEFICS3),
    _with_text_of(
        "Phi3ForCausalLM",
        "Phi4MultimodalForCausalLM",
        "phi4_multimodal",
        defaults={
            **_TEXT["Phi3ForCausalLM"].defaults,
            "vocab_size": 200064,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "pad_token_id": 199999,
            "bos_token_id": (199999,),
            "eos_token_id": (199999, 200020),
        },
        # On the hub it has code of its own, and adapters for pictures and speech among its tensors, which it adds to no
        # text: convert_phi4_multimodal_weights_to_hf.py of transformers drops them.
        saved_architecture="Phi4MMForCausalLM",
        other_model_types=("phi4mm",),
        fixed_keys={"full_attn_mod": 1, "interpolate_factor": 1},
        ignored_keys=frozenset({"embd_layer", "img_processor", "audio_processor", "vision_lora", "speech_lora"}),
        names=PHI4_MULTIMODAL,
    ),
    _with_text_of("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "gemma3", names=GEMMA3),
    _with_text_of("Llama4ForCausalLM", "Llama4ForConditionalGeneration", "llama4"),
    _with_text_of("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration", "qwen3_5"),
    _with_text_of("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"),
    _with_text_of(
        "DeepseekV3ForCausalLM",
        "KimiK25ForConditionalGeneration",
        "kimi_k25",
        ("deepseek_v3", "kimi_k2"),
        other_model_types=(),
        saved_architecture="Kimi_K25ForConditionalGeneration",
        names=KIMI_K25,
    ),
    _with_text_of(
        "Glm4MoeForCausalLM",
        "Glm4vMoeForConditionalGeneration",
        "glm4v_moe",
        ("glm4v_moe_text",),
        other_model_types=("glm4v_moe_text",),  # in GLM-4.6V
        defaults={
            **_TEXT["Glm4MoeForCausalLM"].defaults,
            "vocab_size": 151424,
            "max_position_embeddings": 65536,
            "head_dim": None,
            "attention_bias": True,
        },
        names=GLM4V_MOE,
        rope_types=MULTIMODAL_ROPE_TYPES,
        rope_inert=MULTIMODAL_ROPE_INERT,
    ),
    _with_text_of("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration", "gemma3n"),
    _with_text_of("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "gemma4"),
    _with_text_of(  # Gemma 4 without experts and without vectors of each layer
        "Gemma4ForCausalLM",
        "Gemma4UnifiedForConditionalGeneration",
        "gemma4_unified",
        ("gemma4_unified_text",),
        defaults=GEMMA4_UNIFIED_DEFAULTS,
        routing=Routing(),
        norm_topk_prob="norm_topk_prob",
        keys=LAYER_KEYS - {"hidden_size_per_layer_input", "vocab_size_per_layer_input"}
        | {"final_logit_softcapping", "rope_local_base_freq", "per_layer_config"},
        other_keys={},
    ),
    # With a text part of their own.
    _QWEN2_VL,
    replace(
        _QWEN2_VL,
        architecture="Qwen2_5_VLForConditionalGeneration",
        model_type="qwen2_5_vl",
        text_model_types={"qwen2_5_vl_text": {}},
    ),
    Family(
        architecture="Qwen3VLForConditionalGeneration",
        model_type="qwen3_vl",
        defaults={
            **QWEN_DEFAULTS,
            "max_position_embeddings": 128000,
            "rope_theta": 500000.0,
            "sliding_window": None,
            "head_dim": 128,
        },
        qk_norm="head",
        names=QWEN_VL,
        rope_types=MULTIMODAL_ROPE_TYPES,
        rope_inert=MULTIMODAL_ROPE_INERT,
        text_model_types={"qwen3_vl_text": {}},
    ),
    Family(
        architecture="Qwen3VLMoeForConditionalGeneration",
        model_type="qwen3_vl_moe",
        defaults=QWEN3_VL_MOE_DEFAULTS,
        qk_norm="head",
        norm_topk_prob=True,
        names=QWEN_VL_MOE,
        keys=EXPERT_KEYS - {"shared_expert_intermediate_size"},
        other_keys=EXPERT_COUNT,
        rope_types=MULTIMODAL_ROPE_TYPES,
        rope_inert=MULTIMODAL_ROPE_INERT,
        text_model_types={"qwen3_vl_moe_text": {}},
    ),
    _GLM4V,
    replace(
        _GLM4V,
        architecture="GlmOcrForConditionalGeneration",
        model_type="glm_ocr",
        other_model_types=(),
        defaults={
            **_GLM4V.defaults,
            "vocab_size": 59392,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "attention_bias": False,
        },
        qkv_bias=False,
        names=GLM_OCR,
        text_model_types={"glm_ocr_text": {}},
    ),
    Family(
        architecture="Mistral3ForConditionalGeneration",
        model_type="mistral3",
        defaults={
            "vocab_size": 131072,
            "hidden_size": 5120,
            "intermediate_size": 32768,
            "num_hidden_layers": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000000.0,
        },
        qkv_bias=False,
        out_bias=False,
        windows="all",
        names=MISTRAL3,
        keys=frozenset({"llama_4_scaling_beta"}),
        text_model_types={
            "mistral": {**TEXT_DEFAULTS, **MISTRAL_DEFAULTS},
            "ministral3": {**TEXT_DEFAULTS, **MINISTRAL3_DEFAULTS},
        },
        rope_inert=MINISTRAL3_ROPE_INERT,
    ),
)
