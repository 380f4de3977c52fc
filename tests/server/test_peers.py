"""What other servers promise their clients, by the assertions of their own tests; each test names its source."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from server.support import SECONDS, ServerProcess

BOOK: Any = [{"role": "system", "content": "Book"}, {"role": "user", "content": "What is the best book"}]


@pytest.mark.parametrize(
    "messages",
    [None, "string", [123], [{}], [{"role": 123}], [{"role": "system", "content": 123}], [BOOK[0], {}], []],
)
def test_invalid_chats(server: ServerProcess, headers: dict[str, str], messages: Any) -> None:
    """llama.cpp, tools/server/tests/unit/test_chat_completion.py: test_invalid_chat_completion_req."""
    body = {"messages": messages}
    answer = httpx.post(f"{server.url}/chat/completions", json=body, headers=headers, timeout=SECONDS)
    assert answer.status_code == 400 and answer.json()["error"]["message"]


def test_chunks_of_a_chat(client: openai.OpenAI) -> None:
    """llama.cpp, test_chat_completion.py: test_chat_completion_stream, test_logprobs_stream."""
    story: Any = [{"role": "user", "content": "Tell me a story"}]
    call: Any = {"model": "demo", "messages": story, "max_tokens": 8, "temperature": 0, "logprobs": True}
    chunks = list(client.chat.completions.create(**call, top_logprobs=10, stream=True))
    assert len({chunk.id for chunk in chunks}) == len({chunk.created for chunk in chunks}) == 1
    first, *others = (chunk.choices[0] for chunk in chunks)
    assert first.delta.role == "assistant" and all(choice.delta.role is None for choice in others)
    assert [choice.finish_reason for choice in others] == [None] * (len(others) - 1) + ["length"]
    assert others[-1].delta.content is None
    tokens = [token for choice in others if choice.logprobs for token in choice.logprobs.content or ()]
    text = "".join(choice.delta.content or "" for choice in others)
    assert "".join(token.token for token in tokens) == text
    assert all(token.logprob <= 0 and token.bytes and len(token.top_logprobs) == 10 for token in tokens)
    whole = client.chat.completions.create(**call)
    assert whole.choices[0].message.content == text
    assert whole.usage is not None and whole.usage.completion_tokens == 8


def test_seeds(client: openai.OpenAI) -> None:
    """llama.cpp, test_completion.py: test_consistent_result_same_seed, test_different_result_different_seed."""

    def text(seed: int) -> str:
        answer = client.completions.create(model="demo", prompt="I believe", seed=seed, temperature=1, max_tokens=32)
        return answer.choices[0].text

    texts = [text(seed) for seed in (1, 1, 2, 3)]
    assert texts[0] == texts[1] and len(set(texts)) == 3


@pytest.mark.parametrize("is_chat", [True, False])
def test_usage_of_streams(client: openai.OpenAI, is_chat: bool) -> None:
    """vLLM, tests/entrypoints/openai: test_chat_completion_stream_options, test_completion_stream_options."""
    create: Any = client.chat.completions.create if is_chat else client.completions.create
    call: Any = {"model": "demo", "max_tokens": 4, **({"messages": BOOK} if is_chat else {"prompt": "Book"})}
    for options in ({"include_usage": False}, None):
        assert all(chunk.usage is None for chunk in create(**call, stream=True, stream_options=options))
    *chunks, last = create(**call, stream=True, stream_options={"include_usage": True})
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == [] and last.usage.completion_tokens == 4
    assert last.usage.total_tokens == last.usage.prompt_tokens + 4
    for options in ({"include_usage": None}, {"include_usage": True}):
        with pytest.raises(openai.BadRequestError):
            create(**call, stream=False, stream_options={**options, "continuous_usage_stats": True})


def test_numbers_of_log_probabilities(client: openai.OpenAI) -> None:
    """vLLM, tests/entrypoints/openai: test_zero_logprobs_chat, test_too_many_chat_logprobs and those of completions."""
    call: Any = {"model": "demo", "messages": BOOK, "max_tokens": 3}
    for said, count in (({"logprobs": True, "top_logprobs": 0}, 0), ({"logprobs": True, "top_logprobs": 5}, 5)):
        logprobs = client.chat.completions.create(**call, **said).choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None
        assert {len(token.top_logprobs) for token in logprobs.content} == {count}
    assert client.chat.completions.create(**call, logprobs=False).choices[0].logprobs is None
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(**call, logprobs=True, top_logprobs=21, stream=stream)
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="demo", prompt="Book", max_tokens=3, logprobs=21, stream=stream)
    zero = client.completions.create(model="demo", prompt="Book", max_tokens=3, logprobs=0).choices[0].logprobs
    assert zero is not None and zero.top_logprobs is not None
    assert [len(tops) for tops in zero.top_logprobs if tops] == [1] * 3


def test_several_prompts(client: openai.OpenAI) -> None:
    """vLLM, completion/test_completion.py: test_batch_completions; test_empty_prompt_list.py."""
    call: Any = {"model": "demo", "max_tokens": 3, "temperature": 0}
    batch = client.completions.create(prompt=["Book", "Book"], n=2, **call)
    assert [choice.index for choice in batch.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in batch.choices}) == 1
    texts = [""] * 2
    for chunk in client.completions.create(prompt=["Book", "Book"], stream=True, **call):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [batch.choices[0].text] * 2
    with pytest.raises(openai.BadRequestError):
        client.completions.create(prompt=[], **call)
