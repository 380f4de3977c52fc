"""sample, find_best and log_probs on the emulator, id for id. The kernels do nothing asynchronous: late is eager."""

from __future__ import annotations

from typing import Any

import pytest
from emulation import ROOT, SCHEDULES, Run
from hypothesis import HealthCheck, given, settings, strategies as st

SOURCES = [ROOT / "cuda/sampling/sampling.cu", "sampling_api.cu"]
KINDS = ("smooth", "ties", "equal", "close", "peaked", "masked")


@st.composite
def shapes(draw: st.DrawFn) -> list[dict[str, Any]]:
    """One batch of each size; the longest does not fit the kernel's list when it is flat."""
    return [
        {
            "seed": draw(st.integers(0, 2**31)), "vocab_size": vocab_size, "rows": rows,
            "kind": draw(st.sampled_from(KINDS)), "pad": draw(st.sampled_from((0, 3, 8))),
            "blocks": draw(st.sampled_from((1, 2, 4, 8))),
        }
        for vocab_size, rows in ((1, 3), (7, 5), (257, 7), (1000, 7), (5000, 7))
    ]  # fmt: skip


few = settings(
    max_examples=3, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
NO_CLUSTERS = {"INFINILM_EMULATOR_CC": "80", "INFINILM_EMULATOR_SMS": "32"}
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("faults", {"vocab_sizes": [3, 257]}),
    ("ties", {"vocab_sizes": [7, 5000]}),
    ("boundaries", {"vocab_sizes": [257, 5000]}),
    ("changes", {"vocab_sizes": [7, 257, 6000]}),
    ("log_probs", {"sizes": [1, 2, 31, 257, 6000], "widths": [1, 33, 65]}),
    ("named", {"vocab_sizes": [3, 257]}),
    ("best", {"sizes": [0, 1, 2, 63, 64, 65, 257, 6000], "ks": [1, 40, 64]}),
    ("masked_best", {"sizes": [0, 1, 31, 64, 65, 257, 6000], "ks": [1, 2, 40, 64]}),
]


def _check(emulate: Run, case: str, **parameters: Any) -> None:
    outcome = emulate(SOURCES, f"sampling_cases:{case}", **parameters)
    assert outcome.ok, outcome.text


@pytest.mark.parametrize("schedule", SCHEDULES)
@few
@given(drawn=shapes())
def test_ids_equal_the_oracles(emulate: Run, schedule: str, drawn: list[dict[str, Any]]) -> None:
    """An audit found: A row of logits is sampled by one SM. Now: Up to 8 blocks of a cluster; 16 that talk by memory
    where there are no clusters.
    """
    _check(emulate, "sample", schedule=schedule, shapes=drawn)


@pytest.mark.parametrize("schedule", SCHEDULES)
@few
@given(drawn=shapes())
def test_masks(emulate: Run, schedule: str, drawn: list[dict[str, Any]]) -> None:
    _check(emulate, "masked", schedule=schedule, shapes=drawn)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("case", "parameters"), OTHERS, ids=[case for case, _ in OTHERS])
def test_other(emulate: Run, case: str, parameters: dict[str, Any], schedule: str) -> None:
    _check(emulate, case, schedule=schedule, **parameters)


@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(few, max_examples=1)
@given(drawn=shapes(), blocks=st.permutations((2, 4, 8)))
def test_without_clusters(emulate: Run, schedule: str, drawn: list[dict[str, Any]], blocks: list[int]) -> None:
    """It fails where this was planted: Blocks of a row that pass their barrier at once; their launch as any other."""
    shapes = [{**shape, "rows": 2, "blocks": count} for shape, count in zip(drawn[2:], blocks, strict=True)]
    shapes.append({**drawn[2], "rows": 1, "blocks": 16})
    _check(emulate, "without_clusters", schedule=schedule, settings=NO_CLUSTERS, shapes=shapes)


def test_more_blocks_than_run_at_one_time(emulate: Run) -> None:
    _check(emulate, "too_many_blocks", settings={**NO_CLUSTERS, "INFINILM_EMULATOR_SMS": "8"})


@pytest.mark.sanitizer
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("sanitize", ["address", "thread"])
@settings(few, max_examples=1)
@given(drawn=shapes())
def test_sanitized(emulate: Run, sanitize: str, schedule: str, drawn: list[dict[str, Any]]) -> None:
    two = [{**shape, "rows": 2} for shape in drawn[2::2]]  # a thread takes time
    _check(emulate, "sample", sanitize=sanitize, schedule=schedule, shapes=two)
    _check(emulate, "masked", sanitize=sanitize, schedule=schedule, shapes=two)
    _check(emulate, "best", sanitize=sanitize, schedule=schedule, sizes=[65, 4000], ks=[1, 40])
    _check(emulate, "masked_best", sanitize=sanitize, schedule=schedule, sizes=[65, 4000], ks=[1, 40])
    _check(emulate, "log_probs", sanitize=sanitize, schedule=schedule, sizes=[65, 4000], widths=[1, 33])
    one = [{**drawn[-1], "rows": 1, "blocks": 4}]
    _check(emulate, "without_clusters", sanitize=sanitize, schedule=schedule, settings=NO_CLUSTERS, shapes=one)
