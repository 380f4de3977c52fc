"""`bench/schema_suite.py`: both forms of the files, what is taken, and instances that are let through."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import schema_suite
from infinilm import Constraint

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CASE = {
    "schema": SCHEMA,
    "tests": [
        {"valid": True, "data": {"a": 1}},
        {"valid": True, "data": {"a": 1, "b": 2}},  # a property that is not listed
        {"valid": False, "data": {"a": "x"}},
    ],
}


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def test_both_forms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "One---a.json", CASE)
    write(tmp_path / "Two" / "a.json", SCHEMA)
    write(tmp_path / "Two" / "b.json", {"not": {}})
    schema_suite.main([str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:] == [
        "| One | 1 | 1.000 | 1.000 | 1 of 2 | 0 of 1 |",
        "| Two | 2 | 0.500 | 1.000 | 0 of 0 | 0 of 0 |",
    ]
    with pytest.raises(SystemExit):
        schema_suite.main([str(tmp_path), "--sets", "Three"])
    assert "has no set 'Three'; there are One, Two" in capsys.readouterr().err


def test_an_invalid_instance_that_is_let_through_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "One---a.json", CASE)
    anything = Constraint.json_object()
    monkeypatch.setattr(schema_suite.Constraint, "json_schema", lambda schema, strict: anything)
    schema_suite.main([str(tmp_path)])
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| One | 1 | 1.000 | 1.000 | 2 of 2 | 1 of 1 |",
        'One---a.json: {"a": "x"}',
    ]
