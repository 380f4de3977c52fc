"""A last message of the assistant that the model goes on with, instead of beginning an answer.

What is asserted follows vLLM's tests/entrypoints/openai/test_chat.py (`continue_final_message`), llama.cpp's
tools/server/tests/unit/test_chat_completion.py (assistant prefill) and Anthropic's documentation of prefilled answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from infinilm import LLM
from server.support import SECONDS, Hosted, hosted

QUESTION: Any = {"role": "user", "content": "Tell me a story"}
BEGUN: Any = {"role": "assistant", "content": "Once upon a time, there was a purple"}
GREEDY: Any = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def host(demo: LLM) -> Iterator[Hosted]:
    with hosted(demo) as running:
        yield running


@pytest.fixture(scope="module")
def expected(demo: LLM) -> str:
    """What the model says behind the words of the last message."""
    prompt = demo.chat_template.render([QUESTION]) + BEGUN["content"]
    ids = demo.tokenize(prompt, add_special_tokens=False)
    text = demo.generate([ids], use_tqdm=False, **GREEDY)[0].outputs[0].text
    assert text
    return text


def test_in_the_library(demo: LLM, expected: str) -> None:
    (output,) = demo.chat([QUESTION, BEGUN], continue_final_message=True, use_tqdm=False, **GREEDY)
    assert output.prompt is not None and output.prompt.endswith(BEGUN["content"])
    assert output.outputs[0].text == expected


@pytest.mark.parametrize("stream", [False, True])
def test_in_chats(host: Hosted, expected: str, stream: bool) -> None:
    more = {"continue_final_message": True, "add_generation_prompt": False}
    with openai.OpenAI(base_url=f"{host.url}/v1", api_key="none", timeout=SECONDS) as client:
        create: Any = client.chat.completions.create
        answer = create(model="tiny", messages=[QUESTION, BEGUN], stream=stream, extra_body=more, **GREEDY)
        if stream:
            assert "".join(chunk.choices[0].delta.content or "" for chunk in answer) == expected
        else:
            assert answer.choices[0].message.content == expected


@pytest.mark.parametrize("content", [BEGUN["content"], [{"type": "text", "text": BEGUN["content"]}]])
def test_in_messages(host: Hosted, expected: str, content: Any) -> None:
    """Without being asked for, as Anthropic's API has it."""
    with anthropic.Anthropic(base_url=host.url, api_key="none", timeout=SECONDS) as client:
        messages: Any = [QUESTION, {"role": "assistant", "content": content}]
        sampling: Any = {"temperature": 0}
        answer = client.messages.create(
            model="tiny", messages=messages, max_tokens=GREEDY["max_tokens"], extra_body=sampling
        )
        (block,) = answer.content
        assert block.type == "text" and block.text == expected
        count = client.messages.count_tokens(model="tiny", messages=messages)
        assert count.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)


def test_tokens(host: Hosted, demo: LLM) -> None:
    body = {"messages": [QUESTION, BEGUN], "continue_final_message": True}
    ids = httpx.post(f"{host.url}/tokenize", json=body).json()["tokens"]
    assert demo.tokenizer.decode(ids, skip_special_tokens=True).endswith(BEGUN["content"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"add_generation_prompt": True}, "continue_final_message"),
        ({"messages": [QUESTION]}, "messages"),
        ({"messages": [QUESTION, {"role": "assistant", "content": None, "tool_calls": []}]}, "messages"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"chat_template_kwargs": {"continue_final_message": True}}, "chat_template_kwargs"),
    ],
)
def test_what_cannot_be_continued(host: Hosted, fields: dict[str, Any], param: str) -> None:
    body = {"messages": [QUESTION, BEGUN], "continue_final_message": True, **GREEDY, **fields}
    answer = httpx.post(f"{host.url}/v1/chat/completions", json=body, timeout=SECONDS)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
