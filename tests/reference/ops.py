"""The float64 numpy oracle of every op in src/ops/backend.h: formulas first, speed never.

Called by tests/ops (against the backends) and by tests/ops/test_oracle.py (against independent formulas).
Arguments are float64 arrays of the values a backend sees, that is after rounding to the stored dtype:
`load(store(x, d), d)`. Nothing here knows about layouts, threads or instruction sets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
F64 = NDArray[np.float64]
FLOATING = ("float32", "bfloat16", "float16")


# ---------------------------------------------------------------------------------------------- stored values


def store(values: Array, dtype: str) -> Array:
    """Round to nearest even: float32, float16 arrays, or uint16 bit patterns for bfloat16 (numpy has
    none).
    """
    with np.errstate(over="ignore", invalid="ignore"):  # infinities and NaN are stored as such
        single = np.ascontiguousarray(values, dtype=np.float32)
        if dtype == "float32":
            return single.copy() if single is values else single
        if dtype == "float16":
            return single.astype(np.float16)
    if dtype != "bfloat16":
        raise ValueError(f"not a floating dtype: {dtype}")
    bits = single.view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(single), ((bits >> 16) | 0x40).astype(np.uint16), rounded)


def load(stored: Array, dtype: str) -> F64:
    """The exact float64 value of what `store` made."""
    if dtype == "bfloat16":
        stored = (np.ascontiguousarray(stored).astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        return stored.astype(np.float64)


def store_int8(values: Array) -> tuple[Array, Array]:
    """Integers and a float32 scale for each row of the last axis: what an int8 KV cache keeps of a head."""
    largest = np.abs(values.astype(np.float32)).max(axis=-1)
    scales = largest / np.float32(127)
    with np.errstate(divide="ignore", invalid="ignore"):
        integers = np.where(largest[..., None] > 0, np.rint(values * (127 / largest.astype(np.float64))[..., None]), 0)
    return integers.astype(np.int8), scales


# ------------------------------------------------------------------------------------------------------- rows


def embedding(ids: Array, table: F64) -> F64:
    """out[t] = table[ids[t]]; ids [num_tokens], table [vocab_size, hidden_size]."""
    return table[ids]


def gather_rows(x: Array, rows: Array) -> Array:
    """out[r] = x[rows[r]]; x [num_tokens, hidden_size], rows [num_rows]."""
    return x[rows]


def rms_norm(x: F64, weight: F64, eps: float) -> F64:
    """out = x / sqrt(mean(x^2) + eps) * weight over the last dimension; x [..., size], weight [size]."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def layer_norm(x: F64, weight_and_bias: F64, eps: float) -> F64:
    """RMSNorm of x - mean(x), + bias; x [..., size], weight_and_bias [2, size]."""
    weight, bias = weight_and_bias
    return rms_norm(x - np.mean(x, axis=-1, keepdims=True), weight, eps) + bias


def add_rms_norm(x: F64, residual: F64, weight: F64, eps: float) -> tuple[F64, F64]:
    """(residual + x, rms_norm of it). The sum is stored, so it is rounded to float32 before it is normed."""
    total = store(residual + x, "float32").astype(np.float64)
    return total, rms_norm(total, weight, eps)


def silu(x: F64) -> F64:
    """x / (1 + exp(-x))."""
    return x * _sigmoid(x)


def _sigmoid(x: F64) -> F64:
    """1 / (1 + exp(-x)), written so that neither sign overflows."""
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + small), small / (1 + small))


def gelu_tanh(x: F64) -> F64:
    """x / 2 * (1 + tanh(u)), u = sqrt(2 / pi) * (x + 0.044715 x^3), which is x / (1 + exp(-2 u))."""
    return x * _sigmoid(2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))


def gelu(x: F64) -> F64:
    """x / 2 * (1 + erf(x / sqrt(2)))."""
    return x / 2 * np.vectorize(math.erfc, otypes=[np.float64])(-x / math.sqrt(2))


def quick_gelu(x: F64) -> F64:
    """x / (1 + exp(-1.702 x))."""
    return x * _sigmoid(1.702 * x)


def relu(x: F64) -> F64:
    """max(x, 0)."""
    return np.maximum(x, 0)


def xielu(x: F64, alpha_p: float, alpha_n: float) -> F64:
    """alpha_p x^2 + x / 2 above 0; below it alpha_n (e^c - 1 - x) + x / 2 with c = min(x, -1e-6)."""
    below = alpha_n * (np.expm1(np.minimum(x, -1e-6)) - x)
    return np.where(x > 0, alpha_p * x * x, below) + x / 2


def relu2(x: F64) -> F64:
    """max(x, 0)^2."""
    return np.square(np.maximum(x, 0))


ACTIVATIONS = {
    "silu": silu,
    "gelu_tanh": gelu_tanh,
    "relu": relu,
    "relu2": relu2,
    "gelu": gelu,
    "quick_gelu": quick_gelu,
}  # of an MLP


def join(activation: str, gate: F64, up: F64, limit: float = 0) -> F64:
    """activation(gate) * up; "clamped_swiglu": of gpt-oss; "clamped_silu": of Step; "sigmoid", "softplus": of gates."""
    if activation == "clamped_silu":
        return np.minimum(silu(gate), limit) * np.clip(up, -limit, limit)
    if activation == "sigmoid":
        return _sigmoid(gate) * up
    if activation == "softplus":
        return np.logaddexp(0, gate) * up
    if activation != "clamped_swiglu":
        return ACTIVATIONS[activation](gate) * up
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    return gate * _sigmoid(1.702 * gate) * (up + 1)


def act_mul(gate_up: F64, activation: str = "silu") -> F64:
    """out = join(gate, up); gate_up [num_tokens, 2 * intermediate_size]: gate, then up."""
    gate, up = np.split(gate_up, 2, axis=-1)
    return join(activation, gate, up)


def sparsify(x: F64, deviations: float) -> F64:
    """What of each row lies above its mean and so many standard deviations, less that; x [..., size]."""
    least = x.mean(-1, keepdims=True) + deviations * x.std(-1, keepdims=True)
    return np.maximum(x - least, 0)


def match_rms(x: F64, like: F64, least: float) -> F64:
    """Rows of x as large as those of `like`, by the root of their mean squares; both [n, size]."""
    own, other = (np.mean(rows * rows, axis=-1, keepdims=True) for rows in (x, like))
    return x * np.sqrt(other / np.maximum(own, least))


def mix_streams(x: F64, streams: F64, router: F64, coefficients: F64, corrects: bool, eps: float) -> tuple[F64, F64]:
    """AltUp (arXiv:2301.13310): x [n, size] is the active one of streams [num_streams, n, size]; router
    [num_streams, size]; coefficients [num_streams, num_streams], or of a prediction [num_streams^2, num_streams].
    """
    count = len(streams)
    mixed = np.tanh(rms_norm(x, np.ones(x.shape[1]), eps) @ router.T) @ coefficients.T
    if corrects:
        after = streams + (1 + mixed.T[..., None]) * (x - streams[0])
    else:
        before = np.concatenate([x[None], streams[1:]])
        after = before + np.einsum("nji,inh->jnh", mixed.reshape(-1, count, count), before)
    return after[0], after


def clip(x: F64, low: float, high: float) -> F64:
    """The nearer bound of what is beyond one."""
    return np.minimum(np.maximum(x, low), high)


def soft_cap(x: F64, cap: float) -> F64:
    """cap * tanh(x / cap)."""
    return cap * np.tanh(x / cap)


def best_experts(scores: F64, top_k: int, num_groups: int = 1, top_groups: int = 1, group_best: int = 2) -> Array:
    """[n, top_k]: the best of scores [n, num_experts], equal ones by id, in the groups whose best ones are best."""
    groups = scores.reshape(len(scores), num_groups, -1)  # [n, num_groups, experts of a group]
    of_groups = np.sort(groups, axis=-1)[..., -group_best:].sum(-1)
    kept = np.argsort(-of_groups, axis=-1, kind="stable")[:, :top_groups]
    outside = np.ones((len(scores), num_groups), bool)
    np.put_along_axis(outside, kept, False, axis=-1)
    allowed = np.where(outside[..., None], -np.inf, groups).reshape(scores.shape)
    return np.argsort(-allowed, axis=-1, kind="stable")[:, :top_k]


def sum_parts(parts: F64) -> F64:
    """out [size]: parts [num_parts, size] added up."""
    total: F64 = parts.sum(0)
    return total


def linear(
    x: F64,
    parts: Sequence[tuple[F64, F64 | None]],
    kind: Literal["plain", "act_mul"] = "plain",
    residual: F64 | None = None,
    activation: str = "silu",
) -> F64:
    """out[t, n] = x[t] . weight[n] + bias[n] (+ residual[t, n]), the parts joined along n.

    x [num_tokens, in_features]; each part (weight [out_features, in_features], bias [out_features] or None).
    "act_mul": two parts, out = activation(gate) * up (+ residual).
    """
    products = [x @ weight.T + (0.0 if bias is None else bias) for weight, bias in parts]
    if kind == "act_mul":
        gate, up = products
        out = join(activation, gate, up)
    else:
        out = np.concatenate(products, axis=-1)
    return out if residual is None else out + residual


def lora(y: F64, x: F64, a: F64, b: F64, scale: float) -> F64:
    """What an adapter makes of a linear's output: y [num_tokens, out_features] + scale * x a^T b^T.

    x [num_tokens, in_features], a [rank, in_features], b [out_features, rank].
    """
    return y + scale * ((x @ a.T) @ b.T)


# ------------------------------------------------------------------------------------------------------- rope


def rope_table(positions: Array, inv_freq: F64, attention_factor: float) -> F64:
    """[num_tokens, rotary_dim]: attention_factor * cos(p * f) for every f, then as many sines.

    positions: [num_tokens], or [num_tokens, rotary_dim / 2] where frequencies turn by different ones.
    """
    angle = positions.astype(np.float64).reshape(len(positions), -1) * inv_freq
    return np.concatenate([np.cos(angle), np.sin(angle)], axis=-1) * attention_factor


def rope(x: F64, cos_sin: F64) -> F64:
    """Rotate the pairs (i, i + rotary_dim / 2) of each head; what lies past rotary_dim stays.

    x [num_tokens, num_heads, head_dim], cos_sin [num_tokens, rotary_dim].
    """
    half = cos_sin.shape[-1] // 2
    cos, sin = cos_sin[:, None, :half], cos_sin[:, None, half:]
    first, second = x[..., :half], x[..., half : 2 * half]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :]], axis=-1)


def qk_norm_rope(
    qkv: F64,
    cos_sin: F64,
    q_norm: F64 | None,
    k_norm: F64 | None,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
) -> F64:
    """qkv [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] with q and k normed per head and
    rotated.
    """
    heads = qkv.reshape(len(qkv), num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = np.split(heads, [num_heads, num_heads + num_kv_heads], axis=1)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    return np.concatenate([rope(q, cos_sin), rope(k, cos_sin), v], axis=1).reshape(qkv.shape)


def store_kv(rows: Array, slot_mapping: Array, cache: Array) -> Array:
    """A copy of cache [num_blocks, num_kv_heads, block_size, head_dim] with rows [num_tokens, num_kv_heads,
    head_dim] at slot = block * block_size + offset; slot -1 stores nothing.
    """
    out = cache.copy()
    block_size = cache.shape[2]
    for row, slot in zip(rows, slot_mapping.tolist(), strict=True):
        if slot >= 0:
            out[slot // block_size, :, slot % block_size] = row
    return out


# -------------------------------------------------------------------------------------------------- attention


def softmax(scores: F64) -> F64:
    """exp(s - max) / sum over the last dimension; a row of -inf alone is not allowed."""
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def gather_cache(cache: Array, blocks: Array, context: int) -> Array:
    """The first `context` rows of one sequence, [context, num_kv_heads, head_dim]."""
    block_size = cache.shape[2]
    positions = np.arange(context)
    return cache[blocks[positions // block_size], :, positions % block_size]


def attention(
    q: F64,
    k: F64,
    v: F64,
    softmax_scale: float,
    sliding_window: int,
    score_cap: float = 0,
    sinks: F64 | None = None,
    chunked: bool = False,
    two_way: bool = False,
    position_bias: F64 | None = None,
    sees_end: bool = False,
) -> tuple[F64, F64]:
    """Attention of one sequence, the queries being the last of its positions; causal unless it is two_way.

    q [queries, num_heads, head_dim], k and v [context, num_kv_heads, head_dim]; query i stands at position p
    = context - queries + i and sees keys max(0, p - sliding_window + 1) .. p (window 0: all; chunked: from the last
    multiple of sliding_window on; two_way: also p + 1 .. p + sliding_window - 1, or all; sees_end: also all behind
    it in any window). Returns out
    [queries, num_heads, head_dim] and its magnitude, sum(p |v|) * (1 + max |score|): what a relative error in
    the scores is multiplied by. sinks [num_heads]: join the softmax of each query's scores, without a value.
    position_bias [num_heads, 2 * n - 1]: column n - 1 + key - p is added to the score of a key, behind score_cap.
    """
    queries, num_heads, _ = q.shape
    context, num_kv_heads, _ = k.shape
    group = num_heads // num_kv_heads
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k) * softmax_scale
    if score_cap > 0:
        scores = soft_cap(scores, score_cap)
    position = (context - queries + np.arange(queries))[:, None]
    key = np.arange(context)[None, :]
    if position_bias is not None:
        scores = scores + position_bias[:, position_bias.shape[1] // 2 + key - position]
    seen = key < position + (sliding_window or context) if two_way else key <= position
    seen |= sees_end
    if sliding_window > 0:
        seen &= key >= position // sliding_window * sliding_window if chunked else key > position - sliding_window
    largest = score_cap + np.max(np.abs(scores), where=seen, initial=0.0, axis=-1)  # a cap rounds to its own size
    scores = np.where(seen, scores, -np.inf)
    if sinks is not None:
        largest = largest + np.abs(sinks)[:, None]
        own = np.broadcast_to(sinks[:, None, None], (num_heads, queries, 1))
        scores = np.concatenate([scores, own], axis=-1)
    weights = softmax(scores)[..., :context]
    out = np.einsum("hqk,khd->qhd", weights, v)
    return out, np.einsum("hqk,khd->qhd", weights, np.abs(v)) * (1 + largest.T[:, :, None])


def paged_attention(
    q: F64,
    k_cache: F64,
    v_cache: F64,
    block_table: Array,
    cu_seqlens_q: Array,
    context_lens: Array,
    softmax_scale: float,
    sliding_window: int,
) -> tuple[F64, F64]:
    """`attention` for every sequence s: queries cu_seqlens_q[s] .. cu_seqlens_q[s + 1], keys through
    block_table[s].

    q [num_tokens, num_heads, head_dim], caches [num_blocks, num_kv_heads, block_size, head_dim].
    """
    out, magnitude = np.zeros_like(q), np.zeros_like(q)
    for s, context in enumerate(context_lens.tolist()):
        begin, end = int(cu_seqlens_q[s]), int(cu_seqlens_q[s + 1])
        if begin == end:
            continue
        k, v = (gather_cache(cache, block_table[s], context) for cache in (k_cache, v_cache))
        out[begin:end], magnitude[begin:end] = attention(q[begin:end], k, v, softmax_scale, sliding_window)
    return out, magnitude


# --------------------------------------------------------------------------------------------------- sampling


def sample_row(
    logits: F64, temperature: float, top_k: int, top_p: float, min_p: float, random_val: float
) -> tuple[int, float]:
    """(id, margin) of one row of logits [vocab_size], by the procedure documented at SampleParams.

    Candidates ordered by (logit descending, id ascending), weights w = exp((l - max) / temperature); top_k
    keeps the first k (<= 0: all); top_p the shortest prefix whose share of the sum reaches top_p; min_p those
    with w >= min_p * w[0]; the draw is the first whose running sum exceeds random_val * (sum of what is
    left). margin: the smallest relative distance of any decision from its boundary; below about 1e-9 the id
    depends on the order of summation.
    """
    order = np.argsort(-logits, kind="stable")
    if temperature == 0:
        return int(order[0]), np.inf
    if top_k > 0:
        order = order[:top_k]
    with np.errstate(over="ignore"):  # a tiny temperature: exp(-inf) is 0
        weights = np.exp((logits[order] - logits[order[0]]) / temperature)
    margin = np.inf
    if top_p < 1:
        share = np.cumsum(weights) / np.sum(weights)
        margin = min(margin, float(np.min(np.abs(share - top_p))))
        weights = weights[: int(np.argmax(share >= top_p)) + 1]
    if min_p > 0:
        below_one = weights[weights != 1]  # w == 1 is the largest itself, kept exactly
        margin = min(margin, float(np.min(np.abs(below_one - min_p), initial=np.inf)) / min_p)
        weights = weights[weights >= min_p]
    running = np.cumsum(weights)
    goal = random_val * running[-1]
    # The last boundary is the whole sum, and random_val < 1 stays below it by 2^-24 at least; 0 lies below
    # the first.
    margin = min(margin, float(np.min(np.abs(running - goal))) / running[-1])
    return int(order[int(np.argmax(running > goal))]), margin


def sample(
    logits: F64, temperature: Array, top_k: Array, top_p: Array, min_p: Array, random_val: Array
) -> tuple[Array, Array]:
    """`sample_row` for every row: ids [num_rows] and margins [num_rows]."""
    rows = zip(logits, temperature, top_k, top_p, min_p, random_val, strict=True)
    drawn = [sample_row(row, float(t), int(k), float(p), float(m), float(r)) for row, t, k, p, m, r in rows]
    return np.array([d[0] for d in drawn], np.int32), np.array([d[1] for d in drawn], np.float64)


def find_best(logits: Array, k: int, first_id: int) -> tuple[Array, Array]:
    """The k best logits of each row of [num_rows, n] float32 and their ids, as FindBestParams has them: [num_rows, k]
    each.

    In a row that holds NaN only the first is defined: see `assert_best`.
    """
    best = np.full((len(logits), k), -np.inf, np.float32)
    ids = np.full((len(logits), k), first_id, np.int32)
    for row, values in enumerate(logits):
        order = np.argsort(-values, kind="stable")[:k]  # NaN last
        order = order[values[order] > -np.inf]
        best[row, : len(order)], ids[row, : len(order)] = values[order], first_id + order
        if np.isnan(values).any():
            best[row, 0] = np.nan
    return best, ids


def assert_best(got: tuple[Array, Array], logits: Array, first_id: int) -> None:
    """An implementation found the same as `find_best`, bit for bit."""
    want = find_best(logits, got[0].shape[1], first_id)
    defined = ~np.isnan(want[0][:, 0])
    assert np.isnan(got[0][~defined, 0]).all()
    for values, expected in zip(got, want, strict=True):
        assert values[defined].tobytes() == expected[defined].tobytes(), (values, expected)


def log_probs(logits: Array, drawn: Array, count: int) -> tuple[Array, Array]:
    """LogProbsParams of rows of [num_rows, vocab_size] float32 that all want `count` of the best, in float64.

    Token ids and log-probabilities, [num_rows, 1 + count]: of what was drawn, then of the best.
    """
    exact = logits.astype(np.float64)
    fit = np.isfinite(exact.max(1)) & (drawn >= 0)
    best = np.argsort(-exact, axis=1, kind="stable")[:, :count]
    ids = np.concatenate([drawn[:, None], best], 1)
    with np.errstate(invalid="ignore"):
        shifted = exact - exact.max(1, keepdims=True)
        logprobs = np.take_along_axis(shifted, np.maximum(ids, 0), 1) - np.log(np.exp(shifted).sum(1, keepdims=True))
    ids[~fit, 1:], logprobs[~fit] = -1, np.nan
    return ids, logprobs


def assert_log_probs(got: tuple[Array, Array], logits: Array, drawn: Array, counts: Array, poison: float) -> None:
    """An implementation gave the same as `log_probs`, [num_rows, width]; nothing else was written."""
    for row, count in enumerate(counts):
        ids, logprobs = (x[row] for x in got)
        assert (ids[count + 1 :] == int(poison)).all() and (logprobs[count + 1 :] == poison).all()
        if count < 0:
            continue
        want_ids, want = (x[0] for x in log_probs(logits[row : row + 1], drawn[row : row + 1], count))
        assert ids[: count + 1].tolist() == want_ids.tolist()
        # float32 rounds logit - largest by 2^-24 of itself, which few of the terms that count make more than 2^-20.
        bound = 2.0**-20 + 2.0**-23 * np.nan_to_num(np.abs(want), posinf=0)
        np.testing.assert_array_equal(np.isnan(logprobs[: count + 1]), np.isnan(want))
        with np.errstate(invalid="ignore"):
            near = np.abs(logprobs[: count + 1] - want) <= bound
        assert (near | (logprobs[: count + 1] == want) | np.isnan(want)).all(), (row, logprobs[: count + 1], want)


def awkward_logits(rng: np.random.Generator, n: int) -> Array:
    """[8, n] float32: smooth, many ties, all equal, mostly -inf, nothing else, with both zeros, with +inf, with NaN."""
    logits = (rng.standard_normal((8, n)) * 3).astype(np.float32)
    logits[1] = np.round(logits[1])
    logits[2] = 1.5
    logits[3][rng.random(n) < 0.9] = -np.inf
    logits[4] = -np.inf
    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, -1.0], np.float32)
    for row in range(3):
        logits[5 + row] = rng.choice(special[2 - row :], n)
    return logits


def random_changes(rng: np.random.Generator, num_rows: int, vocab_size: int) -> dict[str, Array]:
    """LogitChanges of rows with other numbers of tokens, none among them, and of some one that is counted later."""
    tokens = [rng.permutation(vocab_size)[: rng.integers(0, min(30, vocab_size))] for _ in range(num_rows)]
    tokens = [np.append(listed, np.full(rng.integers(0, 2), -1)) for listed in tokens]
    ends = np.cumsum([len(t) for t in tokens])
    rows = np.stack([ends - [len(t) for t in tokens], ends], 1)
    penalties = np.stack([rng.uniform(0.5, 2, num_rows), *rng.uniform(-2, 2, (2, num_rows))], 1)
    changes = np.empty((int(ends[-1]), 3), np.int32)
    changes[:, 0] = np.concatenate(tokens)
    changes[:, 1] = rng.integers(-1, 4, len(changes))
    changes[:, 2] = rng.choice([0.0, 1.5, -0.3], len(changes)).astype(np.float32).view(np.int32)
    return {
        "change_rows": rows.astype(np.int32),
        "penalties": penalties.astype(np.float32),
        "change_tokens": changes,
    }


def change_logits(logits: Array, changes: dict[str, Array], last_ids: Array) -> Array:
    """What they make of logits [num_rows, vocab_size]: float32, token by token; last_ids: [num_rows]."""
    out = logits.copy()
    for row, (begin, end) in enumerate(changes["change_rows"]):
        repetition, presence, frequency = changes["penalties"][row]
        entries = {int(i): [int(count), bias] for i, count, bias in changes["change_tokens"][begin:end]}
        if entries.pop(-1, None):
            entry = entries.setdefault(int(last_ids[row]), [0, 0])
            entry[0] = max(entry[0], 0) + 1
        for i, (count, bias) in entries.items():
            x = out[row, i] + np.int32(bias).view(np.float32)
            if count >= 0:
                x = x / repetition if x > 0 else x * repetition
            if count > 0:
                x = np.float32(np.float64(x - presence) - np.float64(frequency) * count)
            out[row, i] = x
    return out


@dataclass
class Mask:
    """AllowedTokens: allowed [num_masks, num_words] int32, allowed_row [num_rows] int32."""

    allowed: Array
    allowed_row: Array

    def hidden(self, n: int, first_id: int = 0) -> Array:
        """[num_rows, n] bool: whether the bit of token first_id + column is 0."""
        bits = np.unpackbits(self.allowed.view(np.uint8), axis=1, bitorder="little").astype(bool)
        return ~bits[self.allowed_row, first_id : first_id + n] & (self.allowed_row >= 0)[:, None]

    def apply(self, logits: Array, first_id: int = 0) -> Array:
        """Logits of [num_rows, n], -inf where they are hidden."""
        return np.where(self.hidden(logits.shape[1], first_id), np.float32(-np.inf), logits)


def random_mask(rng: np.random.Generator, num_rows: int, num_ids: int) -> Mask:
    """Masks with one bit, few, half, nearly all and all set; rows that share one and rows that have none.

    Each allows some token; bits behind the last are set as well.
    """
    share = np.array([0, 0.01, 0.5, 0.99, 1])
    bits = rng.random((5, (num_ids + 31) // 32 * 32)) < share[:, None]
    if num_ids:
        bits[np.arange(5), rng.integers(0, num_ids, 5)] = True
    bits[:, num_ids:] = rng.random(bits[:, num_ids:].shape) < 0.5
    allowed = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    return Mask(np.ascontiguousarray(allowed), rng.integers(-1, 5, num_rows).astype(np.int32))


def philox4x32(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): four 32-bit
    words.
    """
    mask = 0xFFFFFFFF
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        low, high = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (high >> 32) ^ c1 ^ k0, high & mask, (low >> 32) ^ c3 ^ k1, low & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """The draw in [0, 1) of a request with `seed` at `position`: 24 bits of the first word of
    Philox4x32-10.
    """
    mask = 0xFFFFFFFF
    word = philox4x32((position & mask, position >> 32 & mask, 0, 0), (seed & mask, seed >> 32 & mask))[0]
    return (word >> 8) * 2.0**-24


def causal_conv(
    x: F64, weight: F64, state: F64, gates: tuple[F64, F64] | None = None, bias: F64 | None = None
) -> tuple[F64, F64]:
    """silu of a convolution of each channel; and the inputs that the next token sees.

    x [n, channels], weight [taps, channels] with the oldest first, state [taps - 1, channels]: what came before x.
    `gates` [n, channels] each, in place of silu: one multiplies x, the other the result. bias [channels] joins the sum.
    """
    if gates:
        x = gates[0].astype(np.float64) * x
    seen = np.concatenate([state, x]).astype(np.float64)
    n, taps = len(x), len(weight)
    mixed = sum(weight[i] * seen[i : i + n] for i in range(taps)) + (0.0 if bias is None else bias.astype(np.float64))
    return mixed * gates[1] if gates else mixed / (1 + np.exp(-mixed)), seen[n:]


def delta_heads(
    qkv: F64,
    a: F64,
    b: F64,
    decay_rate: F64,
    dt_bias: F64,
    state: F64,
    *,
    num_k_heads: int,
    most_beta: int = 1,
    lower_bound: float = 0,
) -> tuple[F64, F64]:
    """What the heads of one sequence give by the gated delta rule, from token to token; and the state behind it.

    qkv [n, 2 * K * k_dim + V * v_dim], a and b [n, V], decay_rate and dt_bias [V], state [V, k_dim, v_dim];
    returns [n, V, v_dim]. Where rows of the state have decays of their own, a is [n, V * k_dim], dt_bias [V * k_dim].
    """
    num_v_heads, k_dim, v_dim = state.shape
    n, k_size = len(qkv), num_k_heads * k_dim
    q, k, v = np.split(qkv.astype(np.float64), [k_size, 2 * k_size], axis=1)
    q, k = (np.repeat(x.reshape(n, num_k_heads, k_dim), num_v_heads // num_k_heads, axis=1) for x in (q, k))
    q, k = (x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6) for x in (q, k))
    q, v = q / np.sqrt(k_dim), v.reshape(n, num_v_heads, v_dim)
    steps, rate = (a.astype(np.float64) + dt_bias).reshape(n, num_v_heads, -1, 1), decay_rate[:, None, None]
    exponents = lower_bound * _sigmoid(-rate * steps) if lower_bound else rate * np.logaddexp(0, steps)
    decay, beta = np.exp(exponents), most_beta / (1 + np.exp(-b))  # [n, V, 1 or k_dim, 1], [n, V]
    out = np.empty((n, num_v_heads, v_dim))
    matrix = state.astype(np.float64)
    for t in range(n):
        matrix = matrix * decay[t]
        error = v[t] - np.einsum("hkv,hk->hv", matrix, k[t])
        matrix = matrix + np.einsum("hk,hv->hkv", k[t], error * beta[t][:, None])
        out[t] = np.einsum("hkv,hk->hv", matrix, q[t])
    return out, matrix


def selective_scan(
    xbc: F64,
    dt: F64,
    decay_rate: F64,
    dt_bias: F64,
    skip: F64,
    state: F64,
    *,
    num_groups: int,
    dt_multiplier: float = 1.0,
    dt_limits: tuple[float, float] = (0.0, np.inf),
) -> tuple[F64, F64, F64]:
    """What the heads of one sequence give by the state space of Mamba-2, from token to token; and the state behind it.

    xbc [n, H * head_dim + 2 * G * state_dim], dt [n, H], decay_rate, dt_bias and skip [H], state [H, state_dim,
    head_dim]; returns [n, H * head_dim], the state, and the sum of the sizes of what is added, as the first.
    """
    heads, state_dim, head_dim = state.shape
    n = len(xbc)
    x, b, c = np.split(xbc.astype(np.float64), [heads * head_dim, heads * head_dim + num_groups * state_dim], axis=1)
    x = x.reshape(n, heads, head_dim)
    b, c = (np.repeat(part.reshape(n, num_groups, state_dim), heads // num_groups, axis=1) for part in (b, c))
    step = np.clip(np.logaddexp(0, dt_multiplier * dt.astype(np.float64) + dt_bias), *dt_limits)
    decay = np.exp(decay_rate * step)
    out, size = np.empty_like(x), np.empty_like(x)
    matrix, sizes = state.astype(np.float64), np.abs(state.astype(np.float64))
    for t in range(n):
        added = np.einsum("hn,hp->hnp", b[t], step[t][:, None] * x[t])
        matrix, sizes = matrix * decay[t][:, None, None] + added, sizes * decay[t][:, None, None] + np.abs(added)
        out[t] = np.einsum("hnp,hn->hp", matrix, c[t]) + skip[:, None] * x[t]
        size[t] = np.einsum("hnp,hn->hp", sizes, np.abs(c[t])) + np.abs(skip[:, None] * x[t])
    return out.reshape(n, -1), matrix, size.reshape(n, -1)


def group_norm(x: F64, gate: F64, weight: F64 | None, group_size: int, eps: float, norm_first: bool) -> F64:
    """RMSNorm of each group of neighbours of x times silu(gate), or of x, which that multiplies; all [n, size].

    weight [size]; None: no norm.
    """
    x, gate = x.astype(np.float64), gate / (1 + np.exp(-gate.astype(np.float64)))
    if weight is None:
        return x * gate
    y = (x if norm_first else x * gate).reshape(len(x), -1, group_size)
    normed = (y / np.sqrt(np.mean(y * y, axis=-1, keepdims=True) + eps)).reshape(x.shape) * weight
    return normed * gate if norm_first else normed


def gated_norm(
    x: F64, z: F64, norm: F64, eps: float, rounded: float = 0.0, *, sigmoid: bool = False
) -> tuple[F64, F64]:
    """RMSNorm of heads x [n, V, v_dim], times silu(z [n, V * v_dim]), or its sigmoid; and the size of what is rounded,
    if in x it is `rounded`. Both [n, V * v_dim].

    With y = x g / r, where r is the root of the mean square, dy = dx g / r - y mean(x dx) / r^2. The mean is at most
    r max|dx|. So where x is small, its errors are not.
    """
    gate = z.reshape(x.shape).astype(np.float64)
    root = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    factor = norm * (1.0 if sigmoid else gate) / (1 + np.exp(-gate)) / root
    size = np.abs(factor) * (np.abs(x) + rounded * (1 + np.abs(x) / root))
    return (x * factor).reshape(len(x), -1), size.reshape(len(x), -1)


def index_scores(q: F64, weights: F64, keys: F64) -> F64:
    """How good each key is for each token: q [n, num_heads, head_dim]; weights [n, num_heads]; keys [length, head_dim].

    The sum over heads of weight * relu(q . k), [n, length].
    """
    scores: F64 = np.einsum("nhk,nh->nk", np.maximum(np.einsum("nhd,kd->nhk", q, keys), 0), weights)
    return scores
