"""A text that holds JSON, by the schema of its content, as a regular expression: `contentSchema`, pydantic's `Json[T]`.

Grammars of JSON know no JSON within a text, whose quotes are escaped. A pattern of the text does: llguidance escapes
what it lets through. A regular expression has no recursion, so not every schema has one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["content_pattern"]

_MAX_DEPTH = 8
_MAX_LENGTH = 8192
_IGNORED = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
_INTEGER = "-?(0|[1-9][0-9]*)"
_STRING = r'"([^"\\\x00-\x1f]|\\["\\/bfnrt])*"'
_TYPES = {
    "null": "null",
    "boolean": "(true|false)",
    "integer": _INTEGER,
    "number": rf"{_INTEGER}(\.[0-9]+)?([eE][+-]?[0-9]{{1,2}})?",
    "string": _STRING,
}
_SCALAR = f"({'|'.join(_TYPES[name] for name in ('null', 'boolean', 'number', 'string'))})"


def content_pattern(schema: object, target: Callable[[object], object]) -> str | None:
    """The regular expression of texts whose content fits a schema, written without blanks; None: there is none.

    Parameters
    ----------
    schema : object
        As of JSON. Content that may be anything is a value, or an array or an object of values.
    target : callable
        Gives the schema that a schema refers to, or None.
    """
    try:
        body = _value(schema, target, 0)
    except _NoPatternError:
        return None
    return f"^{body}$" if len(body) <= _MAX_LENGTH else None


class _NoPatternError(Exception):
    """The schema says something that the patterns here cannot say."""


def _value(schema: object, target: Callable[[object], object], depth: int) -> str:
    if schema is True or schema == {}:
        return f"({_SCALAR}|{_array(_SCALAR)}|{_object_of(_SCALAR)})"
    if depth > _MAX_DEPTH or not isinstance(schema, Mapping):
        raise _NoPatternError
    said = {key: value for key, value in schema.items() if key not in _IGNORED}
    kind = said.pop("type", None)
    keys = set(said)

    def inner(part: object) -> str:
        body = _value(part, target, depth + 1)
        if len(body) > _MAX_LENGTH:
            raise _NoPatternError
        return body

    if keys == {"$ref"} and kind is None:
        return inner(target(schema))
    if keys == {"const"} or keys == {"enum"}:
        listed = said.get("enum", [said.get("const")])
        if not isinstance(listed, list) or not listed or not (kind is None or kind == _type_of(listed)):
            raise _NoPatternError
        return f"({'|'.join(re.escape(json.dumps(value, ensure_ascii=False)) for value in listed)})"
    if len(keys) == 1 and keys <= {"anyOf", "oneOf"} and kind is None:
        (parts,) = said.values()
        if not isinstance(parts, list) or not parts:
            raise _NoPatternError
        return f"({'|'.join(map(inner, parts))})"
    if kind == "array" and keys <= {"items", "minItems", "maxItems"}:
        return _array(inner(said.get("items", {})), said.get("minItems", 0), said.get("maxItems"))
    if kind == "object" and keys <= {"additionalProperties"}:
        return _object_of(inner(said.get("additionalProperties", {})))
    if kind == "object" and "properties" in keys and keys <= {"properties", "required", "additionalProperties"}:
        return _object(said, inner)
    if keys or not isinstance(kind, str) or kind not in _TYPES:
        raise _NoPatternError
    return _TYPES[kind]


def _type_of(values: list[object]) -> str | None:
    """The type that all values have; None: they have several, or one that is not looked at."""
    types = {type(value) for value in values}
    return {str: "string", bool: "boolean", int: "integer"}.get(types.pop()) if len(types) == 1 else None


def _array(item: str, least: object = 0, most: object = None) -> str:
    if type(least) is not int or not (most is None or type(most) is int):
        raise _NoPatternError
    if most is not None and not 0 < max(least, 1) <= most <= _MAX_LENGTH:
        raise _NoPatternError
    more = f"{item}(,{item}){{{max(least, 1) - 1},{'' if most is None else most - 1}}}"
    return rf"\[{more}\]" if least > 0 else rf"\[({more})?\]"


def _object_of(value: str) -> str:
    """An object of any names."""
    return rf"\{{({_STRING}:{value}(,{_STRING}:{value})*)?\}}"


def _object(said: Mapping[str, Any], inner: Callable[[object], str]) -> str:
    """A closed object, its properties in their order."""
    properties, required = said["properties"], said.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise _NoPatternError
    if not all(isinstance(name, str) and name in properties for name in required):
        raise _NoPatternError
    if said.get("additionalProperties", False) is not False:
        raise _NoPatternError
    behind = first = ""  # of the properties from one on: behind others, and where none has come before
    for name, part in reversed([*properties.items()]):
        one = f"{re.escape(json.dumps(name, ensure_ascii=False))}:{inner(part)}"
        if name in required:
            behind, first = f",{one}{behind}", f"{one}{behind}"
        else:
            behind, first = f"(,{one})?{behind}", f"({one}{behind}|{first})"
        if len(first) > _MAX_LENGTH:
            raise _NoPatternError
    return rf"\{{{first}\}}"
