"""Does memory stay where it is? Thousands of short requests from several threads, some cancelled, on the demo model.

    python -m bench.soak                     # 20,000 requests; a line every 1,000; exit code 1 if memory grows
    python -m bench.soak --requests 100000 --every 10000

Resident memory is read between rounds, when nothing runs: after `--every` requests each. The first rounds warm up:
the threads, the allocator's arenas and every block of the KV cache are then in use. From there on it must be flat:
the straight line through the readings may rise by at most `BYTES_PER_REQUEST` for each request, and no object of a
request may be left.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from infinilm import LLM, SamplingParams, TokenEvent
from infinilm.calls.handle import Request
from infinilm.requests.reducers import PromptLogprobs
from infinilm.requests.request import Completion, GenerationRequest, PromptRequest
from infinilm.scheduling.sequence import Sequence

# Measured: requests that stay, here with all their objects, cost 9,700 bytes each; 35 bytes are what the allocator's
# arenas go on filling for some 10,000 requests.
BYTES_PER_REQUEST = 256
WARM_UP_ROUNDS = 3
# Objects of a request that must all be gone when it is.
TYPES = (Completion, GenerationRequest, PromptRequest, PromptLogprobs, Request, Sequence, TokenEvent)


@dataclass(frozen=True)
class Reading:
    """The process after so many requests."""

    num_requests: int
    rss_bytes: int
    seconds: float  # since the beginning
    num_objects: int  # of a request's TYPES, all of which have ended


def resident_bytes() -> int:
    """Resident memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no line VmRSS")


def count_objects() -> Counter[str]:
    """Objects of a request that are alive; the engine thread may still be letting go of the last ones."""
    for _ in range(20):
        gc.collect()
        if not (alive := _alive()):
            break
        time.sleep(0.01)
    return alive


def _alive() -> Counter[str]:
    return Counter(type(item).__name__ for item in gc.get_objects() if type(item) in TYPES)


def load(**settings: Any) -> LLM:
    """The demo model with a cache that is soon in use everywhere."""
    return LLM("demo", kv_cache="4MiB", max_num_seqs=16, max_num_batched_tokens=256, use_tqdm=False, **settings)


def ask(llm: LLM, rng: random.Random) -> None:
    """One short request of some kind, a quarter of them cancelled on the way."""
    prompt = [rng.randrange(2, 1500) for _ in range(rng.choice((1, 3, 10, 40)))]
    params = SamplingParams(
        temperature=rng.choice((0.0, 1.0)),
        seed=rng.randrange(2**32),
        max_tokens=rng.randrange(1, 9),
        n=rng.choice((1, 1, 1, 2)),
        stop=rng.choice(((), ("the",))),
        logprobs=rng.choice((None, None, None, 2)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.0, 1.2)),
    )
    request = llm.submit(prompt, params)
    kind = rng.randrange(8)
    if kind == 0:
        request.cancel()
    elif kind == 1:
        next(iter(request))  # and let go of it, which cancels
        return
    elif kind == 2:
        llm.score([prompt])
    request.result(300)


def run_round(llm: LLM, num_requests: int, num_threads: int, seed: int) -> None:
    """Ask `num_requests` times from several threads and wait until nothing runs."""
    failures: list[BaseException] = []

    def work(index: int) -> None:
        rng = random.Random(seed * num_threads + index)
        try:
            for _ in range(index, num_requests, num_threads):
                ask(llm, rng)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    while (now := llm.metrics()).num_running or now.num_waiting or now.num_used_blocks:
        time.sleep(0.001)


def soak(llm: LLM, num_requests: int, every: int, num_threads: int = 4) -> Iterator[Reading]:
    """Run requests in rounds of `every`; gives a reading after each."""
    started = time.perf_counter()
    for done in range(every, num_requests + 1, every):
        run_round(llm, every, num_threads, done)
        objects = count_objects().total()
        yield Reading(done, resident_bytes(), time.perf_counter() - started, objects)


def slope(readings: list[Reading]) -> float:
    """Bytes that a request adds: of the straight line through the readings, warm-up left out."""
    rest = readings[WARM_UP_ROUNDS:]
    if len(rest) < 2:
        raise ValueError(f"a slope needs {WARM_UP_ROUNDS + 2} rounds, got {len(readings)}")
    return float(np.polyfit([r.num_requests for r in rest], [r.rss_bytes for r in rest], 1)[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--every", type=int, default=1_000)
    parser.add_argument("--threads", type=int, default=4, help="that ask; the engine has one of its own")
    args = parser.parse_args()
    readings = []
    with load() as llm:
        for reading in soak(llm, args.requests, args.every, args.threads):
            readings.append(reading)
            print(
                f"{reading.num_requests:7} requests {reading.seconds:7.1f} s  RSS {reading.rss_bytes / 2**20:7.2f} MiB"
                f"  {reading.num_objects} objects of requests left",
                flush=True,
            )
        print(llm.metrics())
    rise, left = slope(readings), readings[-1].num_objects
    print(f"slope after warm-up: {rise:.1f} bytes a request, at most {BYTES_PER_REQUEST} allowed")
    return int(rise > BYTES_PER_REQUEST or left > 0)


if __name__ == "__main__":
    sys.exit(main())
