"""Dense families of the last years that are Llama's but for a few columns: rows of the table in `family_table`."""

from __future__ import annotations

from collections.abc import Mapping

from infinilm.config.family import Family
from infinilm.config.family_defaults import QWEN_DEFAULTS
from infinilm.config.tensor_names import BAICHUAN, BAICHUAN2, EXAONE, HUNYUAN, INTERNLM2, MIMO

__all__ = ["HUNYUAN_IGNORED", "HUNYUAN_ROPE_TYPES", "HUNYUAN_SWITCHES", "PLAIN_FAMILIES"]

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
    Family(
        architecture="InternLM2ForCausalLM",
        model_type="internlm2",
        defaults={"vocab_size": 103168},
        out_bias="attention_bias",
        names=INTERNLM2,
        other_keys={"bias": ("attention_bias",)},
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
    Family(  # EXAONE 3 and 3.5
        architecture="ExaoneForCausalLM",
        model_type="exaone",
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
        architecture="MiniCPMForCausalLM",
        model_type="minicpm",
        defaults={"tie_word_embeddings": True},
        keys=frozenset(
            {
                *("embedding_multiplier", "residual_multiplier", "logits_scaling"),
                *("scale_emb", "scale_depth", "dim_model_base"),
            }
        ),
        fixed_keys={"sparse_config": None},
        ignored_keys=frozenset({"mup_denominator"}),
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
)
