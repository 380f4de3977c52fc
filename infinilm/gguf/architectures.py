"""The architectures of GGUF files in Hugging Face's terms: one row each, no code.

A row says which family of `config/families` an architecture is, and how its tensors and keys are named. To add a
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
    "MATRICES",
    "MODEL_NAMES",
    "NEUTRAL_KEYS",
    "STACKED",
    "UNCLEAR",
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
    }
)

# Keys that change nothing for `config.py`, or that it reads by itself; `infinilm.pooling` reads pooling_type
# and the sizes of linears behind the pooling.
INERT_KEYS = frozenset(
    """
    vocab_size attention.value_length tensor_data_layout rope.dimension_count rope.scaling.type
    rope.scaling.factor rope.scaling.original_context_length rope.scaling.attn_factor rope.scaling.finetuned
    rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow rope.scaling.yarn_ext_factor rope.scale_linear
    rope.scaling.yarn_attn_factor rope.scaling.yarn_log_multiplier attention.temperature_scale
    attention.sliding_window_pattern rope.freq_base_swa rope.dimension_sections n_deepstack_layers pooling_type
    nextn_predict_layers dense_2_feat_in dense_2_feat_out dense_3_feat_in dense_3_feat_out
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
        # Encoders. Norms of sums stand where `TensorNames.norm_of_embedding` and `norm_of_layer` say.
        "token_embd_norm": "model.embed_norm",
        "token_types": "model.embed_token_types",
        "position_embd": "model.embed_positions",
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
    # Encoders.
    "attn_output_norm": "post_attention_layernorm",
    "layer_output_norm": "output_norm",
    # Latent attention.
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    # The indexer of latent attention.
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
    # The indexers of heads of keys, which choose blocks.
    "indexer.q_proj": "self_attn.indexer.q_proj",
    "indexer.k_proj": "self_attn.indexer.k_proj",
    "indexer.q_norm": "self_attn.indexer.q_norm",
    # The gated delta rule.
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    # Short convolutions.
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    # MTP heads.
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.embed_tokens": "embed_tokens",  # a copy of the model's, which is not read
    "nextn.shared_head_norm": "shared_head.norm",
    "nextn.shared_head_head": "shared_head.head",
}
_STATES = {"attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z"}
# The delta rule with a decay of each element.
_KIMI = {f"ssm_conv1d_{part}": f"linear_attn.{part}_conv1d" for part in "qkv"}
_KIMI |= {f"ssm_{name}": f"linear_attn.{name}_proj" for name in ("f_a", "f_b", "g_a", "g_b")}
_KIMI |= {"ssm_beta": "linear_attn.b_proj"}
_MAMBA = {f"ssm_{name}": f"mamba.{name}" for name in ("conv1d", "norm")}
_MAMBA |= {f"ssm_{name}": f"mamba.{name}_proj" for name in ("in", "out")}
_NORM_BEFORE_MLP = {"ffn_norm": "pre_feedforward_layernorm"}  # where another stands behind attention
_GATE_UP = {"ffn_up": "mlp.gate_up_proj"}
_OWN_VECTORS = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_GEMMA3N = {
    **_NORM_BEFORE_MLP,
    **_OWN_VECTORS,
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_correct_coef": "altup.correction_coefs",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "post_laurel_norm",
}
_GEMMA4 = {
    **_NORM_BEFORE_MLP,
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    **_OWN_VECTORS,
}

# Those that hold several of the engine's modules, row behind row, or a matrix for each expert: as `TensorNames` has
# them.
JOINED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        # In Kimi Linear, layers of the delta rule have all three.
        "self_attn.qkv_proj": tuple(f"{mixer}.{part}_proj" for mixer in ("self_attn", "linear_attn") for part in "qkv"),
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

# Tensors outside the layers that hold a matrix for each of several modules, one behind the other.
MATRICES: Mapping[str, str] = MappingProxyType(
    {"altup_proj": "model.altup_projections.{}", "altup_unembd_proj": "model.altup_unembed_projections.{}"}
)

# Tensors of a layer whose names say more than the module, to those of the engine's parameters.
WHOLE_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "layer_output_scale.weight": "layer_scalar",
        "altup_correct_scale.weight": "altup.correct_output_scale",
        "ffn_gate_inp.scale": "mlp.gate.scale",
        "ffn_down_exps.scale": "mlp.gate.per_expert_scale",
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        "ssm_a": "linear_attn.A_log",
        "ssm_dt.bias": "linear_attn.dt_bias",
    }
)

MAMBA_WHOLE_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "ssm_a": "mamba.A_log",
        "ssm_d": "mamba.D",
        "ssm_dt.bias": "mamba.dt_bias",
        "ffn_norm": "post_attention_layernorm.weight",  # in Falcon-H1's files, without ".weight"
    }
)

_QKV_BIAS = ("attn_q.bias", "attn_qkv.bias")

LayersKind = Literal[
    "", "latent", "state", "latent and state", "conv", "mamba", "heads", "heads and gates", "blocks", "streams"
]


@dataclass(frozen=True, slots=True)
class Architecture:
    """One row of the table.

    Attributes
    ----------
    model_type : str
        The `model_type` of config.json, which is the key into the families.
    where : Mapping of str to (Mapping of str to object)
        Keys of config.json where the metadata have a key that is not 0; of "key=value", where it has that value; of
        "!key", where it is absent; of "tensor name", where a layer has that tensor. Those that hold are written over
        `defaults`, one after the other; a `model_type` among them takes the place of the row's, as `expert_count` makes
        a Mixtral of a Llama.
    rope_pairs : str
        What RoPE turns together in the file, as `Family.rope_pairs`: neighbours where llama.cpp turns such.
    biases : Mapping of str to tuple of str
        Key of config.json that is true where the first layer has one of these tensors, and else false: no key of the
        metadata says it.
    defaults : Mapping of str to object
        Keys of config.json that no key of the metadata says.
    keys : Mapping of str to str
        As `KEYS`, before them; "": the key says nothing.
    neutral : Mapping of str to tuple
        As `NEUTRAL_KEYS`, before them.
    model_names, layer_names : Mapping of str to str
        Names of tensors, of the model and of a layer, before those that all share.
    norm_offset : float
        What the norms in a file have been added; the checkpoint's are without.
    scales_attention : bool
        Scores are scaled by a number of the file, and not by head_dim ** -0.5.
    width_scaled_layers : int
        A model of this many layers divides scores by the root of hidden_size / num_attention_heads, others of
        `divides_by_head_dim` by that of head_dim.
    divides_by_head_dim : bool
        The configuration says what scores are divided by; the file does not.
    yarn : Mapping of str to object
        Keys of rope_scaling that no key of the metadata says, where its type is yarn.
    shaped_layers : bool
        Layers without a window have heads of their own, and others of the keys of `layer_shapes.py` may differ, too.
    layers : str
        What layers have that a module of its own reads from the metadata: "latent", "state", "latent and state",
        "conv", "mamba", "heads", where those with a window have other heads of keys, "heads and gates", where they
        also have gates, "blocks", where heads of keys choose blocks of these, "streams", where there are several, or
        nothing.
    renamed : Mapping of str to str, or to several
        As `TensorNames` has it, behind the names of `layer_names`.
    gated_q, delta_by_head : bool
        As `TensorNames` has them.
    tiled_heads : bool
        Heads of values of the delta rule stand as if each head of keys came again and again: first the first ones that
        all heads of keys have, then the second ones. In checkpoints those of a head of keys are neighbours.
    layer_numbers : Mapping of str to str or float
        Keys of the metadata, whole, that list a number of each layer: the parameter of the layer that it is, or the one
        number that is supported.
    local_rope : bool
        Layers with a window have a `rope_theta` of their own: that of a key of the metadata, else of `defaults`, else
        that of all.
    """

    model_type: str
    where: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    rope_pairs: Literal["halves", "neighbours"] = "halves"
    biases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    model_names: Mapping[str, str] = field(default_factory=dict)
    layer_names: Mapping[str, str] = field(default_factory=dict)
    norm_offset: float = 0.0
    scales_attention: bool = False
    width_scaled_layers: int = 0
    divides_by_head_dim: bool = False
    yarn: Mapping[str, object] = field(default_factory=dict)
    local_rope: bool = False
    shaped_layers: bool = False
    layers: LayersKind = ""
    renamed: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    gated_q: bool = False
    delta_by_head: bool = False
    tiled_heads: bool = False
    layer_numbers: Mapping[str, str | float] = field(default_factory=dict)

    def model_name(self, base: str) -> str | None:
        """Return the module of a tensor outside the layers; None: there is no such."""
        return self.model_names.get(base) or MODEL_NAMES.get(base)

    def whole_name(self, base: str) -> str | None:
        """Return the parameter of a layer's tensor whose name says more than the module; None: there is no such."""
        if self.layers == "mamba" and base in MAMBA_WHOLE_NAMES:
            return MAMBA_WHOLE_NAMES[base]
        return WHOLE_NAMES.get(base)

    def layer_name(self, base: str) -> str | None:
        """Return the module of a layer's tensor; None: there is no such."""
        return self.layer_names.get(base) or _LAYER_NAMES.get(base)


_TWO_WAY: Mapping[str, tuple[Any, ...]] = {"attention.causal": (False,)}  # what all encoders say
_SIGMOID: Mapping[str, tuple[Any, ...]] = {"expert_gating_func": (0, 2)}
_DEEPSEEK_KEYS = {
    "expert_count": "num_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
}
_INDEXED_KEYS = {
    **_DEEPSEEK_KEYS,
    "attention.indexer.head_count": "index_n_heads",
    "attention.indexer.key_length": "index_head_dim",
    "attention.indexer.top_k": "index_topk",
}
_DEEPSEEK_DEFAULTS = {  # what a file does not say is not there
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": False,
    "n_shared_experts": 0,
    "first_k_dense_replace": 0,
}
_Q_K_V_OF_STATES = {f"linear_attn.{part}_proj": f"self_attn.{part}_proj" for part in "qkv"}
_Q_K_V_OF_STATES |= {"linear_attn.out_proj": "self_attn.o_proj"}
_ONE_NORM = {"post_attention_layernorm": "input_layernorm"}
_LFM2_NAMES = {"token_embd_norm": "model.norm"}  # as the final norm is called, since its checkpoints say embedding_norm
_LLAMA_BIASES = {"attention_bias": _QKV_BIAS, "mlp_bias": ("ffn_down.bias",)}

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        # Also what Mistral is converted to, whose window, where it had one, is not in the file; InternLM 3, and IQuest
        # Coder.
        "llama": Architecture(
            "llama",
            where={"expert_count": {"model_type": "mixtral"}},
            rope_pairs="neighbours",
            biases=_LLAMA_BIASES,
        ),
        "mistral3": Architecture(
            "llama",
            where={"attention.temperature_scale": {"model_type": "ministral3"}},
            rope_pairs="neighbours",
            biases={"attention_bias": _QKV_BIAS},
        ),
        "granite": Architecture("granite", rope_pairs="neighbours", biases=_LLAMA_BIASES, scales_attention=True),
        "smollm3": Architecture("smollm3", rope_pairs="neighbours", biases=_LLAMA_BIASES),
        # Norms stand behind attention and MLP.
        "olmo": Architecture("olmo", rope_pairs="neighbours"),
        "olmo2": Architecture("olmo2", where={"attention.sliding_window": {"model_type": "olmo3"}}, local_rope=True),
        "qwen2": Architecture("qwen2"),  # also what MiMo is converted to
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
        "gemma-embedding": Architecture(
            "gemma3_text",
            layer_names=_NORM_BEFORE_MLP,
            norm_offset=1.0,
            divides_by_head_dim=True,
            defaults={"rope_local_base_freq": 10000.0, "use_bidirectional_attention": True},
            neutral=_TWO_WAY,
            local_rope=True,
        ),
        # Learned positions of RoBERTa are those behind padding, as if it were BERT.
        "bert": Architecture("bert", neutral=_TWO_WAY),
        "jina-bert-v2": Architecture("jina_bert_v2", layer_names=_GATE_UP, neutral=_TWO_WAY),
        "nomic-bert": Architecture("nomic_bert", neutral=_TWO_WAY),
        "jina-bert-v3": Architecture("jina_embeddings_v3", neutral=_TWO_WAY),
        "modern-bert": Architecture(
            "modernbert",
            layer_names=_GATE_UP,
            keys={"hidden_act": "hidden_act", "hidden_activation": "hidden_act"},
            neutral=_TWO_WAY,
            defaults={"rope_local_base_freq": 10000.0},
            local_rope=True,
        ),
        "eurobert": Architecture("eurobert", neutral=_TWO_WAY),
        "gemma3n": Architecture(
            "gemma3n_text",
            layer_names=_GEMMA3N,
            keys={
                "attention.shared_kv_layers": "num_kv_shared_layers",
                "embedding_length_per_layer_input": "hidden_size_per_layer_input",
                "altup.num_inputs": "altup_num_inputs",
                "altup.active_idx": "altup_active_idx",
            },
            defaults={"rope_local_base_freq": 10000.0},
            local_rope=True,
            layers="streams",
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
        "granitemoe": Architecture(
            "granitemoe",
            where={"expert_shared_feed_forward_length": {"model_type": "granitemoeshared"}},
            rope_pairs="neighbours",
            biases={"attention_bias": _QKV_BIAS},
            scales_attention=True,
        ),
        "olmoe": Architecture("olmoe"),
        "seed_oss": Architecture("seed_oss", biases=_LLAMA_BIASES),
        "arcee": Architecture("arcee", rope_pairs="neighbours", biases=_LLAMA_BIASES),
        "nemotron": Architecture("nemotron", norm_offset=1.0, biases=_LLAMA_BIASES),
        "stablelm": Architecture("stablelm", biases={"attention_bias": _QKV_BIAS}),
        "jais2": Architecture("jais2", biases=_LLAMA_BIASES),
        # Older files have no multipliers: these are of MiniCPM 1B and 2B.
        "minicpm": Architecture(
            "minicpm",
            rope_pairs="neighbours",
            where={
                "!embedding_scale": {"scale_emb": 12},
                "!residual_scale": {"scale_depth": 1.4},
                "!logit_scale": {"dim_model_base": 256},
            },
        ),
        "bailingmoe": Architecture(
            "bailing_moe",
            rope_pairs="neighbours",
            keys={**_DEEPSEEK_KEYS, "expert_weights_scale": ""},
            defaults={"first_k_dense_replace": 0, "n_shared_experts": 0, "norm_topk_prob": False},
        ),
        # Its multipliers are those of the 4B model, and no key says them.
        "minicpm3": Architecture(
            "minicpm3", layers="latent", defaults={"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}
        ),
        # Q, k and v are one behind the other. With two norms, that of attention is the second one.
        "falcon": Architecture(
            "falcon",
            biases=_LLAMA_BIASES,
            defaults={"use_parallel_residual": True, "num_ln_in_parallel_attn": 1},
            where={"tensor attn_norm_2.weight": {"num_ln_in_parallel_attn": 2}},
            layer_names={"attn_norm": "attn_norm", "attn_norm_2": "attn_norm_2"},
            renamed={"input_layernorm": ("attn_norm_2", "attn_norm"), "post_attention_layernorm": "attn_norm"},
        ),
        "mpt": Architecture("mpt", neutral={"attention.max_alibi_bias": (8.0,)}),
        # In these files matrices are [outputs, inputs], and q, k and v, where they are one, one behind the other.
        "gpt2": Architecture("gpt2"),
        "gptneox": Architecture("gpt_neox"),
        "starcoder": Architecture("gpt_bigcode"),
        "phi2": Architecture("phi"),
        "bloom": Architecture("bloom"),
        # The weights of its activation are numbers of the metadata, as they are in checkpoints.
        "apertus": Architecture(
            "apertus",
            layer_numbers={
                "xielu.alpha_n": "mlp.act_fn.alpha_n",
                "xielu.alpha_p": "mlp.act_fn.alpha_p",
                "xielu.beta": 0.5,
                "xielu.eps": -1e-6,
            },
        ),
        # MiMo V2. The window is that of the file, as llama.cpp takes it: src/models/mimo2.cpp.
        "mimo2": Architecture(
            "mimo_v2_flash",
            layers="heads",
            local_rope=True,
            keys={
                **{key: own for key, own in _DEEPSEEK_KEYS.items() if not key.startswith("leading")},
                "attention.value_scale": "attention_value_scale",
            },
            defaults={"attention_value_scale": 1.0, "first_k_dense_replace": 0, "rope_local_base_freq": 10000.0},
            neutral=_SIGMOID,
        ),
        # RoPE turns half of a head in layers without a window, which files do not say: llama.cpp's
        # src/models/step35.cpp.
        "step35": Architecture(
            "step3p5",
            layers="heads",
            local_rope=True,
            norm_offset=1.0,
            layer_names={"attn_gate": "self_attn.gate_proj"},
            keys={
                **{key: own for key, own in _DEEPSEEK_KEYS.items() if not key.startswith(("leading", "expert_group"))},
                "leading_dense_block_count": "",
                "moe_every_n_layers": "",
            },
            defaults={
                "partial_rotary_factor": 0.5,
                "swa_partial_rotary_factor": 1.0,
                "norm_topk_prob": True,
                "routed_scaling_factor": 1.0,
            },
            neutral=_SIGMOID,
        ),
        # Keys as the family has them: intermediate_size is that of experts, and of the expert of all tokens. Which
        # layers have experts is seen in their tensors. A file says nothing of the chunks of attention, or, with
        # 0, that there are none, which is refused.
        "llama4": Architecture(
            "llama4_text",
            rope_pairs="neighbours",
            keys={
                "feed_forward_length": "intermediate_size_mlp",
                "expert_feed_forward_length": "intermediate_size",
                "interleave_moe_layer_step": "",
                "attention.sliding_window": "attention_chunk_size",
            },
            neutral=_SIGMOID,
            where={"expert_count=128": {"use_qk_norm": False}},
        ),
        "mellum": Architecture("mellum", local_rope=True, defaults={"norm_topk_prob": True}),
        # YaRN stretches layers without a window alone.
        "laguna": Architecture(
            "laguna",
            layers="heads and gates",
            local_rope=True,
            layer_names={"attn_gate": "self_attn.gate_proj"},
            keys={key: own for key, own in _DEEPSEEK_KEYS.items() if not key.startswith("expert_group")},
            defaults={"sliding_window": None, "norm_topk_prob": False, "routed_scaling_factor": 1.0},
            neutral=_SIGMOID,
        ),
        "bailingmoe2": Architecture(
            "bailing_moe_v2",
            layer_names={"layer_output_norm": "shared_head.norm"},
            keys={**_DEEPSEEK_KEYS, "expert_shared_feed_forward_length": ""},
            defaults=_DEEPSEEK_DEFAULTS,
            neutral=_SIGMOID,
        ),
        "exaone-moe": Architecture(
            "exaone_moe",
            keys={**_DEEPSEEK_KEYS, "expert_shared_feed_forward_length": ""},
            defaults=_DEEPSEEK_DEFAULTS,
            neutral=_SIGMOID,
        ),
        "exaone": Architecture("exaone"),
        # A model without windows, the smaller one, says nothing of them.
        "exaone4": Architecture("exaone4", defaults={"sliding_window": None}),
        # Their base of RoPE is in the file as it is used.
        "hunyuan-dense": Architecture("hunyuan_v1_dense", biases={"attention_bias": _QKV_BIAS}),
        "hunyuan-moe": Architecture(
            "hunyuan_v1_moe",
            biases={"attention_bias": _QKV_BIAS},
            keys={"expert_shared_count": "num_shared_expert"},
        ),
        "internlm2": Architecture("internlm2", rope_pairs="neighbours", biases={"attention_bias": _QKV_BIAS}),
        "ernie4_5": Architecture("ernie4_5", rope_pairs="neighbours", biases=_LLAMA_BIASES),
        # The tensors tell which layers have experts. The key of the width of experts of all tokens does not tell it.
        "ernie4_5-moe": Architecture(
            "ernie4_5_moe",
            rope_pairs="neighbours",
            keys={
                "expert_count": "num_experts",
                "leading_dense_block_count": "",
                "interleave_moe_layer_step": "",
                "expert_shared_feed_forward_length": "",
            },
        ),
        # Also Solar Open.
        "glm4moe": Architecture(
            "glm4_moe",
            biases={"attention_bias": _QKV_BIAS, "use_qk_norm": ("attn_q_norm.weight",)},
            defaults=_DEEPSEEK_DEFAULTS,
            keys=_DEEPSEEK_KEYS,
            neutral=_SIGMOID,
        ),
        # The embedding is always scaled, and where a file says nothing each fourth layer has no window: llama.cpp's
        # src/models/afmoe.cpp.
        "afmoe": Architecture(
            "afmoe",
            layer_names={**_NORM_BEFORE_MLP, "attn_gate": "self_attn.gate_proj"},
            defaults={**_DEEPSEEK_DEFAULTS, "mup_enabled": True},
            keys=_DEEPSEEK_KEYS,
            neutral=_SIGMOID,
        ),
        "dots1": Architecture(
            "dots1",
            defaults={**_DEEPSEEK_DEFAULTS, "sliding_window": None},
            keys=_DEEPSEEK_KEYS,
            neutral=_SIGMOID,
        ),
        "minimax-m2": Architecture(
            "minimax_m2",
            keys={"expert_feed_forward_length": "intermediate_size"},
            neutral={**_SIGMOID, "expert_weights_norm": (True,)},
        ),
        # The number of blocks that a token reads is in the key top_k. Alpha and limit of the activation are those of
        # gpt-oss: llama.cpp's src/llama-graph.cpp. The tensors tell the width of the expert of all tokens.
        "minimax-m3": Architecture(
            "minimax_m3_vl_text",
            layers="blocks",
            norm_offset=1.0,
            keys={
                "expert_shared_count": "",
                "expert_weights_scale": "routed_scaling_factor",
                "attention.indexer.head_count": "index_n_heads",
                "attention.indexer.key_length": "index_head_dim",
                "attention.indexer.top_k": "index_topk_blocks",
                "attention.indexer.block_size": "index_block_size",
                "attention.indexer.local_blocks": "index_local_blocks",
            },
            neutral=_SIGMOID,
        ),
        "qwen3next": Architecture(
            "qwen3_next",
            norm_offset=1.0,
            layer_names=_STATES,
            layers="state",
            gated_q=True,
            delta_by_head=True,
            defaults={"norm_topk_prob": True},
        ),
        "qwen35": Architecture(
            "qwen3_5_text", norm_offset=1.0, layer_names=_STATES, layers="state", gated_q=True, tiled_heads=True
        ),
        "qwen35moe": Architecture(
            "qwen3_5_moe_text", norm_offset=1.0, layer_names=_STATES, layers="state", gated_q=True, tiled_heads=True
        ),
        # DeepSeek 2 and 3, Kimi K2, GLM-4.7-Flash; without experts Youtu.
        "deepseek2": Architecture(
            "youtu",
            where={
                "expert_count": {"model_type": "deepseek_v2"},
                # All that older files of GLM-4.7-Flash say of how experts are scored.
                "tensor exp_probs_b.bias": {"model_type": "deepseek_v3"},
                "expert_gating_func=1": {"model_type": "deepseek_v2"},
                "expert_gating_func=2": {"model_type": "deepseek_v3"},
            },
            layers="latent",
            defaults=_DEEPSEEK_DEFAULTS,
            keys=_DEEPSEEK_KEYS,
            neutral={"expert_gating_func": (0, 1, 2)},
        ),
        # Mistral Small 4. A file does not say how its queries grow with their position: it is what transformers takes
        # where a config.json says nothing.
        "mistral4": Architecture(
            "mistral4",
            layers="latent",
            defaults=_DEEPSEEK_DEFAULTS,
            keys=_DEEPSEEK_KEYS,
            yarn={"llama_4_scaling_beta": 0.1},
        ),
        # The q, k and v of both kinds of layers have the same names. Weights of experts are divided by their sum:
        # llama.cpp's src/models/kimi-linear.cpp.
        "kimi-linear": Architecture(
            "kimi_linear",
            layers="latent and state",
            layer_names=_KIMI,
            renamed=_Q_K_V_OF_STATES,
            keys=_DEEPSEEK_KEYS,
            defaults={**_DEEPSEEK_DEFAULTS, "norm_topk_prob": True},
            neutral=_SIGMOID,
        ),
        # Ling 3. Linears of decays and gates are whole, under the names of the first of two.
        "bailingmoe3": Architecture(
            "bailing_hybrid",
            layers="latent and state",
            layer_names={
                **_KIMI,
                "ssm_f_a": "linear_attn.f_proj",
                "ssm_g_a": "linear_attn.g_proj",
                "attn_gate": "self_attn.gate_proj",
                "layer_output_norm": "shared_head.norm",
            },
            renamed=_Q_K_V_OF_STATES,
            keys={
                **_DEEPSEEK_KEYS,
                "expert_shared_feed_forward_length": "",
                "kda.gate_lower_bound": "kda_lower_bound",
            },
            defaults={**_DEEPSEEK_DEFAULTS, "full_attention_interval": None},
            neutral={**_SIGMOID, "kda.safe_gate": (True,)},
        ),
        # DeepSeek V3.2 and GLM-5.
        "deepseek32": Architecture(
            "deepseek_v32",
            layers="latent",
            defaults=_DEEPSEEK_DEFAULTS,
            keys=_INDEXED_KEYS,
            neutral={"expert_gating_func": (2,)},
        ),
        "glm-dsa": Architecture(
            "glm_moe_dsa",
            layers="latent",
            defaults=_DEEPSEEK_DEFAULTS,
            keys=_INDEXED_KEYS,
            neutral={"expert_gating_func": (2,)},
        ),
        # Granite 4 with Mamba; without it is "granite". Files of Bamba have this name, too, and say that there is RoPE.
        "granitehybrid": Architecture(
            "granitemoehybrid",
            where={"!expert_count": {"shared_expert_intermediate_size": 0, "num_local_experts": 0}},
            neutral={"rope.scaling.finetuned": (False,)},
            rope_pairs="neighbours",
            layers="mamba",
            layer_names=_MAMBA,
            scales_attention=True,
        ),
        # The norm of a layer has one name, whatever it stands before. No RoPE turns q and k, so the order of their
        # elements, which is another than in checkpoints, is left as it is.
        "nemotron_h": Architecture("nemotron_h", layers="mamba", layer_names=_MAMBA, renamed=_ONE_NORM),
        "nemotron_h_moe": Architecture(
            "nemotron_h",
            layers="mamba",
            layer_names=_MAMBA,
            renamed=_ONE_NORM,
            keys={
                **{key: own for key, own in _DEEPSEEK_KEYS.items() if not key.startswith("leading")},
                "moe_latent_size": "moe_latent_size",
            },
            neutral=_SIGMOID,
        ),
        # The weights in a file are multiplied already.
        "falcon-h1": Architecture(
            "falcon_h1",
            where={"tensor ssm_norm.weight": {"mamba_rms_norm": True}},
            defaults={"mamba_norm_before_gate": False},
            layers="mamba",
            layer_names=_MAMBA,
        ),
        "lfm2": Architecture("lfm2", model_names=_LFM2_NAMES, layers="conv"),
        # Weights of experts are divided by their sum, and never scaled: llama.cpp's src/models/lfm2.cpp.
        "lfm2moe": Architecture(
            "lfm2_moe",
            model_names=_LFM2_NAMES,
            layers="conv",
            keys={"expert_count": "num_experts", "leading_dense_block_count": "first_k_dense_replace"},
            neutral={"expert_gating_func": (2,), "expert_weights_norm": (True,)},
        ),
        "starcoder2": Architecture("starcoder2"),
        "command-r": Architecture(
            "cohere",
            rope_pairs="neighbours",
            keys={"logit_scale": "logit_scale"},
            biases={"use_qk_norm": ("attn_q_norm.weight",)},
        ),
        "cohere2": Architecture("cohere2", rope_pairs="neighbours", keys={"logit_scale": "logit_scale"}),
        # With an epsilon of RMSNorm all norms are such. The layers before the first one with experts turn even where
        # they have no window. Where a file does not say how experts are scored, it is by a sigmoid, as in llama.cpp:
        # the published models and all that transformers saves say it, so that only files of older converters do not.
        "cohere2moe": Architecture(
            "cohere2_moe",
            rope_pairs="neighbours",
            where={"expert_gating_func=1": {"expert_selection_fn": "softmax"}},
            keys={
                "expert_count": "num_experts",
                "leading_dense_block_count": "first_k_dense_replace",
                "expert_shared_feed_forward_length": "",
                "attention.layer_norm_epsilon": "layer_norm_eps",
                "logit_scale": "logit_scale",
            },
            defaults={
                "norm_topk_prob": False,
                "n_shared_experts": 0,
                "first_k_dense_replace": 0,
                "expert_selection_fn": "sigmoid",
            },
            neutral={"expert_gating_func": (0, 1, 2)},
        ),
    }
)
"""The architectures that are read, by `general.architecture`."""

UNCLEAR: Mapping[str, str] = MappingProxyType(
    {
        "baichuan": "no key or tensor says whether lm_head counts as divided by the lengths of its rows, as in "
        "Baichuan 2, or has been divided already; nor does any say that positions come from ALiBi, as in 13B",
        "phimoe": "the file says another factor of RoPE than the model has (short_mscale, long_mscale), and llama.cpp "
        "computes other norms and another choice of experts than the model",
    }
)
"""Architectures whose family is supported, but whose files do not say all that it needs: what is missing."""
