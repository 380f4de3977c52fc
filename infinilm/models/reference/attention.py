"""Attention: grouped heads, windows, RoPE, norms of heads, sinks, gates. See `src/model/sublayers/attention.h`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from infinilm._core import AttentionSpec, PositionBiasSpec
from infinilm.models.reference.indexer import choose_runs
from infinilm.models.reference.ops import Array, rotate, sigmoid, soft_cap
from infinilm.models.reference.step import Step

__all__ = ["attend", "attention"]


def attention(s: Step, spec: AttentionSpec, h: Array) -> Array:
    """Mix each token with those before it: h [num_tokens, hidden_size] -> the same."""
    num_tokens, owner = len(h), spec.kv_owner
    heads: dict[str, Array] = {}
    for name in ("q", "k", "v") if owner < 0 else ("q",):
        projected = s.linear(h, s.name(f"self_attn.{name}_proj"), spec.qkv_bias)
        if spec.clip_qkv:
            projected = np.clip(projected, -s.scalar(spec.clip_qkv), s.scalar(spec.clip_qkv))
        count = spec.num_heads if name == "q" else spec.num_kv_heads
        heads[name] = s.emit(f"{name}_proj", projected.reshape(num_tokens, count, -1))

    def norm_heads() -> None:
        for name in ("q", "k") if owner < 0 else ("q",):
            values = heads[name].reshape(num_tokens, -1) if spec.qk_norm == "all" else heads[name]
            if spec.qk_norm == "turned_heads":
                normed = s.rms(values)
            else:  # the weights of "layer_of_heads" are [num_heads, head_dim], and its models take off the mean
                normed = s.norm(values, s.name(f"self_attn.{name}_norm"))
            heads[name] = s.emit(f"{name}_norm", normed.reshape(heads[name].shape))

    if spec.qk_norm in ("head", "all", "layer_of_heads"):
        norm_heads()
    if spec.v_norm and owner < 0:
        heads["v"] = s.emit("v_norm", s.rms(heads["v"]))
    rope = spec.rope
    q_rope = rope if spec.q_rope < 0 else spec.q_rope
    for name, table in (("q", q_rope), ("k", rope)) if owner < 0 else (("q", q_rope),):
        turned = heads[name] if table < 0 else rotate(heads[name], s.ropes[table])
        heads[name] = s.emit(f"{name}_rope", turned)
    if spec.qk_norm == "head_behind_rope" or (spec.qk_norm == "turned_heads" and rope >= 0):
        norm_heads()
    bias = position_bias(s, s.spec.position_bias) if s.spec.position_bias else None
    value_dim = spec.v_head_dim or spec.head_dim
    if owner < 0:  # the rows of a cache are as long as a key
        heads["v"] = np.pad(heads["v"], ((0, 0), (0, 0), (0, spec.head_dim - value_dim)))
    chosen: Sequence[Array | None] = [None] * len(s.rows)
    if spec.indexer:
        chosen = choose_runs(s, spec.indexer, h, s.ropes[rope] if rope >= 0 else None)
    attended = np.empty((num_tokens, spec.num_heads, value_dim), h.dtype)
    for row, own in enumerate(s.rows):
        if owner < 0:
            k, v = s.cache.append(s.layer, row, heads["k"][own], heads["v"][own])
        else:
            k, v = s.cache.seen(owner, row, own.stop - own.start)
        sinks = s.weights[s.name("self_attn.sinks")] if spec.sinks else None
        attended[own] = attend(
            heads["q"][own],
            k,
            v,
            spec.softmax_scale,
            spec.score_cap,
            spec.sliding_window,
            spec.chunked,
            sinks,
            spec.two_way,
            bias,
            chosen[row],
        )[..., :value_dim]
    if spec.output_gate:
        gate = s.linear(h, s.name("self_attn.gate_proj"), spec.qkv_bias)
        gate = np.logaddexp(s.scalar(0), gate) if spec.softplus_gate else sigmoid(gate)
        attended = attended * gate.reshape(num_tokens, spec.num_heads, 1 if spec.gate_by_head else value_dim)
    attended = s.emit("attention", attended)
    return s.linear(attended.reshape(num_tokens, -1), s.name("self_attn.o_proj"), spec.out_bias)


def position_bias(s: Step, spec: PositionBiasSpec) -> Array:
    """What is added to scores, [num_heads, 2 * max_model_len - 1]: a column for each distance from a query to a key."""
    if spec.num_buckets:
        table: Array = s.weight("model.relative_attention_bias")  # [num_buckets, num_heads]
        learned: Array = table[np.array(spec.buckets)].T
        return learned
    reach = s.spec.max_model_len - 1
    slopes: Array = -np.outer(np.array(spec.slopes, s.dtype), np.abs(np.arange(-reach, reach + 1)).astype(s.dtype))
    return slopes


def attend(
    q: Array,
    k: Array,
    v: Array,
    softmax_scale: float,
    score_cap: float = 0,
    window: int = 0,
    chunked: bool = False,
    sinks: Array | None = None,
    two_way: bool = False,
    bias: Array | None = None,
    visible: Array | None = None,
) -> Array:
    """Attention of one row's last tokens over all of it, causal unless it is two_way.

    q [num_tokens, num_heads, head_dim]; k, v [length, num_kv_heads, head_dim]; out as q. Query head h reads kv
    head h // (num_heads / num_kv_heads). With a window w, position p sees p - w + 1 .. p, or, where windows are chunks,
    from the last multiple of w on. If it is two_way, a window reaches as far in the other direction. A head's sink, of
    [num_heads], joins the softmax of its scores, with no value. The bias of a head, of [num_heads, distances], is added
    to its scores by the distance from a query to a key, the one of distance 0 being in the middle.
    `visible`, [num_tokens, length] bool, or of each kv head: the keys that each token reads, in place of those that it
    sees.
    """
    num_tokens, num_heads, head_dim = q.shape
    length, num_kv_heads, _ = k.shape
    group = num_heads // num_kv_heads
    grouped = q.reshape(num_tokens, num_kv_heads, group, head_dim).transpose(1, 2, 0, 3)
    keys = k.transpose(1, 2, 0)[:, None]  # [num_kv_heads, 1, head_dim, length]
    scores = grouped @ keys * softmax_scale  # [num_kv_heads, group, num_tokens, length]
    scores = soft_cap(scores, score_cap)
    behind = np.arange(length - num_tokens, length)[:, None] - np.arange(length)[None, :]
    if bias is not None:
        by_distance = bias[:, bias.shape[1] // 2 - behind]  # [num_heads, num_tokens, length]
        scores = scores + by_distance.reshape(num_kv_heads, group, *behind.shape)
    reach = np.arange(length - num_tokens, length)[:, None] % window + 1 if chunked and window else window
    if visible is not None and visible.ndim == 3:
        visible = visible[:, None]
    if visible is None:
        visible = (behind >= 0) & (behind < reach if window else True)
    if two_way:
        visible = np.abs(behind) < (window or length)
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
