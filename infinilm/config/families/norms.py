"""Dense families that norm otherwise: LayerNorm, norms of what a sublayer adds, or one norm for two sublayers."""

from __future__ import annotations

from collections.abc import Mapping

from infinilm.config.families.defaults import (
    COHERE_DEFAULTS,
    GEMMA2_DEFAULTS,
    GEMMA3_DEFAULTS,
    GEMMA_DEFAULTS,
    GLM_DEFAULTS,
)
from infinilm.config.families.dense import GRANITE_KEYS
from infinilm.config.families.family import Family
from infinilm.config.families.names import GLM4, HYPERCLOVAX, STARCODER2, VAULT_GEMMA

__all__ = ["NORM_FAMILIES"]

_GEMMA_KEYS = frozenset(
    {"query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "rope_local_base_freq"}
)

_COHERE_KEYS = frozenset({"logits_scaling", "logit_scale"})
_LAYER_NORM_EPS: Mapping[str, tuple[str, ...]] = {"layer_norm_eps": ("rms_norm_eps",)}

NORM_FAMILIES: tuple[Family, ...] = (
    # RMSNorm, its weights counted from 1; from Gemma 2 on, but not in VaultGemma, also behind sublayers.
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
        architecture="VaultGemmaForCausalLM",
        model_type="vaultgemma",
        defaults=GEMMA2_DEFAULTS,
        windows="layer_types",
        norm_offset=1,
        scaled_embedding=True,
        names=VAULT_GEMMA,
        keys=_GEMMA_KEYS,
    ),
    Family(
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        defaults=GEMMA3_DEFAULTS,
        qk_norm="head",
        windows="layer_types",
        post_norms=True,
        two_way="use_bidirectional_attention",  # in EmbeddingGemma
        norm_offset=1,
        scaled_embedding=True,
        keys=_GEMMA_KEYS | {"use_bidirectional_attention"},
    ),
    # RMSNorm before and behind sublayers, or behind them alone.
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
        architecture="HyperCLOVAXForCausalLM",
        model_type="hyperclovax",
        mlp_bias="mlp_bias",
        post_norms=True,
        names=HYPERCLOVAX,
        keys=GRANITE_KEYS | {"logit_scale"},
        other_keys={"logits_scaling": ("logit_scale",)},  # which multiplies here
        fixed_keys={"use_post_norm": True},
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
        architecture="Exaone4ForCausalLM",
        model_type="exaone4",
        defaults={
            "vocab_size": 102400,
            "intermediate_size": 16384,
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "use_sliding_window": True,
            "sliding_window_pattern": 4,
            "bos_token_id": (0,),
        },
        qkv_bias=False,
        out_bias=False,
        qk_norm="head",
        windows="layer_types",
        pre_norms=False,
        post_norms=True,
        rope_needs_window="where set",
    ),
    # LayerNorm.
    Family(
        architecture="StableLmForCausalLM",
        model_type="stablelm",
        defaults={
            "vocab_size": 50304,
            "hidden_size": 2560,
            "intermediate_size": 6912,
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25,
            "bos_token_id": (0,),
            "eos_token_id": (0,),
        },
        out_bias=False,
        norm="layer_bias",
        keys=frozenset({"partial_rotary_factor"}),
        other_keys={**_LAYER_NORM_EPS, "use_qkv_bias": ("attention_bias",)},
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
        architecture="NemotronForCausalLM",
        model_type="nemotron",
        defaults={
            "vocab_size": 256000,
            "hidden_size": 6144,
            "intermediate_size": 24576,
            "num_attention_heads": 48,
            "hidden_act": "relu2",
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "bos_token_id": (2,),
            "eos_token_id": (3,),
        },
        mlp_bias="mlp_bias",
        norm="layer_bias",
        norm_offset=1,
        gated_mlp=False,
        keys=frozenset({"partial_rotary_factor"}),
        other_keys={"norm_eps": ("rms_norm_eps",)},
    ),
    Family(
        architecture="Jais2ForCausalLM",
        model_type="jais2",
        defaults={
            "vocab_size": 150272,
            "hidden_size": 3328,
            "intermediate_size": 26624,
            "num_attention_heads": 26,
            "hidden_act": "relu2",
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
            "mlp_bias": True,
            "bos_token_id": (0,),
            "eos_token_id": (150024,),
        },
        mlp_bias="mlp_bias",
        norm="layer_bias",
        gated_mlp=False,
        other_keys=_LAYER_NORM_EPS,
    ),
    # LayerNorm without bias, one for attention and MLP.
    Family(
        architecture="CohereForCausalLM",
        model_type="cohere",
        defaults={**COHERE_DEFAULTS, "rope_theta": 500000.0},
        norm="layer",
        parallel_blocks=True,
        rope_pairs="neighbours",
        keys=_COHERE_KEYS,
        other_keys=_LAYER_NORM_EPS,
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
        other_keys=_LAYER_NORM_EPS,
        fixed_keys={
            "use_parallel_block": True,
            "use_gated_activation": True,
            "use_embedding_sharing": True,
            "position_embedding_type": "rope_gptj",
            "rotary_pct": 1.0,
        },
    ),
)
