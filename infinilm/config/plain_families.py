"""Dense families of the last years that are Llama's but for a few columns: rows of the table in `family_table`."""

from __future__ import annotations

from collections.abc import Mapping

from infinilm.config.family import Family

__all__ = ["PLAIN_FAMILIES"]

_LAYER_NORM_EPS: Mapping[str, tuple[str, ...]] = {"layer_norm_eps": ("rms_norm_eps",)}

PLAIN_FAMILIES: tuple[Family, ...] = (
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
        architecture="InternLM3ForCausalLM",
        model_type="internlm3",
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
        architecture="IQuestCoderForCausalLM",
        model_type="iquestcoder",
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
)
