"""Checkpoints of all families as GGUF files, as llama.cpp's converter writes them: facts of its `conversion` folder.

Names of tensors are those of the gguf package, which the converter takes them from.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf_files.conversion import Types, interleave, plain, rope_metadata
from gguf_files.mixing import (
    kimi_tensor,
    latent_metadata,
    latent_tensors,
    later_layer,
    ling_tensors,
    mamba_tensors,
    name_in_later_layer,
    state_tensors,
)
from gguf_files.writer import As, File, quantise
from infinilm._core import MambaSpec
from infinilm.checkpoint import Checkpoint
from infinilm.config import LlamaConfig
from infinilm.config.spec import decoder_spec

Array = npt.NDArray[Any]


@dataclass
class Rules:
    """How an architecture is written.

    Attributes
    ----------
    arch : str
    permuted : bool
        Rows of q and k: halves of heads take turns.
    norm_offset : float
    keys : dict
        Metadata, from keys of config.json; a value that is no string is written as it is.
    known : dict
        What llama.cpp takes as known, with the number of layers of a real model: changes of config.json.
    split : bool
        Joined projections of latent attention and of the gated delta rule are written in parts; older files are not.
    """

    arch: str
    permuted: bool = False
    norm_offset: float = 0.0
    keys: dict[str, Any] = field(default_factory=dict)
    known: dict[str, Any] = field(default_factory=dict)
    split: bool = True


_WINDOW = {"attention.sliding_window": "sliding_window"}
_EXPERTS = {"expert_feed_forward_length": "moe_intermediate_size"}
_SHARED = {**_EXPERTS, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
_SCALES = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_PHI3 = {**_WINDOW, "rope.scaling.original_context_length": "original_max_position_embeddings"}
_GEMMA4 = {
    "attention.sliding_window": "sliding_window",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    **dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), 24),
    **dict.fromkeys(("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"), 16),
}
_DEEPSEEK = {
    **_EXPERTS,
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
}
_INDEXED = {
    **_DEEPSEEK,
    "expert_gating_func": 2,
    "attention.indexer.head_count": "index_n_heads",
    "attention.indexer.key_length": "index_head_dim",
    "attention.indexer.top_k": "index_topk",
}
_BLOCKS = {
    "attention.indexer.head_count": 2,
    "attention.indexer.key_length": 16,
    "attention.indexer.top_k": 3,
    "attention.indexer.block_size": 4,
    "attention.indexer.local_blocks": 1,
}
_STATES = {
    **{"attention.key_length": "head_dim", "attention.value_length": "head_dim"},
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
_LLAMA4 = {
    "feed_forward_length": "intermediate_size_mlp",
    "expert_feed_forward_length": "intermediate_size",
    "interleave_moe_layer_step": "interleave_moe_layer_step",
}
_MAMBA = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
}
_NEMOTRON = {**_MAMBA, "attention.key_length": "head_dim", "attention.value_length": "head_dim"}
_LFM2 = {"shortconv.l_cache": "conv_L_cache"}
_CAPS = {k: k for k in ("attn_logit_softcapping", "final_logit_softcapping")}

_QWEN35 = Rules(
    "qwen35",
    norm_offset=1,
    keys={**_STATES, "attention.recurrent_layers": As("bool", [True, True, True, False, False])}
    | {"nextn_predict_layers": 1},
)

_COHERE2_MOE = Rules(
    "cohere2moe",
    keys={**_EXPERTS, **_WINDOW, "logit_scale": "logit_scale", "rope.scaling.type": b"none"}
    | {"leading_dense_block_count": 1, "expert_weights_norm": True, "expert_shared_count": 2}
    | {"expert_shared_feed_forward_length": 80, "rope.dimension_count": 16, "expert_gating_func": 1}
    | {"attention.sliding_window_pattern": As("bool", [False, True, True, False])},
)

_LAGUNA = Rules(
    "laguna",
    keys={**_EXPERTS, **_WINDOW, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
    | {"expert_weights_norm": True, "expert_weights_scale": "moe_routed_scaling_factor", "expert_gating_func": 2}
    | {"leading_dense_block_count": 1, "attention.head_count": As("int32", [4, 6, 6])}
    | {"rope.dimension_count": 8, "rope.dimension_count_swa": 16, "rope.freq_base_swa": 10000.0},
)

_NO_MULTIPLIERS = {
    **dict.fromkeys(("embedding_multiplier", "lm_head_multiplier", "key_multiplier", "ssm_in_multiplier"), 1.0),
    **dict.fromkeys(("attention_in_multiplier", "attention_out_multiplier", "ssm_out_multiplier"), 1.0),
    **dict.fromkeys(("mlp_multipliers", "ssm_multipliers")),
}

FAMILIES = {
    "gemma": Rules("gemma", norm_offset=1),
    "gemma2": Rules("gemma2", norm_offset=1, keys={**_WINDOW, **_CAPS}, known={"query_pre_attn_scalar": 16}),
    "gemma3-text": Rules(
        "gemma3",
        norm_offset=1,
        keys={**_WINDOW, "attention.sliding_window_pattern": As("bool", [True, False, True])},
    ),
    "gemma3": Rules(
        "gemma3",
        norm_offset=1,
        keys={**_WINDOW, "attention.sliding_window_pattern": 3},
        known={"query_pre_attn_scalar": 16},
    ),
    "gemma3n-text": Rules(
        "gemma3n",
        keys={
            **_WINDOW,
            "final_logit_softcapping": "final_logit_softcapping",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "attention.sliding_window_pattern": As("bool", [True, True, False, True, False, True, False]),
            "altup.num_inputs": "altup_num_inputs",
            "altup.active_idx": 0,
            "activation_sparsity_scale": As("float32", [1.6448536, 0.0, 0.6744898, -0.5244005, *[-math.inf] * 3]),
            "feed_forward_length": As("int32", [56] * 7),
        },
    ),
    "gemma4-text": Rules(
        "gemma4",
        keys={
            **_GEMMA4,
            "attention.sliding_window_pattern": As("bool", [True, True, False, True, False]),
            "attention.shared_kv_layers": 2,
            "feed_forward_length": As("int32", [44, 44, 44, 88, 88]),
        },
    ),
    "gemma4": Rules(
        "gemma4",
        keys={
            **_GEMMA4,
            "attention.sliding_window_pattern": As("bool", [True, False, True, False]),
            "attention.head_count_kv": As("int32", [2, 1, 2, 1]),
        },
    ),
    "gemma4-moe": Rules(
        "gemma4",
        keys={
            **_GEMMA4,
            **_EXPERTS,
            "attention.sliding_window_pattern": As("bool", [True, False, False]),
            "attention.head_count_kv": As("int32", [2, 1, 1]),
        },
    ),
    "glm": Rules("chatglm"),
    "glm4": Rules("glm4"),
    "glm4v": Rules("glm4"),
    "gpt-oss": Rules("gpt-oss", keys={**_WINDOW, "expert_feed_forward_length": "intermediate_size"}),
    "granite4": Rules("granite", permuted=True, keys=_SCALES),
    "cohere": Rules("command-r", keys={"logit_scale": "logit_scale", "rope.scaling.type": b"none"}),
    "command-r-plus": Rules("command-r", keys={"logit_scale": "logit_scale", "rope.scaling.type": b"none"}),
    "cohere2": Rules("cohere2", keys={**_WINDOW, "logit_scale": "logit_scale", "attention.sliding_window_pattern": 3}),
    "olmo": Rules(
        "olmo", permuted=True, keys={"attention.layer_norm_epsilon": 1e-5, "attention.clamp_kqv": "clip_qkv"}
    ),
    "olmo3": Rules("olmo2", keys={**_WINDOW, "attention.sliding_window_pattern": As("bool", [True, False, True])}),
    "granite-moe": Rules("granitemoe", permuted=True, keys=_SCALES),
    "granite-moe-shared": Rules(
        "granitemoe",
        permuted=True,
        keys={**_SCALES, "expert_shared_feed_forward_length": "shared_intermediate_size"},
    ),
    "olmoe": Rules("olmoe", known={"eos_token_id": 2}),
    "seed-oss": Rules("seed_oss"),
    "arcee": Rules("arcee", permuted=True, known={"bos_token_id": 1, "eos_token_id": 2}),
    "nemotron": Rules("nemotron", norm_offset=1),
    "stablelm": Rules("stablelm"),
    "exaone4": Rules(
        "exaone4",
        keys={**_WINDOW, "attention.sliding_window_pattern": As("bool", [True, True, True, False])},
        known={"rope_scaling": None},
    ),
    "exaone4-full": Rules("exaone4"),
    "hunyuan": Rules("hunyuan-dense", known={"rope_scaling": None}),
    "hunyuan-moe": Rules(
        "hunyuan-moe",
        keys={
            **{f"expert_{part}feed_forward_length": "intermediate_size" for part in ("", "shared_")},
            "expert_shared_count": 1,
        },
        known={"rope_scaling": None},
    ),
    "internlm2": Rules("internlm2", permuted=True),
    "internlm3": Rules("llama", permuted=True, known={"rope_scaling": None}),
    "iquestcoder": Rules("llama", permuted=True),
    "mimo": Rules("qwen2"),
    "exaone": Rules("exaone"),
    "jais2": Rules("jais2", known={"bos_token_id": 1, "eos_token_id": 2}),
    "minicpm": Rules("minicpm", permuted=True, keys=_SCALES),
    "llama4": Rules(
        "llama4",
        keys=_LLAMA4,
        known={"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1},
    ),
    "llama4-text": Rules(
        "llama4",
        keys=_LLAMA4,
        known={"attention_chunk_size": 8192, "attn_temperature_tuning": True, "no_rope_layer_interval": 4}
        | {"use_qk_norm": True},
    ),
    "ernie4-5": Rules("ernie4_5"),
    "ernie4-5-moe": Rules(
        "ernie4_5-moe",
        keys={
            **_EXPERTS,
            "expert_shared_count": "n_shared_experts",
            "expert_shared_feed_forward_length": 20,
            "leading_dense_block_count": 1,
            "interleave_moe_layer_step": 1,
        },
    ),
    "kimi-linear": Rules(
        "kimi-linear",
        keys={**_EXPERTS, "expert_shared_count": "num_shared_experts", "expert_weights_scale": "routed_scaling_factor"}
        | {"leading_dense_block_count": "first_k_dense_replace", "expert_gating_func": 2}
        | {"expert_group_used_count": "topk_group"},
    ),
    "ling3": Rules(
        "bailingmoe3",
        keys={**_DEEPSEEK, "expert_shared_count": "num_shared_experts", "expert_shared_feed_forward_length": 16}
        | {"expert_gating_func": 2, "ssm.conv_kernel": "short_conv_kernel_size", "kda.head_dim": "head_dim"}
        | {"kda.safe_gate": True, "kda.gate_lower_bound": "kda_lower_bound"}
        | {"swiglu_clamp_exp": As("float32", [0.0] * 5), "swiglu_clamp_shexp": As("float32", [0.0] * 5)}
        | {"nextn_predict_layers": 1},
    ),
    "cohere2-moe": _COHERE2_MOE,
    "cohere2-moe-rms": replace(
        _COHERE2_MOE,
        keys=_COHERE2_MOE.keys
        | {"leading_dense_block_count": 0, "expert_weights_norm": False, "expert_shared_count": 1}
        | {"expert_shared_feed_forward_length": 40, "expert_gating_func": 2}
        | {"attention.sliding_window_pattern": As("bool", [True, False, True])},
        known={"shared_expert_combination_strategy": "average"},
    ),
    "laguna": _LAGUNA,
    "minimax-m3": Rules(
        "minimax-m3",
        norm_offset=1,
        keys={**_BLOCKS, "expert_feed_forward_length": "intermediate_size", "expert_shared_count": 1}
        | {"expert_weights_scale": "routed_scaling_factor", "expert_weights_norm": True, "expert_gating_func": 2}
        | {"leading_dense_block_count": 1},
    ),
    "mistral4": Rules(
        "mistral4",
        keys=_DEEPSEEK,
        known={
            "rope_parameters": {
                **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 8},
                **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
                "llama_4_scaling_beta": 0.1,
            }
        },
    ),
    "glm4-moe": Rules("glm4moe", keys={**_DEEPSEEK, "expert_gating_func": 2}),
    "trinity": Rules("afmoe", keys={**_DEEPSEEK, **_WINDOW}),
    "dots1": Rules("dots1", keys={**_DEEPSEEK, "expert_gating_func": 2}),
    "minimax-m2": Rules(
        "minimax-m2",
        keys={"expert_feed_forward_length": "intermediate_size", "expert_gating_func": 2},
        known={"bos_token_id": 1, "eos_token_id": 2},
    ),
    "qwen3-next": Rules(
        "qwen3next", norm_offset=1, keys={**_SHARED, **_STATES, "full_attention_interval": 2, "nextn_predict_layers": 1}
    ),
    "qwen3-5": _QWEN35,
    "qwen3-5-text": _QWEN35,
    "qwen3-5-moe": Rules(
        "qwen35moe",
        norm_offset=1,
        keys={**_SHARED, **_STATES, "attention.recurrent_layers": As("bool", [True, False, True])},
    ),
    "qwen3-5-moe-text": Rules("qwen35moe", norm_offset=1, keys={**_SHARED, **_STATES, "full_attention_interval": 2}),
    "kimi-k2": Rules("deepseek2", keys={**_DEEPSEEK, "expert_gating_func": 2}),
    "deepseek-v2": Rules(
        "deepseek2",
        keys={**_DEEPSEEK, "expert_gating_func": 1},
        known={
            "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4}
            | {"beta_fast": 32, "beta_slow": 1, "mscale": 0.5, "mscale_all_dim": 0.5}
        },
    ),
    "deepseek-v3": Rules("deepseek2", keys={**_DEEPSEEK, "expert_gating_func": 2}),
    "deepseek-v32": Rules("deepseek32", keys=_INDEXED),
    "glm-moe-dsa": Rules("glm-dsa", keys={**_INDEXED, "attention.indexer.types": As("bool", [True, False, True])}),
    "youtu": Rules(
        "deepseek2",
        keys={"leading_dense_block_count": 2, "expert_shared_count": 0, "expert_feed_forward_length": 72},
        known={"rope_interleave": True, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "minicpm3": Rules(
        "minicpm3", keys={"attention.value_length": None}, known={"scale_emb": 12, "dim_model_base": 256}, split=False
    ),
    "falcon-7b": Rules("falcon"),
    "falcon-40b": Rules("falcon", known={"ffn_hidden_size": 136}),
    "mpt": Rules("mpt", keys={"attention.max_alibi_bias": 8.0}),
    "bloom": Rules("bloom"),
    "apertus": Rules("apertus"),
    "gpt2": Rules("gpt2", known={"bos_token_id": 1, "eos_token_id": 2}),
    "pythia": Rules("gptneox", keys={"use_parallel_residual": "use_parallel_residual"}),
    "starcoder1": Rules("starcoder"),
    "phi2": Rules("phi2"),
    "mimo-v2": Rules(
        "mimo2",
        keys={**_EXPERTS, **_WINDOW, "attention.value_scale": "attention_value_scale", "attention.value_length": 16}
        | {"attention.sliding_window_pattern": As("int32", [0, 1, 1, 0]), "expert_gating_func": 2}
        | {"attention.head_count_kv": As("int32", [2, 4, 4, 2])},
    ),
    "step-3p7": Rules(
        "step35",
        norm_offset=1,
        keys={**_EXPERTS, **_WINDOW, "expert_shared_feed_forward_length": "share_expert_dim"}
        | {"expert_weights_scale": "moe_router_scaling_factor", "expert_weights_norm": True}
        | {"leading_dense_block_count": 1, "moe_every_n_layers": 1, "rope.freq_base_swa": 10000.0}
        | {"attention.sliding_window_pattern": As("bool", [False, True, True, False])}
        | {"attention.head_count": As("int32", [4, 6, 6, 4]), "attention.head_count_kv": As("int32", [2, 2, 2, 2])}
        | {"rope.dimension_count": 16}
        | {"swiglu_clamp_exp": As("float32", [0, 0, 0.5, 0.7]), "swiglu_clamp_shexp": As("float32", [0.6, 0, 0, 0.4])},
        known={"rope_scaling": None, "yarn_only_types": ["full_attention"], "pad_token_id": None},
    ),
    "mellum": Rules(
        "mellum",
        keys={**_EXPERTS, **_WINDOW, "attention.sliding_window_pattern": As("bool", [True, False, True])}
        | {"rope.freq_base_swa": 10000.0},
    ),
    "ling2": Rules(
        "bailingmoe2", keys={**_DEEPSEEK, "expert_gating_func": 2}, known={"bos_token_id": 1, "eos_token_id": 2}
    ),
    "exaone-moe": Rules(
        "exaone-moe",
        keys={**_DEEPSEEK, **_WINDOW, "expert_gating_func": 2, "leading_dense_block_count": 1}
        | {"attention.sliding_window_pattern": As("bool", [True, True, True, False]), "nextn_predict_layers": 1},
    ),
    "ling1": Rules(
        "bailingmoe",
        permuted=True,
        keys={**_EXPERTS, "expert_shared_count": "n_shared_experts", "expert_weights_scale": 1.0}
        | {"expert_weights_norm": "norm_topk_prob", "leading_dense_block_count": "first_k_dense_replace"},
        known={"norm_head": False},
    ),
    "lfm2": Rules("lfm2", keys=_LFM2),
    "granite-h": Rules("granitehybrid", permuted=True, keys={**_SCALES, **_MAMBA, "rope.scaling.finetuned": False}),
    "granite-h-moe": Rules(
        "granitehybrid",
        permuted=True,
        keys={**_SCALES, **_MAMBA, "rope.scaling.finetuned": False}
        | {"expert_shared_feed_forward_length": "shared_intermediate_size"},
    ),
    "nemotron-h": Rules("nemotron_h", permuted=True, keys=_NEMOTRON),
    "nemotron-3": Rules(
        "nemotron_h_moe",
        permuted=True,
        keys={**_NEMOTRON, **_SHARED, "expert_shared_count": "n_shared_experts"}
        | {"expert_weights_scale": "routed_scaling_factor", "expert_weights_norm": "norm_topk_prob"}
        | {"expert_group_count": "n_group"},
    ),
    "falcon-h1": Rules("falcon-h1", keys=_MAMBA, known=_NO_MULTIPLIERS),
    "lfm2-moe": Rules(
        "lfm2moe",
        keys={**_LFM2, **_EXPERTS, "leading_dense_block_count": "num_dense_layers", "expert_gating_func": 2},
    ),
    "phi3": Rules("phi3", keys=_PHI3),
    "phi4-mini-short": Rules("phi3", keys={**_PHI3, "rope.scaling.attn_factor": (1 + np.log(4) / np.log(32)) ** 0.5}),
    "smollm3": Rules("smollm3", permuted=True, known={"no_rope_layers": None, "no_rope_layer_interval": 4}),
    "starcoder2": Rules("starcoder2", known={"sliding_window": None}),
    "mixtral": Rules("llama", permuted=True),
    "qwen2-moe": Rules("qwen2moe", keys=_SHARED),
    "qwen3-moe": Rules("qwen3moe", keys=_EXPERTS),
    "qwen2-vl": Rules("qwen2vl"),
    "qwen3-vl": Rules("qwen3vl", keys={"n_deepstack_layers": 3}),
    "qwen3-vl-moe": Rules("qwen3vlmoe", keys=_EXPERTS),
    "mistral3": Rules("mistral3", permuted=True),
    "ministral3": Rules(
        "mistral3",
        permuted=True,
        keys={"rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.1},
    ),
    "smolvlm": Rules("llama", permuted=True),
}
"""By their name in tests/golden."""

_MLP = ("gate", "up", "down")
_ROUTER_SCALES = {"scale": "ffn_gate_inp.scale", "per_expert_scale": "ffn_down_exps.scale"}
_USUAL = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
}
_FLOATS = ("_epsilon", "_scale", "softcapping", "freq_base", "freq_base_swa", ".factor", "yarn_beta_fast")
_FLOATS += ("yarn_beta_slow", "attn_factor")


def known_config(folder: Path, rules: Rules) -> dict[str, Any]:
    """The config.json of a checkpoint, changed to what a file of the architecture can say."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config.get("text_config", config).update(rules.known)
    return config


def _metadata(config: dict[str, Any], rules: Rules) -> dict[str, Any]:
    text = {**config, **config.get("text_config", {})}
    full = LlamaConfig.from_dict(config)
    said = {key: getattr(full, name, None) for key, name in _USUAL.items()}
    for old in ("layer_norm_eps", "norm_epsilon", "norm_eps"):
        if old in text:
            said["attention.layer_norm_epsilon"] = text[old]
            del said["attention.layer_norm_rms_epsilon"]
    if "head_dim" not in text:
        del said["attention.key_length"], said["attention.value_length"]
    said["rope.freq_base"] = full.rope_theta
    if full.rope_local_base_freq and full.rope_local_base_freq != 10000:
        said["rope.freq_base_swa"] = full.rope_local_base_freq
    if full.partial_rotary_factor != 1:
        said["rope.dimension_count"] = int(full.head_dim * full.partial_rotary_factor)
    scaling = full.rope_scaling or {}
    if scaling.get("rope_type") in ("linear", "yarn"):
        said["rope.scaling.type"], said["rope.scaling.factor"] = scaling["rope_type"].encode(), scaling["factor"]
        names = {"original_context_length": "original_max_position_embeddings", "yarn_attn_factor": "attention_factor"}
        names |= {f"yarn_{n}": n for n in ("beta_fast", "beta_slow")}
        said |= {f"rope.scaling.{k}": scaling.get(n) for k, n in names.items()}
    sections = (text.get("rope_scaling") or text.get("rope_parameters") or {}).get("mrope_section")
    if sections:
        said["rope.dimension_sections"] = As("int32", [*sections, 0][:4])
    said |= {
        key: text.get(name, getattr(full, name, None)) if isinstance(name, str) else name
        for key, name in rules.keys.items()
    }
    if "linear_num_value_heads" in text:
        said["ssm.inner_size"] = text["linear_num_value_heads"] * text["linear_value_head_dim"]
    if "qk_rope_head_dim" in text:
        of_values = {} if text.get("v_head_dim") else {"v_head_dim": full.v_head_dim}
        said |= latent_metadata({**text, **of_values}, scaling, split=rules.split)
    if "linear_attn_config" in text:  # Kimi Linear, of which head_dim is of no math
        own = text["linear_attn_config"]
        heads = [int(layer + 1 in own["full_attn_layers"]) for layer in range(full.num_hidden_layers)]
        said |= {"attention.value_length": text["head_dim"], "attention.head_count_kv": As("int32", heads)}
        said |= {"kda.head_dim": own["head_dim"], "ssm.conv_kernel": own["short_conv_kernel_size"]}
    if "layer_group_size" in text:  # Ling 3, with the same of head_dim, and a layer behind the last
        heads = [int((layer + 1) % text["layer_group_size"] == 0) for layer in range(full.num_hidden_layers)]
        said |= {"attention.value_length": text["head_dim"], "attention.head_count_kv": As("int32", [*heads, 1])}
    mixers = [layer.mixer for layer in decoder_spec(full, 256).layers]
    mamba = next((mixer for mixer in mixers if isinstance(mixer, MambaSpec)), None)
    if mamba:
        said["ssm.inner_size"] = mamba.size
    if mamba and rules.arch != "falcon-h1":  # layers without attention have no heads of keys
        heads = [full.num_key_value_heads * (kind == "full_attention") for kind in full.layer_types]
        said["attention.head_count_kv"] = As("int32", heads)
    if rules.arch.startswith("nemotron_h"):
        size, own = said["feed_forward_length"], "moe" if rules.arch.endswith("moe") else "mlp"
        said["feed_forward_length"] = As("int32", [size * (kind == own) for kind in full.layer_types])
    if "conv_L_cache" in text:  # layers with a short convolution have no heads of keys
        heads = text["num_key_value_heads"]
        said["attention.head_count_kv"] = As("int32", [0 if kind == "conv" else heads for kind in full.layer_types])
    said["block_count"] += said.get("nextn_predict_layers", 0)
    out: dict[str, Any] = {"general.architecture": rules.arch}
    for key, value in said.items():
        if value is None or (key.startswith("expert_") and value == 0):
            continue
        if isinstance(value, bytes):
            value = value.decode()
        is_float = key.endswith(_FLOATS) and not isinstance(value, As)
        out[f"{rules.arch}.{key}"] = float(value) if is_float else value
    if rules.arch == "phi3":
        out[f"{rules.arch}.attention.sliding_window"] = full.sliding_window or 0
    for name, ids in (("bos", full.bos_token_id), ("eos", full.eos_token_id)):
        if ids:
            out[f"tokenizer.ggml.{name}_token_id"] = ids[0]
    return out


def _numbers_of_xielu(folder: Path) -> dict[str, As]:
    """The numbers of the activation of Apertus, of which a file has a list each."""
    numbers: dict[str, list[float]] = {}
    with Checkpoint(folder) as checkpoint:
        for name in sorted(name for name in checkpoint.tensors if ".act_fn." in name):
            array = checkpoint.array(name)  # bfloat16 as 16 bits
            numbers.setdefault(name.rpartition(".")[2], []).append(
                float((array.astype(np.uint32) << 16).view(np.float32).item())
            )
    return {f"xielu.{name}": As("float32", own) for name, own in numbers.items()}


def _tensors(folder: Path, rules: Rules, config: dict[str, Any]) -> Iterator[tuple[str, Array]]:
    """Tensors of the text part under names that the map of the gguf package has, experts in one."""
    text = {**config, **config.get("text_config", {})}
    experts: dict[str, list[Array]] = {}
    has_experts = rules.arch.startswith("granite") and bool(text.get("num_local_experts"))  # of Granite
    with Checkpoint(folder) as checkpoint:
        for name in sorted(checkpoint.tensors):
            if any(part in name for part in ("vis", "connector", "projector", "patch_merge", "mtp_layers", ".act_fn.")):
                continue
            array = checkpoint.array(name)
            if checkpoint.info(name).dtype == "bfloat16":
                array = (array.astype(np.uint32) << 16).view(np.float32)
            array = np.ascontiguousarray(array, np.float32)
            for part in ("language_model.", "text_model."):
                name = name.replace(part, "")
            name = name_in_later_layer(name, text)
            if rules.arch.startswith("nemotron_h"):
                name = name.replace("model.", "backbone.")
                name = name.replace("backbone.", "model.").replace("mixer", "mlp") if ".experts." in name else name
            starts = ("model.", "transformer.", "lm_head", "output.", "backbone.", "gpt_neox.", "embed_out.")
            name = name if name.startswith(starts) else f"model.{name}"
            if name.startswith("model.altup_"):  # Gemma 3n has all of them in one
                experts.setdefault(re.sub(r"\.\d+\.", ".", name), []).append(array)
                continue
            if rules.arch == "gemma3n" and name.endswith("_scale"):
                yield f"{name}.weight", array
                continue
            if rules.arch in ("gemma3n", "gemma4"):
                yield name if name.endswith((".weight", "_scale", ".scale")) else f"{name}.weight", array
                continue
            if rules.arch == "mistral4" and ".experts." in name:  # stays in one
                yield f"{name}.weight", array
                continue
            if rules.arch == "bailingmoe3":
                yield from ling_tensors(name, array, text, experts)
                continue
            if rules.arch == "kimi-linear" and "self_attn." in name and "kv_b_proj" not in name:
                yield kimi_tensor(name, array)
                continue
            if ".block_sparse_moe." in name and name.endswith(
                tuple(f".block_sparse_moe.{m}_proj.weight" for m in _MLP)
            ):
                name = name.replace("block_sparse_moe", "mlp")  # as the hub has layers without experts
            if name.endswith(".experts.e_score_correction_bias"):  # of Laguna
                name = name.replace(".experts.", ".gate.")
            of_gate_up = ".experts.gate_up_proj" in name
            if of_gate_up or ".experts.down_proj" in name:
                kind = "bias" if name.endswith("_bias") else "weight"
                name = name.removesuffix("_bias")
                if rules.arch in ("gpt-oss", "qwen3vlmoe", "llama4") and kind == "weight":
                    array = array.swapaxes(1, 2)
                if not of_gate_up:
                    yield f"{name}.{kind}", array
                    continue
                if rules.arch == "gpt-oss":
                    halves = array[:, 0::2], array[:, 1::2]
                else:
                    halves = array[:, : array.shape[1] // 2], array[:, array.shape[1] // 2 :]
                for which, half in zip(("gate_proj", "up_proj"), halves, strict=True):
                    yield f"{name.replace('gate_up_proj', which)}.{kind}", half
                continue
            before, is_expert, after = name.partition(".experts.")
            if is_expert:
                _, module, kind = after.split(".")
                merged = f"{before}.experts.{module}.{kind}"
                if module in ("w1", "w2", "w3"):
                    merged = merged.removeprefix("model.").replace("block_sparse_moe", "feed_forward")
                experts.setdefault(merged, []).append(array)
                continue
            if ".input_linear." in name:  # of Granite
                before, _, kind = name.partition(".input_linear")
                before = before.replace("block_sparse_moe", "mlp.experts")
                before = before.replace("shared_mlp", "mlp.shared_expert" if has_experts else "mlp")
                for which, half in zip(("gate_proj", "up_proj"), np.split(array, 2, axis=-2), strict=True):
                    yield f"{before}.{which}{kind}", np.ascontiguousarray(half)
                continue
            if has_experts:
                name = name.replace("block_sparse_moe.output_linear", "mlp.experts.down_proj")
                name = name.replace("shared_mlp.output_linear", "mlp.shared_expert.down_proj")
            name = name.replace("shared_mlp.output_linear", "mlp.down_proj")
            if rules.arch == "gpt2" and ".c_" in name:
                array = array.T
            if name.endswith("conv.conv.weight"):
                array = array.reshape(len(array), -1)
            if "mamba." in name or (".mixer." in name and ".experts" not in name):
                name, array = mamba_tensors(name, array, text.get("mamba_n_groups", text.get("n_groups", 1)))
            if "linear_attn." in name:
                yield from state_tensors(name, array, text, tiled=rules.arch != "qwen3next", split=rules.split)
                continue
            if "kv_b_proj" in name:
                yield from latent_tensors(name, array, text, split=rules.split)
                continue
            if ".wqkv." in name:  # head of keys by head of keys
                kv_heads, head_dim = text["num_key_value_heads"], text["hidden_size"] // text["num_attention_heads"]
                of_heads = array.reshape(kv_heads, -1, head_dim, array.shape[1])
                parts = {"wq": of_heads[:, :-2], "wk": of_heads[:, -2], "wv": of_heads[:, -1]}
                for which, part in parts.items():
                    rows = np.ascontiguousarray(part).reshape(-1, array.shape[1])
                    yield name.replace("wqkv", which), rows if which == "wv" else interleave(rows, head_dim)
                continue
            if "query_key_value" in name and rules.arch == "bailingmoe2":
                yield name, array
                continue
            if "query_key_value" in name:
                yield from _joined_heads(name, array, LlamaConfig.from_dict(config), rules)
                continue
            if name.endswith("e_score_correction_bias"):
                yield name.replace("_bias", ".bias"), array  # ERNIE's is the one row of a matrix
                continue
            if name.endswith(("expert_bias", "router_bias")):
                yield f"{name}.bias", array
                continue
            if name.endswith("norm.weight"):
                array = array + np.float32(rules.norm_offset)
            if name.endswith(("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias")):
                heads = text.get("num_attention_heads" if ".q_proj" in name else "num_key_value_heads")
                if rules.permuted:
                    array = interleave(array, len(array) // heads)
                elif rules.arch == "glm4" and "mrope_section" in (text.get("rope_scaling") or {}):
                    array = _to_halves(array, heads, text["partial_rotary_factor"])
            if name.endswith("shared_expert_gate.weight"):
                array = array.reshape(-1)  # as older converters squeeze it
            yield f"{name}.weight" if name.endswith(("sinks", "sink_bias")) else name, array
    for name, arrays in experts.items():
        yield name, np.stack(arrays)


def _joined_heads(name: str, array: Array, config: LlamaConfig, rules: Rules) -> Iterator[tuple[str, Array]]:
    """The heads of q, k and v of one tensor: of Ling, files have three, and others part behind part.

    The checkpoints of the first two have, for each head of keys, its queries, that head and its values.
    """
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    if rules.arch in ("falcon", "bloom", "gptneox"):
        of_heads = array.reshape(kv_heads, -1, head_dim, *array.shape[1:])
        parts = of_heads[:, :-2], of_heads[:, -2], of_heads[:, -1]
        yield name, np.concatenate([part.reshape(-1, *array.shape[1:]) for part in parts])
        return
    for which, rows in zip("qkv", np.split(array, np.cumsum([heads, kv_heads]) * head_dim), strict=True):
        own = rows if which == "v" else interleave(rows, head_dim)
        yield name.replace("attention.query_key_value", f"self_attn.{which}_proj"), own


def _to_halves(array: Array, heads: int, factor: float) -> Array:
    of_heads = array.reshape(heads, len(array) // heads, -1)
    rotary = int(of_heads.shape[1] * factor)
    turned = [of_heads[:, 0:rotary:2], of_heads[:, 1:rotary:2], of_heads[:, rotary:]]
    return np.concatenate(turned, axis=1).reshape(array.shape)


def convert_family(folder: Path, rules: Rules, types: Types = plain) -> File:
    """A checkpoint folder as a GGUF file."""
    import gguf

    config = known_config(folder, rules)
    metadata = _metadata(config, rules) | _numbers_of_xielu(folder)
    known = {name: a for a, name in gguf.MODEL_ARCH_NAMES.items()}
    arch = known.get(rules.arch, gguf.MODEL_ARCH.GLM_DSA)  # a package that knows no deepseek32 knows the same names
    # The map of a family may lack tensors of a layer without experts, those of MTP heads, and gates where the package
    # does not know the family.
    others = tuple(getattr(gguf.MODEL_ARCH, name) for name in ("LLAMA", "GLM4_MOE", "STEP35", "KIMI_LINEAR"))
    maps = [gguf.get_tensor_name_map(a, metadata[f"{rules.arch}.block_count"]) for a in (arch, *others)]
    tensors = {}
    if later := metadata.get(f"{rules.arch}.nextn_predict_layers"):
        hidden_size = metadata[f"{rules.arch}.embedding_length"]
        of_later = later_layer(metadata[f"{rules.arch}.block_count"] - later, hidden_size)
        tensors = {name: quantise("F32", array) for name, array in of_later.items()}
    for name, array in _tensors(folder, rules, config):
        suffixes = (".weight", ".bias")
        of_router = name.rpartition(".router.")
        if of_router[2] in _ROUTER_SCALES:  # which no map has
            tensors[f"blk.{name.split('.')[2]}.{_ROUTER_SCALES[of_router[2]]}"] = quantise("F32", array)
            continue
        name = name.removeprefix("transformer.") if rules.arch == "bloom" else name
        to = next((to for names in maps if (to := names.get_name(name, suffixes))), None)
        if (of_blocks := name.partition(".self_attn.index_"))[1]:  # of MiniMax M3, in newer packages
            to = f"blk.{name.split('.')[2]}.indexer.{of_blocks[2]}"
        assert to is not None, name
        is_plain = (
            array.ndim == 1
            or to.endswith((".bias", "ssm_a", "ssm_d"))
            or "ssm_norm" in to
            or ".ffn_gate_inp" in to
            or "conv1d" in to
            or "shortconv.conv" in to
            or ".indexer." in to
        )
        tensors[to] = quantise("F32" if is_plain else types(to), np.ascontiguousarray(array))
    if rules.arch == "gemma4":  # the first quarter of a head turns
        tensors["rope_freqs.weight"] = quantise("F32", np.array([1] * 3 + [1e30] * 9, np.float32))
    text = config.get("text_config", config)
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    if scaling.get("rope_type") == "llama3":
        tensors |= rope_metadata(LlamaConfig.from_dict(config), rules.arch)[1]
    for kind in ("long", "short"):
        if f"{kind}_factor" in scaling:
            factors = np.array(scaling[f"{kind}_factor"], np.float32)
            tensors[f"rope_factors_{kind}.weight"] = quantise("F32", factors)
    return File(metadata, tensors)
