"""What other servers promise their clients, by the assertions of their own tests; each test names its source."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import openai
import pytest

from server.support import KEY, SECONDS, ServerProcess

BOOK: Any = [{"role": "system", "content": "Book"}, {"role": "user", "content": "What is the best book"}]


@pytest.mark.parametrize(
    "messages",
    [None, "string", [123], [{}], [{"role": 123}], [{"role": "system", "content": 123}], [BOOK[0], {}], []],
)
def test_invalid_chats(server: ServerProcess, headers: dict[str, str], messages: Any) -> None:
    """llama.cpp, tools/server/tests/unit/test_chat_completion.py: test_invalid_chat_completion_req."""
    body = {"messages": messages}
    answer = httpx.post(f"{server.url}/chat/completions", json=body, headers=headers, timeout=SECONDS)
    assert answer.status_code == 400 and answer.json()["error"]["message"]


def test_chunks_of_a_chat(client: openai.OpenAI) -> None:
    """llama.cpp, test_chat_completion.py: test_chat_completion_stream, test_logprobs_stream."""
    story: Any = [{"role": "user", "content": "Tell me a story"}]
    call: Any = {"model": "demo", "messages": story, "max_tokens": 8, "temperature": 0, "logprobs": True}
    chunks = list(client.chat.completions.create(**call, top_logprobs=10, stream=True))
    assert len({chunk.id for chunk in chunks}) == len({chunk.created for chunk in chunks}) == 1
    first, *others = (chunk.choices[0] for chunk in chunks)
    assert first.delta.role == "assistant" and all(choice.delta.role is None for choice in others)
    assert [choice.finish_reason for choice in others] == [None] * (len(others) - 1) + ["length"]
    assert others[-1].delta.content is None
    tokens = [token for choice in others if choice.logprobs for token in choice.logprobs.content or ()]
    text = "".join(choice.delta.content or "" for choice in others)
    assert "".join(token.token for token in tokens) == text
    assert all(token.logprob <= 0 and token.bytes and len(token.top_logprobs) == 10 for token in tokens)
    whole = client.chat.completions.create(**call)
    assert whole.choices[0].message.content == text
    assert whole.usage is not None and whole.usage.completion_tokens == 8


def test_seeds(client: openai.OpenAI) -> None:
    """llama.cpp, test_completion.py: test_consistent_result_same_seed, test_different_result_different_seed."""

    def text(seed: int) -> str:
        answer = client.completions.create(model="demo", prompt="I believe", seed=seed, temperature=1, max_tokens=32)
        return answer.choices[0].text

    texts = [text(seed) for seed in (1, 1, 2, 3)]
    assert texts[0] == texts[1] and len(set(texts)) == 3


@pytest.mark.parametrize("is_chat", [True, False])
def test_usage_of_streams(client: openai.OpenAI, is_chat: bool) -> None:
    """vLLM, tests/entrypoints/openai: test_chat_completion_stream_options, test_completion_stream_options."""
    create: Any = client.chat.completions.create if is_chat else client.completions.create
    call: Any = {"model": "demo", "max_tokens": 4, **({"messages": BOOK} if is_chat else {"prompt": "Book"})}
    for options in ({"include_usage": False}, None):
        assert all(chunk.usage is None for chunk in create(**call, stream=True, stream_options=options))
    *chunks, last = create(**call, stream=True, stream_options={"include_usage": True})
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == [] and last.usage.completion_tokens == 4
    assert last.usage.total_tokens == last.usage.prompt_tokens + 4
    for options in ({"include_usage": None}, {"include_usage": True}):
        with pytest.raises(openai.BadRequestError):
            create(**call, stream=False, stream_options={**options, "continuous_usage_stats": True})


def test_numbers_of_log_probabilities(client: openai.OpenAI) -> None:
    """vLLM, tests/entrypoints/openai: test_zero_logprobs_chat, test_too_many_chat_logprobs and those of completions."""
    call: Any = {"model": "demo", "messages": BOOK, "max_tokens": 3}
    for said, count in (({"logprobs": True, "top_logprobs": 0}, 0), ({"logprobs": True, "top_logprobs": 5}, 5)):
        logprobs = client.chat.completions.create(**call, **said).choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None
        assert {len(token.top_logprobs) for token in logprobs.content} == {count}
    assert client.chat.completions.create(**call, logprobs=False).choices[0].logprobs is None
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(**call, logprobs=True, top_logprobs=21, stream=stream)
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="demo", prompt="Book", max_tokens=3, logprobs=21, stream=stream)
    zero = client.completions.create(model="demo", prompt="Book", max_tokens=3, logprobs=0).choices[0].logprobs
    assert zero is not None and zero.top_logprobs is not None
    assert [len(tops) for tops in zero.top_logprobs if tops] == [1] * 3


def test_several_prompts(client: openai.OpenAI) -> None:
    """vLLM, completion/test_completion.py: test_batch_completions; test_empty_prompt_list.py."""
    call: Any = {"model": "demo", "max_tokens": 3, "temperature": 0}
    batch = client.completions.create(prompt=["Book", "Book"], n=2, **call)
    assert [choice.index for choice in batch.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in batch.choices}) == 1
    texts = [""] * 2
    for chunk in client.completions.create(prompt=["Book", "Book"], stream=True, **call):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [batch.choices[0].text] * 2
    with pytest.raises(openai.BadRequestError):
        client.completions.create(prompt=[], **call)


@pytest.mark.parametrize("shown", [{}, {"Authorization": "Bearer invalid-key"}])
def test_keys(server: ServerProcess, shown: dict[str, str]) -> None:
    """llama.cpp, test_security.py: test_access_public_endpoint, test_access_static_assets_without_api_key,
    test_incorrect_api_key, test_correct_api_key_anthropic_header.

    Its list of models is open, too; ours tells the names of adapters, so it needs the key.
    """
    for path in ("/health", "/"):
        assert httpx.get(f"{server.url}{path}", headers=shown, timeout=SECONDS).status_code == 200
    body = {"prompt": "I believe the meaning of life is", "max_tokens": 1}
    refused = httpx.post(f"{server.url}/completions", json=body, headers=shown, timeout=SECONDS)
    assert refused.status_code == 401 and refused.json()["error"]["message"]
    taken = httpx.post(f"{server.url}/completions", json=body, headers={"X-Api-Key": KEY}, timeout=SECONDS)
    assert taken.status_code == 200 and "error" not in taken.json()


def test_a_text_there_and_back(server: ServerProcess, headers: dict[str, str]) -> None:
    """llama.cpp, test_tokenize.py: test_tokenize_detokenize, test_tokenize_with_pieces; by the fields of vLLM."""
    for text in ("What is the capital of France ?", "This is a test string with unicode 媽 and emoji 🤗"):
        body = {"prompt": text, "return_token_strs": True}
        answer = httpx.post(f"{server.url}/tokenize", json=body, headers=headers, timeout=SECONDS).json()
        assert len(answer["tokens"]) == answer["count"] == len(answer["token_strs"]) > 5 and all(answer["token_strs"])
        body = {"tokens": answer["tokens"]}
        back = httpx.post(f"{server.url}/detokenize", json=body, headers=headers, timeout=SECONDS).json()
        assert back["prompt"].endswith(text)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "json_object", "schema": {"const": "42"}}}, r'"42"'),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": "foooooo"}}}}, r'"foooooo"'),
        ({"response_format": {"type": "json_object"}}, r"\{.*"),
        ({"json_schema": {"const": "42"}}, r'"42"'),
        ({"grammar": 'root ::= "a"{5,5}'}, "a{5}"),
        ({"response_format": {"type": "sound"}}, None),
        ({"response_format": {"type": "json_object", "schema": 123}}, None),
        ({"response_format": {"type": "json_object", "schema": {"type": 123}}}, None),
        ({"response_format": {"type": "json_object", "schema": {"type": "hiccup"}}}, None),
    ],
)
def test_formats(server: ServerProcess, headers: dict[str, str], fields: dict[str, Any], expected: str | None) -> None:
    """llama.cpp, test_chat_completion.py: test_completion_with_response_format, test_completion_with_json_schema,
    test_completion_with_grammar.
    """
    body = {"messages": BOOK, "max_tokens": 24, **fields}
    answer = httpx.post(f"{server.url}/chat/completions", json=body, headers=headers, timeout=SECONDS)
    if expected is None:
        assert answer.status_code == 400 and answer.json()["error"]["message"]
    else:
        content = answer.json()["choices"][0]["message"]["content"]
        assert re.fullmatch(expected, content, re.DOTALL), content


def test_an_answer_of_the_library(client: openai.OpenAI) -> None:
    """llama.cpp, test_chat_completion.py: test_chat_completion (parts of a content are one text),
    test_chat_completion_with_openai_library.
    """
    parts: Any = [{"type": "text", "text": "What is"}, {"type": "text", "text": " the best book"}]
    call: Any = {"model": "demo", "max_tokens": 8, "seed": 42, "temperature": 0.8}
    answers = [
        client.chat.completions.create(messages=[BOOK[0], {"role": "user", "content": content}], **call)
        for content in (BOOK[1]["content"], parts)
    ]
    for answer in answers:
        assert "cmpl" in answer.id and answer.system_fingerprint
        assert answer.usage is not None and answer.usage.completion_tokens == 8
        assert (answer.choices[0].message.role, answer.choices[0].finish_reason) == ("assistant", "length")
    assert answers[0].choices[0].message.content


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_timings(server: ServerProcess, headers: dict[str, str], route: str) -> None:
    """llama.cpp, test_chat_completion.py: test_chat_completion_with_timings_per_token; here once, at the end."""
    body: dict[str, Any] = {"messages": BOOK} if route.startswith("chat") else {"prompt": ["Book", "Boat"]}
    body |= {"max_tokens": 10, "ignore_eos": True}

    def post(**more: Any) -> httpx.Response:
        return httpx.post(f"{server.url}/v1/{route}", json=body | more, headers=headers, timeout=SECONDS)

    assert "timings" not in post().json()
    whole = post(timings_per_token=True).json()
    streamed = post(timings_per_token=True, stream=True, stream_options={"include_usage": True}).text
    chunks = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert [chunk for chunk in chunks if "timings" in chunk] == [chunks[-1]] and chunks[-1]["choices"] == []
    for answer in (whole, chunks[-1]):
        told, counted = answer["timings"], answer["usage"]
        assert told["predicted_n"] == counted["completion_tokens"] > 0
        assert told["prompt_n"] + told["cache_n"] == counted["prompt_tokens"]
        for name in ("prompt", "predicted"):
            assert told[f"{name}_ms"] > 0
            rate = told[f"{name}_n"] * 1e3 / told[f"{name}_ms"]
            assert told[f"{name}_per_second"] == pytest.approx(rate)
    for other in ("responses", "messages"):
        fields = {"input": "a"} if other == "responses" else {"messages": BOOK[1:], "max_tokens": 2}
        refused = httpx.post(
            f"{server.url}/v1/{other}", json={**fields, "timings_per_token": True}, headers=headers, timeout=SECONDS
        )
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "timings_per_token"


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"type": "json_schema", "name": "test", "schema": {"const": "foooooo"}}, '"foooooo"'),
        ({"type": "json_object"}, r"\{.*"),
        ({"type": "text"}, ".*"),
        ({"type": "json_schema", "name": "test"}, None),
    ],
)
def test_formats_of_responses(
    server: ServerProcess, headers: dict[str, str], form: dict[str, Any], pattern: str | None
) -> None:
    """llama.cpp, test_compat_oai_responses.py: test_responses_with_text_format."""
    body = {"input": "Write an example", "max_output_tokens": 24, "text": {"format": form}}
    answer = httpx.post(f"{server.url}/responses", json=body, headers=headers, timeout=SECONDS)
    if pattern is None:
        assert answer.status_code == 400 and "error" in answer.json()
    else:
        message = next(item for item in answer.json()["output"] if item["type"] == "message")
        assert re.fullmatch(pattern, message["content"][0]["text"], re.DOTALL)


def test_events_of_a_response(client: openai.OpenAI) -> None:
    """llama.cpp, test_compat_oai_responses.py: test_responses_with_openai_library,
    test_responses_stream_with_openai_library.
    """
    call: Any = {"model": "demo", "input": BOOK, "max_output_tokens": 8, "temperature": 0}
    whole = client.responses.create(**call)
    assert whole.id.startswith("resp_") and (whole.output[0].id or "").startswith("msg_")
    text, ids, items = "", set(), set()
    for event in client.responses.create(**call, stream=True):
        if event.type in ("response.created", "response.in_progress", "response.incomplete"):
            ids.add(event.response.id)
        if event.type in ("response.output_item.added", "response.output_item.done"):
            items.add(event.item.id)
        if event.type in ("response.content_part.added", "response.content_part.done", "response.output_text.done"):
            items.add(event.item_id)
        if event.type == "response.output_text.delta":
            items.add(event.item_id)
            text += event.delta
        if event.type == "response.incomplete":  # it is cut by its limit
            assert event.response.output_text == text
    assert len(ids) == len(items) == 1 and text == whole.output_text


@pytest.mark.parametrize(
    "fields",
    [
        {"system": "You are a helpful assistant."},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": " it?"}]}
            ]
        },
        {"messages": [*BOOK[1:], {"role": "assistant", "content": "Hi there!"}, *BOOK[1:]]},
        {"stop_sequences": ["\n", "END"]},
        {"temperature": 0.5},
        {"top_p": 0.9},
        {"top_k": 40},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"metadata": {"user_id": "test_user_123"}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_messages(server: ServerProcess, headers: dict[str, str], fields: dict[str, Any]) -> None:
    """llama.cpp, test_compat_anthropic.py: test_anthropic_messages_basic and those of its fields."""
    body = {"model": "demo", "max_tokens": 50, "messages": BOOK[1:], **fields}
    answer = httpx.post(f"{server.url}/v1/messages", json=body, headers=headers, timeout=SECONDS).json()
    assert (answer["type"], answer["role"]) == ("message", "assistant")
    assert answer["content"][0]["type"] == "text" and answer["content"][0]["text"]
    assert answer["stop_reason"] in ("end_turn", "max_tokens", "stop_sequence")
    counts = ("cache_read_input_tokens", "input_tokens", "output_tokens")
    assert all(isinstance(answer["usage"][name], int) for name in counts) and answer["usage"]["output_tokens"] > 0
    assert "timings" not in answer and "choices" not in answer and "object" not in answer


def test_a_stream_of_a_message(server: ServerProcess, headers: dict[str, str]) -> None:
    """llama.cpp, test_compat_anthropic.py: test_anthropic_messages_streaming,
    test_anthropic_streaming_content_block_indices.
    """
    body = {"model": "demo", "max_tokens": 30, "messages": BOOK[1:], "stream": True}
    answer = httpx.post(f"{server.url}/v1/messages", json=body, headers=headers, timeout=SECONDS)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    names = [event["type"] for event in events]
    deltas = names.count("content_block_delta")
    begin, end = ["message_start", "content_block_start"], ["content_block_stop", "message_delta", "message_stop"]
    assert deltas > 0 and [name for name in names if name != "ping"] == [
        *begin,
        *["content_block_delta"] * deltas,
        *end,
    ]
    assert {event["index"] for event in events if "index" in event} == {0}
    message = events[0]["message"]
    assert message["content"] == [] and message["role"] == "assistant" and message["usage"]["input_tokens"] > 0
    assert all(event["delta"]["type"] == "text_delta" for event in events if event["type"] == "content_block_delta")
    assert events[-2]["delta"]["stop_reason"] in ("end_turn", "max_tokens")
    assert events[-2]["usage"]["output_tokens"] > 0


@pytest.mark.parametrize("fields", [{}, {"system": "You are a helpful assistant."}])
def test_counts_of_messages(server: ServerProcess, headers: dict[str, str], fields: dict[str, str]) -> None:
    """llama.cpp, test_compat_anthropic.py: test_anthropic_count_tokens and those of its fields."""
    body = {"model": "demo", "messages": BOOK[1:], **fields}
    answer = httpx.post(f"{server.url}/v1/messages/count_tokens", json=body, headers=headers, timeout=SECONDS)
    assert answer.json().keys() == {"input_tokens"} and answer.json()["input_tokens"] > 0


@pytest.mark.parametrize("content", ["string", [12, 34, 56], ["one", "two"], ["one", [12, 34]], [[12, 34], [56]]])
def test_inputs_of_embeddings(server: ServerProcess, headers: dict[str, str], content: Any) -> None:
    """llama.cpp, test_embedding.py: test_embedding_mixed_input, test_embedding_single, test_embedding_multiple,
    test_embedding_usage_multiple.
    """
    answer = httpx.post(f"{server.url}/v1/embeddings", json={"input": content}, headers=headers, timeout=SECONDS).json()
    several = isinstance(content, list) and not isinstance(content[0], int)
    assert len(answer["data"]) == (len(content) if several else 1)
    for entry in answer["data"]:
        assert sum(x * x for x in entry["embedding"]) == pytest.approx(1, abs=1e-3)
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0


@pytest.mark.parametrize("content", [[], {"content": "string"}, "This is a test " * 512])
def test_inputs_that_are_no_embeddings(server: ServerProcess, headers: dict[str, str], content: Any) -> None:
    """llama.cpp, test_embedding.py: test_embedding_invalid_input, test_embedding_error_prompt_too_long."""
    answer = httpx.post(f"{server.url}/v1/embeddings", json={"input": content}, headers=headers, timeout=SECONDS)
    assert answer.status_code == 400 and answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        (
            {"regex": r'\{\n   "name": "\w{1,9}",\n   "people": \d{1,9}\n\}'},
            r'\{\n   "name": "\w+",\n   "people": \d+\n\}',
        ),
        ({"ebnf": 'root ::= "Hello" | "Hi" | "Hey"'}, "Hello|Hi|Hey"),
        (
            {"ebnf": 'root ::= "{" pair "}"\npair ::= "\\"name\\"" ":" string\nstring ::= "\\"" [A-Za-z]+ "\\""'},
            r'\{"name":"[A-Za-z]+("\})?',
        ),
    ],
)
def test_grammars_of_sglang(
    server: ServerProcess, headers: dict[str, str], fields: dict[str, str], pattern: str
) -> None:
    """SGLang, test/srt/openai_server: test_openai_server.py: test_regex; test_openai_server_ebnf.py."""
    body = {"messages": BOOK, "temperature": 0, "max_tokens": 64, **fields}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=SECONDS)
    content = answer.json()["choices"][0]["message"]["content"]
    assert re.fullmatch(pattern, content, re.DOTALL), content


def test_answers_that_go_on(server: ServerProcess, headers: dict[str, str]) -> None:
    """SGLang, test/srt/openai_server/validation: test_openai_server_ignore_eos.py; test_matched_stop.py, whose field
    `matched_stop` is vLLM's `stop_reason` here; test_request_length_validation.py.
    """

    def ask(**fields: Any) -> httpx.Response:
        body = {"messages": BOOK, "temperature": 0, **fields}
        return httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=SECONDS)

    long = ask(max_tokens=200, ignore_eos=True).json()
    assert long["usage"]["completion_tokens"] == 200 and long["choices"][0]["finish_reason"] == "length"
    for fields, reason, stop in (({"stop": "."}, "stop", "."), ({"ignore_eos": True}, "length", None)):
        (choice,) = ask(max_tokens=100, **fields).json()["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == (reason, stop)
    refused = ask(messages=[{"role": "user", "content": "hello " * 1200}])
    assert refused.status_code == 400 and "context length" in refused.json()["error"]["message"]
