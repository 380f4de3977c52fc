"""The table of docs/chat-formats.md that says what works in each chat format: its cells are measured here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from text.test_chat_formats import ROWS, SCHEMAS, TABLE, prompt_of
from text.test_real_templates import FORMATS

from infinilm.text.answers import ChoiceMaker
from infinilm.text.chat_formats import ChatFormat
from infinilm.text.tool_calls import ToolCallFormat

PAGE = Path(__file__).parents[2] / "docs" / "chat-formats.md"
HEAD = "| format | render | reasoning | auto | forced | parallel | streamed | history |"
IDS = {"": "any ids", "short": "ids of nine", "counted": "`functions.NAME:COUNT`"}
YES, NO = "yes", "–"


def maker(row: ChatFormat, form: ToolCallFormat | None) -> ChoiceMaker:
    marks = row.reasoning or ("<think>", "</think>")
    return ChoiceMaker(
        prompt_of(row), reasoning=marks, form=form, schemas=SCHEMAS, answer=row.answer, has_channels=row.has_channels
    )


def thinks(row: ChatFormat) -> str:
    """Marks of its own, or those that the template of a model has."""
    begin, end = row.reasoning or ("<think>", "</think>")
    said = maker(row, row.calls).push(f"{begin}I look.{end}", final=True)
    return NO if said.reasoning != "I look." else YES if row.reasoning is not None else "by the template"


def calls_read(row: ChatFormat) -> int:
    """The most calls of an answer that are read from what a model writes by itself, also twice."""
    texts = [one.text for one in TABLE if one.name == row.name]
    said = [
        maker(row, row.calls).push(text, final=True)
        for text in [*texts, *(f"{text}\n{prompt_of(row)}{text}" for text in texts)]
    ]
    return max(len(one.tool_calls) for one in said)


def forced_read(row: ChatFormat) -> int:
    """Calls that are read from what a grammar makes a model write."""
    form = row.calls
    assert form is not None
    calls = []
    for name in ("weather", "time"):
        arguments = json.dumps({"city": "Bern"} if name == "weather" else {})
        values = {"$NAME": json.dumps(name), "$TOOL": name, "$COUNT": "0", "$ARGUMENTS": arguments}
        values |= {"$ID": "abcdefgh1", "$KEY": "a1b2c3d4e5"}
        calls.append(re.sub(r"\$[A-Z]+", lambda found: values[found[0]], form.pattern))  # noqa: B023 (called at once)
    said = maker(row, form.as_json()).push(form.around[0] + form.between.join(calls) + form.around[1], final=True)
    return 0 if said.content.strip() else len(said.tool_calls)


def is_streamed(row: ChatFormat) -> bool:
    """Whether arguments come before the call has ended."""
    (text, *_) = [one.text for one in TABLE if one.name == row.name and one.calls]
    cut = text.index("Zürich") + len("Zür")
    return any("Zür" in call["function"]["arguments"] for call in maker(row, row.calls).push(text[:cut]).tool_calls)


def measured() -> Iterator[str]:
    for name, row in ROWS.items():
        form = row.calls
        assert form is not None
        cells = [
            name,
            str(len(FORMATS.get(name, ()))) if FORMATS.get(name) else NO,
            thinks(row),
            YES if calls_read(row) else NO,
            YES if forced_read(row) else NO,
            YES if calls_read(row) > 1 else NO,
            YES if is_streamed(row) else "at its end",
            IDS[form.ids],
        ]
        yield f"| {' | '.join(cells)} |"


def test_the_table_says_what_is_so() -> None:
    lines = PAGE.read_text("utf-8").splitlines()
    assert HEAD in lines
    place = lines.index(HEAD) + 2
    written = lines[place : place + len(ROWS)]
    expected = list(measured())
    assert written == expected, "the table must be:\n" + "\n".join(
        [HEAD, "|---" * (HEAD.count("|") - 1) + "|", *expected]
    )


@pytest.mark.parametrize("name", ROWS)
def test_what_the_page_says_of_all_formats(name: str) -> None:
    """Calls are read on `auto` and where they are forced, in any number."""
    assert calls_read(ROWS[name]) and forced_read(ROWS[name]) == 2
