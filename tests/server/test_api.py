"""Chat and text completions with OpenAI's own client: what it sends is honoured, what it reads is there."""

from __future__ import annotations

import base64
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest

from infinilm import LLM, SamplingParams
from infinilm.server.answers import chat_logprobs
from server.support import KEY, SECONDS, ServerProcess, hosted

MESSAGES: Any = [{"role": "user", "content": "Tell me a story"}]
PROMPT = "Once upon a time"


def post(server: ServerProcess, headers: dict[str, str], path: str, **body: Any) -> httpx.Response:
    content = json.dumps(body).encode()  # lone surrogates escaped, which httpx would not do
    headers = headers | {"Content-Type": "application/json"}
    return httpx.post(f"{server.url}{path}", content=content, headers=headers, timeout=SECONDS)


def test_chat_is_what_the_library_says(client: openai.OpenAI, demo: LLM) -> None:
    (expected,) = demo.chat(MESSAGES, seed=3, max_tokens=20, use_tqdm=False)
    answer = client.chat.completions.create(model="demo", messages=MESSAGES, seed=3, max_tokens=20)
    (choice,) = answer.choices
    assert choice.message.content == expected.outputs[0].text
    assert choice.message.role == "assistant"
    assert choice.finish_reason == expected.outputs[0].finish_reason == "length"
    assert (answer.object, answer.model) == ("chat.completion", "demo")
    usage = answer.usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(expected.prompt_token_ids), 20)
    assert usage.total_tokens == usage.prompt_tokens + 20
    assert usage.prompt_tokens_details.cached_tokens is not None


def test_chat_streams_the_same(client: openai.OpenAI) -> None:
    call: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "seed": -5, "max_tokens": 30, "n": 3}
    call |= {"logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**call)
    chunks = list(client.chat.completions.create(**call, stream=True, stream_options={"include_usage": True}))
    assert [c.choices[0].delta.role for c in chunks[:3]] == ["assistant"] * 3
    assert len({c.id for c in chunks}) == 1
    assert all(c.usage is None and len(c.choices) == 1 for c in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    for choice in whole.choices:
        own = [c.choices[0] for c in chunks[:-1] if c.choices[0].index == choice.index]
        assert "".join(c.delta.content or "" for c in own) == choice.message.content
        assert [c.finish_reason for c in own][-1] == choice.finish_reason
        assert choice.logprobs is not None
        assert [t for c in own if c.logprobs for t in c.logprobs.content or ()] == choice.logprobs.content
    assert len({choice.message.content for choice in whole.choices}) > 1


def test_stream_on_the_wire(server: ServerProcess, headers: dict[str, str]) -> None:
    said: dict[str, Any] = {"model": "demo", "max_tokens": 3, "ignore_eos": True, "stream": True}
    answer = post(server, headers, "/v1/chat/completions", messages=MESSAGES, **said)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert all("usage" not in chunk for chunk in chunks), "nobody asked"
    for path, prompt in (("/v1/chat/completions", {"messages": MESSAGES}), ("/v1/completions", {"prompt": PROMPT})):
        answer = post(server, headers, path, **said, **prompt, stream_options={"include_usage": True})
        usages = [json.loads(event[6:])["usage"] for event in answer.text.split("\n\n")[:-2]]
        assert usages[-1]["completion_tokens"] == 3 and set(map(str, usages[:-1])) == {"None"}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_any_seed(client: openai.OpenAI, seed: int) -> None:
    def text() -> str | None:
        call = client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=8, seed=seed)
        return call.choices[0].message.content

    assert text() == text()


def test_completions_are_what_the_library_says(client: openai.OpenAI, demo: LLM) -> None:
    prompts = [PROMPT, "The cat"]
    settings: dict[str, Any] = {"seed": 7, "max_tokens": 12, "n": 2, "temperature": 0.9}
    expected = demo.generate(prompts, use_tqdm=False, **settings)
    answer = client.completions.create(model="demo", prompt=prompts, **settings)
    assert [c.text for c in answer.choices] == [c.text for o in expected for c in o.outputs]
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    streamed = [""] * 4
    for chunk in client.completions.create(model="demo", prompt=prompts, stream=True, **settings):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == [c.text for c in answer.choices]
    ids: Any = [o.prompt_token_ids for o in expected]
    by_ids = client.completions.create(model="demo", prompt=ids, **settings)
    assert [c.text for c in by_ids.choices] == streamed


@pytest.mark.parametrize("said", [{}, {"max_tokens": None}, {"max_completion_tokens": 20}], ids=str)
def test_default_length_of_completions(client: openai.OpenAI, demo: LLM, said: dict[str, Any]) -> None:
    """OpenAI's, and not that of the model."""
    assert demo.default_sampling_params.max_tokens != 16
    answer = client.completions.create(model="demo", prompt=PROMPT, extra_body={"ignore_eos": True, **said})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == said.get("max_completion_tokens", 16)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_scores_a_text(client: openai.OpenAI, demo: LLM, stream: bool) -> None:
    """What evaluations do."""
    expected = demo.score(PROMPT)[0]
    call: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 1}
    if stream:
        (chunk,) = client.completions.create(**call, stream=True)
        choice: Any = chunk.choices[0]
    else:
        answer = client.completions.create(**call)
        choice = answer.choices[0]
        assert answer.usage is not None and answer.usage.completion_tokens == 0
    assert choice.text == PROMPT
    found = choice.logprobs
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    assert found.token_logprobs[1:] == pytest.approx(expected.logprobs[1:], rel=1e-5)
    assert len(found.tokens) == len(found.text_offset) == len(found.top_logprobs) == len(expected.logprobs)
    for token, offset in zip(found.tokens[1:], found.text_offset[1:], strict=True):
        assert PROMPT[offset:].startswith(token)


def test_echo_streams_the_same(client: openai.OpenAI) -> None:
    call: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "max_tokens": 6, "echo": True, "logprobs": 2, "seed": 1}
    whole = client.completions.create(**call).choices[0]
    pieces = [chunk.choices[0] for chunk in client.completions.create(**call, stream=True)]
    assert "".join(piece.text for piece in pieces) == whole.text
    assert whole.logprobs is not None
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [item for piece in pieces if piece.logprobs for item in getattr(piece.logprobs, name)]
        assert joined == getattr(whole.logprobs, name), name


def test_bytes_of_partial_characters(tiny_folder: Path) -> None:
    with LLM(tiny_folder) as llm, hosted(llm) as host:
        client = openai.OpenAI(base_url=f"{host.url}/v1", api_key="none", max_retries=0, timeout=SECONDS)
        call: dict[str, Any] = {"model": "tiny", "seed": 1, "max_tokens": 80, "logprobs": True}
        call |= {"messages": MESSAGES, "extra_body": {"ignore_eos": True, "min_tokens": 80, "return_token_ids": True}}
        with client:
            choice = client.chat.completions.create(**call).choices[0]
            assert choice.logprobs is not None and choice.logprobs.content is not None
            tokens = choice.logprobs.content
            special = [llm.tokenizer.is_special(i) for i in choice.model_dump()["token_ids"]]
            data = b"".join(bytes(t.bytes or ()) for t, hidden in zip(tokens, special, strict=True) if not hidden)
            assert data.decode("utf-8", "replace") == choice.message.content
            assert "\ufffd" in data.decode("utf-8", "replace")
            names = [token.token for token in tokens]  # OpenAI's, also of what is no character alone
            assert any(name.startswith("bytes:\\x") for name in names) and not any("\ufffd" in name for name in names)
            chunks = list(client.chat.completions.create(**call, stream=True))
            assert "".join(c.choices[0].delta.content or "" for c in chunks) == choice.message.content
            streamed = [t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.content or ()]
            assert streamed == tokens


def test_token_ids_of_a_stream(tiny_folder: Path) -> None:
    """All of them, also those whose text is not certain yet."""
    body = {"model": "tiny", "prompt": "x", "seed": 1, "max_tokens": 60, "ignore_eos": True, "return_token_ids": True}
    body["logprobs"] = 0
    with LLM(tiny_folder) as llm, hosted(llm) as host:
        url = f"{host.url}/v1/completions"
        whole = httpx.post(url, json=body, timeout=SECONDS).json()["choices"][0]
        lines = httpx.post(url, json=body | {"stream": True}, timeout=SECONDS).text.split("\n\n")
    pieces = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    assert [i for piece in pieces for i in piece["token_ids"]] == whole["token_ids"]
    assert pieces[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    names = whole["logprobs"]["tokens"]
    assert any(name.startswith("bytes:\\x") for name in names) and not any("\ufffd" in name for name in names)


def test_stop(client: openai.OpenAI) -> None:
    call: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "seed": 1, "max_tokens": 60}
    text = client.chat.completions.create(**call).choices[0].message.content
    assert text is not None
    mark = text[20:23]
    for stop in (mark, ["never this", mark]):
        choice = client.chat.completions.create(**call, stop=stop).choices[0]
        assert (choice.message.content, choice.finish_reason) == (text[: text.index(mark)], "stop")


def test_logit_bias_and_extras(client: openai.OpenAI, demo: LLM) -> None:
    call: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "max_tokens": 4, "temperature": 1}
    token_id = demo.tokenize(" cat", add_special_tokens=False)[0]
    extra = {"ignore_eos": True, "return_token_ids": True}
    biased = client.completions.create(**call, logit_bias={str(token_id): 100}, extra_body=extra).choices[0]
    assert biased.model_dump()["token_ids"] == [token_id] * 4
    allowed = client.completions.create(**call, extra_body=extra | {"allowed_token_ids": [token_id]}).choices[0]
    assert allowed.model_dump()["token_ids"] == [token_id] * 4
    greedy = client.completions.create(**{**call, "temperature": 0}, extra_body=extra).choices[0].text
    for settings in ({"top_k": 1}, {"top_p": 0}, {"min_p": 1.0}):
        assert client.completions.create(**call, extra_body=extra | settings).choices[0].text == greedy
    stopped = client.completions.create(
        **call, logit_bias={str(token_id): 100}, extra_body=extra | {"stop_token_ids": [token_id], "min_tokens": 2}
    )
    assert stopped.usage is not None and stopped.usage.completion_tokens >= 2


def test_repetition_penalty_is_that_of_the_library(client: openai.OpenAI, demo: LLM) -> None:
    settings: dict[str, Any] = {"temperature": 0, "max_tokens": 40}
    (expected,) = demo.chat(MESSAGES, repetition_penalty=1.5, use_tqdm=False, **settings)
    (plain,) = demo.chat(MESSAGES, use_tqdm=False, **settings)
    answer = client.chat.completions.create(
        model="demo", messages=MESSAGES, **settings, extra_body={"repetition_penalty": 1.5}
    )
    assert answer.choices[0].message.content == expected.outputs[0].text != plain.outputs[0].text


def test_chat_template_kwargs_change_the_prompt(client: openai.OpenAI, demo: LLM) -> None:
    """To what the library makes of them: the bundled template begins with its variable `bos_token`."""
    settings: dict[str, Any] = {"temperature": 0, "max_tokens": 40}
    said = set()
    for kwargs in ({}, {"bos_token": "<s>Once upon a time"}):
        (expected,) = demo.chat(MESSAGES, chat_template_kwargs=kwargs, use_tqdm=False, **settings)
        answer = client.chat.completions.create(
            model="demo", messages=MESSAGES, **settings, extra_body={"chat_template_kwargs": kwargs}
        )
        assert answer.usage is not None and answer.usage.prompt_tokens == len(expected.prompt_token_ids)
        assert answer.choices[0].message.content == expected.outputs[0].text
        said.add((answer.usage.prompt_tokens, expected.outputs[0].text))
    assert len({tokens for tokens, _ in said}) == len({text for _, text in said}) == 2
    with pytest.raises(openai.BadRequestError, match="is set by the server, or is a field of the body"):
        client.chat.completions.create(
            model="demo", messages=MESSAGES, extra_body={"chat_template_kwargs": {"self": 1}}
        )


def test_harmless_fields_are_taken(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo",
        messages=[{"role": "developer", "content": [{"type": "text", "text": "Be brief"}]}, *MESSAGES],
        max_completion_tokens=3,
        user="somebody",
        metadata={"a": "b"},
        store=True,
        service_tier="auto",
        safety_identifier="x",
        prompt_cache_key="y",
        extra_body={"prompt_cache_options": {"mode": "explicit"}},
        modalities=["text"],
        response_format={"type": "text"},
        parallel_tool_calls=True,
        reasoning_effort="low",
        verbosity="low",
        tool_choice="none",
        stream_options=None,
        frequency_penalty=0.1,
        presence_penalty=0.1,
        prediction={"type": "content", "content": "x"},
    )
    assert answer.usage is not None and answer.usage.completion_tokens <= 3


BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 3}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 1.1}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 50_000}, "n"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": [""]}, "stop[0]"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"99999999": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [99999999]}, "allowed_token_ids"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"min_tokens": 10, "max_tokens": 5}, "min_tokens"),
    ({"stream": "yes"}, "stream"),
    ({"stream": True, "stream_options": {"includ_usage": True}}, "stream_options.includ_usage"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "always"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
    ({"tools": [{"type": 5}]}, "tools"),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}}, "tool_choice"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
    ({"moderation": {"model": "x"}}, "moderation"),
    ({"audio": {"voice": "x", "format": "mp3"}}, "audio"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"temprature": 1}, "temprature"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [*MESSAGES, {"role": "critic", "content": "no"}]}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, ""),
    ({"user": "\ud800"}, ""),
    ({"model": 5}, "model"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_FIELDS, ids=lambda value: str(value)[:40])
def test_bad_fields_are_named(
    server: ServerProcess, headers: dict[str, str], fields: dict[str, Any], param: str
) -> None:
    body = {"model": "demo", "messages": MESSAGES} | fields
    answer = post(server, headers, "/v1/chat/completions", **body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert (error["param"] or "").startswith(param.split("[")[0]) and param.split("[")[0] in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [[99999999]]}, "prompt"),
        ({"prompt": ["x"] * 1025}, "prompt"),
        ({"prompt": ["x"] * 1024, "n": 128}, "n"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_fields_of_completions(
    server: ServerProcess, headers: dict[str, str], fields: dict[str, Any], param: str
) -> None:
    answer = post(server, headers, "/v1/completions", **({"model": "demo", "prompt": PROMPT} | fields))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text


def test_lengths(client: openai.OpenAI) -> None:
    """An answer is cut to the room there is, a prompt never."""
    answer = client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=10**9, extra_body={"ignore_eos": True}, seed=1
    )
    assert answer.usage is not None and answer.usage.total_tokens == 512
    assert answer.choices[0].finish_reason == "length"
    fits = client.completions.create(model="demo", prompt=[5] * 511, max_tokens=5)
    assert fits.usage is not None and fits.usage.completion_tokens == 1
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="demo", prompt=[5] * 512)
    assert caught.value.code == "context_length_exceeded"
    for path in ("prompt", "messages"):
        long = "many words " * 400
        with pytest.raises(openai.BadRequestError) as caught:
            if path == "prompt":
                client.completions.create(model="demo", prompt=long)
            else:
                client.chat.completions.create(model="demo", messages=[{"role": "user", "content": long}])
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", path)
        assert "maximum context length is 512 tokens" in caught.value.message  # as LiteLLM looks for it
        told: Any = caught.value.body
        assert told["n_ctx"] == 512 < told["n_prompt_tokens"]  # as llama.cpp names them


def test_messages_for_clients_name_nothing_of_python(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="demo", messages=MESSAGES, stop=["x" * 2000])
    assert caught.value.message.endswith("stop: the length of a string must be at most 1024, got 2000")


def test_tokens_of_prompts(client: openai.OpenAI, demo: LLM) -> None:
    """As vLLM has them (its tests/entrypoints/openai/basic/test_return_token_ids.py): of chats beside the choices."""
    ids = demo.render_chat(MESSAGES)
    call: Any = {
        "model": "demo",
        "messages": MESSAGES,
        "max_tokens": 2,
        "n": 2,
        "extra_body": {"return_token_ids": True, "ignore_eos": True},
    }
    whole = client.chat.completions.create(**call).model_dump()
    assert whole["prompt_token_ids"] == ids and len(whole["choices"][1]["token_ids"]) == 2
    first, *others = (chunk.model_dump() for chunk in client.chat.completions.create(**call, stream=True))
    assert first["prompt_token_ids"] == ids
    assert not any("prompt_token_ids" in chunk for chunk in others)
    plain = client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=2).model_dump()
    assert "prompt_token_ids" not in plain and "prompt_logprobs" not in plain


@pytest.mark.parametrize("top", [0, 2])
def test_log_probabilities_of_prompts(server: ServerProcess, headers: dict[str, str], demo: LLM, top: int) -> None:
    """As vLLM has them (its tests/entrypoints/openai, test_completion.py and test_chat.py), of both routes."""
    body: dict[str, Any] = {"max_tokens": 1, "prompt_logprobs": top, "logprobs": 0, "temperature": 0}
    ids = demo.render_chat(MESSAGES)
    chat = post(server, headers, "/v1/chat/completions", **body | {"logprobs": False}, messages=MESSAGES).json()
    (choice,) = post(server, headers, "/v1/completions", **body, prompt=ids, echo=True).json()["choices"]
    assert len(choice["logprobs"]["top_logprobs"][1]) == 1  # of which fewer were asked for
    told = choice["prompt_logprobs"]
    assert told == chat["prompt_logprobs"]
    assert told[0] is None and len(told) == len(ids)
    for token_id, entry, logprob in zip(ids[1:], told[1:], choice["logprobs"]["token_logprobs"][1:], strict=False):
        found = entry[str(token_id)]
        assert found["logprob"] == logprob
        assert found["decoded_token"] == demo.tokenizer.token_bytes(token_id).decode()
        ranks = [one["rank"] for one in entry.values() if one["rank"] is not None]
        assert ranks == list(range(1, top + 1))
        assert (found["rank"] is None) == (len(entry) > top)
    answer = post(server, headers, "/v1/chat/completions", **body | {"logprobs": False}, messages=MESSAGES, stream=True)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt_logprobs")


def test_the_lesser_of_two_limits(client: openai.OpenAI) -> None:
    for one, other in ((3, 6), (6, 3)):
        limits: dict[str, Any] = {"max_tokens": one, "max_completion_tokens": other}
        answer = client.chat.completions.create(model="demo", messages=MESSAGES, seed=1, **limits)
        assert answer.usage is not None and answer.usage.completion_tokens == 3


def test_what_is_impossible_has_a_number() -> None:
    """JSON has no infinity."""
    (item,) = chat_logprobs([(5, -np.inf, {5: -np.inf, 6: -0.5})], 1, lambda token_id: b"x")["content"]
    assert (item["logprob"], [other["logprob"] for other in item["top_logprobs"]]) == (-9999.0, [-9999.0])


def test_log_probabilities_are_json(server: ServerProcess, headers: dict[str, str], demo: LLM) -> None:
    """Also of what cannot come."""
    token_id = demo.tokenize(" cat", add_special_tokens=False)[0]
    body: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "max_tokens": 2, "logprobs": True}
    for extra in ({"structured_outputs": {"choice": ["ab", "cd"]}}, {"logit_bias": {str(token_id): 100}, "top_k": 1}):
        answer = post(server, headers, "/v1/chat/completions", **body, top_logprobs=20, **extra)
        for item in json.loads(answer.text, parse_constant=pytest.fail)["choices"][0]["logprobs"]["content"]:
            assert len(item["top_logprobs"]) == 20 and item["logprob"] <= 0


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.model_dump()["max_model_len"]) == ("demo", "model", 512)
    assert client.models.retrieve("demo").id == "demo"
    with anthropic.Anthropic(base_url=str(client.base_url).removesuffix("/v1/"), auth_token=KEY) as other:
        (entry,) = list(other.models.list())  # pages of them have an end
        assert (entry.type, entry.display_name) == ("model", "demo")
        assert entry.created_at.timestamp() == model.created
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_tokenize(server: ServerProcess, headers: dict[str, str], demo: LLM) -> None:
    text = "Hello, wörld"
    answer = post(server, headers, "/tokenize", prompt=text, return_token_strs=True).json()
    assert answer["tokens"] == demo.tokenize(text)
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 512)
    assert len(answer["token_strs"]) == answer["count"]
    plain = post(server, headers, "/tokenize", model="demo", prompt=text, add_special_tokens=False).json()
    assert plain["tokens"] == demo.tokenize(text, add_special_tokens=False)
    assert post(server, headers, "/detokenize", tokens=plain["tokens"]).json() == {"prompt": text}
    chat = post(server, headers, "/tokenize", messages=MESSAGES, add_special_tokens=False).json()
    assert chat["tokens"] == demo.render_chat(MESSAGES)
    for path, body in (
        ("/tokenize", {"prompt": "\ud800"}),
        ("/tokenize", {}),
        ("/tokenize", {"messages": 5}),
        ("/tokenize", {"messages": MESSAGES, "chat_template_kwargs": 5}),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}),
        ("/tokenize", {"messages": MESSAGES, "continue_final_message": True}),
        ("/tokenize", {"messages": MESSAGES, "chat_template_kwargs": {"messages": 5}}),
        ("/detokenize", {"tokens": ["a"]}),
        ("/detokenize", {"tokens": [2**40]}),
        ("/detokenize", {"tokens": [5, 100_000]}),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [True]}),
        ("/detokenize", {"text": "x"}),
    ):
        answer = post(server, headers, path, **body)
        assert answer.status_code == 400, (path, body, answer.text)


def test_the_same_alone_and_among_others(client: openai.OpenAI, demo: LLM) -> None:
    settings: dict[str, Any] = {"seed": 11, "max_tokens": 24, "temperature": 1.0}
    expected = demo.generate(PROMPT, use_tqdm=False, **settings)[0].outputs[0].text

    def ask(i: int) -> str:
        if i % 3 == 0:
            stream = client.completions.create(model="demo", prompt=PROMPT, stream=True, **settings)
            return "".join(chunk.choices[0].text for chunk in stream)
        if i % 3 == 1:
            return client.completions.create(model="demo", prompt=PROMPT, **settings).choices[0].text
        client.completions.create(model="demo", prompt=f"Noise {i}", max_tokens=i)
        return expected

    assert ask(0) == ask(1) == expected
    with ThreadPoolExecutor(64) as pool:
        assert set(pool.map(ask, range(64))) == {expected}


def test_parameters_of_the_model_hold(client: openai.OpenAI, demo: LLM) -> None:
    """What generation_config.json says is what a request without parameters gets."""
    params: SamplingParams = demo.default_sampling_params
    assert params.top_p != 1 and params.temperature != 1
    text = demo.chat(MESSAGES, seed=2, use_tqdm=False)[0].outputs[0].text
    assert client.chat.completions.create(model="demo", messages=MESSAGES, seed=2).choices[0].message.content == text


def test_embeddings(client: openai.OpenAI, demo: LLM, server: ServerProcess, headers: dict[str, str]) -> None:
    texts = ["The cat sat", "A dog ran away from home"]
    expected = demo.embed(texts)
    for form in ("float", "base64"):
        answer = client.embeddings.create(model="demo", input=texts, encoding_format=form)  # type: ignore[arg-type]
        found = [item.embedding for item in answer.data]
        if form == "base64":
            found = [np.frombuffer(base64.b64decode(item), "<f4") for item in found]  # type: ignore[arg-type, misc]
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        assert answer.usage.prompt_tokens == sum(len(demo.tokenize(text)) for text in texts)
    by_default = client.embeddings.create(model="demo", input=demo.tokenize(texts[0])).data
    np.testing.assert_allclose(by_default[0].embedding, expected[0], rtol=1e-6)
    last = client.embeddings.create(model="demo", input=texts, extra_body={"pooling": "last"}).data
    np.testing.assert_allclose(last[1].embedding, demo.embed(texts, "last")[1], rtol=1e-6)
    for fields in (
        {"dimensions": 8000},
        {"input": []},
        {"input": "word " * 600},
        {"input": [[]]},
        {"pooling": "middle"},
    ):
        answer = post(server, headers, "/v1/embeddings", **({"model": "demo", "input": "x"} | fields))
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == next(iter(fields))


@pytest.mark.parametrize("is_chat", [True, False])
def test_the_reason_of_a_stop(server: ServerProcess, headers: dict[str, str], is_chat: bool) -> None:
    """Which stop string or stop token id ended an answer; in a stream its last chunk says so."""
    route = "chat/completions" if is_chat else "completions"
    body: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
    body |= {"messages": [{"role": "user", "content": "Hi"}]} if is_chat else {"prompt": "Once upon a time"}

    def choice(**more: Any) -> dict[str, Any]:
        answer = httpx.post(f"{server.url}/v1/{route}", json=body | more, headers=headers, timeout=SECONDS)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()["choices"][0]
        return found

    def streamed(**more: Any) -> list[dict[str, Any]]:
        said = body | more | {"stream": True}
        answer = httpx.post(f"{server.url}/v1/{route}", json=said, headers=headers, timeout=SECONDS)
        return [json.loads(line[6:])["choices"][0] for line in answer.text.splitlines() if line.startswith("data: {")]

    first = choice(return_token_ids=True)
    text, ids = first["message"]["content"] if is_chat else first["text"], first["token_ids"]
    assert (first["finish_reason"], first["stop_reason"]) == ("length", None)
    for stop, reason in (({"stop": ["\x00", text[5:8]]}, text[5:8]), ({"stop_token_ids": [ids[3]]}, ids[3])):
        for found in (choice(**stop), streamed(**stop)[-1]):
            assert (found["finish_reason"], found["stop_reason"]) == ("stop", reason)
    *chunks, last = streamed()
    assert (last["finish_reason"], last["stop_reason"]) == ("length", None)
    assert all("stop_reason" not in chunk for chunk in chunks)
