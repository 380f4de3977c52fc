"""Tools, in three APIs and the words of several families of models: what the model writes is scripted."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from goldens import golden
from hypothesis import example, given, settings, strategies as st
from llm import tiny
from quantised_files.conversion import resized

from infinilm import LLM, AnswerPart
from infinilm.server.answers import ChoiceMaker
from infinilm.server.chat import read_chat
from infinilm.server.messages import MessageBuilder
from infinilm.server.responses import ResponseBuilder
from infinilm.text.chat_formats import tool_call_format
from server.support import SECONDS, Hosted, ScriptedLLM, hosted, http_post
from server.templates import SEED_OSS, TEMPLATES, THINKING, WRITERS

PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": "It is", "parameters": PARAMETERS}}
    for name in ("weather", "time")
]
CALLS: list[tuple[str, dict[str, Any]]] = [("weather", {"city": "Zürich", "n": [1, {"a": "}"}]}), ("time", {})]
QUESTION: Any = [{"role": "user", "content": "How is it?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_checkpoint(tmp_path_factory.mktemp("tools") / "tiny", max_position_embeddings=4096)


@pytest.fixture(scope="module", params=list(TEMPLATES))
def family(folder: Path, request: pytest.FixtureRequest) -> Iterator[tuple[str, ScriptedLLM, Hosted]]:
    with ScriptedLLM(folder, chat_template=TEMPLATES[request.param]) as llm, hosted(llm) as host:
        yield request.param, llm, host


@pytest.fixture(params=["tiny", "qwen3-5", "gemma4-a4b", "kimi-k2"])
def thinker(folder: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[ScriptedLLM, Hosted]]:
    """Models of several families, most of them with layers that are not alike."""
    if request.param != "tiny":
        ends = {"bos_token_id": tiny.BOS, "eos_token_id": tiny.EOS}
        sizes = {"vocab_size": tiny.VOCAB_SIZE, "max_position_embeddings": 4096}
        folder = resized(golden(request.param), tmp_path / "model", **ends, **sizes)
        tiny.add_tokenizer(folder)
    with ScriptedLLM(folder, chat_template=THINKING) as llm, hosted(llm) as host:
        yield llm, host


def chat(host: Hosted) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{host.url}/v1", api_key="none", max_retries=0, timeout=SECONDS)


def claude(host: Hosted) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=host.url, api_key="none", max_retries=0, timeout=SECONDS)


def test_calls_of_a_chat(family: tuple[str, ScriptedLLM, Hosted]) -> None:
    name, llm, host = family
    llm.script = WRITERS[name](CALLS)
    call: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "tools": TOOLS}
    with chat(host) as client:
        (choice,) = client.chat.completions.create(**call).choices
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        found: Any = choice.message.tool_calls
        assert [(c.function.name, json.loads(c.function.arguments)) for c in found] == CALLS
        assert len({c.id for c in found}) == 2
        streamed: dict[int, list[Any]] = {}
        last = None
        for chunk in client.chat.completions.create(**call, stream=True):
            for delta in chunk.choices[0].delta.tool_calls or ():
                streamed.setdefault(delta.index, []).append(delta)
            last = chunk.choices[0].finish_reason
        assert last == "tool_calls"
        for i, deltas in streamed.items():
            assert deltas[0].id and deltas[0].type == "function" and deltas[0].function.name == CALLS[i][0]
            assert all(d.id is None and d.function.name is None for d in deltas[1:])
            assert json.loads("".join(d.function.arguments for d in deltas)) == CALLS[i][1]
        assert len(streamed) == 2
        one = client.chat.completions.create(**call, parallel_tool_calls=False).choices[0].message.tool_calls
        assert one is not None and len(one) == 1
        # With tools out of play, the same text is content.
        plain = client.chat.completions.create(**call, tool_choice="none").choices[0]
        assert (plain.message.tool_calls, plain.finish_reason) == (None, "stop")
        assert plain.message.content == llm.script
        llm.script = "It is fine."
        plain = client.chat.completions.create(**call).choices[0]
        assert (plain.message.content, plain.finish_reason) == ("It is fine.", "stop")


def test_results_come_back(family: tuple[str, ScriptedLLM, Hosted]) -> None:
    """What each API sends in the second turn is the same prompt."""
    name, llm, host = family
    llm.script = WRITERS[name](CALLS[:1])
    with chat(host) as client, claude(host) as other:
        first = client.chat.completions.create(model="tiny", messages=QUESTION, tools=TOOLS).choices[0].message
        assert first.tool_calls is not None
        call_id = first.tool_calls[0].id
        turns: list[Any] = [*QUESTION, first, {"role": "tool", "tool_call_id": call_id, "content": "Rain"}]
        arguments: Any = first.tool_calls[0].function.arguments  # type: ignore[union-attr]
        llm.script = "Rain, it seems."
        answer = client.chat.completions.create(model="tiny", messages=turns, tools=TOOLS)
        assert answer.choices[0].message.content == llm.script
        items: Any = [
            *QUESTION,
            {"type": "function_call", "call_id": call_id, "name": "weather", "arguments": arguments},
            {"type": "function_call_output", "call_id": call_id, "output": "Rain"},
        ]
        flat: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
        response = client.responses.create(model="tiny", input=items, tools=flat)
        assert response.output_text == llm.script
        blocks: Any = [
            *QUESTION,
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": call_id, "name": "weather", "input": json.loads(arguments)}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call_id, "content": "Rain"}]},
        ]
        schemas: Any = [
            {"name": f["function"]["name"], "description": "It is", "input_schema": PARAMETERS} for f in TOOLS
        ]
        message = other.messages.create(model="tiny", max_tokens=50, messages=blocks, tools=schemas)
        assert message.content[0].text == llm.script  # type: ignore[union-attr]
        tokens = answer.usage.prompt_tokens if answer.usage else 0
        assert response.usage is not None and response.usage.input_tokens == tokens
        assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == tokens
        counted = other.messages.count_tokens(model="tiny", messages=blocks, tools=schemas)
        assert counted.input_tokens == tokens


@pytest.mark.parametrize("arguments", ['{"city": "Par', "no JSON", "[1]", '{"city": "\\ud83d"}'])
def test_a_conversation_goes_on_behind_broken_arguments(
    family: tuple[str, ScriptedLLM, Hosted], arguments: str
) -> None:
    """The model's own, that an agent sends back with the complaint of its tool: the model reads what it wrote."""
    name, llm, host = family
    llm.script = "I try again."
    call = {"id": "abcdefgh1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    complaint = "the arguments are no JSON"
    turns: list[Any] = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}]
    turns.append({"role": "tool", "tool_call_id": "abcdefgh1", "content": complaint})
    prompt = read_chat(host.service, {"model": "tiny", "messages": turns, "tools": TOOLS}).prompt
    is_tagged = name in ("qwen3 coder", "seed oss", "glm")  # whose values are plain text
    assert (arguments if is_tagged else json.dumps({"INVALID_JSON": arguments})) in prompt
    assert "INVALID_JSON" in prompt and complaint in prompt
    items: Any = [
        *QUESTION,
        {"type": "function_call", "call_id": "abcdefgh1", "name": "weather", "arguments": arguments},
        {"type": "function_call_output", "call_id": "abcdefgh1", "output": complaint},
    ]
    flat: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
    with chat(host) as client:
        answer = client.chat.completions.create(model="tiny", messages=turns, tools=TOOLS).choices[0].message
        assert answer.content == llm.script
        assert client.responses.create(model="tiny", input=items, tools=flat).output_text == llm.script


def test_a_conversation_that_began_elsewhere_goes_on(family: tuple[str, ScriptedLLM, Hosted]) -> None:
    """With ids of calls as other servers make them; Mistral's templates take nine letters and digits."""
    name, llm, host = family
    llm.script = "Rain, it seems."
    ids = ["call_abc0DEF1ghi2JKL3", "toolu_01A09q90qw90lq917835lq9", "chatcmpl-tool-0a1b2c3d4e5f", "abcdefgh1"]
    turns: list[Any] = list(QUESTION)
    for call_id in ids:
        call = {"id": call_id, "type": "function", "function": {"name": "weather", "arguments": "{}"}}
        turns.append({"role": "assistant", "content": None, "tool_calls": [call]})
        turns.append({"role": "tool", "tool_call_id": call_id, "content": "Rain"})
    prompt = read_chat(host.service, {"model": "tiny", "messages": turns, "tools": TOOLS}).prompt
    if name == "mistral":
        shown = re.findall(r'"id": "(\w{9})"', prompt)
        assert shown == re.findall(r'"call_id": "(\w{9})"', prompt)
        assert len(set(shown)) == len(ids) and shown[-1] == ids[-1]
    blocks: list[Any] = list(QUESTION)
    for call_id in ids:
        use = {"type": "tool_use", "id": call_id, "name": "weather", "input": {}}
        result = {"type": "tool_result", "tool_use_id": call_id, "content": "Rain"}
        blocks += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    tools: Any = [{"name": f["function"]["name"], "description": "It is", "input_schema": PARAMETERS} for f in TOOLS]
    with chat(host) as client, claude(host) as other:
        answer = client.chat.completions.create(model="tiny", messages=turns, tools=TOOLS)
        assert answer.choices[0].message.content == llm.script and answer.usage is not None
        counted = other.messages.count_tokens(model="tiny", messages=blocks, tools=tools).input_tokens
        assert counted == answer.usage.prompt_tokens


def test_results_that_are_errors(family: tuple[str, ScriptedLLM, Hosted]) -> None:
    """The model is told."""
    _, _, host = family
    call = {"type": "tool_use", "id": "abcdefgh1", "name": "weather", "input": {"city": "Paris"}}

    def num_tokens(content: Any, **more: Any) -> int:
        result = {"type": "tool_result", "tool_use_id": "abcdefgh1", "content": content, **more}
        turns: Any = [*QUESTION, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
        tools: Any = [{"name": f["function"]["name"], "input_schema": PARAMETERS} for f in TOOLS]
        with claude(host) as client:
            return client.messages.count_tokens(model="tiny", messages=turns, tools=tools).input_tokens

    plain = num_tokens("no such city")
    assert num_tokens("no such city", is_error=False) == plain
    assert num_tokens("no such city", is_error=True) == num_tokens("Error: no such city") > plain
    text = {"type": "text", "text": "no such city"}
    assert num_tokens([text], is_error=True) == num_tokens("Error:\nno such city")
    with pytest.raises(anthropic.BadRequestError, match="is_error: expected true or false"):
        num_tokens("x", is_error="yes")


def test_strict_calls_are_read_as_their_grammar_writes_them(family: tuple[str, ScriptedLLM, Hosted]) -> None:
    """None gets past it between the tags that the family writes otherwise."""
    name, _, host = family
    for strict in (False, True):
        schema = {**PARAMETERS, "required": ["city"], "additionalProperties": False}
        tools = [{"type": "function", "function": {"name": "weather", "strict": strict, "parameters": schema}}]
        form = read_chat(host.service, {"model": "tiny", "messages": QUESTION, "tools": tools}).answers.calls
        assert form is not None
        assert (form.tags is not None) == (name in ("qwen3 coder", "seed oss", "glm") and not strict)


def test_reasoning_and_calls_of_seed_oss(folder: Path) -> None:
    template = SEED_OSS + "{# reasoning stands before </seed:think> #}"
    with ScriptedLLM(folder, chat_template=template) as llm, hosted(llm) as host, chat(host) as client:
        llm.script = "<seed:think>Rain?</seed:think>" + WRITERS["seed oss"](CALLS)
        message: Any = client.chat.completions.create(model="tiny", messages=QUESTION, tools=TOOLS).choices[0].message
        assert (message.reasoning_content, message.content) == ("Rain?", None)
        assert [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls] == CALLS


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(list(TEMPLATES)),
    begin=st.sampled_from(["", "I look.\n"]),
    length=st.integers(0, 200),
    cuts=st.lists(st.integers(0, 200), max_size=12),
    messages=st.booleans(),
)
@example(name="qwen", begin="", length=120, cuts=[40], messages=True)
def test_blocks_are_the_same_for_any_cut(name: str, begin: str, length: int, cuts: list[int], messages: bool) -> None:
    """Also of an answer that ends in the middle of a call."""
    text = (begin + WRITERS[name](CALLS))[:length]

    def blocks(places: list[int]) -> list[Any]:
        form = tool_call_format(TEMPLATES[name])
        maker = ChoiceMaker("", reasoning=None, form=form, schemas=dict.fromkeys(("weather", "time"), PARAMETERS))
        builder: Any = MessageBuilder("m") if messages else ResponseBuilder({}, None, {}, lambda output: {})
        edges = [0, *sorted(place for place in places if place < len(text)), len(text)]
        events: list[Any] = []
        arguments: dict[int, str] = {}  # as of a chat
        pieces: list[AnswerPart] = []
        for a, b in itertools.pairwise(edges):
            piece = maker.push(text[a:b], final=b == len(text))
            events += builder.push(piece)
            pieces += piece.parts
            indices = [call["index"] for call in piece.tool_calls]
            assert len(set(indices)) == len(indices)  # clients take the place of a piece for a call
            for call in piece.tool_calls:
                arguments[call["index"]] = arguments.get(call["index"], "") + call["function"]["arguments"]
        assert "".join(arguments.values()) == "".join(part.text for part in pieces if part.kind == "call")
        events += builder.end_block()
        assert events or not text
        return [{k: v for k, v in block.items() if k not in ("id", "call_id")} for block in builder.blocks]

    assert blocks(cuts) == blocks([])


def test_calls_of_a_response(family: tuple[str, ScriptedLLM, Hosted]) -> None:
    name, llm, host = family
    llm.script = WRITERS[name](CALLS)
    tools: Any = [{"type": "function", **tool["function"]} for tool in TOOLS] + [{"type": "web_search"}]
    call: dict[str, Any] = {"model": "tiny", "input": "How is it?", "tools": tools}
    with chat(host) as client:
        response = client.responses.create(**call)
        found: Any = response.output
        assert [(c.type, c.name, json.loads(c.arguments)) for c in found] == [("function_call", *c) for c in CALLS]
        events = list(client.responses.create(**call, stream=True))
        assert [e.sequence_number for e in events] == list(range(len(events)))
        assert events[0].type == "response.created"
        end: Any = events[-1]
        assert end.type == "response.completed"
        assert [(c.name, c.arguments) for c in end.response.output] == [(c.name, c.arguments) for c in found]
        for index, item in enumerate(found):
            deltas = [
                e.delta
                for e in events
                if e.type == "response.function_call_arguments.delta" and e.output_index == index
            ]
            assert "".join(deltas) == item.arguments


def test_calls_of_a_message(family: tuple[str, ScriptedLLM, Hosted]) -> None:
    name, llm, host = family
    llm.script = WRITERS[name](CALLS)
    tools: Any = [{"name": f["function"]["name"], "input_schema": PARAMETERS} for f in TOOLS]
    tools.append({"type": "web_search_20250305", "name": "web_search"})
    call: dict[str, Any] = {"model": "tiny", "max_tokens": 300, "messages": QUESTION, "tools": tools}
    with claude(host) as client:
        message = client.messages.create(**call)
        assert message.stop_reason == "tool_use"
        found: Any = message.content
        assert [(b.type, b.name, b.input) for b in found] == [("tool_use", *c) for c in CALLS]
        with client.messages.stream(**call) as stream:
            streamed: Any = stream.get_final_message()
        assert [(b.type, b.name, b.input) for b in streamed.content] == [("tool_use", *c) for c in CALLS]
        assert streamed.stop_reason == "tool_use"
        assert streamed.usage.output_tokens == message.usage.output_tokens
        with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
            client.messages.create(**call, tool_choice={"type": "tool", "name": "unknown"})


def test_reasoning_is_apart(thinker: tuple[ScriptedLLM, Hosted]) -> None:
    llm, host = thinker
    llm.script = "Let me see. </think>\n\nIt rains."
    with chat(host) as client, claude(host) as other:
        answer: Any = client.chat.completions.create(model="tiny", messages=QUESTION).choices[0].message
        assert (answer.content, answer.reasoning_content, answer.reasoning) == (
            "It rains.",
            "Let me see. ",
            "Let me see. ",
        )
        deltas: Any = [c.choices[0].delta for c in client.chat.completions.create(
            model="tiny", messages=QUESTION, stream=True)]  # fmt: skip
        for name, text in (
            ("content", "It rains."),
            ("reasoning_content", "Let me see. "),
            ("reasoning", "Let me see. "),
        ):
            assert "".join(getattr(delta, name, None) or "" for delta in deltas) == text
        response: Any = client.responses.create(model="tiny", input="How is it?").output
        assert [item.type for item in response] == ["reasoning", "message"]
        assert response[0].content[0].text == "Let me see. " and response[1].content[0].text == "It rains."
        with other.messages.stream(model="tiny", max_tokens=50, messages=QUESTION) as stream:
            message: Any = stream.get_final_message()
        assert [block.type for block in message.content] == ["thinking", "text"]
        assert message.content[0].thinking == "Let me see. " and message.content[1].text == "It rains."
        llm.script = None
        said: Any = client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=5, temperature=0)
        assert 0 < said.usage.completion_tokens <= 5 and said.choices[0].finish_reason in ("stop", "length")


def test_calls_in_parallel_come_back(family: tuple[str, ScriptedLLM, Hosted]) -> None:
    """As one message, in each API."""
    name, llm, host = family
    llm.script = WRITERS[name](CALLS)
    with chat(host) as client, claude(host) as other:
        first = client.chat.completions.create(model="tiny", messages=QUESTION, tools=TOOLS).choices[0].message
        calls: Any = first.tool_calls
        results: Any = [{"role": "tool", "tool_call_id": c.id, "content": c.function.name} for c in calls]
        llm.script = "x"
        usage = client.chat.completions.create(model="tiny", messages=[*QUESTION, first, *results], tools=TOOLS).usage
        items: Any = [{"type": "function_call", "call_id": c.id, "name": c.function.name,
                       "arguments": c.function.arguments} for c in calls]  # fmt: skip
        items += [{"type": "function_call_output", "call_id": c.id, "output": c.function.name} for c in calls]
        flat: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
        response = client.responses.create(model="tiny", input=[*QUESTION, *items], tools=flat)
        uses: Any = [{"type": "tool_use", "id": c.id, "name": c.function.name,
                      "input": json.loads(c.function.arguments)} for c in calls]  # fmt: skip
        told: Any = [{"type": "tool_result", "tool_use_id": c.id, "content": c.function.name} for c in calls]
        blocks: Any = [*QUESTION, {"role": "assistant", "content": uses}, {"role": "user", "content": told}]
        schemas: Any = [
            {"name": f["function"]["name"], "description": "It is", "input_schema": PARAMETERS} for f in TOOLS
        ]
        counted = other.messages.count_tokens(model="tiny", messages=blocks, tools=schemas)
        assert usage is not None and response.usage is not None
        assert usage.prompt_tokens == response.usage.input_tokens == counted.input_tokens


def test_marks_of_calls_are_read(folder: Path) -> None:
    """Where they are special tokens, which an answer has not otherwise."""
    with LLM(folder, chat_template=TEMPLATES["mistral"]) as llm, hosted(llm) as host:
        body = {"model": "tiny", "messages": QUESTION, "max_tokens": 5}
        assert read_chat(host.service, body).params.skip_special_tokens
        assert not read_chat(host.service, body | {"tools": TOOLS}).params.skip_special_tokens


def test_a_call_that_is_cut(family: tuple[str, ScriptedLLM, Hosted]) -> None:
    """Its arguments are no JSON, and the answer says that it was cut."""
    name, llm, host = family
    llm.script = WRITERS[name]([("weather", {"city": "x" * 200})])
    with chat(host) as client, claude(host) as other:
        call: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "tools": TOOLS, "max_tokens": 60}
        (choice,) = client.chat.completions.create(**call).choices
        assert choice.finish_reason == "length" and choice.message.tool_calls is not None
        *_, last = client.chat.completions.create(**call, stream=True)
        assert last.choices[0].finish_reason == "length"
        tools: Any = [{"name": "weather", "input_schema": PARAMETERS}]
        message = other.messages.create(model="tiny", max_tokens=60, messages=QUESTION, tools=tools)
        assert message.stop_reason == "max_tokens" and message.content[0].type == "tool_use"
        (begun,) = message.content[0].input.values()
        assert isinstance(begun, str) and begun.startswith('{"city": "xxx')


def told(client: openai.OpenAI, other: anthropic.Anthropic) -> Iterator[tuple[str, str, list[tuple[str, str]], str]]:
    """By API, whole and streamed: content, calls with their arguments as text, and why the answer ended."""
    call: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "tools": TOOLS}
    (choice,) = client.chat.completions.create(**call).choices
    calls: Any = choice.message.tool_calls or []
    found = [(one.function.name, one.function.arguments) for one in calls]
    yield "chat", choice.message.content or "", found, choice.finish_reason
    content, made, reason = "", list[tuple[str, str]](), ""
    for chunk in client.chat.completions.create(**call, stream=True):
        delta: Any = chunk.choices[0].delta
        content += delta.content or ""
        for part in delta.tool_calls or ():
            made += [(part.function.name, "")] if part.function.name else []
            made[part.index] = (made[part.index][0], made[part.index][1] + (part.function.arguments or ""))
        reason = chunk.choices[0].finish_reason or reason
    yield "chat, streamed", content, made, reason

    flat: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
    asked: dict[str, Any] = {"model": "tiny", "input": "How is it?", "tools": flat}
    *events, last = client.responses.create(**asked, stream=True)
    for name, response in (("response", client.responses.create(**asked)), ("response, streamed", last.response)):
        calls = [item for item in response.output if item.type == "function_call"]
        yield name, response.output_text, [(one.name, one.arguments) for one in calls], ""
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == "".join(one.arguments for one in calls)

    schemas: Any = [{"name": tool["function"]["name"], "input_schema": PARAMETERS} for tool in TOOLS]
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 300, "messages": QUESTION, "tools": schemas}
    message = other.messages.create(**body)
    uses = [block for block in message.content if block.type == "tool_use"]
    content = "".join(block.text for block in message.content if block.type == "text")
    yield "message", content, [(use.name, use.input.get("INVALID_JSON", json.dumps(use.input))) for use in uses], ""
    content, made = "", []
    for event in other.messages.create(**body, stream=True):
        if event.type == "content_block_start" and event.content_block.type == "tool_use":
            made.append((event.content_block.name, ""))
        elif event.type == "content_block_delta" and event.delta.type == "input_json_delta":
            made[-1] = (made[-1][0], made[-1][1] + event.delta.partial_json)
        elif event.type == "content_block_delta" and event.delta.type == "text_delta":
            content += event.delta.text
    yield "message, streamed", content, made, ""


def test_calls_that_break(family: tuple[str, ScriptedLLM, Hosted]) -> None:
    """In each API, whole and streamed, all that the model wrote is content or arguments, and the server goes on."""
    name, llm, host = family
    whole = WRITERS[name]([("weather", {"city": "Bern", "n": [1]})])
    is_text = name in ("qwen3 coder", "seed oss", "glm")  # the values are no JSON, which the arguments are made of
    broken = '{"city": "Bern", "n": NaN}' if not is_text else ""
    with chat(host) as client, claude(host) as other:
        for script, content, arguments in [
            (whole.replace("weather", "wether"), whole.replace("weather", "wether"), None),  # there is no such tool
            (whole[: whole.index("Bern") + 2], "", '{"city": "Be'),  # the model ended within it
            (whole.replace("[1]", "NaN"), "", broken or json.dumps({"city": "Bern", "n": "NaN"})),
            (whole.replace("[1]", '"\\ud83d"'), "", None if is_text else '{"city": "Bern", "n": "\\ud83d"}'),
            (f"Hm. {whole[: whole.index('weather')]}", f"Hm. {whole[: whole.index('weather')]}", None),
        ]:
            llm.script = script
            for api, text, calls, reason in told(client, other):
                where = name, api, script
                if arguments is None and not content:
                    assert [tool for tool, _ in calls] == ["weather"], where
                else:
                    assert calls == ([] if arguments is None else [("weather", arguments)]), where
                assert text.strip() == content.strip(), where
                assert reason in ("", "tool_calls" if calls else "stop"), where
        llm.script = "It is fine."
        assert {text for _, text, _, _ in told(client, other)} == {llm.script}


def test_a_template_that_takes_one_call(folder: Path) -> None:
    """Gets one: the answer has to go back into it."""
    check = "{% for m in messages if m.tool_calls and m.tool_calls | length != 1 %}"
    check += "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endfor %}"
    with ScriptedLLM(folder, chat_template=TEMPLATES["llama3"] + check) as llm, hosted(llm) as host:
        llm.script = WRITERS["llama3"](CALLS)
        with chat(host) as client:
            call: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "tools": TOOLS}
            first = client.chat.completions.create(**call).choices[0].message
            assert first.tool_calls is not None and len(first.tool_calls) == 1
            result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "Rain"}
            assert client.chat.completions.create(**{**call, "messages": [*QUESTION, first, result]}).choices


def test_reasoning_of_the_history(folder: Path) -> None:
    """Each API hands it to the template; and how much to reason."""
    template = (
        "{% for m in messages %}{{ m.role }}{{ m.reasoning_content or '' }}{{ m.content }}{% endfor %}"
        "{{ 'no' if enable_thinking is false else 'yes' }}"
    )
    with ScriptedLLM(folder, chat_template=template) as llm, hosted(llm) as host, chat(host) as client:
        llm.script = "x"
        thought: Any = {"role": "assistant", "content": "a", "reasoning_content": "because " * 9}
        turns: list[Any] = [*QUESTION, thought, {"role": "user", "content": "b"}]
        expected = len(llm.tokenizer.encode(llm.chat_template.render(turns), add_special_tokens=False))
        usage = client.chat.completions.create(model="tiny", messages=turns).usage
        assert usage is not None and usage.prompt_tokens == expected
        part = {"type": "reasoning_text", "text": "because " * 9}
        items: Any = [
            QUESTION[0],
            {"type": "reasoning", "id": "r", "summary": [], "content": [part]},
            {"role": "assistant", "content": "a"},
            turns[2],
        ]
        response = client.responses.create(model="tiny", input=items)
        assert response.usage is not None and response.usage.input_tokens == expected
        blocks: Any = [{"type": "thinking", "thinking": "because " * 9, "signature": ""}, {"type": "text", "text": "a"}]
        messages: Any = [QUESTION[0], {"role": "assistant", "content": blocks}, turns[2]]
        with claude(host) as other:
            assert other.messages.count_tokens(model="tiny", messages=messages).input_tokens == expected
            off: Any = {"type": "disabled"}
            assert other.messages.count_tokens(model="tiny", messages=messages, thinking=off).input_tokens < expected
        usage = client.chat.completions.create(model="tiny", messages=turns, reasoning_effort="none").usage
        assert usage is not None and usage.prompt_tokens < expected


def test_responses_are_chats(family: tuple[str, ScriptedLLM, Hosted]) -> None:
    _, llm, host = family
    llm.script = "A plain answer, said in a few words."
    with chat(host) as client:
        response = client.responses.create(model="tiny", input="Hi", instructions="Be brief", store=False)
        assert (response.output_text, response.status) == (llm.script, "completed")
        said: Any = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}]
        usage = client.chat.completions.create(model="tiny", messages=said).usage
        assert response.usage is not None and usage is not None
        assert response.usage.input_tokens == usage.prompt_tokens
        with client.responses.stream(model="tiny", input="Hi") as stream:
            text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
            assert text == stream.get_final_response().output_text == llm.script
        short = client.responses.create(model="tiny", input="Hi", max_output_tokens=3)
        assert short.status == "incomplete" and short.incomplete_details is not None
        assert short.incomplete_details.reason == "max_output_tokens"
        bad: list[tuple[dict[str, Any], str]] = [
            ({"previous_response_id": "resp_1"}, "previous_response_id"),
            ({"background": True}, "background"),
            ({"truncation": "auto"}, "truncation"),
            ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
            ({"tool_choice": "required"}, "tool_choice"),
            ({"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "text.format"),
            ({"tempratur": 1}, "tempratur"),
        ]
        for fields, param in bad:
            body = {"model": "tiny", "input": "Hi", **fields}
            with pytest.raises(openai.BadRequestError) as caught:
                client.post("/responses", body=body, cast_to=object)
            assert caught.value.param == param, caught.value.message


def test_messages_are_chats(family: tuple[str, ScriptedLLM, Hosted]) -> None:
    _, llm, host = family
    llm.script = "A plain answer, said in a few words."
    call: dict[str, Any] = {"model": "tiny", "max_tokens": 50, "messages": QUESTION}
    call["system"] = [{"type": "text", "text": "Be brief", "cache_control": {"type": "ephemeral"}}]
    with claude(host) as client:
        message: Any = client.messages.create(**call)
        assert (message.content[0].text, message.stop_reason) == (llm.script, "end_turn")
        with client.messages.stream(**call) as stream:
            assert "".join(stream.text_stream) == llm.script
        stopped: Any = client.messages.create(**call, stop_sequences=["said"])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "said")
        short = client.messages.create(**{**call, "max_tokens": 2})
        assert short.stop_reason == "max_tokens"
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(**{**call, "model": "claude"})
        image = {"type": "image", "source": {"type": "url", "url": "x"}}
        with pytest.raises(anthropic.BadRequestError, match="image"):
            client.messages.create(**{**call, "messages": [{"role": "user", "content": [image]}]})
    answer = http_post(f"{host.url}/v1/messages", json={"model": "tiny", "messages": QUESTION})
    assert answer.status_code == 400
    assert answer.json()["type"] == "error" and "max_tokens" in answer.json()["error"]["message"]
