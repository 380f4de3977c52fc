"""What constraints cost: steps of 32 rows with and without masks, and one row of a large vocabulary on several threads.

    python -m tests.bench.constraints_bench [--rows 32] [--steps 6] [--rounds 4] [--fill-us 50]

A model of the llama-1b shape with random weights decodes `rows` sequences at temperature 1. Constrained rows have a
stand-in for a grammar: a matcher that takes `fill-us` of the engine's thread for each mask, and allows 98% of the
vocabulary (as inside a JSON string) or 300 tokens. The kinds take turns. What is compared is the CPU time of the
process: on one thread that is what a step takes on a machine that does nothing else. The time of the matchers counts as
well, though it passes while the step runs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infinilm import LLM, SamplingParams, _core
from infinilm.requests import prompts
from infinilm.requests.request import GenerationRequest
from tests.bench.synthetic import SHAPES

SHAPE = SHAPES["llama-1b"]
VOCAB_SIZE: int = SHAPE["vocab_size"]


class FixedMask:
    """Allows the same tokens always."""

    def __init__(self, words: NDArray[np.int32], seconds: float) -> None:
        self.words, self.seconds = words, seconds

    def fill(self, row: NDArray[np.int32]) -> None:
        end = time.perf_counter() + self.seconds
        row[:] = self.words
        while time.perf_counter() < end:
            pass

    def advance(self, token_id: int) -> None:
        pass

    def copy(self) -> FixedMask:
        return self

    @property
    def is_finished(self) -> bool:
        return False


def words(num_allowed: int) -> NDArray[np.int32]:
    bits = np.zeros(-(-VOCAB_SIZE // 32) * 32, np.bool_)
    bits[np.random.default_rng(0).choice(VOCAB_SIZE, num_allowed, replace=False)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def time_steps(args: argparse.Namespace, folder: Path) -> None:
    seconds = args.fill_us * 1e-6
    kinds = {
        "no constraint": None,
        "98% allowed": FixedMask(words(VOCAB_SIZE * 98 // 100), seconds),
        "300 allowed": FixedMask(words(300), seconds),
    }
    matcher: FixedMask | None = None

    def make(request_id: str, prompt: str | None, completions: list[Any], *_: Any) -> GenerationRequest:
        return GenerationRequest(request_id, prompt, completions, constraint=matcher)

    vars(prompts)["GenerationRequest"] = make
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    settings: dict[str, Any] = {"load_format": "dummy", "max_num_seqs": args.rows, "max_model_len": 256}
    with LLM(folder, num_threads=1, use_tqdm=False, **settings) as llm:
        params = SamplingParams(temperature=1.0, seed=1, max_tokens=args.steps + 1, ignore_eos=True)
        for _ in range(args.rounds):
            for kind, made in kinds.items():
                matcher = made
                requests = [llm.submit([1 + i, 2, 3], params) for i in range(args.rows)]
                next(iter(requests[-1]))  # the prompts are done
                begin = time.process_time()
                for request in requests:
                    request.result()
                times[kind].append((time.process_time() - begin) / args.steps)
            print({kind: [round(t * 1e3) for t in each] for kind, each in times.items()}, "ms", flush=True)
    plain = float(np.median(times["no constraint"]))
    for kind, each in times.items():
        ratios = np.array(each) / np.array(times["no constraint"])
        median = float(np.median(each))
        print(
            f"{args.rows} rows, {kind:14}: {median * 1e3:7.1f} ms of CPU time a step, {median / plain - 1:+.1%} "
            f"({ratios.min() - 1:+.1%} .. {ratios.max() - 1:+.1%})",
            flush=True,
        )


def time_one_row(repeat: int) -> None:
    logits = (np.random.default_rng(1).standard_normal((1, VOCAB_SIZE)) * 3).astype(np.float32)
    columns = [np.array([value], kind) for value, kind in
               ((1, np.float32), (0, np.int32), (1, np.float32), (0, np.float32), (0.3, np.float32))]  # fmt: skip

    def sampler(num_threads: int, num_allowed: int | None) -> Callable[[], None]:
        backend, ids = _core.Backend("cpu", num_threads=num_threads), np.empty(1, np.int32)
        arrays = [_core.from_numpy(array) for array in (logits, *columns, ids)]
        if num_allowed is None:
            return lambda: backend.sample(*arrays)
        masks = [_core.from_numpy(array) for array in (words(num_allowed)[None], np.zeros(1, np.int32))]
        return lambda: backend.sample(*arrays, None, *masks)

    cases = {
        "one thread": sampler(1, None),
        "two threads": sampler(2, None),
        "one thread, 98% allowed": sampler(1, VOCAB_SIZE * 98 // 100),
        "one thread, 300 allowed": sampler(1, 300),
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeat):
        for name, run in cases.items():
            begin = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - begin)
    for name, each in times.items():
        print(f"one row at temperature 1, {name:24}: {np.median(each) * 1e3:.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=4, help="0: one row alone")
    parser.add_argument("--fill-us", type=float, default=50)
    args = parser.parse_args()
    time_one_row(300)
    if not args.rounds:
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE))
        time_steps(args, Path(folder))


if __name__ == "__main__":
    main()
