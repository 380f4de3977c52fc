"""How fast a model runs, and what share of the machine that is. Called by `infinilm bench`.

Prefill is held against the arithmetic peak, decode against the read bandwidth; both limits are measured on the same
cores in the same minutes, between the runs they judge, because machines are shared and their clocks move. What
disturbs a limit makes it smaller and the model look better, so a limit that falls is measured again, and the larger one
of those around a run judges it. The work is counted from the shape of the model, never guessed from the time.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from infinilm import _core
from infinilm.bench.ops import OpResult, OpSeconds, format_ops, judge_ops, per_step
from infinilm.bench.others import Others
from infinilm.bench.work import Work, count_work
from infinilm.devices.host_memory import available_memory
from infinilm.errors import ConfigError
from infinilm.planning.sizes import format_bytes
from infinilm.sampling_params import SamplingParams
from infinilm.scheduling.steps import tokens_of_a_step

if TYPE_CHECKING:
    from infinilm.llm import LLM

__all__ = [
    "BenchResult",
    "DecodeResult",
    "DecodeRun",
    "Limits",
    "PrefillResult",
    "Spread",
    "context_needed",
    "format_table",
    "measure_decode",
    "measure_limits",
    "measure_prefill",
    "run_bench",
]


@dataclass(frozen=True, slots=True)
class Spread:
    """Median of repeated measurements, with the extremes."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise at least one value."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine gives at this moment."""

    read_bytes_per_second: float
    flops_per_second: float

    def larger(self, other: Limits) -> Limits:
        """The larger of each."""
        return Limits(
            max(self.read_bytes_per_second, other.read_bytes_per_second),
            max(self.flops_per_second, other.flops_per_second),
        )

    def fell_from(self, before: Limits) -> bool:
        """Whether one of them is less than 90% of what it was."""
        now = self.larger(Limits(0.9 * before.read_bytes_per_second, 0.9 * before.flops_per_second))
        return now != self


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """One measured decode.

    Attributes
    ----------
    ttft : float
        Seconds from the call until every sequence of the batch had its first token.
    step_seconds : tuple of float
        Seconds of each step in which the whole batch decoded; prefill is excluded.
    context_len : float
        Mean tokens that a sequence attended to in these steps.
    ops : mapping
        Seconds of each op in a step; empty unless they were asked for.
    """

    ttft: float
    step_seconds: tuple[float, ...]
    context_len: float
    ops: OpSeconds = field(default_factory=dict)

    @property
    def mean_step(self) -> float:
        """Seconds per step."""
        return statistics.fmean(self.step_seconds)


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """Prefill of one prompt; TTFT in seconds, rates per second."""

    prompt_len: int
    ttft_seconds: Spread
    tokens_per_second: Spread
    flops_per_second: Spread
    share_of_peak: Spread
    ops: tuple[OpResult, ...] = ()


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """Decode of `batch_size` sequences at once; times in seconds, rates per second, ITL over the steps of all runs."""

    batch_size: int
    prompt_len: int
    context_len: float
    steps_per_run: int
    bytes_per_step: float
    ttft_seconds: Spread
    itl_p50_seconds: float
    itl_p99_seconds: float
    tokens_per_second: Spread
    read_bytes_per_second: Spread
    share_of_bandwidth: Spread
    ops: tuple[OpResult, ...] = ()


@dataclass(frozen=True, slots=True)
class BenchResult:
    """Everything `run_bench` measured; `other_cores`: what other processes used meanwhile, by round."""

    repeats: int
    read_bytes_per_second: Spread
    flops_per_second: Spread
    other_cores: Spread
    prefill: PrefillResult
    decode: tuple[DecodeResult, ...]


def measure_limits(num_threads: int, dtype: str) -> Limits:
    """Measure read bandwidth and arithmetic peak of `num_threads` cores, with the kernels of compute dtype `dtype`."""
    read, flops = _core.measure_cpu_limits(num_threads, dtype, available_memory() // 4)
    return Limits(read, flops)


def _limits_after(before: Limits, num_threads: int, dtype: str, progress: Callable[[str], object]) -> Limits:
    """The limits once more; those that fell are measured again, twice at most."""
    limits = measure_limits(num_threads, dtype)
    for _ in range(2):
        if not limits.fell_from(before):
            break
        progress("the limits fell: something disturbs, they are measured again")
        limits = limits.larger(measure_limits(num_threads, dtype))
    return limits


def _random_prompt(llm: LLM, length: int, rng: np.random.Generator) -> list[int]:
    ids: list[int] = rng.integers(0, llm.config.vocab_size, length).tolist()
    return ids


def measure_prefill(llm: LLM, prompt_len: int, rng: np.random.Generator) -> float:
    """Seconds from a prompt of `prompt_len` random tokens to its first new token."""
    prompt = _random_prompt(llm, prompt_len, rng)
    started = time.perf_counter()
    llm.generate(
        [prompt], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, speculation="off"), use_tqdm=False
    )
    return time.perf_counter() - started


def measure_decode(
    llm: LLM, batch_size: int, context_len: int, num_steps: int, rng: np.random.Generator, *, ops: bool = False
) -> DecodeRun:
    """Decode `batch_size` sequences that begin with `context_len` random tokens, `num_steps` steps of the whole batch.

    A step lasts from the last token of one step to that of the next, as a caller of `LLM.stream` sees it. `ops`: take
    the time of each op too, of the engine's own steps.

    Raises
    ------
    ConfigError
        `llm.max_model_len` is below `context_needed`.
    """
    prompts = [_random_prompt(llm, context_len, rng) for _ in range(batch_size)]
    seen: set[str] = set()  # requests that have a token
    begun = 0  # tokens up to the end of the last prefill
    ends: list[float] = []  # of that step, and of every step of the whole batch after it
    started = time.perf_counter()
    # Leaving the loop cancels the sequences; nothing else ends them before the context is full.
    events = llm.stream(prompts, SamplingParams(temperature=0.0, ignore_eos=True, speculation="off"))
    for num_events, event in enumerate(events, 1):
        seen.add(event.request_id)
        if len(seen) == batch_size and (not ends or (num_events - begun) % batch_size == 0):
            if ops and not begun:
                llm.engine.time_ops(True)  # between two steps
            begun = begun or num_events
            ends.append(time.perf_counter())
        if len(ends) > num_steps:
            break
        if event.finish_reason is not None:
            raise ConfigError(
                f"max_model_len={llm.max_model_len} ended a sequence before {num_steps} steps of {batch_size} "
                f"sequences from {context_len} tokens were measured: pass a larger one"
            )
    times = llm.engine.op_times() if ops else {}
    del events  # cancels what runs; a step of it must not run beside the next measurement
    while llm.metrics().num_running or llm.metrics().num_waiting:
        time.sleep(0.001)
    if ops:
        llm.engine.time_ops(False)
    steps = tuple(b - a for a, b in itertools.pairwise(ends))
    context = context_len + begun / batch_size + (num_steps - 1) / 2
    return DecodeRun(ends[0] - started, steps, context, per_step(times) if ops else {})


def measure_decode_ops(
    llm: LLM, batch_size: int, context_len: int, num_steps: int, rng: np.random.Generator
) -> DecodeRun:
    """`measure_decode` with the time of each op.

    The engine does not wait for this thread: on a busy machine it may have made all tokens of a small model before it
    is asked for the times of its steps. Then the run is done again.

    Raises
    ------
    ConfigError
        No step was timed in ten runs.
    """
    for _ in range(10):
        run = measure_decode(llm, batch_size, context_len, num_steps, rng, ops=True)
        if run.ops:
            return run
    raise ConfigError(
        f"{num_steps} steps of {batch_size} sequences were over before one could be timed, ten times: "
        "measure more steps (decode_tokens, --decode-tokens)"
    )


def measure_prefill_ops(llm: LLM, prompt_len: int, rng: np.random.Generator) -> tuple[float, OpSeconds]:
    """Seconds of `measure_prefill`, and of each op in it."""
    llm.engine.time_ops(True)
    seconds = measure_prefill(llm, prompt_len, rng)
    times = llm.engine.op_times()
    llm.engine.time_ops(False)
    return seconds, {name: op_seconds for name, (_, op_seconds) in times.items()}


def context_needed(
    *,
    prompt_len: int,
    decode_context: Sequence[int],
    decode_tokens: int,
    batch_sizes: Sequence[int],
    max_num_batched_tokens: int,
    num_stages: int = 1,
) -> int:
    """Return the max_model_len that `run_bench` needs.

    Long prompts of a batch are computed in several steps, in which the first sequences decode already: that many
    tokens more than the measured ones. In a pipeline the steps are smaller, and each has a part of those that decode.
    """
    largest, longest = max(batch_sizes), max(decode_context)
    tokens = tokens_of_a_step(max_num_batched_tokens, largest, num_stages)
    steps = -(-largest * longest // max(1, tokens - -(-largest // num_stages)))
    return max(prompt_len + 1, longest + decode_tokens + 1 + steps)


def run_bench(
    llm: LLM,
    *,
    num_threads: int,
    prompt_len: int = 512,
    decode_tokens: int = 64,
    decode_context: Sequence[int] = (128,),
    batch_sizes: Sequence[int] = (1, 8),
    repeats: int = 3,
    ops: bool = False,
    progress: Callable[[str], object] = lambda _: None,
) -> BenchResult:
    """Measure a loaded model: `repeats` rounds of limits, prefill, and decode at each batch size, limits once more.

    A share is taken against the larger of the limits before and after its round. One unmeasured round goes first, which
    reads the weights from disk and grows the buffers.

    Parameters
    ----------
    llm : LLM
        With room for the largest batch, and a max_model_len of `context_needed` at least.
    num_threads : int
        Threads with which the limits are measured; the model was loaded with as many.
    prompt_len, decode_context, decode_tokens : int
        Tokens of the prefill; tokens a sequence starts to decode from, each with each batch size; measured steps of a
        decode.
    ops : bool
        Take the time of each op too, in one more round, whose other figures are not reported.
    progress : callable
        Called with a line of text before each part.

    Raises
    ------
    ConfigError
        The model was loaded with too little room.
    """
    if llm.memory.num_full_seqs < max(batch_sizes):
        raise ConfigError(
            f"the KV cache has room for {llm.memory.num_full_seqs} sequences, batch_sizes asks for {max(batch_sizes)}: "
            "raise kv_cache, or pass smaller batch sizes"
        )
    rng = np.random.default_rng(0)
    progress("warm-up")
    measure_prefill(llm, min(prompt_len, 32), rng)
    measure_decode(llm, max(batch_sizes), 1, 1, rng)
    limits: list[Limits] = []
    prefills: list[float] = []
    decodes: dict[tuple[int, int], list[DecodeRun]] = {(n, size): [] for n in decode_context for size in batch_sizes}
    other_cores: list[float] = []
    limits.append(measure_limits(num_threads, llm.dtype))
    for repeat in range(repeats):
        round_of = f"round {repeat + 1} of {repeats}"
        others = Others()
        progress(f"{round_of}: prefill of {prompt_len} tokens")
        prefills.append(measure_prefill(llm, prompt_len, rng))
        for (context, size), runs in decodes.items():
            progress(f"{round_of}: decode of {size} x {decode_tokens} tokens after {context}")
            runs.append(measure_decode(llm, size, context, decode_tokens, rng))
        progress(f"{round_of}: limits of the machine")
        limits.append(_limits_after(limits[-1], num_threads, llm.dtype, progress))
        other_cores.append(others.cores())
    work = count_work(llm)
    prefill = _summarise_prefill(work, prompt_len, prefills, limits)
    summaries = [_summarise_decode(work, size, n, runs, limits) for (n, size), runs in decodes.items()]
    if ops:
        progress("time of each op")
        seconds, prefill_ops = measure_prefill_ops(llm, prompt_len, rng)
        runs_of_ops = [measure_decode_ops(llm, d.batch_size, d.prompt_len, decode_tokens, rng) for d in summaries]
        limits.append(_limits_after(limits[-1], num_threads, llm.dtype, progress))
        best = limits[-1].larger(limits[-2])
        num_steps = -(-prompt_len // llm.max_step_tokens)  # of a step, also of a pipeline
        prefill_work = work.ops(1, prompt_len, prompt_len, num_steps)
        prefill = replace(
            prefill,
            ops=judge_ops(prefill_work, prefill_ops, seconds, best.read_bytes_per_second, best.flops_per_second),
        )
        for i, (decode, run) in enumerate(zip(summaries, runs_of_ops, strict=True)):
            num_steps = work.decode_steps(decode.batch_size)  # in `mean_step`, in which all sequences get a token
            step = work.ops(decode.batch_size, 1, run.context_len, num_steps)
            taken = {name: num_steps * op_seconds for name, op_seconds in run.ops.items()}
            judged = judge_ops(step, taken, run.mean_step, best.read_bytes_per_second, best.flops_per_second)
            summaries[i] = replace(decode, ops=judged)
    return BenchResult(
        repeats=repeats,
        read_bytes_per_second=Spread.of([x.read_bytes_per_second for x in limits]),
        flops_per_second=Spread.of([x.flops_per_second for x in limits]),
        other_cores=Spread.of(other_cores),
        prefill=prefill,
        decode=tuple(summaries),
    )


def _around(values: Sequence[float]) -> list[float]:
    """The larger of each value and the next: the limit while the round between them ran."""
    return [max(a, b) for a, b in itertools.pairwise(values)]


def _summarise_prefill(
    work: Work, prompt_len: int, seconds: Sequence[float], limits: Sequence[Limits]
) -> PrefillResult:
    peaks = _around([x.flops_per_second for x in limits])
    rates = [work.prefill_flops(prompt_len) / s for s in seconds]
    return PrefillResult(
        prompt_len=prompt_len,
        ttft_seconds=Spread.of(seconds),
        tokens_per_second=Spread.of([prompt_len / s for s in seconds]),
        flops_per_second=Spread.of(rates),
        share_of_peak=Spread.of([rate / peak for rate, peak in zip(rates, peaks, strict=True)]),
    )


def _summarise_decode(
    work: Work, batch_size: int, prompt_len: int, runs: Sequence[DecodeRun], limits: Sequence[Limits]
) -> DecodeResult:
    bandwidths = _around([x.read_bytes_per_second for x in limits])
    rates = [work.decode_bytes(batch_size, run.context_len) / run.mean_step for run in runs]
    steps = [step for run in runs for step in run.step_seconds]
    return DecodeResult(
        batch_size=batch_size,
        prompt_len=prompt_len,
        context_len=runs[0].context_len,
        steps_per_run=len(runs[0].step_seconds),
        bytes_per_step=work.decode_bytes(batch_size, runs[0].context_len),
        ttft_seconds=Spread.of([run.ttft for run in runs]),
        itl_p50_seconds=float(np.percentile(steps, 50)),
        itl_p99_seconds=float(np.percentile(steps, 99)),
        tokens_per_second=Spread.of([batch_size / run.mean_step for run in runs]),
        read_bytes_per_second=Spread.of(rates),
        share_of_bandwidth=Spread.of([rate / limit for rate, limit in zip(rates, bandwidths, strict=True)]),
    )


def format_table(about: Mapping[str, Any], result: BenchResult) -> str:
    """Write a result for people; `about` has what `infinilm bench --json` prints beside it."""
    prefill = result.prefill
    lines = [
        f"{about['model']}: {about['architecture']}, weights {format_bytes(about['weight_bytes'])}, {about['dtype']} "
        f"on {cpu_line(about)}; median (min .. max) of {result.repeats}",
        f"read bandwidth  {_columns(result.read_bytes_per_second, 1e-9)} GB/s",
        f"arithmetic peak {_columns(result.flops_per_second, 1e-9)} Gflop/s",
        f"other processes {_columns(result.other_cores)} cores",
        f"prefill of {prefill.prompt_len} tokens",
        f"  tokens/s      {_columns(prefill.tokens_per_second)}",
        f"  share of peak {_columns(prefill.share_of_peak, 100)} %",
        f"  TTFT          {_columns(prefill.ttft_seconds, 1e3)} ms",
        *format_ops(prefill.ops),
    ]
    for decode in result.decode:
        lines += [
            f"decode of {decode.batch_size} x {decode.steps_per_run} tokens, mean context {decode.context_len:.0f}",
            f"  tokens/s      {_columns(decode.tokens_per_second)}",
            f"  of bandwidth  {_columns(decode.share_of_bandwidth, 100)} %",
            f"  ITL           {decode.itl_p50_seconds * 1e3:9.2f} ms p50, {decode.itl_p99_seconds * 1e3:.2f} ms p99",
            f"  TTFT          {_columns(decode.ttft_seconds, 1e3)} ms",
            *format_ops(decode.ops),
        ]
    return "\n".join(lines)


def cpu_line(about: Mapping[str, Any]) -> str:
    """Which kernels and how many threads, of how many ranks."""
    ranks = f"{about['tensor_parallel_size']} ranks, " if about["tensor_parallel_size"] > 1 else ""
    ranks += f"{about['pipeline_parallel_size']} stages, " if about["pipeline_parallel_size"] > 1 else ""
    return f"{about['isa']}, {ranks}{about['num_threads']} threads"


def _columns(value: Spread, scale: float = 1.0) -> str:
    low, middle, high = (f"{x * scale:.1f}" for x in (value.min, value.median, value.max))
    return f"{middle:>9} ({low} .. {high})"
