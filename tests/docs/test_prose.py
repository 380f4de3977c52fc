"""Comments of the C++ and CUDA sources say who does what: habits that made them hard to read do not come back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("src", "cuda", "tests/cpp")
SUFFIXES = (".h", ".cpp", ".cu", ".cuh")
# A comment that begins with "Of" lacks its subject; these pronouns hide which thread, rank or user is meant.
HABITS = {
    "fragment": re.compile(r"^Of\b"),
    "pronoun": re.compile(r"\b(nobody|no one|somebody|whoever)\b", re.IGNORECASE),  # a comment names who is meant
}


def comments(text: str) -> Iterator[str]:
    """Each comment of C++ code: lines of `//` that follow each other are one."""
    for block in re.findall(r"(?:(?:^|(?<=[^:\"]))//[^\n]*(?:\n[ \t]*(?=//))?)+", text, re.MULTILINE):
        yield " ".join(line.strip().removeprefix("//").strip() for line in block.splitlines())


def faults(text: str) -> list[str]:
    return [
        f"{habit}: {comment}" for comment in comments(text) for habit, fits in HABITS.items() if fits.search(comment)
    ]


@pytest.mark.parametrize("folder", FOLDERS)
def test_comments_have_subjects(folder: str) -> None:
    paths = [path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in SUFFIXES]
    found = {str(path.relative_to(ROOT)): named for path in paths if (named := faults(path.read_text()))}
    assert not found


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("int a;  // Of a row.\n", 1),
        ("    // Waits until\n    // nobody reads.\n", 1),
        ("// Rows\n// Of a matrix.\n", 0),  # within a sentence
        ('const char* url = "http://nobody";\n', 0),
        ("int b;  // of the row\n", 0),
    ],
)
def test_a_habit_is_found(text: str, count: int) -> None:
    assert len(faults(text)) == count
