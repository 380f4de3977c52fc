"""The state space of Mamba-2 (arXiv 2405.21060), token by token. See `src/model/sublayers/mamba.h`."""

from __future__ import annotations

import numpy as np

from infinilm._core import MambaSpec
from infinilm.models.reference.ops import Array, silu
from infinilm.models.reference.step import Step

__all__ = ["mamba"]


def mamba(s: Step, spec: MambaSpec, h: Array) -> Array:
    """Mix each token with the state of those before it: h [num_tokens, hidden_size] -> the same.

    The state of a row is its last inputs of the convolution [conv_size - 1, conv_dim] and, of each head, a matrix
    [num_heads, state_dim, head_dim].
    """
    num_tokens, at = len(h), s.name("mamba")
    gate, mixed, dt = np.split(
        s.linear(h, f"{at}.in_proj", spec.proj_bias), [spec.size, 2 * spec.size + 2 * spec.group_size], axis=1
    )
    sections = [spec.x_multiplier] * spec.size + [spec.b_multiplier] * spec.group_size
    scales = np.array(sections + [spec.c_multiplier] * spec.group_size, s.dtype)
    taps = s.weight(f"{at}.conv1d")[:, 0].T * scales  # [conv_size, conv_dim]
    convolved = np.empty_like(mixed)
    kept: list[tuple[Array, Array]] = []  # of each row: the last inputs, and the matrices before its tokens
    for row, own in enumerate(s.rows):
        state = s.cache.state(s.layer, row)
        if state is None:
            zeros = np.zeros((spec.conv_size - 1, mixed.shape[1]), s.dtype)
            state = zeros, np.zeros((spec.num_heads, spec.state_dim, spec.head_dim), s.dtype)
        seen = np.concatenate([state[0], mixed[own]])
        length = len(seen) - spec.conv_size + 1
        total = sum(tap * seen[i : i + length] for i, tap in enumerate(taps))
        convolved[own] = silu(total + s.weight(f"{at}.conv1d", "bias") if spec.conv_bias else total)
        kept.append((seen[length:], state[1]))
    convolved = s.emit("conv", convolved)
    x, b, c = np.split(convolved, [spec.size, spec.size + spec.group_size], axis=1)
    x = x.reshape(num_tokens, spec.num_heads, spec.head_dim)
    heads_of_group = spec.num_heads // spec.num_groups
    b, c = (np.repeat(part.reshape(num_tokens, -1, spec.state_dim), heads_of_group, axis=1) for part in (b, c))
    softplus = np.logaddexp(s.scalar(0), s.scalar(spec.dt_multiplier) * dt + s.weights[f"{at}.dt_bias"])
    step = np.clip(softplus, spec.dt_min, spec.dt_max)[:, :, None]  # [num_tokens, num_heads, 1]
    decay = np.exp(-np.exp(s.weights[f"{at}.A_log"])[:, None] * step)
    out = np.empty_like(x)
    for row, own in enumerate(s.rows):
        matrix = kept[row][1]
        for t in range(own.start, own.stop):
            matrix = matrix * decay[t, :, :, None] + b[t, :, :, None] * (step[t] * x[t])[:, None]
            out[t] = (matrix * c[t, :, :, None]).sum(axis=1)
        if own.stop > own.start:
            s.cache.set_state(s.layer, row, kept[row][0], matrix)
    out = (out + s.weights[f"{at}.D"][:, None] * x).reshape(num_tokens, -1)
    gated = s.emit("scan", gate_and_norm(s, spec, out, gate).reshape(x.shape))
    return s.linear(gated.reshape(num_tokens, -1), f"{at}.out_proj", spec.proj_bias)


def gate_and_norm(s: Step, spec: MambaSpec, x: Array, gate: Array) -> Array:
    """Multiply x by its gate, and norm the heads of each group: both [num_tokens, size] -> the same."""
    gate = silu(s.scalar(spec.gate_multiplier) * gate)
    if spec.norm == "none":
        return x * gate
    x = x if spec.norm == "before_gate" else x * gate
    normed = s.rms(x.reshape(len(x), spec.num_groups, -1)).reshape(x.shape) * s.weight(s.name("mamba.norm"))
    return normed * gate if spec.norm == "before_gate" else normed
