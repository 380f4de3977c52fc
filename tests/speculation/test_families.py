"""Drafts change no bit of any family, with any kind of cache, and on ranks; in pipelines nothing is drafted.

The simulated device is in tests/cuda/test_device.py.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import facts
import pytest
from goldens import GOLDENS, config_of, expected_of, golden

from infinilm import LLM, ConfigError, LlamaConfig, _core
from infinilm.config.spec import build_spec
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


@functools.cache
def covering(num_ranks: int, num_stages: int) -> list[str]:
    """Goldens that have together every fact of all that so many ranks or stages can divide."""
    fitting: dict[str, frozenset[str]] = {}
    for name, found in facts.facts_of_goldens().items():
        spec = build_spec(LlamaConfig.from_dict(config_of(name)), dtype="float32", max_model_len=64)
        with contextlib.suppress(ConfigError):
            _core.local_spec(_core.stage_spec(spec, 0, num_stages), 0, num_ranks)
            fitting[name] = found
    return facts.greedy_cover(fitting)


@pytest.mark.one_rank
@pytest.mark.parametrize(
    ("name", "ranks", "stages"),
    [*((name, 2, 1) for name in covering(2, 1)), *((name, 1, 2) for name in covering(1, 2))],
)
def test_ranks_and_stages(name: str, ranks: int, stages: int) -> None:
    book, ids = Book(), expected_of(name)["input_ids"].tolist()
    settings: dict[str, Any] = {"tensor_parallel_size": ranks, "pipeline_parallel_size": stages, "num_threads": 1}
    with LLM(golden(name), dtype="bfloat16", max_model_len=64, speculation=book, use_tqdm=False, **settings) as llm:
        prompts = [ids[:24], ids[:3]]
        alone = told(llm.generate(prompts, temperature=0.8, **SAMPLING))
        book.mode, before = "until", counts(llm)
        assert told(llm.generate(prompts, temperature=0.8, **SAMPLING)) == alone
        if stages == 1:
            assert_drafted(llm, before, "until")
        else:
            assert counts(llm) == (0, 0)
