"""What the KV cache of a simulated device gets."""

from __future__ import annotations

from pathlib import Path

import pytest
from emulation import Run


@pytest.mark.parametrize("tp_size", [1, 2])
def test_the_rest(simulate: Run, fake_nccl: str, tmp_path: Path, tp_size: int) -> None:
    """An audit found: The workspace of attention was in no plan, and grew while serving. Now: Made once with the cache,
    at its bound, and planned.
    """
    settings = {"INFINILM_EMULATOR_DEVICES": str(tp_size), "INFINILM_EMULATOR_MEMORY_MB": "64"}
    outcome = simulate(
        "memory_cases:the_rest", settings=settings, folder=str(tmp_path), nccl=fake_nccl, tp_size=tp_size
    )
    assert outcome.ok, outcome.text


def test_nothing_is_left(simulate: Run, tmp_path: Path) -> None:
    settings = {"INFINILM_EMULATOR_MEMORY_MB": "64"}
    outcome = simulate("memory_cases:nothing_is_left", settings=settings, folder=str(tmp_path))
    assert outcome.ok, outcome.text


def test_nothing_to_pin(simulate: Run, tmp_path: Path) -> None:
    outcome = simulate("memory_cases:nothing_to_pin", folder=str(tmp_path))
    assert outcome.ok, outcome.text


def test_refused_for_another_reason(simulate: Run, tmp_path: Path) -> None:
    """An audit found: Any failing allocation was "out of device memory: lower kv_cache". Now: Only that error is;
    others have their name.

    It fails where this was planted: Every allocation that fails is told as memory that is used up.
    """
    outcome = simulate("memory_cases:refused_for_another_reason", folder=str(tmp_path))
    assert outcome.ok, outcome.text
