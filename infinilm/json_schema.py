"""JSON schemas that can be enforced while text is generated: everything else is refused by its path.

llguidance, which makes grammars of schemas, ignores keywords that it does not know, and some that it knows can cost
minutes. So a schema is read here first. The keywords are those of llguidance 1.9 (its docs/json_schema.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, NoReturn

from infinilm.checks import short_repr
from infinilm.errors import RequestError, did_you_mean

__all__ = ["check_schema", "child_schemas"]

_ONE = ("items", "additionalProperties")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_ENFORCED = (
    *_ONE,
    *_LISTS,
    *_MAPS,
    *("$ref", "const", "enum", "type", "minItems", "maxItems", "required", "minProperties", "maxProperties"),
    *("minLength", "maxLength", "pattern", "format"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
)
# They say something about values, and allow or forbid none.
_ANNOTATIONS = (
    *("$schema", "$id", "id", "$anchor", "$comment", "title", "description", "default", "readOnly", "writeOnly"),
    *("examples", "example", "deprecated", "discriminator", "contentMediaType", "contentEncoding"),
)
# Keywords of JSON schema that nobody mistyped.
_NOT_ENFORCED = (
    *("not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains", "propertyNames"),
    *("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties"),
    *("additionalItems", "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$vocabulary", "x-guidance"),
)
_FORMATS = ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")

_MAX_DEPTH = 48
# A row of llguidance's parser, which has at most 2,000 items, has about four for each property that may be left out.
_MAX_OPTIONAL = 400
# The automaton of a multiple of n has n states, and that of a multiple of both a and b lcm(a, b) of them.
_MAX_MULTIPLE = 10_000


def check_schema(schema: Mapping[str, Any], name: str) -> None:
    """Refuse a schema that cannot be enforced, or not at a bearable cost.

    Parameters
    ----------
    schema : mapping
        As of JSON.
    name : str
        Begins messages: "constraint".

    Raises
    ------
    RequestError
        Names the path, such as ``constraint: $.properties.age.multipleOf``.
    """
    _Check(name).visit(schema, "$", 0)


def child_schemas(schema: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The schemas directly within a schema, with their paths from there: ".items", ".properties.age", ".anyOf[0]"."""
    found = [(f".{key}", schema[key]) for key in _ONE if key in schema]
    for key in _LISTS:
        items = schema.get(key)
        found += [(f".{key}[{i}]", item) for i, item in enumerate(items)] if isinstance(items, list) else []
    for key in _MAPS:
        items = schema.get(key)
        found += [(f".{key}.{name}", item) for name, item in items.items()] if isinstance(items, Mapping) else []
    return found


class _Check:
    def __init__(self, name: str) -> None:
        self._name = name
        self._multiple = 1  # the least that all numbers of the schema divide
        self._num_states = 0

    def _refuse(self, path: str, why: str) -> NoReturn:
        raise RequestError(f"{self._name}: {path} {why}")

    def visit(self, schema: object, path: str, depth: int) -> None:
        """Check a schema and all within it."""
        if isinstance(schema, bool):
            return
        if not isinstance(schema, Mapping):
            self._refuse(path, f"must be a schema, an object or true or false; got {short_repr(schema, 40)}")
        if depth > _MAX_DEPTH:
            self._refuse("the schema", f"is nested more than {_MAX_DEPTH} deep")
        for key in schema:
            if key not in _ENFORCED and key not in _ANNOTATIONS and (key == "x-guidance" or not key.startswith("x-")):
                hint = "" if key in _NOT_ENFORCED else did_you_mean(key, _ENFORCED)
                self._refuse(f"{path}.{key}", f"is a keyword that cannot be enforced{hint}")
        if isinstance(schema.get("items"), list):
            self._refuse(f"{path}.items", "cannot be enforced: it is a list; use prefixItems")
        self._check_format(schema, path)
        self._check_properties(schema, path)
        self._check_multiple(schema, path)
        for step, child in child_schemas(schema):
            self.visit(child, path + step, depth + 1)

    def _check_format(self, schema: Mapping[str, Any], path: str) -> None:
        kinds = schema.get("type", "string")
        if "format" in schema and ("string" in kinds if isinstance(kinds, (str, list)) else True):
            value = schema["format"]
            if not isinstance(value, str) or value not in _FORMATS:
                known = ", ".join(_FORMATS)
                self._refuse(f"{path}.format", f"cannot be enforced: {short_repr(value, 40)} is none of {known}")

    def _check_properties(self, schema: Mapping[str, Any], path: str) -> None:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        for key, value, kind in (("properties", properties, Mapping), ("required", required, list)):
            if not isinstance(value, kind):
                self._refuse(f"{path}.{key}", f"must be {'an object' if kind is Mapping else 'a list of names'}")
        if not all(isinstance(name, str) for name in required):
            self._refuse(f"{path}.required", "must be a list of names")
        num_optional = len(properties.keys() - set(required))
        if num_optional > _MAX_OPTIONAL:
            self._refuse(
                f"{path}.properties",
                f"costs too much: {num_optional} of them are not required, and at most {_MAX_OPTIONAL} may be",
            )
        least = schema.get("minProperties", 0)
        if isinstance(least, (int, float)) and least > max(1, len(set(required))):
            self._refuse(
                f"{path}.minProperties",
                f"cannot be enforced beyond 1 and the number of required ones ({len(set(required))}): names may repeat",
            )

    def _check_multiple(self, schema: Mapping[str, Any], path: str) -> None:
        value = schema.get("multipleOf")
        if value is None:
            return
        digits = 0
        try:
            number = Decimal(str(value)).normalize()
            digits = int("".join(map(str, number.as_tuple().digits[:20]))) if number > 0 and number.is_finite() else 0
        except InvalidOperation:
            pass
        if isinstance(value, bool) or digits == 0:
            self._refuse(f"{path}.multipleOf", f"must be a number above 0, got {short_repr(value, 40)}")
        self._multiple = math.lcm(self._multiple, digits)
        self._num_states += digits
        if max(self._multiple, self._num_states) > _MAX_MULTIPLE:
            self._refuse(
                f"{path}.multipleOf",
                f"costs too much: the least common multiple and the sum of all multipleOf of a schema, without the "
                f"decimal point, may be {_MAX_MULTIPLE} at most",
            )
