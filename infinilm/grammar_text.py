"""Grammars as texts, before anything compiles them: of which dialect they are, and what is too much in them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from infinilm.errors import RequestError
from infinilm.extras import how_to_install
from infinilm.json_schema import LENIENT, enforceable_schema

__all__ = ["as_lark", "enforceable_grammar"]

_MAX_GBNF_BYTES = 64 * 1024  # its converter is written in Python
# llguidance follows rules by recursion, and the stack ends near 2,000 of them.
_MAX_CHAIN = 400
_MAX_ALTERNATIVES = 10_000

# The parts of a Lark grammar, as llguidance's lexer has them: comments, texts, regular expressions and special tokens
# hide the others. A text that is not closed hides the rest, so that the next of its marks is not tried, too: llguidance
# refuses it.
_PARTS = re.compile(
    r"""(?P<hidden>(?:\#|//)[^\n]*|"(?:\\.|[^"\\])*"?|/(?:\\.|[^/\\])+/?|<[^<>\s]+>)"""
    r"|(?P<json>%(?:json|regex|llguidance)\b)|(?P<operator>[&~])|(?P<option>\b(?:stop|temperature)\s*=)"
    r"|(?:\A|\n)[ \t]*[?!]?(?P<first>[A-Za-z_]\w*)|(?P<name>[A-Za-z_]\w*)|(?P<bar>\|)"
)
# What stands between the name of a rule and its body: options in brackets, a priority, parameters. No two parts of it
# match the same text, and none goes beyond a line, so that the time is linear.
_DEFINES = re.compile(r"""(?:\s*(?:\.-?\d+|::\w+|\[(?:"(?:\\.|[^"\\\n])*"|[^\]"\n])*\]))*\s*:(?!:)""")
_SPACE = re.compile(r"\s*")
_SEPARATORS = {"item_separator", "key_separator", "whitespace_flexible", "whitespace_pattern"}
_GBNF = re.compile(r"^[ \t]*root[ \t]*::=", re.MULTILINE)


def as_lark(text: str, name: str) -> str:
    """A grammar in Lark, of GBNF if that is what it is."""
    if not _GBNF.search(text):
        return text
    if len(text) > _MAX_GBNF_BYTES:
        raise RequestError(f"{name}: a grammar in GBNF may have {_MAX_GBNF_BYTES} characters, this one has {len(text)}")
    try:
        from llguidance.gbnf_to_lark import gbnf_to_lark
    except ImportError:
        raise RequestError(
            f"{name}: a grammar in GBNF needs the package llguidance: {how_to_install('constraint')}"
        ) from None
    try:
        return str(gbnf_to_lark(text))
    except RecursionError:
        raise RequestError(f"{name}: the grammar in GBNF is nested too deeply") from None
    except Exception as error:  # it looks up names that are not there, among others
        raise RequestError(f"{name}: the grammar in GBNF cannot be read: {error}") from None


def enforceable_grammar(text: str, name: str) -> str:
    """A grammar in Lark, the schemas in it in the form that can be enforced; RequestError: it costs too much."""
    made: list[str] = []
    uses: dict[str, list[str]] = {}  # names in the body of each rule
    used: list[str] = []
    num_bars = place = kept = 0
    while part := _PARTS.search(text, place):
        place = part.end()
        if part["operator"]:
            raise RequestError(f"{name}: the operator {part[0]} of grammars is not supported: nothing bounds its cost")
        if part["option"]:
            option = part[0].rstrip("= \t\r\n")
            raise RequestError(f"{name}: the option {option!r} of grammars is not supported; use suffix or lazy")
        if part["first"] and _DEFINES.match(text, place):
            used = uses.setdefault(part["first"], [])
        elif name_used := part["first"] or part["name"]:
            used.append(name_used)
        elif part["bar"]:
            num_bars += 1
        elif part["json"]:
            try:
                value, place = json.JSONDecoder().raw_decode(text, _SPACE.match(text, place).end())  # type: ignore[union-attr]
            except (ValueError, RecursionError) as error:
                raise RequestError(f"{name}: what follows {part[0]} is not JSON: {error}") from None
            if part[0] == "%json" and isinstance(value, dict):
                made += [text[kept : part.end()], " ", json.dumps(_json_of_grammar(value, name), ensure_ascii=False)]
                kept = place
    if num_bars > _MAX_ALTERNATIVES:
        raise RequestError(f"{name}: a grammar may have {_MAX_ALTERNATIVES} alternatives, this one has {num_bars}")
    _check_chains(uses, name)
    return "".join([*made, text[kept:]])


def _json_of_grammar(schema: dict[str, Any], name: str) -> dict[str, Any]:
    options = schema.pop("x-guidance", {})  # about space between the parts, and whether it is strict
    if not isinstance(options, dict) or not options.keys() <= _SEPARATORS | LENIENT.keys():
        allowed = ", ".join(sorted(_SEPARATORS | LENIENT.keys()))
        raise RequestError(f"{name}: x-guidance may have {allowed} here")
    made = enforceable_schema(schema, name, strict=options.get("lenient") is not True).schema
    return {**made, "x-guidance": options} if options else made


def _check_chains(uses: Mapping[str, Sequence[str]], name: str) -> None:
    """Follow the rules as llguidance does, which goes to the end of each first."""
    seen: set[str] = set()
    for rule in uses:
        chain = [iter((rule,))]
        while chain:
            inner = next(chain[-1], None)
            if inner is None:
                chain.pop()
            elif inner in uses and inner not in seen:
                seen.add(inner)
                chain.append(iter(uses[inner]))
                if len(chain) > _MAX_CHAIN:
                    raise RequestError(
                        f"{name}: the grammar costs too much: a chain of more than {_MAX_CHAIN} rules is in it"
                    )
