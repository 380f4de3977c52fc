"""Dense families whose layers are Llama's but for sizes, biases, windows, multipliers and RoPE.

Families that norm otherwise are in `norms`.
"""

from __future__ import annotations

from collections.abc import Mapping

from infinilm.config.families.defaults import (
    ERNIE_DEFAULTS,
    GLM_DEFAULTS,
    MINISTRAL3_DEFAULTS,
    MISTRAL_DEFAULTS,
    QWEN_DEFAULTS,
)
from infinilm.config.families.family import Family
from infinilm.config.families.names import (
    APERTUS,
    BAICHUAN,
    BAICHUAN2,
    EXAONE,
    GLM,
    HUNYUAN,
    INTERNLM2,
    MIMO,
    PHI3,
)

__all__ = [
    "DENSE_FAMILIES",
    "GRANITE_KEYS",
    "HUNYUAN_IGNORED",
    "HUNYUAN_ROPE_TYPES",
    "HUNYUAN_SWITCHES",
    "MINICPM_KEYS",
    "MINISTRAL3_ROPE_INERT",
]

_ERNIE_BIAS: Mapping[str, tuple[str, ...]] = {"use_bias": ("attention_bias", "mlp_bias")}

MINISTRAL3_ROPE_INERT = frozenset({"max_position_embeddings"})

GRANITE_KEYS = frozenset({"attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"})

MINICPM_KEYS = frozenset(
    {
        *("embedding_multiplier", "residual_multiplier", "logits_scaling"),
        *("scale_emb", "scale_depth", "dim_model_base"),
    }
)

HUNYUAN_ROPE_TYPES: Mapping[str, str] = {"dynamic": "ntk_alpha"}
# Attention of other kinds, which published checkpoints do not have.
HUNYUAN_SWITCHES: Mapping[str, object] = {
    "use_mla": (False, None),
    "use_cla": (False, None),
    "position_embedding_xdrope": (False, None),
}
HUNYUAN_IGNORED = frozenset(
    {
        *("kv_lora_rank", "q_lora_rank", "moe_intermediate_size", "n_group", "topk_group", "routed_scaling_factor"),
        *("attention_head_dim", "num_shared_expert", "use_mixed_mlp_moe"),
    }
)

DENSE_FAMILIES: tuple[Family, ...] = (
    # With Llama's layer.
    Family(
        architecture="LlamaForCausalLM",
        model_type="llama",
        mlp_bias="mlp_bias",
    ),
    Family(
        architecture="IQuestCoderForCausalLM",
        model_type="iquestcoder",
        saved_architecture="LlamaForCausalLM",
        defaults={
            "vocab_size": 76800,
            "hidden_size": 5120,
            "intermediate_size": 27648,
            "num_hidden_layers": 80,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
        },
        mlp_bias="mlp_bias",
    ),
    Family(
        architecture="InternLM3ForCausalLM",
        model_type="internlm3",
        saved_architecture="LlamaForCausalLM",
        defaults={
            "vocab_size": 128512,
            "intermediate_size": 10240,
            "num_hidden_layers": 48,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
        },
        mlp_bias="mlp_bias",
        other_keys={"qkv_bias": ("attention_bias",), "bias": ("mlp_bias",)},
    ),
    Family(
        architecture="CwmForCausalLM",
        model_type="cwm",
        defaults={
            "vocab_size": 128256,
            "hidden_size": 6144,
            "intermediate_size": 21504,
            "num_hidden_layers": 64,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 16.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
            },
            "sliding_window": 8192,
            "use_sliding_window": True,
            "sliding_window_pattern": 4,
            "bos_token_id": (128000,),
            "eos_token_id": (128001, 128008, 128009),
        },
        qkv_bias=False,
        out_bias=False,
        mlp_bias="mlp_bias",
        windows="first_full",
    ),
    Family(
        architecture="SeedOssForCausalLM",
        model_type="seed_oss",
        defaults={
            "vocab_size": 155136,
            "intermediate_size": 27648,
            "num_hidden_layers": 64,
            "num_attention_heads": 80,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 524288,
            "attention_bias": True,
            "bos_token_id": (0,),
        },
        out_bias=False,
        mlp_bias="mlp_bias",
        fixed_keys={"attention_out_bias": False},
    ),
    Family(
        architecture="HeliumForCausalLM",
        model_type="helium",
        defaults={
            "vocab_size": 48000,
            "hidden_size": 2560,
            "intermediate_size": 7040,
            "num_hidden_layers": 24,
            "num_attention_heads": 20,
            "num_key_value_heads": 20,
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-8,
            "rope_theta": 100000.0,
        },
        qkv_bias=False,
        out_bias=False,
        rope_pairs="neighbours",
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
        architecture="ArceeForCausalLM",
        model_type="arcee",
        defaults={
            "hidden_size": 2560,
            "intermediate_size": 18432,
            "hidden_act": "relu2",
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "bos_token_id": (128000,),
            "eos_token_id": (128001,),
        },
        mlp_bias="mlp_bias",
        gated_mlp=False,
    ),
    # With tensors of other names, or joined.
    Family(
        architecture="ApertusForCausalLM",
        model_type="apertus",
        defaults={
            "vocab_size": 131072,
            "intermediate_size": 14336,
            "hidden_act": "xielu",
            "max_position_embeddings": 65536,
            "rms_norm_eps": 1e-5,
            "rope_theta": 12000000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
            "pad_token_id": 3,
        },
        qk_norm="head",
        gated_mlp=False,
        names=APERTUS,
        fixed_keys={"mlp_bias": False, "qk_norm": True, "post_norm": (False, None)},
    ),
    Family(  # Baichuan 7B, the first
        architecture="BaiChuanForCausalLM",
        model_type="baichuan",
        defaults={"vocab_size": 64000, "max_position_embeddings": 4096},
        qkv_bias=False,
        out_bias=False,
        names=BAICHUAN,
    ),
    Family(  # Baichuan 2 7B; of both 13B, positions come from ALiBi, see `spellings`
        architecture="BaichuanForCausalLM",
        model_type="baichuan",
        defaults={"vocab_size": 125696, "max_position_embeddings": 4096},
        qkv_bias=False,
        out_bias=False,
        names=BAICHUAN2,
        keys=frozenset({"model_max_length"}),
        ignored_keys=frozenset({"z_loss_weight"}),
    ),
    Family(
        architecture="InternLM2ForCausalLM",
        model_type="internlm2",
        defaults={"vocab_size": 103168},
        out_bias="attention_bias",
        names=INTERNLM2,
        other_keys={"bias": ("attention_bias",)},
    ),
    Family(  # EXAONE 3 and 3.5
        architecture="ExaoneForCausalLM",
        model_type="exaone",
        saved_architecture="LlamaForCausalLM",
        defaults={
            "vocab_size": 102400,
            "intermediate_size": 16384,
            "rms_norm_eps": 1e-5,
            "bos_token_id": (0,),
        },
        qkv_bias=False,
        out_bias=False,
        names=EXAONE,
        other_keys={"layer_norm_epsilon": ("rms_norm_eps",), "activation_function": ("hidden_act",)},
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
    # With windows, or layers without RoPE.
    Family(
        architecture="MistralForCausalLM",
        model_type="mistral",
        defaults=MISTRAL_DEFAULTS,
        qkv_bias=False,
        out_bias=False,
        windows="all",
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
        rope_inert=MINISTRAL3_ROPE_INERT,
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
        architecture="MiMoForCausalLM",
        model_type="mimo",
        defaults={**QWEN_DEFAULTS, "attention_bias": True},
        qkv_bias=True,
        out_bias=False,
        windows="layer_types",
        names=MIMO,
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
    # With norms of q and k.
    Family(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        defaults={**QWEN_DEFAULTS, "head_dim": 128},
        qk_norm="head",
        windows="layer_types",
    ),
    Family(
        architecture="HunYuanDenseV1ForCausalLM",
        model_type="hunyuan_v1_dense",
        defaults={"vocab_size": 290943, "rms_norm_eps": 1e-5, "use_qk_norm": True},
        qk_norm="head_behind_rope",
        names=HUNYUAN,
        keys=frozenset({"use_qk_norm"}),
        rope_types=HUNYUAN_ROPE_TYPES,
        fixed_keys={**HUNYUAN_SWITCHES, "num_experts": (1, 0, None)},
        ignored_keys=HUNYUAN_IGNORED | {"norm_topk_prob", "num_experts_per_tok", "moe_topk"},
    ),
    # With multipliers.
    Family(
        architecture="GraniteForCausalLM",
        model_type="granite",
        defaults={"attention_multiplier": 1.0},
        mlp_bias="mlp_bias",
        keys=GRANITE_KEYS,
    ),
    Family(
        architecture="GraniteSWAForCausalLM",
        model_type="granite_swa",
        defaults={
            "vocab_size": 100352,
            "hidden_size": 2560,
            "intermediate_size": 8192,
            "num_hidden_layers": 24,
            "num_attention_heads": 20,
            "num_key_value_heads": 4,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "bos_token_id": (100257,),
            "eos_token_id": (100257,),
            "tie_word_embeddings": True,
            "attention_multiplier": 1.0,
            "sliding_window": 128,
            "use_sliding_window": True,
        },
        mlp_bias="mlp_bias",
        windows="layer_types",
        attention={"sinks": True},
        keys=GRANITE_KEYS | {"no_rope_layers", "rope_local_base_freq", "layer_rope_theta"},
    ),
    Family(
        architecture="MiniCPMForCausalLM",
        model_type="minicpm",
        defaults={"tie_word_embeddings": True},
        keys=MINICPM_KEYS,
        fixed_keys={"sparse_config": None},
        ignored_keys=frozenset({"mup_denominator"}),
    ),
)
