"""Drafts change no bit of any family, with any kind of cache."""

from __future__ import annotations

from typing import Any

import pytest
from goldens import GOLDENS, expected_of, golden

from infinilm import LLM
from speculation.drafters import AnyLengths, Book, assert_drafted, counts, told, use_lengths

SAMPLING: dict[str, Any] = {"seed": 3, "max_tokens": 18, "logprobs": 1, "ignore_eos": True, "use_tqdm": False}


@pytest.mark.one_rank
@pytest.mark.parametrize("name", GOLDENS)
def test_answers_are_those_without_drafts(name: str) -> None:
    expected = expected_of(name)
    ids, max_model_len = expected["input_ids"].tolist(), int(expected["max_model_len"])
    prompts = [ids, ids[:3], [*ids[:17], 5]]
    book = Book()
    with LLM(golden(name), dtype="bfloat16", max_model_len=max_model_len, speculation=book, use_tqdm=False) as llm:
        for temperature, mode, lengths in ((0, "until", None), (0.8, "until", AnyLengths()), (0, "right", None)):
            if not llm.memory.num_states:
                use_lengths(llm, lengths)
            book.mode = "off"
            alone = told(llm.generate(prompts, temperature=temperature, **SAMPLING))
            book.mode, before = mode, counts(llm)
            assert told(llm.generate(prompts, temperature=temperature, **SAMPLING)) == alone
            assert_drafted(llm, before, mode)
