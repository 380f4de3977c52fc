"""Alternating updates of several residual streams. See `src/model/altup.h`."""

from __future__ import annotations

import numpy as np

from infinilm._core import AltUpSpec
from infinilm.models.reference.ops import Array
from infinilm.models.reference.step import Step

__all__ = ["correct", "join", "predict", "split"]

_LEAST_MEAN_SQUARE = 1e-5


def split(s: Step, spec: AltUpSpec, x: Array) -> Array:
    """Make the streams of the embedding x [num_tokens, hidden_size]: [num_streams, num_tokens, hidden_size]."""
    names = [f"model.altup_projections.{i}" for i in range(spec.num_streams - 1)]
    return np.stack([x, *(_as_large(s, s.linear(x, name, False), x) for name in names)])


def join(s: Step, streams: Array, x: Array) -> Array:
    """The mean of x [num_tokens, hidden_size], the active stream, and of the others, which are projected."""
    projected = [
        _as_large(s, s.linear(stream, f"model.altup_unembed_projections.{i}", False), x)
        for i, stream in enumerate(streams[1:])
    ]
    mean: Array = np.mean([x, *projected], axis=0, dtype=x.dtype)
    return mean


def predict(s: Step, streams: Array) -> Array:
    """What a layer is thought to make of the streams [num_streams, num_tokens, hidden_size], the first being active."""
    count = len(streams)
    coefficients = s.linear(_modes(s, streams[0]), s.name("altup.prediction_coefs"), False)
    coefficients = coefficients.reshape(-1, count, count)  # [num_tokens, to, from]
    predicted: Array = streams + np.einsum("tji,ith->jth", coefficients, streams)
    return predicted


def correct(s: Step, streams: Array, x: Array) -> Array:
    """Correct predicted streams [num_streams, num_tokens, hidden_size] by x, which the first of them has become."""
    coefficients = s.linear(_modes(s, x), s.name("altup.correction_coefs"), False) + 1  # [num_tokens, num_streams]
    corrected: Array = streams + coefficients.T[..., None] * (x - streams[0])
    return corrected


def _modes(s: Step, x: Array) -> Array:
    """Numbers of a token by which streams are mixed: x [num_tokens, hidden_size] -> [num_tokens, num_streams]."""
    read = s.norm(x, s.name("altup.router_norm")) / s.scalar(s.spec.hidden_size)
    modes: Array = np.tanh(s.linear(read, s.name("altup.modality_router"), False))
    return modes


def _as_large(s: Step, x: Array, like: Array) -> Array:
    own, other = (np.mean(rows * rows, axis=-1, keepdims=True) for rows in (x, like))
    scaled: Array = x * np.sqrt(other) / np.sqrt(np.maximum(own, s.scalar(_LEAST_MEAN_SQUARE)))
    return scaled
