"""`Constraint`: what a text must look like. A value that is made once and given to any number of requests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from infinilm.checks import short_repr
from infinilm.errors import RequestError
from infinilm.grammar_text import as_lark, enforceable_grammar
from infinilm.json_schema import LENIENT, enforceable_schema
from infinilm.type_schemas import schema_of_type

__all__ = ["Constraint"]

_MAX_BYTES = {
    "json_schema": 256 * 1024,
    "regex": 16 * 1024,
    "choice": 128 * 1024,
    "grammar": 512 * 1024,
    "structural_tag": 256 * 1024,
}
_MAX_TAGS = 64


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the whole text of an answer must be; made by one of the class methods, not by its fields.

    An answer that ends because of a token limit or a stop string is cut, and then matches only as far as it goes. Equal
    constraints have equal hashes and share one compiled grammar.

    Attributes
    ----------
    kind : str
        "json_schema", "regex", "choice", "grammar" or "structural_tag".
    text : str
        The schema as it is enforced, the choices or the tags as JSON, the regular expression, or the grammar.
    name : str
        What messages call it; two constraints that differ in this alone are equal.
    relaxed : tuple of str
        Paths of what was left out of a schema that is not strict, such as ``$.properties.tags.uniqueItems``.

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
    relaxed: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        """Check the size, and what needs no model."""
        if self.kind not in _MAX_BYTES:
            raise RequestError(f"{self.name}: kind must be one of {', '.join(_MAX_BYTES)}, got {self.kind!r}")
        _check_text(self.text, self.kind, self.name)
        text = self.text
        if self.kind == "json_schema":
            made, relaxed = enforceable_schema(_read_json(text, self.name), self.name)
            text = _written(made, self.name)
            object.__setattr__(self, "relaxed", (*self.relaxed, *relaxed))
        elif self.kind == "structural_tag":
            text = _enforceable_tags(text, self.name)
        elif self.kind == "grammar":
            text = enforceable_grammar(as_lark(text, self.name), self.name)
        object.__setattr__(self, "text", text)

    @classmethod
    def json_schema(
        cls, schema: Mapping[str, Any] | bool | str | Any, *, strict: bool = True, name: str = "constraint"
    ) -> Constraint:
        """JSON that a schema describes: a dict, JSON text, or a type that pydantic knows.

        Such a type is a pydantic model, a dataclass, a TypedDict, or a type such as ``list[Model]``. Properties come in
        the order of the schema. Between the parts of the JSON there is at most one space, after commas and colons. An
        object that lists its properties has no others, unless `additionalProperties` lets them be.

        Parameters
        ----------
        schema : mapping, bool, str or type
        strict : bool
            Refuse keywords that cannot be enforced, such as `uniqueItems`. Otherwise they are left out, and their paths
            are in `relaxed`.
        name : str
            Begins messages.
        """
        if isinstance(schema, str):
            schema = _parsed(schema, name)
        elif not isinstance(schema, (Mapping, bool)):
            schema = schema_of_type(schema, name)
        if schema is True:
            schema = {}
        if not isinstance(schema, Mapping):
            raise RequestError(f"{name}: a schema must be a JSON object, got {short_repr(schema)}")
        return cls("json_schema", _written(schema if strict else {**schema, "x-guidance": LENIENT}, name), name)

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

        A grammar with the rule `root ::=` is in llama.cpp's GBNF. In Lark, `&` and `~` are refused, because nothing
        bounds what they cost, and so are the options `stop` and `temperature`, which have no effect here.
        """
        return cls("grammar", text, name)

    @classmethod
    def structural_tag(
        cls, structures: Sequence[Mapping[str, Any]], triggers: Sequence[str], *, name: str = "constraint"
    ) -> Constraint:
        """Free text in which a trigger, such as "<function=", begins JSON between two marks.

        Parameters
        ----------
        structures : sequence of mapping
            Each has "begin" and "end", the marks, and "schema", of the JSON between them.
        triggers : sequence of str
            Beginnings of "begin". Where the text has one, a structure that begins with it must follow.
        name : str
            Begins messages.
        """
        return cls("structural_tag", _written({"structures": structures, "triggers": triggers}, name), name)


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


def _parsed(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        what = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RequestError(f"{name}: the schema is not JSON: {what}") from None


def _read_json(text: str, name: str) -> Mapping[str, Any]:
    value = _parsed(text, name)
    if not isinstance(value, Mapping):
        raise RequestError(f"{name}: a schema must be a JSON object, got {short_repr(value)}")
    return value


def _written(value: Mapping[str, Any], name: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        what = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RequestError(f"{name}: the schema is not JSON: {what}") from None


def _enforceable_tags(text: str, name: str) -> str:
    """The structures and triggers of a structural tag, with schemas in the form that can be enforced."""
    value = _read_json(text, name)
    structures, triggers = value.get("structures"), value.get("triggers")
    for key, listed in (("structures", structures), ("triggers", triggers)):
        if not isinstance(listed, list) or not 0 < len(listed) <= _MAX_TAGS:
            raise RequestError(f"{name}: {key} must be a list of 1 to {_MAX_TAGS}; got {short_repr(listed, 40)}")
    made = []
    for i, structure in enumerate(structures or ()):
        where = f"{name}: structures[{i}]"
        parts = structure if isinstance(structure, Mapping) else {}
        begin, end, schema = parts.get("begin"), parts.get("end"), parts.get("schema", {})
        known = parts.keys() <= {"begin", "schema", "end"}
        if not (known and isinstance(begin, str) and isinstance(end, str) and isinstance(schema, (Mapping, bool))):
            raise RequestError(
                f"{where} must have the texts begin and end, a schema, and nothing else; got {short_repr(structure)}"
            )
        if not any(isinstance(trigger, str) and trigger and begin.startswith(trigger) for trigger in triggers or ()):
            raise RequestError(f"{where}.begin must begin with one of the triggers; got {begin!r}")
        schema = {} if schema is True else schema
        if schema is False:
            raise RequestError(f"{where}.schema: nothing satisfies it")
        made.append({"begin": begin, "schema": enforceable_schema(schema, f"{where}.schema").schema, "end": end})
    return _written({"structures": made, "triggers": triggers or []}, name)
