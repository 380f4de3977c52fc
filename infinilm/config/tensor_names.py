"""What the tensors of a family's checkpoints are called, where that is not as in Llama: a column of `FAMILIES`.

The engine calls its parameters as Llama's checkpoints do (`model.layers.0.self_attn.q_proj.weight`), and so do
`param_shapes`, `load_param`, `state_dict` and packed folders, in every family. `infinilm.checkpoint.sources` finds
them in the files by these tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = [
    "BAICHUAN",
    "BAICHUAN2",
    "DEEPSEEK_MOE",
    "ERNIE_MOE",
    "EXAONE",
    "GEMMA3",
    "GEMMA4",
    "GLM",
    "GLM4",
    "GLM4V",
    "GPT_OSS",
    "GRANITE_HYBRID",
    "GRANITE_MOE",
    "HUNYUAN",
    "HUNYUAN_MOE",
    "IDEFICS3",
    "INTERNLM2",
    "KIMI_K25",
    "LLAMA",
    "LLAMA4",
    "MIMO",
    "MINIMAX_M2",
    "MISTRAL3",
    "MIXTRAL",
    "PHI3",
    "QWEN3_5",
    "QWEN3_5_MOE",
    "QWEN3_NEXT",
    "QWEN_MOE",
    "QWEN_VL",
    "QWEN_VL_MOE",
    "STARCODER2",
    "TensorNames",
]


@dataclass(frozen=True, slots=True)
class TensorNames:
    """How to find the parameters of a model in its checkpoint.

    Attributes
    ----------
    prefixes : tuple of (str, str)
        What stands for `model.` and before `lm_head`: the first pair under which the files have an embedding.
    renamed : Mapping of str to str
        Modules of a layer: the engine's name to that of the checkpoint. `{}` stands for the number of an expert.
    also_renamed : Mapping of str to str
        Other names of such modules, which count where the files have them: the tools of compressed-tensors take stacked
        experts apart, and call the parts otherwise than older files do.
    outside : Mapping of str to str
        The same as `renamed` of `embed_tokens`, `norm` and `lm_head`, which are in no layer.
    layers : str
        What stands for `layers`.
    unit_head : bool
        The rows of lm_head count as divided by their lengths, which those of the files are not.
    joined : Mapping of str to tuple of str
        Modules of a layer whose tensors hold the rows of several of the engine's, one behind the other.
    stacked : Mapping of str to tuple of str
        Tensors of a layer that may be there in place of an expert's own: a matrix for each expert, with the rows of
        several modules one behind the other. For a vector that is the one row of a matrix, the same.
    stacked_columns, stacked_in_turn : bool
        The matrices of `stacked` are [in_features, out_features]; outputs of several modules take turns.
    qkv_by_head : str
        A tensor that has, key head by key head, the rows of q, k and v; empty: there is none.
    gated_q : bool
        The rows of q_proj are, head by head, those of q and those of the gate of what attention gives.
    delta_by_head : bool
        Two tensors have the inputs of the delta rule, key head by key head: q, k, v and z, and b and a.
    stacked_renamed : bool
        `renamed` holds in a layer with stacked tensors, too.
    later_layers : bool
        There may be layers behind the last, which guess at later tokens and are not read.
    not_read : tuple of str
        Beginnings of the names of what is not part of the text model, such as a vision tower.
    """

    prefixes: tuple[tuple[str, str], ...] = (("model.", ""),)
    renamed: Mapping[str, str] = field(default_factory=dict)
    also_renamed: Mapping[str, str] = field(default_factory=dict)
    outside: Mapping[str, str] = field(default_factory=dict)
    layers: str = "layers"
    unit_head: bool = False
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    stacked: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    stacked_columns: bool = False
    stacked_in_turn: bool = False
    qkv_by_head: str = ""
    gated_q: bool = False
    delta_by_head: bool = False
    stacked_renamed: bool = True
    later_layers: bool = False
    not_read: tuple[str, ...] = ()


_QKV: Mapping[str, tuple[str, ...]] = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
}
_GATE_UP: Mapping[str, tuple[str, ...]] = {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}

LLAMA = TensorNames()

PHI3 = TensorNames(joined={**_QKV, **_GATE_UP})

GLM = TensorNames(joined=_GATE_UP)

BAICHUAN = TensorNames(joined={"self_attn.W_pack": _QKV["self_attn.qkv_proj"]})

BAICHUAN2 = TensorNames(joined=BAICHUAN.joined, unit_head=True)

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

MIMO = TensorNames(not_read=("model.mtp_layers.",))

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
    qkv_by_head="attention.wqkv",
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

# transformers 5 has the experts of a layer in one tensor, and writes it on demand.
_STACKED: Mapping[str, tuple[str, ...]] = {
    "mlp.experts.gate_up_proj": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    "mlp.experts.down_proj": ("mlp.experts.{}.down_proj",),
}

QWEN_MOE = TensorNames(stacked=_STACKED)

_OF_TOOLS: Mapping[str, str] = {
    f"mlp.experts.{{}}.{part}_proj": f"block_sparse_moe.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")
}

MIXTRAL = TensorNames(
    renamed={
        "mlp.gate": "block_sparse_moe.gate",
        "mlp.experts.{}.gate_proj": "block_sparse_moe.experts.{}.w1",
        "mlp.experts.{}.up_proj": "block_sparse_moe.experts.{}.w3",
        "mlp.experts.{}.down_proj": "block_sparse_moe.experts.{}.w2",
    },
    also_renamed=_OF_TOOLS,
    stacked=_STACKED,
    stacked_renamed=False,
)

MINIMAX_M2 = TensorNames(
    renamed={
        **MIXTRAL.renamed,
        "mlp.gate.e_score_correction_bias": "block_sparse_moe.e_score_correction_bias",
    },
    also_renamed=_OF_TOOLS,
    stacked=_STACKED,
    stacked_renamed=False,
)

_SHARED_EXPERTS: Mapping[str, str] = {
    f"mlp.shared_expert.{part}_proj": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")
}

DEEPSEEK_MOE = TensorNames(renamed=_SHARED_EXPERTS, stacked=_STACKED, later_layers=True)

ERNIE_MOE = TensorNames(
    renamed={
        **_SHARED_EXPERTS,
        "mlp.gate.e_score_correction_bias": "mlp.moe_statics.e_score_correction_bias",
    },
    stacked={
        **_STACKED,
        "mlp.moe_statics.e_score_correction_bias": ("mlp.gate.e_score_correction_bias",),
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

GPT_OSS = TensorNames(renamed={"mlp.gate": "mlp.router"}, stacked=_STACKED, stacked_columns=True, stacked_in_turn=True)

GRANITE_HYBRID = TensorNames(
    joined={"shared_mlp.input_linear": ("mlp.gate_proj", "mlp.up_proj")},
    renamed={"mlp.down_proj": "shared_mlp.output_linear"},
)

GRANITE_MOE = TensorNames(
    joined={"shared_mlp.input_linear": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")},
    renamed={"mlp.gate": "block_sparse_moe.router.layer", "mlp.shared_expert.down_proj": "shared_mlp.output_linear"},
    also_renamed=_OF_TOOLS,
    stacked={
        "block_sparse_moe.input_linear.weight": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
        "block_sparse_moe.output_linear.weight": ("mlp.experts.{}.down_proj",),
    },
)

STARCODER2 = TensorNames(renamed={"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"})

# transformers has moved the text part around: `model.` is oldest for Qwen, `language_model.model.` for Mistral.
_TEXT_PREFIXES = (("model.language_model.", ""), ("language_model.model.", "language_model."), ("model.", ""))

_VISUAL = ("visual.", "model.visual.")

QWEN_VL = TensorNames(_TEXT_PREFIXES, not_read=_VISUAL)

QWEN_VL_MOE = TensorNames(_TEXT_PREFIXES, stacked=_STACKED, stacked_columns=True, not_read=_VISUAL)

GLM4V = TensorNames(_TEXT_PREFIXES, renamed=GLM4.renamed, joined=GLM4.joined, not_read=_VISUAL)

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
    stacked_columns=True,
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

GEMMA4 = TensorNames(
    _TEXT_PREFIXES,
    renamed={
        "mlp.gate": "router.proj",
        "mlp.gate.scale": "router.scale",
        "mlp.gate.per_expert_scale": "router.per_expert_scale",
    },
    stacked={name.removeprefix("mlp."): parts for name, parts in _STACKED.items()},
    not_read=(
        *_VISION_TOWER,
        "model.embed_vision.",
        "model.vision_embedder.",
        "model.audio_tower.",
        "model.embed_audio.",
    ),
)

_PREDICTION = ("mtp.",)  # of several tokens at once, by layers of its own

QWEN3_NEXT = TensorNames(stacked=_STACKED, gated_q=True, delta_by_head=True, not_read=_PREDICTION)

QWEN3_5 = TensorNames(_TEXT_PREFIXES, gated_q=True, not_read=(*_VISUAL, *_PREDICTION))

QWEN3_5_MOE = TensorNames(_TEXT_PREFIXES, stacked=_STACKED, gated_q=True, not_read=(*_VISUAL, *_PREDICTION))
