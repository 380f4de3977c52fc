"""Ranks against threads: an engine of several ranks and one of as many threads, on the same cores.

    python -m bench.synthetic FOLDER llama-1b --config-only
    python -m bench.tensor_parallel FOLDER/llama-1b --ranks 2 --threads 2

Weights are random. Each engine has a process of its own, and they take turns, so that both see the same neighbours. A
figure is the median of the steps; in brackets are the first and the third quartile.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from infinilm import AutoConfig, _core
from infinilm.config.spec import build_spec

MAX_LEN = 1024


def make_step(rows: int, tokens: int, context: int) -> _core.Batch:
    """`tokens` new tokens of each of `rows` sequences, the last of `context`; greedy."""
    positions = np.tile(np.arange(context - tokens, context, dtype=np.int32), rows)
    starts = np.repeat(np.arange(rows, dtype=np.int64) * MAX_LEN, tokens)
    arrays: dict[str, Any] = {
        "input_ids": np.arange(rows * tokens, dtype=np.int32) % 1000,
        "positions": positions,
        "slot_mapping": starts + positions,
        "block_table": np.arange(rows, dtype=np.int32)[:, None],
        "cu_seqlens_q": np.arange(rows + 1, dtype=np.int32) * tokens,
        "context_lens": np.full(rows, context, np.int32),
        "logits_rows": np.arange(1, rows + 1, dtype=np.int32) * tokens - 1,
        "temperature": np.zeros(rows, np.float32),
        "top_k": np.zeros(rows, np.int32),
        "top_p": np.ones(rows, np.float32),
        "min_p": np.zeros(rows, np.float32),
        "random_val": np.zeros(rows, np.float32),
    }
    return _core.Batch(**arrays)


def open_engine(folder: Path, ranks: int, threads: int, rows: int) -> _core.InferEngine:
    spec = build_spec(AutoConfig.from_pretrained(folder), dtype="bfloat16", max_model_len=MAX_LEN)
    engine = _core.InferEngine(spec, ["cpu"] * ranks, num_threads=threads)
    engine.load_dummy("bfloat16")
    engine.finish_loading()
    engine.reset_cache(rows, MAX_LEN)
    return engine


WORK = {"decode, 1 sequence": (1, 1, 200), "decode, 8 sequences": (8, 1, 200), "prefill of 256": (1, 256, 256)}


def serve(connection: Connection, folder: Path, ranks: int, threads: int) -> None:
    """Answers the name of a piece of work with the milliseconds it took."""
    engine = open_engine(folder, ranks, threads, 8)
    steps = {name: make_step(*sizes) for name, sizes in WORK.items()}
    connection.send(None)
    while name := connection.recv():
        begin = time.perf_counter()
        engine.forward(steps[name])
        connection.send(1e3 * (time.perf_counter() - begin))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2, help="of all ranks together")
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()

    context = multiprocessing.get_context("spawn")
    engines = []
    for ranks in (1, args.ranks):
        ours, theirs = context.Pipe()
        context.Process(target=serve, args=(theirs, args.folder, ranks, args.threads), daemon=True).start()
        engines.append(ours)
        ours.recv()
    for name in WORK:
        times: list[list[float]] = [[], []]
        for repeat in range(args.repeats + 2):
            for engine, taken in zip(engines, times, strict=True):
                engine.send(name)
                milliseconds = engine.recv()
                if repeat >= 2:
                    taken.append(milliseconds)
        one, many = (statistics.quantiles(taken, n=4) for taken in times)
        print(
            f"{name:20} 1 rank {one[1]:8.2f} ms [{one[0]:.2f}, {one[2]:.2f}]   "
            f"{args.ranks} ranks {many[1]:8.2f} ms [{many[0]:.2f}, {many[2]:.2f}]   ratio {one[1] / many[1]:.3f}"
        )
    for engine in engines:
        engine.send("")


if __name__ == "__main__":
    main()
