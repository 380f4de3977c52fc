"""Agent loops against the server, in the formats that agents use most: two calls of tools, their results, an answer.

The loops are openai-agents', over both of OpenAI's APIs, and one of Anthropic's client. What the model writes is
scripted in the marks of its family, which are special tokens where the family has them so; prompts are rendered by the
real templates (text/test_real_templates.py says where they come from). Tools are not strict, so that nothing but the
script says how a call is written; text/test_format_grammars.py has the calls that a grammar writes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import anthropic
import openai
import pytest
from llm import tiny
from text.real_templates import FOLDER, read
from tokenizers import AddedToken, Tokenizer as Backend

from server.support import SECONDS, Hosted, ScriptedLLM, hosted

pytestmark = [
    pytest.mark.skipif(FOLDER is None, reason="INFINILM_CHAT_TEMPLATES names no folder with chat templates"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:agents"),
]

CITY = '{"city": "Zürich"}'
THOUGHT = "I look."
ANSWER = "It rains at noon."


class Family(NamedTuple):
    """How a family writes a call of `weather`, one of `time`, and an answer, and which marks are special tokens."""

    template: str
    weather: str
    time: str
    answer: str = ANSWER
    special: Sequence[str] = ()
    thinks: bool = True
    head: str = ""  # of the template, where its own shows no tools


THINK = f"<think>\n{THOUGHT}\n</think>\n\n"
BEGUN = f"{THOUGHT}\n</think>\n\n"  # the prompt has begun it
HARMONY = f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant"
HARMONY_CALL = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.{}:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|>"
)
HERMES = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
CODER = "<tool_call>\n<function={}>\n{}</function>\n</tool_call>"
MINIMAX = '<minimax:tool_call>\n<invoke name="{}">\n{}</invoke>\n</minimax:tool_call>'

FAMILIES = {
    "harmony": Family(
        "openai-gpt-oss-120b",
        HARMONY + HARMONY_CALL.format("weather", CITY),
        HARMONY + HARMONY_CALL.format("time", "{}"),
        f"{HARMONY}<|channel|>final<|message|>{ANSWER}",
        ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
    ),
    "deepseek v3.1": Family(
        "deepseek-ai-DeepSeek-V3.1",
        DEEPSEEK.format("weather", CITY),
        DEEPSEEK.format("time", "{}"),
        special=(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
        ),
        thinks=False,
        head="{% if tools %}{{ tools | tojson }}{% endif %}",
    ),
    "kimi k2": Family(
        "moonshotai-Kimi-K2",
        KIMI.format("weather", CITY),
        KIMI.format("time", "{}"),
        special=(
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
            *("<|tool_call_end|>", "<|tool_call_argument_begin|>", "<|im_end|>"),
        ),
        thinks=False,
    ),
    "minimax m2": Family(
        "MiniMax-M2",
        BEGUN + MINIMAX.format("weather", '<parameter name="city">Zürich</parameter>\n'),
        BEGUN + MINIMAX.format("time", ""),
        BEGUN + ANSWER,
        ("[e~[", "]~b]"),
    ),
    "glm": Family(
        "GLM-4.6",
        f"<think>{THOUGHT}</think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n</tool_call>",
        f"<think>{THOUGHT}</think>\n<tool_call>time\n</tool_call>",
        f"<think>{THOUGHT}</think>\n{ANSWER}",
        ("<|user|>", "<|observation|>"),
    ),
    "qwen3": Family(
        "Qwen-Qwen3-0.6B",
        THINK + HERMES.format("weather", CITY),
        THINK + HERMES.format("time", "{}"),
        THINK + ANSWER,
        ("<|im_start|>", "<|im_end|>"),
    ),
    "qwen3 coder": Family(
        "Qwen3-Coder",
        CODER.format("weather", "<parameter=city>\nZürich\n</parameter>\n"),
        CODER.format("time", ""),
        special=("<|im_start|>", "<|im_end|>"),
        thinks=False,
    ),
    "gemma 4": Family(
        "google-gemma-4-31B-it",
        f'<|channel>thought\n{THOUGHT}<channel|><|tool_call>call:weather{{city:<|"|>Zürich<|"|>}}<tool_call|>',
        f"<|channel>thought\n{THOUGHT}<channel|><|tool_call>call:time{{}}<tool_call|>",
        f"<|channel>thought\n{THOUGHT}<channel|>{ANSWER}",
        ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<turn|>", "<|turn>"),
    ),
    "mistral": Family(
        "Mistral-Small-3.2-24B-Instruct-2506",
        f"[TOOL_CALLS]weather[CALL_ID]123456789[ARGS]{CITY}",
        "[TOOL_CALLS]time[CALL_ID]abcdefghi[ARGS]{}",
        special=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[INST]", "[/INST]"),
        thinks=False,
    ),
    "llama 3": Family(
        "meta-llama-Llama-3.1-8B-Instruct",
        f'{{"name": "weather", "parameters": {CITY}}}',
        '{"name": "time", "parameters": {}}',
        special=("<|eot_id|>", "<|python_tag|>", "<|start_header_id|>", "<|end_header_id|>"),
        thinks=False,
    ),
}


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
