"""one_shot_all_reduce_add_rms_norm: ranks as host threads of one process, each with a stream, on the emulator."""

from __future__ import annotations

from typing import Any

import pytest
from emulation import ROOT, SCHEDULES, Run
from frames import KINDS
from hypothesis import HealthCheck, given, settings, strategies as st
from one_shot_cases import WAYS

SOURCES = [
    *(
        ROOT / f"cuda/{name}.cu"
        for name in (
            *("ranks/one_shot", "rows/rowwise", "linear/pack", "rows/norm"),
            *("attention/rope", "linear/linear_f32"),
        )
    ),
    "one_shot_api.cpp",
    "rowwise_api.cu",
]


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, Any]:
    """Any number of ranks; rows that are no multiple of a vector; rounds of different lengths."""
    hidden = draw(st.sampled_from((1, 7, 8, 19, 64, 111, 256, 264, 500, 989)))
    return {
        "kind": draw(st.sampled_from(KINDS)),
        "size": draw(st.integers(1, 8)),
        "hidden": hidden,
        "num_tokens": draw(st.lists(st.integers(1, 7), min_size=1, max_size=5)),
        "pad": draw(st.sampled_from((0, 8, 3))),
        "scale": draw(st.sampled_from((1e-3, 1.0, 40.0))),
        "way": draw(st.sampled_from(sorted(WAYS))),
        "seed": draw(st.integers(0, 2**20)),
    }


def shape(kind: str, size: int, hidden: int, num_tokens: list[int], pad: int = 0, way: str = "one") -> dict[str, Any]:
    parts = {"kind": kind, "size": size, "hidden": hidden, "num_tokens": num_tokens, "pad": pad, "way": way}
    return {**parts, "scale": 1.0, "seed": 11}


few = settings(
    max_examples=8, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip


def check(emulate: Run, case: str, settings: dict[str, str] | None = None, **parameters: Any) -> None:
    simulated = {"INFINILM_EMULATOR_SMS": "64", **(settings or {})}
    outcome = emulate(SOURCES, f"one_shot_cases:{case}", settings=simulated, **parameters)
    assert outcome.ok, outcome.text


@pytest.mark.parametrize("schedule", SCHEDULES)
@few
@given(drawn=st.lists(shapes(), min_size=1, max_size=2))
def test_rounds(emulate: Run, schedule: str, drawn: list[dict[str, Any]]) -> None:
    """An audit found: Sums over 256 KiB take four kernels. Now: Two-shot sums up to 4 MiB, in rank order.

    It fails where this was planted: A two-shot sum without its second exchange; a one-shot's mailbox that is there
    once.
    """
    check(emulate, "rounds", schedule=schedule, shapes=drawn)


@pytest.mark.parametrize("schedule", [*SCHEDULES, "random:2", "random:3"])
def test_many_rounds(emulate: Run, schedule: str) -> None:
    """Nothing is reset between rounds, and no rank overtakes a slow one by more than the mail allows."""
    shapes = [shape("bf16", 3, 264, [2, 1, 3] * 8), shape("bf16", 3, 264, [2, 1, 3] * 6, way="two")]
    check(
        emulate, "rounds", schedule=schedule, shapes=[*shapes, shape("f16", 3, 1000, [2, 1, 3, 1, 1, 3], way="by size")]
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_more_rows_than_blocks(emulate: Run, schedule: str) -> None:
    """Blocks with several rows, and rounds in which some of them have none."""
    shapes = [shape("f16", 2, 520, [131, 3, 70]), shape("f16", 4, 520, [131, 3, 70], way="two")]
    check(emulate, "rounds", schedule=schedule, shapes=shapes)


@pytest.mark.parametrize("kind", KINDS)
def test_long_rows(emulate: Run, kind: str) -> None:
    """Longer than a block has threads for; aligned and not."""
    shapes = [(4408, "one"), (8192, "one"), (5001, "one"), (8192, "two"), (5001, "two")]
    check(emulate, "rounds", shapes=[shape(kind, 2, hidden, [2], way=way) for hidden, way in shapes])


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_alone(emulate: Run, kind: str) -> None:
    check(emulate, "alone", kind=kind, size=4, hidden=264)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_graphs(emulate: Run, schedule: str, way: str) -> None:
    check(emulate, "replays", schedule=schedule, kind="bf16", size=3, times=5, way=way)


@pytest.mark.parametrize("way", ["one", "two"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_counters_wrap(emulate: Run, schedule: str, way: str) -> None:
    check(emulate, "counters_wrap", schedule=schedule, way=way)


@pytest.mark.parametrize("way", ["one", "two"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_abort(emulate: Run, schedule: str, way: str) -> None:
    check(emulate, "abort", schedule=schedule, size=3, way=way)


def test_refusals(emulate: Run) -> None:
    check(emulate, "refusals")


def test_devices(emulate: Run) -> None:
    """A device for each rank: that reach each other, that do not, that have too few SMs."""
    eight = {"INFINILM_EMULATOR_DEVICES": "8"}
    check(emulate, "rounds", settings=eight, shapes=[shape("bf16", 8, 64, [2, 1])])
    check(emulate, "not_connected", settings={**eight, "INFINILM_EMULATOR_PEERS": "0"})
    check(emulate, "not_connected", settings={**eight, "INFINILM_EMULATOR_SMS": "63"})


@pytest.mark.sanitizer
@pytest.mark.parametrize("schedule", [*SCHEDULES, "random:2"])
@pytest.mark.parametrize("sanitize", ["address", "thread"])
@settings(few, max_examples=2)
@given(drawn=shapes())
def test_rounds_sanitized(emulate: Run, sanitize: str, schedule: str, drawn: dict[str, Any]) -> None:
    shapes = [drawn, shape("bf16", 3, 264, [2, 1, 3, 1]), shape("f16", 2, 520, [66])]
    shapes += [shape("bf16", 3, 264, [2, 1, 3, 1], way="two")]
    check(emulate, "rounds", sanitize=sanitize, schedule=schedule, shapes=shapes)


@pytest.mark.sanitizer
@pytest.mark.parametrize("sanitize", ["address", "thread"])
def test_graphs_sanitized(emulate: Run, sanitize: str) -> None:
    check(
        emulate,
        "replays",
        sanitize=sanitize,
        schedule="random:1",
        kind="f16",
        size=2,
        times=3,
        way="by size",
    )
