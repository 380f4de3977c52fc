"""What the architectures of GGUF files are called in Hugging Face's terms: one row each, no code.

A row says which family of `config/families.py` an architecture is, and how its tensors and keys are named. To add a
family, add a row here as well; keys and tensors that all architectures share are in the tables above the rows.

Source of the facts: gguf-py/gguf/constants.py, tensor_mapping.py and conversion/ of llama.cpp, and what its src/models/
take as known: which layers have a window, and what is left out of a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

__all__ = [
    "ARCHITECTURES",
    "INERT_KEYS",
    "JOINED",
    "KEYS",
    "MODEL_NAMES",
    "NEUTRAL_KEYS",
    "STACKED",
    "WHOLE_NAMES",
    "Architecture",
]

# Key of the metadata behind "<architecture>." -> key of config.json. Those that a family has not are refused there.
KEYS: Mapping[str, str] = MappingProxyType(
    {
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "block_count": "num_hidden_layers",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "attention.layer_norm_epsilon": "rms_norm_eps",
        "attention.sliding_window": "sliding_window",
        "rope.freq_base": "rope_theta",
        # Scalars of some families.
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
        "attention.clamp_kqv": "clip_qkv",
        "use_parallel_residual": "use_parallel_residual",
        # Mixtures of experts.
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        "expert_shared_count": "n_shared_experts",
        "expert_weights_norm": "norm_topk_prob",
        # Latent attention.
        "attention.q_lora_rank": "q_lora_rank",
        "attention.kv_lora_rank": "kv_lora_rank",
    }
)

# Keys that no configuration has, of which only these values are of the math that is computed.
NEUTRAL_KEYS: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "attention.causal": (True,),
        "expert_gating_func": (0, 1),  # softmax
        "expert_weights_scale": (0.0, 1.0),
        "expert_group_count": (0, 1),
        "expert_group_used_count": (0, 1),
        "leading_dense_block_count": (0,),
        "nextn_predict_layers": (0,),
    }
)

# Keys that change nothing, or that `config.py` reads by itself.
INERT_KEYS = frozenset(
    """
    vocab_size attention.value_length tensor_data_layout rope.dimension_count rope.scaling.type
    rope.scaling.factor rope.scaling.original_context_length rope.scaling.attn_factor rope.scaling.finetuned
    rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow rope.scaling.yarn_ext_factor rope.scale_linear
    rope.scaling.yarn_attn_factor rope.scaling.yarn_log_multiplier attention.temperature_scale
    attention.sliding_window_pattern rope.freq_base_swa rope.dimension_sections n_deepstack_layers pooling_type
    """.split()  # noqa: SIM905 (a list of quoted names is no easier to read)
)

# Names of tensors up to ".weight" and ".bias": of the model, and behind "blk.<i>." of a layer.
MODEL_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "output": "lm_head",
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
    }
)
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_sinks": "self_attn.sinks",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_NORM_BEFORE_MLP = {"ffn_norm": "pre_feedforward_layernorm"}  # where another stands behind attention
_GATE_UP = {"ffn_up": "mlp.gate_up_proj"}
_GEMMA4 = {
    **_NORM_BEFORE_MLP,
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}

# Which of these hold several of the engine's modules, row behind row, or a matrix for each expert: as `TensorNames` has
# them.
JOINED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    }
)
STACKED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "mlp.experts.gate_proj": ("mlp.experts.{}.gate_proj",),
        "mlp.experts.up_proj": ("mlp.experts.{}.up_proj",),
        "mlp.experts.gate_up_proj": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
        "mlp.experts.down_proj": ("mlp.experts.{}.down_proj",),
    }
)

# Tensors of a layer whose names say more than the module, to those of the engine's parameters.
WHOLE_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "layer_output_scale.weight": "layer_scalar",
        "ffn_gate_inp.scale": "mlp.gate.scale",
        "ffn_down_exps.scale": "mlp.gate.per_expert_scale",
    }
)

_QKV_BIAS = ("attn_q.bias", "attn_qkv.bias")


@dataclass(frozen=True, slots=True)
class Architecture:
    """One row of the table.

    Attributes
    ----------
    model_type : str
        Of config.json: the key into the families.
    variants : Mapping of str to str
        The model_type instead where a key of the metadata is there and not 0.
    rope_pairs : str
        What RoPE turns together in the file, as `Family.rope_pairs`: neighbours where llama.cpp turns such.
    biases : Mapping of str to tuple of str
        Key of config.json that is true where the first layer has one of these tensors, and else false: no key of the
        metadata says it.
    defaults : Mapping of str to object
        Keys of config.json that no key of the metadata says.
    keys : Mapping of str to str
        As `KEYS`, before them.
    layer_names : Mapping of str to str
        Names of tensors, before those that all share.
    norm_offset : float
        What the norms in a file have been added; the checkpoint's are without.
    scales_attention : bool
        Scores are scaled by a number of the file, and not by head_dim ** -0.5.
    width_scaled_layers : int
        A model of so many layers divides scores by the root of hidden_size / num_attention_heads, others of
        `divides_by_head_dim` by that of head_dim.
    divides_by_head_dim : bool
        The configuration says what scores are divided by; the file does not.
    yarn : Mapping of str to object
        Keys of rope_scaling that no key of the metadata says, where its type is yarn.
    shaped_layers : bool
        Layers without a window have heads of their own, and others of the keys of `layer_shapes.py` may differ, too.
    local_rope : bool
        Layers with a window have a `rope_theta` of their own: that of a key of the metadata, else of `defaults`, else
        that of all.
    """

    model_type: str
    variants: Mapping[str, str] = field(default_factory=dict)
    rope_pairs: Literal["halves", "neighbours"] = "halves"
    biases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    layer_names: Mapping[str, str] = field(default_factory=dict)
    norm_offset: float = 0.0
    scales_attention: bool = False
    width_scaled_layers: int = 0
    divides_by_head_dim: bool = False
    yarn: Mapping[str, object] = field(default_factory=dict)
    local_rope: bool = False
    shaped_layers: bool = False

    def layer_name(self, base: str) -> str | None:
        """Return the module of a layer's tensor; None: there is no such."""
        return self.layer_names.get(base) or _LAYER_NAMES.get(base)


_LLAMA_BIASES = {"attention_bias": _QKV_BIAS, "mlp_bias": ("ffn_down.bias",)}

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        # Also what Mistral is converted to; its window, where it had one, is not in the file.
        "llama": Architecture(
            "llama", variants={"expert_count": "mixtral"}, rope_pairs="neighbours", biases=_LLAMA_BIASES
        ),
        "mistral3": Architecture(
            "llama",
            variants={"attention.temperature_scale": "ministral3"},
            rope_pairs="neighbours",
            biases={"attention_bias": _QKV_BIAS},
        ),
        "granite": Architecture("granite", rope_pairs="neighbours", biases=_LLAMA_BIASES, scales_attention=True),
        "smollm3": Architecture("smollm3", rope_pairs="neighbours", biases=_LLAMA_BIASES),
        # Norms stand behind attention and MLP.
        "olmo2": Architecture("olmo2", variants={"attention.sliding_window": "olmo3"}, local_rope=True),
        "qwen2": Architecture("qwen2"),
        "qwen2moe": Architecture("qwen2_moe"),
        "qwen2vl": Architecture("qwen2"),
        "qwen3": Architecture("qwen3", biases={"attention_bias": _QKV_BIAS}),
        "qwen3moe": Architecture("qwen3_moe", biases={"attention_bias": _QKV_BIAS}, defaults={"norm_topk_prob": True}),
        # The text parts of models that see: positions of a text are the same in all sections of their RoPE.
        "qwen3vl": Architecture("qwen3"),
        "qwen3vlmoe": Architecture("qwen3_moe", defaults={"norm_topk_prob": True}),
        "phi3": Architecture("phi3", layer_names=_GATE_UP),
        "gemma": Architecture("gemma", norm_offset=1.0),
        "gemma2": Architecture(
            "gemma2",
            layer_names=_NORM_BEFORE_MLP,
            norm_offset=1.0,
            divides_by_head_dim=True,
            width_scaled_layers=46,
        ),
        "gemma3": Architecture(
            "gemma3_text",
            layer_names=_NORM_BEFORE_MLP,
            norm_offset=1.0,
            divides_by_head_dim=True,
            width_scaled_layers=62,
            defaults={"rope_local_base_freq": 10000.0},
            local_rope=True,
        ),
        "gemma4": Architecture(
            "gemma4_text",
            layer_names=_GEMMA4,
            keys={
                "attention.shared_kv_layers": "num_kv_shared_layers",
                "embedding_length_per_layer_input": "hidden_size_per_layer_input",
                "expert_count": "num_experts",
            },
            defaults={"rope_local_base_freq": 10000.0},
            local_rope=True,
            shaped_layers=True,
        ),
        "glm4": Architecture(
            "glm4",
            rope_pairs="neighbours",
            biases={"attention_bias": _QKV_BIAS},
            layer_names={**_NORM_BEFORE_MLP, **_GATE_UP},
        ),
        "chatglm": Architecture(
            "glm", rope_pairs="neighbours", biases={"attention_bias": _QKV_BIAS}, layer_names=_GATE_UP
        ),
        "gpt-oss": Architecture(
            "gpt_oss",
            keys={"expert_feed_forward_length": "intermediate_size"},
            yarn={"truncate": False},
        ),
        "starcoder2": Architecture("starcoder2"),
        "command-r": Architecture("cohere", rope_pairs="neighbours", keys={"logit_scale": "logit_scale"}),
        "cohere2": Architecture("cohere2", rope_pairs="neighbours", keys={"logit_scale": "logit_scale"}),
    }
)
"""The architectures that are read, by `general.architecture`."""
