"""The gated delta rule (arXiv 2412.06464), or with a decay of each row of a state (arXiv 2510.26692), token by token.

See `src/model/sublayers/delta.h`.
"""

from __future__ import annotations

import numpy as np

from infinilm._core import DeltaSpec
from infinilm.models.reference.ops import Array, sigmoid, silu
from infinilm.models.reference.step import Step

__all__ = ["delta_rule"]


def delta_rule(s: Step, spec: DeltaSpec, h: Array) -> Array:
    """Mix each token with the state of those before it: h [num_tokens, hidden_size] -> the same.

    The state of a row is its last inputs of the convolution [conv_size - 1, conv_dim] and, of each head, a matrix
    [num_v_heads, k_dim, v_dim].
    """
    num_tokens, at = len(h), s.name("linear_attn")
    mixed, z, b, a, taps = _apart(s, spec, h, at) if spec.apart else _joined(s, h, at)
    convolved = np.empty_like(mixed)
    matrices: list[Array] = []
    inputs: list[Array] = []
    for row, own in enumerate(s.rows):
        state = s.cache.state(s.layer, row)
        if state is None:
            zeros = np.zeros((spec.conv_size - 1, mixed.shape[1]), s.dtype)
            state = zeros, np.zeros((spec.num_v_heads, spec.k_dim, spec.v_dim), s.dtype)
        seen = np.concatenate([state[0], mixed[own]])
        length = len(seen) - spec.conv_size + 1
        convolved[own] = silu(sum(tap * seen[i : i + length] for i, tap in enumerate(taps)))
        inputs.append(seen[length:])
        matrices.append(state[1])
    convolved = s.emit("conv", convolved)
    q, k, v = np.split(convolved, [spec.k_size, 2 * spec.k_size], axis=1)
    group = spec.num_v_heads // spec.num_k_heads
    q, k = (np.repeat(x.reshape(num_tokens, -1, spec.k_dim), group, axis=1) for x in (q, k))
    q, k = (x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + s.scalar(1e-6)) for x in (q, k))
    q = q / np.sqrt(s.scalar(spec.k_dim))
    v = v.reshape(num_tokens, spec.num_v_heads, spec.v_dim)
    steps = (a + s.weights[f"{at}.dt_bias"]).reshape(num_tokens, spec.num_v_heads, -1, 1)
    rate = np.exp(s.weights[f"{at}.A_log"])[:, None, None]
    if spec.lower_bound:
        exponents = s.scalar(spec.lower_bound) * sigmoid(rate * steps)
    else:
        exponents = -rate * np.logaddexp(s.scalar(0), steps)
    decay = np.exp(exponents)  # [num_tokens, num_v_heads, 1 or k_dim, 1]
    beta = sigmoid(b) * s.scalar(2 if spec.doubled_beta else 1)
    out = np.empty_like(v)
    for row, own in enumerate(s.rows):
        matrix = matrices[row]
        for t in range(own.start, own.stop):
            matrix = matrix * decay[t]
            read = (matrix * k[t, :, :, None]).sum(axis=1)  # [num_v_heads, v_dim]
            matrix = matrix + k[t, :, :, None] * ((v[t] - read) * beta[t, :, None])[:, None]
            out[t] = (matrix * q[t, :, :, None]).sum(axis=1)
        if own.stop > own.start:
            s.cache.set_state(s.layer, row, inputs[row], matrix)
    normed = s.rms(out, spec.norm_eps) * s.weight(f"{at}.norm")
    z = z.reshape(out.shape)
    gated = s.emit(
        "attention", normed * (sigmoid(z) if spec.by_element else silu(z))
    )  # [num_tokens, num_v_heads, v_dim]
    return s.linear(gated.reshape(num_tokens, -1), f"{at}.out_proj", False)


def _joined(s: Step, h: Array, at: str) -> tuple[Array, ...]:
    """q, k and v in one, z, b, a, and the taps of the convolution, [conv_size, conv_dim]."""
    parts = (s.linear(h, f"{at}.in_proj_{name}", False) for name in ("qkv", "z", "b", "a"))
    return (*parts, s.weight(f"{at}.conv1d")[:, 0].T)


def _apart(s: Step, spec: DeltaSpec, h: Array, at: str) -> tuple[Array, ...]:
    """The same of linears and convolutions of q, k and v each; z and a may be made of few elements."""

    def low_rank(name: str) -> Array:
        if not spec.gate_rank:
            return s.linear(h, f"{at}.{name}_proj", False)
        return s.linear(s.linear(h, f"{at}.{name}_a_proj", False), f"{at}.{name}_b_proj", False)

    mixed = np.concatenate([s.linear(h, f"{at}.{name}_proj", False) for name in "qkv"], axis=1)
    taps = np.concatenate([s.weight(f"{at}.{name}_conv1d")[:, 0].T for name in "qkv"], axis=1)
    return mixed, low_rank("g"), s.linear(h, f"{at}.b_proj", False), low_rank("f"), taps
