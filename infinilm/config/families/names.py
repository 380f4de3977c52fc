"""Names of the tensors in a family's checkpoints, where they are not Llama's: a column of `FAMILIES`.

The engine calls its parameters as Llama's checkpoints do (`model.layers.0.self_attn.q_proj.weight`), and so do
`param_shapes`, `load_param`, `state_dict` and packed folders, in every family. `infinilm.checkpoint.sources` finds
them in the files by these tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from infinilm.config.fields import ModelFields
from infinilm.config.sublayers.delta import delta_spec, state_layers

__all__ = [
    "AFMOE",
    "APERTUS",
    "AX_K1",
    "BAICHUAN",
    "BAICHUAN2",
    "BAILING_HYBRID",
    "BAILING_MOE",
    "BAMBA",
    "BERT",
    "BLOOM",
    "CODEGEN",
    "COHERE2_MOE",
    "DEEPSEEK_MOE",
    "DELTA_BY_HEAD",
    "DISTILBERT",
    "ERNIE_MOE",
    "EXAONE",
    "EXAONE_MOE",
    "FALCON",
    "FALCON_H1",
    "GATED_Q",
    "GEMMA3",
    "GEMMA3N",
    "GEMMA4",
    "GLM",
    "GLM4",
    "GLM4V",
    "GLM4V_MOE",
    "GLM_OCR",
    "GPT2",
    "GPT_BIGCODE",
    "GPT_J",
    "GPT_NEOX",
    "GPT_OSS",
    "GRANITE_HYBRID",
    "GRANITE_MOE",
    "HUNYUAN",
    "HUNYUAN_MOE",
    "HYPERCLOVAX",
    "IDEFICS3",
    "INTERNLM2",
    "JINA_V2",
    "JINA_V3",
    "KIMI_K25",
    "KIMI_LINEAR",
    "LAGUNA",
    "LFM2",
    "LFM2_MOE",
    "LLAMA",
    "LLAMA4",
    "MELLUM",
    "MIMO",
    "MIMO_V2",
    "MINIMAX_M2",
    "MINIMAX_M3",
    "MISTRAL3",
    "MISTRAL_OWN",
    "MIXTRAL",
    "MODERN_BERT",
    "MPNET",
    "MPT",
    "NANOCHAT",
    "NEMOTRON_H",
    "NOMIC_BERT",
    "OF_MISTRAL_OWN",
    "OLMO_HYBRID",
    "OPT",
    "PHI",
    "PHI3",
    "PHI4_MULTIMODAL",
    "PHIMOE",
    "QWEN3_5",
    "QWEN3_5_MOE",
    "QWEN3_NEXT",
    "QWEN_MOE",
    "QWEN_VL",
    "QWEN_VL_MOE",
    "ROBERTA",
    "STARCODER2",
    "STEP",
    "VAULT_GEMMA",
    "WRAPPED",
    "ZAMBA2",
    "ByHead",
    "TensorNames",
]


@dataclass(frozen=True, slots=True)
class ByHead:
    """A tensor of a layer that has, head by head, the rows of several of the engine's modules."""

    tensor: str
    # The number of heads, and the sizes of what a head has of each module, in the order of the rows; a module may have
    # several parts. No heads: the model has no such layer.
    heads: Callable[[ModelFields], tuple[int, Mapping[str, Sequence[int]]]]


@dataclass(frozen=True, slots=True)
class TensorNames:
    """How to find the parameters of a model in its checkpoint.

    Attributes
    ----------
    prefixes : tuple of (str, str)
        What stands for `model.` and before `lm_head`: the first pair under which the files have an embedding.
    layers : str
        What stands for `layers`.
    outside : Mapping of str to str
        Other names of `embed_tokens`, `norm` and `lm_head`, which are in no layer.
    renamed : Mapping of str to str, or to several
        Other names of modules of a layer: the engine's name to that of the files. `{}` stands for the number of an
        expert, or of a layer's use of a shared block; in `joined`, too. Where there are several, the first that the
        files have counts.
    joined : Mapping of str to tuple of str
        Modules of a layer whose tensors hold the rows of several of the engine's, one behind the other: of those that
        the layer has.
    stacked : Mapping of str to tuple of str
        Tensors of a layer that may be there in place of an expert's own: a matrix for each expert, with the outputs of
        several modules one behind the other. For a vector that is the one row of a matrix, the same.
    stacked_as : str
        Outputs are the "rows" of these matrices, or their "columns", or columns where those of the modules take turns:
        "columns_in_turn".
    transposed : frozenset of str
        Modules of the files whose matrices are [inputs, outputs].
    by_head : tuple of ByHead
        Tensors whose rows stand head by head.
    unit_head : str
        The "rows" or the "columns" of lm_head count as divided by their lengths, which those of the files are not. "":
        it counts as it is.
    later_layers : bool
        There may be layers behind the last, which guess at later tokens. The first of them is the MTP head, which is
        read if it drafts; others are not.
    head_modules : bool
        All of these layers are modules of the MTP head, which draft in turn.
    reads_head : bool
        False: these layers are of other math than an MTP head of the engine, and none of them is read.
    mtp : Mapping of str to str
        Where the MTP head is, if it is not such a layer: the engine's name of a module of that layer to that of the
        files; "" to what stands before the names of all others.
    mtp_hidden_first : bool
        What the head projects is the hidden state and then the embedding; the engine has the embedding first.
    norm_of_embedding, norm_of_layer : str
        The names of the norm of the embedding, and, in families that norm sums, of the norm at the end of a layer. The
        engine has the first before layer 0, and the others before the next layer, or behind the last. "": the files
        have norms where the engine has them.
    heads : tuple of str
        Beginnings of the names of heads of other tasks, which vectors do not need.
    zero_if_absent : frozenset of str
        Vectors of layers that files may leave out: they are zeros then.
    not_read, not_read_of_layers : tuple of str
        Beginnings of the names of other parts of the model, such as a vision tower, and of modules of layers, which are
        not read.
    has_adapters : bool
        Linears may have LoRA adapters beside them, for what is no text, and their own weights are then called
        `base_layer`. The adapters are not read.
    is_text : bool
        They are of a model of text, which may lie in a wrapper (`WRAPPED`). False: a part beside it, such as a tower,
        whose names are whole.
    """

    prefixes: tuple[tuple[str, str], ...] = (("model.", ""),)
    layers: str = "layers"
    outside: Mapping[str, str] = field(default_factory=dict)
    renamed: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    stacked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    stacked_as: Literal["rows", "columns", "columns_in_turn"] = "rows"
    transposed: frozenset[str] = frozenset()
    by_head: tuple[ByHead, ...] = ()
    unit_head: Literal["", "rows", "columns"] = ""
    later_layers: bool = False
    head_modules: bool = False
    reads_head: bool = True
    mtp: Mapping[str, str] = field(default_factory=dict)
    mtp_hidden_first: bool = False
    norm_of_embedding: str = ""
    norm_of_layer: str = ""
    heads: tuple[str, ...] = ()
    zero_if_absent: frozenset[str] = frozenset()
    not_read: tuple[str, ...] = ()
    not_read_of_layers: tuple[str, ...] = ()
    has_adapters: bool = False
    is_text: bool = True


def _qkv_of_kv_head(config: ModelFields) -> tuple[int, Mapping[str, Sequence[int]]]:
    """The queries that read a head of keys, that head of keys, and its values."""
    one = config.head_dim
    queries = one * (config.num_attention_heads // config.num_key_value_heads)
    sizes = {"self_attn.q_proj": [queries], "self_attn.k_proj": [one], "self_attn.v_proj": [one]}
    return config.num_key_value_heads, sizes


def _qkv_of_head(config: ModelFields) -> tuple[int, Mapping[str, Sequence[int]]]:
    return config.num_attention_heads, {f"self_attn.{part}_proj": [config.head_dim] for part in "qkv"}


def _qvk_of_codegen(config: ModelFields) -> tuple[int, Mapping[str, Sequence[int]]]:
    """The queries of a quarter of the heads, their values, and their keys: as CodeGen was trained on four devices."""
    quarter = [config.num_attention_heads * config.head_dim // 4]
    return 4, {f"self_attn.{part}_proj": quarter for part in "qvk"}


def _q_and_gate(config: ModelFields) -> tuple[int, Mapping[str, Sequence[int]]]:
    one = [config.head_dim]
    return config.num_attention_heads, {"self_attn.q_proj": one, "self_attn.gate_proj": one}


def _qkvz_of_delta(config: ModelFields) -> tuple[int, Mapping[str, Sequence[int]]]:
    if not any(state_layers(config)):
        return 0, {}
    delta = delta_spec(config)
    v_size = delta.num_v_heads // delta.num_k_heads * delta.v_dim
    qkv = [delta.k_dim, delta.k_dim, v_size]
    return delta.num_k_heads, {"linear_attn.in_proj_qkv": qkv, "linear_attn.in_proj_z": [v_size]}


def _ba_of_delta(config: ModelFields) -> tuple[int, Mapping[str, Sequence[int]]]:
    if not any(state_layers(config)):
        return 0, {}
    delta = delta_spec(config)
    shared_by = [delta.num_v_heads // delta.num_k_heads]
    return delta.num_k_heads, {"linear_attn.in_proj_b": shared_by, "linear_attn.in_proj_a": shared_by}


GATED_Q = ByHead("self_attn.q_proj", _q_and_gate)
DELTA_BY_HEAD = (
    ByHead("linear_attn.in_proj_qkvz", _qkvz_of_delta),
    ByHead("linear_attn.in_proj_ba", _ba_of_delta),
)

_QKV: Mapping[str, tuple[str, ...]] = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
}
_GATE_UP: Mapping[str, tuple[str, ...]] = {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}

LLAMA = TensorNames()

PHI3 = TensorNames(joined={**_QKV, **_GATE_UP})

PHI4_MULTIMODAL = replace(PHI3, not_read=("model.embed_tokens_extend.",), has_adapters=True)

GLM = TensorNames(joined=_GATE_UP)

BAICHUAN = TensorNames(joined={"self_attn.W_pack": _QKV["self_attn.qkv_proj"]})

BAICHUAN2 = TensorNames(joined=BAICHUAN.joined, unit_head="rows")

EXAONE = TensorNames(
    (("transformer.", ""),),
    renamed={
        **{f"self_attn.{part}_proj": f"attn.attention.{part}_proj" for part in "qkv"},
        "self_attn.o_proj": "attn.attention.out_proj",
        "mlp.gate_proj": "mlp.c_fc_0",
        "mlp.up_proj": "mlp.c_fc_1",
        "mlp.down_proj": "mlp.c_proj",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
    },
    outside={"embed_tokens": "wte", "norm": "ln_f"},
    layers="h",
)

MIMO = TensorNames(
    mtp={
        "": "model.mtp_layers.0.",
        "enorm": "model.mtp_layers.0.token_layernorm",
        "hnorm": "model.mtp_layers.0.hidden_layernorm",
        "eh_proj": "model.mtp_layers.0.input_proj",
        "shared_head.norm": "model.mtp_layers.0.final_layernorm",
    },
    mtp_hidden_first=True,
    not_read=("model.mtp_layers.",),
)

INTERNLM2 = TensorNames(
    renamed={
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    },
    outside={"embed_tokens": "tok_embeddings", "lm_head": "output"},
    by_head=(ByHead("attention.wqkv", _qkv_of_kv_head),),
)

_QK_LAYERNORMS: Mapping[str, str] = {
    "self_attn.q_norm": "self_attn.query_layernorm",
    "self_attn.k_norm": "self_attn.key_layernorm",
}

HUNYUAN = TensorNames(renamed=_QK_LAYERNORMS)

GLM4 = TensorNames(
    joined=_GATE_UP,
    renamed={
        "post_attention_layernorm": "post_self_attn_layernorm",
        "pre_feedforward_layernorm": "post_attention_layernorm",
        "post_feedforward_layernorm": "post_mlp_layernorm",
    },
)

HYPERCLOVAX = TensorNames(
    renamed={
        "post_attention_layernorm": "post_norm1",
        "pre_feedforward_layernorm": "post_attention_layernorm",
        "post_feedforward_layernorm": "post_norm2",
    },
)

# transformers 5 has the experts of a layer in one tensor, and writes it on demand.
_STACKED: Mapping[str, tuple[str, ...]] = {
    "mlp.experts.gate_up_proj": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    "mlp.experts.down_proj": ("mlp.experts.{}.down_proj",),
}

QWEN_MOE = TensorNames(stacked=_STACKED)

# Mistral's names, and those of compressed-tensors, whose tools take stacked experts apart.
_MIXTRAL_EXPERTS: Mapping[str, tuple[str, ...]] = {
    f"mlp.experts.{{}}.{part}_proj": tuple(f"block_sparse_moe.experts.{{}}.{name}" for name in (own, f"{part}_proj"))
    for part, own in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
}

# Where experts are stacked, the module has its name of transformers 5.
MIXTRAL = TensorNames(
    renamed={"mlp.gate": ("block_sparse_moe.gate", "mlp.gate"), **_MIXTRAL_EXPERTS},
    stacked=_STACKED,
)

PHIMOE = replace(MIXTRAL, renamed={**MIXTRAL.renamed, "mlp.gate": ("block_sparse_moe.gate", "mlp.router")})

MINIMAX_M2 = TensorNames(
    renamed={
        **MIXTRAL.renamed,
        "mlp.gate.e_score_correction_bias": (
            "block_sparse_moe.e_score_correction_bias",
            "mlp.gate.e_score_correction_bias",
        ),
    },
    stacked=_STACKED,
)

_SHARED_EXPERTS: Mapping[str, str] = {
    f"mlp.shared_expert.{part}_proj": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")
}

MINIMAX_M3 = replace(
    MINIMAX_M2,
    renamed={
        **MINIMAX_M2.renamed,
        **{name: (own.replace("mlp.", "block_sparse_moe."), own) for name, own in _SHARED_EXPERTS.items()},
        **{
            f"self_attn.indexer.{part}": (f"self_attn.index_{part}", f"self_attn.indexer.{part}")
            for part in ("q_proj", "k_proj", "q_norm", "k_norm")
        },
    },
    joined=_GATE_UP,
    not_read=("mtp.", "model.mtp."),
)

DEEPSEEK_MOE = TensorNames(renamed=_SHARED_EXPERTS, stacked=_STACKED, later_layers=True)

# Published routers have no correction.
AX_K1 = replace(
    DEEPSEEK_MOE,
    renamed={**_SHARED_EXPERTS, "post_feedforward_layernorm": ("post_mlp_layernorm", "mlp.post_mlp_layernorm")},
    zero_if_absent=frozenset({"mlp.gate.e_score_correction_bias"}),
)

COHERE2_MOE = TensorNames(renamed=_SHARED_EXPERTS, stacked=_STACKED, later_layers=True, reads_head=False)

EXAONE_MOE = TensorNames(
    renamed={
        **_SHARED_EXPERTS,
        "mlp.gate.e_score_correction_bias": ("mlp.gate.e_score_correction_bias", "mlp.e_score_correction_bias"),
    },
    stacked=_STACKED,
    not_read=("mtp.",),
)

MIMO_V2 = TensorNames(
    renamed={"self_attn.sinks": ("self_attn.attention_sink_bias", "self_attn.sinks")},
    stacked=_STACKED,
    not_read=("model.mtp.",),
)

LAGUNA = TensorNames(
    renamed={
        "self_attn.gate_proj": "self_attn.g_proj",
        **{name: (name, own) for name, own in _SHARED_EXPERTS.items()},
        "mlp.gate.e_score_correction_bias": (
            "mlp.experts.e_score_correction_bias",
            "mlp.gate.e_score_correction_bias",
        ),
    },
    stacked=_STACKED,
)

# Names of the hub, and those of the modules of transformers.
STEP = TensorNames(
    renamed={
        "self_attn.gate_proj": "self_attn.g_proj",
        "mlp.gate": ("moe.gate", "mlp.gate"),
        "mlp.gate.e_score_correction_bias": ("moe.router_bias", "mlp.gate.e_score_correction_bias"),
        **{name: (name.replace("mlp.shared_expert.", "share_expert."), own) for name, own in _SHARED_EXPERTS.items()},
        "shared_head.norm": ("transformer.shared_head.norm", "shared_head.norm"),
        "shared_head.head": ("transformer.shared_head.output", "shared_head.output", "shared_head.head"),
    },
    stacked={f"moe.{part}_proj.weight": (f"mlp.experts.{{}}.{part}_proj",) for part in ("gate", "up", "down")},
    later_layers=True,
    head_modules=True,
    not_read=("vision_model.", "vit_large_projector."),
)

AFMOE = TensorNames(
    renamed={
        **_SHARED_EXPERTS,
        "pre_feedforward_layernorm": "pre_mlp_layernorm",
        "post_feedforward_layernorm": "post_mlp_layernorm",
        "mlp.gate": ("mlp.router.gate", "mlp.gate"),
        "mlp.gate.e_score_correction_bias": "mlp.expert_bias",
    },
    stacked=_STACKED,
)

MELLUM = TensorNames(stacked=_STACKED, not_read=("mtp.",))

BAILING_MOE = TensorNames(
    joined={"attention.query_key_value": _QKV["self_attn.qkv_proj"]},
    renamed={
        **_SHARED_EXPERTS,
        "self_attn.o_proj": "attention.dense",
        "self_attn.q_norm": "attention.query_layernorm",
        "self_attn.k_norm": "attention.key_layernorm",
        "mlp.gate.e_score_correction_bias": "mlp.gate.expert_bias",
        "shared_head.norm": ("final_layernorm", "shared_head.norm"),
    },
    stacked=_STACKED,
    outside={"embed_tokens": "word_embeddings"},
    later_layers=True,
)

ERNIE_MOE = TensorNames(
    renamed={
        **_SHARED_EXPERTS,
        "mlp.gate.e_score_correction_bias": "mlp.moe_statics.e_score_correction_bias",
    },
    stacked={
        **_STACKED,
        "mlp.moe_statics.e_score_correction_bias": ("mlp.gate.e_score_correction_bias",),
    },
    mtp={
        "": "model.mtp_block.0.",
        "enorm": "model.mtp_emb_norm.0",
        "hnorm": "model.mtp_hidden_norm.0",
        "eh_proj": "model.mtp_linear_proj.0",
    },
    not_read=("model.mtp_",),
)

HUNYUAN_MOE = TensorNames(
    renamed={
        **_QK_LAYERNORMS,
        "mlp.gate": "mlp.gate.wg",
        **{f"mlp.shared_expert.{part}_proj": f"mlp.shared_mlp.{part}_proj" for part in ("gate", "up", "down")},
    },
    stacked=_STACKED,
)

GPT_OSS = TensorNames(renamed={"mlp.gate": "mlp.router"}, stacked=_STACKED, stacked_as="columns_in_turn")

GRANITE_MOE = TensorNames(
    joined={"shared_mlp.input_linear": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")},
    renamed={
        "mlp.gate": "block_sparse_moe.router.layer",
        "mlp.shared_expert.down_proj": "shared_mlp.output_linear",
        **{
            name: (name, name.replace("mlp.", "block_sparse_moe."))  # in files of compressed-tensors
            for name in _MIXTRAL_EXPERTS
        },
    },
    stacked={
        "block_sparse_moe.input_linear.weight": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
        "block_sparse_moe.output_linear.weight": ("mlp.experts.{}.down_proj",),
    },
)

# Files of this family have the names that the modules have in transformers.
GRANITE_MOE_SWA = replace(
    GRANITE_MOE,
    renamed={**GRANITE_MOE.renamed, "mlp.gate": "block_sparse_moe.router"},
    stacked={name.replace("mlp.", "block_sparse_moe."): parts for name, parts in _STACKED.items()},
)

# What is the expert of all tokens is an MLP in models without experts.
GRANITE_HYBRID = TensorNames(
    joined={
        "shared_mlp.input_linear": (
            *("mlp.gate_proj", "mlp.up_proj"),
            *("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        )
    },
    renamed={**GRANITE_MOE.renamed, "mlp.down_proj": "shared_mlp.output_linear"},
    stacked=GRANITE_MOE.stacked,
)

# The layers with a state, whose modules are called as those of attention are, and experts as Mixtral calls them.
KIMI_LINEAR = TensorNames(
    renamed={
        **{
            f"linear_attn.{name}": f"self_attn.{name}"
            for name in (
                *("q_proj", "k_proj", "v_proj", "q_conv1d", "k_conv1d", "v_conv1d"),
                *("f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj", "b_proj", "A_log", "dt_bias"),
            )
        },
        "linear_attn.norm": "self_attn.o_norm",
        "linear_attn.out_proj": "self_attn.o_proj",
        **MIXTRAL.renamed,
        "mlp.gate.e_score_correction_bias": (
            "block_sparse_moe.gate.e_score_correction_bias",
            "mlp.gate.e_score_correction_bias",
        ),
        **{name: (own.replace("mlp.", "block_sparse_moe."), own) for name, own in _SHARED_EXPERTS.items()},
        # transformers saves the MLP of layers without experts under the name of experts.
        **{
            f"mlp.{part}_proj": (f"mlp.{part}_proj", f"block_sparse_moe.{part}_proj") for part in ("gate", "up", "down")
        },
    },
    stacked=_STACKED,
)

# Names of the hub, and those that transformers writes.
BAILING_HYBRID = replace(
    BAILING_MOE,
    joined={},
    renamed={
        **{
            f"{mixer}.{name}": (f"attention.{own}", f"self_attn.{own}")
            for mixer, modules in (
                (
                    "linear_attn",
                    {name: name for name in ("q_proj", "k_proj", "v_proj", "q_conv1d", "k_conv1d", "v_conv1d")}
                    | {name: name for name in ("f_proj", "g_proj", "b_proj", "A_log", "dt_bias")}
                    | {"norm": "o_norm"},
                ),
                (
                    "self_attn",
                    {name: name for name in ("q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj")}
                    | {name: name for name in ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")}
                    | {"gate_proj": "g_proj"},
                ),
            )
            for name, own in modules.items()
        },
        "linear_attn.out_proj": ("attention.dense", "self_attn.o_proj"),
        "self_attn.o_proj": ("attention.dense", "self_attn.o_proj"),
        **_SHARED_EXPERTS,
        "mlp.gate.e_score_correction_bias": "mlp.gate.expert_bias",
        "shared_head.norm": BAILING_MOE.renamed["shared_head.norm"],
    },
)

OLMO_HYBRID = TensorNames(
    renamed={
        "linear_attn.f_proj": "linear_attn.a_proj",
        "linear_attn.norm": "linear_attn.o_norm",
        "linear_attn.out_proj": "linear_attn.o_proj",
        "input_layernorm": ("attention_layer_norm", "input_layernorm"),
        "post_attention_layernorm": ("feedforward_layer_norm", "post_attention_layernorm"),
    },
)

_FEED_FORWARD = {f"mlp.{part}_proj": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")}

FALCON_H1 = TensorNames(
    renamed={**_FEED_FORWARD, "post_attention_layernorm": "pre_ff_layernorm"},
    outside={"norm": "final_layernorm"},
    not_read=("mup_vector",),
)

BAMBA = TensorNames(
    renamed={**_FEED_FORWARD, "post_attention_layernorm": "pre_ff_layernorm"}, outside={"norm": "final_layernorm"}
)

# Modules of a layer that also uses a shared block lie one level deeper, and what layers add to the linears of a block
# is among those of the first layer that uses it, numbered by the layers that use any.
_OF_BLOCK = "shared_transformer."
ZAMBA2 = TensorNames(
    outside={"norm": "final_layernorm"},
    renamed={
        **{
            name: (name, f"mamba_decoder.{name}")
            for name in (
                "input_layernorm",
                *(f"mamba.{own}" for own in ("in_proj", "conv1d", "A_log", "D", "dt_bias", "norm", "out_proj")),
            )
        },
        "block_proj": "linear",
        **{f"shared_block.self_attn.{part}_proj": f"{_OF_BLOCK}self_attn.{part}_proj" for part in "qkvo"},
        "shared_block.input_layernorm": f"{_OF_BLOCK}input_layernorm",
        "shared_block.post_attention_layernorm": f"{_OF_BLOCK}pre_ff_layernorm",
        "shared_block.mlp.down_proj": f"{_OF_BLOCK}feed_forward.down_proj",
        **{
            f"shared_block.adapters.{{}}.{part}_{own}": f"{_OF_BLOCK}self_attn.linear_{part}_adapter_list.{{}}.{number}"
            for part in "qkv"
            for number, own in enumerate(("down", "up"))
        },
        "shared_block.adapters.{}.mlp_down": f"{_OF_BLOCK}feed_forward.gate_up_proj_adapter_list.{{}}.0",
    },
    joined={
        f"{_OF_BLOCK}feed_forward.gate_up_proj": ("shared_block.mlp.gate_proj", "shared_block.mlp.up_proj"),
        f"{_OF_BLOCK}feed_forward.gate_up_proj_adapter_list.{{}}.1": (
            "shared_block.adapters.{}.mlp_gate",
            "shared_block.adapters.{}.mlp_up",
        ),
    },
)

_NEMOTRON_H_MODULES: Mapping[str, tuple[str, ...]] = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mamba": ("in_proj", "conv1d", "A_log", "D", "dt_bias", "norm", "out_proj"),
    "mlp": (
        "up_proj",
        "down_proj",
        "gate",
        "gate.e_score_correction_bias",
        "experts.{}.up_proj",
        "experts.{}.down_proj",
    ),
}
NEMOTRON_H = TensorNames(
    (("model.", ""), ("backbone.", "")),
    outside={"embed_tokens": "embeddings", "norm": "norm_f"},
    renamed={
        "input_layernorm": "norm",
        "post_attention_layernorm": "norm",
        **{f"{room}.{name}": f"mixer.{name}" for room, names in _NEMOTRON_H_MODULES.items() for name in names},
        **{f"mlp.shared_expert.{part}_proj": f"mixer.shared_experts.{part}_proj" for part in ("up", "down")},
        **{f"mlp.fc{number}_latent_proj": f"mixer.fc{number}_latent_proj" for number in (1, 2)},
    },
    stacked={f"mixer.experts.{part}_proj": (f"mlp.experts.{{}}.{part}_proj",) for part in ("up", "down")},
    not_read=("mtp.",),
)

LFM2 = TensorNames(
    renamed={
        "self_attn.o_proj": "self_attn.out_proj",
        "self_attn.q_norm": "self_attn.q_layernorm",
        "self_attn.k_norm": "self_attn.k_layernorm",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "input_layernorm": "operator_norm",
        "post_attention_layernorm": "ffn_norm",
    },
    outside={"norm": "embedding_norm"},
)

LFM2_MOE = TensorNames(
    renamed={
        **LFM2.renamed,
        "mlp.gate": "feed_forward.gate",
        "mlp.gate.e_score_correction_bias": "feed_forward.expert_bias",
        **{
            f"mlp.experts.{{}}.{part}_proj": f"feed_forward.experts.{{}}.{own}"
            for part, own in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
        },
    },
    stacked={f"feed_forward.{name.removeprefix('mlp.')}": parts for name, parts in _STACKED.items()},
    outside=LFM2.outside,
)

_BERT_RENAMED = {
    **{f"self_attn.{part[0]}_proj": f"attention.self.{part}" for part in ("query", "key", "value")},
    "self_attn.o_proj": "attention.output.dense",
    "post_attention_layernorm": "attention.output.LayerNorm",
    "mlp.up_proj": "intermediate.dense",
    "mlp.down_proj": "output.dense",
}
_BERT_OUTSIDE = {
    "embed_tokens": "embeddings.word_embeddings",
    "embed_positions": "embeddings.position_embeddings",
    "embed_token_types": "embeddings.token_type_embeddings",
}

BERT = TensorNames(
    (("bert.", ""),),
    layers="encoder.layer",
    outside=_BERT_OUTSIDE,
    renamed=_BERT_RENAMED,
    norm_of_embedding="embeddings.LayerNorm",
    norm_of_layer="output.LayerNorm",
    heads=("pooler.", "bert.pooler.", "cls."),
)

ROBERTA = replace(BERT, prefixes=(("roberta.", ""),), heads=("pooler.", "roberta.pooler.", "lm_head."))

MPNET = replace(
    BERT,
    prefixes=(("mpnet.", ""),),
    outside={**_BERT_OUTSIDE, "relative_attention_bias": "encoder.relative_attention_bias"},
    renamed={
        **_BERT_RENAMED,
        **{f"self_attn.{part}_proj": f"attention.attn.{part}" for part in "qkvo"},
        "post_attention_layernorm": "attention.LayerNorm",
    },
    heads=("pooler.", "mpnet.pooler.", "lm_head."),
)

JINA_V2 = replace(
    BERT,
    joined={"mlp.gated_layers": _GATE_UP["mlp.gate_up_proj"]},
    renamed={**_BERT_RENAMED, "mlp.down_proj": "mlp.wo"},
    norm_of_layer="mlp.layernorm",
)

# As Mistral AI's own tools have them in consolidated.safetensors; RoPE turns neighbours there. In latent attention and
# experts, names are those of Mistral Large 3 (vLLM's mistral_large_3.py). A router
# and experts may have two names, the first of which are those of Mixtral 8x22B.
MISTRAL_OWN = TensorNames(
    (("", ""),),
    outside={"embed_tokens": "tok_embeddings", "lm_head": "output"},
    renamed={
        **{f"self_attn.{part}_proj": f"attention.w{part}" for part in ("q", "k", "v", "o")},
        **{f"self_attn.{part}_proj": f"attention.w{part}" for part in ("q_a", "q_b", "kv_b")},
        "self_attn.kv_a_proj_with_mqa": "attention.wkv_a_with_mqa",
        "self_attn.q_a_layernorm": "attention.q_a_norm",
        "self_attn.kv_a_layernorm": "attention.kv_a_norm",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate": ("feed_forward.gate", "gate"),
        **{
            name.format(part): tuple(other.format(own) for other in others)
            for part, own in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
            for name, others in (
                ("mlp.{}_proj", ("feed_forward.{}",)),
                ("mlp.experts.{{}}.{}_proj", ("feed_forward.experts.{{}}.{}", "experts.{{}}.{}")),
                ("mlp.shared_expert.{}_proj", ("shared_experts.{}",)),
            )
        },
    },
    not_read=("vision_encoder.", "vision_language_adapter.", "patch_merger.", "pre_mm_projector_norm."),
)
OF_MISTRAL_OWN = frozenset({"tok_embeddings.weight", "layers.0.attention_norm.weight"})
"""Tensors by which files in that layout are known."""

DISTILBERT = TensorNames(
    (("distilbert.", ""),),
    layers="transformer.layer",
    outside=_BERT_OUTSIDE,
    renamed={
        **{f"self_attn.{part}_proj": f"attention.{part}_lin" for part in "qkv"},
        "self_attn.o_proj": "attention.out_lin",
        "post_attention_layernorm": "sa_layer_norm",
        "mlp.up_proj": "ffn.lin1",
        "mlp.down_proj": "ffn.lin2",
    },
    norm_of_embedding=BERT.norm_of_embedding,
    norm_of_layer="output_layer_norm",
    heads=("vocab_",),
)

NOMIC_BERT = TensorNames(
    (("nomic_bert.", ""), ("bert.", "")),
    layers="encoder.layers",
    outside=_BERT_OUTSIDE,
    joined={"attn.Wqkv": _QKV["self_attn.qkv_proj"]},
    renamed={
        "self_attn.o_proj": "attn.out_proj",
        "mlp.up_proj": "mlp.fc11",
        "mlp.gate_proj": "mlp.fc12",
        "mlp.down_proj": "mlp.fc2",
        "post_attention_layernorm": "norm1",
    },
    norm_of_embedding="emb_ln",
    norm_of_layer="norm2",
    heads=("pooler.", "nomic_bert.pooler.", "bert.pooler.", "cls."),
)

JINA_V3 = replace(
    NOMIC_BERT,
    prefixes=(("roberta.", ""),),
    joined={"mixer.Wqkv": _QKV["self_attn.qkv_proj"]},
    renamed={**NOMIC_BERT.renamed, "self_attn.o_proj": "mixer.out_proj", "mlp.up_proj": "mlp.fc1"},
    heads=ROBERTA.heads,
)

MODERN_BERT = TensorNames(
    outside={"embed_tokens": "embeddings.tok_embeddings", "norm": "final_norm"},
    joined={
        "attn.Wqkv": _QKV["self_attn.qkv_proj"],
        "mlp.Wi": _GATE_UP["mlp.gate_up_proj"],
    },
    renamed={
        "self_attn.o_proj": "attn.Wo",
        "mlp.down_proj": "mlp.Wo",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "mlp_norm",
    },
    norm_of_embedding="embeddings.norm",
    heads=("head.", "decoder.", "classifier."),
)

STARCODER2 = TensorNames(renamed={"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"})

GPT_BIGCODE = TensorNames(
    (("transformer.", ""),),
    layers="h",
    outside={"embed_tokens": "wte", "embed_positions": "wpe", "norm": "ln_f"},
    joined={"attn.c_attn": _QKV["self_attn.qkv_proj"]},
    renamed={
        **STARCODER2.renamed,
        "self_attn.o_proj": "attn.c_proj",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
    },
)

GPT2 = replace(GPT_BIGCODE, transposed=frozenset({"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}))

PHI = TensorNames(
    outside={"norm": "final_layernorm"},
    renamed={"self_attn.o_proj": "self_attn.dense", "mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"},
)

NANOCHAT = TensorNames(renamed={"mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"})

GPT_NEOX = TensorNames(
    (("gpt_neox.", ""),),
    outside={"embed_tokens": "embed_in", "norm": "final_layer_norm", "lm_head": "embed_out"},
    renamed={
        "self_attn.o_proj": "attention.dense",
        "mlp.up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    },
    by_head=(ByHead("attention.query_key_value", _qkv_of_head),),
)

GPT_J = TensorNames(
    GPT_BIGCODE.prefixes,
    layers="h",
    outside={"embed_tokens": "wte", "norm": "ln_f"},
    renamed={
        **{f"self_attn.{part}_proj": f"attn.{part}_proj" for part in "qkv"},
        "self_attn.o_proj": "attn.out_proj",
        "mlp.up_proj": "mlp.fc_in",
        "mlp.down_proj": "mlp.fc_out",
        "input_layernorm": "ln_1",
    },
)

CODEGEN = replace(GPT_J, by_head=(ByHead("attn.qkv_proj", _qvk_of_codegen),))

OPT = TensorNames(
    (("model.decoder.", ""), ("decoder.", "")),
    outside={"norm": "final_layer_norm"},
    renamed={
        "self_attn.o_proj": "self_attn.out_proj",
        "mlp.up_proj": "fc1",
        "mlp.down_proj": "fc2",
        "input_layernorm": "self_attn_layer_norm",
        "post_attention_layernorm": "final_layer_norm",
    },
)

# The first names of norms are those of models that have two for attention and MLP side by side.
FALCON = TensorNames(
    GPT_BIGCODE.prefixes,
    layers="h",
    outside={"embed_tokens": "word_embeddings", "norm": "ln_f"},
    renamed={
        "self_attn.o_proj": "self_attention.dense",
        "mlp.up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
        "input_layernorm": ("ln_attn", "input_layernorm"),
        "post_attention_layernorm": ("ln_mlp", "post_attention_layernorm"),
    },
    by_head=(ByHead("self_attention.query_key_value", _qkv_of_kv_head),),
)

BLOOM = TensorNames(
    (("transformer.", ""), ("", "")),
    layers="h",
    outside={"embed_tokens": "word_embeddings", "embed_norm": "word_embeddings_layernorm", "norm": "ln_f"},
    renamed={name: own for name, own in FALCON.renamed.items() if name.startswith(("self_attn.", "mlp."))},
    by_head=(ByHead("self_attention.query_key_value", _qkv_of_head),),
)

MPT = TensorNames(
    GPT_BIGCODE.prefixes,
    layers="blocks",
    outside={"embed_tokens": "wte", "norm": "norm_f"},
    joined={"attn.Wqkv": _QKV["self_attn.qkv_proj"]},
    renamed={
        "self_attn.o_proj": "attn.out_proj",
        "mlp.up_proj": "ffn.up_proj",
        "mlp.down_proj": "ffn.down_proj",
        "input_layernorm": "norm_1",
        "post_attention_layernorm": "norm_2",
    },
)

APERTUS = TensorNames(
    renamed={"input_layernorm": "attention_layernorm", "post_attention_layernorm": "feedforward_layernorm"}
)

# VaultGemma calls the norm before the MLP what Gemma 2 calls it.
VAULT_GEMMA = TensorNames(renamed={"post_attention_layernorm": "pre_feedforward_layernorm"})

# transformers has moved the text part around: `model.` is oldest for Qwen, `language_model.model.` for Mistral.
_TEXT_PREFIXES = (("model.language_model.", ""), ("language_model.model.", "language_model."), ("model.", ""))

# Where the text part of a wrapper around any family is (`json/wrappers.py`). What is not below is another part.
WRAPPED = (
    ("model.language_model.model.", "model.language_model."),  # of HyperCLOVA X, as published
    *_TEXT_PREFIXES[:2],
    ("model.text_model.", ""),
    ("language_model.backbone.", "language_model."),  # of Nemotron-H
)

_VISUAL = ("visual.", "model.visual.")

QWEN_VL = TensorNames(_TEXT_PREFIXES, not_read=_VISUAL)

QWEN_VL_MOE = TensorNames(_TEXT_PREFIXES, stacked=_STACKED, stacked_as="columns", not_read=_VISUAL)

GLM4V = TensorNames(_TEXT_PREFIXES, renamed=GLM4.renamed, joined=GLM4.joined, not_read=_VISUAL)

GLM_OCR = replace(GLM4V, later_layers=True)

GLM4V_MOE = replace(DEEPSEEK_MOE, prefixes=_TEXT_PREFIXES, not_read=_VISUAL)

IDEFICS3 = TensorNames((("model.text_model.", ""),), not_read=("model.vision_model.", "model.connector."))

_VISION_TOWER = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)

LLAMA4 = TensorNames(
    _TEXT_PREFIXES,
    renamed={
        "mlp.gate": "feed_forward.router",
        **{
            f"mlp.{module}{part}_proj": f"feed_forward.{module}{part}_proj"
            for module in ("", "shared_expert.", "experts.{}.")
            for part in ("gate", "up", "down")
        },
    },
    stacked={f"feed_forward.{name.removeprefix('mlp.')}": parts for name, parts in _STACKED.items()},
    stacked_as="columns",
    not_read=("vision_model.", "multi_modal_projector.", "model.vision_model.", "model.multi_modal_projector."),
)

MISTRAL3 = TensorNames(_TEXT_PREFIXES, not_read=_VISION_TOWER)

GEMMA3 = TensorNames(_TEXT_PREFIXES, not_read=_VISION_TOWER)

KIMI_K25 = TensorNames(
    _TEXT_PREFIXES,
    renamed=DEEPSEEK_MOE.renamed,
    stacked=DEEPSEEK_MOE.stacked,
    later_layers=True,
    not_read=(*_VISION_TOWER, "mm_projector.", "model.mm_projector."),
)

_TOWERS_OF_GEMMA = (
    *_VISION_TOWER,
    "model.embed_vision.",
    "model.vision_embedder.",
    "model.audio_tower.",
    "model.embed_audio.",
)

GEMMA3N = TensorNames(
    _TEXT_PREFIXES, renamed={"post_laurel_norm": "laurel.post_laurel_norm"}, not_read=_TOWERS_OF_GEMMA
)

GEMMA4 = TensorNames(
    _TEXT_PREFIXES,
    renamed={
        "mlp.gate": "router.proj",
        "mlp.gate.scale": "router.scale",
        "mlp.gate.per_expert_scale": "router.per_expert_scale",
    },
    stacked={name.removeprefix("mlp."): parts for name, parts in _STACKED.items()},
    not_read=_TOWERS_OF_GEMMA,
)

_PREDICTION = ("mtp.",)  # extra layers that predict several tokens at once, read if they draft
_MTP: Mapping[str, str] = {
    "": "mtp.layers.0.",
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "eh_proj": "mtp.fc",
    "shared_head.norm": "mtp.norm",
}

QWEN3_NEXT = TensorNames(stacked=_STACKED, by_head=(GATED_Q, *DELTA_BY_HEAD), mtp=_MTP, not_read=_PREDICTION)

QWEN3_5 = TensorNames(_TEXT_PREFIXES, by_head=(GATED_Q,), mtp=_MTP, not_read=(*_VISUAL, *_PREDICTION))

QWEN3_5_MOE = TensorNames(
    _TEXT_PREFIXES, stacked=_STACKED, by_head=(GATED_Q,), mtp=_MTP, not_read=(*_VISUAL, *_PREDICTION)
)
