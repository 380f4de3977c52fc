"""Answers with forced or strict calls, said by no model: random tokens that the grammar allows, read by the parser."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import jsonschema
import numpy as np
import pytest

import infinilm
from infinilm import Constraint
from infinilm.text.call_grammar import AnswerGrammar, Tool
from infinilm.text.chat_formats import tool_call_format
from infinilm.text.grammars import GrammarMatcher, Grammars
from infinilm.text.reasoning import ReasoningSplitter
from infinilm.text.tokenizer import Tokenizer
from infinilm.text.tool_calls import PLAIN_CALLS, ToolCallDelta, ToolCallFormat, ToolCallParser

SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 8},
            "days": {"$ref": "#/$defs/days"},
            "tags": {"type": "array", "items": {"enum": ["}", "</tool_call>", '"']}, "maxItems": 2},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
        "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 14}},
    },
    "ti-me": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS = [Tool(name, schema) for name, schema in SCHEMAS.items()]
VOCAB_SIZE = 1600
THINK = ("<think>", "</think>")
MARKS = ["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<tool_call>", "</tool_call>", *THINK]


def form_of(template: str) -> ToolCallFormat:
    form = tool_call_format(template)
    assert form is not None
    return form


FORMS = {
    "hermes": form_of('<tool_call>{"name": '),
    "llama3": form_of("<|python_tag|>"),
    "mistral": form_of("[TOOL_CALLS]"),
    "mistral names": form_of("[TOOL_CALLS] [ARGS]"),
    "mistral ids": form_of("[TOOL_CALLS] [CALL_ID] [ARGS]"),
    "tagged": form_of("<tool_call>\n<function=").as_json(),
    "seed oss": form_of("<seed:tool_call><function=").as_json(),
    "plain": PLAIN_CALLS,
}


@pytest.fixture(scope="module", params=["marks are text", "marks are special tokens"])
def tokenizer(request: pytest.FixtureRequest, tokenizer_with: Callable[[Iterable[str]], Tokenizer]) -> Tokenizer:
    return tokenizer_with(MARKS if "special" in request.param else ())


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, VOCAB_SIZE)


def say(
    tokenizer: Tokenizer, matcher: GrammarMatcher, rng: np.random.Generator, most: int, begin: str = ""
) -> str | None:
    """A random text, after a beginning; None: it came to no end."""
    ids: list[int] = []
    row = np.empty(VOCAB_SIZE // 32, np.int32)
    for token_id in tokenizer.encode(begin, add_special_tokens=False):
        matcher.advance(token_id)
        ids.append(token_id)
    while not matcher.is_finished:
        if len(ids) >= most:
            return None
        matcher.fill(row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        token_id = int(rng.choice(allowed))
        if 1 in allowed and rng.random() < 0.3:
            token_id = 1
        matcher.advance(token_id)
        if token_id == 1:
            break
        ids.append(token_id)
    return tokenizer.decode(ids, skip_special_tokens=False)


def calls_of(form: ToolCallFormat, text: str, cut: int) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls, the text cut in two."""
    parser = ToolCallParser(form, SCHEMAS)
    deltas: list[ToolCallDelta] = [*parser.push(text[:cut]), *parser.push(text[cut:]), *parser.finish()]
    calls: list[tuple[str, str]] = []
    for delta in deltas:
        if delta.name is not None:
            calls.append((delta.name, ""))
        elif delta.index is not None:
            calls[delta.index] = (calls[delta.index][0], calls[delta.index][1] + delta.arguments)
    return "".join(delta.content for delta in deltas), calls


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_forced_calls(tokenizer: Tokenizer, grammars: Grammars, name: str, several: bool) -> None:
    """Calls, and nothing else, whose arguments fit: for any cut of the text."""
    form, rng = FORMS[name], np.random.default_rng(0)
    grammar = AnswerGrammar(tokenizer)
    text = grammar.text(grammar.calls(form, TOOLS, several=several), "", reasoning=None)
    numbers = []
    for _ in range(20):
        said = say(tokenizer, grammars.matcher(Constraint.grammar(text)), rng, 300)
        if said is None:
            continue
        content, calls = calls_of(form, said, 0)
        assert not content.strip(), said
        for function, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[function])
        for cut in range(1, len(said) + 1):
            content, same = calls_of(form, said, cut)
            assert not content.strip() and same == calls, said
        numbers.append(len(calls))
    assert len(numbers) > 5 and min(numbers) == 1 and (max(numbers) > 1) == several


@pytest.mark.parametrize("name", FORMS)
def test_calls_among_text(tokenizer: Tokenizer, grammars: Grammars, name: str) -> None:
    """Any text; once a call has begun, it is one of the tools and its arguments fit."""
    form, rng = FORMS[name], np.random.default_rng(1)
    grammar = AnswerGrammar(tokenizer)
    rule = grammar.among_text(form, TOOLS, several=True)
    constraint = Constraint.grammar(grammar.text(rule, "", reasoning=None))
    texts = [say(tokenizer, grammars.matcher(constraint), rng, 100, begin) for begin in ("Hello", "Hi {", "I < 3")]
    assert any(text is not None for text in texts)
    first = form.pattern[:1] if not form.begin else form.around[0] or form.begin
    begin = first if not form.begin else f"Let me see. {first}"
    numbers = []
    for _ in range(20):
        said = say(tokenizer, grammars.matcher(constraint), rng, 300, begin)
        if said is None:
            continue
        content, calls = calls_of(form, said, len(said))
        for function, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[function])
        assert content.startswith("Let me see. " if form.begin else "")
        numbers.append(len(calls))
    assert len(numbers) > 3 and min(numbers) >= 1


@pytest.mark.parametrize("prompt", ["", "<think>\n", "<think>\n\n</think>\n\n"])
def test_reasoning_comes_before(tokenizer: Tokenizer, grammars: Grammars, prompt: str) -> None:
    rng = np.random.default_rng(2)
    grammar = AnswerGrammar(tokenizer)
    grammar.add('answer: "yes" | "no"')
    constraint = Constraint.grammar(grammar.text("answer", prompt, reasoning=THINK))

    def answers(begin: str, most: int) -> list[str]:
        """What is said behind a beginning, without the reasoning."""
        texts = [say(tokenizer, grammars.matcher(constraint), rng, most, begin) for _ in range(5)]
        splitters = [(ReasoningSplitter.after(prompt, THINK), text) for text in texts if text is not None]
        return ["".join(s.push(text)[1:] + s.finish()[1:]) for s, text in splitters]

    begins = {"": ["<think>Hm. </think>", "y", "n"], "<think>\n": ["Hm. </think>"]}.get(prompt, ["y", "n"])
    for begin in begins:
        found = answers(begin, 60)
        assert found and set(found) <= {"yes", "no"}
    for begin in {"": ["Hm"], "<think>\n": ["a</think>maybe"]}.get(prompt, ["<think>"]):
        with pytest.raises(infinilm.RequestError):
            answers(begin, 60)
