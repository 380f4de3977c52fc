"""`Constraint`: what a text must look like. A value that is made once and given to any number of requests."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from infinilm.checks import short_repr
from infinilm.errors import RequestError
from infinilm.json_schema import check_schema

__all__ = ["Constraint"]

_MAX_BYTES = {"json_schema": 256 * 1024, "regex": 16 * 1024, "choice": 128 * 1024, "grammar": 512 * 1024}


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the whole text of an answer must be; made by one of the class methods, not by its fields.

    An answer that ends because of a token limit or a stop string is cut, and then matches only as far as it goes. Equal
    constraints have equal hashes and share one compiled grammar.

    Attributes
    ----------
    kind : str
        "json_schema", "regex", "choice" or "grammar".
    text : str
        The schema or the choices as JSON, the regular expression, or the grammar.
    name : str
        What messages call it; two constraints that differ in this alone are equal.

    Raises
    ------
    TypeError
        A value of the wrong type.
    RequestError
        It can never be enforced, or is too large; names the part, such as ``$.properties.age.uniqueItems``.
    """

    kind: str
    text: str
    name: str = field(default="constraint", compare=False)

    def __post_init__(self) -> None:
        """Check the size, and what needs no model."""
        if self.kind not in _MAX_BYTES:
            raise RequestError(f"{self.name}: kind must be one of {', '.join(_MAX_BYTES)}, got {self.kind!r}")
        _check_text(self.text, self.kind, self.name)
        if self.kind == "json_schema":
            check_schema(_read_json(self.text, self.name), self.name)
        elif self.kind == "grammar":
            _check_grammar(self.text, self.name)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str | Any, *, name: str = "constraint") -> Constraint:
        """JSON that a schema describes: a dict, JSON text, or a class with `model_json_schema` (pydantic).

        Properties come in the order of the schema. Between the parts of the JSON there is at most one space, after
        commas and colons.
        """
        if hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        if isinstance(schema, str):
            schema = _read_json(schema, name)
        if not isinstance(schema, Mapping):
            raise TypeError(f"{name}: a schema must be a dict, got {short_repr(schema)}")
        try:
            text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            what = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise RequestError(f"{name}: the schema is not JSON: {what}") from None
        return cls("json_schema", text, name)

    @classmethod
    def json_object(cls, *, name: str = "constraint") -> Constraint:
        """Any JSON object."""
        return cls("json_schema", '{"type": "object"}', name)

    @classmethod
    def regex(cls, pattern: str, *, name: str = "constraint") -> Constraint:
        """Text that a regular expression matches as a whole, in the syntax of Rust's regex: without look-around."""
        return cls("regex", pattern, name)

    @classmethod
    def choice(cls, choices: Sequence[str], *, name: str = "constraint") -> Constraint:
        """One of some texts, none of them empty."""
        if isinstance(choices, str) or not isinstance(choices, Sequence):
            raise TypeError(f"{name}: choices must be a list of str, got {short_repr(choices)}")
        for i, choice in enumerate(choices):
            if not isinstance(choice, str):
                raise TypeError(f"{name}: choice {i} must be a str, got {short_repr(choice)}")
            if not choice:
                raise RequestError(f"{name}: choice {i} must not be the empty text")
            _check_text(choice, "choice", name)
        if not choices:
            raise RequestError(f"{name}: expected at least one choice, got none")
        return cls("choice", json.dumps(list(choices)), name)

    @classmethod
    def grammar(cls, text: str, *, name: str = "constraint") -> Constraint:
        """Text of a context-free grammar, in llguidance's dialect of Lark; its first rule is `start`.

        `&` and `~` are refused, because nothing bounds what they cost, and so are the options `stop` and `temperature`,
        which have no effect here.
        """
        return cls("grammar", text, name)


def _check_text(text: object, kind: str, name: str) -> None:
    if not isinstance(text, str):
        raise TypeError(f"{name}: a {kind} must be a str, got {short_repr(text)}")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise RequestError(f"{name}: the {kind} is not valid Unicode: it has a lone surrogate") from None
    if size > _MAX_BYTES[kind]:
        raise RequestError(f"{name}: a {kind} may have {_MAX_BYTES[kind]} bytes, this one has {size}")
    if not text:
        raise RequestError(f"{name}: the {kind} is empty")


def _read_json(text: str, name: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        what = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RequestError(f"{name}: the schema is not JSON: {what}") from None
    if not isinstance(value, Mapping):
        raise RequestError(f"{name}: a schema must be a JSON object, got {short_repr(value)}")
    return value


# The parts of a Lark grammar, as llguidance's lexer has them: comments, texts, regular expressions and special tokens
# hide the others.
_PARTS = re.compile(
    r"""(?P<hidden>(?:\#|//)[^\n]*|"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/|<[^<>\s]+>)"""
    r"|(?P<json>%(?:json|regex|llguidance)\b)|(?P<operator>[&~])|(?P<option>\b(?:stop|temperature)\s*=)"
)
_SPACE = re.compile(r"\s*")
_SEPARATORS = {"item_separator", "key_separator", "whitespace_flexible", "whitespace_pattern"}


def _check_grammar(text: str, name: str) -> None:
    place = 0
    while part := _PARTS.search(text, place):
        place = part.end()
        if part["operator"]:
            raise RequestError(f"{name}: the operator {part[0]} of grammars is not supported: nothing bounds its cost")
        if part["option"]:
            option = part[0].rstrip("= \t\r\n")
            raise RequestError(f"{name}: the option {option!r} of grammars is not supported; use suffix or lazy")
        if part["json"]:
            try:
                value, place = json.JSONDecoder().raw_decode(text, _SPACE.match(text, place).end())  # type: ignore[union-attr]
            except (ValueError, RecursionError) as error:
                raise RequestError(f"{name}: what follows {part[0]} is not JSON: {error}") from None
            if part[0] == "%json" and isinstance(value, dict):
                options = value.pop("x-guidance", {})  # about space between the parts, or to enforce less
                if not isinstance(options, dict) or not options.keys() <= _SEPARATORS:
                    raise RequestError(f"{name}: x-guidance may have {', '.join(sorted(_SEPARATORS))} here")
                check_schema(value, name)
