"""Conversations: the same answer blocking, streaming and in asyncio, and the prompt that the template made of them."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infinilm import LLM, Constraint, RequestError, TokenEvent

HELLO = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the end"}]
OTHER = [{"role": "user", "content": [{"type": "text", "text": "an other"}]}]
SETTINGS: dict[str, Any] = {"temperature": 0.8, "seed": 4, "max_tokens": 20, "ignore_eos": True}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}


async def all_of(events: AsyncIterator[TokenEvent]) -> list[TokenEvent]:
    return [event async for event in events]


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


@pytest.mark.parametrize("messages", [{"role": "user", "content": "x"}, "x", None, 3, [], [[]], ["x"]])
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


def test_conversations_from_anywhere(llm: LLM) -> None:
    """A column of a table, a generator, an iterator over the messages of one."""
    several = [HELLO, OTHER, HELLO]
    expected = [output.outputs[0].text for output in llm.chat(several, use_tqdm=False, **SETTINGS)]
    column = np.empty(3, object)
    column[:] = [np.array(messages, object) for messages in several]
    for messages in (iter(several), (list(one) for one in several), tuple(map(tuple, several)), column):
        assert [o.outputs[0].text for o in llm.chat(messages, use_tqdm=False, **SETTINGS)] == expected
    assert llm.chat(iter(HELLO), use_tqdm=False, **SETTINGS)[0].outputs[0].text == expected[0]
    for kind in (list, iter):
        with pytest.raises(RequestError, match="conversation 2: messages"):
            llm.chat(kind([HELLO, OTHER, [{"role": "user"}]]), use_tqdm=False, **SETTINGS)


TEMPLATE = """{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}
{%- if tools %}{{ tools }} Write <tool_call>
{"name": ..., "arguments": ...}</tool_call>{% endif %}
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{# </think> #}"""
CALL = '{"name": "look", "arguments": {"at": 1}}'


def test_the_parts_of_an_answer(folder: Path) -> None:
    """Reasoning, content and calls apart, whole and in pieces; the text stays what it was."""
    said = f"<think>Hm.</think>Yes.<tool_call>\n{CALL}\n</tool_call>"
    settings: dict[str, Any] = {"constraint": Constraint.choice([said]), "temperature": 0}
    with LLM(folder, chat_template=TEMPLATE, max_model_len=512) as llm:
        output = llm.chat(OTHER, tools=[TOOL], use_tqdm=False, **settings)[0]
        (answer,) = output.outputs
        assert (answer.text, answer.reasoning, answer.content) == (said, "Hm.", "Yes.")
        (call,) = answer.tool_calls
        assert call["function"]["name"] == "look" and json.loads(call["function"]["arguments"]) == {"at": 1}
        assert call["type"] == "function" and call["id"].startswith("call_") and "index" not in call
        parser = llm.chat_parser(output.prompt or "", [TOOL])
        events = list(llm.stream_chat(OTHER, tools=[TOOL], **settings))
        pieces = [parser.push(event.text, final=event.finish_reason is not None) for event in events]
        for made in (events, pieces, asyncio.run(all_of(llm.astream_chat(OTHER, tools=[TOOL], **settings)))):
            assert "".join(p.reasoning for p in made) == "Hm." and "".join(p.content for p in made) == "Yes."
            calls = [call for p in made for call in p.tool_calls]
            assert (
                calls[0]["function"]["name"] == "look" and calls[0]["id"] and {call["index"] for call in calls} == {0}
            )
            assert json.loads("".join(call["function"]["arguments"] for call in calls)) == {"at": 1}
        kinds = [part.kind for event in events for part in event.piece.parts]
        assert [kind for kind, _ in itertools.groupby(kinds)] == ["reasoning", "content", "call"]
        # Without tools what looks like a call is content; where the prompt ends the reasoning there is none.
        plain = llm.chat(OTHER, use_tqdm=False, **settings)[0].outputs[0]
        assert plain.content == said.partition("</think>")[2] and not plain.tool_calls
        asyncio_answer = asyncio.run(llm.achat(OTHER, tools=[TOOL], **settings))[0].outputs[0]
        assert asyncio_answer.content == "Yes." and len(asyncio_answer.tool_calls) == 1
        generated = llm.generate(output.prompt or "", use_tqdm=False, **settings)[0].outputs[0]
        assert (generated.text, generated.content, generated.reasoning, generated.tool_calls) == (said, None, None, [])
        plain_event = next(llm.stream(output.prompt or "", **settings))
        for name in ("reasoning", "content", "tool_calls"):
            with pytest.raises(RequestError, match=rf"TokenEvent\.{name} is that of stream_chat\(\)"):
                getattr(plain_event, name)


def test_how_much_to_reason(folder: Path, llm: LLM) -> None:
    """By the variable that the template reads; what the model cannot is refused."""
    settings: dict[str, Any] = {"max_tokens": 2, "use_tqdm": False}
    with LLM(folder, chat_template=TEMPLATE, max_model_len=512) as thinker:
        prompts = [
            thinker.chat(OTHER, reasoning_effort=effort, **settings)[0].prompt for effort in (None, "none", "high")
        ]
        assert prompts[0] == prompts[2] == (prompts[1] or "").removesuffix("<think></think>") != prompts[1]
        own = {"chat_template_kwargs": {"enable_thinking": False}}
        assert thinker.chat(OTHER, reasoning_effort="high", **own, **settings)[0].prompt == prompts[1]
        for chat in (thinker.chat, thinker.stream_chat, thinker.astream_chat):
            with pytest.raises(RequestError, match=r"reasoning_effort: expected one of none, .*; got 'much'"):
                chat(OTHER, reasoning_effort="much")
    assert llm.chat(OTHER, reasoning_effort="none", **settings)
    with pytest.raises(RequestError, match="reasoning_effort: models of the chat format plain do not reason"):
        llm.chat(OTHER, reasoning_effort="low")


def test_calls_of_a_form_that_is_not_known_are_content(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    said = "<|my_call|>look<|my_end|>"
    settings: dict[str, Any] = {"constraint": Constraint.choice([said]), "temperature": 0, "tools": [TOOL]}
    template = "{{ tools }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    with LLM(folder, chat_template=template, max_model_len=512) as llm, caplog.at_level(logging.WARNING, "infinilm"):
        for _ in range(2):
            (answer,) = llm.chat(OTHER, use_tqdm=False, **settings)[0].outputs
            assert (answer.content, answer.reasoning, answer.tool_calls) == (said, None, [])
            assert "".join(event.content for event in llm.stream_chat(OTHER, **settings)) == said
    (told,) = [message for message in caplog.messages if message.startswith("tools: ")]
    assert "(of the format plain) teaches no way to call them" in told and "stay in the content" in told


def test_parts_of_several_answers(folder: Path) -> None:
    """Each answer of each conversation is divided by itself, also of conversations without an end."""
    said = f"<think>Hm.</think>Yes.<tool_call>\n{CALL}\n</tool_call>"
    settings: dict[str, Any] = {"constraint": Constraint.choice([said]), "temperature": 0, "n": 2}
    with LLM(folder, chat_template=TEMPLATE, max_model_len=512) as llm:
        found: dict[tuple[int, int], list[TokenEvent]] = {}
        for event in llm.stream_chat((OTHER for _ in itertools.count()), tools=[TOOL], **settings):
            found.setdefault((event.index, event.completion), []).append(event)
            if len([1 for events in found.values() if events[-1].finish_reason]) == 6:
                break
        for events in found.values():
            if events[-1].finish_reason:
                assert "".join(e.reasoning for e in events) == "Hm." and "".join(e.content for e in events) == "Yes."
                assert len({call["id"] for e in events for call in e.tool_calls if "id" in call}) == 1
        for answer in llm.chat(OTHER, tools=[TOOL], use_tqdm=False, **settings)[0].outputs:
            assert (answer.reasoning, answer.content, len(answer.tool_calls)) == ("Hm.", "Yes.", 1)


def test_arguments_that_chat_does_not_have(llm: LLM) -> None:
    for name, hint in {
        "enable_thinking": r"pass chat_template_kwargs=\{'enable_thinking': ...\}",
        "chat_template": r"LLM\(model, chat_template=...\)",
        "tool_choice": r"the model chooses; constraint=Constraint\.json_schema",
        "tool": "did you mean 'tools'",
        "max_new_tokens": "it is called 'max_tokens' here",
    }.items():
        for chat in (llm.chat, llm.stream_chat, llm.astream_chat):
            with pytest.raises(TypeError, match=rf"chat\(\) has no parameter '{name}'.*{hint}"):
                chat(HELLO, **{name: False})
