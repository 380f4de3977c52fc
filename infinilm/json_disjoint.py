"""Whether two JSON schemas exclude each other, so that `oneOf` of them is `anyOf`, which can be enforced.

What is seen is what programs write: types, constants, and objects with a property that tells them apart.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from infinilm.json_references import References

__all__ = ["exclude_each_other"]

_MAX_DEPTH = 4  # of properties within properties, and of references that are followed
_MAX_PARTS = 128  # of which each is compared with each
_TYPES = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))


def exclude_each_other(schemas: Sequence[Any], references: References) -> bool:
    """Whether no value satisfies two of these; False where it is not seen."""
    if len(schemas) > _MAX_PARTS:
        return False
    return all(_are_disjoint(a, b, references, _MAX_DEPTH) for a, b in combinations(schemas, 2))


def _are_disjoint(a: Any, b: Any, references: References, depth: int) -> bool:
    a, b = _resolved(a, references), _resolved(b, references)
    if a is False or b is False:
        return True
    if depth == 0 or not (isinstance(a, Mapping) and isinstance(b, Mapping)):
        return False
    for one, other in ((a, b), (b, a)):
        parts = one.get("anyOf") or one.get("oneOf")
        if isinstance(parts, list) and all(_are_disjoint(part, other, references, depth - 1) for part in parts):
            return True
    common = _types(a) & _types(b)
    if not common:
        return True
    values_a, values_b = _values(a), _values(b)
    if values_a is not None and values_b is not None and not values_a & values_b:
        return True
    return common == {"object"} and _objects_are_disjoint(a, b, references, depth)


def _objects_are_disjoint(a: Mapping[str, Any], b: Mapping[str, Any], references: References, depth: int) -> bool:
    """Whether a property that both must have differs, or one must have a property that the other must not."""
    for one, other in ((a, b), (b, a)):
        known, others = one.get("properties", {}), other.get("properties", {})
        required, also = one.get("required", ()), other.get("required", ())
        if not all(isinstance(part, (Mapping, list, tuple)) for part in (known, others, required, also)):
            return False
        for name in required:
            if name in also and name in known and name in others:
                if _are_disjoint(known[name], others[name], references, depth - 1):
                    return True
            elif other.get("additionalProperties") is False and name not in others and "patternProperties" not in other:
                return True
    return False


def _resolved(schema: Any, references: References) -> Any:
    """The schema itself, behind references and `allOf` of one."""
    for _ in range(_MAX_DEPTH):
        if not isinstance(schema, Mapping):
            return schema
        parts = schema.get("allOf")
        if isinstance(schema.get("$ref"), str) and (target := references.target(schema)) is not None:
            schema = target
        elif isinstance(parts, list) and len(parts) == 1 and "type" not in schema and "properties" not in schema:
            schema = parts[0]
        else:
            break
    return schema


def _types(schema: Mapping[str, Any]) -> set[str]:
    said = schema.get("type", _TYPES)
    types = {said} if isinstance(said, str) else {name for name in said if isinstance(name, str)}
    if "number" in types:
        types.add("integer")
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return types & set(map(_type_of, values)) if isinstance(values, list) else types


def _type_of(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "integer" if float(value).is_integer() else "number"
    if value is None:
        return "null"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _values(schema: Mapping[str, Any]) -> set[str] | None:
    """The values that a schema lists, as texts; None: it lists none."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not isinstance(values, list):
        return None
    whole = (int(v) if isinstance(v, float) and v.is_integer() else v for v in values)  # 1.0 is 1
    return {json.dumps(value, sort_keys=True) for value in whole}
