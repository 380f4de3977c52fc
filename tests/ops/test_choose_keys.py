"""choose_keys: which of the keys that it sees a token reads, against float64 scores and an exact choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from reference.ops import Array, index_scores, load, store, store_int8

from infinilm.errors import InfinilmError
from ops import support
from ops.support import Output, backend, call, each_isa, framed, tensor
from ops.test_attention import each_cache_dtype, sequences

Lengths = tuple[tuple[int, int], ...]


@dataclass
class Keys:
    """The sequences of a step: keys in shuffled blocks, queries and weights of the last tokens of each."""

    lengths: Lengths  # (context, queries)
    heads: tuple[int, int]
    block_size: int
    dtype: str
    seed: int
    whole: bool = False  # integers, so that many scores are equal and all are exact

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        num_heads, head_dim = self.heads

        def numbers(*shape: int) -> Array:
            if self.whole:
                return rng.integers(-2, 3, shape).astype(np.float32)
            return support.activations(rng, *shape)

        columns = max(1, *(-(-context // self.block_size) for context, _ in self.lengths))
        num_blocks = len(self.lengths) * columns + 1
        self.table = rng.permutation(num_blocks - 1).astype(np.int32).reshape(-1, columns) + 1
        values = numbers(num_blocks, 1, self.block_size, head_dim)
        self.scales: Array | None = None
        if self.dtype == "int8":
            self.cache, self.scales = store_int8(values)
            self.keys = self.cache.astype(np.float64) * self.scales[..., None]
        else:
            self.cache = store(values, self.dtype)
            self.keys = load(self.cache, self.dtype)
        self.edges = np.array([0, *np.cumsum([n for _, n in self.lengths])], np.int32)
        self.contexts = np.array([context for context, _ in self.lengths], np.int32)
        self.q = numbers(int(self.edges[-1]), num_heads, head_dim)
        self.weights = numbers(int(self.edges[-1]), num_heads)

    def slots(self, seq: int, count: int) -> Array:
        """Where the first keys of a sequence lie."""
        keys = np.arange(count)
        return self.table[seq, keys // self.block_size] * self.block_size + keys % self.block_size

    def choose(self, b: Any, top_k: int, tokens: slice = slice(None)) -> Array:
        """Run the op for all tokens, or for some of the only sequence: [num_tokens, top_k]."""
        q, edges, contexts = self.q[tokens], self.edges, self.contexts
        if tokens != slice(None):
            edges = np.array([0, len(q)], np.int32)
            contexts = contexts - (len(self.q) - tokens.stop)
        out = Output((len(q), top_k), dtype=np.int32)
        arguments = framed(q), framed(self.weights[tokens]), (self.cache, self.dtype)
        call(b, "choose_keys", *arguments, framed(self.table), framed(edges), framed(contexts), out, self.scales)
        return out.check()


block_sizes = st.sampled_from((1, 5, 16, 40))
head_shapes = st.sampled_from(((1, 1), (3, 8), (5, 12), (8, 16), (7, 33), (64, 128)))


@each_isa
@each_cache_dtype
@given(
    lengths=sequences(longest=700, most_queries=19, most=3),
    heads=head_shapes,
    block_size=block_sizes,
    top_k=st.sampled_from((1, 2, 7, 64, 300)),
    threads=st.sampled_from(support.THREADS),
    seed=support.seeds,
)
def test_the_best_are_chosen(
    isa: str,
    dtype: str,
    lengths: Lengths,
    heads: tuple[int, int],
    block_size: int,
    top_k: int,
    threads: int,
    seed: int,
) -> None:
    """No key that is left out is better than a chosen one by more than rounding; order is that of the keys."""
    case = Keys(lengths, heads, block_size, dtype, seed)
    if not case.edges[-1]:
        return
    got = case.choose(backend(isa, threads), top_k)
    for seq, (context, num_queries) in enumerate(lengths):
        keys = case.keys.reshape(-1, heads[1])
        for query in range(num_queries):
            token, sees = case.edges[seq] + query, context - num_queries + query + 1
            slots = case.slots(seq, sees)
            chosen = np.isin(slots, got[token, : min(sees, top_k)])
            np.testing.assert_array_equal(got[token, : min(sees, top_k)], slots[chosen])
            if sees <= top_k:
                continue
            own = slice(token, token + 1)
            q, weights = case.q[own].astype(np.float64), case.weights[own].astype(np.float64)
            scores = index_scores(q, weights, keys[slots])[0]
            sizes = index_scores(np.abs(q), np.abs(weights), np.abs(keys[slots]))[0]
            error = support.tolerance("float32", heads[0] * heads[1]) * sizes.max()
            assert scores[chosen].min() >= scores[~chosen].max() - 2 * error


@each_isa
@given(
    context=st.integers(1, 600),
    heads=head_shapes,
    top_k=st.sampled_from((1, 3, 16, 200)),
    seed=support.seeds,
)
def test_of_equals_the_earlier_ones(isa: str, context: int, heads: tuple[int, int], top_k: int, seed: int) -> None:
    """Scores of small integers are exact, and many are equal."""
    case = Keys(((context, 1),), heads, 16, "float32", seed, whole=True)
    got = case.choose(backend(isa, 2), top_k)[0, : min(context, top_k)]
    slots = case.slots(0, context)
    keys = case.keys.reshape(-1, heads[1])[slots]
    scores = index_scores(case.q.astype(np.float64), case.weights.astype(np.float64), keys)[0]
    best = np.sort(np.argsort(-scores, kind="stable")[:top_k])
    np.testing.assert_array_equal(got, slots[best])


@each_isa
@each_cache_dtype
@given(context=st.integers(2, 600), cut=st.floats(0, 1), heads=head_shapes, block_size=block_sizes, seed=support.seeds)
def test_a_choice_is_the_same_in_any_cut(
    isa: str, dtype: str, context: int, cut: float, heads: tuple[int, int], block_size: int, seed: int
) -> None:
    """A prompt in two pieces, whose tokens choose among the same keys."""
    case, top_k = Keys(((context, context),), heads, block_size, dtype, seed), 9
    whole = case.choose(backend(isa, 3), top_k)
    at = 1 + int(cut * (context - 2))
    has_chosen = np.arange(top_k) <= np.arange(context)[:, None]  # [tokens, top_k]: the first tokens have few keys
    for tokens in (slice(0, at), slice(at, context)):
        part = case.choose(backend(isa, 1), top_k, tokens)
        np.testing.assert_array_equal(part[has_chosen[tokens]], whole[tokens][has_chosen[tokens]])


@each_isa
@each_cache_dtype
@given(
    context=st.integers(1, 600),
    head_dim=st.sampled_from((1, 8, 33)),
    run_keys=st.sampled_from((1, 4, 16)),
    runs=st.integers(1, 5),
    last_runs=st.integers(1, 5),
    head=st.integers(0, 2),
    seed=support.seeds,
)
def test_runs_of_keys(
    isa: str, dtype: str, context: int, head_dim: int, run_keys: int, runs: int, last_runs: int, head: int, seed: int
) -> None:
    """The runs with the best keys, of equals the earlier ones, and always the last; in a cache of three heads."""
    case, last_runs = Keys(((context, 1),), (1, head_dim), 16, dtype, seed, whole=True), min(last_runs, runs)
    top_k = runs * run_keys
    out = Output((1, top_k), dtype=np.int32)
    arguments = framed(case.q), None, (case.cache, dtype), framed(case.table), framed(case.edges)
    call(
        backend(isa, 2),
        "choose_keys",
        *arguments,
        framed(case.contexts),
        out,
        case.scales,
        run_keys,
        last_runs,
        3,
        head,
    )
    keys = case.keys.reshape(-1, head_dim)[case.slots(0, context)].astype(np.float32)
    scores = keys @ case.q[0, 0]
    best = [scores[first : first + run_keys].max() for first in range(0, context, run_keys)]
    best[-last_runs:] = [np.inf] * len(best[-last_runs:])
    order = np.argsort(-np.array(best), kind="stable")[:runs]
    chosen = np.flatnonzero(np.isin(np.arange(context) // run_keys, order))
    blocks = case.table[0, chosen // 16] * 3 + head
    np.testing.assert_array_equal(out.check()[0, : len(chosen)], blocks * 16 + chosen % 16)


def test_bad_input() -> None:
    b = backend(support.ISAS[0])
    case = Keys(((5, 2),), (2, 4), 4, "float32", 0)
    good = {
        "q": case.q,
        "weights": case.weights,
        "k_cache": case.cache,
        "block_table": case.table,
        "cu_seqlens_q": case.edges,
        "context_lens": case.contexts,
        "slots": np.zeros((2, 3), np.int32),
    }
    bad = {
        "q": (np.zeros((2, 2, 5), np.float32), "k_cache: .*5"),
        "weights": (np.zeros((2, 3), np.float32), "weights: .*2.*3"),
        "k_cache": (np.zeros((9, 2, 4, 4), np.float32), "k_cache: .*1.*2"),
        "block_table": (case.table + 100, "block_table"),
        "context_lens": (np.array([1], np.int32), "context_lens"),
        "slots": (np.zeros((2, 0), np.int32), "slots: expected at least one key of a token"),
    }
    for name, (array, message) in bad.items():
        arguments = {key: tensor(value) for key, value in {**good, name: array}.items()}
        with pytest.raises(InfinilmError, match=message):
            b.choose_keys(**arguments)
    b.choose_keys(**{key: tensor(value) for key, value in good.items()})
    with pytest.raises(InfinilmError, match="k_scales: an int8 or fp8 cache has scales"):
        b.choose_keys(
            **{key: tensor(value) for key, value in good.items()}, k_scales=tensor(np.zeros((9, 1, 4), np.float32))
        )
