"""The page of the audit names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs/cuda-audit.md"


def test_named_tests_exist() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE.read_text())
    assert len(named) > 30
    missing = [f"{path}::{test}" for path, test in named if f"def {test}(" not in (TESTS / path).read_text()]
    assert not missing, missing
