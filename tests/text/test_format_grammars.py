"""Calls that a grammar forces, for the rows of the table of chat formats: what it allows is read as calls that fit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from text.real_templates import FOLDER, FORMATS, present, prompt_with, read
from text.test_chat_formats import prompt_of

from infinilm import Constraint
from infinilm.text.answers import AnswerFormat, ChoiceMaker
from infinilm.text.call_grammar import AnswerGrammar, Tool
from infinilm.text.chat_formats import CHAT_FORMATS, ChatFormat
from infinilm.text.grammars import GrammarMatcher, Grammars
from infinilm.text.harmony import HARMONY_MARKS
from infinilm.text.tokenizer import Tokenizer

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Rom"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [Tool("weather", CITY), Tool("time", {"type": "object", "properties": {}, "additionalProperties": False})]
SCHEMAS = {tool.name: tool.parameters for tool in TOOLS}
ROWS = {row.name: row for row in CHAT_FORMATS}
QUESTION = {"role": "user", "content": "How is it in Bern?"}
VOCAB_SIZE = 1664
MARKS = sorted(
    {
        token
        for row in CHAT_FORMATS
        if row.calls is not None
        for mark in (row.calls.begin, row.calls.end, row.calls.name_before, *row.calls.hidden)
        for token in re.findall(r"<\|[\w:]+\|>|<\|\w+>|<\w+\|>|<｜tool[^｜]+｜>|\[[A-Z_]+\]", mark)
    }
    | set(HARMONY_MARKS)
)


@pytest.fixture(scope="module", params=["marks are text", "marks are special tokens"])
def tokenizer(request: pytest.FixtureRequest, tokenizer_with: Callable[[Iterable[str]], Tokenizer]) -> Tokenizer:
    return tokenizer_with(MARKS if "special" in request.param else ())


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, VOCAB_SIZE)


def say(tokenizer: Tokenizer, matcher: GrammarMatcher, rng: np.random.Generator, begin: str) -> str | None:
    """A random text after a beginning; None: it came to no end."""
    ids = list(tokenizer.encode(begin, add_special_tokens=False))
    for token_id in ids:
        matcher.advance(token_id)
    row = np.empty(VOCAB_SIZE // 32, np.int32)
    while not matcher.is_finished and len(ids) < 200:
        matcher.fill(row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        token_id = 1 if 1 in allowed else int(rng.choice(allowed))
        matcher.advance(token_id)
        if token_id == 1:
            break
        ids.append(token_id)
    return tokenizer.decode(ids, skip_special_tokens=False) if len(ids) < 200 else None


def calls_of(row: ChatFormat, text: str) -> list[tuple[str, Any]]:
    form = row.calls.as_json() if row.calls is not None else None
    maker = ChoiceMaker(
        prompt_of(row),
        reasoning=row.reasoning,
        form=form,
        schemas=SCHEMAS,
        answer=row.answer,
        has_channels=row.has_channels,
    )
    said = maker.push(text, final=True)
    assert not said.content.strip(), text
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in said.tool_calls]


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("is_free", [False, True], ids=["forced", "begun among text"])
def test_calls(tokenizer: Tokenizer, grammars: Grammars, name: str, is_free: bool) -> None:
    row, rng = ROWS[name], np.random.default_rng(0)
    assert row.calls is not None
    form = row.calls.as_json()
    begin = ""
    if is_free:
        begin = form.pattern[:1] if not form.begin else form.around[0] or form.begin
        if form.text_head:
            begin = "weather"  # the prompt has the mark
        if form.has_channels:
            if tokenizer.token_to_id("<|channel|>") is None:
                return  # nothing is enforced where the marks of channels are text
            begin = "<|channel|>commentary to=functions."
    grammar = AnswerGrammar(tokenizer)
    rule = (grammar.among_text if is_free else grammar.calls)(form, TOOLS, several=False)
    constraint = Constraint.grammar(grammar.text(rule, "", reasoning=None))
    texts = [say(tokenizer, grammars.matcher(constraint), rng, begin) for _ in range(6)]
    found = [calls_of(row, text) for text in texts if text is not None]
    assert len(found) >= 3
    for calls in found:
        assert len(calls) >= 1
        assert all(call in [("time", {}), *(("weather", {"city": city}) for city in ("Bern", "Rom"))] for call in calls)


def test_an_answer_that_must_fit_has_its_channel(tokenizer: Tokenizer, grammars: Grammars) -> None:
    row, rng = ROWS["harmony"], np.random.default_rng(0)
    grammar = AnswerGrammar(tokenizer)
    grammar.add('answer: "yes" | "no"')
    grammar.add(f"whole: {grammar.final('answer')}")
    constraint = Constraint.grammar(grammar.text("whole", "<|start|>assistant", reasoning=row.reasoning))
    thought = "<|channel|>analysis<|message|>Hm.<|end|>"
    for begin in ("<|channel|>final", thought, f"{thought}<|start|>"):
        text = say(tokenizer, grammars.matcher(constraint), rng, begin)
        assert text is not None
        said = ChoiceMaker("", reasoning=row.reasoning, has_channels=True).push(text, final=True)
        assert said.content in ("yes", "no") and said.reasoning == ("Hm." if begin.startswith(thought) else "")


def test_texts_with_channels(tokenizer: Tokenizer, grammars: Grammars) -> None:
    """An answer that is no call may be written as ever: thoughts, notes, then the answer."""
    row, rng = ROWS["harmony"], np.random.default_rng(0)
    assert row.calls is not None
    grammar = AnswerGrammar(tokenizer)
    rule = grammar.among_text(row.calls, TOOLS, several=True)
    constraint = Constraint.grammar(grammar.text(rule, "<|start|>assistant", reasoning=row.reasoning))
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    note = "<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant"
    for begin in ("", thought, thought + note, note):
        assert say(tokenizer, grammars.matcher(constraint), rng, begin + "<|channel|>final<|message|>Yes.") is not None


@pytest.mark.skipif(FOLDER is None, reason="INFINILM_CHAT_TEMPLATES names no folder with chat templates")
@pytest.mark.parametrize("file", present([files[0] for files in FORMATS.values()]))
def test_calls_forced_by_the_request(tokenizer: Tokenizer, grammars: Grammars, file: str) -> None:
    """`tool_choice` required or with a name, behind the prompt of a real template, and behind a thought or none."""
    rng = np.random.default_rng(0)
    answers = AnswerFormat.of(read(file), has_tools=True)
    assert answers.calls is not None
    answers = replace(answers, calls=answers.calls.as_json())
    tools = [{"type": "function", "function": {"name": tool.name, "parameters": tool.parameters}} for tool in TOOLS]
    prompt = prompt_with(file, [QUESTION], tools)
    begin, end = answers.reasoning or ("", "")
    thought = "" if answers.reasoning is None else f"{'' if prompt.rfind(begin) > prompt.rfind(end) else begin}Hm.{end}"
    thought = "" if end and prompt.rstrip().endswith(end) else thought  # the prompt has ended it
    for chosen, several in ((TOOLS, not answers.is_single), (TOOLS[1:], False)):
        grammar = AnswerGrammar(tokenizer)
        rule = grammar.calls(answers.calls, chosen, several=several)
        constraint = Constraint.grammar(grammar.text(rule, prompt, reasoning=answers.reasoning))
        texts = [say(tokenizer, grammars.matcher(constraint), rng, thought) for _ in range(4)]
        said = [answers.maker(prompt, tools).push(text, final=True) for text in texts if text is not None]
        assert said
        for one in said:
            assert (one.content.strip(), one.reasoning.strip()) == ("", "Hm." if thought else "")
            assert {call["function"]["name"] for call in one.tool_calls} <= {tool.name for tool in chosen}
            assert len(one.tool_calls) == 1 or (several and one.tool_calls)


@pytest.mark.parametrize(
    ("name", "pattern"), [("solar open", "[a-z0-9]{10}"), ("mistral ids", "[a-zA-Z0-9]{9}"), ("kimi k2", "[0-9]{1,4}")]
)
def test_ids_of_forced_calls(tokenizer: Tokenizer, name: str, pattern: str) -> None:
    """They are as long as the template of the model says."""
    form = ROWS[name].calls
    assert form is not None
    grammar = AnswerGrammar(tokenizer)
    rule = grammar.calls(form, TOOLS, several=False)
    assert f" /{pattern}/ " in grammar.text(rule, "", reasoning=None)
