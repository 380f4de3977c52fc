"""Reasoning and answer apart, for any cut of the text."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from infinilm.text.reasoning import ReasoningSplitter, thinks


def split(prompt: str, pieces: list[str]) -> tuple[str, str]:
    splitter = ReasoningSplitter.after(prompt)
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


PIECES = st.lists(st.sampled_from(["<think>", "</think>", "<th", "</", "ink>", " ", "\n", "a", "<"]), max_size=10)


@given(PIECES, st.sampled_from(["", "<think>"]))
def test_cuts_change_nothing(pieces: list[str], prompt: str) -> None:
    text = "".join(pieces)
    assert split(prompt, pieces) == split(prompt, [text]) == split(prompt, list(text))


def test_templates() -> None:
    assert thinks("{%- if '</think>' in content %}") and not thinks("{{ messages }}")
