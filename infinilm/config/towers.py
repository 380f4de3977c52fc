"""Towers: encoders of images, whose rows stand for tokens of a text. A table, as `families` is for texts.

A tower is a list of encoder layers like any other, so its math is a `ModelSpec` with a `TowerSpec`, and its weights
are found by `TensorNames`. What differs between towers is a row of `TOWERS`: which keys of config.json say the sizes,
how positions are told, what is normed how, and what the model of texts takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from infinilm._core import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, RopeSpec, TowerSpec
from infinilm.checks import as_integer
from infinilm.config.families.names import TensorNames
from infinilm.config.spec import ACTIVATIONS, GivenEmbeddings
from infinilm.config.sublayers.layer_shapes import LayerShape
from infinilm.errors import ConfigError

__all__ = ["TOWERS", "TowerConfig", "TowerFamily"]

_ROPE_THETA = 10000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerFamily:
    """One row of the table.

    Attributes
    ----------
    keys : mapping of str to str
        Keys of `vision_config`, by the field of `TowerConfig` that each says.
    defaults : mapping of str to value
        Values of fields whose keys are left out.
    prefixes : tuple of str
        What stands before the names of all its tensors: the first that the files use.
    names : TensorNames
        Behind that.
    level_names : mapping of str to str
        Names of the modules that merge a level, `{}` being its number, by the engine's.
    norm : str
        The kind of its norms; `norm_eps`: theirs.
    merger_activation : str
        What is between the two linears that make a row.
    positions : str
        Learned positions: a square table that is stretched bilinearly to a picture's patches, or none.
    """

    keys: Mapping[str, str]
    defaults: Mapping[str, Any]
    prefixes: tuple[str, ...]
    names: TensorNames
    level_names: Mapping[str, str] = field(default_factory=dict)
    norm: Literal["rms", "layer", "layer_bias"] = "layer_bias"
    norm_eps: float = 1e-6
    merger_activation: str = "gelu"
    positions: Literal["stretched", "none"] = "stretched"


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
    },
    prefixes=("model.visual.", "visual."),
    names=TensorNames(
        layers="blocks",
        outside={
            "embed_tokens": "patch_embed.proj",
            "embed_patches": "patch_embed.proj",
            "embed_positions": "pos_embed",
            "norm": "merger.norm",
            "merger_inner": "merger.linear_fc1",
            "merger_outer": "merger.linear_fc2",
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
        "norm": "deepstack_merger_list.{}.norm",
        "inner": "deepstack_merger_list.{}.linear_fc1",
        "outer": "deepstack_merger_list.{}.linear_fc2",
    },
)

_QWEN3_5 = replace(_QWEN3_VL, defaults={**_QWEN3_VL.defaults, "levels": ()})

TOWERS: Mapping[str, TowerFamily] = {
    "qwen3_vl": _QWEN3_VL,
    "qwen3_vl_moe": _QWEN3_VL,
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5,
}
"""By the model_type of config.json."""


@dataclass(frozen=True, slots=True)
class TowerConfig:
    """The tower of a model, and what the model of texts takes of it.

    Attributes
    ----------
    family : TowerFamily
    num_layers, hidden_size, num_heads, intermediate_size : int
    hidden_act : str
        As config.json calls it.
    patch_size, temporal_patch_size, merge_size : int
        Sides of a patch in pixels, its frames, and patches of each side that become one row.
    out_size : int
        Numbers of a row: hidden_size of the model of texts.
    num_positions : int
        Learned positions: a square number.
    levels : tuple of int
        Layers whose results the first layers of the model of texts take besides.
    image_token_id : int
        The token that stands where an image is.
    rope_axes : tuple of int
        See `RopeSpec.axes` in the model of texts: its tokens have positions in time, rows and columns.
    """

    family: TowerFamily
    num_layers: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    hidden_act: str
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    out_size: int
    num_positions: int
    levels: tuple[int, ...]
    image_token_id: int
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
        given, text = values.get("vision_config"), values.get("text_config")
        if family is None or not isinstance(given, Mapping) or not isinstance(text, Mapping):
            return None
        said = {name: given.get(key) for name, key in family.keys.items()}
        fields = {name: family.defaults[name] if value is None else value for name, value in said.items()}
        for name, value in fields.items():
            if name not in ("levels", "hidden_act"):
                as_integer(f"vision_config: {family.keys[name]}", value, least=0 if name == "num_positions" else 1)
        levels = fields["levels"]
        if not isinstance(levels, Sequence) or not all(isinstance(level, int) for level in levels):
            raise ConfigError(f"vision_config: {family.keys['levels']} must be a list of layers; got {levels!r}")
        made = cls(
            **{**fields, "levels": tuple(levels)},
            family=family,
            image_token_id=as_integer("image_token_id", values.get("image_token_id"), least=0),
            rope_axes=_rope_axes(text),
        )
        if sorted({*levels}) != [*levels] or any(not 0 <= level < made.num_layers for level in levels):
            raise ConfigError(
                f"vision_config: {family.keys['levels']} must be some of {made.num_layers} layers, in their order; got "
                f"{levels!r}"
            )
        if made.side**2 != made.num_positions:
            raise ConfigError(f"vision_config: {made.num_positions} positions are no square")
        if made.hidden_act not in ACTIVATIONS:
            raise ConfigError(f"vision_config: hidden_act {made.hidden_act!r} is not supported")
        if made.hidden_size % made.num_heads or made.hidden_size // made.num_heads % 4:
            raise ConfigError(
                f"vision_config: a head has {made.hidden_size} / {made.num_heads} numbers, which is no multiple of 4"
            )
        return made

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
        head_dim = self.hidden_size // self.num_heads
        return [LayerShape(head_dim, self.num_heads, self.intermediate_size, 0) for _ in range(self.num_layers)]

    def prefix(self, stored: Iterable[str]) -> str:
        """What stands before the names of all its tensors, in files with tensors of these names; "": they lack it."""
        names = list(stored)
        used = (prefix for prefix in self.family.prefixes if any(name.startswith(prefix) for name in names))
        return next(used, "")

    def names(self, prefix: str) -> TensorNames:
        """How to find its parameters behind such a prefix."""
        levels = {
            f"level{i}_{part}": name.format(i)
            for i in range(len(self.levels))
            for part, name in self.family.level_names.items()
        }
        own = self.family.names
        return replace(own, prefixes=((prefix, ""),), outside={**own.outside, **levels})

    def spec(self, dtype: str, max_patches: int) -> ModelSpec:
        """Write its math for pictures of up to so many patches."""
        family, head_dim = self.family, self.hidden_size // self.num_heads
        # Half of the frequencies turn by the row of a patch, half by its column, both over the whole range.
        exponents = np.arange(0, head_dim // 2, 2, dtype=np.float32) / np.float32(head_dim // 2)
        inv_freq = (1 / np.float32(_ROPE_THETA) ** exponents).astype(np.float32).tolist()
        rope = RopeSpec(inv_freq * 2, axes=[0] * len(inv_freq) + [1] * len(inv_freq))
        attention = AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_dim=head_dim,
            softmax_scale=head_dim**-0.5,
            rope=0,
            qkv_bias=True,
            out_bias=True,
            two_way=True,
        )
        mlp = MlpSpec(self.intermediate_size, bias=True, gated=False, activation=ACTIVATIONS[self.hidden_act])
        return ModelSpec(
            dtype=dtype,
            vocab_size=1,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            max_model_len=max_patches,
            rms_norm_eps=family.norm_eps,
            norm=family.norm,
            lm_head=False,
            tie_word_embeddings=True,
            ropes=[rope],
            layers=[LayerSpec(attention, mlp) for _ in range(self.num_layers)],
            tower=TowerSpec(
                patch_dim=3 * self.temporal_patch_size * self.patch_size**2,
                patch_bias=True,
                num_positions=self.num_positions,
                merged_patches=self.merged_patches,
                merger_size=self.merged_patches * self.hidden_size,
                out_size=self.out_size,
                activation=family.merger_activation,
                levels=list(self.levels),
            ),
        )

    def positions_of(
        self, places: npt.NDArray[np.int32], grid: tuple[int, int]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Rows of the table of positions that patches add, and their weights, both [num_patches, 4].

        `places`: row and column of each patch, [2, num_patches]. The table is stretched to the grid bilinearly, so that
        its corners come to lie on those of the picture.
        """
        taps, weights = [], []
        for axis, count in enumerate(grid):
            at = places[axis].astype(np.float32) * np.float32(self.side - 1) / np.float32(max(count - 1, 1))
            low = np.floor(at).astype(np.int32)
            high = np.minimum(low + 1, self.side - 1)
            part = at - low.astype(np.float32)
            taps.append(np.stack([low, high], axis=1))
            weights.append(np.stack([1 - part, part], axis=1))
        rows = (taps[0][:, :, None] * self.side + taps[1][:, None]).reshape(-1, 4).astype(np.int32)
        return rows, (weights[0][:, :, None] * weights[1][:, None]).reshape(-1, 4).astype(np.float32)


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
