"""One forward pass on its way through the decoder: what every sublayer reads of the model, and norms and linears.

It knows no kind of sublayer. See `src/model/step.h`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from infinilm._core import LayerSpec, ModelSpec
from infinilm.errors import RequestError
from infinilm.models.dynamic_cache import DynamicCache
from infinilm.models.reference.ops import Array

__all__ = ["Step", "Tap"]

Tap = Callable[[str, int, Array], Array | None]
"""Called with (name, layer, activation); if it returns an array, that replaces the activation. Layer -1: outside."""


@dataclass(slots=True)
class Step:
    """The new tokens of all rows, one row behind the other: sublayers work on [num_tokens, ...]."""

    spec: ModelSpec
    layers: Sequence[LayerSpec]  # of the spec, which makes new ones whenever it is asked; then those of the MTP head
    weights: Mapping[str, Array]  # in `dtype`
    dtype: str
    ropes: Sequence[tuple[Array, Array]]  # cosines and sines of each table: [num_tokens, 1, R / 2], see `ops.rotate`
    starts: Array  # [num_rows + 1]: row r has tokens starts[r] .. starts[r + 1]
    positions: Array  # [num_tokens]
    cache: DynamicCache
    tap: Tap | None
    layer: int = -1  # the one that runs; -1: none
    chosen: Sequence[Array] = ()  # the keys that tokens read which choose them, see `indexer.choose_keys`
    # Of layers that share a block: the embedding, [num_tokens, hidden_size]; where the modules of the block are; and
    # its linears that the layer adds to, with the names of the two linears behind each other that make what is added.
    embedded: Array = field(default_factory=lambda: np.empty((0, 0)))
    room: str = ""
    beside: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def norms(self) -> tuple[bool, bool]:
        """Whether sublayers of the layer that runs norm what they read, and what they add."""
        behind = self.layer >= 0 and self.layers[self.layer].norms_behind
        return self.spec.pre_norms and not behind, self.spec.post_norms or behind

    @property
    def rows(self) -> list[slice]:
        """The tokens of each row."""
        return list(map(slice, self.starts, self.starts[1:]))

    def emit(self, site: str, activation: Array) -> Array:
        """Show an activation to the tap, if there is one; return it, or the array that replaces it."""
        if self.tap is None:
            return activation
        name = site if self.layer < 0 else f"layer{self.layer}_{site}"
        replacement = self.tap(name, self.layer, activation)
        if replacement is None:
            return activation
        if replacement.shape != activation.shape:
            raise RequestError(f"{name}: a replacement must have shape {activation.shape}, got {replacement.shape}")
        return replacement.astype(activation.dtype)

    def name(self, module: str) -> str:
        """The name of a module of the layer that runs."""
        return f"{self.room or f'model.layers.{self.layer}'}.{module}"

    def weight(self, name: str, kind: str = "weight") -> Array:
        """A parameter of the module `name`."""
        return self.weights[f"{name}.{kind}"]

    def scalar(self, value: float) -> Any:
        """The number in the model's dtype."""
        return np.dtype(self.dtype).type(value)

    def linear(self, x: Array, name: str, bias: bool) -> Array:
        """[num_tokens, in_features] -> [num_tokens, out_features]."""
        clips = self.layer >= 0 and self.spec.clipped_linears
        if clips:
            x = np.clip(x, *(self.weight(f"{name}_clip", f"input_{bound}") for bound in ("min", "max")))
        y: Array = x @ self.weight(name).T
        y = y + self.weight(name, "bias") if bias else y
        if name in self.beside:
            down, up = self.beside[name]
            y = y + x @ self.weight(down).T @ self.weight(up).T
        if clips:
            y = np.clip(y, *(self.weight(f"{name}_clip", f"output_{bound}") for bound in ("min", "max")))
        return y

    def rms(self, x: Array, eps: float = 0) -> Array:
        """RMSNorm over the last axis, without weight; `eps` 0: that of the model."""
        own = self.scalar(eps or self.spec.rms_norm_eps)
        normed: Array = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + own)
        return normed

    def norm(self, x: Array, name: str, eps: float | None = None) -> Array:
        """RMSNorm or LayerNorm over the last axis; `eps` None: that of the model."""
        if self.spec.norm != "rms":
            x = x - np.mean(x, axis=-1, keepdims=True)
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        eps = self.spec.rms_norm_eps if eps is None else eps
        normed: Array = x / np.sqrt(mean_square + eps)
        if not self.spec.norm_weights:
            return normed
        normed = normed * (self.weight(name) + self.scalar(self.spec.norm_offset))
        return normed + self.weight(name, "bias") if self.spec.norm == "layer_bias" else normed
