"""Cases for cuda/attention/choose_keys.cu: scores of small integers, which are exact in every type, and many equal."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from emulation import Array, Gpu
from frames import KINDS, encode, of


def _long(value: int) -> ctypes.c_int64:
    return ctypes.c_int64(value)


def choose_keys(gpu: Gpu, shapes: list[dict[str, Any]]) -> None:
    """The best keys of all that a token sees, of equals the earlier ones, and those of a token alone are the same."""
    for shape in shapes:
        _check(gpu, **shape)
        gpu.close()


def _check(
    gpu: Gpu, seed: int, kind: str, lengths: list[list[int]], heads: int, head_dim: int, block_size: int, top_k: int
) -> None:
    rng = np.random.default_rng(seed)
    columns = max(-(-context // block_size) for context, _ in lengths)
    table = (rng.permutation(len(lengths) * columns).astype(np.int32) + 1).reshape(-1, columns)
    num_tokens = sum(queries for _, queries in lengths)
    keys = rng.integers(-2, 3, ((table.size + 1) * block_size, head_dim)).astype(np.float32)
    q = rng.integers(-2, 3, (num_tokens, heads * head_dim)).astype(np.float32)
    weights = rng.integers(-3, 4, (num_tokens, heads)).astype(np.float32)
    cache = gpu.upload(encode(keys, kind))
    most_keys = max(context for context, _ in lengths)

    def run(first: int, count: int, edges: list[int], contexts: list[int], rows: Array) -> Array:
        own = slice(first, first + count)
        dq, dw = of(gpu, encode(q[own], kind), kind, 8), of(gpu, weights[own], "f32", 8)
        slots = gpu.upload(np.full((count, top_k), -1, np.int32))
        scores = gpu.upload(np.full((2, most_keys), np.nan, np.float32))  # fewer rows than tokens
        arrays = [gpu.upload(np.array(each, np.int32)) for each in (rows, edges, contexts)]
        gpu.call(
            "run_choose_keys", dq.pointer, _long(dq.stride), dw.pointer, _long(dw.stride), cache, arrays[0], columns,
            arrays[1], arrays[2], slots, scores, most_keys, 2, count, len(contexts), heads, head_dim, block_size,
            top_k, KINDS.index(kind),
        )  # fmt: skip
        return gpu.download(slots)

    edges = [0, *np.cumsum([queries for _, queries in lengths]).tolist()]
    got = run(0, num_tokens, edges, [context for context, _ in lengths], table)
    for seq, (context, queries) in enumerate(lengths):
        for query in range(queries):
            token, sees = edges[seq] + query, context - queries + query + 1
            positions = np.arange(sees)
            slots = table[seq, positions // block_size] * block_size + positions % block_size
            dots = np.maximum(q[token].reshape(heads, head_dim) @ keys[slots].T, 0)
            best = np.sort(np.argsort(-(weights[token] @ dots), kind="stable")[:top_k])
            np.testing.assert_array_equal(got[token, : len(best)], slots[best])
            if query == queries - 1:
                alone = run(token, 1, [0, 1], [context], table[seq : seq + 1])
                np.testing.assert_array_equal(alone[0, : len(best)], slots[best])
