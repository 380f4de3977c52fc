"""What pools of threads that have nothing to do cost an engine that decodes.

Prints the time of a step of the demo model beside nothing, beside an idle pool without threads of its own (as drawing
tokens on the host makes one) and beside an idle second engine; interleaved, as ratios to the first. How often threads
went to sleep in a step tells the same where the machine is too busy for times.

    python -m bench.idle_pools [--rounds 40]
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

from infinilm import LLM, _core

TOKENS = 100


def second_engine() -> Any:
    llm = LLM("demo", device="cpu", use_tqdm=False)
    llm.generate("Once", max_tokens=2)
    return llm


COMPANY: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "an idle pool of one": lambda: _core.Backend("cpu", num_threads=1),
    "an idle engine": second_engine,
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    llm = LLM("demo", device="cpu", use_tqdm=False)
    seconds: dict[str, list[float]] = {what: [] for what in COMPANY}
    sleeps: dict[str, list[float]] = {what: [] for what in COMPANY}
    for _ in range(rounds):
        for what, make in COMPANY.items():
            company = make()
            time.sleep(0.02)  # its threads go to sleep
            before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
            begin = time.perf_counter()
            llm.generate("Once upon a time", max_tokens=TOKENS, temperature=0, ignore_eos=True)
            seconds[what].append((time.perf_counter() - begin) / TOKENS)
            sleeps[what].append((resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before) / TOKENS)
            if hasattr(company, "close"):
                company.close()
            del company
    for what, times in seconds.items():
        slept = statistics.median(sleeps[what])
        ratios = statistics.quantiles([t / base for t, base in zip(times, seconds["nothing"], strict=True)], n=4)
        print(
            f"beside {what}: {statistics.median(times) * 1e6:.0f} us a step (least {min(times) * 1e6:.0f}); ratio to "
            f"nothing {ratios[1]:.2f} ({ratios[0]:.2f} to {ratios[2]:.2f}); {slept:.1f} sleeps a step"
        )


if __name__ == "__main__":
    main()
