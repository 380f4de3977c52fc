"""How fast a model runs, and what share of the machine that is. Called by `infinilm bench`.

Prefill is held against the arithmetic peak, decode against the read bandwidth; both limits are measured on the same
cores in the same minutes, between the runs they judge, because machines are shared and their clocks move. The work
is counted from the shape of the model, never guessed from the time.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from infinilm import _core
from infinilm.config.families import build_spec
from infinilm.errors import ConfigError
from infinilm.requests.memory import available_memory, format_bytes
from infinilm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from infinilm.llm import LLM

__all__ = [
    "BenchResult",
    "DecodeResult",
    "DecodeRun",
    "Limits",
    "PrefillResult",
    "Spread",
    "Work",
    "context_needed",
    "count_work",
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


@dataclass(frozen=True, slots=True)
class Work:
    """What a step costs, by the shape of the model alone.

    Attributes
    ----------
    linear_elements : int
        Weight elements of the linears of all layers: every token multiplies with each of them.
    lm_head_elements : int
        Those of the output head: only the tokens that are sampled from.
    weight_bytes : int
        Weights read by a decode step: all but an embedding table that is not the output head too.
    kv_bytes_per_token_layer : int
        Keys and values of one token in one layer.
    sliding_window : tuple of int
        Per layer; 0 is none.
    """

    linear_elements: int
    lm_head_elements: int
    weight_bytes: int
    kv_bytes_per_token_layer: int
    sliding_window: tuple[int, ...]

    def prefill_flops(self, num_tokens: int) -> int:
        """Multiplications and additions of the linears for a prompt of which the last token is sampled from.

        Attention itself is left out: for short prompts it is small, and every definition of it is another one.
        """
        return 2 * (num_tokens * self.linear_elements + self.lm_head_elements)

    def decode_bytes(self, batch_size: int, context_len: float) -> float:
        """Bytes a decode step must read: every weight once, and the keys and values of every sequence."""
        seen = sum(min(context_len, window or math.inf) for window in self.sliding_window)
        return self.weight_bytes + batch_size * self.kv_bytes_per_token_layer * seen


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """One measured decode.

    Attributes
    ----------
    ttft : float
        Seconds from the call until every sequence of the batch had its first token.
    step_seconds : tuple of float
        Of the steps in which the whole batch decoded, prefill excluded.
    context_len : float
        Mean tokens that a sequence attended to in these steps.
    """

    ttft: float
    step_seconds: tuple[float, ...]
    context_len: float

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


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """Decode of `batch_size` sequences at once; times in seconds, rates per second, ITL over the steps of all runs."""

    batch_size: int
    context_len: float
    steps_per_run: int
    bytes_per_step: float
    ttft_seconds: Spread
    itl_p50_seconds: float
    itl_p99_seconds: float
    tokens_per_second: Spread
    read_bytes_per_second: Spread
    share_of_bandwidth: Spread


@dataclass(frozen=True, slots=True)
class BenchResult:
    """Everything `run_bench` measured."""

    repeats: int
    read_bytes_per_second: Spread
    flops_per_second: Spread
    prefill: PrefillResult
    decode: tuple[DecodeResult, ...]


def count_work(llm: LLM) -> Work:
    """Count the work of a loaded model's steps."""
    spec = build_spec(llm.config, dtype=llm.dtype, max_model_len=llm.max_model_len)
    shapes = _core.param_shapes(spec)
    matrices = {name: math.prod(shape) for name, shape in shapes.items() if len(shape) == 2}
    embedding = matrices["model.embed_tokens.weight"]
    element_bytes = llm.memory.weight_bytes / sum(math.prod(shape) for shape in shapes.values())
    unread = 0 if spec.tie_word_embeddings else embedding
    return Work(
        linear_elements=sum(matrices.values()) - embedding - matrices.get("lm_head.weight", 0),
        lm_head_elements=matrices.get("lm_head.weight", embedding),
        weight_bytes=round(llm.memory.weight_bytes - unread * element_bytes),
        kv_bytes_per_token_layer=llm.memory.kv_bytes_per_token // spec.num_layers,
        sliding_window=tuple(layer.sliding_window for layer in spec.layers),
    )


def measure_limits(num_threads: int, dtype: str) -> Limits:
    """Measure read bandwidth and arithmetic peak of `num_threads` cores, with the kernels of compute dtype `dtype`."""
    read, flops = _core.measure_cpu_limits(num_threads, dtype, available_memory() // 4)
    return Limits(read, flops)


def _random_prompt(llm: LLM, length: int, rng: np.random.Generator) -> list[int]:
    ids: list[int] = rng.integers(0, llm.config.vocab_size, length).tolist()
    return ids


def measure_prefill(llm: LLM, prompt_len: int, rng: np.random.Generator) -> float:
    """Seconds from a prompt of `prompt_len` random tokens to its first new token."""
    prompt = _random_prompt(llm, prompt_len, rng)
    started = time.perf_counter()
    llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True), use_tqdm=False)
    return time.perf_counter() - started


def measure_decode(llm: LLM, batch_size: int, context_len: int, num_steps: int, rng: np.random.Generator) -> DecodeRun:
    """Decode `batch_size` sequences that begin with `context_len` random tokens, `num_steps` steps of the whole batch.

    A step lasts from the last token of one step to that of the next, as a caller of `LLM.stream` sees it.

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
    events = llm.stream(prompts, SamplingParams(temperature=0.0, ignore_eos=True))
    for num_events, event in enumerate(events, 1):
        seen.add(event.request_id)
        if len(seen) == batch_size and (not ends or (num_events - begun) % batch_size == 0):
            begun = begun or num_events
            ends.append(time.perf_counter())
        if len(ends) > num_steps:
            break
        if event.finish_reason is not None:
            raise ConfigError(
                f"max_model_len={llm.max_model_len} ended a sequence before {num_steps} steps of {batch_size} "
                f"sequences from {context_len} tokens were measured: pass a larger one"
            )
    del events  # cancels what runs; a step of it must not run beside the next measurement
    while llm.metrics().num_running or llm.metrics().num_waiting:
        time.sleep(0.001)
    steps = tuple(b - a for a, b in itertools.pairwise(ends))
    return DecodeRun(ends[0] - started, steps, context_len + begun / batch_size + (num_steps - 1) / 2)


def context_needed(
    *, prompt_len: int, decode_context: int, decode_tokens: int, batch_sizes: Sequence[int], max_num_batched_tokens: int
) -> int:
    """Return the max_model_len that `run_bench` needs.

    Long prompts of a batch are computed in several steps, in which the first sequences decode already: that many
    tokens more than the measured ones.
    """
    largest = max(batch_sizes)
    steps = -(-largest * decode_context // max(1, max_num_batched_tokens - largest))
    return max(prompt_len + 1, decode_context + decode_tokens + 1 + steps)


def run_bench(
    llm: LLM,
    *,
    num_threads: int,
    prompt_len: int = 512,
    decode_tokens: int = 64,
    decode_context: int = 128,
    batch_sizes: Sequence[int] = (1, 8),
    repeats: int = 3,
    progress: Callable[[str], object] = lambda _: None,
) -> BenchResult:
    """Measure a loaded model: `repeats` rounds of limits, prefill, and decode at each batch size, limits once more.

    A share is taken against the mean of the limits before and after its round. One unmeasured round goes first, which
    reads the weights from disk and grows the buffers.

    Parameters
    ----------
    llm : LLM
        With room for the largest batch, and a max_model_len of `context_needed` at least.
    num_threads : int
        Of the limits; those the model was loaded with.
    prompt_len, decode_context, decode_tokens : int
        Tokens of the prefill; tokens a sequence starts to decode from; measured steps of a decode.
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
    decodes: dict[int, list[DecodeRun]] = {size: [] for size in batch_sizes}
    for repeat in range(repeats):
        progress(f"round {repeat + 1} of {repeats}: limits of the machine")
        limits.append(measure_limits(num_threads, llm.dtype))
        progress(f"round {repeat + 1} of {repeats}: prefill of {prompt_len} tokens")
        prefills.append(measure_prefill(llm, prompt_len, rng))
        for size, runs in decodes.items():
            progress(f"round {repeat + 1} of {repeats}: decode of {size} x {decode_tokens} tokens")
            runs.append(measure_decode(llm, size, decode_context, decode_tokens, rng))
    limits.append(measure_limits(num_threads, llm.dtype))
    work = count_work(llm)
    return BenchResult(
        repeats=repeats,
        read_bytes_per_second=Spread.of([x.read_bytes_per_second for x in limits]),
        flops_per_second=Spread.of([x.flops_per_second for x in limits]),
        prefill=_summarise_prefill(work, prompt_len, prefills, limits),
        decode=tuple(_summarise_decode(work, size, runs, limits) for size, runs in decodes.items()),
    )


def _around(values: Sequence[float]) -> list[float]:
    """Mean of each value and the next: the limit while the round between them ran."""
    return [(a + b) / 2 for a, b in itertools.pairwise(values)]


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


def _summarise_decode(work: Work, batch_size: int, runs: Sequence[DecodeRun], limits: Sequence[Limits]) -> DecodeResult:
    bandwidths = _around([x.read_bytes_per_second for x in limits])
    rates = [work.decode_bytes(batch_size, run.context_len) / run.mean_step for run in runs]
    steps = [step for run in runs for step in run.step_seconds]
    return DecodeResult(
        batch_size=batch_size,
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
        f"prefill of {prefill.prompt_len} tokens",
        f"  tokens/s      {_columns(prefill.tokens_per_second)}",
        f"  share of peak {_columns(prefill.share_of_peak, 100)} %",
        f"  TTFT          {_columns(prefill.ttft_seconds, 1e3)} ms",
    ]
    for decode in result.decode:
        lines += [
            f"decode of {decode.batch_size} x {decode.steps_per_run} tokens, mean context {decode.context_len:.0f}",
            f"  tokens/s      {_columns(decode.tokens_per_second)}",
            f"  of bandwidth  {_columns(decode.share_of_bandwidth, 100)} %",
            f"  ITL           {decode.itl_p50_seconds * 1e3:9.2f} ms p50, {decode.itl_p99_seconds * 1e3:.2f} ms p99",
            f"  TTFT          {_columns(decode.ttft_seconds, 1e3)} ms",
        ]
    return "\n".join(lines)


def cpu_line(about: Mapping[str, Any]) -> str:
    """Which kernels and how many threads, of how many ranks."""
    ranks = f"{about['tensor_parallel_size']} ranks, " if about["tensor_parallel_size"] > 1 else ""
    return f"{about['isa']}, {ranks}{about['num_threads']} threads"


def _columns(value: Spread, scale: float = 1.0) -> str:
    low, middle, high = (f"{x * scale:.1f}" for x in (value.min, value.median, value.max))
    return f"{middle:>9} ({low} .. {high})"
