"""Pages that name tests as what shows a claim: these tests exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_named_tests_exist() -> None:
    named = [
        one
        for page in sorted((TESTS.parent / "docs").rglob("*.md"))
        for one in re.findall(r"`([\w/]+\.py)::(\w+)`", page.read_text())
    ]
    assert len(named) > 25
    missing = [f"{path}::{test}" for path, test in named if f"def {test}(" not in (TESTS / path).read_text()]
    assert not missing, missing
