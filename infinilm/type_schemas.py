"""JSON schemas of Python types, made by pydantic: of models, dataclasses, TypedDicts, and types such as list[Model]."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from functools import cache
from typing import Any, cast

from infinilm.checks import short_repr

__all__ = ["schema_of_type"]

_LARGE = 2.0**62


def schema_of_type(kind: Any, name: str) -> Any:
    """The JSON schema of what pydantic reads as a type.

    Parameters
    ----------
    kind : type
        Or another object with a method `model_json_schema`, which then gives it.
    name : str
        Begins messages.

    Raises
    ------
    TypeError
        It is no type, pydantic knows no schema of it, or pydantic is not installed.
    """
    own = getattr(kind, "model_json_schema", None)
    if not callable(own) and not isinstance(kind, type) and typing.get_origin(kind) is None:
        raise TypeError(f"{name}: a schema must be a dict, JSON text or a type, got {short_repr(kind)}")
    try:
        import pydantic
    except ImportError:
        if callable(own):
            return own()
        raise TypeError(
            f"{name}: the schema of {short_repr(kind)} needs pydantic; pip install pydantic, or give it as a dict"
        ) from None
    if callable(own) and not (isinstance(kind, type) and issubclass(kind, pydantic.BaseModel)):
        return own()
    try:
        if callable(own):
            return own(schema_generator=_generator())
        return pydantic.TypeAdapter(_readable(kind)).json_schema(schema_generator=_generator())
    except pydantic.errors.PydanticUserError as error:
        raise TypeError(f"{name}: pydantic makes no JSON schema of {short_repr(kind)}: {error}") from None


def _readable(kind: Any) -> Any:
    """A type that pydantic reads: of TypedDicts it reads those of `typing` from Python 3.12 on."""
    if not typing.is_typeddict(kind):
        return kind
    from typing_extensions import NotRequired, Required, TypedDict

    hints = typing.get_type_hints(kind)
    fields = {key: (Required if key in kind.__required_keys__ else NotRequired)[hints[key]] for key in hints}
    return cast(Any, TypedDict)(kind.__name__, fields)


@cache
def _generator() -> Any:
    """A generator of schemas without what pydantic itself does not ask of a value."""
    from pydantic.json_schema import GenerateJsonSchema

    class Generator(GenerateJsonSchema):
        def set_schema(self, schema: Any) -> Any:
            """A list in which a value comes twice is read as a set, too."""
            return _without_unique(super().set_schema(schema))

        def frozenset_schema(self, schema: Any) -> Any:
            return _without_unique(super().frozenset_schema(schema))

        def decimal_schema(self, schema: Any) -> Any:
            """A number alone: as a text, which may be one too, it would be any text. It is finite, so it has bounds."""
            known = {key: schema[key] for key in ("gt", "ge", "lt", "le", "multiple_of") if schema.get(key) is not None}
            bounds = {key: float(value) for key, value in known.items()}
            bounds |= {} if "gt" in bounds else {"ge": bounds.get("ge", -_LARGE)}
            bounds |= {} if "lt" in bounds else {"le": bounds.get("le", _LARGE)}
            return self.float_schema(cast(Any, {"type": "float", **bounds}))

    return Generator


def _without_unique(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key != "uniqueItems"}
