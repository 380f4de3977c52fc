"""Answers are read in linear time, whatever they are: the characters that the parsers look at are counted.

Not counted are those that `re` and `json` look at; they get texts of bounded length, or the arguments of a call once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from text.test_chat_formats import ROWS, SCHEMAS, TABLE, prompt_of

from infinilm.text import answers
from infinilm.text.answers import ChoiceMaker
from infinilm.text.chat_formats import ChatFormat
from infinilm.text.pieces import Pieces

LENGTH, TIMES = 1024, 3  # twice what a head of a call or a message may have at most


class Counted(str):
    """A text that counts how many of its characters are looked at or copied, and so are the texts made of it."""

    __slots__ = ()
    looked = 0

    def _count(self, number: int) -> None:
        Counted.looked += number

    def __add__(self, other: str) -> Counted:
        self._count(len(self) + len(other))
        return Counted(str.__add__(self, other))

    def __radd__(self, other: str) -> Counted:
        self._count(len(self) + len(other))
        return Counted(str.__add__(other, self))

    def __getitem__(self, key: Any) -> Counted:
        made = Counted(str.__getitem__(self, key))
        self._count(len(made))
        return made

    def __iter__(self) -> Iterator[str]:
        for char in str.__iter__(self):
            self._count(1)
            yield char

    def find(self, mark: str, *places: Any) -> int:
        found = str.find(self, mark, *places)
        self._count((found if found >= 0 else len(self)) - (places[0] if places else 0) + len(mark))
        return found

    def startswith(self, mark: Any, *places: Any) -> bool:
        self._count(len(mark) if isinstance(mark, str) else sum(map(len, mark)))
        return str.startswith(self, mark, *places)

    def partition(self, mark: str) -> Any:
        self._count(len(self))
        return tuple(map(Counted, str.partition(self, mark)))

    def _stripped(self, made: str) -> Counted:
        self._count(len(self))
        return Counted(made)

    def lstrip(self, *chars: Any) -> Counted:
        return self._stripped(str.lstrip(self, *chars))

    def strip(self, *chars: Any) -> Counted:
        return self._stripped(str.strip(self, *chars))

    def removeprefix(self, mark: str, /) -> Counted:
        return self._stripped(str.removeprefix(self, mark))

    def removesuffix(self, mark: str, /) -> Counted:
        return self._stripped(str.removesuffix(self, mark))


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each parser gets texts that count."""
    for name in ("ReasoningSplitter", "AnswerMarks", "ToolCallParser", "HarmonyParser"):
        kind = getattr(answers, name)

        def push(self: Any, text: str, push: Any = kind.push, **options: Any) -> Any:
            return push(self, Counted(text), **options)

        monkeypatch.setattr(kind, "push", push)


def hostile(row: ChatFormat) -> Iterator[tuple[str, str]]:
    """What an answer begins with, and what it goes on with again and again."""
    assert row.calls is not None
    form, tags = row.calls, row.calls.tags
    marks = {*form.marks, form.end, *form.hidden, *form.inner, *(row.reasoning or ()), *(row.answer or ()), *row.stray}
    marks |= {*tags.key, *tags.value, tags.end} if tags is not None else {"{"}
    calls = [said.text for said in TABLE if said.name == row.name and said.calls]
    begun = [calls[0][: calls[0].index("weather") + len(name)] for name in ("", "weather")]
    inside = calls[0][: calls[0].index("Zürich") + 3]
    for mark in sorted(marks - {""}):
        yield "", mark
        yield inside, mark
        yield "", mark[:-1] or mark
    for start in ("", *begun, inside, *calls):
        yield start, " "
        yield start, "x"
    for start, nested in ((begun[1], '{"a":'), (inside, '\\"'), (inside, '"}'), (begun[1], "["), ("", calls[0] + "\n")):
        yield start, nested


def looked(row: ChatFormat, text: str, length: int) -> int:
    """Characters that are looked at for an answer in pieces of a length."""
    maker = ChoiceMaker(
        prompt_of(row),
        reasoning=row.reasoning or ("<think>", "</think>"),
        form=row.calls,
        schemas=SCHEMAS,
        answer=row.answer,
        has_channels=row.has_channels,
        calls_end_reasoning=row.calls_end_reasoning,
        stray=row.stray,
    )
    Counted.looked = 0
    for place in range(0, len(text), length):
        maker.push(text[place : place + length])
    maker.push("", final=True)
    return Counted.looked


@pytest.mark.parametrize("row", ROWS.values(), ids=lambda row: row.name)
@pytest.mark.parametrize("length", [4, 10**9], ids=["tokens", "one piece"])
def test_answers_are_read_in_linear_time(row: ChatFormat, length: int) -> None:
    for start, more in hostile(row):
        short, long = (looked(row, start + more * (size // len(more)), length) for size in (LENGTH, LENGTH * TIMES))
        assert long < 2 * TIMES * short + 4 * LENGTH, (start, more, short, long)  # quadratic: TIMES * TIMES


def test_pieces_are_the_text() -> None:
    for text in (
        "a" * 1000,
        " " * 1000,
        "a" * 255 + " " * 300 + "b" * 300,
        " " * 300 + "x",
        "x" * 256 + " ",
        "ab " * 400,
    ):
        for length in (1, 3, 300, 10**9):
            made = Pieces()
            parts = [made.push(text[place : place + length]) for place in range(0, len(text), length)]
            assert "".join(part for pieces in [*parts, made.push("", final=True)] for part in pieces) == text
