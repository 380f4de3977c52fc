"""What the table and config.json say of one tower: its sizes, its math, its names, and the positions of its patches."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm._core import AttentionSpec, LayerSpec, MergerLinear, MlpSpec, ModelSpec, RopeSpec, TowerSpec
from infinilm.checks import as_integer
from infinilm.config.families.names import TensorNames
from infinilm.config.spec import ACTIVATIONS, GivenEmbeddings
from infinilm.config.sublayers.layer_shapes import LayerShape
from infinilm.config.towers.family import TowerFamily, TowerPlace
from infinilm.config.towers.positions import buckets, stretched
from infinilm.config.towers.table import TOWERS
from infinilm.errors import ConfigError

__all__ = ["KEPT_ROWS_BYTES", "TowerConfig"]

KEPT_ROWS_BYTES = 256 << 20
"""Bytes of rows of pictures that are kept in host memory, so that a picture that comes again costs no tower."""

_ROPE_THETA = 10000.0

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
    clipped : bool
        See `ModelSpec.clipped_linears`.
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
    clipped: bool
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
        if self.side**2 != self.num_positions - self.num_class_tokens and self.family.positions != "axes":
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
    def num_class_tokens(self) -> int:
        """Tokens of a sequence behind its patches: one, or none."""
        return 1 if self.family.class_token else 0

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
        shape = LayerShape(self.num_heads, self.head_dim, self.num_kv_heads, self.intermediate_size, 0)
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
            clipped_linears=self.clipped,
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
                class_token=bool(family.class_token),
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
        if self.family.rope != "turns":
            exponents = np.arange(0, 2 * count, 2, dtype=np.float32) / np.float32(2 * count)
            exponents = np.concatenate([exponents, exponents])
        else:
            all_of_them = np.arange(0, 4 * count, 2, dtype=np.float32) / np.float32(4 * count)
            exponents = np.concatenate([all_of_them[0::2], all_of_them[1::2]])
        inv_freq = (1 / np.float32(self.rope_theta) ** exponents).astype(np.float32)
        return [RopeSpec(inv_freq.tolist(), axes=axes[::-1] if self.family.rope in ("quarters", "pairs") else axes)]

    @property
    def head_order(self) -> npt.NDArray[np.int64] | None:
        """Which element of a head of q or k in the files each of the engine's is; None: they are the same.

        The engine turns an element of the first half of a head with that of the second half.
        """
        if self.family.rope == "quarters":
            return np.arange(self.head_dim).reshape(2, 2, -1).swapaxes(0, 1).reshape(-1)
        return np.arange(self.head_dim).reshape(-1, 2).T.reshape(-1) if self.family.rope == "pairs" else None

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
        """Rows of the table of positions that tokens add, and their weights, both [num_tokens, n]; None: no rows.

        `places`: row and column of each patch, [2, num_patches]. A class token is behind the patches.
        """
        if self.family.positions == "none":
            return None
        if self.family.positions in ("stretched", "cubic"):
            return stretched(places, grid, self.side, is_cubic=self.family.positions == "cubic")
        if self.family.positions == "axes":
            rows = np.stack([places[1], self.num_positions // 2 + places[0]], axis=1).astype(np.int32)
            return rows, np.ones(rows.shape, np.float32)
        if self.family.positions == "bucketed":
            places = np.stack([buckets(count, self.side)[at] for at, count in zip(places, grid, strict=True)])
        rows = (places[0] * self.side + places[1])[:, None].astype(np.int32)
        weights = np.ones(rows.shape, np.float32)
        if self.num_class_tokens:  # which adds its position, and itself, a row behind the table
            last = self.num_positions
            rows = np.concatenate([np.pad(rows, ((0, 0), (0, 1))), np.array([[last - 1, last]], np.int32)])
            weights = np.concatenate([np.pad(weights, ((0, 0), (0, 1))), np.ones((1, 2), np.float32)])
        return rows, weights

    def turned_by(self, places: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Row and column that RoPE turns each token by, if it turns any, [2, num_tokens]; `places`: as above."""
        return np.pad(places + 1, ((0, 0), (0, 1))) if self.num_class_tokens else places


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
        fields["num_positions"] = side**2 + (1 if family.class_token else 0)
        if (num_image_tokens := fields.pop("num_image_tokens", None)) is not None:
            fields["merge_size"] = side // math.isqrt(num_image_tokens)
            if fields["merge_size"] ** 2 * num_image_tokens != side**2:
                raise ConfigError(
                    f"{where['num_image_tokens']}: {num_image_tokens} tokens are no equal squares of {side} x {side} "
                    "patches"
                )
    if (mlp_ratio := fields.pop("mlp_ratio", None)) is not None:
        fields["intermediate_size"] = fields["hidden_size"] * mlp_ratio
    if (shuffle_ratio := fields.pop("shuffle_ratio", None)) is not None:
        fields["merge_size"] = round(1 / shuffle_ratio) if isinstance(shuffle_ratio, float) and shuffle_ratio > 0 else 0
        if fields["merge_size"] * (shuffle_ratio or 0) != 1:
            raise ConfigError(f"{where['shuffle_ratio']} is {shuffle_ratio!r}, which is not one part of a whole number")
    if (axis_positions := fields.pop("axis_positions", None)) is not None:
        fields["num_positions"] = 2 * axis_positions
    if fields["hidden_size"] % fields["num_heads"] and "head_dim" not in fields:
        raise ConfigError(f"vision_config: {fields['hidden_size']} numbers are no equal {fields['num_heads']} heads")
    for name, value in (
        ("num_kv_heads", fields["num_heads"]),
        ("head_dim", fields["hidden_size"] // fields["num_heads"]),
        ("standardized", False),
        ("clipped", False),
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
