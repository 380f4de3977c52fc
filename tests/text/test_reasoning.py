"""Reasoning and answer apart, for any cut of the text."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from infinilm.text.reasoning import ReasoningSplitter, reasoning_marks

THINK, SEED = ("<think>", "</think>"), ("<seed:think>", "</seed:think>")


def split(prompt: str, pieces: list[str], marks: tuple[str, str] = THINK) -> tuple[str, str]:
    splitter = ReasoningSplitter.after(prompt, marks)
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


PIECES = st.lists(st.sampled_from(["<think>", "</think>", "<th", "</", "ink>", " ", "\n", "a", "<"]), max_size=10)


@given(PIECES, st.sampled_from(["", "<think>"]))
def test_cuts_change_nothing(pieces: list[str], prompt: str) -> None:
    text = "".join(pieces)
    assert split(prompt, pieces) == split(prompt, [text]) == split(prompt, list(text))


def test_templates() -> None:
    assert reasoning_marks("{%- if '</think>' in content %}") == THINK
    assert reasoning_marks("{%- set think_end_token = '</seed:think>' -%}") == SEED
    assert reasoning_marks("{{ messages }}") is None
