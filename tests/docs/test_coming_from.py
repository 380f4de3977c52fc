"""docs/coming-from.md names commands, options and keywords: those of infinilm exist."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import infinilm
from infinilm.cli.arguments import subcommands
from infinilm.cli.main import make_parser

PAGE = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text(encoding="utf-8")
ROWS = [row for row in re.findall(r"^\| (.*?) \| (.*?) \|$", PAGE, re.MULTILINE) if "---" not in row[0]]
OURS = [code for _, ours in ROWS for code in re.findall(r"`([^`]+)`", ours)]
COMMANDS = subcommands(make_parser())


def calls() -> Iterator[ast.Call]:
    for code in OURS:
        try:
            tree = ast.parse(code, mode="eval")
        except SyntaxError:  # a command, or the end of a call
            continue
        yield from (node for node in ast.walk(tree) if isinstance(node, ast.Call))


@pytest.mark.parametrize("command", [code for code in OURS if code.startswith("infinilm ")])
def test_commands(command: str) -> None:
    _, name, *arguments = shlex.split(command)
    options = COMMANDS[name]._option_string_actions
    assert all(argument in options for argument in arguments if argument.startswith("-"))


def test_options() -> None:
    known = {option for parser in COMMANDS.values() for option in parser._option_string_actions}
    named = {code.split()[0] for code in OURS if code.startswith("--")}
    assert len(named) > 3 and named <= known


def test_keywords() -> None:
    """Keywords of calls; `Constraint` and methods of an `LLM` are found by their names."""
    checked = 0
    for call in calls():
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        owner = getattr(call.func, "value", None)
        made = "llm" if isinstance(owner, ast.Call) else getattr(owner, "id", "")  # `LLM(id).generate(text)`
        place = {"llm": infinilm.LLM, "Constraint": infinilm.Constraint}.get(made, infinilm)
        function = getattr(place, name)
        known = inspect.signature(function).parameters
        assert all(keyword.arg in known for keyword in call.keywords), (name, sorted(known))
        checked += 1
    assert checked > 8
