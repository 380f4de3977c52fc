"""Functions of arrays that `ReferenceModel` consists of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm.config.experts import ExpertFacts
from infinilm.config.families import ModelFacts
from infinilm.errors import RequestError

__all__ = [
    "JOINS",
    "Array",
    "Emitter",
    "Tap",
    "attend",
    "rotate",
    "route",
    "sigmoid",
    "silu",
    "soft_cap",
    "stored_array",
]

Array = npt.NDArray[Any]  # of the model's dtype
Tap = Callable[[str, int, Array], Array | None]
"""Called with (name, layer, activation); what it returns, if anything, replaces the activation. Layer -1: outside."""


def rotate(x: Array, cos_sin: tuple[Array, Array]) -> Array:
    """RoPE of the first R elements of a head: i turns with i + R / 2; x [num_tokens, num_heads, head_dim]."""
    cos, sin = cos_sin
    first, second, rest = np.split(x, [cos.shape[-1], 2 * cos.shape[-1]], axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def silu(x: Array) -> Array:
    """X times its sigmoid."""
    with np.errstate(over="ignore"):  # far below zero: x / inf is the 0 it should be
        result: Array = x / (1 + np.exp(-x))
    return result


def sigmoid(x: Array) -> Array:
    """1 / (1 + e^-x)."""
    with np.errstate(over="ignore"):
        result: Array = 1 / (1 + np.exp(-x))
    return result


def gelu_tanh(x: Array) -> Array:
    result: Array = x / 2 * (1 + np.tanh(x.dtype.type((2 / np.pi) ** 0.5) * (x + x.dtype.type(0.044715) * x * x * x)))
    return result


def clamped_swiglu(gate: Array, up: Array) -> Array:
    scalar = gate.dtype.type
    gate, up = np.minimum(gate, scalar(7)), np.clip(up, scalar(-7), scalar(7))
    result: Array = silu(gate * scalar(1.702)) / scalar(1.702) * (up + 1)
    return result


# What joins gate and up.
JOINS: Mapping[str, Callable[[Array, Array], Array]] = {
    "silu": lambda gate, up: silu(gate) * up,
    "gelu_tanh": lambda gate, up: gelu_tanh(gate) * up,
    "relu2": lambda gate, up: np.square(np.maximum(gate, 0)) * up,
    "clamped_swiglu": clamped_swiglu,
}


def soft_cap(x: Array, cap: float) -> Array:
    """Cap * tanh(x / cap); 0: none."""
    return x if cap == 0 else x.dtype.type(cap) * np.tanh(x / x.dtype.type(cap))


def route(logits: Array, facts: ExpertFacts, correction: Array | None, scales: Array | None) -> tuple[Array, Array]:
    """Choose each token's experts and weigh them: logits [num_tokens, num_experts] -> both [num_tokens, top_k].

    `correction` is added to scores for the choice alone, `scales` multiply weights: [num_experts] each.
    """
    if facts.scoring == "sigmoid":
        scores = sigmoid(logits)
    else:
        scores = np.exp(logits - logits.max(axis=-1, keepdims=True))
        scores = scores / scores.sum(axis=-1, keepdims=True)
    choice = scores if correction is None else scores + correction
    groups = choice.reshape(len(choice), facts.num_groups, -1).copy()  # [num_tokens, num_groups, experts of one]
    of_groups = np.sort(groups, axis=-1)[..., -facts.group_best :].sum(axis=-1)
    left_out = np.argsort(-of_groups, axis=-1, kind="stable")[:, facts.top_groups :]
    np.put_along_axis(groups, left_out[..., None], -np.inf, axis=1)
    best = np.argsort(-groups.reshape(choice.shape), axis=-1, kind="stable")[:, : facts.top_k]
    weights = np.take_along_axis(scores, best, axis=-1)
    if facts.norm_topk_prob:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + scores.dtype.type(1e-20))
    weights = weights * scores.dtype.type(facts.scale)
    return best, weights if scales is None else weights * scales[best]


def attend(q: Array, k: Array, v: Array, facts: ModelFacts, window: int = 0, sinks: Array | None = None) -> Array:
    """Causal attention of one row's last tokens over all of it.

    q [num_tokens, num_heads, head_dim]; k, v [length, num_kv_heads, head_dim]; out as q. Query head h reads kv
    head h // (num_heads / num_kv_heads). With a window w, position p sees p - w + 1 .. p, or, where windows are chunks,
    from the last multiple of w on. A head's sink, of [num_heads], joins the softmax of its scores, with no value.
    """
    num_tokens, num_heads, head_dim = q.shape
    length, num_kv_heads, _ = k.shape
    group = num_heads // num_kv_heads
    grouped = q.reshape(num_tokens, num_kv_heads, group, head_dim).transpose(1, 2, 0, 3)
    keys = k.transpose(1, 2, 0)[:, None]  # [num_kv_heads, 1, head_dim, length]
    scores = grouped @ keys * facts.softmax_scale  # [num_kv_heads, group, num_tokens, length]
    scores = soft_cap(scores, facts.score_cap)
    behind = np.arange(length - num_tokens, length)[:, None] - np.arange(length)[None, :]
    reach = np.arange(length - num_tokens, length)[:, None] % window + 1 if facts.chunked and window else window
    visible = (behind >= 0) & (behind < reach if window else True)
    scores = np.where(visible, scores, -np.inf)
    if sinks is not None:
        own = np.broadcast_to(sinks.reshape(num_kv_heads, group, 1, 1), (*scores.shape[:-1], 1))
        scores = np.concatenate([scores, own], axis=-1)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True, initial=-np.inf))
    weights = weights / weights.sum(axis=-1, keepdims=True)
    weights = weights[..., :length]
    out = weights @ v.transpose(1, 0, 2)[:, None]  # [num_kv_heads, group, num_tokens, head_dim]
    attended: Array = out.transpose(2, 0, 1, 3).reshape(q.shape)
    return attended


def stored_array(array: Array, dtype: str) -> Array:
    """A tensor of a checkpoint, bfloat16 (uint16 in numpy) widened."""
    return (array.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else array


class Emitter:
    """Shows activations to the tap, if there is one, and lets it replace them."""

    def __init__(self, tap: Tap | None) -> None:
        self._tap = tap

    def __call__(self, site: str, layer: int, activation: Array) -> Array:
        """The activation, or what replaces it."""
        if self._tap is None:
            return activation
        name = site if layer < 0 else f"layer{layer}_{site}"
        replacement = self._tap(name, layer, activation)
        if replacement is None:
            return activation
        if replacement.shape != activation.shape:
            raise RequestError(f"{name}: a replacement must have shape {activation.shape}, got {replacement.shape}")
        return replacement.astype(activation.dtype)
