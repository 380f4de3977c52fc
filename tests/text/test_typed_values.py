"""Values that models write as plain text: what they are by the schema of a tool.

The cases are those of SGLang's test/registered/unit/function_call/test_glm47_schema_types.py and vLLM's
tests/tool_parsers/test_minimax_m2_tool_parser.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from infinilm.text.typed_values import typed_value, types_of

CASES: list[tuple[Any, str, Any]] = [
    *(
        ({"type": kinds}, "auto", "auto")
        for kinds in (["integer", "string"], ["object", "string"], ["boolean", "string"])
    ),
    *(({"type": "string"}, text, text) for text in ("null", "true", "1e2", "123_456", "\\d+", '{"a":1}', "[1,2]")),
    *(({"type": ["string", "object"]}, text, value) for text, value in (("7", "7"), ('{"ok": false}', {"ok": False}))),
    *(({"type": ["string", "integer"]}, text, value) for text, value in (("7", 7), ("true", "true"), ("null", "null"))),
    *(({"type": ["integer", "null"]}, text, value) for text, value in (("42", 42), ("null", None), ("nil", "nil"))),
    ({"type": ["string", "boolean"]}, "false", False),
    ({"type": ["string", "array"]}, "1e2", "1e2"),
    ({"type": "null"}, "null", None),
    ({"type": "number"}, "1.25e2", 125.0),
    ({"type": "number"}, "123abc", "123abc"),
    ({"type": "number"}, "", ""),
    ({"enum": ["ok", None]}, "null", None),
    ({"enum": ["7", None]}, "7", "7"),
    ({"enum": ["true", 7]}, "true", "true"),
    ({"const": 7}, "7", 7),
    ({"const": "null"}, "null", "null"),
    ({"anyOf": [{"type": "string", "enum": ["auto"]}, {"type": "integer"}]}, "7", 7),
    ({"oneOf": [{"type": "null"}, {"type": "array"}]}, "[1, 2]", [1, 2]),
    ({"allOf": [{"type": ["integer", "string"]}, {"type": "integer"}]}, "7", 7),
    ({}, "123_456", "123_456"),
    ({}, '{"ok": false}', {"ok": False}),
    ({"$ref": "#/$defs/a~1b~0c"}, "null", "null"),
    ({"$ref": "#/$defs/cycle"}, "auto", "auto"),
]
DEFS = {"a/b~c": {"type": "string"}, "cycle": {"$ref": "#/$defs/cycle"}}


@pytest.mark.parametrize(("schema", "text", "value"), CASES)
def test_a_value_is_what_its_schema_says(schema: Any, text: str, value: Any) -> None:
    """Also where the schema of all arguments is told by another one."""
    arguments = {"type": "object", "properties": {"key": schema}}
    for root in (
        {**arguments, "$defs": DEFS},
        {"$ref": "#/$defs/all", "$defs": {**DEFS, "all": arguments}},
        {"allOf": [{"required": ["key"]}, arguments], "$defs": DEFS},
    ):
        made = typed_value(text, types_of("key", root))
        assert made == value and type(made) is type(value)


def test_values_of_either_of_two_schemas() -> None:
    """No argument says which of the two it is: a number is one, which the other schema would have as a text."""
    text, count = ({"properties": {"key": {"type": kind}}} for kind in ("string", "integer"))
    for listed in ([text, count], [count, text]):
        assert typed_value("7", types_of("key", {"anyOf": listed})) == 7
        assert typed_value("auto", types_of("key", {"anyOf": listed})) == "auto"
