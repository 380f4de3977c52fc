"""The experts of one token beside a dense MLP that reads as many bytes: the cost of being small and scattered.

    python -m bench.experts_bench --format int4 --threads 1

A layer has the shape of Qwen3-30B-A3B's: 8 of 128 experts, drawn at random for each call. Both are larger than any
cache and take turns, medians of nine calls each; with one thread, times are CPU time, which neighbours disturb least.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import numpy as np

from bench import ROOT
from infinilm import _core

sys.path.insert(0, str(ROOT / "tests"))

from ops.support import ISAS, backend, tensor

HIDDEN, INNER, NUM_EXPERTS, TOP_K = 2048, 768, 128, 8
NUM_DENSE = 8  # layers, read in turn
BYTES = {"bfloat16": 2.0, "int8": 1.0, "int4": 0.5625}  # of a weight


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", choices=sorted(BYTES), default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    quantization = "none" if args.format == "bfloat16" else args.format
    b, rng = backend(ISAS[-1], args.threads), np.random.default_rng(0)

    def linears(count: int, rows: int, columns: int, parts: int) -> list[object]:
        made = []
        for _ in range(count):
            bits = (rng.random((parts, rows, columns), np.float32) - 0.5).view(np.uint32) >> 16
            weights = [(tensor(part, "bfloat16"), None) for part in bits.astype(np.uint16)]
            kind = "act_mul" if parts == 2 else "plain"
            made.append(b.prepare_linear(weights, kind=kind, quantization=quantization))
        return made

    def zeros(*shape: int) -> object:
        return tensor(np.zeros(shape, np.float32))

    gate_up, down = linears(NUM_EXPERTS, INNER, HIDDEN, 2), linears(NUM_EXPERTS, HIDDEN, INNER, 1)
    wide = [
        *zip(linears(NUM_DENSE, TOP_K * INNER, HIDDEN, 2), linears(NUM_DENSE, HIDDEN, TOP_K * INNER, 1), strict=True)
    ]
    x = tensor(rng.standard_normal((1, HIDDEN), np.float32))
    weights = tensor(np.full((1, TOP_K), 1 / TOP_K, np.float32))
    out, inner, parts, dense_inner = (
        zeros(1, HIDDEN),
        zeros(TOP_K, INNER),
        zeros(TOP_K, HIDDEN),
        zeros(1, TOP_K * INNER),
    )
    turn = 0

    def experts() -> float:
        ids = tensor(rng.choice(NUM_EXPERTS, (1, TOP_K), replace=False).astype(np.int32))
        start = clock()
        b.experts(x, ids, weights, gate_up, down, out, inner, parts)
        return clock() - start

    def dense() -> float:
        nonlocal turn
        turn = (turn + 1) % NUM_DENSE
        start = clock()
        b.linear(x, wide[turn][0], dense_inner)
        b.linear(dense_inner, wide[turn][1], out)
        return clock() - start

    rounds = [[statistics.median(f() for _ in range(9)) for f in (experts, dense)] for _ in range(args.rounds + 1)][1:]
    read = 3 * TOP_K * INNER * HIDDEN * BYTES[args.format]
    for name, times in zip(("experts", "dense"), zip(*rounds, strict=True), strict=True):
        print(f"{name:8} {1e3 * statistics.median(times):.3f} ms, at best {read / min(times) / 1e9:.1f} GB/s")
    low, median, high = np.quantile([a / b for a, b in rounds], (0.25, 0.5, 0.75))
    print(f"experts : dense {median:.3f} ({low:.3f} .. {high:.3f}); {_core.selected_cpu_isa()}, {args.threads} threads")


if __name__ == "__main__":
    main()
