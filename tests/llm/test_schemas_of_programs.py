"""Schemas as pydantic and zod write them, which take the answers of the bundled model."""

from __future__ import annotations

import datetime
import decimal
import enum
import ipaddress
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import jsonschema
import pydantic
import pytest
from pydantic import BaseModel, Field

from infinilm import LLM, Constraint

pytestmark = pytest.mark.one_rank  # grammars are made before a step, whose masks test_constraints.py has on ranks

ZOD = json.loads((Path(__file__).parent / "zod_schemas.json").read_text())
# Objects whose other properties have no end, and texts that are as long as a model makes them.
ENDLESS = ("loose", "catchall", "strings")
CHECKER = jsonschema.FormatChecker()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", use_tqdm=False) as made:
        yield made


def answers(llm: LLM, constraint: Constraint) -> list[str]:
    """The texts of a few answers that came to an end."""
    (output,) = llm.generate("x", constraint=constraint, n=4, seed=3, max_tokens=300, use_tqdm=False)
    return [choice.text for choice in output.outputs if choice.finish_reason == "stop"]


@pytest.mark.parametrize("name", ZOD)
def test_zod(llm: LLM, name: str) -> None:
    ended = answers(llm, Constraint.json_schema(ZOD[name]))
    assert ended or name.startswith(ENDLESS)
    for text in ended:
        jsonschema.validate(json.loads(text), ZOD[name], format_checker=CHECKER)


class Color(str, enum.Enum):
    RED = "red"
    BLUE = "blue"


class One(BaseModel):
    kind: Literal["one"]
    count: Annotated[int, Field(ge=0, le=9)]


class Two(BaseModel):
    kind: Literal["two"]
    flags: list[bool] = Field(default=[], max_length=3)


class Tree(BaseModel):
    value: bool
    children: list[Tree] = Field(default=[], max_length=2)


TEXT = Annotated[str, Field(max_length=12)]
FIELDS: dict[str, dict[str, Any]] = {
    "plain": {"name": TEXT, "age": int, "maybe": int | None},
    "enums": {"color": Color, "literal": Literal["a", 1, None]},
    "sets": {"colors": Annotated[set[Color], Field(max_length=2)], "frozen": frozenset[Color]},
    "dicts": {"literal": dict[Literal["a", "b"], int], "colors": dict[Color, bool]},
    "dicts by pattern": {"one": Annotated[dict[Annotated[str, Field(pattern="^k[0-9]$")], int], Field(max_length=1)]},
    "tuples": {"pair": tuple[int, bool], "many": Annotated[tuple[bool, ...], Field(max_length=3)]},
    "times": {"day": datetime.date, "time": datetime.time, "both": datetime.datetime, "span": datetime.timedelta},
    "ids": {"uuid": uuid.UUID, "four": pydantic.UUID4, "any": pydantic.IPvAnyAddress, "six": ipaddress.IPv6Address},
    "numbers": {"any": decimal.Decimal, "whole": pydantic.PositiveInt, "part": Annotated[float, Field(gt=0, le=0.5)]},
    "texts": {"code": Annotated[str, Field(pattern=r"^\S+ \d{2}$", max_length=12)], "secret": pydantic.SecretStr},
    "unions": {"either": One | Two, "told": Annotated[One | Two, Field(discriminator="kind")]},
    "texts of JSON": {"any": pydantic.Json, "list": pydantic.Json[tuple[int, ...]], "model": pydantic.Json[Two | None]},
    "nested": {"tree": Tree, "list": Annotated[list[One], Field(max_length=2)]},
}  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
def test_pydantic(llm: LLM, name: str) -> None:
    fields: dict[str, Any] = {key: (kind, ...) for key, kind in FIELDS[name].items()}
    model = pydantic.create_model("Model", **fields)
    ended = answers(llm, Constraint.json_schema(model))
    assert ended
    for text in ended:
        model.model_validate_json(text)
