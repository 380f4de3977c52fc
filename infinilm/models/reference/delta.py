"""The gated delta rule (arXiv 2412.06464), token by token. See `src/model/sublayers/delta.h`."""

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
    mixed, z, b, a = (s.linear(h, f"{at}.in_proj_{name}", False) for name in ("qkv", "z", "b", "a"))
    taps = s.weight(f"{at}.conv1d")[:, 0].T  # [conv_size, conv_dim]
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
    softplus = np.logaddexp(s.scalar(0), a + s.weights[f"{at}.dt_bias"])
    decay = np.exp(-np.exp(s.weights[f"{at}.A_log"]) * softplus)  # [num_tokens, num_v_heads]
    beta = sigmoid(b)
    out = np.empty_like(v)
    for row, own in enumerate(s.rows):
        matrix = matrices[row]
        for t in range(own.start, own.stop):
            matrix = matrix * decay[t, :, None, None]
            read = (matrix * k[t, :, :, None]).sum(axis=1)  # [num_v_heads, v_dim]
            matrix = matrix + k[t, :, :, None] * ((v[t] - read) * beta[t, :, None])[:, None]
            out[t] = (matrix * q[t, :, :, None]).sum(axis=1)
        if own.stop > own.start:
            s.cache.set_state(s.layer, row, inputs[row], matrix)
    normed = s.rms(out) * s.weight(f"{at}.norm")
    gated = s.emit("attention", normed * silu(z.reshape(out.shape)))  # [num_tokens, num_v_heads, v_dim]
    return s.linear(gated.reshape(num_tokens, -1), f"{at}.out_proj", False)
