"""Pages that name tests as what shows a claim: these tests, and their cases, exist."""

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


def test_named_cases_exist() -> None:
    named = re.findall(r"`([\w/]+\.py)::\w+` \((\w+(?:, \w+)*)\)", (TESTS.parent / "docs/cuda-audit.md").read_text())
    cases = [(path, case) for path, names in named for case in names.split(", ")]
    assert len(cases) > 8
    missing = [f"{path}: {case}" for path, case in cases if f'"{case}"' not in (TESTS / path).read_text()]
    assert not missing, missing
