"""Answers with channels, as gpt-oss writes them, and with ids of calls, as Kimi K2 does, by each API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from llm import tiny

from infinilm.server.chat import read_chat
from server.support import SECONDS, Hosted, ScriptedLLM, hosted

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|start|>{{ m.role }}"
    "{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|message|>{{ m.content }}<|end|>{% endfor %}<|start|>assistant{# <|start|>assistant<|channel|> #}"
)
THOUGHT = "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant"
FINAL = THOUGHT + "<|channel|>final<|message|>It rains."
CALL = THOUGHT + '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Bern"}<|call|>'
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
QUESTION: Any = [{"role": "user", "content": "How is it?"}]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ScriptedLLM, Hosted]]:
    folder = tiny.make_checkpoint(tmp_path_factory.mktemp("channels") / "tiny", max_position_embeddings=4096)
    with ScriptedLLM(folder, chat_template=TEMPLATE) as llm, hosted(llm) as host:
        yield llm, host


def test_chats(served: tuple[ScriptedLLM, Hosted]) -> None:
    llm, host = served
    with openai.OpenAI(base_url=f"{host.url}/v1", api_key="none", max_retries=0, timeout=SECONDS) as client:
        llm.script = FINAL
        message: Any = client.chat.completions.create(model="tiny", messages=QUESTION).choices[0].message
        assert (message.reasoning_content, message.content) == ("I look.", "It rains.")
        llm.script = CALL
        body: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "tools": TOOLS}
        choice: Any = client.chat.completions.create(**body).choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.reasoning_content == "I look."
        called = choice.message.tool_calls[0].function
        assert (called.name, json.loads(called.arguments)) == ("weather", {"city": "Bern"})
        reasoning = arguments = content = ""
        for chunk in client.chat.completions.create(**body, stream=True):
            delta: Any = chunk.choices[0].delta
            reasoning += getattr(delta, "reasoning_content", None) or ""
            content += delta.content or ""
            arguments += "".join(call.function.arguments for call in delta.tool_calls or ())
        assert (reasoning, content, json.loads(arguments)) == ("I look.", "", {"city": "Bern"})
        response: Any = client.responses.create(
            model="tiny", input=QUESTION, tools=[{"type": "function", **TOOLS[0]["function"]}]
        )
        assert [item.type for item in response.output] == ["reasoning", "function_call"]


def test_messages(served: tuple[ScriptedLLM, Hosted]) -> None:
    llm, host = served
    with anthropic.Anthropic(base_url=host.url, api_key="none", max_retries=0, timeout=SECONDS) as client:
        llm.script = CALL
        tools: Any = [{"name": "weather", "input_schema": PARAMETERS}]
        message: Any = client.messages.create(model="tiny", max_tokens=300, messages=QUESTION, tools=tools)
        assert [block.type for block in message.content] == ["thinking", "tool_use"]
        assert message.content[0].thinking == "I look." and message.content[1].input == {"city": "Bern"}


def test_the_history_and_what_must_fit(served: tuple[ScriptedLLM, Hosted]) -> None:
    """Thoughts of the history are in the prompt, and a constraint leaves the channels to the model."""
    _, host = served
    thought = {"role": "assistant", "content": "It rains.", "reasoning_content": "I look."}
    body: dict[str, Any] = {"model": "tiny", "messages": [*QUESTION, thought, *QUESTION]}
    call = read_chat(host.service, body | {"response_format": {"type": "json_object"}})
    assert "<|channel|>analysis<|message|>I look.<|end|>" in call.prompt
    assert call.params.constraint is not None and "final" in call.params.constraint.text
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    for choice in ("auto", "required"):
        assert read_chat(host.service, body | {"tools": strict, "tool_choice": choice}).params.constraint is not None


KIMI = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
    "{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
    "{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}{% endif %}{% endfor %}"
    "{# <|tool_calls_section_begin|> #}"
)
KIMI_CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|>"
)


def test_ids_count_the_calls_of_a_conversation(tmp_path: Path) -> None:
    """Clients get the ids that the model reads, whole, streamed, and in each API."""
    folder = tiny.make_checkpoint(tmp_path / "tiny", max_position_embeddings=4096)
    with ScriptedLLM(folder, chat_template=KIMI) as llm, hosted(llm) as host:
        llm.script = KIMI_CALL
        with openai.OpenAI(base_url=f"{host.url}/v1", api_key="none", max_retries=0, timeout=SECONDS) as client:
            turns: list[Any] = list(QUESTION)
            for count in range(2):
                body: dict[str, Any] = {"model": "tiny", "messages": turns, "tools": TOOLS}
                message = client.chat.completions.create(**body).choices[0].message
                expected = f"functions.weather:{count}"
                assert message.tool_calls is not None and [call.id for call in message.tool_calls] == [expected]
                stream = client.chat.completions.create(**body, stream=True)
                pieces = [call for chunk in stream for call in chunk.choices[0].delta.tool_calls or []]
                assert [piece.id for piece in pieces if piece.id] == [expected]
                result = {"role": "tool", "tool_call_id": expected, "content": "Rain"}
                turns += [message.model_dump(exclude_none=True), result]
            flat: Any = [{"type": "function", **TOOLS[0]["function"]}]
            output: Any = client.responses.create(model="tiny", input=QUESTION, tools=flat).output
            assert [item.call_id for item in output if item.type == "function_call"] == ["functions.weather:0"]
        prompt = read_chat(host.service, {"model": "tiny", "messages": turns}).prompt
        assert "<|tool_call_begin|>functions.weather:1<|" in prompt and "## Return of functions.weather:1" in prompt
        with anthropic.Anthropic(base_url=host.url, api_key="none", max_retries=0, timeout=SECONDS) as other:
            tools: Any = [{"name": "weather", "input_schema": PARAMETERS}]
            said: Any = other.messages.create(model="tiny", max_tokens=300, messages=QUESTION, tools=tools)
            assert said.content[0].id == "functions.weather:0"
