"""The choice of keys on the emulator."""

from __future__ import annotations

from typing import Any

import pytest
from emulation import ROOT, SCHEDULES, Run

SOURCES = [ROOT / "cuda/attention/choose_keys.cu", "choose_keys_api.cu"]
SHAPES = [
    {"lengths": [[5, 5]], "heads": 1, "head_dim": 8, "block_size": 16, "top_k": 3},
    {"lengths": [[70, 2], [9, 4], [300, 1]], "heads": 5, "head_dim": 24, "block_size": 16, "top_k": 17},
    {"lengths": [[530, 2]], "heads": 40, "head_dim": 16, "block_size": 5, "top_k": 256},
    {"lengths": [[70, 3], [300, 1]], "heads": 1, "head_dim": 16, "block_size": 16, "top_k": 20, "runs": [4, 1, 3, 2]},
    {"lengths": [[1500, 2]], "heads": 1, "head_dim": 8, "block_size": 16, "top_k": 48, "runs": [3, 2, 2, 0]},
    {"lengths": [[40, 3], [33, 1]], "heads": 64, "head_dim": 128, "block_size": 16, "top_k": 1},
]


def _check(emulate: Run, kind: str, **where: Any) -> None:
    shapes = [{**shape, "seed": 5 + i, "kind": kind} for i, shape in enumerate(SHAPES)]
    outcome = emulate(SOURCES, "choose_keys_cases:choose_keys", shapes=shapes, **where)
    assert outcome.ok, outcome.text


@pytest.mark.parametrize("kind", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_choose_keys(emulate: Run, kind: str, schedule: str) -> None:
    _check(emulate, kind, schedule=schedule)


@pytest.mark.sanitizer
@pytest.mark.parametrize("sanitize", ["address", "thread"])
def test_sanitized(emulate: Run, sanitize: str) -> None:
    _check(emulate, "bf16", sanitize=sanitize)
