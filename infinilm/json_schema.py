"""JSON schemas in a form that can be enforced while text is generated: what cannot is refused by its path, or left out.

llguidance, which makes grammars of schemas, reads draft 2020-12 and a part of its keywords. Some schemas cost it
minutes, and some end the process. So a schema is rewritten here first:

- An object that lists its properties and says nothing of others is closed. A model that may invent properties does not
  come to an end (llama.cpp's grammars/README.md says the same).
- Older drafts become the newest one. Annotations and unknown keywords go, unless they look like a misspelt keyword.
- Numbers, chains of references and patterns are bounded.

The keywords are those of llguidance 1.9 (its docs/json_schema.md).
"""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, NamedTuple, NoReturn
from urllib.parse import quote

from infinilm.checks import short_repr
from infinilm.errors import RequestError, did_you_mean
from infinilm.json_content import content_pattern
from infinilm.json_disjoint import Exclusions
from infinilm.json_keywords import misspelt
from infinilm.json_references import References, each_part_once, escaped, parts_of
from infinilm.json_strings import LIBRARY_FORMATS, PATTERNS, UNENFORCED_FORMATS, enforceable_pattern

__all__ = ["LENIENT", "EnforceableSchema", "child_schemas", "enforceable_schema"]

LENIENT: Mapping[str, bool] = {"lenient": True}
"""`x-guidance` of a schema of which llguidance, too, may leave out what it cannot enforce."""

_ONE = ("items", "additionalProperties")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_IN_PLACE = ("allOf", "anyOf", "oneOf")  # with $ref: they say more of the same value
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_NEVER_ENFORCED = (
    *("not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains", "propertyNames"),
    *("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties"),
    *("$dynamicRef", "$recursiveRef", "contentSchema"),
)
_ENFORCED = (
    *(*_ONE, *_LISTS, *_MAPS, *_BOUNDS, *_COUNTS, "$ref", "const", "enum", "type", "required", "pattern", "format"),
    *("multipleOf", "additionalItems"),
)
_ANNOTATIONS = (
    *("$schema", "$id", "id", "$anchor", "$comment", "title", "description", "default", "readOnly", "writeOnly"),
    *("examples", "example", "deprecated", "discriminator", "contentMediaType", "contentEncoding"),
    *("$dynamicAnchor", "$recursiveAnchor", "$vocabulary", "minContains", "maxContains"),
)
_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")

_MAX_DEPTH = 48
# A row of llguidance's parser, which has at most 2,000 items, has about four for each property that may be left out.
_MAX_OPTIONAL = 400
# The automaton of a multiple of n has n states, and that of a multiple of both a and b lcm(a, b) of them.
_MAX_MULTIPLE = 10_000
# llguidance compares the patterns of an object with each other.
_MAX_PATTERNS = 50
# It follows references by recursion, and the stack ends near 2,000 of them.
_MAX_CHAIN = 400
# Integers are 64-bit in llguidance, and near the ends of that range it does not come to an end.
_MAX_INTEGER = 2**62
_MAX_COUNT = 2**31
_MAX_LOOKS = 100_000
_MAX_UNKNOWN = 200  # keywords that are looked at for a misspelling


class EnforceableSchema(NamedTuple):
    """What `enforceable_schema` gives.

    Attributes
    ----------
    schema : dict
        In draft 2020-12. With `x-guidance` {"lenient": true} if it is not strict.
    relaxed : tuple of str
        Paths of what was left out, such as ``$.properties.tags.uniqueItems``.
    """

    schema: dict[str, Any]
    relaxed: tuple[str, ...]


def enforceable_schema(schema: Mapping[str, Any], name: str, *, strict: bool = True) -> EnforceableSchema:
    """Rewrite a schema so that it can be enforced, at a bearable cost. What is rewritten once stays as it is.

    Parameters
    ----------
    schema : mapping
        As of JSON.
    name : str
        Begins messages: "constraint".
    strict : bool
        Refuse what cannot be enforced. Otherwise it is left out, and its path told. A schema whose `x-guidance` is
        {"lenient": true} is not strict.

    Raises
    ------
    RequestError
        Names the path, such as ``constraint: $.properties.age.not``.
    """
    options = schema.get("x-guidance", {})
    if options not in ({}, LENIENT):
        raise RequestError(f"{name}: $.x-guidance may be {json.dumps(dict(LENIENT))} here, got {short_repr(options)}")
    reader = _Reader(each_part_once(schema), name, strict=strict and not options)
    made = reader.read()
    return EnforceableSchema(made, tuple(reader.relaxed))


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


def _in_place(schema: Mapping[str, Any]) -> Iterator[Any]:
    """The parts of `allOf`, `anyOf` and `oneOf`, which speak of the value that the schema speaks of."""
    for key in _IN_PLACE:
        if isinstance(schema.get(key), list):
            yield from schema[key]


def _is_composed(schema: Mapping[str, Any]) -> bool:
    """Whether more than one part of a schema, itself among them, says what an object must be."""
    keys = [key for key in (*_IN_PLACE, "$ref") if key in schema]
    parts = schema.get("allOf")
    several = len(keys) > 1 or (isinstance(parts, list) and len(parts) > 1)
    itself = ("properties", "patternProperties", "additionalProperties", "required", "propertyNames")
    return several or (bool(keys) and any(key in schema for key in itself))


class _Reader:
    """Rewrites one schema.

    Parameters
    ----------
    root : mapping
    name : str
    strict : bool
    """

    def __init__(self, root: Mapping[str, Any], name: str, *, strict: bool) -> None:
        self._root, self._name, self._strict = root, name, strict
        self.relaxed: list[str] = []
        self._references = References(root)
        self._exclusions = Exclusions(self._references)
        self._members = self._find_members()
        # By the pointer of a referenced schema: where it stands in the new one.
        self._places: dict[str, tuple[str, str]] = {}
        self._num_named: Counter[tuple[str, str]] = Counter()  # how often a place was wanted, or is taken
        self._waiting: list[str] = []
        self._uses: dict[str, list[str]] = {}  # from pointer to pointers
        self._here = "#"
        self._num_states = 0
        self._num_looks = 0
        self._num_unknown = 0
        multiples = (_multiple(schema.get("multipleOf")) for schema in self._references.schemas)
        self._all_multiples = list({number for number in multiples if number is not None})

    def read(self) -> dict[str, Any]:
        """The new schema."""
        made = self._visit(self._root, "$", 0)
        assert isinstance(made, dict)
        definitions: dict[str, dict[str, Any]] = {}
        while self._waiting:
            self._here = self._waiting.pop(0)
            container, key = self._places[self._here]
            path = "$" + "".join(f".{part}" for part in parts_of(self._here))
            definitions.setdefault(container, {})[key] = self._visit(self._references.find(self._here), path, 0)
        self._check_chains()
        made.update(definitions)
        return made if self._strict else {"x-guidance": dict(LENIENT), **made}

    # ---- refusing ----

    def _refuse(self, path: str, why: str) -> NoReturn:
        raise RequestError(f"{self._name}: {path} {why}")

    def _leave_out(self, path: str, why: str) -> None:
        """What cannot be enforced: refused, or left out and told."""
        if self._strict:
            self._refuse(path, why)
        self.relaxed.append(path)

    # ---- one schema ----

    def _visit(self, schema: object, path: str, depth: int) -> dict[str, Any] | bool:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            self._refuse(path, f"must be a schema, an object or true or false; got {short_repr(schema, 40)}")
        if depth > _MAX_DEPTH:
            self._refuse("the schema", f"is nested more than {_MAX_DEPTH} deep")
        self._check_keywords(schema, path)
        made: dict[str, Any] = {}
        for key, value in schema.items():  # in their order, which is that of the text
            if key == "items" or key == "prefixItems":
                self._add_items(made, schema, path, depth)
            elif key == "additionalProperties":
                made[key] = self._visit(value, f"{path}.{key}", depth + 1)
            elif key in _IN_PLACE:
                self._add_parts(made, schema, key, path, depth)
            elif key in ("properties", "patternProperties"):
                made[key] = self._visit_map(value, f"{path}.{key}", depth)
            elif key in ("const", "enum", "type", "required", "$ref", "pattern", "format"):
                getattr(self, f"_add_{key.lstrip('$')}")(made, value, f"{path}.{key}")
            elif key in _COUNTS:
                self._add_count(made, key, value, f"{path}.{key}")
        self._add_bounds(made, schema, path)
        self._add_multiple(made, schema, path)
        self._add_property_names(made, schema, path, depth)
        self._add_rest(made, schema, path)
        self._close(made, schema, path)
        self._check_properties(made, path)
        return made

    def _check_keywords(self, schema: Mapping[str, Any], path: str) -> None:
        """Unknown keywords are annotations (JSON Schema, 6.5), but a misspelt one was meant to be enforced."""
        for key in schema:
            known = key in _ENFORCED or key in _NEVER_ENFORCED or key in _ANNOTATIONS
            known = known or key.startswith(("x-", "$", "_"))  # beginnings by which extensions keep apart
            if known or self._num_unknown == _MAX_UNKNOWN:
                continue
            self._num_unknown += 1
            if meant := misspelt(key, (*_ENFORCED, *_NEVER_ENFORCED), _ANNOTATIONS):
                self._leave_out(f"{path}.{key}", f"is no keyword{did_you_mean(key, [meant])}")

    def _visit_list(self, value: object, path: str, depth: int) -> list[Any]:
        if not isinstance(value, list) or not value:
            self._refuse(path, f"must be a list of schemas; got {short_repr(value, 40)}")
        return [self._visit(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]

    def _add_parts(self, made: dict[str, Any], schema: Mapping[str, Any], key: str, path: str, depth: int) -> None:
        parts = self._visit_list(schema[key], f"{path}.{key}", depth)
        if key == "oneOf" and "anyOf" not in schema and self._exclusions.exclude_each_other(schema[key]):
            key = "anyOf"
        made[key] = [*made.get(key, ()), *parts]

    def _visit_map(self, value: object, path: str, depth: int) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            self._refuse(path, f"must be an object; got {short_repr(value, 40)}")
        made: dict[str, Any] = {}
        for key, item in value.items():
            name = key
            if path.endswith(".patternProperties"):
                name, why = enforceable_pattern(key)
                if why:
                    self._leave_out(f"{path}.{key}", f"cannot be enforced: {why}")
                    continue
            made[name] = self._visit(item, f"{path}.{key}", depth + 1)
        if path.endswith(".patternProperties") and len(made) > _MAX_PATTERNS:
            self._refuse(path, f"costs too much: {len(made)} patterns, and at most {_MAX_PATTERNS} may be")
        return made

    # ---- keywords ----

    def _add_items(self, made: dict[str, Any], schema: Mapping[str, Any], path: str, depth: int) -> None:
        """`items` and `prefixItems`, also as `items` and `additionalItems` of drafts before 2020-12."""
        first, rest, names = schema.get("prefixItems"), schema.get("items"), ("prefixItems", "items")
        if "items" in made or "prefixItems" in made:
            return
        if isinstance(rest, list):
            first, rest, names = rest, schema.get("additionalItems"), ("items", "additionalItems")
        if first:
            made["prefixItems"] = self._visit_list(first, f"{path}.{names[0]}", depth)
        if rest is not None:
            made["items"] = self._visit(rest, f"{path}.{names[1]}", depth + 1)

    def _add_const(self, made: dict[str, Any], value: object, path: str) -> None:
        if self._are_integers_known(value, path):
            made["const"] = value

    def _add_enum(self, made: dict[str, Any], value: object, path: str) -> None:
        if not isinstance(value, list) or not value:
            self._refuse(path, f"must be a list of values; got {short_repr(value, 40)}")
        if self._are_integers_known(value, path):
            made["enum"] = value

    def _are_integers_known(self, value: object, path: str) -> bool:
        waiting = [value]
        while waiting:
            item = waiting.pop()
            if isinstance(item, int) and abs(item) > _MAX_INTEGER:
                self._leave_out(path, f"cannot be enforced: {short_repr(item, 40)} is beyond 2**62")
                return False
            waiting += item.values() if isinstance(item, Mapping) else item if isinstance(item, list) else []
        return True

    def _add_type(self, made: dict[str, Any], value: object, path: str) -> None:
        for item in value if isinstance(value, list) and value else [value]:
            if not isinstance(item, str) or item not in _TYPES:
                hint = did_you_mean(item, _TYPES) if isinstance(item, str) else ""
                self._refuse(path, f"must be one of {', '.join(_TYPES)}, or a list of them; got {item!r}{hint}")
        made["type"] = value

    def _add_required(self, made: dict[str, Any], value: object, path: str) -> None:
        if isinstance(value, bool):  # of a property: draft 3
            self._leave_out(path, f"must be a list of names; got {value}")
        elif not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            self._refuse(path, f"must be a list of names; got {short_repr(value, 40)}")
        else:
            made["required"] = list(dict.fromkeys(value))

    def _add_ref(self, made: dict[str, Any], value: object, path: str) -> None:
        if not isinstance(value, str):
            self._refuse(path, f"must be a text such as '#/$defs/name'; got {short_repr(value, 40)}")
        pointer = self._references.pointer(value)
        if pointer is None:
            self._leave_out(path, f"cannot be enforced: {short_repr(value)} is not in this schema")
            return
        self._uses.setdefault(self._here, []).append(pointer)
        if pointer == "#":
            made["$ref"] = "#"
            return
        if pointer not in self._places:
            parts = parts_of(pointer)
            container = parts[0] if len(parts) == 2 and parts[0] == "definitions" else "$defs"
            wanted = key = parts[-1]
            while self._num_named[container, key]:
                key = f"{wanted}_{self._num_named[container, wanted]}"
                self._num_named[container, wanted] += 1
            self._num_named[container, key] += 1
            self._places[pointer] = (container, key)
            self._waiting.append(pointer)
        container, key = self._places[pointer]
        made["$ref"] = f"#/{container}/" + quote(escaped(key))

    def _add_pattern(self, made: dict[str, Any], value: object, path: str) -> None:
        if not isinstance(value, str):
            self._refuse(path, f"must be a regular expression; got {short_repr(value, 40)}")
        pattern, why = enforceable_pattern(value)
        if why:
            self._leave_out(path, f"cannot be enforced: {why}")
        else:
            _add_one(made, "pattern", pattern)

    def _add_format(self, made: dict[str, Any], value: object, path: str) -> None:
        if not isinstance(value, str):
            self._refuse(path, f"must be a text; got {short_repr(value, 40)}")
        if value in PATTERNS:
            _add_one(made, "pattern", PATTERNS[value])
            if value == "hostname":
                made["maxLength"] = min(made.get("maxLength", 253), 253)
        elif value in LIBRARY_FORMATS:
            made["format"] = value
        elif value in UNENFORCED_FORMATS:
            known = ", ".join(sorted((*LIBRARY_FORMATS, "date", "time", "date-time", "hostname")))
            self._leave_out(path, f"cannot be enforced: {value!r} is none of {known}")

    def _add_count(self, made: dict[str, Any], key: str, value: Any, path: str) -> None:
        if not _is_number(value) or value != int(value) or value < 0:
            self._refuse(path, f"must be an integer of at least 0; got {short_repr(value, 40)}")
        if value < _MAX_COUNT:
            most = made.get(key, value) if key == "maxLength" else value  # a hostname has a limit of its own
            made[key] = min(int(value), most)
        elif key.startswith("min"):
            self._refuse(path, f"costs too much: it may be less than {_MAX_COUNT}")

    def _add_bounds(self, made: dict[str, Any], schema: Mapping[str, Any], path: str) -> None:
        bounds = {key: schema[key] for key in _BOUNDS if key in schema}
        for key in ("Minimum", "Maximum"):  # draft 4: whether the other one is exclusive
            exclusive, plain = f"exclusive{key}", key.lower()
            if isinstance(bounds.get(exclusive), bool) and bounds.pop(exclusive) and plain in bounds:
                bounds[exclusive] = bounds.pop(plain)
        for key, value in bounds.items():
            if not _is_number(value):
                self._refuse(f"{path}.{key}", f"must be a number; got {short_repr(value, 40)}")
            if abs(value) <= _MAX_INTEGER:
                made[key] = value
            elif (value < 0) == key.endswith(("minimum", "Minimum")):  # answers keep to less than they may
                made[key.replace("exclusiveM", "m")] = -_MAX_INTEGER if value < 0 else _MAX_INTEGER
            else:
                self._leave_out(f"{path}.{key}", f"cannot be enforced: {short_repr(value, 40)} is beyond 2**62")
        if made.get("type") != "integer":
            self._mend_exclusive(made, schema)
        made |= {key: made.pop(key) for key in _BOUNDS if key in made}  # in one order, whatever was moved

    def _mend_exclusive(self, made: dict[str, Any], schema: Mapping[str, Any]) -> None:
        """Move an exclusive bound that is whole a little, where llguidance would let it through.

        That is where the other bound is less than 1 away. Parts of one value meet each other's bounds.
        """
        for exclusive, plain, others, sign in (
            ("exclusiveMinimum", "minimum", ("maximum", "exclusiveMaximum"), 1),
            ("exclusiveMaximum", "maximum", ("minimum", "exclusiveMinimum"), -1),
        ):
            value = made.get(exclusive)
            if value is None or value != int(value):
                continue
            distances = [sign * (made[key] - value) for key in others if key in made]
            if id(schema) in self._members or any(key in schema for key in (*_IN_PLACE, "$ref")):
                distances.append(0.5)
            if distances and 0 < min(distances) < 1:
                moved = value + sign * 10.0 ** (math.floor(math.log10(min(distances))) - 6)
                if moved != value:
                    del made[exclusive]
                    made[plain] = max(made.get(plain, moved), moved) if sign > 0 else min(made.get(plain, moved), moved)

    def _add_multiple(self, made: dict[str, Any], schema: Mapping[str, Any], path: str) -> None:
        value = schema.get("multipleOf")
        if value is None:
            return
        number = _multiple(value)
        if number is None:
            self._refuse(f"{path}.multipleOf", f"must be a number above 0, got {short_repr(value, 40)}")
        if value > _MAX_INTEGER:
            self._refuse(f"{path}.multipleOf", f"cannot be enforced: {short_repr(value, 40)} is beyond 2**62")
        self._num_states += _least_common([number])
        if max(self._num_states, _least_common(self._multiples_beside(schema, path))) > _MAX_MULTIPLE:
            self._refuse(
                f"{path}.multipleOf",
                f"costs too much: the least common multiple of those that meet in a value, and the sum of all of a "
                f"schema, without the decimal point, may be {_MAX_MULTIPLE} at most",
            )
        made["multipleOf"] = int(value) if value == int(value) else value

    def _multiples_beside(self, schema: Mapping[str, Any], path: str) -> list[Decimal]:
        """All `multipleOf` that may meet in a value of this schema; a part of another may meet any of them."""
        if id(schema) in self._members:
            return self._all_multiples
        parts = self._parts_of_value(schema, path)
        return [number for part in parts if (number := _multiple(part.get("multipleOf"))) is not None]

    def _parts_of_value(self, schema: Mapping[str, Any], path: str) -> list[Mapping[str, Any]]:
        """A schema and all that speak of the same value: parts of `allOf` and the like, and what is referenced."""
        found: dict[int, Mapping[str, Any]] = {}
        waiting: deque[Any] = deque([schema])
        while waiting:
            part = waiting.popleft()
            if isinstance(part, Mapping) and id(part) not in found:
                found[id(part)] = part
                waiting += [*_in_place(part), self._references.target(part)]
        self._num_looks += len(found)
        if self._num_looks > _MAX_LOOKS:
            self._refuse(path, "costs too much: the schema has too many parts that speak of the same value")
        return list(found.values())

    def _add_property_names(self, made: dict[str, Any], schema: Mapping[str, Any], path: str, depth: int) -> None:
        """`propertyNames` in the words of `properties`, `patternProperties` and `additionalProperties`."""
        names = schema.get("propertyNames")
        if names is None or names is True:
            return
        where = f"{path}.propertyNames"
        names = self._references.target(names) or names if isinstance(names, Mapping) else names
        said = set(names) - {*_ANNOTATIONS, "type"} if isinstance(names, Mapping) else {"not"}
        if isinstance(names, Mapping) and names.get("type", "string") == "string":
            others = made.get("additionalProperties", True)
            listed = names.get("enum", [names["const"]] if "const" in names else None)
            if not said:
                return
            if len(said) == 1 and isinstance(listed, list) and "patternProperties" not in made:
                known = made.get("properties", {})
                made["properties"] = {name: known.get(name, others) for name in listed if isinstance(name, str)}
                made["additionalProperties"] = False
                return
            if said <= {"pattern", "minLength", "maxLength"} and not {"properties", "patternProperties"} & set(made):
                pattern = names.get("pattern")
                if pattern is None:
                    pattern = f"^(?s:.){{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
                elif len(said) > 1:
                    self._leave_out(where, "cannot be enforced: it has both a pattern and a length")
                pattern, why = enforceable_pattern(str(pattern))
                if not why:
                    made["patternProperties"] = {pattern: others}
                    made["additionalProperties"] = False
                    return
        self._leave_out(where, "cannot be enforced beyond a pattern, a length, or a list of names")

    def _add_rest(self, made: dict[str, Any], schema: Mapping[str, Any], path: str) -> None:
        """Keywords that can be enforced in some cases alone, and those that never can."""
        alone = not any(key in schema for key in (*_IN_PLACE, "$ref"))
        self._add_content(made, schema, f"{path}.contentSchema")
        for key in _NEVER_ENFORCED:
            value = schema.get(key)
            if value is None or key in ("propertyNames", "minContains", "maxContains", "contentSchema"):
                continue
            if key == "uniqueItems" and (value is False or made.get("maxItems", 2) <= 1):
                continue
            if key in ("then", "else") and "if" not in schema:
                continue
            if key.startswith(("unevaluated", "depend")) and (value is True or value == {}):
                continue
            if key == "unevaluatedProperties" and value is False and alone:
                made.setdefault("additionalProperties", False)
            elif key == "unevaluatedItems" and value is False and alone:
                made.setdefault("items", False)
            else:
                self._leave_out(f"{path}.{key}", "is a keyword that cannot be enforced")

    def _add_content(self, made: dict[str, Any], schema: Mapping[str, Any], path: str) -> None:
        """`contentSchema` as a pattern; without `contentMediaType` it says nothing (JSON Schema, Validation, 8.5)."""
        content = schema.get("contentSchema")
        if content is None or "contentMediaType" not in schema:
            return
        pattern = content_pattern(content, self._references.target)
        if pattern is None or schema["contentMediaType"] != "application/json" or "contentEncoding" in schema:
            self._leave_out(path, "cannot be enforced: no regular expression says it")
        else:
            _add_one(made, "pattern", pattern)

    # ---- objects ----

    def _find_members(self) -> set[int]:
        """Ids of the schemas that say a part of what a value must be, by themselves or by reference.

        Such a part cannot be closed: it would forbid the properties of the others.
        """
        members: set[int] = set()
        for schema in self._references.schemas:
            inner = [*_in_place(schema), self._references.target(schema)] if _is_composed(schema) else []
            while inner:
                part = inner.pop()
                if isinstance(part, Mapping) and id(part) not in members:
                    members.add(id(part))
                    inner += [*_in_place(part), self._references.target(part)]
        return members

    def _close(self, made: dict[str, Any], schema: Mapping[str, Any], path: str) -> None:
        """Allow no more properties than are listed, where nothing is said of others."""
        if "additionalProperties" in made or id(schema) in self._members:
            return
        names: dict[str, None] | None = None
        if _is_composed(schema) or id(self._references.target(schema)) in self._members:
            names = self._names(schema, path)
        elif "properties" in made or "patternProperties" in made:
            names = dict.fromkeys(made.get("required", ()) if "patternProperties" not in made else ())
            names = names if names else {}
            made["additionalProperties"] = False
        if names:
            listed = made.get("properties", {})  # first, and in their order, which is that of the text
            made["properties"] = {**listed, **{name: True for name in names if name not in listed}}
            made["additionalProperties"] = False

    def _names(self, schema: Mapping[str, Any], path: str) -> dict[str, None] | None:
        """The properties that a schema and its parts list, in their order; None: one of them lets others be."""
        listed: dict[str, None] = {}
        required: dict[str, None] = {}
        for part in self._parts_of_value(schema, path):
            is_open = part.get("additionalProperties", False) is not False
            if is_open or "patternProperties" in part or ("$ref" in part and self._references.target(part) is None):
                return None
            for names, found in ((part.get("properties"), listed), (part.get("required"), required)):
                if isinstance(names, (Mapping, list)):
                    found |= dict.fromkeys(name for name in names if isinstance(name, str))
        return listed | required

    def _check_properties(self, made: dict[str, Any], path: str) -> None:
        required = set(made.get("required", ()))
        num_optional = len(made.get("properties", {}).keys() - required)
        if num_optional > _MAX_OPTIONAL:
            self._refuse(
                f"{path}.properties",
                f"costs too much: {num_optional} of them are not required, and at most {_MAX_OPTIONAL} may be",
            )
        if made.get("minProperties", 0) > max(1, len(required)):
            del made["minProperties"]
            self._leave_out(
                f"{path}.minProperties",
                f"cannot be enforced beyond 1 and the number of required ones ({len(required)}): names may repeat",
            )

    def _check_chains(self) -> None:
        """Follow the references as llguidance does, which goes to the end of each first."""
        seen = {"#"}
        chain = [iter(self._uses.get("#", ()))]
        while chain:
            pointer = next(chain[-1], None)
            if pointer is None:
                chain.pop()
            elif pointer not in seen:
                seen.add(pointer)
                chain.append(iter(self._uses.get(pointer, ())))
                if len(chain) > _MAX_CHAIN:
                    self._refuse("the schema", f"costs too much: a chain of more than {_MAX_CHAIN} $ref is in it")


def _add_one(made: dict[str, Any], key: str, value: Any) -> None:
    """Add a keyword that may be there already: both must hold."""
    if key in made:
        made.setdefault("allOf", []).append({key: value})
    else:
        made[key] = value


def _is_number(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _multiple(value: object) -> Decimal | None:
    return Decimal(str(value)).normalize() if _is_number(value) and value > 0 else None  # type: ignore[operator]


def _least_common(numbers: list[Decimal]) -> int:
    """The least common multiple of numbers, in units of the power of ten in which all of them are integers."""
    least = min(int(number.as_tuple().exponent) for number in numbers)
    if max(number.adjusted() for number in numbers) - least > 20:
        return _MAX_MULTIPLE + 1
    return math.lcm(*(int(number.scaleb(-least)) for number in numbers))
