"""paged_attention in both directions, as encoders have it, and tokens of an image in models of texts: against the
oracle, and bit for bit in any company.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from covering import covering
from hypothesis import example, given, strategies as st
from reference.ops import load, store

from ops import support
from ops.support import assert_bitwise, assert_close, backend, each_isa
from ops.test_attention import CACHE_DTYPES, HEAD_DIMS, HEADS, LONG, Case, Layout, Values, attend, every_backend

block_sizes = st.sampled_from((0, 1, 7, 16, 64, 256))


LONGEST = max(LONG)


def cases(lengths: tuple[int, ...], longest_whole: int = LONGEST) -> st.SearchStrategy[Case]:
    """Whole texts, which are what a step has of them, and ends of texts, which see what stands before them, too."""
    texts = st.tuples(st.sampled_from(lengths), st.sampled_from(support.BATCHES), st.booleans())

    def build(drawn: list[tuple[int, int, bool]]) -> tuple[tuple[int, int], ...]:
        return tuple((n, n if whole and n <= longest_whole else min(n, queries)) for n, queries, whole in drawn)

    return st.builds(
        Case,
        st.sampled_from(HEADS),
        st.sampled_from(HEAD_DIMS),
        st.lists(texts, min_size=1, max_size=4).map(build),
        st.sampled_from((0, 0, 1, 2, 7, 65, 256, 2**31 - 1)),
        support.seeds,
        score_cap=st.sampled_from((0.0, 0.0, 4.0)),
        sinks=st.booleans(),
        two_way=st.just(True),
        position_bias=st.booleans(),
    )


@every_backend
@example(case=Case((2, 1), 16, ((300, 300),), 0, 1, two_way=True), block_size=16)  # longer than a chunk of keys
@given(case=cases(support.SIZES, longest_whole=128), block_size=block_sizes)
def test_matches_the_oracle(isa: str, dtype: str, threads: int, case: Case, block_size: int) -> None:
    """The oracle computes the ends of long texts alone, since a whole one takes it a second."""
    values = Values(case, dtype)
    got = np.concatenate(attend(backend(isa, threads), values, Layout(values, block_size, case.seed), values.whole()))
    want, magnitude = values.expected()
    longest = max(c for c, _ in case.sequences)
    assert_close(got, want, length=case.head_dim + longest, scale=magnitude)


MULTIPLY_PAIRS = [isa for isa in support.ISAS if isa in ("avx512_bf16", "emulated512")]


@pytest.mark.parametrize(("isa", "threads"), covering(MULTIPLY_PAIRS, support.THREADS))
@example(case=Case((1, 1), 7, ((258, 258),), 5, 1, two_way=True), block_size=7)  # pairs at the edges of windows
@given(case=cases(support.SIZES, longest_whole=128), block_size=block_sizes)
def test_products_of_bf16_match_the_oracle(isa: str, threads: int, case: Case, block_size: int) -> None:
    """With compute_dtype="bfloat16" and such a cache, queries times scale and log2(e) are rounded as the kernel does,
    and so is each weight."""
    values = Values(case, "bfloat16")
    b = backend(isa, threads, "bfloat16")
    got = np.concatenate(attend(b, values, Layout(values, block_size, case.seed), values.whole()))
    scale = np.float32(case.softmax_scale) * np.float32(1.44269502)
    values.q = [load(store(q * scale, "bfloat16"), "bfloat16") / scale for q in values.q]
    want, magnitude = values.expected()
    longest = max(c for c, _ in case.sequences)
    assert_close(got, want, dtype="bfloat16", length=case.head_dim + longest, scale=magnitude)


@pytest.mark.parametrize("isa", MULTIPLY_PAIRS)
def test_products_of_bf16_are_of_two_way_attention_alone(isa: str) -> None:
    """What goes one way keeps the bits of float32 products, as in steps of one token."""
    case = Case((4, 4), 32, ((33, 33),), 0, 3)
    for two_way in (False, True):
        values = Values(replace(case, two_way=two_way), "bfloat16")
        layout = Layout(values, 16, case.seed)
        rounds, keeps = (
            attend(backend(isa, 1, compute), values, layout, values.whole())[0] for compute in ("bfloat16", "float32")
        )
        assert np.array_equal(rounds, keeps) != two_way


@pytest.mark.parametrize("isa", MULTIPLY_PAIRS)
@given(case=cases((7, 31, 64, 257)).filter(lambda case: case.sliding_window in (2, 7, 65)))
def test_a_pair_that_is_seen_by_half_gives_nothing_of_the_other_half(isa: str, case: Case) -> None:
    """Values that are not numbers reach the queries that see them alone."""
    values = Values(case, "bfloat16")
    b, layout = backend(isa, 1, "bfloat16"), Layout(values, 16, case.seed)
    want = attend(b, values, layout, values.whole())
    for v in values.v:
        v[len(v) // 2] = 0x7FC1  # a NaN
    got = attend(b, values, Layout(values, 16, case.seed), values.whole())
    for (context, queries), mine, before in zip(case.sequences, got, want, strict=True):
        distance = np.abs(np.arange(context - queries, context) - context // 2)
        sees = distance < case.sliding_window
        assert np.isnan(mine[sees]).all()
        assert_bitwise(mine[~sees], before[~sees])


@pytest.mark.parametrize(
    ("isa", "dtype", "compute"),
    # An emulated instruction set takes long, and runs the code of another one: with one kind of cache.
    [
        (isa, dtype, "float32")
        for isa in support.ISAS
        for dtype in (CACHE_DTYPES[:1] if isa.startswith("emulated") else CACHE_DTYPES)
    ]
    + [(isa, "bfloat16", "bfloat16") for isa in MULTIPLY_PAIRS],
)
@given(case=cases(LONG, longest_whole=513), block_size=block_sizes)  # two chunks of keys and one more
def test_company_changes_nothing(isa: str, dtype: str, compute: str, case: Case, block_size: int) -> None:
    """A text alone, among others in any order, in any layout and with any number of threads: the same bits."""
    values = Values(case, dtype)
    whole = values.whole()
    one, two, three = (backend(isa, threads, compute) for threads in support.THREADS)
    layout = Layout(values, block_size, case.seed)
    want = attend(one, values, layout, whole)
    for s, chunk in enumerate(whole):
        assert_bitwise(attend(two, values, layout, [chunk])[0], want[s], f"sequence {s} alone")
    for got, expected in zip(attend(three, values, layout, whole[::-1]), want[::-1], strict=True):
        assert_bitwise(got, expected, "sequences in reverse order")
    moved = Layout(values, 5 if block_size == 0 else 0, case.seed + 1)
    for got, expected in zip(attend(three, values, moved, whole), want, strict=True):
        assert_bitwise(got, expected, f"block_size {moved.block_size}")


@each_isa
@given(case=cases((1, 2, 16, 31)))
def test_the_last_query_of_a_text_is_as_in_one_way(isa: str, case: Case) -> None:
    """It has nothing behind it, so that both give the same bits."""
    values = Values(case, "float32")
    layout = Layout(values, 16, case.seed)
    both = attend(backend(isa, 1), values, layout, values.whole())
    values.case = replace(case, two_way=False)
    for got, want in zip(attend(backend(isa, 1), values, layout, values.whole()), both, strict=True):
        assert_bitwise(got[-1:], want[-1:])


@st.composite
def spans(draw: st.DrawFn, lengths: tuple[int, ...]) -> Case:
    """Some sequences whose queries see all keys behind them, and some that go one way."""
    case = draw(cases(lengths, longest_whole=128))
    flags = tuple(draw(st.booleans()) for _ in case.sequences)
    return replace(case, two_way=False, two_way_seqs=flags)


@every_backend
@given(case=spans(support.SIZES), block_size=block_sizes)
def test_sequences_that_see_their_end_match_the_oracle(
    isa: str, dtype: str, threads: int, case: Case, block_size: int
) -> None:
    values = Values(case, dtype)
    got = np.concatenate(attend(backend(isa, threads), values, Layout(values, block_size, case.seed), values.whole()))
    want, magnitude = values.expected()
    longest = max(c for c, _ in case.sequences)
    assert_close(got, want, length=case.head_dim + longest, scale=magnitude)


@each_isa
@given(case=spans(LONG), block_size=block_sizes)
def test_sequences_beside_those_that_see_their_end_keep_their_bits(isa: str, case: Case, block_size: int) -> None:
    values = Values(case, "float32")
    one, three = (backend(isa, threads) for threads in (support.THREADS[0], support.THREADS[-1]))
    layout, whole = Layout(values, block_size, case.seed), values.whole()
    want = attend(one, values, layout, whole)
    for got, expected in zip(attend(three, values, layout, whole[::-1]), want[::-1], strict=True):
        assert_bitwise(got, expected, "sequences in reverse order")
    for s, chunk in enumerate(whole):
        # The end of a span alone sees what it saw with all of it, as behind a known prefix.
        begin = chunk[2] // 2 if case.two_way_seqs[s] else chunk[1]
        assert_bitwise(attend(three, values, layout, [(s, begin, chunk[2])])[0], want[s][begin:], f"sequence {s} alone")
