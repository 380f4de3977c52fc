"""Linears of heads on the emulator."""

from __future__ import annotations

from typing import Any

import pytest
from emulation import ROOT, SCHEDULES, Run

SOURCES = [ROOT / "cuda/linear/head_linear.cu", "head_linear_api.cu"]
SHAPES = [
    {"tokens": 1, "heads": 3, "n": 16, "k": 24},
    {"tokens": 35, "heads": 2, "n": 48, "k": 136},
    {"tokens": 6, "heads": 5, "n": 24, "k": 40},  # heads that are no whole tiles
    {"tokens": 3, "heads": 3, "n": 8, "k": 264},
]


def _check(emulate: Run, kind: str, name: str, **where: Any) -> None:
    shapes = [{**shape, "seed": 3 + i, "kind": kind, "name": name} for i, shape in enumerate(SHAPES)]
    outcome = emulate(SOURCES, "head_linear_cases:head_linear", shapes=shapes, **where)
    assert outcome.ok, outcome.text


@pytest.mark.parametrize(
    ("kind", "name"), [("bf16", ""), ("f16", ""), ("f32", ""), ("bf16", "int8"), ("f16", "int4"), ("bf16", "fp8")]
)
def test_head_linear(emulate: Run, kind: str, name: str) -> None:
    _check(emulate, kind, name, schedule=SCHEDULES[1])


@pytest.mark.sanitizer
@pytest.mark.parametrize("sanitize", ["address", "thread"])
def test_sanitized(emulate: Run, sanitize: str) -> None:
    _check(emulate, "bf16", "", sanitize=sanitize)
