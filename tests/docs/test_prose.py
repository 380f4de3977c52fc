"""Comments and docstrings say who does what: habits that made them hard to read do not come back.

C++, CUDA and JavaScript are read for their comments, Python for its comments and docstrings.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("infinilm", "src", "cuda", "bench", "tools", "tests")
# A comment that begins with "Those of" lacks its subject, as does each sentence that begins with "Of". Pronouns hide
# which thread or user is meant.
HABITS = {
    "fragment": re.compile(r"^(That of|Those of|Whose)\b|(^|(?<=[.!?] ))Of\b"),
    "pronoun": re.compile(r"\b(nobody|no one(?!-)|somebody|whoever)\b", re.IGNORECASE),  # a comment names who is meant
    # Two unnamed things in one clause, unless they are a list ("what was expected and what came").
    "unnamed": re.compile(r"\bwhat\b[^,.;:()]*(?<!\band )\bwhat\b", re.IGNORECASE),
}


def line_comments(text: str) -> Iterator[str]:
    """Each comment of C++ or JavaScript: lines of `//` that follow each other are one."""
    for block in re.findall(r"(?:(?:^|(?<=[^:\"]))//[^\n]*(?:\n[ \t]*(?=//))?)+", text, re.MULTILINE):
        yield " ".join(line.strip().removeprefix("//").strip() for line in block.splitlines())


def python_texts(text: str) -> Iterator[str]:
    """Each comment of Python, where lines of `#` that follow each other are one, and each part of a docstring.

    A part is a paragraph, or the description that is indented below a parameter.
    """
    comment, last = "", -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            follows = last == token.start[0] - 1 and token.line.lstrip().startswith("#")
            if comment and not follows:
                yield comment
            comment = f"{comment} {token.string}" if follows else token.string
            comment, last = comment.lstrip("# "), token.start[0]
    if comment:
        yield comment
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(node.value.value)):
                yield from map(str.strip, _descriptions(paragraph))


def _descriptions(paragraph: str) -> Iterator[str]:
    """A paragraph in parts, each of which begins where lines are further to the right than the one before."""
    part: list[str] = []
    for line in paragraph.splitlines():
        if part and _indent(line) > _indent(part[-1]) and not part[-1].rstrip().endswith((",", "and", "the")):
            yield " ".join(part)
            part = []
        part.append(line)
    yield " ".join(part)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


LANGUAGES: dict[str, Callable[[str], Iterator[str]]] = {
    ".py": python_texts,
    ".js": line_comments,
    ".mjs": line_comments,
    ".h": line_comments,
    ".cpp": line_comments,
    ".cu": line_comments,
    ".cuh": line_comments,
}


def faults(text: str, suffix: str) -> list[str]:
    texts = LANGUAGES[suffix](text)
    return [f"{habit}: {each}" for each in texts for habit, fits in HABITS.items() if fits.search(each)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_comments_have_subjects(folder: str) -> None:
    paths = [path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in LANGUAGES]
    texts = {str(path.relative_to(ROOT)): faults(path.read_text(encoding="utf-8"), path.suffix) for path in paths}
    assert len(texts) > 10
    assert not {path: found for path, found in texts.items() if found}


@pytest.mark.parametrize(
    ("suffix", "text", "count"),
    [
        (".h", "int a;  // Of a row.\n", 1),
        (".cpp", "    // Waits until\n    // nobody reads.\n", 1),
        (".js", "// Rows\n// Of a matrix.\n", 0),  # within a sentence
        (".cu", 'const char* url = "http://nobody";\n', 0),
        (".js", "let b  // of the row\n", 0),
        (".py", "a = 1  # Of a row.\n", 1),
        (".py", "# Waits until\n# nobody reads.\n", 1),
        (".py", "# Rows\n# Of a matrix.\n", 0),
        (".py", 'a = "nobody"\n', 0),
        (".py", 'def f():\n    """Those of a row."""\n', 1),
        (".py", 'def f():\n    """A row.\n\n    x : int\n        Of the row.\n    """\n', 1),
        (".py", 'def f():\n    """A row\n    Of a matrix, made with no one-shot sum.\n    """\n', 0),
        (".py", 'a = 1\n"""Whose it is."""\n', 1),
        (".py", "# What is read is what was written.\n", 1),
        (".py", "# It reads what fits what is there.\n", 1),
        (".py", "# What is read, and what is not.\n", 0),
        (".py", "# It names what was expected and what came.\n", 0),
        (".py", "# Rows are sorted. Of equal ones the first counts.\n", 1),
    ],
)
def test_a_habit_is_found(suffix: str, text: str, count: int) -> None:
    assert len(faults(text, suffix)) == count
