"""Reasoning and answer apart, for any cut of the text."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from infinilm.text.reasoning import ReasoningSplitter, reasoning_marks

THINK, SEED = ("<think>", "</think>"), ("<seed:think>", "</seed:think>")


def split(
    prompt: str, pieces: list[str], marks: tuple[str, str] = THINK, *, is_repeated: bool = False
) -> tuple[str, str]:
    splitter = ReasoningSplitter.after(prompt, marks, is_repeated=is_repeated)
    parts = [*map(splitter.push, pieces), splitter.finish()]
    return "".join(reasoning for reasoning, _ in parts), "".join(answer for _, answer in parts)


@pytest.mark.parametrize(
    ("prompt", "text", "reasoning", "answer"),
    [
        ("", "<think>\nwhy\n</think>\n\nbecause", "\nwhy\n", "because"),
        ("", "\n<think></think>because", "", "because"),
        ("", "because <think>x</think>", "", "because <think>x</think>"),  # marks inside an answer are text
        ("<|assistant|><think>\n", "why</think>because", "why", "because"),
        ("<think>\n\n</think>\n\n", "because", "", "because"),  # reasoning switched off by the template
        ("", "<think>cut by the len", "cut by the len", ""),
        ("", "<thi", "", "<thi"),
    ],
)
def test_marks(prompt: str, text: str, reasoning: str, answer: str) -> None:
    assert split(prompt, [text]) == (reasoning, answer)
    prompt, text, reasoning, answer = (s.replace("think>", "seed:think>") for s in (prompt, text, reasoning, answer))
    assert split(prompt, [text], SEED) == (reasoning, answer)


@pytest.mark.parametrize(
    ("prompt", "text", "reasoning", "answer"),
    [
        # vLLM's tests/reasoning: qwen3, deepseekr1, nemotron_v3, step3p5, minimax_m2, holo2, olmo3, base_thinking
        ("<think>\n", "I look.</think>It rains.", "I look.", "It rains."),
        ("<think>\n", "<think>I look.</think>It rains.", "I look.", "It rains."),  # the mark of the prompt once more
        ("<think>\n", "\n<think>I look.\n</think>\nIt rains.", "I look.\n", "It rains."),
        ("<think>", "I look.", "I look.", ""),
        ("<think>", "</think>It rains.", "", "It rains."),
        ("<think>", "", "", ""),
        ("<think>", "First</think>Middle</think>Last", "First", "Middle</think>Last"),
        ("<think>\n\n</think>\n\n", "It</think>rains.", "", "It</think>rains."),  # no reasoning was begun
        ("", "<think>Outer<think>Inner</think>It rains.", "Outer<think>Inner", "It rains."),
        ("", "<think>\nLook!\n\n</think>\n\n\nIt rains.", "\nLook!\n\n", "It rains."),
        # SGLang's test/registered/unit/parser/test_reasoning_parser.py
        ("", "<think><think>I look.</think>It rains.", "I look.", "It rains."),
        ("", "<think>I look.", "I look.", ""),
        # Their parsers take these for thoughts, since they do not see that the prompt has begun none.
        ("", "It rains.", "", "It rains."),
        ("", "<thinking>I look.</thinking>It rains.", "", "<thinking>I look.</thinking>It rains."),
    ],
)
def test_what_other_engines_test(prompt: str, text: str, reasoning: str, answer: str) -> None:
    assert split(prompt, [text]) == split(prompt, list(text)) == (reasoning, answer)


PIECES = st.lists(st.sampled_from(["<think>", "</think>", "<th", "</", "ink>", " ", "\n", "a", "<"]), max_size=10)


@given(PIECES, st.sampled_from(["", "<think>"]), st.booleans())
def test_cuts_change_nothing(pieces: list[str], prompt: str, is_repeated: bool) -> None:
    text = "".join(pieces)
    whole = split(prompt, [text], is_repeated=is_repeated)
    assert split(prompt, pieces, is_repeated=is_repeated) == whole
    assert split(prompt, list(text), is_repeated=is_repeated) == whole


def test_templates() -> None:
    assert reasoning_marks("{%- if '</think>' in content %}") == THINK
    assert reasoning_marks("{%- set think_end_token = '</seed:think>' -%}") == SEED
    assert reasoning_marks("{{ messages }}") is None
