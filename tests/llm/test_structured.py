"""Constrained texts of the bundled model, which knows nothing of JSON: an answer that ends is as it was asked for."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import event, given, settings, strategies as st

from infinilm import LLM, Constraint, RequestError, SamplingParams

pytestmark = pytest.mark.one_rank  # grammars are made before a step, whose masks test_constraints.py has on ranks

NAMES = st.text('abcdefgh_é "\\\n', min_size=1, max_size=6)
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", seed=0, use_tqdm=False) as made:
        yield made


def bounds(low: str, high: str, most: int) -> st.SearchStrategy[dict[str, int]]:
    pairs = st.tuples(st.integers(0, most), st.integers(0, most)).map(sorted)
    return pairs.map(lambda pair: {low: pair[0], high: pair[1]})


def integers() -> st.SearchStrategy[dict[str, Any]]:
    pairs = st.tuples(st.integers(-1000, 1000), st.integers(0, 500))
    return pairs.map(lambda pair: {"type": "integer", "minimum": pair[0], "maximum": pair[0] + pair[1]})


def objects(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    def make(properties: dict[str, Any], required: set[int], extra: bool | dict[str, Any]) -> dict[str, Any]:
        names = [name for i, name in enumerate(properties) if i in required]
        return {"type": "object", "properties": properties, "required": names, "additionalProperties": extra}

    properties = st.dictionaries(NAMES, values, max_size=4)
    return st.builds(make, properties, st.sets(st.integers(0, 3)), st.sampled_from([False, False, {"type": "null"}]))


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    texts = st.fixed_dictionaries({"type": st.just("string")}, optional={})
    leaves = st.one_of(
        st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"type": "string", "format": "ipv4"}]),
        st.sampled_from([{"type": "string", "pattern": "^[a-c]{1,3}x$"}, {"type": ["null", "boolean"]}]),
        integers(),
        st.builds(lambda text, limits: {**text, **limits}, texts, bounds("minLength", "maxLength", 8)),
        st.lists(st.one_of(NAMES, st.integers(-5, 5), st.none()), min_size=1, max_size=4).map(lambda e: {"enum": e}),
        st.one_of(NAMES, st.booleans()).map(lambda value: {"const": value}),
    )
    arrays = lambda inner: st.builds(  # noqa: E731
        lambda items, limits: {"type": "array", "items": items, **limits}, inner, bounds("minItems", "maxItems", 3)
    )
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            objects(inner),
            objects(inner),
            arrays(inner),
            st.lists(inner, min_size=1, max_size=3).map(lambda listed: {"anyOf": listed}),
        ),
        max_leaves=6,
    )  # fmt: skip


def check(schema: Any, text: str) -> None:
    jsonschema.validate(json.loads(text), schema)


@settings(max_examples=40)
@given(schema=schemas(), seed=st.integers(0, 2**32), temperature=st.sampled_from([0.0, 1.0, 3.0]))
def test_what_ends_fits_its_schema(llm: LLM, schema: dict[str, Any], seed: int, temperature: float) -> None:
    params = SamplingParams(
        constraint=Constraint.json_schema(schema), seed=seed, temperature=temperature, max_tokens=400, n=2
    )
    (output,) = llm.generate(PROMPT, params, use_tqdm=False)
    for choice in output.outputs:
        event(str(choice.finish_reason))
        if choice.finish_reason == "stop":
            check(schema, choice.text)
        else:
            assert len(choice.token_ids) == 400
            assert "additionalProperties" in str(schema), "only names of properties have no bound here"


REGEXES = [
    r"[0-9]{3}-[0-9]{4}", r"(yes|no|maybe)!{1,3}", r"[A-Z][a-z]{2,10}( [A-Z][a-z]{2,10}){0,2}", r"(a+)+b", r"(x+x+)+y",
    r"[^a-z\n]{5,20}", r"é{2}😀?", r"((a|b){1,10}c){1,5}", r"\$\d{1,6}\.\d\d",
]  # fmt: skip


@pytest.mark.parametrize("regex", REGEXES)
def test_regexes(llm: LLM, regex: str) -> None:
    constraint = Constraint.regex(regex)
    (output,) = llm.generate(PROMPT, constraint=constraint, temperature=1.5, n=4, max_tokens=200, use_tqdm=False)
    ended = [choice.text for choice in output.outputs if choice.finish_reason == "stop"]
    assert ended or "+" in regex
    for text in ended:
        assert re.fullmatch(regex, text), text


@settings(max_examples=30)
@given(choices=st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=6), seed=st.integers(0, 2**32))
def test_one_of_the_choices(llm: LLM, choices: list[str], seed: int) -> None:
    (output,) = llm.generate(
        PROMPT, constraint=Constraint.choice(choices), seed=seed, temperature=2.0, n=3, max_tokens=300, use_tqdm=False
    )
    for choice in output.outputs:
        assert choice.finish_reason == "stop" and choice.text in choices


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "ages": {"type": "array", "items": {"enum": [1, 2]}}},
    "required": ["name", "ages"],
    "additionalProperties": False,
}
CONSTRAINT = Constraint.json_schema(SCHEMA)


def company() -> tuple[list[str], list[SamplingParams]]:
    """Requests of all kinds, constrained and not, some of whose tokens the host draws."""
    prompts, params = [], []
    for i, changes in enumerate(
        [
            {"constraint": CONSTRAINT}, {}, {"constraint": Constraint.regex("[a-z ]{5,40}")},
            {"constraint": CONSTRAINT, "logprobs": 2}, {"constraint": CONSTRAINT, "temperature": 0.0},
            {"constraint": CONSTRAINT, "frequency_penalty": 0.5}, {"constraint": CONSTRAINT, "top_k": 5, "min_p": 0.01},
            {"constraint": CONSTRAINT, "min_tokens": 30}, {"constraint": CONSTRAINT, "stop": "ages"}, {"logprobs": 1},
        ]
    ):  # fmt: skip
        prompts.append(f"{PROMPT} number {i}")
        params.append(SamplingParams(**{"seed": i, "max_tokens": 60, **changes}))  # type: ignore[arg-type]
    return prompts, params


def test_the_same_alone_and_in_company(llm: LLM) -> None:
    prompts, params = company()
    together = llm.generate(prompts, params, use_tqdm=False)
    for prompt, one, output in zip(prompts, params, together, strict=True):
        (alone,) = llm.generate(prompt, one, use_tqdm=False)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
        assert alone.outputs[0].text == output.outputs[0].text
        assert alone.outputs[0].logprobs == output.outputs[0].logprobs
        if one.constraint is CONSTRAINT and not one.stop and output.outputs[0].finish_reason == "stop":
            check(SCHEMA, output.outputs[0].text)


def test_streams_are_the_whole(llm: LLM) -> None:
    prompts, params = company()
    whole = llm.generate(prompts, params, use_tqdm=False)
    texts = [""] * len(prompts)
    for news in llm.stream(prompts, params):
        texts[news.index] += news.text
    assert texts == [output.outputs[0].text for output in whole]

    async def follow() -> str:
        return "".join([news.text async for news in llm.astream(prompts[0], params[0])])

    assert asyncio.run(follow()) == texts[0]


def test_stop_strings_and_limits_cut(llm: LLM) -> None:
    one = SamplingParams(constraint=CONSTRAINT, seed=1, max_tokens=200)
    (whole,) = llm.generate(PROMPT, one, use_tqdm=False)
    assert whole.outputs[0].finish_reason == "stop" and whole.outputs[0].stop_reason is None
    (cut,) = llm.generate(PROMPT, one, stop='"ages"', use_tqdm=False)
    assert (cut.outputs[0].stop_reason, cut.outputs[0].finish_reason) == ('"ages"', "stop")
    assert whole.outputs[0].text.startswith(cut.outputs[0].text)
    (short,) = llm.generate(PROMPT, one, max_tokens=4, use_tqdm=False)
    assert short.outputs[0].finish_reason == "length"
    assert whole.outputs[0].token_ids[:4] == short.outputs[0].token_ids


def test_min_tokens_end_where_the_constraint_does(llm: LLM) -> None:
    """Also where more tokens were asked for than it lets come; where it lets more come, they come."""
    (output,) = llm.generate(
        PROMPT, constraint=Constraint.choice(["abc"]), min_tokens=50, max_tokens=90, use_tqdm=False
    )
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("abc", "stop")
    (output,) = llm.generate(PROMPT, constraint=Constraint.regex("a+"), min_tokens=50, max_tokens=90, use_tqdm=False)
    assert len(output.outputs[0].token_ids) >= 50


def test_a_grammar_too_costly_ends_its_request_alone(llm: LLM) -> None:
    prompts, params = company()
    expected = llm.generate(prompts, params, use_tqdm=False)
    costly = SamplingParams(constraint=Constraint.regex(".*" * 200), max_tokens=200)
    *others, failed = llm.generate([*prompts, PROMPT], [*params, costly], use_tqdm=False)
    assert failed.outputs[0].finish_reason == "error"
    assert isinstance(failed.outputs[0].error, RequestError)
    assert [o.outputs[0].text for o in others] == [o.outputs[0].text for o in expected]


def test_nothing_runs_where_one_is_bad(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"constraint: .*unsatisfiable"):
        llm.generate([PROMPT, "x"], constraint=Constraint.json_schema({"allOf": [{"const": 1}, {"const": 2}]}))
    assert llm.metrics().num_running == 0
