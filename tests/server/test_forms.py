"""Answers have the form that the documents of OpenAI and Anthropic give them, beyond what their clients check."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from llm import tiny

from infinilm.text.reasoning import num_reasoning
from server.support import SECONDS, Hosted, ScriptedLLM, ServerProcess, hosted
from server.templates import THINKING, WRITERS

NOTHING: dict[str, Any] = {"type": "object", "properties": {}}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ScriptedLLM, Hosted]]:
    """A model whose answers begin inside its reasoning."""
    folder = tiny.make_checkpoint(tmp_path_factory.mktemp("forms") / "tiny", max_position_embeddings=4096)
    with ScriptedLLM(folder, chat_template=THINKING) as llm, hosted(llm) as host:
        yield llm, host


@pytest.fixture
def thinking(thinker: tuple[ScriptedLLM, Hosted]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{thinker[1].url}/v1", api_key="none", max_retries=0, timeout=SECONDS) as made:
        yield made


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("top", [0, 1, 3])
def test_the_chosen_token_is_among_the_log_probabilities(client: openai.OpenAI, top: int, stream: bool) -> None:
    """ "There may be up to logprobs + 1 elements": also where the chosen token is improbable, and for an echo."""
    call: dict[str, Any] = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 12, "logprobs": top, "seed": 3}
    call |= {"echo": True, "temperature": 2, "extra_body": {"top_k": -1, "top_p": 1.0}}
    if stream:
        pieces = [chunk.choices[0].logprobs for chunk in client.completions.create(**call, stream=True)]
    else:
        pieces = [client.completions.create(**call).choices[0].logprobs]
    told = [
        (token, logprob, best)
        for piece in pieces
        if piece is not None
        for token, logprob, best in zip(piece.tokens, piece.token_logprobs, piece.top_logprobs, strict=True)
    ]
    assert told[0][1:] == (None, None)
    for token, logprob, best in told[1:]:
        assert best[token] == logprob
    sizes = {len(best) for _, _, best in told[1:]}
    assert sizes == ({1} if top == 0 else {top, top + 1})  # both happen


def test_items_that_are_cut(thinker: tuple[ScriptedLLM, Hosted], thinking: openai.OpenAI) -> None:
    """At every third token: the last item is not complete, unless it is a call whose arguments are there."""
    llm, _ = thinker
    llm.script = "Hm.</think>Well. " + WRITERS["qwen"]([("f", {"a": "b"}), ("f", {})])
    length = len(llm.tokenizer.encode(llm.script, add_special_tokens=False)) + 1
    tools: Any = [{"type": "function", "name": "f", "parameters": NOTHING, "strict": False}]
    call: dict[str, Any] = {"model": "tiny", "input": "Hi", "tools": tools}
    seen = set()
    for limit in (*range(1, length, 3), length):
        response = thinking.responses.create(**call, max_output_tokens=limit)
        is_cut = limit < length
        assert response.status == ("incomplete" if is_cut else "completed")
        items: Any = response.output
        done = []
        for event in thinking.responses.create(**call, max_output_tokens=limit, stream=True):
            if event.type == "response.output_item.done":
                done.append((event.item.type, event.item.status))
        assert done == [(item.type, item.status) for item in items]
        for item in items[:-1]:
            assert item.status == "completed"
        if items:
            last = items[-1]
            is_whole = not is_cut
            if last.type == "function_call" and is_cut:
                is_whole = last.arguments.endswith("}")
                assert not is_whole or json.loads(last.arguments) in ({"a": "b"}, {})
            assert last.status == ("completed" if is_whole else "incomplete"), (limit, last)
            seen.add((last.type, last.status))
    kinds = ("reasoning", "message", "function_call")
    assert seen == {(kind, "incomplete") for kind in kinds} | {("function_call", "completed")}


def test_tokens_of_the_reasoning_are_counted(thinker: tuple[ScriptedLLM, Hosted], thinking: openai.OpenAI) -> None:
    """To the end of its mark, with the opening one where the model writes it; and none where it does not reason."""
    llm, _ = thinker
    messages: Any = [{"role": "user", "content": "Hi"}]
    for reasoning, rest in (("Hm, é.</think>", "\n\nWell."), ("</think>", ""), ("Hm", ""), ("", "")):
        llm.script = reasoning + rest
        ends = "</think>" in reasoning
        count = len(llm.tokenizer.encode(reasoning, add_special_tokens=False)) + (not ends)  # the end of the text
        call: Any = {"model": "tiny", "messages": messages, "n": 2}
        answer = thinking.chat.completions.create(**call)
        chunks = thinking.chat.completions.create(**call, stream=True, stream_options={"include_usage": True})
        for usage in (answer.usage, list(chunks)[-1].usage):
            assert usage is not None and usage.completion_tokens_details is not None
            assert usage.completion_tokens_details.reasoning_tokens == 2 * count
        response = thinking.responses.create(model="tiny", input="Hi")
        events: Any = list(thinking.responses.create(model="tiny", input="Hi", stream=True))
        for told in (response.usage, events[-1].response.usage):
            assert told is not None and told.output_tokens_details.reasoning_tokens == count


@pytest.mark.parametrize(
    ("prompt", "pieces", "count"),
    [
        ("", ["Well", "</think>"], 0),
        ("", [" ", "<thi", "nk>", "a", "</think", ">", "b", "</think>"], 6),
        ("", ["<think>", "a"], 2),
        ("", [" ", "<th"], 0),
        ("", ["<", "b>", "<think>"], 0),
        ("<think>", ["a</th", "ink>b", "c"], 2),
        ("<think></think>", ["a", "</think>"], 0),
    ],
)
def test_pieces_that_are_reasoning(prompt: str, pieces: list[str], count: int) -> None:
    assert num_reasoning(prompt, ("<think>", "</think>"), pieces) == count


def test_models_that_do_not_reason(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Hi"}]
    usage = client.chat.completions.create(model="demo", messages=messages, max_tokens=3).usage
    assert usage is not None and usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == 0


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("logprobs", [False, True])
def test_usage_in_every_chunk(client: openai.OpenAI, is_chat: bool, logprobs: bool) -> None:
    """As vLLM has it: of the prompt and the choice that the chunk is of."""
    texts = ["Once upon a time", "The"]
    call: Any = {"model": "demo", "max_tokens": 9, "n": 2, "seed": 5, "stream": True}
    call["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    if is_chat:
        answer: Any = client.chat.completions.create(
            messages=[{"role": "user", "content": texts[0]}], logprobs=logprobs, **call
        )
    else:
        answer = client.completions.create(prompt=texts, logprobs=1 if logprobs else None, **call)
    *chunks, last = list(answer)
    assert not last.choices
    found: dict[int, list[tuple[int, int]]] = {}
    for chunk in chunks:
        usage = chunk.usage
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        found.setdefault(chunk.choices[0].index, []).append((usage.prompt_tokens, usage.completion_tokens))
    prompts = {index: counts[0][0] for index, counts in found.items()}
    for counts in found.values():
        assert len({prompt for prompt, _ in counts}) == 1 and counts == sorted(counts)
    assert sum(counts[-1][1] for counts in found.values()) == last.usage.completion_tokens
    assert sum(prompts.values()) / 2 == last.usage.prompt_tokens


@pytest.mark.parametrize(("path", "told"), [("models", "invalid_request_error"), ("messages", "authentication_error")])
def test_errors_of_keys(server: ServerProcess, path: str, told: str) -> None:
    answer = httpx.request("GET" if path == "models" else "POST", f"{server.url}/v1/{path}", timeout=SECONDS)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (401, told, "invalid_api_key")
    assert error["message"].startswith("Incorrect API key provided")  # by which LiteLLM knows it


def test_ids_begin_as_those_of_the_originals(thinker: tuple[ScriptedLLM, Hosted], thinking: openai.OpenAI) -> None:
    llm, host = thinker
    llm.script = "Hm.</think>Well. " + WRITERS["qwen"]([("f", {})])
    function = {"name": "f", "parameters": NOTHING}
    messages: Any = [{"role": "user", "content": "Hi"}]
    chat = thinking.chat.completions.create(
        model="tiny",
        messages=messages,
        tools=[{"type": "function", "function": function}],  # type: ignore[typeddict-item]
    )
    assert chat.id.startswith("chatcmpl-")
    assert [call.id[:5] for call in chat.choices[0].message.tool_calls or ()] == ["call_"]
    flat: Any = [{"type": "function", **function}]
    response: Any = thinking.responses.create(model="tiny", input="Hi", tools=flat)
    assert response.id.startswith("resp_")
    assert [item.id.split("_")[0] for item in response.output] == ["rs", "msg", "fc"]
    assert response.output[-1].call_id.startswith("call_")
    with anthropic.Anthropic(base_url=host.url, api_key="none", max_retries=0, timeout=SECONDS) as client:
        tools: Any = [{"name": "f", "input_schema": NOTHING}]
        message: Any = client.messages.create(model="tiny", max_tokens=300, messages=messages, tools=tools)
    assert message.id.startswith("msg_") and message.content[-1].id.startswith("toolu_")
    llm.script = "x"
    assert thinking.completions.create(model="tiny", prompt="x").id.startswith("cmpl-")
