"""How long Python takes for a step, and what a paged cache costs on the CPU.

    python -m bench.scheduler_bench                    # microseconds a step, the engine left out
    python -m bench.scheduler_bench --profile          # where they go, by function
    python -m bench.scheduler_bench --drafts           # what drafters add to the scheduler's part of a step
    python -m bench.scheduler_bench --layouts          # prefill and decode, blocks of 16 tokens against one block

A step is: requests taken from callers, schedule, batch, results taken in, and, for each sequence, the update with its
token given to a listener ("stream") or kept until its end ("generate"); text is made by the callers' threads. The
scheduler alone is the part of it up to the batch, and the tokens taken in. After every step a fixed loop is timed:
what a step takes as a share of it hardly depends on how fast or busy the machine is.

`--layouts` runs one engine with dummy weights (shapes of llama-1b, fewer layers) under two schedulers: blocks of 16
tokens, and one block per sequence, the static layout. Rounds alternate; on a busy machine only the fastest
compare.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import itertools
import pstats
import statistics
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np

from bench.requests import request_maker
from infinilm import LLM, SamplingParams, _core
from infinilm.config.json.model_config import ModelConfig
from infinilm.config.spec import build_spec
from infinilm.engine.hooks import EngineHooks, ModelSites
from infinilm.scheduling.scheduler import Scheduler
from infinilm.scheduling.sequence import Sequence
from infinilm.serving.engine_thread import EngineThread
from infinilm.serving.request_queue import RequestQueue
from infinilm.speculation import Drafters
from infinilm.speculation.settings import Lookup


def spread(least: int, count: int) -> list[int]:
    """Lengths of prompts whose blocks fill up at different steps, as those of requests do."""
    return [least + i % 16 for i in range(count)]


def add_sequences(scheduler: Scheduler, prompt_lens: list[int], seed: int) -> list[Sequence]:
    rng = np.random.default_rng(seed)
    params = SamplingParams(temperature=1.0, ignore_eos=True)
    prompts = [rng.integers(0, 1000, length).astype(np.int32) for length in prompt_lens]
    out = [Sequence(prompt, params, seed=i) for i, prompt in enumerate(prompts)]
    for sequence in out:
        scheduler.add(sequence)
    return out


def time_yardstick() -> float:
    """Seconds of 10,000 additions in a Python loop."""
    started = time.perf_counter()
    total = 0
    for i in range(10_000):
        total += i
    return time.perf_counter() - started


def time_scheduler(num_seqs: int, num_steps: int, caching: bool) -> Iterator[tuple[float, float]]:
    """Seconds of each step of `num_seqs` decodes, the engine left out, and of the yardstick."""
    scheduler = Scheduler(
        num_seqs * 64,
        16,
        max_num_seqs=num_seqs,
        max_model_len=1024,
        max_num_batched_tokens=8192,
        enable_prefix_caching=caching,
    )
    add_sequences(scheduler, spread(100, num_seqs), 0)
    for i in range(num_steps + 10):
        ids = np.full(num_seqs, i, np.int32)
        output: Any = SimpleNamespace(ids=SimpleNamespace(numpy=lambda ids=ids: ids), logits=None)
        started = time.perf_counter()
        step = scheduler.schedule(started)
        assert step is not None
        scheduler.update(step, output, started)
        elapsed = time.perf_counter() - started
        if len(step.samples) == num_seqs and len(step.sequences) == num_seqs and i >= 10:
            yield elapsed, time_yardstick()


def time_drafts(num_seqs: int, num_steps: int, drafters: Drafters | None, period: int) -> list[float]:
    """Seconds of the processor for each step in the scheduler, without the engine, of texts that repeat or do not.

    `period`: tokens after which a text repeats itself.
    """
    scheduler = Scheduler(
        num_seqs * 128,
        16,
        max_num_seqs=num_seqs,
        max_model_len=2048,
        max_num_batched_tokens=8192,
        drafters=drafters,
        is_adaptive=True,
        vocab_size=4096,
    )
    add_sequences(scheduler, [64] * num_seqs, 0)
    seconds = []
    for i in range(num_steps + 20):
        started = time.thread_time()
        step = scheduler.schedule(started)
        assert step is not None
        elapsed = time.thread_time() - started
        ids = (step.positions % period).astype(np.int32)
        output: Any = SimpleNamespace(ids=SimpleNamespace(numpy=lambda ids=ids: ids), logits=None)
        started = time.thread_time()
        num_tokens = scheduler.update(step, output, started).num_tokens
        scheduler.observe(step, num_tokens, 0.05)
        if i >= 20:
            seconds.append(elapsed + time.thread_time() - started)
    return seconds


def bench_drafts(sizes: list[int], num_steps: int) -> None:
    ways: dict[str, tuple[Drafters | None, int]] = {
        "no drafters": (None, 4096),
        "lookup, nothing found": (Lookup(), 4096),
        "lookup, 15 tokens of each": (Lookup(), 20),
    }
    for size in sizes:
        rounds = [
            {name: statistics.median(time_drafts(size, num_steps, *way)) for name, way in ways.items()}
            for _ in range(5)
        ]
        for name in ways:
            found = [one[name] * 1e6 for one in rounds]
            more = [(one[name] - one["no drafters"]) * 1e6 for one in rounds]
            print(f"{size:4} decodes, {name:26} {min(found):5.0f} us, {statistics.median(more):4.0f} us more")


class NoEngine:
    """Answers every step at once, with the same token for all, and notes how long the thread that submits takes.

    Parameters
    ----------
    num_seqs : int
    between : callable
        Called between two turns of that thread, in it.

    Attributes
    ----------
    seconds : list of float
        Seconds of each turn.
    """

    def __init__(self, num_seqs: int, between: Callable[[], object]) -> None:
        ids = np.full(num_seqs, 300, np.int32)
        self._output = SimpleNamespace(ids=SimpleNamespace(numpy=lambda: ids), logits=None, aborted=False)
        self._between = between
        self._begin: float | None = None
        self.seconds: list[float] = []

    def submit(self, batch: _core.Batch, late_masks: bool) -> NoEngine:
        if self._begin is not None:
            self.seconds.append(time.perf_counter() - self._begin)
        self._between()
        self._begin = time.perf_counter()
        return self

    def wait(self, seconds: float) -> bool:
        """The step is done."""
        return True

    def result(self) -> Any:
        return self._output

    def remove_adapter(self, id: int) -> None:
        """There are none."""

    def close(self) -> None:
        pass


def run_engine_thread(num_seqs: int, num_steps: int, ends_only: bool, between: Callable[[], object]) -> list[float]:
    """Seconds of each turn of the thread that serves `num_seqs` requests of an `LLM`, the engine left out."""
    engine: Any = NoEngine(num_seqs, between)
    max_len = num_steps + 64
    with LLM("demo", max_num_seqs=1, max_model_len=max_len, kv_cache="1GiB", use_tqdm=False) as llm:
        maker = request_maker(llm, engine)
        spec = build_spec(llm.config, dtype="float32", max_model_len=max_len)
        scheduler = Scheduler(
            num_seqs * -(-max_len // 16),
            16,
            max_num_seqs=num_seqs,
            max_model_len=max_len,
            max_num_batched_tokens=num_seqs * 64,
        )
        hooks, queue = EngineHooks(engine, ModelSites(spec), 1), RequestQueue(num_seqs, None)
        thread = EngineThread(engine, scheduler, hooks, maker.adapters, queue)
        prompts = [[1 + i % 200] * length for i, length in enumerate(spread(20, num_seqs))]
        requests = maker.make(prompts, None, {"max_tokens": num_steps + 10, "ignore_eos": True})
        ends: SimpleQueue[object] = SimpleQueue()
        for request in requests:
            request.listen(lambda update: ends.put(update) if update.finish_reason else None, ends_only=ends_only)
        thread.submit([part for request in requests for part in request.to_submit])
        for _ in requests:
            ends.get()
        thread.close()
    return engine.seconds[9:]  # without the prompts, and first times


def time_engine_thread(num_seqs: int, num_steps: int, ends_only: bool) -> Iterator[tuple[float, float]]:
    """Seconds of each step that `run_engine_thread` times, and of a yardstick that the same thread ran after it."""
    yardsticks: list[float] = []
    seconds = run_engine_thread(num_seqs, num_steps, ends_only, lambda: yardsticks.append(time_yardstick()))
    return zip(seconds, yardsticks[-len(seconds) :], strict=True)


def print_times(label: str, times: Iterator[tuple[float, float]]) -> None:
    """`times`: seconds of each step, and of the yardstick after it."""
    steps, yardsticks = zip(*times, strict=True)
    micros = sorted(1e6 * step for step in steps)
    tenth, median, p99 = (micros[len(micros) * p // 100] for p in (10, 50, 99))
    share = statistics.median(step / yardstick for step, yardstick in zip(steps, yardsticks, strict=True))
    print(f"{label:36} median {median:5.0f} us  p10 {tenth:5.0f} us  p99 {p99:5.0f} us  {share:.2f} of the yardstick")


def bench_steps(sizes: list[int], num_steps: int) -> None:
    for size in sizes:
        for caching in (True, False):
            label = "prefix cache" if caching else "no prefix cache"
            print_times(f"{size:4} decodes, scheduler, {label}", time_scheduler(size, num_steps, caching))
        for ends_only in (True, False):
            label = "generate" if ends_only else "stream"
            print_times(f"{size:4} decodes, all, {label}", time_engine_thread(size, num_steps, ends_only))


def profile_steps(size: int, num_steps: int) -> None:
    profile, turns = cProfile.Profile(), itertools.count()

    def begin() -> None:
        if next(turns) == 10:  # without the prompts, and first times
            gc.collect()
            profile.enable()  # of this thread, which ends with the steps

    run_engine_thread(size, num_steps, False, begin)
    pstats.Stats(profile).sort_stats("tottime").print_stats(20)


def run_layout(engine: _core.InferEngine, block_size: int, max_len: int, batch: int, prompt: int, steps: int) -> Any:
    """Seconds of a prefill of `batch` prompts, and of the median decode step after it."""
    blocks_per_seq = -(-max_len // block_size)
    engine.reset_cache(batch * blocks_per_seq, block_size)
    scheduler = Scheduler(
        batch * blocks_per_seq,
        block_size,
        max_num_seqs=batch,
        max_model_len=max_len,
        max_num_batched_tokens=batch * prompt,
    )
    add_sequences(scheduler, [prompt] * batch, 1)
    seconds = []
    for _ in range(steps + 1):
        started = time.perf_counter()
        step = scheduler.schedule(started)
        assert step is not None
        scheduler.update(step, engine.forward(step.batch), time.perf_counter())
        seconds.append(time.perf_counter() - started)
    return seconds[0], statistics.median(seconds[1:])


def bench_layouts(layers: int, prompt: int, rounds: int) -> None:
    config = ModelConfig(
        vocab_size=1000,
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=4096,
    )
    max_len = prompt + 64
    engine = _core.InferEngine(build_spec(config, dtype="float32", max_model_len=max_len), "cpu")
    engine.load_dummy("float32", 0)
    engine.finish_loading()
    for batch in (1, 4):
        results: dict[int, list[Any]] = {16: [], max_len: []}
        for i in range(rounds):
            for size, runs in sorted(results.items(), reverse=bool(i % 2)):
                runs.append(run_layout(engine, size, max_len, batch, prompt, 24))
        for i, what in enumerate(("prefill", "decode")):
            for name, choose in (("median", statistics.median), ("fastest", min)):
                paged, static = (choose([run[i] for run in runs]) for runs in results.values())
                print(
                    f"{what:8} batch {batch}, {prompt} tokens, {name:8} blocks of 16 {1e3 * paged:8.2f} ms, static "
                    f"{1e3 * static:8.2f} ms, ratio {paged / static:.3f}"
                )
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--drafts", action="store_true")
    parser.add_argument("--layouts", action="store_true")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.drafts:
        bench_drafts(args.sizes, min(args.steps, 80))
    elif args.layouts:
        bench_layouts(args.layers, args.prompt, args.rounds)
    elif args.profile:
        profile_steps(max(args.sizes), args.steps)
    else:
        bench_steps(args.sizes, args.steps)


if __name__ == "__main__":
    main()
