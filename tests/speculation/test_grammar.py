"""Tokens that a grammar forces are drafted: answers have the same bits, and take fewer steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from infinilm import LLM, Constraint
from infinilm.speculation.grammar import follow_grammar
from speculation.drafters import counts, told

NAMES = ("customer_name", "shipping_address", "order_status", "preferred_colour")
SCHEMA = {
    "type": "object",
    "properties": {
        **{name: {"enum": ["large", "small", "none"]} for name in NAMES},
        "number_of_items": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": [*NAMES, "number_of_items"],
    "additionalProperties": False,
}
JSON = Constraint.json_schema(SCHEMA)


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM("demo", use_tqdm=False) as made:
        yield made


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Nothing is drafted but what grammars force."""
    with LLM("demo", use_tqdm=False, speculation=follow_grammar) as made:
        yield made


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("more", [{}, {"logprobs": 2}, {"n": 3}, {"min_tokens": 4, "frequency_penalty": 0.2}], ids=repr)
def test_keys_of_a_schema(llm: LLM, plain: LLM, temperature: float, more: dict[str, Any]) -> None:
    sampling: dict[str, Any] = {"temperature": temperature, "seed": 3, "max_tokens": 200, "use_tqdm": False, **more}
    alone = told(plain.generate("A form:", constraint=JSON, **sampling))
    before = llm.metrics().num_steps
    outputs = llm.generate("A form:", constraint=JSON, **sampling)
    assert told(outputs) == alone
    longest = max(len(completion.token_ids) for completion in outputs[0].outputs)
    assert longest >= 1.5 * (llm.metrics().num_steps - before), "1.5 tokens a step"
    for completion in outputs[0].outputs:
        assert set(json.loads(completion.text)) == set(SCHEMA["required"])


@pytest.mark.parametrize(
    ("pattern", "is_drafted"),
    [("(Tom had a red ball\\. ){3}", True), ("[a-z]{8}", False), ("a|b", False), ("the (cat|dog) sat down\\.", True)],
)
def test_patterns(llm: LLM, plain: LLM, pattern: str, is_drafted: bool) -> None:
    sampling: dict[str, Any] = {"seed": 3, "logprobs": 1, "use_tqdm": False}
    alone = told(plain.generate("Once", constraint=Constraint.regex(pattern), **sampling))
    before = counts(llm)
    assert told(llm.generate("Once", constraint=Constraint.regex(pattern), **sampling)) == alone
    assert (counts(llm)[0] > before[0]) == is_drafted


def test_requests_without_a_constraint_draft_nothing(llm: LLM) -> None:
    before = counts(llm)
    llm.generate("Once", max_tokens=5, use_tqdm=False)
    llm.generate("Once", max_tokens=5, min_tokens=3, allowed_token_ids=[5], use_tqdm=False)
    assert counts(llm) == before


def test_forced_tokens_are_not_taken_in(plain: LLM) -> None:
    matcher = plain.grammars.matcher(JSON)
    forced = matcher.forced_tokens()
    text = b"".join(plain.tokenizer.token_bytes(token_id) for token_id in forced)
    assert text == b'{"customer_name":'
    assert matcher.forced_tokens() == forced
    for i, token_id in enumerate(forced, 1):
        matcher.advance(token_id)
        assert matcher.forced_tokens() == forced[i:]
