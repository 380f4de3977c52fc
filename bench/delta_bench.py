"""The gated delta rule of one layer: a prompt against the FMA peak, single tokens against the read bandwidth.

    INFINILM_CPU_ISA=avx2 python -m bench.delta_bench

A layer has the state of Qwen3.5-9B's: 32 heads of 128 x 128. Times are CPU time of one thread, which neighbours disturb
least, best of all rounds; the limits are measured between them. States of the sequences are larger than any cache.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import numpy as np

from bench import ROOT
from infinilm import _core

sys.path.insert(0, str(ROOT / "tests"))

from ops.support import backend, tensor

K_HEADS, HEADS, DIM = 16, 32, 128
STATE = HEADS * DIM * DIM  # elements
PROMPT, NUM_SEQS = 512, 48


def call(b: Any, lengths: list[int]) -> float:
    """Seconds of a step of sequences that go on by so many tokens."""
    rng, n = np.random.default_rng(0), sum(lengths)
    qkv, of_heads = (n, (2 * K_HEADS + HEADS) * DIM), (n, HEADS)
    shapes = (qkv, (n, HEADS * DIM), of_heads, of_heads, (HEADS,), (HEADS,), (DIM,))
    arrays = [rng.standard_normal(shape, np.float32) for shape in shapes]
    arrays[4] = -np.abs(arrays[4])  # rates of decay
    arrays.append(np.zeros((len(lengths), HEADS, DIM, DIM), np.float32))
    own = np.arange(len(lengths), dtype=np.int32)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    scratch = [tensor(np.zeros((n, width), np.float32)) for width in (2 * HEADS, HEADS * DIM)]
    arguments = [*map(tensor, (*arrays, starts, own, own)), *scratch]
    best = float("inf")
    for _ in range(4):
        start = time.thread_time()
        b.delta_rule(*arguments, num_k_heads=K_HEADS, eps=1e-6)
        best = min(best, time.thread_time() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    isa = _core.selected_cpu_isa()
    b = backend(isa)
    prompt = single = float("inf")
    read = flops = 0.0
    for _ in range(args.rounds):
        prompt, single = min(prompt, call(b, [PROMPT])), min(single, call(b, [1] * NUM_SEQS))
        measured = _core.measure_cpu_limits(1, "float32")
        read, flops = max(read, measured[0]), max(flops, measured[1])
    # Each element and token take one product and three fused additions, which the peak counts as two operations each.
    share, rate = 8 * STATE * PROMPT / prompt / flops, 2 * 4 * STATE * NUM_SEQS / single
    print(f"prompt: {prompt / PROMPT * 1e6:.1f} us a token, {share:.0%} of the FMA peak of {flops / 1e9:.0f} Gflop/s")
    print(f"single tokens: {single / NUM_SEQS * 1e6:.1f} us, {rate / 1e9:.1f} GB/s read and written")
    print(f"{isa}, one thread; memory gives {read / 1e9:.1f} GB/s to one that reads")


if __name__ == "__main__":
    main()
