"""Pages that name tests as what shows a claim: these tests exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize(("page", "least"), [("cuda-audit.md", 30), ("formats.md", 25)])
def test_named_tests_exist(page: str, least: int) -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (TESTS.parent / "docs" / page).read_text())
    assert len(named) > least
    missing = [f"{path}::{test}" for path, test in named if f"def {test}(" not in (TESTS / path).read_text()]
    assert not missing, missing
