"""Vectors that each token has for each layer. See `src/model/sublayers/own_vectors.h`."""

from __future__ import annotations

import numpy as np

from infinilm._core import OwnVectorsSpec
from infinilm.models.reference.ops import JOINS, Array
from infinilm.models.reference.step import Step

__all__ = ["make_own_vectors", "read_own_vectors"]


def make_own_vectors(s: Step, spec: OwnVectorsSpec, ids: Array, x: Array) -> Array:
    """Compute the vectors of tokens with these ids: x [num_tokens, hidden_size] -> [num_tokens, num_layers, size]."""
    shape = len(ids), s.spec.num_layers, spec.size
    ids = np.where(ids < spec.vocab_size, ids, 0)
    of_table = s.weight("model.embed_tokens_per_layer")[ids].reshape(shape) * s.scalar(shape[2] ** 0.5)
    projected = s.linear(x, "model.per_layer_model_projection", False)
    projected = projected.reshape(shape) * s.scalar(s.spec.hidden_size**-0.5)
    normed = s.norm(projected, "model.per_layer_projection_norm")
    own: Array = (normed + of_table) * s.scalar(0.5**0.5)
    return own


def read_own_vectors(s: Step, spec: OwnVectorsSpec, x: Array, own: Array) -> Array:
    """What a layer adds that reads its vectors [num_tokens, size] and x [num_tokens, hidden_size], as large as x."""
    gate = s.linear(x, s.name("per_layer_input_gate"), False)
    read = s.emit("per_layer_input", JOINS[spec.activation](gate, own))
    out = s.emit("per_layer_projection", s.linear(read, s.name("per_layer_projection"), False))
    return s.emit("post_per_layer_input_norm", s.norm(out, s.name("post_per_layer_input_norm")))
