"""Layers with a state on the emulator: the causal convolution, the gated delta rule and the state space of Mamba-2."""

from __future__ import annotations

from typing import Any

import pytest
from emulation import ROOT, SCHEDULES, Run
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

SOURCES = [ROOT / "cuda/delta/delta.cu", ROOT / "cuda/delta/selective_scan.cu", "delta_api.cu"]
few = settings(
    max_examples=2, deadline=None, derandomize=True, database=None, phases=(Phase.generate,),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
counts = st.lists(st.sampled_from((1, 2, 3, 5, 17, 33)), min_size=1, max_size=4)


def _check(emulate: Run, case: str, shapes: list[dict[str, Any]], cases: str = "delta_cases", **where: Any) -> None:
    outcome = emulate(SOURCES, f"{cases}:{case}", shapes=shapes, **where)
    assert outcome.ok, outcome.text


def convs() -> st.SearchStrategy[dict[str, Any]]:
    """Any number of taps and channels."""
    return st.fixed_dictionaries(
        {
            "seed": st.integers(0, 2**31), "counts": counts, "taps": st.integers(1, 8),
            "channels": st.sampled_from((1, 7, 130, 300)), "gated": st.booleans(), "biased": st.booleans(),
        }
    )  # fmt: skip


def rules() -> st.SearchStrategy[dict[str, Any]]:
    """Heads whose columns are those of several warps, of several blocks, and of rows beyond a lane's first."""
    return st.fixed_dictionaries(
        {
            "seed": st.integers(0, 2**31), "counts": counts, "k_heads": st.integers(1, 2), "group": st.integers(1, 2),
            "k_dim": st.sampled_from((1, 12, 33, 128, 200)), "v_dim": st.sampled_from((2, 20, 64, 136)),
            "pad": st.sampled_from((0, 2)), "by_element": st.booleans(), "bounded": st.booleans(),
        }
    )  # fmt: skip


@few
@given(shapes=st.lists(convs(), min_size=6, max_size=6))
def test_causal_conv(emulate: Run, shapes: list[dict[str, Any]]) -> None:
    _check(emulate, "conv", shapes)


@few
@given(shapes=st.lists(rules(), min_size=4, max_size=4))
def test_delta_rule(emulate: Run, shapes: list[dict[str, Any]]) -> None:
    _check(emulate, "rule", shapes)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_cut_gives_the_same_bits(emulate: Run, schedule: str) -> None:
    shape = {"seed": 4, "k_heads": 1, "group": 2, "length": 40, "cuts": [1, 2, 19, 20, 21, 37]}
    sizes = ((128, 72, False), (24, 140, True), (256, 12, False), (128, 36, True))
    shapes = [{**shape, "k_dim": k, "v_dim": v, "by_element": by_element} for k, v, by_element in sizes]
    _check(emulate, "cuts", shapes, schedule=schedule)
    convs = [{**shape, "channels": 130, "taps": taps, "gated": taps == 4} for taps in (2, 4, 8)]
    _check(emulate, "conv_cuts", convs, schedule=schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_drafts_leave_no_state(emulate: Run, schedule: str) -> None:
    shape = {"seed": 4, "k_heads": 1, "group": 2, "counts": [17, 3, 40, 6], "seen": [1, 2, 26, 6]}
    sizes = ((128, 72, 4), (24, 140, 2), (256, 12, 8), (12, 20, 7))
    shapes = [
        {**shape, "k_dim": k, "v_dim": v, "taps": taps, "channels": 130, "by_element": taps in (2, 7)}
        for k, v, taps in sizes
    ]
    _check(emulate, "drafts", shapes, schedule=schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_replayed_drafts_are_tokens(emulate: Run, schedule: str) -> None:
    steps = {"seed": 4, "counts": [17, 3, 40, 6], "seen": [1, 2, 26, 1], "right": [15, 0, 3, 2]}
    sizes = ((128, 72, 4), (24, 140, 2), (256, 12, 8), (12, 20, 7))
    more = {"k_heads": 1, "group": 2, "channels": 130}
    shapes = [
        {**steps, **more, "k_dim": k, "v_dim": v, "taps": n, "gated": n == 4, "by_element": n in (2, 7)}
        for k, v, n in sizes
    ]
    _check(emulate, "replays", shapes, schedule=schedule)
    of_scans = {"groups": 1, "of_group": 2}
    shapes = [{**steps, **of_scans, "state_dim": n, "head_dim": p} for n, p in ((128, 72), (24, 140))]
    _check(emulate, "scan_replays", shapes, "scan_cases", schedule=schedule)


def scans() -> st.SearchStrategy[dict[str, Any]]:
    """Heads whose columns are those of several warps, of several blocks, and of rows beyond a lane's first."""
    return st.fixed_dictionaries(
        {
            "seed": st.integers(0, 2**31), "counts": counts, "groups": st.integers(1, 2), "of_group": st.integers(1, 2),
            "state_dim": st.sampled_from((1, 12, 33, 128, 200)), "head_dim": st.sampled_from((2, 20, 64, 136)),
            "limits": st.sampled_from(((0.0, float("inf")), (0.3, 1.1))),
        }
    )  # fmt: skip


def norms() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "seed": st.integers(0, 2**31), "n": st.integers(1, 3), "groups": st.integers(1, 3),
            "group_size": st.sampled_from((1, 33, 300)), "normed": st.booleans(), "norm_first": st.booleans(),
            "in_place": st.booleans(),
        }
    )  # fmt: skip


@few
@given(shapes=st.lists(scans(), min_size=4, max_size=4), others=st.lists(norms(), min_size=6, max_size=6))
def test_selective_scan(emulate: Run, shapes: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    _check(emulate, "scan", shapes, "scan_cases")
    _check(emulate, "gated_norm", others, "scan_cases")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_scan_of_any_cut_and_with_drafts(emulate: Run, schedule: str) -> None:
    shape = {"seed": 4, "groups": 1, "of_group": 2, "length": 40, "cuts": [1, 2, 19, 20, 21, 37]}
    shapes = [{**shape, "state_dim": n, "head_dim": p} for n, p in ((128, 72), (24, 140), (256, 12))]
    _check(emulate, "scan_cuts", shapes, "scan_cases", schedule=schedule)
    steps = {"counts": [17, 3, 40, 6], "seen": [1, 2, 26, 6]}
    _check(emulate, "scan_drafts", [{**one, **steps} for one in shapes[:2]], "scan_cases", schedule=schedule)


@pytest.mark.sanitizer
@pytest.mark.parametrize("sanitize", ["address", "thread"])
def test_sanitized(emulate: Run, sanitize: str) -> None:
    shape = {"seed": 9, "counts": [20, 1, 3], "k_heads": 1, "group": 2, "k_dim": 48, "v_dim": 72}
    conv = {"seed": 9, "counts": [20, 1, 3], "taps": 4, "channels": 150}
    shapes = [{**shape, "pad": pad} for pad in (0, 2)]
    _check(emulate, "rule", shapes, sanitize=sanitize, schedule="lifo")
    replays = {"counts": [20, 2, 3], "seen": [5, 1, 1], "right": [9, 0, 1], "taps": 4, "channels": 150, "gated": True}
    _check(emulate, "replays", [{**shapes[0], **replays}], sanitize=sanitize, schedule="lifo")
    _check(emulate, "conv", [conv], sanitize=sanitize, schedule="lifo")
    scan = {"seed": 9, "counts": [20, 1, 3], "groups": 1, "of_group": 2, "state_dim": 48, "head_dim": 72}
    _check(emulate, "scan", [scan], "scan_cases", sanitize=sanitize, schedule="lifo")
    _check(emulate, "scan_replays", [{**scan, **replays}], "scan_cases", sanitize=sanitize, schedule="lifo")
    norm = {"seed": 9, "n": 2, "groups": 2, "group_size": 300, "normed": True, "norm_first": False, "in_place": True}
    _check(emulate, "gated_norm", [norm], "scan_cases", sanitize=sanitize, schedule="lifo")
