"""Measures steps of whole models with random weights on the GPU, as shares of what the device gives. Run by gpu.py.

Steps are handed to the engine directly, without the scheduler: decode of sequences that have a context of so many
tokens, and prompts of one sequence; greedy sampling; blocks of 16 tokens. A step's time is that of the call, host
work, launches and the copy of the sampled ids included. Its floor is the time of the linears (weights read once, or
their operations) and that of attention (keys and values, or its operations) one after the other.

A mixed step has a piece of a prompt beside sequences that decode.

A decode step is timed in three ways: alone, as a graph ("infinilm"); as a graph that is submitted while the step before
runs, as the engine's thread does ("ahead"); and alone, kernel by kernel ("eager", small batches).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from bench.gpu_measure import Bench, Limits, Reporter, arguments, measure, note, report_limits, those_of
from bench.gpu_peers import find_peers
from bench.synthetic import SHAPES, shape
from infinilm import _core
from infinilm.bench.limits import Spread
from infinilm.bench.work import OpWork, work_of
from infinilm.config.json.model_config import ModelConfig
from infinilm.config.spec import build_spec
from infinilm.errors import DeviceError, InfinilmError

BLOCK = 16
UNTIED = {"tie_word_embeddings": False}
MODELS: dict[str, dict[str, Any]] = {
    "Llama-3.2-1B": SHAPES["llama-1b"],
    "Qwen3-0.6B": SHAPES["qwen3-0.6b"],
    "Llama-3.1-8B": {
        **shape("llama", 4096, 32, (32, 8, 128), 14336, 128256, 131072, 5e5, **UNTIED),
        "rope_scaling": {**SHAPES["llama-1b"]["rope_scaling"], "factor": 8.0},
    },
    "Qwen3-8B": shape("qwen3", 4096, 36, (32, 8, 128), 12288, 151936, 40960, 1e6, **UNTIED),
    # With states; experts beside states; wide heads; experts and latents:
    "Qwen3.5-4B": {**SHAPES["qwen3-5"], "num_hidden_layers": 32, "vocab_size": 248320},
    "4 layers of a Qwen3.5 with experts": SHAPES["qwen3-5-moe"],
    "6 layers of a Gemma 4": SHAPES["gemma4"],
    "3 layers of DeepSeek-V2-Lite": SHAPES["deepseek-v2-lite"],
}
TINY = {
    "tiny": shape("qwen3", 64, 2, (4, 2, 16), 96, 136, 512, 1e4),
    "tiny states": {
        **SHAPES["qwen3-5"],
        **shape("qwen3_5_text", 32, 2, (2, 1, 16), 32, 136, 512, 1e7),
        **{"linear_num_key_heads": 1, "linear_num_value_heads": 2},
        "layer_types": ["linear_attention", "full_attention"],
    },
    "tiny wide heads": {
        **SHAPES["gemma4"],
        **shape("gemma4_text", 32, 2, (2, 1, 16), 32, 136, 512, None),
        "layer_types": ["sliding_attention", "full_attention"],
        "global_head_dim": 264,
        "num_global_key_value_heads": 1,
    },
    "tiny latents": {
        **SHAPES["deepseek-v2-lite"],
        **shape("deepseek_v2", 32, 2, (2, 2, 64), 32, 136, 512, 1e4),
        **{"kv_lora_rank": 512, "qk_nope_head_dim": 16, "v_head_dim": 16, "moe_intermediate_size": 16},
        "n_routed_experts": 8,
    },
}


@dataclass(frozen=True)
class Sizes:
    models: dict[str, dict[str, Any]] = field(default_factory=lambda: MODELS)
    quantised: tuple[tuple[str, str], ...] = (
        *(("Llama-3.1-8B", "int4"), ("Llama-3.1-8B", "int8"), ("Llama-3.1-8B", "fp8")),
        ("Llama-3.2-1B", "int4"),
    )
    batches: tuple[int, ...] = (1, 8, 64, 256)
    prompts: tuple[int, ...] = (512, 2048, 8192)
    mixed: tuple[int, int] = (63, 512)  # sequences that decode, and tokens of a prompt
    context: int = 1024
    rounds: int = 5
    steps: int = 8  # of a decode in a round
    eager: int = 8  # largest batch that is timed without graphs, too

    def cases(self) -> Iterator[tuple[str, Case]]:
        """By name, what is measured: what was not measured yet comes first, since time may run out."""
        yield from ((f"{name} {rounded}", Case(self.models[name], rounded)) for name, rounded in self.quantised)
        names = sorted(self.models, key=lambda name: name in MEASURED)
        yield from ((name, Case(self.models[name])) for name in names)


@dataclass(frozen=True)
class Case:
    config: dict[str, Any]
    quantization: str | None = None


MEASURED = ("Llama-3.2-1B", "Qwen3-0.6B", "Llama-3.1-8B", "Qwen3-8B")  # docs/measurements/gpu-benchmark.md
QUICK = Sizes(
    {name: MODELS[name] for name in ("Llama-3.2-1B", "Llama-3.1-8B")}, (), (1, 64), (2048,), rounds=3
)  # fmt: skip
SIMULATED = Sizes(TINY, (("tiny", "int8"),), (1, 3), (20,), mixed=(2, 9), context=36, rounds=1, steps=1)


def floor_of(spec: _core.ModelSpec, limits: Limits, sequences: int, new: int, context: int) -> float:
    """Milliseconds of a step of `new` tokens of each sequence, up to `context`; a number of the cache has 2 bytes."""
    return floor_of_parts(spec, limits, (sequences, new, context))


def floor_of_parts(spec: _core.ModelSpec, limits: Limits, *parts: tuple[int, int, int]) -> float:
    """The same of a step of several parts, each of so many sequences, new tokens and context."""
    work = work_of(spec, spec.dtype, spec.kv_bytes_per_token(spec.dtype))
    num_bytes = flops = 0
    others = 0.0
    for sequences, new, context in parts:
        ops = work.ops(sequences, new, context)
        attention, rule = ops.pop("attention"), ops.pop("states", OpWork(0, 0))
        linears = [op for name, op in ops.items() if name not in ("embedding", "sampling")]
        num_bytes = max(num_bytes, sum(op.num_bytes for op in linears))  # weights are read once for all
        flops += sum(op.flops for op in linears)
        others += limits.milliseconds(attention.num_bytes, attention.flops)
        others += limits.milliseconds(rule.num_bytes, 0, copies=True)  # states are read and written
    return limits.milliseconds(num_bytes, flops) + others


class Steps:
    """Batches for an engine whose cache has room for `most` sequences of `context` tokens."""

    def __init__(self, spec: _core.ModelSpec, context: int, most: int) -> None:
        self.vocab_size, self.context = spec.vocab_size, context
        self.num_states = 2 * most if spec.state_bytes() else 0
        self.rng = np.random.default_rng(0)
        per_sequence = -(-context // BLOCK)
        self.num_blocks = most * per_sequence
        # Blocks in an order of chance, as after a while of serving.
        self.table = self.rng.permutation(self.num_blocks).astype(np.int32).reshape(most, per_sequence)

    def batch(self, sequences: range, first: int, last: int) -> _core.Batch:
        """Tokens first .. last of each of the sequences; the last of each is sampled from."""
        return _core.Batch(**self._arrays(sequences, first, last))

    def mixed(self, decoding: int, chunk: int) -> _core.Batch:
        """The last token of so many sequences, and the first ones of the prompt of another."""
        some = self._arrays(range(decoding), self.context - 1, self.context)
        prompt = self._arrays(range(decoding, decoding + 1), 0, chunk)
        prompt["logits_rows"] += np.int32(decoding)
        prompt["cu_seqlens_q"] = prompt["cu_seqlens_q"][1:] + np.int32(decoding)
        return _core.Batch(**{name: np.concatenate([some[name], prompt[name]]) for name in some})

    def _arrays(self, sequences: range, first: int, last: int) -> dict[str, Any]:
        count, rows = last - first, len(sequences)
        table = np.ascontiguousarray(self.table[sequences.start : sequences.stop])
        positions = np.tile(np.arange(first, last, dtype=np.int32), rows)
        blocks = np.repeat(np.arange(rows), count)
        arrays = {
            "input_ids": self.rng.integers(0, self.vocab_size, rows * count).astype(np.int32),
            "positions": positions,
            "slot_mapping": table[blocks, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK,
            "block_table": table,
            "cu_seqlens_q": np.arange(rows + 1, dtype=np.int32) * np.int32(count),
            "context_lens": np.full(rows, last, np.int32),
            "logits_rows": np.arange(1, rows + 1, dtype=np.int32) * np.int32(count) - np.int32(1),
            "temperature": np.zeros(rows, np.float32),
            "top_k": np.zeros(rows, np.int32),
            "top_p": np.ones(rows, np.float32),
            "min_p": np.zeros(rows, np.float32),
            "random_val": np.zeros(rows, np.float32),
        }
        if self.num_states:  # a step leaves the state that it goes on from, so that it can be timed again
            state = np.arange(sequences.start, sequences.stop, dtype=np.int32)
            arrays["state_in"] = state if first else np.full(rows, -1, np.int32)
            arrays["state_out"] = state + np.int32(self.num_states // 2 if first else 0)
        return arrays

    def fill(self) -> Iterator[_core.Batch]:
        """Prompts that fill the cache up to the last token: keys and values that are read must not be zeros."""
        together = max(1, 8192 // self.context)
        for begin in range(0, len(self.table), together):
            yield self.batch(range(begin, min(begin + together, len(self.table))), 0, self.context - 1)


def seconds_of(engine: _core.InferEngine, batch: _core.Batch) -> float:
    started = time.perf_counter()
    engine.forward(batch)
    return time.perf_counter() - started


def seconds_ahead(engine: _core.InferEngine, batch: _core.Batch, count: int) -> float:
    """The time of one of `count` steps, each of which is submitted before the one in front of it is waited for."""
    started = time.perf_counter()
    pending = engine.submit(batch)
    for _ in range(count - 1):
        pending, before = engine.submit(batch), pending
        before.result()
    pending.result()
    return (time.perf_counter() - started) / count


def open_engine(case: Case, max_model_len: int, graphs: bool = True) -> _core.InferEngine:
    config = ModelConfig.from_dict(case.config)
    spec = build_spec(config, dtype="bfloat16", max_model_len=max_model_len, quantization=case.quantization)
    engine = _core.InferEngine(spec, "cuda", graphs=graphs)
    engine.load_dummy("bfloat16")
    engine.finish_loading()
    return engine


def cache_for(engine: _core.InferEngine, sizes: Sizes) -> tuple[Steps, tuple[int, ...]]:
    """A cache for the largest batch that fits, and the batches that do."""
    for i in range(len(sizes.batches), 0, -1):
        steps = Steps(engine.spec, sizes.context, sizes.batches[i - 1])
        try:
            engine.reset_cache(steps.num_blocks, BLOCK, num_states=steps.num_states)
        except InfinilmError:
            continue
        return steps, sizes.batches[:i]
    raise InfinilmError("not even the smallest batch fits")


Times = dict[int, list[float]]  # milliseconds, by batch


def time_decode(
    engine: _core.InferEngine, name: str, sizes: Sizes, reporter: Reporter, ahead: bool = True
) -> tuple[Times, Times]:
    """Steps alone, and submitted ahead unless told."""
    steps, batches = cache_for(engine, sizes)
    for size in sizes.batches[len(batches) :]:
        reporter.skip(f"decode: {name}, batch {size}", "not enough memory")
    for batch in steps.fill():
        if reporter.left <= 0:
            break
        engine.forward(batch)
    prepared = {size: steps.batch(range(size), sizes.context - 1, sizes.context) for size in batches}
    for batch in prepared.values():  # eagerly, then as a recording
        engine.forward(batch)
        engine.forward(batch)
    alone: Times = {size: [] for size in batches}
    queued: Times = {size: [] for size in batches}
    for _ in range(sizes.rounds):
        for size, batch in prepared.items():
            if reporter.left > 0 or not alone[size]:
                alone[size] += [1e3 * seconds_of(engine, batch) for _ in range(sizes.steps)]
                if ahead:
                    queued[size].append(1e3 * seconds_ahead(engine, batch, 2 * sizes.steps))
    return alone, queued


def time_eager(name: str, case: Case, sizes: Sizes, reporter: Reporter) -> Times:
    """Steps alone of an engine without graphs, for small batches."""
    small = replace(sizes, batches=tuple(size for size in sizes.batches if size <= sizes.eager))
    engine = open_engine(case, sizes.context, graphs=False)
    try:
        return time_decode(engine, name, small, reporter, ahead=False)[0]
    finally:
        engine.close()


def measure_decode(
    engine: _core.InferEngine, name: str, sizes: Sizes, limits: Limits, reporter: Reporter, eager: Times
) -> None:
    alone, ahead = time_decode(engine, name, sizes, reporter)
    for size in alone:
        floor = floor_of(engine.spec, limits, size, 1, sizes.context)
        times = {"infinilm": alone[size], "ahead": ahead[size], "eager": eager.get(size, [])}
        spreads = {what: Spread.of(values) for what, values in times.items() if values}
        reporter.emit(
            "row", group="decode", name=f"{name}, batch {size} at {sizes.context}", floor_ms=floor,
            ms=spreads, share={what: floor / spread.median for what, spread in spreads.items()},
        )  # fmt: skip


def measure_mixed(engine: _core.InferEngine, name: str, sizes: Sizes, limits: Limits, reporter: Reporter) -> None:
    """A piece of a prompt beside sequences that decode."""
    decoding, chunk = sizes.mixed
    if reporter.left <= 0:
        return reporter.skip(f"mixed: {name}")
    steps = Steps(engine.spec, sizes.context, decoding + 1)
    engine.reset_cache(steps.num_blocks, BLOCK, num_states=steps.num_states)
    for batch in steps.fill():
        engine.forward(batch)
    mixed = steps.mixed(decoding, chunk)
    engine.forward(mixed)
    floor = floor_of_parts(engine.spec, limits, (decoding, 1, sizes.context), (1, chunk, chunk))
    what = f"{name}, {decoding} at {sizes.context} and {chunk} tokens"
    reporter.row("mixed", what, floor, measure({"infinilm": lambda: 1e3 * seconds_of(engine, mixed)}, sizes.rounds))
    return None


def measure_prefill(engine: _core.InferEngine, name: str, sizes: Sizes, limits: Limits, reporter: Reporter) -> None:
    """Prompts of one sequence."""
    for length in sizes.prompts:
        if reporter.left <= 0:
            reporter.skip(f"prefill: {name}, {length} tokens")
            continue
        steps = Steps(engine.spec, length, 1)
        batch = steps.batch(range(1), 0, length)
        engine.reset_cache(steps.num_blocks, BLOCK, num_states=steps.num_states)
        engine.forward(batch)
        runs = {"infinilm": lambda b=batch: 1e3 * seconds_of(engine, b)}
        floor = floor_of(engine.spec, limits, 1, length, length)
        reporter.row("prefill", f"{name}, {length} tokens", floor, measure(runs, sizes.rounds))


def measure_model(name: str, case: Case, sizes: Sizes, limits: Limits, r: Reporter) -> None:
    longest = max(*sizes.prompts, sizes.context)
    eager = time_eager(name, case, sizes, r)
    started = time.perf_counter()
    engine = open_engine(case, longest)
    r.emit("fact", name=f"{name}: random weights made and packed", value=f"{time.perf_counter() - started:.1f} s")
    try:
        measure_decode(engine, name, sizes, limits, r, eager)
        measure_mixed(engine, name, sizes, limits, r)
        engine.reset_cache(1, BLOCK, num_states=1 if engine.spec.state_bytes() else 0)  # gives the memory back
        measure_prefill(engine, name, sizes, limits, r)
    finally:
        engine.close()


def main() -> None:
    args = arguments(__doc__)
    reporter = Reporter(args.seconds)
    bench = Bench(args.library, args.simulate)
    peers = None if args.simulate else find_peers(bench.flush_bytes)
    sizes = SIMULATED if args.simulate else QUICK if args.quick else Sizes()
    limits = report_limits(reporter, bench, peers, sizes.rounds)
    if peers:
        peers.release()
    for number, (name, case) in list(enumerate(those_of(sizes.cases(), args.only), 1))[args.after :]:
        if reporter.left <= 0:
            reporter.skip(f"steps of {name}")
            continue
        note(f"steps of {name}")
        try:
            measure_model(name, case, sizes, limits, reporter)
        except DeviceError as error:
            reporter.skip(f"steps of {name}", str(error))
            reporter.emit("lost", rows=number)  # gpu.py goes on behind it in a new process
            raise SystemExit(1) from error
        except InfinilmError as error:
            reporter.skip(f"steps of {name}", str(error))


if __name__ == "__main__":
    main()
