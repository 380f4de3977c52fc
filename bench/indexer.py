"""Attention over chosen keys beside attention over all: one layer with an indexer, in milliseconds by context.

    python -m bench.indexer

The sizes are those of DeepSeek V3.2 (`--heads`: those of a rank), the cache is bfloat16. The three ops take turns, and
the least of several times counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from infinilm import _core

TOP_K, ROW_DIM, KV_RANK, INDEX_HEADS, INDEX_DIM, BLOCK = 2048, 576, 512, 64, 128, 16


def least(run: Callable[[], None], repeats: int = 4) -> float:
    """Milliseconds of the fastest of several calls."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return 1e3 * min(times)


def measure(backend: _core.Backend, heads: int, num_tokens: int, context: int) -> tuple[float, float, float]:
    """Milliseconds of attention over all keys, of the choice, and of attention over the chosen ones."""
    rng = np.random.default_rng(0)
    num_blocks = context // BLOCK
    tensor = _core.from_numpy

    def floats(*shape: int) -> _core.Tensor:
        return tensor(rng.standard_normal(shape, np.float32))

    def cache(dim: int) -> np.ndarray:
        values = rng.standard_normal((num_blocks, 1, BLOCK, dim), np.float32)
        return (values.view(np.uint32) >> 16).astype(np.uint16)

    rows = cache(ROW_DIM)
    latents = tensor(rows, dtype="bfloat16")
    one_by_one = tensor(rows.reshape(-1, 1, 1, ROW_DIM), dtype="bfloat16")  # the same memory
    keys = tensor(cache(INDEX_DIM), dtype="bfloat16")
    q, out = floats(num_tokens, heads, ROW_DIM), floats(num_tokens, heads, KV_RANK)
    index_q, weights = floats(num_tokens, INDEX_HEADS, INDEX_DIM), floats(num_tokens, INDEX_HEADS)
    sequence = (
        tensor(rng.permutation(num_blocks).astype(np.int32)[None]),
        tensor(np.array([0, num_tokens], np.int32)),
        tensor(np.array([context], np.int32)),
    )
    slots = tensor(np.zeros((num_tokens, TOP_K), np.int32))
    sees = np.arange(context - num_tokens, context) + 1
    tokens = slots, tensor(np.arange(num_tokens + 1, dtype=np.int32)), tensor(np.minimum(sees, TOP_K).astype(np.int32))
    return (
        least(lambda: backend.paged_attention(q, latents, None, *sequence, out, 0.1)),
        least(lambda: backend.choose_keys(index_q, weights, keys, *sequence, slots)),
        least(lambda: backend.paged_attention(q, one_by_one, None, *tokens, out, 0.1)),
    )


def main() -> None:
    """Print a line for each number of heads, of tokens and of keys."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, nargs="+", default=[128, 16])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    backend = _core.Backend("cpu", num_threads=options.threads, compute_dtype="bfloat16")
    for heads in options.heads:
        for num_tokens in options.tokens:
            for context in options.contexts:
                of_all, choice, chosen = measure(backend, heads, num_tokens, context)
                print(
                    f"{heads} heads, {num_tokens} tokens, {context} keys: all {of_all:.2f} ms; choice {choice:.2f} + "
                    f"chosen {chosen:.2f}; {of_all / (choice + chosen):.2f} x",
                    flush=True,
                )


if __name__ == "__main__":
    main()
