"""The MLP of a layer, with a gate or without. See `src/model/sublayers/mlp.h`."""

from __future__ import annotations

import numpy as np

from infinilm._core import MlpSpec
from infinilm.models.reference.ops import JOINS, Array, silu, xielu
from infinilm.models.reference.step import Step

__all__ = ["joined", "mlp"]


def mlp(s: Step, spec: MlpSpec, h: Array) -> Array:
    """down_proj(activation(gate_proj(h)) * up_proj(h)): h [num_tokens, hidden_size] -> the same."""
    gate = s.emit("gate_proj", s.linear(h, s.name("mlp.gate_proj"), spec.bias)) if spec.gated else None
    up = s.emit("up_proj", s.linear(h, s.name("mlp.up_proj"), spec.bias))
    if gate is not None and spec.gate_deviations is not None:
        least = gate.mean(-1, keepdims=True) + s.scalar(spec.gate_deviations) * gate.std(-1, keepdims=True)
        gate = np.maximum(gate - least, s.scalar(0))
    gate, up = (up, np.ones_like(up)) if gate is None else (gate, up)
    inner = s.emit("activation", _activated(s, spec, gate, up))  # [num_tokens, intermediate_size]
    return s.linear(inner, s.name("mlp.down_proj"), spec.bias or spec.down_bias)


def _activated(s: Step, spec: MlpSpec, gate: Array, up: Array) -> Array:
    if spec.activation != "xielu":
        return joined(spec, gate, up)
    zero = s.scalar(0)
    alpha_p, alpha_n = (np.logaddexp(zero, s.weights[s.name(f"mlp.act_fn.{name}")]) for name in ("alpha_p", "alpha_n"))
    return xielu(gate, alpha_p, alpha_n + s.scalar(0.5)) * up


def joined(spec: MlpSpec, gate: Array, up: Array) -> Array:
    """activation(gate) * up of all activations without weights of their own."""
    if spec.activation != "clamped_silu":
        return JOINS[spec.activation](gate, up)
    limit = gate.dtype.type(spec.limit)
    clamped: Array = np.minimum(silu(gate), limit) * np.clip(up, -limit, limit)
    return clamped
