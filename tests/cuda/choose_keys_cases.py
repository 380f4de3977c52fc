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
    """The best runs of all that a token sees, of equals the earlier ones, and those of a token alone are the same.

    `runs`: keys of a run, those at the end that are always chosen, heads of the cache that slots are in, and which of
    them. There are no weights then, and one head.
    """
    for shape in shapes:
        _check(gpu, **shape)
        gpu.close()


def _check(
    gpu: Gpu,
    seed: int,
    kind: str,
    lengths: list[list[int]],
    heads: int,
    head_dim: int,
    block_size: int,
    top_k: int,
    runs: tuple[int, int, int, int] | None = None,
) -> None:
    run_keys, last_runs, slot_heads, slot_head = runs or (1, 0, 1, 0)
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
            "run_choose_keys", dq.pointer, _long(dq.stride), None if runs else dw.pointer, _long(dw.stride), cache,
            arrays[0], columns, arrays[1], arrays[2], slots, scores, most_keys, 2, count, len(contexts), heads,
            head_dim, block_size, top_k, run_keys, last_runs, slot_heads, slot_head, KINDS.index(kind),
        )  # fmt: skip
        return gpu.download(slots)

    edges = [0, *np.cumsum([queries for _, queries in lengths]).tolist()]
    got = run(0, num_tokens, edges, [context for context, _ in lengths], table)
    for seq, (context, queries) in enumerate(lengths):
        for query in range(queries):
            token, sees = edges[seq] + query, context - queries + query + 1
            positions = np.arange(sees)
            slots = table[seq, positions // block_size] * block_size + positions % block_size
            dots = q[token].reshape(heads, head_dim) @ keys[slots].T
            scores = dots[0] if runs else weights[token] @ np.maximum(dots, 0)
            of_runs = np.array([scores[begin : begin + run_keys].max() for begin in range(0, sees, run_keys)])
            of_runs[len(of_runs) - min(last_runs, len(of_runs)) :] = np.inf
            chosen = np.argsort(-of_runs, kind="stable")[: top_k // run_keys]
            best = np.flatnonzero(np.isin(positions // run_keys, chosen))
            slots = (table[seq, positions // block_size] * slot_heads + slot_head) * block_size + positions % block_size
            np.testing.assert_array_equal(got[token, : len(best)], slots[best])
            if query == queries - 1:
                alone = run(token, 1, [0, 1], [context], table[seq : seq + 1])
                np.testing.assert_array_equal(alone[0, : len(best)], slots[best])
