"""Conversations: the same answer blocking, streaming and in asyncio, and the prompt that the template made of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from infinilm import LLM, RequestError, TokenEvent

HELLO = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the end"}]
OTHER = [{"role": "user", "content": [{"type": "text", "text": "an other"}]}]
SETTINGS: dict[str, Any] = {"temperature": 0.8, "seed": 4, "max_tokens": 20, "ignore_eos": True}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}


def joined(events: list[TokenEvent]) -> list[str]:
    return ["".join(e.text for e in events if e.index == i) for i in range(1 + max(e.index for e in events))]


def test_chat_in_all_ways(llm: LLM) -> None:
    outputs = llm.chat([HELLO, OTHER], use_tqdm=False, **SETTINGS)
    texts = [output.outputs[0].text for output in outputs]
    assert joined(list(llm.stream_chat([HELLO, OTHER], **SETTINGS))) == texts

    async def main() -> None:
        again = await llm.achat([HELLO, OTHER], **SETTINGS)
        assert [o.outputs[0].text for o in again] == texts
        assert joined([event async for event in llm.astream_chat([HELLO, OTHER], **SETTINGS)]) == texts
        request = llm.submit(llm.render_chat(HELLO), **SETTINGS)
        assert joined([event async for event in request]) == texts[:1] == [(await request).outputs[0].text]

    asyncio.run(main())
    assert [o.outputs[0].text for o in llm.chat(HELLO, use_tqdm=False, **SETTINGS)] == texts[:1]


def test_the_prompt_is_the_text_of_the_template(llm: LLM) -> None:
    output = llm.chat(OTHER, use_tqdm=False, **SETTINGS)[0]
    assert output.prompt == "<s><|user|>an other<|assistant|>" == llm.chat_template.render(OTHER)
    assert list(output.prompt_token_ids) == llm.render_chat(OTHER) == llm.tokenize(output.prompt, False)


@pytest.mark.parametrize("messages", [{"role": "user", "content": "x"}, "x", None, 3, iter(HELLO), [], [[]], ["x"]])
def test_bad_conversations(llm: LLM, messages: Any) -> None:
    for chat in (llm.chat, llm.stream_chat, llm.astream_chat, lambda m: asyncio.run(llm.achat(m))):
        with pytest.raises(RequestError, match="messages"):
            chat(messages)


def test_settings_of_the_template(llm: LLM) -> None:
    options: dict[str, Any] = {"add_generation_prompt": False, "chat_template_kwargs": {"bos_token": "<s><s>"}}
    output = llm.chat(HELLO, use_tqdm=False, **options, **SETTINGS)[0]
    assert output.prompt == "<s><s><|system|>be brief<|user|>the end"
    assert joined(list(llm.stream_chat(HELLO, **options, **SETTINGS))) == [output.outputs[0].text]
    with pytest.raises(RequestError, match="tools: the chat template"):
        llm.chat(HELLO, tools=[TOOL], use_tqdm=False)
