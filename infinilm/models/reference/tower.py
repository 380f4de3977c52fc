"""`ReferenceTower`: an encoder of images in numpy, the readable specification of the engine's. See `src/model/tower.h`.

Its layers are those of `decoder.py`. What is its own are patches and their positions in front, and the merger behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from infinilm._core import ModelSpec, TowerSpec
from infinilm.errors import ConfigError
from infinilm.models.dynamic_cache import DynamicCache
from infinilm.models.reference.decoder import rotation, run_layer
from infinilm.models.reference.ops import JOINS, Array
from infinilm.models.reference.step import Step, Tap

__all__ = ["ReferenceTower"]


class ReferenceTower:
    """A tower in numpy.

    Parameters
    ----------
    spec : ModelSpec
        One with a tower, such as `TowerConfig.spec` writes.
    weights : mapping of str to numpy.ndarray
        By the engine's names, as `param_shapes` of the specification has them.
    dtype : str
        What it computes in.

    Raises
    ------
    ConfigError
        The specification has no tower.
    """

    def __init__(self, spec: ModelSpec, weights: Mapping[str, Array], dtype: str = "float64") -> None:
        if spec.tower is None:
            raise ConfigError("the specification has no tower: pass that of an encoder of images")
        self.spec, self.tower, self.dtype = spec, spec.tower, dtype
        self.weights = {name: np.asarray(weight, dtype) for name, weight in weights.items()}

    def forward(
        self,
        patches: Sequence[Array],
        places: Sequence[Array],
        positions: Sequence[tuple[Array, Array] | None],
        window_lens: Sequence[int] = (),
        tap: Tap | None = None,
    ) -> Array:
        """Compute the rows of images.

        Parameters
        ----------
        patches : sequence of numpy.ndarray
            The patches of each image, [num_patches, patch_dim], those that are merged being neighbours.
        places : sequence of numpy.ndarray
            Row and column of each patch, [2, num_patches].
        positions : sequence of (numpy.ndarray, numpy.ndarray) or None
            Rows of the table of positions that patches add, and their weights, both [num_patches, n]; None: there is
            no table.
        window_lens : sequence of int
            Where some layers see windows of an image, how many patches each window of all images has; those of a window
            are neighbours.
        tap : callable, optional
            Sees and replaces activations, see `Tap`.

        Returns
        -------
        numpy.ndarray
            [num_patches of all / merged_patches, levels * out_size].
        """
        counts, tower, spec = [len(own) for own in patches], self.tower, self.spec
        head = spec.layers[0].cache
        starts = np.cumsum([0, *counts])
        starts_of_windows = np.cumsum([0, *(window_lens or counts)])
        s = Step(
            spec=spec,
            layers=list(spec.layers),
            weights=self.weights,
            dtype=self.dtype,
            ropes=[rotation(np.concatenate(places, axis=1), rope, self.dtype) for rope in spec.ropes],
            starts=starts,
            positions=np.concatenate([np.arange(count) for count in counts]),
            cache=DynamicCache(
                [(head.num_kv_heads, head.head_dim)] * spec.num_layers, len(starts_of_windows) - 1, self.dtype
            ),
            tap=tap,
        )
        x = s.linear(np.concatenate(patches).astype(self.dtype), "model.embed_patches", tower.patch_bias)
        learned_table = s.weight("model.embed_positions") if tower.num_positions else None
        if tower.class_token and learned_table is not None:
            learned_table = np.concatenate([learned_table, s.weights["model.class_embedding"][None]])
        if tower.patch_norm and tower.norm_first:
            x = s.norm(x, "model.patch_norm")
        learned = [own for own in positions if own is not None]
        if learned:
            rows, weights = (np.concatenate(parts) for parts in zip(*learned, strict=True))
            assert learned_table is not None
            added = learned_table[rows]  # [num_tokens, n, hidden_size]
            x = x + np.sum(added * weights[..., None].astype(self.dtype), axis=1)
        if tower.patch_norm and not tower.norm_first:
            x = s.norm(x, "model.patch_norm")
        x = s.emit("embedding", x)
        levels: list[Array] = []
        for layer in range(spec.num_layers):
            s.layer = layer
            s.starts = starts_of_windows if s.layers[layer].cache.sliding_window else starts
            x = s.emit("residual", run_layer(s, x))
            if layer in tower.levels:
                name = f"model.level{len(levels)}_"
                levels.append(merge(s, tower, s.norm(merged(x, tower), f"{name}norm", tower.eps), name))
        s.layer = -1
        normed = s.emit("final_norm", s.norm(x, "model.norm", tower.eps)) if tower.norm else x
        if tower.class_token:
            normed = np.delete(normed, starts[1:] - 1, axis=0)
        return np.concatenate([merge(s, tower, pooled(s, tower, normed), "model.merger_"), *levels], axis=1)


def merged(x: Array, tower: TowerSpec) -> Array:
    """Neighbouring patches side by side: [num_patches, size] -> [num_rows, merged_patches * size]."""
    return x.reshape(-1, tower.merged_patches * x.shape[1])


def pooled(s: Step, tower: TowerSpec, x: Array) -> Array:
    """What the linears of the merger read: all numbers of neighbouring patches, or the normed mean of these."""
    if not tower.pooled:
        return merged(x, tower)
    mean = x.reshape(-1, tower.merged_patches, x.shape[1]).mean(axis=1) * s.scalar(tower.pooled_scale)
    if tower.standardized:
        mean = (mean - s.weights["model.std_bias"]) * s.weights["model.std_scale"]
    normed: Array = mean / np.sqrt(np.mean(mean * mean, axis=-1, keepdims=True) + s.scalar(tower.eps))
    if not tower.pooled_norm_weight:
        return normed
    weighed: Array = normed * (s.weight("model.merger_norm") + s.scalar(tower.pooled_norm_offset))
    return weighed


def merge(s: Step, tower: TowerSpec, x: Array, name: str) -> Array:
    """The linears of a merger, one behind the other: [num_rows, ..] -> [num_rows, out_size]."""
    for i, linear in enumerate(tower.merger):
        first = s.linear(x, f"{name}{i}_gate" if linear.gated else f"{name}{i}", linear.bias)
        if linear.norm_eps > 0:
            first = first - first.mean(axis=-1, keepdims=True)
            root = np.sqrt(np.mean(first * first, axis=-1, keepdims=True) + s.scalar(linear.norm_eps))
            first = first / root * s.weight(f"{name}{i}_norm") + s.weight(f"{name}{i}_norm", "bias")
        up = s.linear(x, f"{name}{i}_up", linear.bias) if linear.gated else np.ones_like(first)
        x = JOINS[linear.activation](first, up) if linear.activated else first
    return x
