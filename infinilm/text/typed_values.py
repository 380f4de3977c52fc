"""Values of arguments that models write as plain text: the JSON schema of a tool says what they are.

vLLM's parsers of these families go by the schema as well.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from infinilm.text.python_calls import read_value

__all__ = ["read_json", "typed_value", "types_of"]

_SPACE = " \t\r\n"
_WORDS = {"True": True, "False": False, "None": None}  # as templates write them that convert values to text by Python


def types_of(key: str, schema: Mapping[str, Any]) -> set[str]:
    """Types that the JSON schema of some arguments names for one of them, integers as numbers; none: it does not say.

    Parameters
    ----------
    key : str
        The name of the argument.
    schema : mapping
        JSON schema of all arguments, an object.
    """
    kinds: set[str] = set()
    for inner in _meanings(schema, schema):
        properties = inner.get("properties")
        kinds |= _kinds(properties.get(key) if isinstance(properties, Mapping) else None, schema)
    return kinds


def typed_value(text: str, kinds: Collection[str]) -> Any:
    """The value that a text is: a string where its types say so, otherwise JSON if it is, else a string.

    Parameters
    ----------
    text : str
    kinds : collection of str
        As `types_of` gives them.
    """
    kinds = set(kinds)
    if kinds == {"string"}:
        return text
    # Templates that show lists and objects by Python's words teach models to write them so.
    for read in (read_json, *((read_value,) if kinds & {"array", "object"} and "string" not in kinds else ())):
        try:
            value = read(text.strip(_SPACE))
            # Fails at half a character, which JSON can spell, and at a number that is too large to be one.
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, TypeError, RecursionError):
            continue
        return text if "string" in kinds and _kind(value) not in kinds - {"string"} else value
    return text


def read_json(text: str) -> Any:
    """A value in JSON, or one of Python's words for those of JSON. ValueError: it is none."""
    return _WORDS[text] if text in _WORDS else json.loads(text, parse_constant=_refuse)


def _refuse(word: str) -> Any:
    raise ValueError(word)  # NaN and Infinity, which are no JSON


def _kind(value: object) -> str:
    """The type of a value by the name that JSON schema gives it; integers are numbers."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    names = {str: "string", int: "number", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "")


def _kinds(schema: object, root: Mapping[str, Any]) -> set[str]:
    """Types that a schema names; `$ref` in it refers to the root."""
    kinds: set[str] = set()
    for inner in _meanings(schema, root):
        if (named := inner.get("type")) is not None:
            listed: Collection[Any] = named if isinstance(named, list) else [named]
            kinds |= {"number" if kind == "integer" else kind for kind in listed if isinstance(kind, str)}
        elif isinstance(values := inner.get("enum"), list):
            kinds |= {_kind(value) for value in values}
        elif "const" in inner:
            kinds.add(_kind(inner["const"]))
    return kinds


def _meanings(schema: object, root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A schema and all schemas that it is, by `anyOf`, `oneOf`, `allOf` and `$ref`, once each."""
    todo, seen = [schema], set[int]()
    while todo:
        inner = todo.pop()
        if not isinstance(inner, Mapping) or id(inner) in seen:
            continue
        seen.add(id(inner))
        yield inner
        for word in ("anyOf", "oneOf", "allOf"):
            if isinstance(listed := inner.get(word), list):
                todo += listed
        if isinstance(place := inner.get("$ref"), str) and place.startswith("#/"):
            found: object = root
            for name in place[2:].split("/"):
                found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
            todo.append(found)
