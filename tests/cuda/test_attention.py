"""Attention on the emulator: every schedule, copies late and eager; the sanitizers with -m sanitizer."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from attention_cases import Case
from emulation import ROOT, SCHEDULES, Run
from hypothesis import HealthCheck, given, settings, strategies as st
from orders import every_order

FILES = (
    "attention.cu",
    "attention_decode.cu",
    "attention_decode_8_bits.cu",
    "attention_prefill.cu",
    "attention_wide.cu",
    "attention_f32.cu",
    "attention_sm90.cu",
    "rope.cu",
)
SOURCES = [*(ROOT / "cuda/attention" / name for name in FILES), ROOT / "src/ops/attention_work.cpp", "attention_api.cu"]
HEADS = ((1, 1), (3, 1), (6, 2), (7, 1), (8, 1), (32, 1))
HEAD_DIMS = (8, 24, 64, 72, 80, 96, 128, 256)
QUERIES = (0, 1, 2, 5, 17, 64, 130)
CONTEXTS = (1, 2, 17, 127, 128, 129, 256, 300, 385, 600)


def sequences(most_rows: int, group: int) -> st.SearchStrategy[tuple[tuple[int, int], ...]]:
    """A few (context, queries), about most_rows rows at most, at least one query; a context of >= 3 chunks."""

    def build(drawn: list[tuple[int, int]], long: tuple[int, int]) -> tuple[tuple[int, int], ...]:
        out, left = [], most_rows
        for context, queries in [*drawn, long]:
            count = min(queries, context, max(1, left // group))
            left = max(0, left - count * group)
            out.append((context, count))
        return tuple(out)

    pairs = st.lists(st.tuples(st.sampled_from(CONTEXTS), st.sampled_from(QUERIES)), max_size=3)
    return st.builds(build, pairs, st.tuples(st.sampled_from((300, 385, 600)), st.sampled_from(QUERIES[1:])))


@st.composite
def cases(draw: Any, kinds: tuple[str, ...] = ("bf16", "f16"), most_rows: int = 150) -> dict[str, Any]:
    heads = draw(st.sampled_from(HEADS))
    head_dim = draw(st.sampled_from(HEAD_DIMS))
    rows = max(most_rows * 64 // max(head_dim, 64) // heads[1], 1)
    window = draw(st.sampled_from((0, 0, 1, 7, 130)))
    chunked = window > 0 and draw(st.booleans())
    two_way = not chunked and draw(st.booleans())
    own = draw(sequences(rows, heads[0] // heads[1]))
    has_spans = not chunked and not two_way and draw(st.booleans())
    case = Case(
        kind=draw(st.sampled_from(kinds)),
        heads=heads,
        head_dim=head_dim,
        sequences=own,
        spans=draw(st.tuples(*[st.booleans()] * len(own))) if has_spans else (),
        block_size=draw(st.sampled_from((4, 8, 16, 37, 64, 0))),
        window=window,
        chunked=chunked,
        two_way=two_way,
        position_bias=draw(st.booleans()),
        pad=draw(st.sampled_from((0, 8, 40))),
        score_cap=draw(st.sampled_from((0.0, 0.0, 0.5, 50.0))),
        sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 2**32 - 1)),
        cache=draw(st.sampled_from(("", "", "int8", "fp8"))),
    )
    return dataclasses.asdict(case)


ORDERS = [("fifo", "late"), ("lifo", "eager"), ("random:1", "late")]
cuts = st.lists(st.floats(0, 1), min_size=1, max_size=3)
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)
late_and_eager = pytest.mark.parametrize("asynchronous", ["late", "eager"])
# The worker processes behind `emulate` keep nothing from one example to the next.
few = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=3)


def check(emulate: Run, case: dict[str, Any], cuts: list[float] | None = None, **how: Any) -> None:
    outcome = emulate(SOURCES, "attention_cases:attention", shape=case, cuts=cuts, **how)
    assert outcome.ok, outcome.text


@every_order
@few
@given(case=cases(), cuts=cuts)
def test_attention(emulate: Run, schedule: str, asynchronous: str, case: dict[str, Any], cuts: list[float]) -> None:
    """Against float64; then a row's bits alone, in any order, part of a prompt, or by the other kernel.

    An audit found: Decode attention: one warp has a chunk, and three wait; merging many chunks takes one warp. Now:
    Four warps share a chunk; the block merges.

    An audit found: Prefill attention serves 16 rows by each read of keys. Now: 32 rows, and wgmma on Hopper, with the
    same bits.

    An audit found: Largest score, sum and outputs of a row have three spellings in attention. Now: One state and one
    formula, RowState and Factors; what holds the outputs differs as they lie in fragments or in columns.

    It fails where this was planted: The last chunk is not merged.
    """
    check(emulate, case, cuts, schedule=schedule, settings={"INFINILM_EMULATOR_ASYNC": asynchronous})


@late_and_eager
@few
@given(case=cases(kinds=("f32",), most_rows=40), cuts=cuts)
def test_attention_f32(emulate: Run, asynchronous: str, case: dict[str, Any], cuts: list[float]) -> None:
    check(emulate, case, cuts, schedule="random:1", settings={"INFINILM_EMULATOR_ASYNC": asynchronous})


@pytest.mark.parametrize(
    ("kind", "head_dim", "window", "position_bias"),
    [
        ("bf16", 64, 0, False),
        ("f16", 128, 0, True),
        ("bf16", 256, 0, False),
        ("f32", 40, 0, True),
        ("bf16", 64, 65, True),
        ("f16", 128, 200, False),
        ("bf16", 320, 7, True),
        ("f32", 40, 65, False),
        ("bf16", 24, 2**31 - 1, False),
    ],
)
def test_two_ways(emulate: Run, kind: str, head_dim: int, window: int, position_bias: bool) -> None:
    """Whole texts, and ends of texts, whose rows see what is behind them: one chunk and several, all kernels."""
    sequences = ((300, 300), (5, 5), (400, 3), (129, 70), (1, 1))
    case = Case(kind, (3, 1), head_dim, sequences, 16, window, 8, two_way=True, position_bias=position_bias)
    check(emulate, dataclasses.asdict(case), cuts=[0.5], schedule="random:1")


@pytest.mark.parametrize(
    ("kind", "head_dim", "window"),
    [("bf16", 64, 0), ("f16", 128, 65), ("bf16", 256, 7), ("f32", 40, 65), ("bf16", 320, 200), ("f16", 24, 0)],
)
def test_spans(emulate: Run, kind: str, head_dim: int, window: int) -> None:
    """Sequences whose queries see each other both ways, as tokens of a picture, beside others: all kernels."""
    sequences = ((300, 300), (5, 5), (400, 3), (270, 20), (300, 40), (1, 1))
    spans = (True, False, True, True, False, True)
    case = Case(kind, (3, 1), head_dim, sequences, 16, window, 8, spans=spans)
    check(emulate, dataclasses.asdict(case), cuts=[0.5], schedule="random:1")


@every_schedule
@pytest.mark.parametrize(("head_dim", "window"), [(64, 0), (80, 7), (256, 0), (128, -90)])
def test_pipelines(emulate: Run, head_dim: int, window: int, schedule: str) -> None:
    """What hypothesis may miss: both kernels over several chunks in one call; with a window, rows of a tile that see
    nothing of its first chunk.

    It fails where this was planted: attention_sm90 does not wait for the scores.
    """
    sequences = ((600, 1), (5, 5), (400, 10), (280, 40))
    case = Case("bf16", (3, 1), head_dim, sequences, 16, abs(window), 8, chunked=window < 0)
    check(emulate, dataclasses.asdict(case), schedule=schedule)


# Each width of a kernel; heads that are no multiple of 16; latents, some wholly in shared memory.
OF_8_BITS = ((32, 0), (64, 0), (72, 0), (96, 0), (128, 0), (200, 0), (96, 64), (200, 8), (320, 0), (576, 512))


@pytest.mark.parametrize(
    ("dims", "cache", "window", "order"),
    [(dims, ("int8", "fp8")[i % 2], (0, 130)[i // 2 % 2], ORDERS[i % len(ORDERS)]) for i, dims in enumerate(OF_8_BITS)],
)
def test_cache_of_8_bits(emulate: Run, dims: tuple[int, int], cache: str, window: int, order: tuple[str, str]) -> None:
    """Decode over several chunks, split and whole, and prompts: the bits of a cache in 16 bits with the same values."""
    (head_dim, value_dim), (schedule, asynchronous) = dims, order
    sequences = ((600, 1), (300, 14), (5, 5), (280, 40 if head_dim <= 128 else 3))
    kind = "bf16" if head_dim % 3 else "f16"
    case = Case(kind, (6, 2), head_dim, sequences, 16, window, 8, value_dim=value_dim, cache=cache)
    how = {"settings": {"INFINILM_EMULATOR_ASYNC": asynchronous}, "schedule": schedule}
    check(emulate, dataclasses.asdict(case), cuts=[0.4], **how)


@every_order
@pytest.mark.parametrize(
    ("heads", "head_dim", "cache", "how"),
    [
        ((4, 2), 128, "", {"norms": True, "rotary_dim": 128, "own_kv": True}),
        ((6, 2), 64, "int8", {"norms": False, "rotary_dim": 64, "own_kv": True}),
        ((16, 1), 80, "", {"norms": True, "rotary_dim": 20, "own_kv": True}),
        ((3, 3), 200, "fp8", {"norms": True, "rotary_dim": 0, "own_kv": True}),
        ((5, 1), 24, "", {"norms": False, "rotary_dim": 24, "own_kv": False}),
        ((8, 2), 256, "", {"norms": True, "rotary_dim": 64, "own_kv": True}),
    ],
)
def test_heads_that_attention_stores(
    emulate: Run,
    heads: tuple[int, int],
    head_dim: int,
    cache: str,
    how: dict[str, Any],
    schedule: str,
    asynchronous: str,
) -> None:
    """Contexts that end with a chunk and behind one, in one block and in several; windows, sinks, a new key alone."""
    sequences = ((600, 1), (1, 1), (128, 1), (129, 1), (300, 1))
    for window, num_sms, kind in ((0, 4, "bf16"), (130, 200, "f16")):
        case = Case(kind, heads, head_dim, sequences, 16, window, 8, sinks=window > 0, cache=cache)
        settings = {"INFINILM_EMULATOR_ASYNC": asynchronous}
        shape = dataclasses.asdict(case)
        outcome = emulate(
            SOURCES, "attention_cases:stored", shape=shape, num_sms=num_sms, schedule=schedule, settings=settings, **how
        )
        assert outcome.ok, outcome.text


@st.composite
def wide_cases(draw: Any, kind: str, head_dim: int, value_dim: int) -> dict[str, Any]:
    heads = draw(st.sampled_from(((2, 2), (6, 1), (20, 1), (40, 2))))
    rows = 48 // heads[1]
    window = draw(st.sampled_from((0, 0, 7, 130)))
    case = Case(
        kind=kind,
        heads=heads,
        head_dim=head_dim,
        sequences=draw(sequences(rows, heads[0] // heads[1])),
        block_size=draw(st.sampled_from((16, 37, 0))),
        window=window,
        pad=draw(st.sampled_from((0, 8))),
        score_cap=draw(st.sampled_from((0.0, 50.0))),
        seed=draw(st.integers(0, 2**32 - 1)),
        sinks=draw(st.booleans()),
        value_dim=value_dim,
        chunked=window > 0 and draw(st.booleans()),
        cache=draw(st.sampled_from(("", "int8", "fp8"))),
    )
    return dataclasses.asdict(case)


# Heads of more than 256 columns, and values that are the ends of keys.
WIDE = ((320, 0), (512, 0), (576, 512), (408, 264), (200, 8), (48, 32), (520, 0))
two = settings(few, max_examples=2)  # the first one is always the simplest


@pytest.mark.parametrize(
    ("dims", "kind", "order"),
    [(dims, ("bf16", "f16")[i % 2], ORDERS[i % len(ORDERS)]) for i, dims in enumerate(WIDE)],
)
@two
@given(data=st.data(), cuts=cuts)
def test_wide_heads_and_latents(
    emulate: Run, dims: tuple[int, int], kind: str, order: tuple[str, str], data: st.DataObject, cuts: list[float]
) -> None:
    """As test_attention; with many multiprocessors the same rows are decode's."""
    schedule, asynchronous = order
    case = data.draw(wide_cases(kind, *dims))
    check(emulate, case, cuts, schedule=schedule, settings={"INFINILM_EMULATOR_ASYNC": asynchronous})


@few
@given(case=st.sampled_from(WIDE).flatmap(lambda dims: wide_cases("f32", *dims)), cuts=cuts)
def test_wide_heads_and_latents_f32(emulate: Run, case: dict[str, Any], cuts: list[float]) -> None:
    check(emulate, case, cuts)


@pytest.mark.parametrize(("kind", "cache"), [("bf16", ""), ("f32", ""), ("bf16", "int8"), ("f16", "fp8")])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(192, 128), (48, 32), (24, 16), (64, 8)])
def test_values_that_are_shorter_than_keys(emulate: Run, kind: str, cache: str, head_dim: int, value_dim: int) -> None:
    """They lie in rows of their own, as long as those of keys: decode and prefill, with sinks and a window."""
    for window in (0, 7):
        lengths = ((300, 1), (130, 9), (70, 2))
        case = Case(kind, (8, 2), head_dim, lengths, 16, window, 8, sinks=True, value_dim=value_dim, own_values=True)
        case = dataclasses.replace(case, cache=cache)
        check(emulate, dataclasses.asdict(case), [0.4])


@every_schedule
@pytest.mark.parametrize(("heads", "head_dim", "value_dim", "window"), [((11, 1), 576, 512, 0), ((6, 1), 512, 0, 130)])
def test_wide_pipelines(
    emulate: Run, heads: tuple[int, int], head_dim: int, value_dim: int, window: int, schedule: str
) -> None:
    """What hypothesis may miss: several chunks and tiles of prefill and of decode in one call; a half of the warps
    without rows, or with one (33 rows); with a window, rows of a tile that see nothing of its first chunk.
    """
    case = Case("bf16", heads, head_dim, ((400, 1), (300, 14), (5, 5), (130, 3)), 16, window, 8, value_dim=value_dim)
    check(emulate, dataclasses.asdict(case), schedule=schedule)


def test_other_devices(emulate: Run) -> None:
    """99 KB of shared memory, and more multiprocessors than blocks: one chunk to a block. Every kernel fits."""
    for head_dim, value_dim in ((32, 0), (64, 0), (80, 0), (96, 0), (128, 0), (256, 0), (256, 128)):
        case = dataclasses.asdict(Case("f16", (8, 2), head_dim, ((300, 10), (385, 1)), 37, 0, 8, value_dim=value_dim))
        cuts = [0.4] if head_dim == 96 else None
        check(emulate, case, cuts, settings={"INFINILM_EMULATOR_CC": "89", "INFINILM_EMULATOR_SMS": "132"})


@pytest.mark.parametrize("seed", [1, 2])
def test_lists(emulate: Run, seed: int) -> None:
    """An audit found: One long sequence stops the split for all of a batch. Now: A list of work from the real lengths.

    It fails where this was planted: Places of partial results beyond the workspace.
    """
    outcome = emulate(SOURCES, "attention_cases:lists", seed=seed)
    assert outcome.ok, outcome.text


def test_lists_of_wide_heads(emulate: Run) -> None:
    outcome = emulate(SOURCES, "attention_cases:wide_lists")
    assert outcome.ok, outcome.text


def test_tokens_of_a_draft_share_reads_of_keys(emulate: Run) -> None:
    outcome = emulate(SOURCES, "attention_cases:drafts")
    assert outcome.ok, outcome.text


def test_one_long_sequence(emulate: Run) -> None:
    """It fails where this was planted: A long sequence is never cut."""
    outcome = emulate(SOURCES, "attention_cases:one_long")
    assert outcome.ok, outcome.text


@pytest.mark.parametrize("kind", ["bf16", "f32"])
def test_not_a_number(emulate: Run, kind: str) -> None:
    outcome = emulate(SOURCES, "attention_cases:not_a_number", kind=kind)
    assert outcome.ok, outcome.text


@pytest.mark.sanitizer
@every_schedule
@pytest.mark.parametrize("sanitize", ["address", "thread"])
@pytest.mark.parametrize(("head_dim", "block_size", "window"), [(64, 16, 0), (80, 37, 130)])
def test_attention_sanitized(
    emulate: Run, head_dim: int, block_size: int, window: int, sanitize: str, schedule: str
) -> None:
    """Split decode, prefill and a single chunk in one call."""
    case = Case("bf16", (2, 1), head_dim, ((600, 1), (280, 17), (5, 2)), block_size, window, 8)
    check(emulate, dataclasses.asdict(case), sanitize=sanitize, schedule=schedule)


@pytest.mark.sanitizer
@every_schedule
@pytest.mark.parametrize("sanitize", ["address", "thread"])
@pytest.mark.parametrize(("head_dim", "value_dim", "window"), [(48, 32, 0), (320, 0, 130), (576, 512, 0)])
def test_wide_sanitized(emulate: Run, head_dim: int, value_dim: int, window: int, sanitize: str, schedule: str) -> None:
    """Prefill over several chunks, with few parts to a chunk and with many, and decode."""
    case = Case("bf16", (6, 1), head_dim, ((300, 12), (140, 1)), 16, window, 8, value_dim=value_dim)
    check(emulate, dataclasses.asdict(case), sanitize=sanitize, schedule=schedule)


@pytest.mark.sanitizer
@pytest.mark.parametrize("sanitize", ["address", "thread"])
def test_attention_f32_sanitized(emulate: Run, sanitize: str) -> None:
    case = Case("f32", (2, 1), 24, ((70, 5), (3, 3)), 37, 33, 8)
    check(emulate, dataclasses.asdict(case), sanitize=sanitize, schedule="random:1")
