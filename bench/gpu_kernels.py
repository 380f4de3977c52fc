"""Measures kernels on the GPU, each as a share of its floor, beside torch and flashinfer. Run by gpu.py.

The floor of a row is the longer of: the fewest bytes it must move over the measured bandwidth (reading, or copying
where it writes as much as it reads), and its operations over the measured peak.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from bench.gpu_measure import (
    Bench,
    Limits,
    Reporter,
    Run,
    arguments,
    calls_for,
    measure,
    note,
    report_limits,
    those_of,
)
from bench.gpu_peers import Peers, Runs, find_peers

NATURAL, GATE_UP, ROPE_PAIRS = 0, 1, 2  # RowOrder
DECODE, PREFILL, SM90, SPLIT, CHOSEN = range(5)  # kernels of bench_linear
MAX_DECODE_TOKENS = 128  # what more are is called a prompt here
MAX_NORM_TOKENS = 16  # as in cuda/linear
FORMATS = {  # number as in cuda/linear, bytes of a weight
    **{"int8": (1, 1.0), "int4": (2, 0.5625), "fp8": (3, 1.0)},
    **{"int4_zeros": (4, 0.5625), "int8_groups": (5, 1.0625), "fp8_blocks": (6, 1.03125), "fp4": (7, 0.5625)},
    **{"q4_k": (8, 0.625), "q5_k": (9, 0.75), "q6_k": (10, 0.84375), "q2_k": (11, 0.375)},
    **{"q4_1": (12, 0.625), "q5_1": (13, 0.75), "nvfp4": (14, 0.5625), "q3_k": (15, 0.46875)},
}
MEASURED = ("int8", "int4", "fp8")  # with other kernels than now: see docs/measurements/gpu-benchmark.md


@dataclass(frozen=True)
class Heads:
    """Sizes of a layer's attention. value_dim: less than head_dim, the values are the ends of the keys."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int


@dataclass(frozen=True)
class Model:
    """Sizes of a decoder."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int

    def attention(self) -> Heads:
        return Heads(self.name, self.heads, self.kv_heads, self.head_dim, self.head_dim)

    def linears(self) -> dict[str, tuple[int, int, int, bool]]:
        """Features, columns, order, whether the norm is the prologue."""
        width = self.heads * self.head_dim
        return {
            "qkv": (width + 2 * self.kv_heads * self.head_dim, self.hidden, ROPE_PAIRS, True),
            "o": (self.hidden, width, NATURAL, False),
            "gate_up": (2 * self.inner, self.hidden, GATE_UP, True),
            "down": (self.hidden, self.inner, NATURAL, False),
            "lm_head": (self.vocab, self.hidden, NATURAL, True),
        }


LLAMA_8B = Model("Llama-3.1-8B", 4096, 32, 8, 128, 14336, 128256)
LLAMA_1B = Model("Llama-3.2-1B", 2048, 32, 8, 64, 8192, 128256)
TINY = Model("tiny", 64, 4, 2, 16, 96, 136)
WIDE = (
    Heads("Gemma 4, wide heads", 32, 4, 512, 512),
    Heads("GLM-4.7-Flash, latents", 20, 1, 576, 512),
    Heads("DeepSeek V3, latents", 128, 1, 576, 512),
)
TINY_WIDE = (Heads("tiny wide heads", 4, 2, 264, 264), Heads("tiny latents", 20, 1, 48, 32))


@dataclass(frozen=True)
class States:
    """Sizes of a layer with a delta rule."""

    name: str
    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int


DELTA = States("Qwen3.5-4B", 16, 32, 128, 128)
TINY_DELTA = States("tiny", 1, 2, 16, 16)


@dataclass(frozen=True)
class Experts:
    """Sizes of a layer of experts."""

    name: str
    hidden: int
    inner: int
    count: int
    top_k: int


EXPERTS = Experts("Qwen3-30B-A3B", 2048, 768, 128, 8)
TINY_EXPERTS = Experts("tiny", 64, 24, 3, 2)


@dataclass(frozen=True)
class Row:
    """One line: what must be moved and done, how our kernels are called (but for `calls`), and who else does it."""

    group: str
    name: str
    num_bytes: int
    flops: int
    ours: dict[str, tuple[str, tuple[float, ...]]]
    peers: Callable[[Peers, int], Runs] | None = None
    copies: bool = False


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    models: tuple[Model, ...] = (LLAMA_8B, LLAMA_1B)
    decode_tokens: tuple[int, ...] = (1, 8, 16, 64)
    prefill_tokens: tuple[int, ...] = (192, 512, 2048, 8192)
    quantised_tokens: tuple[int, ...] = (1, 8, 64, 192, 2048)
    batches: tuple[int, ...] = (1, 8, 64, 256)
    contexts: tuple[int, ...] = (1024, 8192)
    prefill_contexts: tuple[int, ...] = (2048, 8192)
    rows: tuple[int, ...] = (1, 64)
    wide: tuple[Heads, ...] = WIDE
    delta: States = DELTA
    experts: Experts = EXPERTS
    expert_tokens: tuple[int, ...] = (1, 64, 256, 512, 2048, 8192)


FULL = Sizes()
QUICK = Sizes((LLAMA_8B,), (1, 64), (2048,), (1, 64), (1, 64), (1024,), (2048,), (1, 64), expert_tokens=(64, 2048))
SIMULATED = Sizes(
    (TINY,), (1, 40), (130,), (33,), (1, 2), (40,), (24,), (2,), TINY_WIDE, TINY_DELTA, TINY_EXPERTS, (1, 70)
)


def linear_row(bench: Bench, model: Model, which: str, num_tokens: int) -> Row:
    n, k, order, norm = model.linears()[which]
    prefill = num_tokens > MAX_DECODE_TOKENS
    written = n // 2 if order == GATE_UP else n
    float32 = which == "lm_head"
    kernels = {"infinilm": CHOSEN}
    if prefill:
        kernels = {"infinilm": PREFILL, **({"sm90": SM90} if bench.has_sm90 else {})}
    tail = (order, model.head_dim, int(norm and num_tokens <= MAX_NORM_TOKENS), int(float32), bench.flush_bytes)
    return Row(
        group="prefill linear" if prefill else "decode linear",
        name=f"{model.name} {which}, {num_tokens} tokens",
        num_bytes=2 * n * k + num_tokens * (2 * k + written * (4 if float32 else 2)),
        flops=2 * n * k * num_tokens,
        ours={name: ("bench_linear", (kernel, 0, num_tokens, n, k, *tail)) for name, kernel in kernels.items()},
        peers=lambda p, calls: p.linear(num_tokens, n, k, calls),
    )


def quantised_row(bench: Bench, model: Model, which: str, weight_format: str, num_tokens: int) -> Row:
    """Without the norm. Its floor has the bytes of the format, and the operations of 16 bits."""
    n, k, order, _ = model.linears()[which]
    number, weight_bytes = FORMATS[weight_format]
    written = n // 2 if order == GATE_UP else n
    numbers = (CHOSEN, number, num_tokens, n, k, order, model.head_dim, 0, 0, bench.flush_bytes)
    return Row(
        group="quantised linear",
        name=f"{model.name} {which} {weight_format}, {num_tokens} tokens",
        num_bytes=int(weight_bytes * n * k) + 2 * num_tokens * (k + written),
        flops=2 * n * k * num_tokens,
        ours={"infinilm": ("bench_linear", numbers)},
    )


def attention_row(bench: Bench, of: Heads, num_seqs: int, queries: int, context: int) -> Row:
    heads = (of.heads, of.kv_heads, of.head_dim)
    pairs = num_seqs * queries * (2 * context - queries + 1) // 2  # of a query and a key it sees
    both = of.head_dim + of.value_dim  # columns of q and out
    own_values = of.value_dim == of.head_dim

    def peers(p: Peers, calls: int) -> Runs:
        return p.attention(num_seqs, queries, context, *heads, calls)

    return Row(
        group="prefill attention" if queries > 1 else "decode attention",
        name=f"{of.name}, {num_seqs} x {context}",
        num_bytes=2 * num_seqs * context * of.kv_heads * (both if own_values else of.head_dim)
        + 2 * num_seqs * queries * of.heads * both,
        flops=2 * pairs * of.heads * both,
        ours={
            name: ("bench_attention", (kernel, num_seqs, queries, context, *heads, of.value_dim, 16, bench.flush_bytes))
            for name, kernel in (
                ("infinilm", 0),
                *((("sm90", 1), ("in turns", 2)) if bench.has_sm90 and queries > 1 and of.head_dim <= 128 else ()),
            )
        },
        peers=peers if own_values else None,
    )


def delta_row(bench: Bench, of: States, num_seqs: int, queries: int) -> Row:
    """States are read and written once, whatever the tokens; each token reads a state, changes it and reads it."""
    tokens, values = num_seqs * queries, of.v_heads * of.v_dim
    return Row(
        group="delta rule",
        name=f"{of.name}, {num_seqs} x {queries}",
        num_bytes=2 * 4 * num_seqs * values * of.k_dim + 2 * tokens * (2 * of.k_heads * of.k_dim + 3 * values),
        flops=6 * tokens * values * of.k_dim,
        ours={
            "infinilm": (
                "bench_delta_rule",
                (num_seqs, queries, of.k_heads, of.v_heads, of.k_dim, of.v_dim, bench.flush_bytes),
            )
        },
        copies=True,
    )


def experts_row(bench: Bench, of: Experts, num_tokens: int, weight_format: str = "") -> Row:
    """All of the op but the router. Its floor reads the weights of the experts that any token goes to once."""
    number, weight_bytes = FORMATS.get(weight_format, (0, 2.0))
    numbers = 3 * of.hidden * of.inner  # of an expert
    reached = min(of.count, num_tokens * of.top_k)
    kernels = {"infinilm": 0, **({"sm90": 1} if bench.has_sm90 else {})}
    sizes = (number, num_tokens, of.count, of.top_k, of.hidden, of.inner, bench.flush_bytes)
    return Row(
        group="experts",
        name=" ".join(word for word in (of.name, weight_format) if word) + f", {num_tokens} tokens",
        num_bytes=int(weight_bytes * numbers * reached) + 4 * num_tokens * of.hidden,
        flops=2 * numbers * of.top_k * num_tokens,
        ours={name: ("bench_experts", (kernel, *sizes)) for name, kernel in kernels.items()},
    )


def small_rows(bench: Bench, model: Model, num_tokens: int) -> Iterator[Row]:
    """rms_norm, RoPE with the cache, the samplers and log-probabilities."""
    flush, hidden, vocab = bench.flush_bytes, model.hidden, model.vocab
    yield Row(
        "row-wise", f"rms_norm, {num_tokens} x {hidden}", 4 * num_tokens * hidden, 0,
        {"infinilm": ("bench_rms_norm", (num_tokens, hidden, flush))},
        lambda p, calls: p.rms_norm(num_tokens, hidden, calls), copies=True,
    )  # fmt: skip
    width = (model.heads + 2 * model.kv_heads) * model.head_dim
    yield Row(
        "row-wise", f"rope + store, {num_tokens} x {width}", num_tokens * (4 * width + 4 * model.head_dim), 0,
        {"infinilm": ("bench_rope_store", (num_tokens, model.heads, model.kv_heads, model.head_dim, 0, flush))},
        copies=True,
    )  # fmt: skip
    for name, temperature, top_k, top_p in (
        ("greedy", 0.0, 0, None), ("top_p 0.9", 1.0, 0, 0.9), ("top_k 50", 1.0, 50, None),
    ):  # fmt: skip

        def peers(p: Peers, calls: int, top_p: float | None = top_p) -> Runs:
            return p.sample(num_tokens, vocab, top_p, calls)

        yield Row(
            "sampling", f"{name}, {num_tokens} x {vocab}", 4 * num_tokens * vocab, 0,
            {"infinilm": ("bench_sample", (num_tokens, vocab, temperature, top_k, top_p or 1.0, flush))},
            None if top_k else peers,
        )  # fmt: skip
    listed = min(500, vocab)
    yield Row(
        "sampling", f"penalties, {num_tokens} x {listed} tokens", 20 * num_tokens * listed, 0,
        {"infinilm": ("bench_change_logits", (num_tokens, vocab, listed, flush))},
    )  # fmt: skip
    for best in (0, 20):
        yield Row(
            "sampling", f"log_probs, {num_tokens} x {vocab}, {best} of the best", 4 * num_tokens * vocab, 0,
            {"infinilm": ("bench_log_probs", (num_tokens, vocab, best, flush))},
        )  # fmt: skip
    part = vocab // 8  # of eight ranks
    for k in (1, 64):
        yield Row(
            "sampling", f"find_best, {num_tokens} x {part}, {k} of each", 4 * num_tokens * part, 0,
            {"infinilm": ("bench_find_best", (num_tokens, part, k, flush))},
        )  # fmt: skip


def quantised_rows(bench: Bench, sizes: Sizes, formats: Iterable[str]) -> Iterator[Row]:
    model = sizes.models[0]
    for weight_format in formats:
        for tokens in sizes.quantised_tokens:
            linears = [which for which in model.linears() if which != "lm_head"]
            yield from (quantised_row(bench, model, which, weight_format, tokens) for which in linears)


def all_rows(bench: Bench, sizes: Sizes) -> Iterator[Row]:
    """What was not measured yet comes first, and then what matters most: time may run out."""
    for weight_format in ("", "int4"):
        yield from (experts_row(bench, sizes.experts, tokens, weight_format) for tokens in sizes.expert_tokens)
    yield from quantised_rows(bench, sizes, [name for name in FORMATS if name not in MEASURED])
    for heads in sizes.wide:
        yield from (attention_row(bench, heads, 1, tokens, tokens) for tokens in sizes.prefill_contexts)
    yield from quantised_rows(bench, sizes, MEASURED)
    yield from measured_rows(bench, sizes)


def measured_rows(bench: Bench, sizes: Sizes) -> Iterator[Row]:
    """Rows of which figures of an earlier version are known."""
    for i, model in enumerate(sizes.models):
        for tokens in sizes.decode_tokens:
            yield from (linear_row(bench, model, which, tokens) for which in model.linears())
        for context in sizes.contexts if i == 0 else sizes.contexts[:1]:
            yield from (attention_row(bench, model.attention(), batch, 1, context) for batch in sizes.batches)
        for tokens in sizes.prefill_tokens:
            yield from (linear_row(bench, model, w, tokens) for w in model.linears() if w != "lm_head")
        yield from (attention_row(bench, model.attention(), 1, tokens, tokens) for tokens in sizes.prefill_contexts)
        if i == 0:
            for rows in sizes.rows:
                yield from small_rows(bench, model, rows)
    for heads in sizes.wide:
        for context in sizes.contexts:
            yield from (attention_row(bench, heads, batch, 1, context) for batch in sizes.batches)
    yield from (delta_row(bench, sizes.delta, batch, 1) for batch in sizes.batches)
    yield from (delta_row(bench, sizes.delta, 1, tokens) for tokens in sizes.prefill_contexts)


def measure_row(bench: Bench, peers: Peers | None, limits: Limits, row: Row, rounds: int, reporter: Reporter) -> bool:
    """Whether the device lives: after a fault nothing runs on it any more in this process."""
    floor = limits.milliseconds(row.num_bytes, row.flops, copies=row.copies)
    calls = calls_for(floor, bench.simulate)
    runs: dict[str, Run] = {}
    for name, (function, numbers) in row.ours.items():
        runs[name] = partial(bench.run, function, *numbers, calls)
    if peers and row.peers:
        runs |= row.peers(peers, calls)
    measured = measure(runs, rounds)
    reporter.row(row.group, row.name, floor, measured)
    runs.clear()
    try:
        if measured.errors:
            bench.run("bench_read", 1 << 16, 1)
        if peers:
            peers.release()
    except RuntimeError as error:
        reporter.skip(f"{row.group}: {row.name}, the device after it", str(error))
        return False
    return True


def compare_bits(bench: Bench, reporter: Reporter) -> None:
    """Whether prompts may take wgmma and still be the same, bit for bit; and whether few tokens and many are."""
    shapes = [(100, 136, 80), (200, 144, 520)] if bench.simulate else [(300, 4096, 4096), (512, 1024, 14336)]
    unequal = sum(bench.unequal(DECODE, PREFILL, 64, n, k) for _, n, k in shapes)
    reporter.emit("fact", name="linear_decode equals linear_prefill bit for bit", value="no" if unequal else "yes")
    if not bench.has_sm90:
        return reporter.skip("wgmma equals mma.sync bit for bit", "no Hopper GPU")
    counts = [bench.unequal(PREFILL, kernel, *shape) for kernel in (SM90, SPLIT) for shape in shapes]
    answer = "yes" if not any(counts) else f"no: {sum(counts)} of {2 * sum(t * n for t, n, _ in shapes)} outputs differ"
    reporter.emit("fact", name="wgmma equals mma.sync bit for bit", value=answer)
    count = sum(
        bench.unequal_attention(c, 8, 2, dim) for c in ((60,) if bench.simulate else (300, 1100)) for dim in (64, 128)
    )
    answer = f"no: {count} outputs differ" if count else "yes"
    reporter.emit("fact", name="attention of prompts by wgmma equals mma.sync bit for bit", value=answer)
    return None


def main() -> None:
    args = arguments(__doc__)
    reporter = Reporter(args.seconds)
    bench = Bench(args.library, args.simulate)
    peers = None if args.simulate else find_peers(bench.flush_bytes)
    rounds = 1 if args.simulate else 3 if args.quick else 5
    if peers:
        reporter.emit("fact", name="peers", value=peers.version)
    else:
        reporter.skip("torch and flashinfer", "simulated" if args.simulate else "no torch that sees the GPU")
    try:
        if args.after == 0:
            compare_bits(bench, reporter)
    except RuntimeError as error:
        reporter.skip("bits of the linears", str(error))
    limits = report_limits(reporter, bench, peers, rounds)
    rows = all_rows(bench, SIMULATED if args.simulate else QUICK if args.quick else FULL)
    chosen = [row for _, row in those_of(((f"{row.group}: {row.name}", row) for row in rows), args.only)]
    for number, row in list(enumerate(chosen, 1))[args.after :]:
        if reporter.left <= 0:
            reporter.skip(f"{row.group}: {row.name}")
            continue
        note(f"{row.group}: {row.name}")
        if not measure_row(bench, peers, limits, row, rounds, reporter):
            reporter.emit("lost", rows=number)  # gpu.py goes on behind it in a new process
            raise SystemExit(1)
    reporter.emit("fact", name="limits after the last row", value=limits_text(bench.limits(peers, rounds)[0]))


def limits_text(limits: Limits) -> str:
    return f"read {limits.read / 1e9:.0f} GB/s, copy {limits.copy / 1e9:.0f} GB/s, {limits.flops / 1e12:.1f} Tflop/s"


if __name__ == "__main__":
    main()
