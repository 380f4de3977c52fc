"""Models whose layers keep a state: drafts change no bit, with chunks, prefixes, preemption, threads and ranks."""

from __future__ import annotations

from typing import Any

import pytest
from goldens import golden
from llm.support import wait_for
from llm.test_states import PROMPTS

from infinilm import LLM, PagedKVCacheConfig, StaticKVCacheConfig
from speculation.drafters import MODES, Book, assert_drafted, counts, told

SAMPLING: dict[str, Any] = {"temperature": 0.9, "seed": 3, "max_tokens": 40, "ignore_eos": True, "logprobs": 1}
SMALL = PagedKVCacheConfig(num_blocks=48, block_size=4)


@pytest.mark.one_rank
@pytest.mark.parametrize("name", ["qwen3-5", "qwen3-5-moe", "qwen3-next"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_threads": 2, "max_num_batched_tokens": 24},
        {"max_num_batched_tokens": 1, "max_num_seqs": 1},
        {"enable_prefix_caching": False},
        {"kv_cache": SMALL, "max_num_seqs": 4},
        {"kv_cache": StaticKVCacheConfig(3, 160)},
        {"tensor_parallel_size": 2},
    ],
    ids=repr,
)
def test_answers_are_those_without_drafts(settings: dict[str, Any], name: str) -> None:
    book = Book()
    settings = {"max_num_seqs": 3, "max_model_len": 160, "num_threads": 1, **settings}
    with LLM(golden(name), speculation=book, use_tqdm=False, **settings) as llm:
        assert llm.memory.num_states > 0
        alone = told(llm.generate(PROMPTS, use_tqdm=False, **SAMPLING))
        for book.mode in MODES:
            before = counts(llm)
            assert told(llm.generate(PROMPTS, use_tqdm=False, **SAMPLING)) == alone, book.mode
            if settings.get("max_num_batched_tokens") != 1:
                assert_drafted(llm, before, book.mode)
        if settings.get("kv_cache") is SMALL:
            assert llm.metrics().num_preemptions > 0
        wait_for(lambda: llm.metrics().num_used_blocks == llm.metrics().num_running == 0)


def test_right_drafts_save_steps() -> None:
    book = Book()
    with LLM(golden("qwen3-5"), max_model_len=160, speculation=book, use_tqdm=False) as llm:
        alone = told(llm.generate(PROMPTS[0], use_tqdm=False, **SAMPLING | {"max_tokens": 65}))
        book.mode, before = "right", llm.metrics().num_steps
        assert told(llm.generate(PROMPTS[0], use_tqdm=False, **SAMPLING | {"max_tokens": 65})) == alone
        assert llm.metrics().num_steps - before <= 2 + 64 // 16  # of the prompt one or two, as a snapshot is due in it
