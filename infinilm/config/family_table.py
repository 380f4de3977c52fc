"""The table of model families: how their configurations and checkpoints differ from Llama's, as data.

`FAMILIES` has one row per Hugging Face architecture. `LlamaConfig` takes its defaults from it, `families.py` reads the
math of a model from it, and `infinilm.checkpoint.sources` the names of its tensors. To add a family, add a row; only
math that no row can say needs a new column here and a branch in the decoder.

Source of the facts: the configuration and modelling files of transformers 5.x; `tests/golden` proves them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from infinilm.config.family import MULTIMODAL_ROPE_INERT, MULTIMODAL_ROPE_TYPES, Family
from infinilm.config.family_defaults import (
    COHERE_DEFAULTS,
    ERNIE_DEFAULTS,
    GEMMA2_DEFAULTS,
    GEMMA3_DEFAULTS,
    GEMMA_DEFAULTS,
    GLM_DEFAULTS,
    MINISTRAL3_DEFAULTS,
    MISTRAL_DEFAULTS,
    QWEN2_VL_DEFAULTS,
    QWEN_DEFAULTS,
    TEXT_DEFAULTS,
)
from infinilm.config.latent_families import LATENT_FAMILIES
from infinilm.config.plain_families import PLAIN_FAMILIES
from infinilm.config.shaped_families import SHAPED_FAMILIES
from infinilm.config.sparse_families import SPARSE_FAMILIES
from infinilm.config.state_families import STATE_FAMILIES
from infinilm.config.tensor_names import (
    GEMMA3,
    GLM,
    GLM4,
    GLM4V,
    GRANITE_HYBRID,
    IDEFICS3,
    MISTRAL3,
    PHI3,
    QWEN_VL,
    STARCODER2,
)
from infinilm.config.unsupported import unsupported

__all__ = ["FAMILIES", "Family", "family_of", "family_of_model_type"]

_ERNIE_BIAS: Mapping[str, tuple[str, ...]] = {"use_bias": ("attention_bias", "mlp_bias")}

_MINISTRAL3_ROPE_INERT = frozenset({"max_position_embeddings"})

_GEMMA_KEYS = frozenset(
    {"query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "rope_local_base_freq"}
)

_GRANITE_KEYS = frozenset({"attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"})

_MAMBA_KEYS = frozenset(
    f"mamba_{name}"
    for name in ("chunk_size", "conv_bias", "d_conv", "d_head", "d_state", "expand", "n_groups", "n_heads", "proj_bias")
)

_COHERE_KEYS = frozenset({"logits_scaling", "logit_scale"})
_COHERE_NAMES: Mapping[str, tuple[str, ...]] = {"layer_norm_eps": ("rms_norm_eps",)}

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.architecture: family
        for family in (
            Family(
                architecture="LlamaForCausalLM",
                model_type="llama",
                mlp_bias="mlp_bias",
            ),
            Family(
                architecture="MistralForCausalLM",
                model_type="mistral",
                defaults=MISTRAL_DEFAULTS,
                qkv_bias=False,
                out_bias=False,
                windows="all",
            ),
            Family(
                architecture="Qwen2ForCausalLM",
                model_type="qwen2",
                defaults={**QWEN_DEFAULTS, "attention_bias": True},
                qkv_bias=True,
                out_bias=False,
                windows="layer_types",
            ),
            Family(
                architecture="Qwen3ForCausalLM",
                model_type="qwen3",
                defaults={**QWEN_DEFAULTS, "head_dim": 128},
                qk_norm="head",
                windows="layer_types",
            ),
            Family(
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
            ),
            Family(
                architecture="Qwen2_5_VLForConditionalGeneration",
                model_type="qwen2_5_vl",
                defaults=QWEN2_VL_DEFAULTS,
                qkv_bias=True,
                out_bias=False,
                windows="layer_types",
                names=QWEN_VL,
                rope_types=MULTIMODAL_ROPE_TYPES,
                rope_inert=MULTIMODAL_ROPE_INERT,
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
                architecture="Glm4vForConditionalGeneration",
                model_type="glm4v",
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
            ),
            Family(
                architecture="Idefics3ForConditionalGeneration",
                model_type="idefics3",
                mlp_bias="mlp_bias",
                names=IDEFICS3,
                text_model_types={"llama": {}},
            ),
            Family(
                architecture="SmolVLMForConditionalGeneration",
                model_type="smolvlm",
                mlp_bias="mlp_bias",
                names=IDEFICS3,
                text_model_types={"llama": {}},
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
                rope_inert=_MINISTRAL3_ROPE_INERT,
            ),
            Family(
                architecture="MinistralForCausalLM",
                model_type="ministral",
                # All layers have the window where layer_types says nothing.
                defaults={**MISTRAL_DEFAULTS, "use_sliding_window": True, "max_window_layers": 0},
                qkv_bias=False,
                out_bias=False,
                windows="layer_types",
            ),
            Family(
                architecture="Ministral3ForCausalLM",
                model_type="ministral3",
                defaults=MINISTRAL3_DEFAULTS,
                qkv_bias=False,
                out_bias=False,
                windows="all",
                keys=frozenset({"llama_4_scaling_beta"}),
                rope_inert=_MINISTRAL3_ROPE_INERT,
            ),
            Family(
                architecture="Phi3ForCausalLM",
                model_type="phi3",
                defaults={
                    "vocab_size": 32064,
                    "hidden_size": 3072,
                    "intermediate_size": 8192,
                    "max_position_embeddings": 4096,
                    "rms_norm_eps": 1e-5,
                    "eos_token_id": (32000,),
                },
                qkv_bias=False,
                out_bias=False,
                windows="all",
                names=PHI3,
                keys=frozenset({"partial_rotary_factor"}),
                rope_types={"su": "longrope", "yarn": "longrope"},
            ),
            Family(
                architecture="GlmForCausalLM",
                model_type="glm",
                defaults=GLM_DEFAULTS,
                out_bias=False,
                rope_pairs="neighbours",
                names=GLM,
                keys=frozenset({"partial_rotary_factor"}),
            ),
            Family(
                architecture="Glm4ForCausalLM",
                model_type="glm4",
                defaults=GLM_DEFAULTS,
                out_bias=False,
                post_norms=True,
                rope_pairs="neighbours",
                names=GLM4,
                keys=frozenset({"partial_rotary_factor"}),
            ),
            Family(
                architecture="GemmaForCausalLM",
                model_type="gemma",
                defaults={
                    **GEMMA_DEFAULTS,
                    "hidden_size": 3072,
                    "intermediate_size": 24576,
                    "num_hidden_layers": 28,
                    "num_attention_heads": 16,
                    "num_key_value_heads": 16,
                },
                norm_offset=1,
                scaled_embedding=True,
            ),
            Family(
                architecture="Gemma2ForCausalLM",
                model_type="gemma2",
                defaults=GEMMA2_DEFAULTS,
                windows="layer_types",
                post_norms=True,
                norm_offset=1,
                scaled_embedding=True,
                keys=_GEMMA_KEYS,
            ),
            Family(
                architecture="Gemma3ForCausalLM",
                model_type="gemma3_text",
                defaults=GEMMA3_DEFAULTS,
                qk_norm="head",
                windows="layer_types",
                post_norms=True,
                norm_offset=1,
                scaled_embedding=True,
                keys=_GEMMA_KEYS,
            ),
            Family(
                architecture="Gemma3ForConditionalGeneration",
                model_type="gemma3",
                defaults=GEMMA3_DEFAULTS,
                qk_norm="head",
                windows="layer_types",
                post_norms=True,
                norm_offset=1,
                scaled_embedding=True,
                names=GEMMA3,
                keys=_GEMMA_KEYS,
                text_model_types={"gemma3_text": {}},
            ),
            Family(
                architecture="GraniteForCausalLM",
                model_type="granite",
                defaults={"attention_multiplier": 1.0},
                mlp_bias="mlp_bias",
                keys=_GRANITE_KEYS,
            ),
            Family(
                architecture="SmolLM3ForCausalLM",
                model_type="smollm3",
                defaults={
                    "vocab_size": 128256,
                    "hidden_size": 2048,
                    "num_hidden_layers": 36,
                    "num_attention_heads": 16,
                    "num_key_value_heads": 4,
                    "max_position_embeddings": 32768,
                    "rope_theta": 2000000.0,
                    "use_sliding_window": False,
                    "no_rope_layer_interval": 4,
                    "tie_word_embeddings": True,
                    "bos_token_id": (128000,),
                    "eos_token_id": (128001,),
                },
                mlp_bias="mlp_bias",
                windows="layer_types",
                keys=frozenset({"no_rope_layers", "no_rope_layer_interval"}),
            ),
            Family(
                architecture="Olmo2ForCausalLM",
                model_type="olmo2",
                defaults={
                    "vocab_size": 50304,
                    "rms_norm_eps": 1e-5,
                    "bos_token_id": (),
                    "eos_token_id": (50279,),
                },
                qk_norm="all",
                pre_norms=False,
                post_norms=True,
            ),
            Family(
                architecture="Starcoder2ForCausalLM",
                model_type="starcoder2",
                defaults={
                    "vocab_size": 49152,
                    "hidden_size": 3072,
                    "intermediate_size": 12288,
                    "num_hidden_layers": 30,
                    "num_attention_heads": 24,
                    "num_key_value_heads": 2,
                    "hidden_act": "gelu_pytorch_tanh",
                    "max_position_embeddings": 4096,
                    "rms_norm_eps": 1e-5,
                    "attention_bias": True,
                    "mlp_bias": True,
                    "tie_word_embeddings": True,
                    "bos_token_id": (50256,),
                    "eos_token_id": (50256,),
                },
                mlp_bias="mlp_bias",
                windows="all",
                norm="layer_bias",
                fixed_keys={"norm_type": "layer_norm", "mlp_type": "default"},
                gated_mlp=False,
                names=STARCODER2,
                other_keys={"use_bias": ("attention_bias", "mlp_bias"), "norm_epsilon": ("rms_norm_eps",)},
            ),
            Family(
                architecture="CohereForCausalLM",
                model_type="cohere",
                defaults={**COHERE_DEFAULTS, "rope_theta": 500000.0},
                norm="layer",
                parallel_blocks=True,
                rope_pairs="neighbours",
                keys=_COHERE_KEYS,
                other_keys=_COHERE_NAMES,
            ),
            Family(
                architecture="Cohere2ForCausalLM",
                model_type="cohere2",
                defaults={
                    **COHERE_DEFAULTS,
                    "sliding_window": 4096,
                    "use_sliding_window": True,
                    "sliding_window_pattern": 4,
                },
                windows="layer_types",
                norm="layer",
                parallel_blocks=True,
                rope_pairs="neighbours",
                rope_needs_window=True,
                keys=_COHERE_KEYS,
                other_keys=_COHERE_NAMES,
                fixed_keys={
                    "use_parallel_block": True,
                    "use_gated_activation": True,
                    "use_embedding_sharing": True,
                    "position_embedding_type": "rope_gptj",
                    "rotary_pct": 1.0,
                },
            ),
            Family(
                architecture="Olmo3ForCausalLM",
                model_type="olmo3",
                defaults={
                    "vocab_size": 50304,
                    "rms_norm_eps": 1e-5,
                    "rope_theta": 500000.0,
                    "rope_local_base_freq": 500000.0,  # whatever scales the RoPE of other layers
                    "sliding_window": 4096,
                    "use_sliding_window": True,
                    "sliding_window_pattern": 4,
                    "bos_token_id": (),
                    "eos_token_id": (50279,),
                },
                qk_norm="all",
                windows="layer_types",
                pre_norms=False,
                post_norms=True,
                keys=frozenset({"rope_local_base_freq"}),
            ),
            Family(
                architecture="Ernie4_5ForCausalLM",
                model_type="ernie4_5",
                defaults={
                    **ERNIE_DEFAULTS,
                    "hidden_size": 1024,
                    "intermediate_size": 3072,
                    "num_hidden_layers": 18,
                    "num_attention_heads": 16,
                    "num_key_value_heads": 2,
                    "head_dim": 128,
                },
                mlp_bias="mlp_bias",
                rope_pairs="neighbours",
                other_keys=_ERNIE_BIAS,
            ),
            Family(
                architecture="GraniteMoeHybridForCausalLM",
                model_type="granitemoehybrid",
                defaults={"attention_multiplier": 1.0, "intermediate_size": 1024},
                names=GRANITE_HYBRID,
                keys=_GRANITE_KEYS | {"num_experts_per_tok"},
                other_keys={"shared_intermediate_size": ("intermediate_size",), "layers_block_type": ("layer_types",)},
                fixed_keys={"position_embedding_type": "rope", "normalization_function": "rmsnorm"},
                ignored_keys=_MAMBA_KEYS,  # of layers that no model here has
            ),
            *PLAIN_FAMILIES,
            *SPARSE_FAMILIES,
            *STATE_FAMILIES,
            *LATENT_FAMILIES,
            *SHAPED_FAMILIES,
        )
    }
)
"""The supported families by the name in `architectures` of config.json."""


def family_of(architecture: str) -> Family:
    """Return the row of `architecture`. Raises ConfigError naming it, and why it is not supported."""
    try:
        return FAMILIES[architecture]
    except (KeyError, TypeError):
        raise unsupported("architecture", architecture, FAMILIES) from None


def family_of_model_type(model_type: str) -> Family:
    """Return the row of `model_type`. Raises ConfigError naming it, and why it is not supported."""
    for family in FAMILIES.values():
        if model_type == family.model_type or model_type in family.other_model_types:
            return family
    raise unsupported("model_type", model_type, (family.model_type for family in FAMILIES.values()))
