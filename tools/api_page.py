"""Writes docs/api.md: every public name of `infinilm` with its signature and docstring.

    python tools/api_page.py            writes it
    python tools/api_page.py --check    compares, and fails when it is out of date

Examples of docstrings are run by tests/docs/test_docstrings.py, those of docs/guide.md by tests/docs/test_blocks.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import infinilm

PAGE = Path(__file__).resolve().parents[1] / "docs/api.md"
WIDTH = 120
# Many methods take each of these as a keyword, which is left out where nothing is given. The page lists them once.
SAMPLING_FIELDS = {field.name for field in dataclasses.fields(infinilm.SamplingParams)}
HEAD = """\
# API

Every public name of `infinilm`, in alphabetical order. This page is written by `tools/api_page.py` from docstrings. The
[guide](guide.md) shows the same names by task, with examples.
"""


def signature(name: str, value: object) -> str:
    """The name with its parameters, one a line where they do not fit; empty where nothing is known of them."""
    try:
        made = inspect.signature(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
    parameters = [p for p in made.parameters.values() if p.name not in ("self", "cls")]
    sampling = [p for p in parameters if p.default is Ellipsis and p.name in SAMPLING_FIELDS]
    if sampling:
        kept = [p for p in parameters if p not in sampling]
        parameters = [*kept, inspect.Parameter("fields_of_SamplingParams", inspect.Parameter.VAR_KEYWORD)]
    made = made.replace(parameters=parameters)
    text = f"{name}{made}".replace("'", "")
    if len(text) > WIDTH:
        result = "" if made.return_annotation is made.empty else f" -> {made.return_annotation}"
        lines = []
        for parameter in parameters:
            if parameter.kind is parameter.KEYWORD_ONLY and "*," not in lines and "*" not in {p[:1] for p in lines}:
                lines.append("*,")
            lines.append(str(parameter).replace("'", "") + ",")
        text = "\n".join([f"{name}(", *(f"    {line}" for line in lines), f"){result}".replace("'", "")])
    return f"```text\n{text}\n```\n"


def prose(text: str) -> str:
    """A docstring as Markdown: headings of its sections are bold, and examples are blocks."""
    text = re.sub(r"^(\w[\w ]*)\n-{3,}$", r"**\1**\n", inspect.cleandoc(text), flags=re.MULTILINE)
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        example = line.lstrip().startswith((">>>", "..."))
        if example and not inside:
            lines.append("```pycon")
            inside = True
        elif inside and not line.strip():
            lines.append("```")
            inside = False
        lines.extend([line] if inside or len(line) <= WIDTH else textwrap.wrap(line, WIDTH))
    return "\n".join([*lines, *(["```"] if inside else [])]) + "\n"


def members(kind: type) -> Iterator[tuple[str, object]]:
    """Public methods and properties that a class has of its own or of a base in this package, in their order."""
    seen: set[str] = set()
    for base in kind.__mro__:
        if not base.__module__.startswith("infinilm"):
            continue
        for name, value in vars(base).items():
            found = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
            if name.startswith("_") or name in seen or not (callable(found) or isinstance(found, property)):
                continue
            seen.add(name)
            if found.__doc__:
                yield name, found


def fields(kind: type) -> str:
    """The public fields of a dataclass with their types and defaults."""
    lines = []
    for field in dataclasses.fields(kind):
        if field.name.startswith("_"):
            continue
        default = "" if field.default is dataclasses.MISSING else f" = {field.default!r}"
        lines.append(f"{field.name}: {field.type}{default}")
    return "\n".join(["```text", *lines, "```\n"])


def section(name: str, seen: dict[object, str]) -> str:
    """What the page says of a public name; objects that `seen` has under another name are told by that name."""
    value = getattr(infinilm, name)
    parts = [f"## {name}\n"]
    if value in seen:
        return "\n".join([*parts, f"Another name of `{seen[value]}`.\n"])
    seen[value] = name
    if inspect.isclass(value) and dataclasses.is_dataclass(value):
        parts.append(fields(value))
    elif callable(value) and not (inspect.isclass(value) and issubclass(value, BaseException)):
        parts.append(signature(f"infinilm.{name}", value))
    parts.append(prose(value.__doc__ or ""))
    if inspect.isclass(value) and not issubclass(value, BaseException):
        inherited: dict[str, list[str]] = {}
        for method, found in members(value):
            first = seen.setdefault(found, f"{name}.{method}")
            if first != f"{name}.{method}":
                inherited.setdefault(first.partition(".")[0], []).append(f"`{method}`")
                continue
            parts.append(f"### {name}.{method}\n")
            if not isinstance(found, property):
                parts.append(signature(method, found))
            parts.append(prose(found.__doc__ or ""))
        parts += [f"Inherited from `{base}`: {', '.join(names)}.\n" for base, names in inherited.items()]
    return "\n".join(part for part in parts if part)


def page() -> str:
    names = sorted(name for name in infinilm.__all__ if name != "__version__")
    seen: dict[object, str] = {}
    return "\n".join([HEAD, *(section(name, seen) for name in names)])


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes docs/api.md from docstrings.")
    parser.add_argument("--check", action="store_true", help="compare, and fail when it is out of date")
    if parser.parse_args().check:
        if PAGE.read_text(encoding="utf-8") != page():
            sys.exit("docs/api.md is out of date: python tools/api_page.py")
        return
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
