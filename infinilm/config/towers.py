"""Towers: encoders of images, whose rows stand for tokens of a text. A table, as `families` is for texts.

A tower is a list of encoder layers like any other, so its math is a `ModelSpec` with a `TowerSpec`, and its weights
are found by `TensorNames`. What differs between towers is a row of `TOWERS`: which keys of config.json say the sizes,
how positions are told, what is normed how, what becomes of neighbouring patches, and what the model of texts takes.

Sources of these facts: modeling_qwen2_vl.py, modeling_qwen2_5_vl.py, modeling_qwen3_vl.py, modeling_glm4v.py,
modeling_gemma4.py, modeling_gemma3.py, modeling_siglip.py, modeling_mistral3.py, modeling_pixtral.py and
modeling_idefics3.py of transformers 5.24.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from infinilm._core import AttentionSpec, LayerSpec, MergerLinear, MlpSpec, ModelSpec, RopeSpec, TowerSpec
from infinilm.checks import as_integer
from infinilm.config.families.names import TensorNames
from infinilm.config.spec import ACTIVATIONS, GivenEmbeddings
from infinilm.config.sublayers.layer_shapes import LayerShape
from infinilm.errors import ConfigError

__all__ = ["KEPT_ROWS_BYTES", "TOWERS", "Linear", "TowerConfig", "TowerFamily", "TowerPlace"]

KEPT_ROWS_BYTES = 256 << 20
"""Bytes of rows of pictures that are kept in host memory, so that a picture that comes again costs no tower."""

_ROPE_THETA = 10000.0


class Linear(NamedTuple):
    """One of the linears that make a row of neighbouring patches: see `MergerLinear`."""

    # Outputs: all numbers of the patches, those of one, those of a row, or those that `merger_size` says.
    size: Literal["merged", "hidden", "out", "inner"]
    bias: bool | str = True  # a str: a key of config.json says it
    activated: bool = False
    gated: bool = False  # by the activation of the layers
    norm_eps: float = 0


class TowerPlace(NamedTuple):
    """What stands before the names of a tower's tensors in some files, and before those of its merger."""

    tower: str
    merger: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerFamily:
    """One row of the table.

    Attributes
    ----------
    keys : mapping of str to str
        Keys of `vision_config`, by the field of `TowerConfig` that each says.
    outer_keys : mapping of str to str or tuple of str
        The same of config.json itself, or of its `text_config` where there is a dot; the first of several counts.
    defaults : mapping of str to value
        Values of fields whose keys are left out. One without a key has no other.
    fixed_keys : mapping of str to tuple of values
        Keys of config.json, or of its part before a dot, that are computed with these values alone.
    places : tuple of TowerPlace
        What the names of its tensors begin with: the first that the files use.
    names : TensorNames
        Behind that. In `outside`, `{tower}` and `{merger}` stand for it.
    level_names : mapping of str to str
        Names of the modules that merge a level, `{}` being its number, by the engine's.
    norm : str
        The kind of its norms.
    merger : tuple of Linear
        What makes a row of neighbouring patches.
    merges_by_channel : bool
        The first of these linears reads the numbers of the patches channel by channel, and not patch by patch.
    merger_matrix : str
        The name of a tensor that is the weight of the first of these linears, transposed. "": there is none.
    merger_activation : str
        What is behind those of these linears that are activated, where no key says it.
    pooled, pooled_norm_weight, pooled_norm_offset
        See `TowerSpec`.
    pooled_by_root : bool
        The mean is multiplied by the root of hidden_size.
    final_norm : bool
        There is a norm behind the layers.
    positions : str
        Learned positions: a square table that is stretched bilinearly to a picture's patches, or bicubically ("cubic");
        one whose rows are those of its patches; one whose rows are those that a patch lies over in a square picture;
        one of columns and one of rows, which are added ("axes"); or none.
    rope : str
        Which frequencies turn by the row of a patch, and which by its column: each axis has all of half as many
        ("halves"), or every second one ("turns"); or none turns. "quarters": as halves, but columns come first, and
        either axis turns neighbouring quarters of a head.
    qk_norm, v_norm, softmax_scale, post_norms
        See `AttentionSpec` and `ModelSpec`. A scale of 0 is the usual one.
    gated, bias, patch_bias, patch_norm : bool
        Whether the MLP has a gate, linears of layers a bias, and what embeds patches a bias and a norm behind it.
    norm_first : bool
        Positions are added behind this norm, and not before it.
    channels_last : bool
        What embeds patches reads their numbers by row, column and channel, and not channel by channel.
    position_table : str
        The name of the tensor of positions, where it is no weight of a module. "": it is.
    resize : str
        How pictures are resized and cut: see `infinilm.images.sizes`.
    text : str
        What stands for a picture in a prompt: its own tokens alone ("plain"), rows of them with marks behind them
        ("rows"), all between two marks ("between"), or those of tiles ("tiles"). See `infinilm.requests.placeholders`.
    placeholder : str
        The token that stands where a picture is in a prompt, where it is not that of its rows.
    two_way : bool or str
        The model of texts lets tokens of a picture see all others of it. A str: a key of config.json is "vision" then.
    """

    keys: Mapping[str, str]
    outer_keys: Mapping[str, str | tuple[str, ...]] = field(
        default_factory=lambda: {"image_token_id": ("image_token_id", "image_token_index")}
    )
    defaults: Mapping[str, Any]
    fixed_keys: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    places: tuple[TowerPlace, ...]
    names: TensorNames
    level_names: Mapping[str, str] = field(default_factory=dict)
    norm: Literal["rms", "layer", "layer_bias"] = "layer_bias"
    merger: tuple[Linear, ...]
    merges_by_channel: bool = False
    merger_matrix: str = ""
    merger_activation: str = "gelu"
    pooled: bool = False
    pooled_by_root: bool = False
    pooled_norm_weight: bool = True
    pooled_norm_offset: float = 0
    final_norm: bool = True
    positions: Literal["stretched", "cubic", "learned", "bucketed", "axes", "none"]
    position_table: str = ""
    rope: Literal["halves", "turns", "quarters", "none"]
    qk_norm: Literal["none", "head"] = "none"
    v_norm: bool = False
    softmax_scale: float = 0
    post_norms: bool = False
    gated: bool = False
    bias: bool = True
    patch_bias: bool = True
    patch_norm: bool = False
    norm_first: bool = False
    channels_last: bool = False
    resize: Literal["area", "frames", "budget", "square", "edge", "tiles"] = "area"
    text: Literal["plain", "rows", "between", "marked", "tiles"] = "plain"
    placeholder: str = ""
    two_way: bool | str = False


_QWEN3_VL = TowerFamily(
    keys={
        "num_layers": "depth",
        "hidden_size": "hidden_size",
        "num_heads": "num_heads",
        "intermediate_size": "intermediate_size",
        "hidden_act": "hidden_act",
        "patch_size": "patch_size",
        "temporal_patch_size": "temporal_patch_size",
        "merge_size": "spatial_merge_size",
        "out_size": "out_hidden_size",
        "num_positions": "num_position_embeddings",
        "levels": "deepstack_visual_indexes",
    },
    defaults={
        "num_layers": 27,
        "hidden_size": 1152,
        "num_heads": 16,
        "intermediate_size": 4304,
        "hidden_act": "gelu_pytorch_tanh",
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "out_size": 3584,
        "num_positions": 2304,
        "levels": (8, 16, 24),
        "norm_eps": 1e-6,
    },
    places=(TowerPlace("model.visual.", "model.visual.merger."), TowerPlace("visual.", "visual.merger.")),
    names=TensorNames(
        layers="blocks",
        outside={
            "embed_patches": "{tower}patch_embed.proj",
            "embed_positions": "{tower}pos_embed",
            "norm": "{merger}norm",
            "merger_0": "{merger}linear_fc1",
            "merger_1": "{merger}linear_fc2",
        },
        renamed={
            "self_attn.o_proj": "attn.proj",
            "mlp.up_proj": "mlp.linear_fc1",
            "mlp.down_proj": "mlp.linear_fc2",
            "input_layernorm": "norm1",
            "post_attention_layernorm": "norm2",
        },
        joined={"attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")},
    ),
    level_names={
        "norm": "{{tower}}deepstack_merger_list.{}.norm",
        "0": "{{tower}}deepstack_merger_list.{}.linear_fc1",
        "1": "{{tower}}deepstack_merger_list.{}.linear_fc2",
    },
    merger=(Linear("merged", activated=True), Linear("out")),
    positions="stretched",
    rope="halves",
)

_QWEN3_5 = replace(_QWEN3_VL, defaults={**_QWEN3_VL.defaults, "levels": ()})

_QWEN2_VL = replace(
    _QWEN3_VL,
    keys={
        "num_layers": "depth",
        "hidden_size": "embed_dim",
        "num_heads": "num_heads",
        "mlp_ratio": "mlp_ratio",
        "hidden_act": "hidden_act",
        "patch_size": "patch_size",
        "temporal_patch_size": "temporal_patch_size",
        "merge_size": "spatial_merge_size",
        "out_size": "hidden_size",
    },
    defaults={
        "num_layers": 32,
        "hidden_size": 1280,
        "num_heads": 16,
        "mlp_ratio": 4,
        "hidden_act": "quick_gelu",
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "out_size": 3584,
        "num_positions": 0,
        "levels": (),
        "norm_eps": 1e-6,
    },
    names=replace(
        _QWEN3_VL.names,
        outside={
            "embed_patches": "{tower}patch_embed.proj",
            "norm": "{merger}ln_q",
            "merger_0": "{merger}mlp.0",
            "merger_1": "{merger}mlp.2",
        },
        renamed={
            **_QWEN3_VL.names.renamed,
            "mlp.up_proj": "mlp.fc1",
            "mlp.down_proj": "mlp.fc2",
        },
    ),
    level_names={},
    positions="none",
    patch_bias=False,
)

_QWEN2_5_VL = replace(
    _QWEN2_VL,
    keys={
        **{name: key for name, key in _QWEN3_VL.keys.items() if name not in ("num_positions", "levels")},
        "window_size": "window_size",
        "whole_layers": "fullatt_block_indexes",
    },
    defaults={
        **{name: value for name, value in _QWEN2_VL.defaults.items() if name != "mlp_ratio"},
        "hidden_size": 3584,
        "intermediate_size": 3420,
        "hidden_act": "silu",
        "window_size": 112,
        "whole_layers": (7, 15, 23, 31),
    },
    names=replace(
        _QWEN2_VL.names,
        renamed={"self_attn.o_proj": "attn.proj", "input_layernorm": "norm1", "post_attention_layernorm": "norm2"},
    ),
    norm="rms",
    gated=True,
)

_GLM4V = replace(
    _QWEN3_VL,
    keys={
        **{name: key for name, key in _QWEN3_VL.keys.items() if name not in ("num_positions", "levels")},
        "intermediate_size": "out_hidden_size",
        "merger_size": "intermediate_size",
        "image_size": "image_size",
        "norm_eps": "rms_norm_eps",
    },
    defaults={
        "num_layers": 24,
        "hidden_size": 1536,
        "num_heads": 12,
        "intermediate_size": 4096,
        "merger_size": 13696,
        "hidden_act": "silu",
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "out_size": 4096,
        "image_size": 336,
        "levels": (),
        "norm_eps": 1e-5,
    },
    fixed_keys={"vision_config.attention_bias": (False,)},
    names=replace(
        _QWEN3_VL.names,
        outside={
            "embed_patches": "{tower}patch_embed.proj",
            "patch_norm": "{tower}post_conv_layernorm",
            "embed_positions": "{tower}embeddings.position_embedding",
            "norm": "{tower}post_layernorm",
            "merger_0": "{tower}downsample",
            "merger_1": "{merger}proj",
            "merger_1_norm": "{merger}post_projection_norm",
            "merger_2_gate": "{merger}gate_proj",
            "merger_2_up": "{merger}up_proj",
            "merger_3": "{merger}down_proj",
        },
        renamed=_QWEN2_5_VL.names.renamed,
    ),
    level_names={},
    norm="rms",
    merger=(
        Linear("out"),
        Linear("out", bias=False, activated=True, norm_eps=1e-5),
        Linear("inner", bias=False, activated=True, gated=True),
        Linear("out", bias=False),
    ),
    merges_by_channel=True,
    positions="cubic",
    gated=True,
    bias=False,
    patch_norm=True,
    norm_first=True,
    resize="frames",
)

# What most configurations of towers call their sizes.
_USUAL_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "hidden_act": "hidden_act",
    "patch_size": "patch_size",
}

# SigLIP (arXiv:2303.15343), and Idefics3's variant of it.
_SIGLIP_KEYS = {**_USUAL_KEYS, "image_size": "image_size", "norm_eps": "layer_norm_eps"}
_SIGLIP_NAMES = TensorNames(
    layers="encoder.layers",
    outside={
        "embed_patches": "{tower}embeddings.patch_embedding",
        "embed_positions": "{tower}embeddings.position_embedding",
        "norm": "{tower}post_layernorm",
    },
    renamed={
        "self_attn.o_proj": "self_attn.out_proj",
        "mlp.up_proj": "mlp.fc1",
        "mlp.down_proj": "mlp.fc2",
        "input_layernorm": "layer_norm1",
        "post_attention_layernorm": "layer_norm2",
    },
)
_SIGLIP_DEFAULTS = {
    "num_layers": 12,
    "hidden_size": 768,
    "num_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu_pytorch_tanh",
    "patch_size": 16,
    "temporal_patch_size": 1,
    "image_size": 224,
    "norm_eps": 1e-6,
    "levels": (),
}


def _places(tower: str, merger: str, inner: str = "") -> tuple[TowerPlace, ...]:
    """Names in files of transformers 5 and of earlier versions, with a module around the tower, or without."""
    return tuple(
        TowerPlace(f"{model}{tower}.{within}", f"{model}{merger}.")
        for model in ("model.", "")
        for within in ((inner, "") if inner else ("",))
    )


_GEMMA3 = TowerFamily(
    keys=_SIGLIP_KEYS,
    outer_keys={
        "image_token_id": ("image_token_id", "image_token_index"),
        "out_size": "text_config.hidden_size",
        "num_image_tokens": "mm_tokens_per_image",
    },
    defaults={**_SIGLIP_DEFAULTS, "num_image_tokens": 256, "image_token_id": 262144},
    places=_places("vision_tower", "multi_modal_projector", "vision_model."),
    names=replace(_SIGLIP_NAMES, outside={**_SIGLIP_NAMES.outside, "merger_norm": "{merger}mm_soft_emb_norm"}),
    merger=(Linear("out", bias=False),),
    merger_matrix="mm_input_projection_weight",
    pooled=True,
    pooled_norm_offset=1,
    positions="learned",
    rope="none",
    resize="square",
    text="between",
    placeholder="<start_of_image>",
    two_way=True,
)

_GEMMA4 = TowerFamily(
    keys={
        **_USUAL_KEYS,
        "num_kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "hidden_act": "hidden_activation",
        "norm_eps": "rms_norm_eps",
        "merge_size": "pooling_kernel_size",
        "axis_positions": "position_embedding_size",
        "standardized": "standardize",
    },
    outer_keys={"image_token_id": "image_token_id", "out_size": "text_config.hidden_size"},
    defaults={
        "num_layers": 16,
        "hidden_size": 768,
        "num_heads": 12,
        "num_kv_heads": 12,
        "head_dim": 64,
        "intermediate_size": 3072,
        "hidden_act": "gelu_pytorch_tanh",
        "patch_size": 16,
        "temporal_patch_size": 1,
        "merge_size": 3,
        "axis_positions": 10240,
        "standardized": False,
        "levels": (),
        "norm_eps": 1e-6,
        "rope_theta": 100.0,
        "image_token_id": 258880,
    },
    # The small models have a tower whose linears clip what they read and give, and vectors of each layer, which are
    # others for tokens of pictures.
    fixed_keys={
        "vision_config.use_clipped_linears": (False,),
        "text_config.hidden_size_per_layer_input": (0,),
        "vision_config.attention_bias": (False,),
    },
    places=_places("vision_tower", "embed_vision"),
    names=TensorNames(
        layers="encoder.layers",
        outside={
            "embed_patches": "{tower}patch_embedder.input_proj",
            "std_scale": "{tower}std_scale",
            "std_bias": "{tower}std_bias",
            "merger_0": "{merger}embedding_projection",
        },
        renamed={
            **{f"self_attn.{part}_proj": f"self_attn.{part}_proj.linear" for part in "qkvo"},
            **{f"mlp.{part}_proj": f"mlp.{part}_proj.linear" for part in ("gate", "up", "down")},
        },
    ),
    norm="rms",
    merger=(Linear("out", bias=False),),
    pooled=True,
    pooled_by_root=True,
    pooled_norm_weight=False,
    final_norm=False,
    positions="axes",
    position_table="patch_embedder.position_embedding_table",
    rope="quarters",
    qk_norm="head",
    v_norm=True,
    softmax_scale=1,
    post_norms=True,
    gated=True,
    bias=False,
    patch_bias=False,
    channels_last=True,
    resize="budget",
    text="marked",
    two_way="text_config.use_bidirectional_attention",
)

_IDEFICS3 = TowerFamily(
    keys=_SIGLIP_KEYS,
    outer_keys={
        "image_token_id": "image_token_id",
        "out_size": "text_config.hidden_size",
        "merge_size": "scale_factor",
    },
    defaults={**_SIGLIP_DEFAULTS, "patch_size": 32, "merge_size": 2, "image_token_id": 128257},
    places=_places("vision_model", "connector"),
    names=replace(_SIGLIP_NAMES, outside={**_SIGLIP_NAMES.outside, "merger_0": "{merger}modality_projection.proj"}),
    merger=(Linear("out", bias=False),),
    positions="bucketed",
    rope="none",
    resize="tiles",
    text="tiles",
)

_MISTRAL3 = TowerFamily(
    keys=_USUAL_KEYS,
    outer_keys={
        "image_token_id": ("image_token_id", "image_token_index"),
        "out_size": "text_config.hidden_size",
        "merge_size": "spatial_merge_size",
        "merger_eps": "text_config.rms_norm_eps",
        "merger_act": "projector_hidden_act",
    },
    defaults={
        "num_layers": 24,
        "hidden_size": 1024,
        "num_heads": 16,
        "intermediate_size": 4096,
        "hidden_act": "gelu",
        "patch_size": 16,
        "temporal_patch_size": 1,
        "merge_size": 2,
        "num_positions": 0,
        "levels": (),
        "norm_eps": 1e-5,
        "merger_eps": 1e-6,
        "merger_act": "gelu",
        "image_token_id": 10,
    },
    fixed_keys={"vision_feature_layer": (-1, [-1])},
    places=_places("vision_tower", "multi_modal_projector"),
    names=TensorNames(
        layers="transformer.layers",
        outside={
            "embed_patches": "{tower}patch_conv",
            "patch_norm": "{tower}ln_pre",
            "norm": "{merger}norm",
            "merger_0": "{merger}patch_merger.merging_layer",
            "merger_1": "{merger}linear_1",
            "merger_2": "{merger}linear_2",
        },
        renamed={
            **{f"self_attn.{part}_proj": f"attention.{part}_proj" for part in "qkvo"},
            **{f"mlp.{part}_proj": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
            "input_layernorm": "attention_norm",
            "post_attention_layernorm": "ffn_norm",
        },
    ),
    norm="rms",
    merger=(
        Linear("hidden", bias=False),
        Linear("out", bias="multimodal_projector_bias", activated=True),
        Linear("out", bias="multimodal_projector_bias"),
    ),
    merges_by_channel=True,
    positions="none",
    rope="turns",
    gated=True,
    bias=False,
    patch_bias=False,
    patch_norm=True,
    resize="edge",
    text="rows",
)

TOWERS: Mapping[str, TowerFamily] = {
    "qwen2_vl": _QWEN2_VL,
    "qwen2_5_vl": _QWEN2_5_VL,
    "qwen3_vl": _QWEN3_VL,
    "qwen3_vl_moe": _QWEN3_VL,
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5,
    "glm4v": _GLM4V,
    "glm4v_moe": _GLM4V,
    "gemma3": _GEMMA3,
    "gemma4": _GEMMA4,
    "mistral3": _MISTRAL3,
    "idefics3": _IDEFICS3,
    "smolvlm": _IDEFICS3,
}
"""By the model_type of config.json."""

_OTHER_COUNTS = (
    *("image_size", "num_image_tokens", "merge_size", "merger_size", "out_size", "mlp_ratio"),
    *("num_kv_heads", "head_dim", "axis_positions"),
)
_LAYERS = ("levels", "whole_layers")
_COUNTS = ("num_layers", "hidden_size", "num_heads", "intermediate_size", "patch_size", "temporal_patch_size")


@dataclass(frozen=True, slots=True)
class TowerConfig:
    """The tower of a model, and what the model of texts takes of it.

    Attributes
    ----------
    family : TowerFamily
    num_layers, hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size : int
    hidden_act, merger_act : str
        Activations of the MLP and of the merger, as config.json calls them.
    patch_size, temporal_patch_size, merge_size : int
        Sides of a patch in pixels, its frames, and patches of each side that become one row.
    merger_size : int
        Numbers inside of the merger, where a linear of it says "inner".
    out_size : int
        Numbers of a row: hidden_size of the model of texts.
    window_size : int
        The side of the windows, in pixels, that layers see parts of a picture by; 0: all layers see all of it.
    whole_layers : tuple of int
        Layers that see all of it, where there are windows.
    num_positions : int
        Learned positions: a square number, or those of both axes.
    standardized : bool
        See `TowerSpec`.
    levels : tuple of int
        Layers whose results the first layers of the model of texts take besides.
    norm_eps, merger_eps : float
        What norms of the layers add, and what those behind them add.
    rope_theta : float
        The base of the frequencies that turn, where any do.
    merger_biases : tuple of bool
        Whether each linear of the merger has a bias.
    image_token_id : int
        The token that stands for a row of an image.
    two_way : bool
        The model of texts lets tokens of a picture see all others of it.
    rope_axes : tuple of int
        See `RopeSpec.axes` in the model of texts: its tokens have positions in time, rows and columns.
    """

    family: TowerFamily
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    hidden_act: str
    merger_act: str
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    merger_size: int
    out_size: int
    window_size: int
    whole_layers: tuple[int, ...]
    num_positions: int
    standardized: bool
    levels: tuple[int, ...]
    norm_eps: float
    merger_eps: float
    rope_theta: float
    merger_biases: tuple[bool, ...]
    image_token_id: int
    two_way: bool
    rope_axes: tuple[int, ...]

    @classmethod
    def from_config(cls, values: Mapping[str, Any]) -> TowerConfig | None:
        """Read the content of a config.json; None: it has no tower that is known.

        Raises
        ------
        ConfigError
            A key is missing, or has a value that no such tower has.
        """
        family = TOWERS.get(values.get("model_type", ""))
        given, text = values.get("vision_config"), values.get("text_config", values)  # old files have no part for texts
        if family is None or not isinstance(given, Mapping) or not isinstance(text, Mapping):
            return None
        for key, known in family.fixed_keys.items():
            found = _value_at(values, key)
            if found is not None and found not in known:
                raise ConfigError(f"{key} is {found!r}; computed is {known[0]!r}")
        fields = _read_fields(family, values, given)
        biases = (bool(values.get(own.bias, False)) if isinstance(own.bias, str) else own.bias for own in family.merger)
        fields["merger_biases"] = tuple(biases)
        for name in _LAYERS:
            layers = fields[name]
            if not isinstance(layers, Sequence) or not all(isinstance(layer, int) for layer in layers):
                raise ConfigError(f"vision_config: {family.keys[name]} must be a list of layers; got {layers!r}")
            fields[name] = tuple(layers)
        two_way = family.two_way
        if isinstance(two_way, str):
            two_way = _value_at(values, two_way) == "vision"
        made = cls(**fields, family=family, two_way=two_way, rope_axes=_rope_axes(text))
        made._check()
        return made

    def _check(self) -> None:
        for name in _LAYERS:
            layers: tuple[int, ...] = getattr(self, name)
            if sorted({*layers}) != [*layers] or any(not 0 <= layer < self.num_layers for layer in layers):
                raise ConfigError(
                    f"vision_config: {self.family.keys[name]} must be some of {self.num_layers} layers, in their "
                    f"order; got {list(layers)!r}"
                )
        if self.window_size % (self.patch_size * self.merge_size):
            raise ConfigError(
                f"vision_config: window_size is {self.window_size}, but patches that are merged have "
                f"{self.patch_size * self.merge_size} x {self.patch_size * self.merge_size} pixels"
            )
        if self.side**2 != self.num_positions and self.family.positions != "axes":
            raise ConfigError(f"vision_config: {self.num_positions} positions are no square")
        for act in (self.hidden_act, self.merger_act):
            if act not in ACTIVATIONS:
                raise ConfigError(f"vision_config: the activation {act!r} is not supported")
        if self.head_dim % 4 or not self.head_dim:
            raise ConfigError(f"vision_config: a head has {self.head_dim} numbers, which is no multiple of 4")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"vision_config: {self.num_heads} heads of queries are no multiple of {self.num_kv_heads} of keys"
            )

    @property
    def side(self) -> int:
        """Rows, and columns, of the table of positions."""
        return math.isqrt(self.num_positions)

    @property
    def merged_patches(self) -> int:
        """Patches that become one row."""
        return self.merge_size**2

    @property
    def given(self) -> GivenEmbeddings:
        """What the model of texts takes."""
        return GivenEmbeddings(1 + len(self.levels), self.rope_axes)

    @property
    def layer_shapes(self) -> list[LayerShape]:
        """The shape of each layer, for those who look for its tensors."""
        shape = LayerShape(self.head_dim, self.num_kv_heads, self.intermediate_size, 0)
        return [shape] * self.num_layers

    def place(self, stored: Collection[str]) -> TowerPlace | None:
        """What the names of its tensors begin with, in files with tensors of these names; None: they lack it."""
        patches = self.family.names.outside["embed_patches"] + ".weight"
        used = (place for place in self.family.places if patches.format(**place._asdict()) in stored)
        return next(used, None)

    def names(self, place: TowerPlace) -> TensorNames:
        """How to find its parameters there."""
        own = self.family.names
        outside = {
            **own.outside,
            **{
                f"level{i}_{part}": name.format(i)
                for i in range(len(self.levels))
                for part, name in self.family.level_names.items()
            },
        }
        return replace(
            own,
            prefixes=(("", ""),),
            is_text=False,
            layers=f"{place.tower}{own.layers}",
            outside={module: name.format(**place._asdict()) for module, name in outside.items()},
        )

    def spec(self, dtype: str, max_patches: int) -> ModelSpec:
        """Write its math for pictures of up to so many patches."""
        family = self.family

        def attention(layer: int) -> AttentionSpec:
            return AttentionSpec(
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                softmax_scale=family.softmax_scale or self.head_dim**-0.5,
                # A window is a sequence of such a layer, which reaches over all of it.
                sliding_window=0 if layer in self.whole_layers else (self.window_size // self.patch_size) ** 2,
                rope=-1 if family.rope == "none" else 0,
                qkv_bias=family.bias,
                out_bias=family.bias,
                qk_norm=family.qk_norm,
                v_norm=family.v_norm,
                two_way=True,
            )

        mlp = MlpSpec(
            self.intermediate_size,
            bias=family.bias,
            gated=family.gated,
            activation=ACTIVATIONS[self.hidden_act],
        )
        sizes = {
            "merged": self.merged_patches * self.hidden_size,
            "hidden": self.hidden_size,
            "out": self.out_size,
            "inner": self.merger_size,
        }
        return ModelSpec(
            dtype=dtype,
            vocab_size=1,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            max_model_len=max_patches,
            rms_norm_eps=self.norm_eps,
            norm=family.norm,
            post_norms=family.post_norms,
            lm_head=False,
            tie_word_embeddings=True,
            ropes=self._ropes(),
            layers=[LayerSpec(attention(layer), mlp) for layer in range(self.num_layers)],
            tower=TowerSpec(
                patch_dim=3 * self.temporal_patch_size * self.patch_size**2,
                patch_bias=family.patch_bias,
                patch_norm=family.patch_norm,
                norm_first=family.norm_first,
                num_positions=self.num_positions,
                norm=family.final_norm,
                merged_patches=self.merged_patches,
                pooled=family.pooled,
                standardized=self.standardized,
                pooled_scale=self.hidden_size**0.5 if family.pooled_by_root else 1,
                pooled_norm_weight=family.pooled_norm_weight,
                pooled_norm_offset=family.pooled_norm_offset,
                merger=[
                    MergerLinear(
                        sizes[own.size],
                        bias,
                        own.norm_eps,
                        own.activated,
                        own.gated,
                        ACTIVATIONS[self.hidden_act if own.gated else self.merger_act],
                    )
                    for own, bias in zip(family.merger, self.merger_biases, strict=True)
                ],
                eps=self.merger_eps,
                levels=list(self.levels),
            ),
        )

    def _ropes(self) -> list[RopeSpec]:
        """Turn half of the frequencies by the row of a patch, and half by its column."""
        if self.family.rope == "none":
            return []
        count = self.head_dim // 4  # frequencies of an axis
        axes = [0] * count + [1] * count
        if self.family.rope in ("halves", "quarters"):
            exponents = np.arange(0, 2 * count, 2, dtype=np.float32) / np.float32(2 * count)
            exponents = np.concatenate([exponents, exponents])
        else:
            all_of_them = np.arange(0, 4 * count, 2, dtype=np.float32) / np.float32(4 * count)
            exponents = np.concatenate([all_of_them[0::2], all_of_them[1::2]])
        inv_freq = (1 / np.float32(self.rope_theta) ** exponents).astype(np.float32)
        return [RopeSpec(inv_freq.tolist(), axes=axes[::-1] if self.family.rope == "quarters" else axes)]

    @property
    def head_order(self) -> npt.NDArray[np.int64] | None:
        """Which element of a head of q or k in the files each of the engine's is; None: they are the same.

        The engine turns an element of the first half of a head with that of the second half.
        """
        if self.family.rope != "quarters":
            return None
        return np.arange(self.head_dim).reshape(2, 2, -1).swapaxes(0, 1).reshape(-1)

    def windows_of(self, grid: tuple[int, int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The rows of a picture in the order of the windows that they lie in, and how many each window has.

        Windows have the same size but at the right and lower edges. Without windows all of the picture is one.
        """
        rows, columns = grid[0] // self.merge_size, grid[1] // self.merge_size
        side = self.window_size // (self.patch_size * self.merge_size) or max(rows, columns)
        row, column = np.divmod(np.arange(rows * columns), columns)
        window = row // side * -(-columns // side) + column // side
        return np.argsort(window, kind="stable"), np.bincount(window)

    def most_windows(self, num_patches: int) -> int:
        """How many windows pictures of up to so many patches have, at most."""
        num_rows = num_patches // self.merged_patches
        side = self.window_size // (self.patch_size * self.merge_size)
        return max(-(-rows // side) * -(-(num_rows // rows) // side) for rows in range(1, num_rows + 1)) if side else 1

    def positions_of(
        self, places: npt.NDArray[np.int32], grid: tuple[int, int]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]] | None:
        """Rows of the table of positions that patches add, and their weights, both [num_patches, n]; None: no rows.

        `places`: row and column of each patch, [2, num_patches].
        """
        if self.family.positions == "none":
            return None
        if self.family.positions in ("stretched", "cubic"):
            return _stretched(places, grid, self.side, is_cubic=self.family.positions == "cubic")
        if self.family.positions == "axes":
            rows = np.stack([places[1], self.num_positions // 2 + places[0]], axis=1).astype(np.int32)
            return rows, np.ones(rows.shape, np.float32)
        if self.family.positions == "bucketed":
            places = np.stack([_buckets(count, self.side)[at] for at, count in zip(places, grid, strict=True)])
        rows = (places[0] * self.side + places[1])[:, None].astype(np.int32)
        return rows, np.ones(rows.shape, np.float32)


def _value_at(values: Mapping[str, Any], key: str) -> Any:
    """The value of a key of config.json, or of its part before a dot; None: it is not there."""
    outer, _, inner = key.rpartition(".")
    return (values.get(outer) or {} if outer else values).get(inner)


def _read_fields(family: TowerFamily, values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a `TowerConfig` that keys say, checked one by one."""
    said: dict[str, Any] = {name: given.get(key) for name, key in family.keys.items()}
    where = {name: f"vision_config: {key}" for name, key in family.keys.items()}
    for name, keys in family.outer_keys.items():
        for key in (keys,) if isinstance(keys, str) else keys:
            found = _value_at(values, key)
            where.setdefault(name, key)
            said[name] = found if said.get(name) is None else said[name]
    fields = dict(family.defaults)
    fields |= {name: value for name, value in said.items() if value is not None}
    for name in (*_COUNTS, *_OTHER_COUNTS):
        if name in fields:
            as_integer(where.get(name, name), fields[name], least=1)
    fields["image_token_id"] = as_integer("image_token_id", fields.get("image_token_id"), least=0)
    if "out_size" not in fields:
        raise ConfigError(f"{where['out_size']} is missing")
    if (image_size := fields.pop("image_size", None)) is not None:
        side = image_size // fields["patch_size"]
        fields["num_positions"] = side**2
        if (num_image_tokens := fields.pop("num_image_tokens", None)) is not None:
            fields["merge_size"] = side // math.isqrt(num_image_tokens)
            if fields["merge_size"] ** 2 * num_image_tokens != side**2:
                raise ConfigError(
                    f"{where['num_image_tokens']}: {num_image_tokens} tokens are no equal squares of {side} x {side} "
                    "patches"
                )
    if (mlp_ratio := fields.pop("mlp_ratio", None)) is not None:
        fields["intermediate_size"] = fields["hidden_size"] * mlp_ratio
    if (axis_positions := fields.pop("axis_positions", None)) is not None:
        fields["num_positions"] = 2 * axis_positions
    if fields["hidden_size"] % fields["num_heads"] and "head_dim" not in fields:
        raise ConfigError(f"vision_config: {fields['hidden_size']} numbers are no equal {fields['num_heads']} heads")
    for name, value in (
        ("num_kv_heads", fields["num_heads"]),
        ("head_dim", fields["hidden_size"] // fields["num_heads"]),
        ("standardized", False),
        ("merger_size", 0),
        ("window_size", 0),
        ("whole_layers", range(fields["num_layers"])),
    ):
        fields.setdefault(name, value)
    for name in ("num_positions", "window_size"):
        as_integer(where.get(name, name), fields[name], least=0)
    theta = fields.get("rope_theta", _ROPE_THETA)
    fields["rope_theta"] = float((given.get("rope_parameters") or given).get("rope_theta", theta))
    for name in ("norm_eps", "merger_eps"):
        fields[name] = float(fields.get(name, fields["norm_eps"]))
    fields.setdefault("merger_act", family.merger_activation)
    return fields


def _stretched(
    places: npt.NDArray[np.int32], grid: tuple[int, int], side: int, *, is_cubic: bool
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Stretch a table to a grid: bilinearly, so that corners lie on corners; or bicubically, so that edges do."""
    taps, weights = [], []
    for axis, count in enumerate(grid):
        place = places[axis].astype(np.float32)
        if is_cubic:
            at = (place + np.float32(0.5)) * np.float32(side) / np.float32(count) - np.float32(0.5)
        else:
            at = place * np.float32(side - 1) / np.float32(max(count - 1, 1))
        low = np.floor(at)
        part = at - low
        steps = np.arange(-1, 3) if is_cubic else np.arange(2)
        taps.append(np.clip(low[:, None].astype(np.int32) + steps, 0, side - 1))
        weights.append(_cubic_weights(part) if is_cubic else np.stack([1 - part, part], axis=1))
    rows = (taps[0][:, :, None] * side + taps[1][:, None]).reshape(places.shape[1], -1).astype(np.int32)
    return rows, (weights[0][:, :, None] * weights[1][:, None]).reshape(rows.shape).astype(np.float32)


def _cubic_weights(part: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The weights of four neighbours, [count, 4], of which the place is so far behind the second: Keys' kernel."""
    distance = np.abs(part[:, None] - np.arange(-1, 3, dtype=np.float32))
    a = np.float32(-0.75)  # as torch has it
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    weights: npt.NDArray[np.float32] = np.where(distance <= 1, near, far)
    return weights


def _buckets(count: int, side: int) -> npt.NDArray[np.int64]:
    """For each of `count` steps, the part of `side` equal ones that it begins in, [count], rounded as in transformers.

    A step that should begin where a part does may, by float32, begin in the part before; models were trained with it.
    """
    boundaries = (1 / side + np.arange(side - 1) * (1 / side)).astype(np.float32)
    begins = np.arange(count, dtype=np.float32) * (np.float32(1) / np.float32(count))
    begins = np.minimum(begins, np.float32(1 - 1e-6))
    buckets: npt.NDArray[np.int64] = np.searchsorted(boundaries, begins, side="right")
    return buckets


def _rope_axes(text: Mapping[str, Any]) -> tuple[int, ...]:
    """The axis of each frequency of the model of texts: 0 time, 1 rows, 2 columns."""
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    section = rope.get("mrope_section")
    if section is None:
        return ()
    if not isinstance(section, list) or len(section) != 3 or not all(isinstance(n, int) and n >= 0 for n in section):
        raise ConfigError(f"mrope_section must be three numbers of frequencies; got {section!r}")
    if not rope.get("mrope_interleaved", False):
        return tuple(axis for axis, count in enumerate(section) for _ in range(count))
    # Rows and columns have every third frequency from the beginning, as many as the section says, and time the rest.
    return tuple(i % 3 if i < 3 * section[i % 3] else 0 for i in range(sum(section)))
