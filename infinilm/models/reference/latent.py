"""Latent attention (MLA, arXiv 2405.04434). See `src/model/sublayers/latent.h`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from infinilm._core import LatentSpec
from infinilm.models.reference.attention import attend
from infinilm.models.reference.indexer import choose_keys
from infinilm.models.reference.ops import Array, rotate, sigmoid
from infinilm.models.reference.step import Step

__all__ = ["latent_attention"]


def latent_attention(s: Step, spec: LatentSpec, h: Array) -> Array:
    """Like `attention`, with latents: h [num_tokens, hidden_size] -> the same.

    The cache has a row of each token, [rope_dim + kv_rank]; values are the last kv_rank elements.
    """
    num_tokens, num_heads = len(h), spec.num_heads
    at, bias, table = s.name("self_attn"), spec.latent_bias, s.ropes[spec.rope]
    chosen: Sequence[Array | None] = [None] * len(s.rows)
    read, name = h, "q_proj"
    if spec.q_rank:
        q_latent = s.linear(h, f"{at}.q_a_proj", bias)
        read, name = s.norm(q_latent, f"{at}.q_a_layernorm", spec.norm_eps), "q_b_proj"
        if spec.indexer:
            if not spec.indexer.shared:
                s.chosen = choose_keys(s, spec.indexer, h, read, table)
            chosen = s.chosen
    q = s.linear(read, f"{at}.{name}", False).reshape(num_tokens, num_heads, spec.query_dim)
    q = s.emit("q_proj", q)
    if spec.q_scale >= 0:
        q = rotate(q, s.ropes[spec.q_scale])
    row = s.emit("k_proj", s.linear(h, f"{at}.kv_a_proj", bias)[:, None])  # [num_tokens, 1, row_dim]
    turned, latent = np.split(row, [spec.rope_dim], axis=-1)
    row = np.concatenate([turned, s.norm(latent, f"{at}.kv_a_layernorm", spec.norm_eps)], axis=-1)
    q_turned, q_rest = np.split(q, [spec.rope_dim], axis=-1)
    to_latent = s.weight(f"{at}.k_b_proj").reshape(num_heads, spec.kv_rank, spec.nope_dim)
    q = np.concatenate([q_turned, np.einsum("thd,hrd->thr", q_rest, to_latent)], axis=-1)
    q = s.emit("q_rope", rotate(q, table))
    row = s.emit("k_rope", rotate(row, table))
    attended = np.empty((num_tokens, num_heads, spec.kv_rank), h.dtype)
    for index, own in enumerate(s.rows):
        rows, _ = s.cache.append(s.layer, index, row[own], row[own])
        attended[own] = attend(q[own], rows, rows, spec.softmax_scale, visible=chosen[index])[..., spec.rope_dim :]
    to_values = s.weight(f"{at}.v_b_proj").reshape(num_heads, spec.v_dim, spec.kv_rank)
    values = np.einsum("thr,hvr->thv", attended, to_values)  # [num_tokens, num_heads, v_dim]
    if spec.head_gate:
        values = values * sigmoid(s.linear(h, f"{at}.gate_proj", False))[..., None]
    values = s.emit("attention", values)
    return s.linear(values.reshape(num_tokens, -1), f"{at}.o_proj", spec.out_bias)
