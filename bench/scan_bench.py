"""The state space of Mamba-2 of one layer: a prompt against the FMA peak, single tokens against the read bandwidth.

    INFINILM_CPU_ISA=avx2 python -m bench.scan_bench

A layer has the state of Granite-4-H-Tiny's: 48 heads of 128 x 64. Times are CPU time of one thread, which neighbours
disturb least, best of all rounds; the limits are measured between them. States of the sequences are larger than any
cache. A copy of as many bytes is measured beside single tokens, which write as much as they read.
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

HEADS, HEAD_DIM, STATE_DIM = 48, 64, 128
STATE = HEADS * HEAD_DIM * STATE_DIM  # elements
PROMPT, NUM_SEQS = 512, 64


def call(b: Any, lengths: list[int]) -> tuple[float, float]:
    """Seconds of a step of sequences that go on by so many tokens, and of adding 1 to all their states in place."""
    rng, n = np.random.default_rng(0), sum(lengths)
    shapes = ((n, HEADS * HEAD_DIM + 2 * STATE_DIM), (n, HEADS), (HEADS,), (HEADS,), (HEADS,))
    arrays = [rng.standard_normal(shape, np.float32) for shape in shapes]
    arrays[2] = -np.abs(arrays[2])  # rates of decay
    states = np.zeros((len(lengths), HEADS, STATE_DIM, HEAD_DIM), np.float32)
    own = np.arange(len(lengths), dtype=np.int32)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    scratch = [tensor(np.zeros((n, width), np.float32)) for width in (2 * HEADS, HEADS * HEAD_DIM)]
    arguments = [*map(tensor, (*arrays, states, starts, own, own)), *scratch]
    best = update = float("inf")
    for _ in range(4):
        start = time.thread_time()
        b.selective_scan(*arguments, num_groups=1)
        best = min(best, time.thread_time() - start)
        start = time.thread_time()
        states += 1
        update = min(update, time.thread_time() - start)
    return best, update


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    isa = _core.selected_cpu_isa()
    b = backend(isa)
    prompt = single = update = float("inf")
    read = flops = 0.0
    for _ in range(args.rounds):
        prompt = min(prompt, call(b, [PROMPT])[0])
        one, other = call(b, [1] * NUM_SEQS)
        single, update = min(single, one), min(update, other)
        measured = _core.measure_cpu_limits(1, "float32")
        read, flops = max(read, measured[0]), max(flops, measured[1])
    # Each element and token take one product and two fused additions, which the peak counts as two operations each.
    share, size = 6 * STATE * PROMPT / prompt / flops, 2 * 4 * STATE * NUM_SEQS
    print(f"prompt: {prompt / PROMPT * 1e6:.1f} us a token, {share:.0%} of the FMA peak of {flops / 1e9:.0f} Gflop/s")
    print(f"single tokens: {single / NUM_SEQS * 1e6:.1f} us, {size / single / 1e9:.1f} GB/s read and written")
    print(f"adding 1 to these states: {size / update / 1e9:.1f} GB/s read and written")
    print(f"{isa}, one thread; memory gives {read / 1e9:.1f} GB/s to one that reads")


if __name__ == "__main__":
    main()
