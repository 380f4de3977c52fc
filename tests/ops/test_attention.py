"""paged_attention: against the oracle, and bit for bit however the work is cut, laid out or shared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from covering import covering
from hypothesis import assume, given, strategies as st
from reference import ops as oracle
from reference.ops import FLOATING, Array, load, store_int8

from ops import support
from ops.support import (
    Output,
    assert_bitwise,
    assert_close,
    backend,
    call,
    each_isa,
    framed,
)

CACHE_DTYPES = (*FLOATING, "int8")
each_cache_dtype = pytest.mark.parametrize("dtype", CACHE_DTYPES)
every_backend = pytest.mark.parametrize(
    ("isa", "dtype", "threads"), covering(support.ISAS, CACHE_DTYPES, support.THREADS)
)  # with every dtype of the cache, and any two of the three

HEADS = ((1, 1), (4, 4), (2, 1), (8, 1), (8, 2), (6, 2), (7, 1), (15, 5), (11, 1), (18, 1))  # MHA, MQA, GQA
HEAD_DIMS = (2, 6, 7, 16, 30, 64, 80, 96, 112, 128, 192, 256)
Chunk = tuple[int, int, int]  # sequence, first query, past the last query


@dataclass(frozen=True)
class Case:
    """Sequences as (context, queries): the queries are the last of the context's positions."""

    heads: tuple[int, int]  # num_heads, num_kv_heads
    head_dim: int
    sequences: tuple[tuple[int, int], ...]
    sliding_window: int
    seed: int
    pad: tuple[int, int] = (0, 0)
    score_cap: float = 0
    sinks: bool = False
    two_way: bool = False
    position_bias: bool = False
    two_way_seqs: tuple[bool, ...] = ()  # of each sequence

    @property
    def softmax_scale(self) -> float:
        return float(np.float32(self.head_dim**-0.5))


class Values:
    """q per sequence [queries, num_heads, head_dim]; k and v per sequence, stored, [context, num_kv_heads,
    head_dim], and where they are int8 their scales [context, num_kv_heads].
    """

    def __init__(self, case: Case, dtype: str) -> None:
        rng = np.random.default_rng(case.seed)
        heads, kv_heads = case.heads
        self.case, self.dtype = case, dtype
        # Some far below the scores, some far above.
        self.sinks = (rng.standard_normal(heads) * 8).astype(np.float32) if case.sinks else None
        longest = max(c for c, _ in case.sequences) + case.seed % 3
        bias = rng.standard_normal((heads, 2 * longest - 1)) * 4
        self.position_bias = bias.astype(np.float32) if case.position_bias else None
        self.q = [support.activations(rng, n, heads, case.head_dim) for _, n in case.sequences]
        kept = "float32" if dtype == "int8" else dtype
        self.k = [support.stored(rng, kept, c, kv_heads, case.head_dim) for c, _ in case.sequences]
        self.v = [support.stored(rng, kept, c, kv_heads, case.head_dim) for c, _ in case.sequences]
        self.k_scales: list[Array] = []
        self.v_scales: list[Array] = []
        if dtype == "int8":
            self.k, self.k_scales = map(list, zip(*map(store_int8, self.k), strict=True))
            self.v, self.v_scales = map(list, zip(*map(store_int8, self.v), strict=True))

    def exact(self, name: str) -> list[Array]:
        """k or v in float64."""
        rows: list[Array] = getattr(self, name)
        scales = getattr(self, f"{name}_scales") or [np.ones(r.shape[:2]) for r in rows]
        return [load(r, self.dtype) * s[..., None] for r, s in zip(rows, scales, strict=True)]

    def expected(self) -> tuple[Array, Array]:
        """out and magnitude of all queries, in float64."""
        results = [
            oracle.attention(
                q.astype(np.float64), k, v, self.case.softmax_scale, self.case.sliding_window,
                self.case.score_cap,
                None if self.sinks is None else self.sinks.astype(np.float64),
                two_way=self.case.two_way,
                position_bias=None if self.position_bias is None else self.position_bias.astype(np.float64),
                sees_end=bool(self.case.two_way_seqs) and self.case.two_way_seqs[s],
            )
            for s, (q, k, v) in enumerate(zip(self.q, self.exact("k"), self.exact("v"), strict=True))
            if len(q)
        ]  # fmt: skip
        return np.concatenate([r[0] for r in results]), np.concatenate([r[1] for r in results])

    def whole(self) -> list[Chunk]:
        return [(s, 0, n) for s, (_, n) in enumerate(self.case.sequences)]


class Layout:
    """Caches that hold the values in shuffled blocks of `block_size`, every other slot NaN; unused table
    entries -1.

    block_size 0: the static layout, one block per sequence, as long as the longest context and then some.
    """

    def __init__(self, values: Values, block_size: int, seed: int, upto: list[int] | None = None) -> None:
        rng = np.random.default_rng(seed)
        contexts = [c for c, _ in values.case.sequences]
        if block_size == 0:
            self.block_size = max(contexts) + int(rng.integers(0, 4))
        else:
            self.block_size = block_size
        needed = [-(-c // self.block_size) for c in contexts]
        num_blocks = sum(needed) + int(rng.integers(0, 3))
        order = rng.permutation(num_blocks)
        width = max(needed) + int(rng.integers(0, 3))
        self.table = np.full((len(contexts), width), -1, np.int32)
        _, kv_heads = values.case.heads
        shape = (num_blocks, kv_heads, self.block_size, values.case.head_dim)
        kind = values.k[0].dtype
        frames = [framed(np.full((1, int(np.prod(shape))), support.poison(kind), kind), (2, 3)) for _ in "kv"]
        self.caches = [f.reshape(shape) for f in frames]
        self.scales = [np.full(shape[:3], np.nan, np.float32) for _ in values.k_scales and "kv"]
        taken = 0
        for s, context in enumerate(contexts):
            blocks = order[taken : taken + needed[s]]
            taken += needed[s]
            self.table[s, : needed[s]] = blocks
            filled = context if upto is None else upto[s]
            positions = np.arange(filled)
            place = blocks[positions // self.block_size], slice(None), positions % self.block_size
            for cache, rows in zip(self.caches, (values.k[s], values.v[s]), strict=True):
                cache[place] = rows[:filled]
            for scales, of_rows in zip(self.scales, (values.k_scales, values.v_scales), strict=False):
                scales[place] = of_rows[s][:filled]


def attend(
    b: Any,
    values: Values,
    layout: Layout,
    chunks: list[Chunk],
    pad: tuple[int, int] = (0, 0),
    value_dim: int | None = None,
) -> list[Array]:
    """One call over `chunks`; q lies in a wider row, as in qkv. Returns out per chunk.

    `value_dim`: values are so many elements at the beginnings of their rows; None: all.
    """
    case = values.case
    heads, _ = case.heads
    lengths = [end - begin for _, begin, end in chunks]
    edges = np.concatenate([[0], np.cumsum(lengths)])
    q = np.concatenate([values.q[s][begin:end] for s, begin, end in chunks])
    ends = [case.sequences[s][0] - case.sequences[s][1] + end for s, _, end in chunks]
    table = framed(layout.table[[s for s, _, _ in chunks]], pad)
    out = Output((len(q), heads, value_dim or case.head_dim), pad=pad)
    lengths_and_edges = framed(edges.astype(np.int32)), framed(np.array(ends, np.int32))
    caches = [(cache, values.dtype) for cache in layout.caches]
    scalars = case.softmax_scale, case.sliding_window
    call(
        b,
        "paged_attention",
        framed(q, pad[::-1]),
        *caches,
        table,
        *lengths_and_edges,
        out,
        *scalars,
        *(layout.scales or (None, None)),
        case.score_cap,
        None if values.sinks is None else framed(values.sinks),
        case.two_way,
        None if values.position_bias is None else framed(values.position_bias),
        framed(np.array([case.two_way_seqs[s] for s, _, _ in chunks], np.int32)) if case.two_way_seqs else None,
    )
    return np.split(out.check(), edges[1:-1])


def steps(b: Any, values: Values, layout: Layout, plan: list[list[Chunk]]) -> Array:
    """Several calls; the results put in the order of the sequences' queries."""
    parts = [np.full_like(q, np.nan) for q in values.q]
    for chunks in plan:
        for (s, begin, end), got in zip(chunks, attend(b, values, layout, chunks), strict=True):
            parts[s][begin:end] = got
    return np.concatenate(parts)


# Kernels take keys in chunks whose size is a power of two: contexts on both sides of such a boundary.
LONG = (1, 7, 31, 128, 255, 256, 257, 500, 513, 989)


def sequences(
    lengths: tuple[int, ...] = support.SIZES, longest: int = 500, most_queries: int = 64, most: int = 5
) -> Any:
    """Lists of (context, queries): decodes, whole prompts, chunks of prompts, and now and then no query at
    all.
    """
    contexts = st.sampled_from([n for n in lengths if n <= longest])

    def build(drawn: list[tuple[int, int, int]]) -> tuple[tuple[int, int], ...]:
        out = []
        for context, queries, kind in drawn:
            count = (1, min(context, most_queries), min(context, queries), min(context, queries), 0)[kind]
            out.append((context, count))
        return tuple(out)

    queries = st.sampled_from([n for n in support.SIZES if n <= most_queries])
    return st.lists(st.tuples(contexts, queries, st.integers(0, 4)), min_size=1, max_size=most).map(build)


def cases(**limits: Any) -> Any:
    return st.builds(
        Case,
        st.sampled_from(HEADS),
        st.sampled_from(HEAD_DIMS),
        sequences(**limits),
        st.sampled_from((0, 0, 1, 2, 7, 16, 33, 128)),
        support.seeds,
        support.pads,
        st.sampled_from((0.0, 0.0, 0.5, 50.0)),
        st.booleans(),
        position_bias=st.booleans(),
    )


block_sizes = st.sampled_from((0, 1, 2, 3, 7, 8, 16, 19, 31, 32))


@every_backend
@given(case=cases(), block_size=block_sizes)
def test_matches_the_oracle(isa: str, dtype: str, threads: int, case: Case, block_size: int) -> None:
    """Prefill, chunked prefill and decode in one call, any head layout, windows, odd strides; NaN in
    what is not read.
    """
    assume(any(n for _, n in case.sequences))
    values = Values(case, dtype)
    layout = Layout(values, block_size, case.seed)
    got = np.concatenate(attend(backend(isa, threads), values, layout, values.whole(), case.pad))
    want, magnitude = values.expected()
    longest = max(c for c, _ in case.sequences)
    assert_close(got, want, length=case.head_dim + longest, scale=magnitude)


@each_isa
@each_cache_dtype
@given(case=cases(), block_size=block_sizes, part=st.floats(0, 1), threads=st.sampled_from(support.THREADS))
def test_values_that_are_shorter_than_keys(
    isa: str, dtype: str, case: Case, block_size: int, part: float, threads: int
) -> None:
    """They fill the beginnings of their rows, of which the ends are NaN; a token alone has the same bits."""
    assume(any(n for _, n in case.sequences))
    value_dim, values = 1 + int(part * (case.head_dim - 1)), Values(case, dtype)
    want, magnitude = (each[..., :value_dim] for each in values.expected())
    for rows in values.v:
        rows[..., value_dim:] = support.poison(rows.dtype)
    layout, whole = Layout(values, block_size, case.seed), values.whole()
    parts = attend(backend(isa, threads), values, layout, whole, case.pad, value_dim)
    longest = max(c for c, _ in case.sequences)
    assert_close(np.concatenate(parts), want, length=case.head_dim + longest, scale=magnitude)
    for (seq, _, end), got in zip(whole, parts, strict=True):
        if end:
            alone = attend(backend(isa, 1), values, layout, [(seq, end - 1, end)], value_dim=value_dim)[0]
            assert_bitwise(alone, got[-1:])


@each_isa
@each_cache_dtype
@given(
    case=cases(lengths=LONG, longest=989, most_queries=64, most=3),
    block_size=block_sizes,
    cuts=st.lists(st.floats(0, 1), min_size=1, max_size=4),
)
def test_cutting_the_work_changes_nothing(isa: str, dtype: str, case: Case, block_size: int, cuts: list[float]) -> None:
    """Whole = alone = in chunks = token by token = shuffled order = any layout = any number of threads, bit
    for bit.
    """
    assume(any(n for _, n in case.sequences))
    values = Values(case, dtype)
    one, two, three = (backend(isa, threads) for threads in support.THREADS)
    layout = Layout(values, block_size, case.seed)
    whole = values.whole()
    want = np.concatenate(attend(one, values, layout, whole))

    alone = [[chunk] for chunk in whole]
    assert_bitwise(steps(two, values, layout, alone), want, "each sequence alone")
    backwards = steps(three, values, layout, [whole[::-1]])
    assert_bitwise(backwards, want, "sequences in reverse order")

    edges = [sorted({0, n, *(round(c * n) for c in cuts)}) for _, n in case.sequences]
    chunked = [
        [(s, e[i], e[i + 1]) for s, e in enumerate(edges) if i + 1 < len(e)] for i in range(max(map(len, edges)) - 1)
    ]
    assert_bitwise(steps(two, values, layout, chunked), want, f"chunks cut at {edges}")
    single = [
        [(s, i, i + 1) for s, (_, n) in enumerate(case.sequences) if i < n]
        for i in range(max(n for _, n in case.sequences))
    ]
    assert_bitwise(steps(one, values, layout, single), want, "one token at a time")

    for other in (0, 1, 32) if block_size else (5, 16, 31):
        moved = Layout(values, other, case.seed + 1)
        got = np.concatenate(attend(three, values, moved, whole))
        assert_bitwise(got, want, f"block_size {moved.block_size} instead of {layout.block_size}")


@each_isa
@each_cache_dtype
@given(case=cases(longest=128, most=2), block_size=block_sizes)
def test_keys_of_the_future_are_not_read(isa: str, dtype: str, case: Case, block_size: int) -> None:
    """A chunk gives the same bits whether the slots after it are still NaN or already filled."""
    assume(any(n for _, n in case.sequences))
    values = Values(case, dtype)
    b = backend(isa, 2)
    halves = [(s, 0, -(-n // 2)) for s, (_, n) in enumerate(case.sequences)]
    seen = [c - n + -(-n // 2) for c, n in case.sequences]
    full, partial = Layout(values, block_size, case.seed), Layout(values, block_size, case.seed, upto=seen)
    for got, want in zip(attend(b, values, partial, halves), attend(b, values, full, halves), strict=True):
        assert np.isfinite(got).all()
        assert_bitwise(got, want)


@each_isa
@each_cache_dtype
@given(
    heads=st.sampled_from(HEADS),
    head_dim=st.sampled_from(HEAD_DIMS),
    context=st.sampled_from((33, 111, 500, 989)),
    window=st.sampled_from((1, 2, 7, 16, 31, 111, 256)),
    queries=st.sampled_from((1, 8, 19)),
    seed=support.seeds,
)
def test_keys_outside_the_window_are_not_read(
    isa: str,
    dtype: str,
    heads: tuple[int, int],
    head_dim: int,
    context: int,
    window: int,
    queries: int,
    seed: int,
) -> None:
    """NaN in the slots that no window reaches; a window as long as the context changes nothing, bit for
    bit.
    """
    case = Case(heads, head_dim, ((context, queries),), window, seed)
    values = Values(case, dtype)
    want, magnitude = values.expected()
    first = max(0, context - queries - window + 1)
    for rows in (*values.k, *values.v, *values.k_scales, *values.v_scales):
        rows[:first] = support.poison(rows.dtype)
    b = backend(isa, 2)
    got = np.concatenate(attend(b, values, Layout(values, 16, seed), values.whole()))
    assert_close(got, want, length=head_dim + min(window, context), scale=magnitude)

    results = []
    for size in (0, context, context + 1, 2**31 - 1):
        all_seen = Values(Case(heads, head_dim, ((context, queries),), size, seed), dtype)
        results.append(np.concatenate(attend(b, all_seen, Layout(all_seen, 16, seed), all_seen.whole())))
    for size, got in zip((context, context + 1, 2**31 - 1), results[1:], strict=True):
        assert_bitwise(got, results[0], f"sliding_window {size} over {context} positions")


@each_isa
@each_cache_dtype
def test_large_scores(isa: str, dtype: str) -> None:
    """Scores of +-1000 neither overflow nor underflow: the softmax is taken against the running maximum."""
    case = Case((2, 1), 64, ((500, 7),), 0, 11)
    values = Values(case, dtype)
    values.q[0] *= np.float32(400)
    b = backend(isa, 2)
    got = np.concatenate(attend(b, values, Layout(values, 16, 1), values.whole()))
    want, magnitude = values.expected()
    # Where int8 has a zero in the row that counts, nothing is left but weights that float32 may not hold.
    assert_close(got, want, length=64 + 500, scale=np.maximum(magnitude, 1e-30))


@each_isa
@each_cache_dtype
def test_many_sequences(isa: str, dtype: str) -> None:
    """70 decodes of different lengths in one call, against each alone: what a continuous batch is made of."""
    lengths = tuple((int(n), 1) for n in np.random.default_rng(7).integers(1, 300, 70))
    values = Values(Case((4, 2), 64, lengths, 0, 12), dtype)
    layout = Layout(values, 16, 3)
    want = steps(backend(isa, 1), values, layout, [[chunk] for chunk in values.whole()])
    for threads in support.THREADS:
        got = np.concatenate(attend(backend(isa, threads), values, layout, values.whole()))
        assert_bitwise(got, want, f"{threads} threads")


@each_isa
@each_cache_dtype
def test_more_work_than_is_worth_splitting(isa: str, dtype: str) -> None:
    """64 queries of 64 heads over nine chunks of keys, whole and one by one: kernels may cut these
    differently.
    """
    values = Values(Case((64, 2), 8, ((2304, 64),), 0, 13), dtype)
    layout = Layout(values, 16, 2)
    want = np.concatenate(attend(backend(isa, 2), values, layout, values.whole()))
    for step in (1, 31):
        plan = [[(0, i, min(i + step, 64))] for i in range(0, 64, step)]
        assert_bitwise(steps(backend(isa, 2), values, layout, plan), want, f"{step} queries at a time")


@each_isa
def test_nothing_to_do(isa: str) -> None:
    """No tokens, or sequences without queries: nothing is written."""
    values = Values(Case((4, 2), 16, ((7, 0), (3, 0)), 0, 1), "float32")
    layout = Layout(values, 4, 1)
    assert np.concatenate(attend(backend(isa, 2), values, layout, values.whole())).size == 0
