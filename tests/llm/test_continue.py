"""Answers that another engine has begun: the rest is, bit for bit, what that engine would have said."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, strategies as st

from infinilm import LLM, Constraint, RequestError
from llm import tiny

PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    {"min_tokens": 20, "logit_bias": {tiny.EOS: 3.0}},
    {"stop": ["\x01", "a"], "min_tokens": 10},
    {"logprobs": 2},
    {"constraint": Constraint.json_schema({"type": "array", "items": {"type": "integer"}, "minItems": 9})},
]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(tiny.make_checkpoint(tmp_path_factory.mktemp("continue"))) as made:
        yield made


@given(st.data())
def test_the_rest_is_what_would_have_come(llm: LLM, data: st.DataObject) -> None:
    params = data.draw(st.sampled_from(PARAMS))
    prompt = data.draw(st.lists(st.integers(0, 255), min_size=1, max_size=60))
    seed = data.draw(st.integers(0, 2**64 - 1))
    (whole,) = llm.generate(prompt, seed=seed, max_tokens=40, use_tqdm=False, **params)
    alone = whole.outputs[0]
    if len(alone.token_ids) < 2:
        return
    cut = data.draw(st.integers(0, len(alone.token_ids) - 1))
    asked: Any = {"prompt_token_ids": prompt, "output_token_ids": alone.token_ids[:cut]}
    llm.reset_cache()

    async def follow() -> tuple[str, list[int], str]:
        async with llm.asubmit(asked, seed=seed, max_tokens=40, **params) as running:
            given = running.given()
            deltas = [delta async for group in running.deltas(lambda: 0.0) for delta in group]
            output = running.outputs()[0].outputs[0]
            assert output.token_ids == alone.token_ids and output.finish_reason == alone.finish_reason
            assert output.stop_reason == alone.stop_reason
            if alone.logprobs is not None:
                assert output.logprobs is not None and output.logprobs[cut:] == alone.logprobs[cut:]
            told = "".join(delta.text for delta in [*given, *deltas])
            return told, [i for delta in deltas for i in delta.token_ids], output.text

    told, ids, text = asyncio.run(follow())
    assert told == text == alone.text
    assert ids == alone.token_ids[cut:]


def test_what_cannot_be_gone_on_with(llm: LLM) -> None:
    def ask(ids: Any, **params: Any) -> None:
        llm.generate({"prompt_token_ids": [1, 2], "output_token_ids": ids}, use_tqdm=False, **params)  # type: ignore[typeddict-item]

    with pytest.raises(RequestError, match="n=1"):
        ask([3], n=2)
    with pytest.raises(RequestError, match="out of range"):
        ask([tiny.VOCAB_SIZE])
    with pytest.raises(RequestError, match="token 2 of 3 ends the answer"):
        ask([3, tiny.EOS, 4])
    with pytest.raises(RequestError, match="token 2 of 2 ends the answer"):
        ask([3, 4], max_tokens=2)
    with pytest.raises(RequestError, match="output_token_ids"):
        llm.score({"prompt_token_ids": [1, 2], "output_token_ids": [3]})  # type: ignore[arg-type]
    assert llm.generate([1, 2], max_tokens=2, use_tqdm=False)[0].outputs[0].token_ids
