"""Marks that are special tokens are kept in the text of an answer, and no other special token is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import infinilm
from infinilm.text.answers import AnswerFormat
from infinilm.text.tokenizer import Tokenizer

WEATHER: dict[str, Any] = {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}}
HARMONY = "<|start|>assistant<|channel|>final<|message|>"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    import tokenizers

    folder = Path(infinilm.__file__).parent / "assets" / "demo"
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    marks = ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|other|>"]
    backend.add_special_tokens([*marks, "<|tool_call>", "<tool_call|>", '<|"|>', "[THINK]", "[/THINK]"])
    return Tokenizer(backend, eos_token_ids=[1])


def test_marks_of_calls_and_reasoning(tokenizer: Tokenizer) -> None:
    for template, has_tools, needs in [
        (HARMONY, False, True),
        ("<|tool_call>call:", True, True),
        ("<|tool_call>call:", False, False),
        ("[THINK][/THINK]", False, True),
        ("<think></think>", False, False),
        ('<tool_call>{"name": ', True, False),
    ]:
        form = AnswerFormat.of(template, has_tools=has_tools)
        assert form.needs_special_tokens(tokenizer) is needs, template
        assert ("<|other|>" in form.hidden(tokenizer)) is needs, template


def test_other_special_tokens_are_not_told(tokenizer: Tokenizer) -> None:
    form = AnswerFormat.of("<|tool_call>call:", has_tools=True)
    maker = form.maker("", [WEATHER], form.hidden(tokenizer))
    said = maker.push('<|other|>Wait.</s><|tool_call>call:weather{city:<|"|>Bern<|"|>}<tool_call|>', final=True)
    assert said.content == "Wait."
    assert said.tool_calls[0]["function"] == {"name": "weather", "arguments": '{"city": "Bern"}'}


def test_channels(tokenizer: Tokenizer) -> None:
    form = AnswerFormat.of(HARMONY, has_tools=False)
    maker = form.maker("<|start|>assistant", [], form.hidden(tokenizer))
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|other|>"
    said = maker.push(text, final=True)
    assert (said.reasoning, said.content) == ("Hm.", "Yes.")
