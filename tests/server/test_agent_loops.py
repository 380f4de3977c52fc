"""Agent loops against the server, in the formats that agents use most: two calls of tools, their results, an answer.

The loops are openai-agents', over both of OpenAI's APIs, and one of Anthropic's client. What the model writes is
scripted in the marks of its family, which are special tokens where the family has them so; prompts are rendered by the
real templates (text/test_real_templates.py says where they come from). Tools are not strict, so that nothing but the
script says how a call is written; text/test_format_grammars.py has the calls that a grammar writes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

import anthropic
import openai
import pydantic
import pytest
from llm import tiny
from text.agent_families import ANSWER, CITY, FAMILIES, THOUGHT, Family
from text.real_templates import FOLDER, read
from tokenizers import AddedToken, Tokenizer as Backend

from server.support import SECONDS, Hosted, ScriptedLLM, hosted

pytestmark = [
    pytest.mark.skipif(FOLDER is None, reason="INFINILM_CHAT_TEMPLATES names no folder with chat templates"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:agents"),
]


class RehearsedLLM(ScriptedLLM):
    """Says its scripts one after another, one to each request, and keeps what it was asked."""

    def rehearse(self, scripts: Sequence[str]) -> None:
        self.scripts, self.prompts = list(scripts), list[str]()

    def asubmit(self, prompts: Any, *arguments: Any, **options: Any) -> Any:
        self.script = self.scripts.pop(0)
        self.prompts.append(self.tokenizer.decode(prompts[0], skip_special_tokens=False))
        return super().asubmit(prompts, *arguments, **options)


@pytest.fixture(scope="module", params=FAMILIES)
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A family, its model and a server of it."""
    family = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("loops") / "tiny"
    tiny.make_checkpoint(folder, max_position_embeddings=16384, vocab_size=tiny.VOCAB_SIZE + len(family.special))
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in family.special])
    backend.save(str(folder / "tokenizer.json"))
    with RehearsedLLM(folder, chat_template=family.head + read(family.template)) as llm, hosted(llm) as host:
        yield family, llm, host


def test_the_families_are_ten() -> None:
    assert len(FAMILIES) == 10


def check(llm: RehearsedLLM, called: list[str], answer: str) -> None:
    """Tools ran with what the model wrote, and their results came back to it."""
    assert called == ["weather in Zürich", "time"] and answer == ANSWER
    assert not llm.scripts and len(llm.prompts) == 3
    first, second, third = llm.prompts
    assert "Rain, 12 degrees" not in first
    assert "Rain, 12 degrees" in second and "12:00" not in second
    assert "Rain, 12 degrees" in third and "12:00" in third and "Zürich" in third


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_openai_agents(played: tuple[Family, RehearsedLLM, Hosted], api: str, streamed: bool) -> None:
    import agents

    family, llm, host = played
    called: list[str] = []

    @agents.function_tool(strict_mode=False)
    def weather(city: str) -> str:
        """The weather in a city."""
        called.append(f"weather in {city}")
        return "Rain, 12 degrees"

    @agents.function_tool(strict_mode=False)
    def time() -> str:
        """The time of day."""
        called.append("time")
        return "12:00"

    async def run() -> str:
        agents.set_tracing_disabled(True)
        async with openai.AsyncOpenAI(base_url=f"{host.url}/v1", api_key="k", max_retries=0, timeout=SECONDS) as client:
            kind = agents.OpenAIChatCompletionsModel if api == "chat" else agents.OpenAIResponsesModel
            model = kind("tiny", client)
            agent = agents.Agent("Helper", instructions="Be brief.", tools=[weather, time], model=model)
            if not streamed:
                return str((await agents.Runner.run(agent, "How is it in Zürich, and when?")).final_output)
            result = agents.Runner.run_streamed(agent, "How is it in Zürich, and when?")
            async for _ in result.stream_events():
                pass
            return str(result.final_output)

    llm.rehearse([family.weather, family.time, family.answer])
    check(llm, called, asyncio.run(run()))


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_anthropic(played: tuple[Family, RehearsedLLM, Hosted], streamed: bool) -> None:
    family, llm, host = played
    called: list[str] = []
    tools: Any = [
        {
            "name": "weather",
            "description": "The weather in a city",
            "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
        {"name": "time", "description": "The time of day", "input_schema": {"type": "object", "properties": {}}},
    ]
    messages: Any = [{"role": "user", "content": "How is it in Zürich, and when?"}]
    llm.rehearse([family.weather, family.time, family.answer])
    with anthropic.Anthropic(base_url=host.url, api_key="k", max_retries=0, timeout=SECONDS) as client:
        while True:
            body: Any = {
                "model": "tiny",
                "max_tokens": 500,
                "system": "Be brief.",
                "messages": messages,
                "tools": tools,
            }
            if streamed:
                with client.messages.stream(**body) as stream:
                    message = stream.get_final_message()
            else:
                message = client.messages.create(**body)
            assert [b.thinking.strip() for b in message.content if b.type == "thinking"] == [THOUGHT] * family.thinks
            messages.append({"role": "assistant", "content": message.content})
            uses = [block for block in message.content if block.type == "tool_use"]
            if not uses:
                break
            assert message.stop_reason == "tool_use"
            results = []
            for use in uses:
                called.append(f"weather in {use.input['city']}" if use.name == "weather" else use.name)
                said = "Rain, 12 degrees" if use.name == "weather" else "12:00"
                results.append({"type": "tool_result", "tool_use_id": use.id, "content": said})
            messages.append({"role": "user", "content": results})
    check(llm, called, "".join(block.text for block in message.content if block.type == "text"))


CITIES: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ASKED: Any = [{"role": "user", "content": "How is it in Zürich, and when?"}]


def checked(kind: Any, *values: Any) -> None:
    """All that a client took is of its own types, whole: clients themselves read objects without a check."""
    for value in values:
        pydantic.TypeAdapter(kind).validate_python(value.to_dict())


def test_events_of_responses(played: tuple[Family, RehearsedLLM, Hosted]) -> None:
    family, llm, host = played
    llm.rehearse([family.weather, family.weather])
    body: Any = {"model": "tiny", "input": ASKED, "instructions": "Be brief."}
    body["tools"] = [{"type": "function", "name": "weather", "parameters": CITIES, "strict": False}]
    with openai.OpenAI(base_url=f"{host.url}/v1", api_key="k", max_retries=0, timeout=SECONDS) as client:
        whole = client.responses.create(**body)
        events: Any = list(client.responses.create(**body, stream=True))
    checked(openai.types.responses.Response, whole)
    checked(openai.types.responses.ResponseStreamEvent, *events)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    for response in (whole, events[-1].response):
        assert [item.type for item in response.output] == ["reasoning"] * family.thinks + ["function_call"]
        assert (response.output[-1].name, json.loads(response.output[-1].arguments)) == ("weather", json.loads(CITY))
    for kind, told in (
        ("response.function_call_arguments.delta", events[-1].response.output[-1].arguments),
        ("response.reasoning_text.delta", events[-1].response.output[0].content[0].text if family.thinks else ""),
    ):
        assert "".join(event.delta for event in events if event.type == kind) == told


def test_events_of_messages(played: tuple[Family, RehearsedLLM, Hosted]) -> None:
    family, llm, host = played
    llm.rehearse([family.weather, family.weather])
    body: Any = {"model": "tiny", "max_tokens": 500, "system": "Be brief.", "messages": ASKED}
    body["tools"] = [{"name": "weather", "input_schema": CITIES}]
    with anthropic.Anthropic(base_url=host.url, api_key="k", max_retries=0, timeout=SECONDS) as client:
        whole = client.messages.create(**body)
        events: Any = list(client.messages.create(**body, stream=True))
        with_blocks = [event for event in events if event.type.startswith("content_block")]
    checked(anthropic.types.Message, whole)
    checked(anthropic.types.RawMessageStreamEvent, *events)
    kinds = ["thinking"] * family.thinks + ["tool_use"]
    assert [block.type for block in whole.content] == kinds
    assert [event.content_block.type for event in events if event.type == "content_block_start"] == kinds
    assert [event.index for event in with_blocks] == sorted(event.index for event in with_blocks)
    deltas = [event.delta for event in events if event.type == "content_block_delta"]
    written = "".join(delta.partial_json for delta in deltas if delta.type == "input_json_delta")
    assert json.loads(written) == whole.content[-1].input == json.loads(CITY)
    thought = "".join(delta.thinking for delta in deltas if delta.type == "thinking_delta")
    assert (
        thought == (whole.content[0].thinking if family.thinks else "") and thought.strip() == THOUGHT * family.thinks
    )
    assert {event.delta.stop_reason for event in events if event.type == "message_delta"} == {whole.stop_reason}
