"""What vLLM promises its clients, by the assertions of its own tests; each test names those that it is taken from.

The names stand below `tests/entrypoints` of vllm-project/vllm, most of them in `openai`. What differs on purpose is
told in docs/measurements/peers.md.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from infinilm import LLM
from server.support import SECONDS, ServerProcess, gauge, wait_for

CHAT: Any = [{"role": "system", "content": "you are a helpful assistant"}, {"role": "user", "content": "what is 1+1?"}]
NAME = "Hello, my name is"
Ask = Callable[..., httpx.Response]


@pytest.fixture
def ask(server: ServerProcess, headers: dict[str, str]) -> Ask:
    """Post to a route of /v1; chats and completions that do not say what they are about have a prompt."""

    def post(route: str, **body: Any) -> httpx.Response:
        missing = {"chat/completions": {"messages": CHAT}, "completions": {"prompt": NAME}}.get(route, {})
        body = missing | {"model": "demo"} | body
        return httpx.post(f"{server.url}/v1/{route}", json=body, headers=headers, timeout=SECONDS)

    return post


def chunks_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream that has ended as it should."""
    *events, last = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert answer.status_code == 200 and last == "[DONE]"
    return [json.loads(event) for event in events]


def refused(answer: httpx.Response, *words: str) -> None:
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert all(word in message for word in words), message


# ---- completions ----


@pytest.mark.parametrize("prompt", [NAME, [0, 0, 0, 0, 0]])
def test_a_completion(ask: Ask, demo: LLM, prompt: Any) -> None:
    """openai/completion/test_completion.py: test_single_completion."""
    answer = ask("completions", prompt=prompt, max_tokens=5, temperature=0, ignore_eos=True).json()
    (choice,) = answer["choices"]
    assert answer["id"] and len(choice["text"]) >= 1 and choice["finish_reason"] == "length"
    count = len(demo.tokenize(prompt) if isinstance(prompt, str) else prompt)
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (count, 5, count + 5)
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 0
    assert choice.get("prompt_logprobs") is None and choice["logprobs"] is None


@pytest.mark.parametrize("count", [0, 5])
def test_logprobs_of_completions(ask: Ask, count: int) -> None:
    """openai/completion/test_completion.py: test_zero_logprobs, test_some_logprobs."""
    logprobs = ask("completions", max_tokens=5, logprobs=count).json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"]
    assert all(max(count, 1) <= len(tops) <= count + 1 for tops in logprobs["top_logprobs"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_too_many_logprobs(ask: Ask, route: str, stream: bool) -> None:
    """openai/completion/test_completion.py: test_too_many_completion_logprobs; chat_completion/test_chat.py:
    test_too_many_chat_logprobs.
    """
    fields = {"logprobs": 21} if route == "completions" else {"logprobs": True, "top_logprobs": 21}
    refused(ask(route, max_tokens=5, stream=stream, **fields), "21")
    assert ask(route, max_tokens=5).status_code == 200  # the server goes on


@pytest.mark.parametrize("count", [-1, 0, 1, None])
def test_logprobs_of_prompts(ask: Ask, count: int | None) -> None:
    """openai/completion/test_completion.py: test_prompt_logprobs_completion."""
    prompts = ["A robot may not injure another robot", "My name is"]
    answer = ask("completions", prompt=prompts, max_tokens=2, prompt_logprobs=count)
    if count == -1:
        refused(answer, "prompt_logprobs")
        return
    for choice in answer.json()["choices"]:
        assert bool(choice.get("prompt_logprobs")) == (count is not None)


@pytest.mark.parametrize("count", [-1, 0, 1, None])
def test_logprobs_of_conversations(ask: Ask, count: int | None) -> None:
    """openai/chat_completion/test_chat.py: test_prompt_logprobs_chat, test_more_than_one_prompt_logprobs_chat."""
    said = [*CHAT, {"role": "assistant", "content": "2"}, {"role": "user", "content": "Where?"}]
    answer = ask("chat/completions", messages=said, max_tokens=2, prompt_logprobs=count)
    if count == -1:
        refused(answer, "prompt_logprobs")
        return
    told = answer.json().get("prompt_logprobs")
    assert bool(told) == (count is not None)
    if told:
        assert told[0] is None and all(max(count or 0, 1) <= len(one) <= (count or 0) + 1 for one in told[1:])


@pytest.mark.parametrize(("prompt", "top"), [(NAME, 1), (NAME, 0), ([5, 6, 7, 8, 9, 10], 1), ([5, 6, 7, 8, 9, 10], 0)])
def test_echoed_prompts(ask: Ask, demo: LLM, prompt: Any, top: int) -> None:
    """openai/completion/test_completion.py: test_echo_logprob_completion."""
    choice = ask("completions", prompt=prompt, max_tokens=5, temperature=0, echo=True, logprobs=top).json()["choices"][
        0
    ]
    text = prompt if isinstance(prompt, str) else demo.tokenizer.decode(prompt)
    assert choice["text"].startswith(text)
    logprobs = choice["logprobs"]
    assert len({len(values) for values in logprobs.values()}) == 1 and len(logprobs["tokens"]) > 5
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert all(max(top, 1) <= len(tops) <= top + 1 for tops in logprobs["top_logprobs"][1:])


def test_a_streamed_completion(ask: Ask) -> None:
    """openai/completion/test_completion.py: test_completion_streaming."""
    call: dict[str, Any] = {"prompt": "What is an LLM?", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    whole = ask("completions", **call).json()["choices"][0]["text"]
    choices = [chunk["choices"][0] for chunk in chunks_of(ask("completions", stream=True, **call))]
    assert "".join(choice["text"] for choice in choices) == whole
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    assert choices[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_several_samples(ask: Ask, stream: bool) -> None:
    """openai/completion/test_completion.py: test_parallel_no_streaming, test_parallel_streaming."""
    answer = ask("completions", max_tokens=20, n=3, temperature=1, seed=42, stream=stream)
    texts, reasons = [""] * 3, []
    found = [chunk["choices"][0] for chunk in chunks_of(answer)] if stream else answer.json()["choices"]
    for choice in found:
        texts[choice["index"]] += choice["text"]
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert len(set(texts)) == len(reasons) == 3
    assert stream or [choice["index"] for choice in found] == [0, 1, 2]


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
@pytest.mark.parametrize(
    "options", [{}, {"include_usage": False}, {"include_usage": False, "continuous_usage_stats": False}]
)
def test_streams_without_usage(ask: Ask, route: str, options: dict[str, bool]) -> None:
    """openai/completion/test_completion.py: test_completion_stream_options; chat_completion/test_chat.py:
    test_chat_completion_stream_options.
    """
    chunks = chunks_of(ask(route, max_tokens=5, stream=True, stream_options=options))
    assert all(chunk.get("usage") is None and chunk["choices"] for chunk in chunks)


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_usage_in_every_chunk(ask: Ask, route: str) -> None:
    """openai/completion/test_completion.py: test_completion_stream_options; chat_completion/test_chat.py:
    test_chat_completion_stream_options.
    """
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = ask(route, max_tokens=10, ignore_eos=True, stream=True, stream_options=options)
    *chunks, last = chunks_of(answer)
    counts = []
    for chunk in [*chunks, last]:
        usage = chunk["usage"]
        assert usage["prompt_tokens"] > 0
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        counts.append(usage["completion_tokens"])
    assert counts == sorted(counts) and counts[-1] == 10 and last["choices"] == []


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
@pytest.mark.parametrize("options", [{"include_usage": True}, {"continuous_usage_stats": True}])
def test_options_without_a_stream(ask: Ask, route: str, options: dict[str, bool]) -> None:
    """openai/completion/test_completion.py: test_completion_stream_options; chat_completion/test_chat.py:
    test_chat_completion_stream_options.
    """
    refused(ask(route, stream=False, stream_options=options), "stream_options")


@pytest.mark.parametrize("prompt", [NAME, [0, 0, 0, 0, 0]])
def test_a_batch(ask: Ask, prompt: Any) -> None:
    """openai/completion/test_completion.py: test_batch_completions, of texts and of token ids."""
    call: dict[str, Any] = {"prompt": [prompt] * 2, "max_tokens": 5, "temperature": 0}
    first, second = ask("completions", **call).json()["choices"]
    assert first["text"] == second["text"]
    texts = ["", ""]
    for chunk in chunks_of(ask("completions", stream=True, **call)):
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == [first["text"]] * 2
    choices = ask("completions", n=2, **call | {"temperature": 1, "seed": 3}).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"json": {"type": "object", "properties": {"brand": {"type": "string"}, "foo": "bar"}}}, "foo"),
        ({"regex": "[.*"}, "regex"),
        ({"regex": {"1": "Python", "2": "C++"}}, "regex"),
        ({"grammar": 'root ::= select_statementinvalidsyntax\nselect_statement ::= "SELECT "'}, "grammar"),
    ],
)
def test_constraints_that_are_wrong(ask: Ask, fields: dict[str, Any], word: str) -> None:
    """openai/completion/test_completion.py: test_invalid_json_schema, test_invalid_regex, test_invalid_grammar;
    chat_completion/test_chat.py: test_structured_outputs_type_error.
    """
    for route in ("completions", "chat/completions"):
        refused(ask(route, structured_outputs=fields), word)


@pytest.mark.parametrize("prompt", [None, [], [[]], [999_999], [-1], [[-1]], [[999_999]]])
def test_prompts_that_are_wrong(ask: Ask, prompt: Any) -> None:
    """openai/completion/test_prompt_validation.py: test_empty_prompt, test_out_of_vocab_token_ids;
    test_empty_prompt_list.py; test_completion_error.py: test_negative_prompt_token_ids_nested and _flat.
    """
    refused(ask("completions", prompt=prompt, max_tokens=5), "prompt")


def test_a_format_without_its_schema(ask: Ask) -> None:
    """openai/completion/test_completion_error.py: test_json_schema_response_format_missing_schema."""
    for route in ("completions", "chat/completions"):
        refused(ask(route, response_format={"type": "json_schema"}), "json_schema")


def test_offsets_of_streams(ask: Ask) -> None:
    """openai/completion/test_completion_text_offset.py: where a text that may be a stop string is held back."""
    call: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "logprobs": 0, "stop": ["\n\n\n"]}
    whole = ask("completions", **call).json()["choices"][0]["logprobs"]["text_offset"]
    streamed: list[int] = []
    for chunk in chunks_of(ask("completions", stream=True, **call)):
        streamed += (chunk["choices"][0]["logprobs"] or {}).get("text_offset", [])
    assert streamed == whole and whole[0] == 0


# ---- token ids ----


def test_ids_of_a_completion(ask: Ask, demo: LLM) -> None:
    """openai/basic/test_return_token_ids.py: test_basic_completion_with_emoji."""
    prompt = "Complete this sentence with emojis: I love coding \U0001f680"
    call: dict[str, Any] = {"prompt": prompt, "max_tokens": 10, "temperature": 0, "logprobs": 1}
    choice = ask("completions", return_token_ids=True, **call).json()["choices"][0]
    assert choice["prompt_token_ids"] == demo.tokenize(prompt)
    assert demo.tokenizer.decode(choice["token_ids"]).startswith(choice["text"])
    without = ask("completions", return_token_ids=False, **call).json()
    assert "token_ids" not in without["choices"][0] and "prompt_token_ids" not in without["choices"][0]


def test_ids_of_a_streamed_completion(ask: Ask, demo: LLM) -> None:
    """openai/basic/test_return_token_ids.py: test_comparison_with_prompt_logprobs_and_logprobs."""
    prompt = "Tell me a short fact about Python:"
    call: dict[str, Any] = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 1}
    whole = ask("completions", return_token_ids=True, echo=True, prompt_logprobs=1, **call).json()["choices"][0]
    count = len(whole["token_ids"])
    assert len(whole["prompt_logprobs"]) == len(whole["prompt_token_ids"])
    assert len(whole["logprobs"]["tokens"]) == len(whole["prompt_token_ids"]) + count
    first, *others = [
        c["choices"][0] for c in chunks_of(ask("completions", stream=True, return_token_ids=True, **call))
    ]
    assert first["prompt_token_ids"] == demo.tokenize(prompt)
    ids = [token_id for choice in [first, *others] for token_id in choice["token_ids"]]
    assert ids == whole["token_ids"]


def test_ids_of_a_chat(ask: Ask, demo: LLM) -> None:
    """openai/basic/test_return_token_ids.py: test_chat_completion_with_emoji_and_token_ids."""
    said = [{"role": "user", "content": "Repeat after me: I love cats \U0001f431"}]
    call: dict[str, Any] = {"messages": said, "max_tokens": 20, "temperature": 0, "return_token_ids": True}
    whole = ask("chat/completions", logprobs=True, **call).json()
    assert "I love cats \U0001f431" in demo.tokenizer.decode(whole["prompt_token_ids"])
    ids = whole["choices"][0]["token_ids"]
    assert len(ids) == len(whole["choices"][0]["logprobs"]["content"]) > 0
    first, *others = chunks_of(ask("chat/completions", stream=True, **call))
    assert first["prompt_token_ids"] == whole["prompt_token_ids"]
    assert all("prompt_token_ids" not in chunk for chunk in others)
    assert [i for chunk in others for i in chunk["choices"][0].get("token_ids", [])] == ids


# ---- chats ----


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"logprobs": False}, None),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 5}, 5),
    ],
)
def test_logprobs_of_chats(ask: Ask, fields: dict[str, Any], count: int | None) -> None:
    """openai/chat_completion/test_chat.py: test_no_logprobs_chat, test_zero_logprobs_chat, test_some_logprobs_chat."""
    choice = ask("chat/completions", max_completion_tokens=5, temperature=0, **fields).json()["choices"][0]
    if count is None:
        assert choice["logprobs"] is None
    else:
        assert [len(one["top_logprobs"]) for one in choice["logprobs"]["content"]] == [count] * 5


def test_a_chat_of_two_turns(ask: Ask) -> None:
    """openai/chat_completion/test_chat.py: test_single_chat_session."""
    call: dict[str, Any] = {"max_completion_tokens": 5, "ignore_eos": True}
    answer = ask("chat/completions", logprobs=True, top_logprobs=5, **call).json()
    (choice,), usage = answer["choices"], answer["usage"]
    assert answer["id"] and choice["finish_reason"] == "length" and usage["completion_tokens"] == 5
    assert usage["total_tokens"] == usage["prompt_tokens"] + 5
    message = choice["message"]
    assert message["role"] == "assistant" and message["content"]
    turn = {"role": "assistant", "content": message["content"]}
    said = [*CHAT, turn, {"role": "user", "content": "express your result in json"}]
    assert ask("chat/completions", messages=said, **call).json()["choices"][0]["message"]["content"]


def test_a_streamed_chat(ask: Ask) -> None:
    """openai/chat_completion/test_chat.py: test_chat_streaming."""
    call: dict[str, Any] = {"max_completion_tokens": 10, "temperature": 0}
    whole = ask("chat/completions", **call).json()["choices"][0]
    choices = [chunk["choices"][0] for chunk in chunks_of(ask("chat/completions", stream=True, **call))]
    assert {choice["delta"]["role"] for choice in choices if "role" in choice["delta"]} == {"assistant"}
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == whole["message"]["content"]
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons == [None] * (len(reasons) - 1) + [whole["finish_reason"]]


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"choice": ["Python", "Java", "C++"]}, r"Python|Java|C\+\+"),
        ({"regex": r"([0-9]{1,3}\.){3}[0-9]{1,3}"}, r"([0-9]{1,3}\.){3}[0-9]{1,3}"),
    ],
)
def test_structured_chats(ask: Ask, fields: dict[str, Any], pattern: str) -> None:
    """openai/chat_completion/test_chat.py: test_structured_outputs_choice_chat, test_structured_outputs_regex_chat,
    test_structured_outputs_choice_chat_logprobs.
    """
    more = {"logprobs": True, "top_logprobs": 5}
    choice = ask("chat/completions", max_completion_tokens=30, structured_outputs=fields, **more).json()["choices"][0]
    assert re.fullmatch(pattern, choice["message"]["content"])
    tops = [top for one in choice["logprobs"]["content"] for top in one["top_logprobs"]]
    assert min(top["logprob"] for top in tops) >= -9999.0


def test_a_chat_that_is_json(ask: Ask) -> None:
    """openai/chat_completion/test_chat.py: test_structured_outputs_json_chat, test_response_format_json_schema,
    test_response_format_text.
    """
    schema = {"type": "object", "properties": {"result": {"type": "integer", "maximum": 9, "minimum": 0}}}
    schema["required"] = ["result"]
    form = {"type": "json_schema", "json_schema": {"name": "foo_test", "schema": schema}}
    for fields in ({"structured_outputs": {"json": schema}}, {"response_format": form}):
        content = ask("chat/completions", temperature=0, **fields).json()["choices"][0]["message"]["content"]
        assert json.loads(content)["result"] in range(10)
    plain = ask("chat/completions", max_completion_tokens=10, response_format={"type": "text"})
    assert plain.json()["choices"][0]["message"]["content"]


def test_parts_of_a_content(ask: Ask) -> None:
    """openai/chat_completion/test_chat.py: test_complex_message_content, test_extra_fields_allowed."""
    call: dict[str, Any] = {"temperature": 0, "max_tokens": 8}

    def content(message: dict[str, Any]) -> str:
        answer = ask("chat/completions", messages=[{"role": "user", **message}], **call)
        return str(answer.json()["choices"][0]["message"]["content"])

    plain = content({"content": "what is 1+1?"})
    assert content({"content": [{"type": "text", "text": "what is 1+1?"}]}) == plain
    assert content({"content": "what is 1+1?", "extra_field": "0"}) == plain


@pytest.mark.parametrize("seed", [-(2**63) - 1, 2**63])
def test_seeds_that_are_too_long(ask: Ask, seed: int) -> None:
    """openai/chat_completion/test_chat.py: test_long_seed."""
    refused(ask("chat/completions", temperature=0, seed=seed), "seed")


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices_of_a_chat(ask: Ask, stream: bool) -> None:
    """openai/chat_completion/test_chat.py: test_chat_completion_n_parameter_non_streaming and _streaming,
    test_chat_completion_n_with_seed, test_chat_completion_n_equals_1.
    """
    for n in (1, 3):
        answer = ask("chat/completions", max_completion_tokens=15, temperature=0.7, seed=42, n=n, stream=stream)
        contents = [""] * n
        if stream:
            for chunk in chunks_of(answer):
                for choice in chunk["choices"]:
                    contents[choice["index"]] += choice["delta"].get("content") or ""
        else:
            contents = [choice["message"]["content"] for choice in answer.json()["choices"]]
        assert len(contents) == n and all(contents) and (n == 1 or len(set(contents)) > 1)


def test_a_message_that_goes_on(ask: Ask) -> None:
    """openai/basic/test_chat_echo.py: test_chat_session_with_echo_and_continue_final_message, without the echo."""
    saying = "Here is a common saying about apple. An apple a day, keeps"
    said = [{"role": "user", "content": "tell me a saying"}, {"role": "assistant", "content": saying}]
    fields = {"continue_final_message": True, "add_generation_prompt": False, "max_tokens": 8}
    (choice,) = ask("chat/completions", messages=said, **fields).json()["choices"]
    assert choice["finish_reason"] in ("stop", "length") and saying not in choice["message"]["content"]
    both = fields | {"add_generation_prompt": True}
    refused(ask("chat/completions", messages=said, **both), "continue_final_message", "add_generation_prompt")


@pytest.mark.parametrize("body", ['"no valid JSON{{{"', "not JSON {{{", '["not", "an", "object"]', "42", "null"])
def test_bodies_that_are_no_objects(server: ServerProcess, headers: dict[str, str], body: str) -> None:
    """openai/chat_completion/test_non_object_body_validation.py."""
    said = headers | {"Content-Type": "application/json"}
    refused(httpx.post(f"{server.url}/v1/chat/completions", content=body, headers=said, timeout=SECONDS), "body")


@pytest.mark.parametrize(
    ("bias", "words"),
    [
        ({"SIZE + 1": 1.0}, ["SIZE + 1", "SIZE"]),
        ({"not_a_token_id": 50}, ["not_a_token_id", "logit_bias"]),
        ({"1": "not_a_number"}, ["logit_bias"]),
        ({"SIZE - 1": 1.0}, []),
    ],
)
def test_biases(ask: Ask, demo: LLM, bias: dict[str, Any], words: list[str]) -> None:
    """openai/chat_completion/test_chat_logit_bias_validation.py."""
    size = demo.config.vocab_size

    def told(text: str) -> str:
        return text.replace("SIZE + 1", str(size + 1)).replace("SIZE - 1", str(size - 1)).replace("SIZE", str(size - 1))

    answer = ask("chat/completions", max_tokens=5, logit_bias={told(key): value for key, value in bias.items()})
    if words:
        refused(answer, *map(told, words))
    else:
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("beyond", [-1, 1, None])
def test_stop_token_ids(ask: Ask, demo: LLM, beyond: int | None) -> None:
    """openai/chat_completion/test_chat_stop_token_ids_validation.py."""
    token_id = -1 if beyond is None else demo.config.vocab_size + beyond
    answer = ask("chat/completions", max_tokens=5, stop_token_ids=[token_id])
    if beyond == -1:
        assert answer.status_code == 200, answer.text
    else:
        refused(answer, str(token_id))


# ---- other routes ----


def test_the_state_of_the_server(server: ServerProcess, headers: dict[str, str]) -> None:
    """serve/instrumentator/test_basic.py: test_show_version, test_check_health."""
    assert httpx.get(f"{server.url}/version", headers=headers, timeout=SECONDS).json().keys() == {"version"}
    assert httpx.get(f"{server.url}/health", timeout=SECONDS).status_code == 200


def test_a_content_of_another_type(server: ServerProcess, headers: dict[str, str]) -> None:
    """serve/instrumentator/test_basic.py: test_request_wrong_content_type."""
    said = headers | {"Content-Type": "application/x-www-form-urlencoded"}
    body = json.dumps({"model": "demo", "messages": CHAT})
    answer = httpx.post(f"{server.url}/v1/chat/completions", content=body, headers=said, timeout=SECONDS)
    assert answer.status_code == 415


def test_cancelled_requests(server: ServerProcess, client: openai.OpenAI) -> None:
    """serve/instrumentator/test_basic.py: test_request_cancellation, with fewer requests."""
    impatient = client.with_options(timeout=0.05)
    for _ in range(20):
        with pytest.raises(openai.APITimeoutError):
            impatient.chat.completions.create(
                model="demo", messages=CHAT, n=16, max_tokens=400, extra_body={"min_tokens": 400}
            )
    assert len(client.chat.completions.create(model="demo", messages=CHAT, max_tokens=10).choices) == 1


def test_models(client: openai.OpenAI) -> None:
    """openai/models/test_models.py: test_check_models."""
    (model,) = client.models.list().data
    assert model.id == "demo" and model.to_dict()["root"] == "demo"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


@pytest.mark.parametrize("special", [True, False])
def test_tokens_of_a_text(server: ServerProcess, headers: dict[str, str], demo: LLM, special: bool) -> None:
    """serve/tokenize/test_tokenization.py: test_tokenize_completions, test_tokenize_with_return_token_strs,
    test_detokenize.
    """

    def post(route: str, **body: Any) -> dict[str, Any]:
        answer = httpx.post(f"{server.url}/{route}", json=body, headers=headers, timeout=SECONDS)
        found: dict[str, Any] = answer.json()
        return found

    prompt = f"This is a test prompt. {'vllm1' * 3} \U0001f600"
    ids = demo.tokenize(prompt, add_special_tokens=special)
    told = post("tokenize", model="demo", prompt=prompt, add_special_tokens=special, return_token_strs=True)
    strings = [demo.tokenizer.id_to_token(token_id) for token_id in ids]
    size = demo.max_model_len
    assert told == {"count": len(ids), "max_model_len": size, "tokens": ids, "token_strs": strings}
    assert post("detokenize", model="demo", tokens=ids) == {
        "prompt": demo.tokenizer.decode(ids, skip_special_tokens=False)
    }


@pytest.mark.parametrize("begins", [True, False])
def test_tokens_of_a_chat(server: ServerProcess, headers: dict[str, str], demo: LLM, begins: bool) -> None:
    """serve/tokenize/test_tokenization.py: test_tokenize_chat."""
    said = [*CHAT, {"role": "assistant", "content": "Nice to meet you!"}, {"role": "user", "content": "vllm1"}]
    if not begins:
        said.append({"role": "assistant", "content": "sure,"})
    body = {"model": "demo", "messages": said, "add_generation_prompt": begins, "continue_final_message": not begins}
    told = httpx.post(f"{server.url}/tokenize", json=body, headers=headers, timeout=SECONDS).json()
    text = demo.chat_template.render(said, add_generation_prompt=begins, continue_final_message=not begins)
    assert told["tokens"] == demo.tokenizer.encode(text, add_special_tokens=False)
    assert (told["count"], told["max_model_len"]) == (len(told["tokens"]), demo.max_model_len)


def test_what_the_tokenizer_is(server: ServerProcess, headers: dict[str, str]) -> None:
    """serve/tokenize/test_tokenization.py: test_tokenizer_info_basic, test_tokenizer_info_chat_template."""
    told = httpx.get(f"{server.url}/tokenizer_info", headers=headers, timeout=SECONDS).json()
    assert isinstance(told["tokenizer_class"], str) and told["chat_template"]


def test_vectors(ask: Ask) -> None:
    """openai/embedding_tests/test_embedding.py: test_single_embedding, test_batch_embedding,
    test_batch_base64_embedding.
    """
    texts = ["The chef prepared a delicious meal.", "What is an LLM?"]
    both, single = ask("embeddings", input=texts).json(), ask("embeddings", input=texts[0]).json()
    vectors = [np.array(entry["embedding"], np.float32) for entry in both["data"]]
    assert [entry["index"] for entry in both["data"]] == [0, 1]
    assert np.array_equal(vectors[0], np.array(single["data"][0]["embedding"], np.float32))
    assert both["usage"]["prompt_tokens"] == both["usage"]["total_tokens"] > single["usage"]["prompt_tokens"]
    packed = ask("embeddings", input=texts, encoding_format="base64").json()["data"]
    for entry, vector in zip(packed, vectors, strict=True):
        assert np.array_equal(np.frombuffer(base64.b64decode(entry["embedding"]), np.float32), vector)
    ids = ask("embeddings", input=[[4, 5, 6], [7, 8]]).json()
    assert len(ids["data"]) == 2 and ids["usage"]["prompt_tokens"] == 5


METRICS = (
    *("num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "kv_cache_usage_perc"),
    *("prefix_cache_queries", "prefix_cache_hits", "num_preemptions_total", "prompt_tokens_total"),
    *("generation_tokens_total", "iteration_tokens_total", "cache_config_info", "request_success_total"),
    *("request_prompt_tokens", "request_generation_tokens", "request_params_n", "request_params_max_tokens"),
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
    *("request_queue_time_seconds", "request_inference_time_seconds", "request_prefill_time_seconds"),
    *("request_decode_time_seconds", "request_num_preemptions"),
    *("spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"),
    "spec_decode_num_accepted_tokens_per_pos_total",
)


def test_metrics(server: ServerProcess, headers: dict[str, str], ask: Ask) -> None:
    """serve/instrumentator/test_metrics.py: test_metrics_counts, test_metrics_exist; `vllm` is `infinilm` here."""

    def counts() -> dict[str, float]:
        text = httpx.get(f"{server.url}/metrics", headers=headers, timeout=SECONDS).text
        found: dict[str, float] = {}
        for name, value in re.findall(r"^infinilm:(\w+)(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE):
            found[name] = found.get(name, 0.0) + float(value)
        assert all(f"infinilm:{name}" in text for name in METRICS)
        return found

    wait_for(lambda: gauge(server.url, "num_requests_running") == 0)  # of others, whose clients have left
    before = counts()
    for _ in range(3):
        ask("completions", prompt=[5, 6, 7, 8], max_tokens=10, ignore_eos=True)
    after = counts()

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert grown("time_to_first_token_seconds_count") == grown("e2e_request_latency_seconds_count") == 3
    assert grown("inter_token_latency_seconds_count") == 3 * 9
    assert grown("request_prompt_tokens_sum") == 3 * 4 and grown("request_generation_tokens_sum") == 3 * 10
    assert grown("request_params_n_count") == 3 and grown("request_params_max_tokens_sum") == 3 * 10
    assert grown("generation_tokens_total") == 3 * 10 and grown("request_success_total") == 3
    for phase in ("queue", "inference", "prefill", "decode"):
        assert grown(f"request_{phase}_time_seconds_count") == 3


@pytest.mark.parametrize("fields", [{"use_beam_search": True}, {"beam_width": 3, "early_stopping": "never"}])
def test_beam_search(ask: Ask, demo: LLM, fields: dict[str, Any]) -> None:
    """completion/test_completion.py: test_beam_search; `n` alone says how wide it is."""
    answer = ask("completions", n=3, max_tokens=7, **fields).json()
    (output,) = demo.generate(NAME, n=3, max_tokens=7, beam_width=3, use_tqdm=False)
    assert [choice["text"] for choice in answer["choices"]] == [one.text for one in output.outputs]
    assert len({one.text for one in output.outputs}) == 3
    refused(ask("completions", n=3, use_beam_search=True, repetition_penalty=1.5), "repetition_penalty", "beam_width")
    refused(ask("completions", n=1, use_beam_search=False, beam_width=2), "use_beam_search")
