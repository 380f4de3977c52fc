"""Whether two JSON schemas exclude each other, so that `oneOf` of them is `anyOf`, which can be enforced.

It sees the forms that programs write: types, constants, and objects with a property that tells them apart.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from infinilm.json_references import References

__all__ = ["Exclusions"]

_MAX_DEPTH = 4  # of properties within properties, and of references that are followed
_MAX_PARTS = 128  # of which each is compared with each
# In all of a schema: each takes a microsecond or two, and sixteen names or values as long as one comparison.
_MAX_COMPARED = 20_000
_NAMES_PER_COMPARISON = 16
_TYPES = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))


class Exclusions:
    """Compares the parts of one schema, as far as that costs little.

    Parameters
    ----------
    references : References
        The references of the schema.
    """

    def __init__(self, references: References) -> None:
        self._references = references
        self._num_compared = 0
        self._facts: dict[int, _Facts] = {}  # by the id of a schema, which lives as long as the references

    def exclude_each_other(self, schemas: Sequence[Any]) -> bool:
        """Whether no value satisfies two of these; False where it is not seen, or not at a bearable cost."""
        if len(schemas) > _MAX_PARTS:
            return False
        return all(self._are_disjoint(a, b, _MAX_DEPTH) for a, b in combinations(schemas, 2))

    def _are_disjoint(self, a: Any, b: Any, depth: int) -> bool:
        self._num_compared += 1
        if self._num_compared > _MAX_COMPARED:
            return False
        a, b = self._resolved(a), self._resolved(b)
        if a is False or b is False:
            return True
        if depth == 0 or not (isinstance(a, Mapping) and isinstance(b, Mapping)):
            return False
        for one, other in ((a, b), (b, a)):
            parts = one.get("anyOf") or one.get("oneOf")
            if isinstance(parts, list) and all(self._are_disjoint(part, other, depth - 1) for part in parts):
                return True
        about_a, about_b = self._facts_of(a), self._facts_of(b)
        common = about_a.types & about_b.types
        if not common:
            return True
        if about_a.values is not None and about_b.values is not None:
            self._num_compared += min(len(about_a.values), len(about_b.values)) // _NAMES_PER_COMPARISON
            if about_a.values.isdisjoint(about_b.values):
                return True
        return common == {"object"} and self._objects_are_disjoint(about_a, about_b, depth)

    def _objects_are_disjoint(self, a: _Facts, b: _Facts, depth: int) -> bool:
        """Whether a property that both must have differs, or one must have a property that the other must not."""
        self._num_compared += (len(a.required) + len(b.required)) // _NAMES_PER_COMPARISON
        both = (name for name in a.required if name in b.required and name in a.properties and name in b.properties)
        if any(self._are_disjoint(a.properties[name], b.properties[name], depth - 1) for name in both):
            return True
        return any(
            other.is_closed and any(name not in other.properties for name in one.required)
            for one, other in ((a, b), (b, a))
        )

    def _resolved(self, schema: Any) -> Any:
        """The schema itself, behind references and `allOf` of one."""
        for _ in range(_MAX_DEPTH):
            if not isinstance(schema, Mapping):
                return schema
            parts = schema.get("allOf")
            if isinstance(schema.get("$ref"), str) and (target := self._references.target(schema)) is not None:
                schema = target
            elif isinstance(parts, list) and len(parts) == 1 and "type" not in schema and "properties" not in schema:
                schema = parts[0]
            else:
                break
        return schema

    def _facts_of(self, schema: Mapping[str, Any]) -> _Facts:
        if id(schema) not in self._facts:
            self._facts[id(schema)] = _Facts(schema)
        return self._facts[id(schema)]


class _Facts:
    """What a schema says of its values. Parts of it that are no schema, which are refused elsewhere, say nothing.

    Attributes
    ----------
    types : set of str
    values : set of str or None
        The values that it lists, as texts; None: it lists none.
    properties : mapping of str to schema
    required : dict
        Its keys are the names of required properties, in their order.
    is_closed : bool
        Whether there are no properties but those.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
        values = listed if isinstance(listed, list) else None
        self.types = _types(schema.get("type"), values)
        self.values = None if values is None else {json.dumps(_whole(value), sort_keys=True) for value in values}
        properties, required = schema.get("properties"), schema.get("required")
        self.properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        names = required if isinstance(required, list) else ()
        self.required = dict.fromkeys(name for name in names if isinstance(name, str))
        self.is_closed = schema.get("additionalProperties") is False and "patternProperties" not in schema


def _types(said: object, values: list[Any] | None) -> set[str]:
    names = [said] if isinstance(said, str) else said if isinstance(said, list) else _TYPES
    types = {name for name in names if isinstance(name, str)}
    if "number" in types:
        types.add("integer")
    return types if values is None else types & set(map(_type_of, values))


def _type_of(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "integer" if value == value // 1 else "number"
    if value is None:
        return "null"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _whole(value: Any) -> Any:
    """The value, where 1.0 is 1."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
