"""Indexers, by which a token chooses the keys that it reads. See `src/model/sublayers/indexer.h`."""

from __future__ import annotations

import numpy as np

from infinilm._core import IndexerSpec
from infinilm.models.reference.ops import Array, rotate
from infinilm.models.reference.step import Step

__all__ = ["choose_keys", "choose_runs"]


def choose_keys(s: Step, spec: IndexerSpec, h: Array, q_latent: Array, table: tuple[Array, Array]) -> list[Array]:
    """The keys that tokens read: for each sequence of the step, [num_tokens, length] bool.

    h [num_tokens, hidden_size]; q_latent [num_tokens, q_rank]. Those with the largest scores of those that it sees; of
    equals the earlier ones.
    """
    at = s.name("self_attn.indexer")
    q = s.linear(q_latent, f"{at}.wq_b", False).reshape(len(h), spec.num_heads, spec.head_dim)
    key = s.linear(h, f"{at}.wk", False)
    key = key - np.mean(key, axis=-1, keepdims=True)
    key = key / np.sqrt(np.mean(key * key, axis=-1, keepdims=True) + s.scalar(spec.norm_eps))
    key = key * s.weight(f"{at}.k_norm") + s.weight(f"{at}.k_norm", "bias")
    q, key = s.emit("index_q", rotate(q, table)), s.emit("index_k", rotate(key[:, None], table))
    weights = s.emit("index_weights", s.linear(h, f"{at}.weights_proj", False))  # [num_tokens, num_heads]
    chosen = []
    for index, own in enumerate(s.rows):
        keys = s.cache.append_index(s.layer, index, key[own])[:, 0]  # [length, head_dim]
        scores = np.einsum("thk,th->tk", np.maximum(q[own] @ keys.T, 0), weights[own])
        sees = _sees(*scores.shape)
        chosen.append(_best(np.where(sees, scores, -np.inf), spec.top_k) & sees)
    return chosen


def choose_runs(s: Step, spec: IndexerSpec, h: Array, table: tuple[Array, Array] | None) -> list[Array]:
    """The keys that tokens read through each head: for each sequence, [num_heads, num_tokens, length] bool.

    h [num_tokens, hidden_size]; table: of RoPE, None: there is none. Not `by_head`, all heads would choose together, by
    their sum. The runs of keys with the largest score in them,
    of equals the earlier ones, and always the last ones up to the token's own.
    """
    at, heads = s.name("self_attn.indexer"), {}
    for name, count in (("q", spec.num_heads), ("k", 1)):
        values = s.linear(h, f"{at}.{name}_proj", False).reshape(len(h), count, spec.head_dim)
        values = s.norm(values, f"{at}.{name}_norm", spec.norm_eps)
        heads[name] = s.emit(f"index_{name}", values if table is None else rotate(values, table))
    chosen = []
    for index, own in enumerate(s.rows):
        keys = s.cache.append_index(s.layer, index, heads["k"][own])[:, 0]  # [length, head_dim]
        scores = heads["q"][own].transpose(1, 0, 2) @ keys.T  # [num_heads, num_tokens, length]
        if not spec.by_head:
            scores = scores.sum(axis=0, keepdims=True)
        num_tokens, length = scores.shape[1:]
        sees, num_runs = _sees(num_tokens, length), -(-length // spec.run_keys)
        scores = np.where(sees, scores, -np.inf)
        scores = np.pad(scores, ((0, 0), (0, 0), (0, num_runs * spec.run_keys - length)), constant_values=-np.inf)
        of_runs = scores.reshape(*scores.shape[:2], num_runs, spec.run_keys).max(axis=-1)
        before_own = np.arange(length - num_tokens, length)[:, None] // spec.run_keys - np.arange(num_runs)
        of_runs = np.where((before_own >= 0) & (before_own < spec.last_runs), np.inf, of_runs)
        best = _best(of_runs, spec.top_k // spec.run_keys)
        chosen.append(np.repeat(best, spec.run_keys, axis=-1)[..., :length] & sees)
    return chosen


def _sees(num_tokens: int, length: int) -> Array:
    """The keys that the last tokens of a sequence see, themselves among them: [num_tokens, length] bool."""
    return np.arange(length) <= np.arange(length - num_tokens, length)[:, None]


def _best(scores: Array, count: int) -> Array:
    """Whether each element is among the largest of the last axis; of equals the earlier ones."""
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :count]
    best = np.zeros(scores.shape, np.bool_)
    np.put_along_axis(best, order, True, axis=-1)
    return best
