"""What differs between towers: the form of a row of `TOWERS`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from infinilm.config.families.names import TensorNames

__all__ = ["Linear", "TowerFamily", "TowerPlace"]


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
        ("halves"), or every second one ("turns"); or none turns. As halves, but columns come first: either axis turns
        neighbouring quarters of a head ("quarters"), or neighbouring numbers, by positions from 1 on ("pairs").
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
    class_token : str
        The name of the tensor of a token behind the patches, which is dropped behind the layers. "": there is none.
    resize : str
        How pictures are resized and cut: one of `RULES` in `infinilm.images.sizes`.
    text : str
        What stands for a picture in a prompt: its own tokens alone ("plain"), or one of `TEXTS` in
        `infinilm.requests.placeholders`.
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
    class_token: str = ""
    rope: Literal["halves", "turns", "quarters", "pairs", "none"]
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
    resize: str = "area"
    text: str = "plain"
    placeholder: str = ""
    two_way: bool | str = False
