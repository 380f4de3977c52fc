"""What the architectures of GGUF files are called in Hugging Face's terms: one row each, no code.

A row says which family of `config/families.py` an architecture is, and how its tensors and keys are named. To add a
family, add a row here as well; keys and tensors that all architectures share are in the tables above the rows.

Source of the facts: gguf-py/gguf/constants.py and tensor_mapping.py of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

__all__ = ["ARCHITECTURES", "INERT_KEYS", "KEYS", "Architecture"]

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
        # Latent attention.
        "attention.q_lora_rank": "q_lora_rank",
        "attention.kv_lora_rank": "kv_lora_rank",
    }
)

# Keys that change nothing, or that `config.py` reads by itself.
INERT_KEYS = frozenset(
    """
    vocab_size attention.value_length attention.causal tensor_data_layout rope.dimension_count rope.scaling.type
    rope.scaling.factor rope.scaling.original_context_length rope.scaling.attn_factor rope.scaling.finetuned
    rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow rope.scaling.yarn_ext_factor rope.scale_linear
    """.split()  # noqa: SIM905 (a list of quoted names is no easier to read)
)

# Names of tensors up to ".weight" and ".bias": of the model, and behind "blk.<i>." of a layer.
_MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """One row of the table.

    Attributes
    ----------
    model_type : str
        Of config.json: the key into the families.
    interleaved : tuple of str
        Tensors of a layer whose rows are those of heads, with the two halves of each head taking turns. llama.cpp turns
        neighbours in these architectures, and Hugging Face's models turn halves.
    biases : Mapping of str to str
        Key of config.json that is true where the first layer has a tensor: no key of the metadata says it.
    defaults : Mapping of str to object
        Keys of config.json that no key of the metadata says.
    model_names, layer_names : Mapping of str to str
        Tensors.
    scales_attention : bool
        Scores are scaled by a number of the file, and not by head_dim ** -0.5.
    """

    model_type: str
    interleaved: tuple[str, ...] = ()
    biases: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)
    model_names: Mapping[str, str] = field(default_factory=lambda: _MODEL_NAMES)
    layer_names: Mapping[str, str] = field(default_factory=lambda: _LAYER_NAMES)
    scales_attention: bool = False


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        # Also what Mistral is converted to; its window, where it had one, is not in the file.
        "llama": Architecture(
            "llama",
            interleaved=("attn_q", "attn_k"),
            biases={"attention_bias": "attn_q.bias", "mlp_bias": "ffn_down.bias"},
        ),
        "granite": Architecture(
            "granite",
            interleaved=("attn_q", "attn_k"),
            biases={"attention_bias": "attn_q.bias", "mlp_bias": "ffn_down.bias"},
            scales_attention=True,
        ),
        # Norms stand behind attention and MLP.
        "olmo2": Architecture(
            "olmo2",
            layer_names={
                **{k: v for k, v in _LAYER_NAMES.items() if k not in ("attn_norm", "ffn_norm")},
                "post_attention_norm": "post_attention_layernorm",
                "post_ffw_norm": "post_feedforward_layernorm",
            },
        ),
        "qwen2": Architecture("qwen2"),
        "qwen3": Architecture("qwen3", biases={"attention_bias": "attn_q.bias"}),
    }
)
"""The architectures that are read, by `general.architecture`."""
