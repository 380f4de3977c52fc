"""Every field that the clients of OpenAI and Anthropic know is honoured, or harmless, or refused by name."""

from __future__ import annotations

import json
import shutil
import threading
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import anthropic.types.message_create_params as anthropic_message
import httpx
import openai.types.chat.completion_create_params as openai_chat
import openai.types.completion_create_params as openai_text
import openai.types.embedding_create_params as openai_embedding
import openai.types.responses.response_create_params as openai_response
import pytest

from infinilm import LLM
from infinilm.server.bodies import Body
from infinilm.server.thinking import Thinking, take_thinking
from server.support import SECONDS, Hosted, hosted, http_post
from server.templates import QWEN

MESSAGES: Any = [{"role": "user", "content": "Hi"}]
NOTHING = {"type": "object", "properties": {}}
NOT = {"type": "object", "not": {}}  # which cannot be enforced

CHAT = {
    "frequency_penalty": 0.5, "function_call": "none", "functions": [], "logit_bias": {"5": 1}, "logprobs": True,
    "max_completion_tokens": 2, "max_tokens": 2, "messages": MESSAGES, "metadata": {"a": "b"}, "modalities": ["text"],
    "model": "tiny", "n": 2, "parallel_tool_calls": False, "prediction": {"type": "content", "content": "x"},
    "presence_penalty": 0.5, "prompt_cache_key": "k", "prompt_cache_options": {}, "prompt_cache_retention": "24h",
    "reasoning_effort": "low", "response_format": {"type": "text"}, "safety_identifier": "s", "seed": 1,
    "service_tier": "auto", "stop": ["x"], "store": True, "temperature": 0.5, "tool_choice": "auto",
    "tools": [{"type": "function", "function": {"name": "f", "parameters": NOTHING}}], "top_p": 0.5, "user": "u",
    "verbosity": "low",
}  # fmt: skip
TEXT = {
    "best_of": 1, "echo": True, "frequency_penalty": 0.5, "logit_bias": {"5": 1}, "logprobs": 2, "max_tokens": 2,
    "model": "tiny", "n": 1, "presence_penalty": 0.5, "prompt": ["a", "b"], "seed": 1, "stop": "x", "suffix": "",
    "temperature": 0.5, "top_p": 0.5, "user": "u",
}  # fmt: skip
RESPONSE = {
    "background": False, "context_management": [], "include": ["reasoning.encrypted_content"],
    "input": "Hi", "instructions": "Be brief",
    "max_output_tokens": 2, "metadata": {"a": "b"}, "model": "tiny", "parallel_tool_calls": True,
    "prompt_cache_key": "k", "prompt_cache_options": {}, "prompt_cache_retention": "24h",
    "reasoning": {"effort": "low", "summary": "auto"},
    "safety_identifier": "s", "service_tier": "auto", "store": True, "temperature": 0.5, "text": {"verbosity": "low"},
    "tool_choice": "auto", "tools": [{"type": "function", "name": "f", "parameters": NOTHING, "strict": False}],
    "top_logprobs": 0, "top_p": 0.5, "truncation": "disabled", "user": "u",
}  # fmt: skip
MESSAGE = {
    "cache_control": {"type": "ephemeral"}, "diagnostics": {}, "inference_geo": "us", "max_tokens": 2,
    "messages": MESSAGES, "metadata": {"user_id": "u"}, "model": "tiny", "output_config": {"effort": "low"},
    "service_tier": "auto", "speed": "standard", "stop_sequences": ["x"], "system": "Be brief", "temperature": 0.5,
    "thinking": {"type": "adaptive"}, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "tools": [{"name": "f", "input_schema": NOTHING, "cache_control": {"type": "ephemeral"}}], "top_k": 5, "top_p": 0.5,
    "user_profile_id": "u", "workspace_id": "w",
}  # fmt: skip
EMBEDDING = {"encoding_format": "base64", "input": ["a", "b"], "model": "tiny", "user": "u"}

PATHS: Mapping[str, tuple[Any, Mapping[str, Any], Mapping[str, Any]]] = {
    "chat/completions": (openai_chat.CompletionCreateParamsBase, CHAT, {"messages": MESSAGES, "max_tokens": 2}),
    "completions": (openai_text.CompletionCreateParamsBase, TEXT, {"prompt": "x", "max_tokens": 2}),
    "responses": (openai_response.ResponseCreateParamsBase, RESPONSE, {"input": "Hi", "max_output_tokens": 2}),
    "messages": (anthropic_message.MessageCreateParamsBase, MESSAGE, {"messages": MESSAGES, "max_tokens": 2}),
    "embeddings": (openai_embedding.EmbeddingCreateParams, EMBEDDING, {"input": "x"}),
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", chat_template=QWEN) as made:
        yield made


@pytest.fixture(scope="module")
def host(llm: LLM) -> Iterator[Hosted]:
    with hosted(llm, unknown_fields="refuse") as running:
        yield running


def post(host: Hosted, path: str, body: Mapping[str, Any]) -> httpx.Response:
    return httpx.post(f"{host.url}/v1/{path}", json={"model": "tiny", **body}, timeout=SECONDS)


@pytest.mark.parametrize("path", PATHS)
def test_fields_that_are_honoured(host: Hosted, path: str) -> None:
    """One by one, and all at once."""
    _, fields, least = PATHS[path]
    for name, value in fields.items():
        answer = post(host, path, {**least, name: value})
        assert answer.status_code == 200, (name, answer.text)
        # What is null is not said. Without a model it is the one there is.
        is_needed = name in {"messages", "prompt", "input"} or (path, name) == ("messages", "max_tokens")
        assert post(host, path, {**least, name: None}).status_code == (400 if is_needed else 200), name
    answer = post(host, path, {name: value for name, value in fields.items() if name != "max_tokens"} | least)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", PATHS)
def test_other_fields_of_the_clients_are_refused_by_name(host: Hosted, path: str) -> None:
    hints, fields, least = PATHS[path]
    others = typing.get_type_hints(hints).keys() - fields.keys() - {"stream_options", "top_logprobs"}
    for name in (*others, "somethin"):
        for value in ({"x": 1}, "x"):
            answer = post(host, path, {**least, name: value})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, name), answer.text
            assert name in error["message"]


@pytest.mark.parametrize("rule", [None, "warn", "refuse"])
def test_unknown_fields(llm: LLM, rule: str | None, caplog: pytest.LogCaptureFixture) -> None:
    """They are refused, or told in the log, once, and in a header; by default that depends on whose bodies they are."""
    with hosted(llm, unknown_fields=rule) as host:
        for path in PATHS:
            is_lenient = rule == "warn" or (rule is None and path in {"messages", "responses"})
            for _ in range(2):
                answer = post(host, path, {**PATHS[path][2], "compactness": 3, "x\n": 1, "model": None})
                if is_lenient:
                    assert answer.status_code == 200, answer.text
                    told = answer.headers["x-infinilm-ignored-fields"]
                    assert told == "compactness, (a name of other characters)"
                else:
                    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "compactness")
            said = f"/v1/{path}: the field compactness is not known here, and is ignored"
            assert caplog.messages.count(said) == is_lenient
            # An answer would not be what was asked for.
            for name in (
                "Temperature",
                "max_token",
                "topP",
                "bad_words",
                "min_ps",
                "dry_multiplier",
                "guided_jsn",
                "stop_regex",
            ):
                answer = post(host, path, {**PATHS[path][2], name: 1})
                assert path == "embeddings" or (answer.status_code, answer.json()["error"]["param"]) == (400, name)
        if rule == "warn":
            body = {**PATHS["responses"][2], "reasoning": {"summary": "auto", "colour": 1}, "stream": True}
            assert post(host, "responses", body).headers["x-infinilm-ignored-fields"] == "reasoning.colour"
            assert "x-infinilm-ignored-fields" not in post(host, "completions", PATHS["completions"][2]).headers
            many = {f"colour{i}": 1 for i in range(100_000)}  # each takes time to be compared with what is known
            assert "more than 100 fields" in post(host, "responses", {**body, **many}).json()["error"]["message"]
            answer = post(host, "responses", {**body, "x" * 1_000_000: 1})
            assert answer.headers["x-infinilm-ignored-fields"] == "reasoning.colour, (a name of other characters)"
            answer = httpx.post(f"{host.url}/tokenize", json={"prompt": "x", "compactness": 1})
            assert answer.headers["x-infinilm-ignored-fields"] == "compactness"


def test_words_of_others(host: Hosted) -> None:
    """Fields of other servers that mean something here are honoured; those that change no answer are taken."""
    effort = ("reasoning_effort", "low")
    for said, means in (
        ({}, Thinking()),
        ({"enable_thinking": False}, Thinking(("enable_thinking", False))),
        ({"thinking": {"type": "disabled"}}, Thinking(("thinking.type", False))),
        ({"thinking": {"type": "adaptive", "budget_tokens": 5}}, Thinking(("thinking.type", True))),
        ({"reasoning": {"enabled": False, "exclude": False}}, Thinking(("reasoning.enabled", False))),
        ({"reasoning": {"effort": "none"}}, Thinking(None, ("reasoning.effort", "none"))),
        ({"reasoning_effort": "low"}, Thinking(None, effort)),
        ({"reasoning_effort": "low", "enable_thinking": False}, Thinking(("enable_thinking", False), effort)),
    ):
        assert take_thinking(Body(said)) == means
    chat = {"messages": MESSAGES, "max_tokens": 2}
    harmless = {"num_ctx": 1, "keep_alive": "5m", "usage": {"include": True}, "provider": {}, "cache_prompt": True}
    harmless |= {"include_reasoning": True, "id_slot": 1, "priority": 1, "request_id": "x", "stop": ""}
    harmless |= {"spaces_between_special_tokens": True, "separate_reasoning": True, "stream_reasoning": True}
    assert post(host, "chat/completions", chat | harmless).status_code == 200
    for name in ("include_reasoning", "separate_reasoning", "spaces_between_special_tokens"):
        assert post(host, "chat/completions", {**chat, name: False}).json()["error"]["param"] == name


WRONG: list[tuple[str, dict[str, Any], str]] = [
    (
        "chat/completions",
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
        "tools[0].function.parameters",
    ),
    ("chat/completions", {"messages": "Hi"}, "messages"),
    ("chat/completions", {"max_completion_tokens": 0}, "max_completion_tokens"),
    ("responses", {"metadata": {"a": float("nan")}}, ""),
    ("responses", {"input": []}, "input"),
    ("responses", {"input": ["x"]}, "input[0]"),
    ("responses", {"input": [{"role": "user", "content": 5}]}, "input"),
    ("responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
    ("responses", {"input": "x" * 5000}, "input"),
    ("responses", {"input": [{"type": "reasoning", "content": 5}]}, "input[0].content"),
    ("responses", {"input": [{"type": "reasoning", "content": ["x"]}]}, "input[0].content[0]"),
    ("responses", {"max_output_tokens": 0}, "max_output_tokens"),
    ("responses", {"include": ["nonsense"]}, "include"),
    ("responses", {"include": ["message.output_text.logprobs"]}, "include"),
    ("responses", {"return_token_ids": True}, "return_token_ids"),
    ("responses", {"return_receipt": True}, "return_receipt"),
    (
        "responses",
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        "stream_options.continuous_usage_stats",
    ),
    ("responses", {"reasoning": {"effrt": "low"}}, "reasoning.effrt"),
    ("responses", {"reasoning": {"effort": "much"}}, "reasoning.effort"),
    ("responses", {"text": {"formt": {}}}, "text.formt"),
    ("responses", {"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ("responses", {"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ("responses", {"text": {"format": {"type": "json_schema", "schema": NOT, "name": "x"}}}, "text.format"),
    ("responses", {"text": {}, "response_format": {"type": "json_object"}}, "response_format"),
    ("responses", {"max_completion_tokens": 5}, "max_completion_tokens"),
    ("responses", {"tools": [{"type": "function"}]}, "tools[0].name"),
    ("responses", {"tools": [{"type": "function", "name": ""}]}, "tools[0].name"),
    (
        "responses",
        {"tools": [{"type": "function", "name": "f", "strict": True, "parameters": NOT}]},
        "tools[0].parameters",
    ),
    ("responses", {"tools": [{"type": "function", "name": "f", "parameters": []}]}, "tools[0].parameters"),
    ("messages", {"max_tokens": 0}, "max_tokens"),
    ("messages", {"thinking": {"type": "sometimes"}}, "thinking.type"),
    ("messages", {"thinking": {"budget_tokens": 5}}, "thinking.type"),
    ("messages", {"thinking": {"type": "enabled", "budget_tokns": 5}}, "thinking.budget_tokns"),
    ("messages", {"thinking": {"type": "enabled", "budget_tokens": "5"}}, "thinking.budget_tokens"),
    ("messages", {"stream": True, "stream_options": {"include_usage": True}}, "stream_options"),
    ("messages", {"return_token_ids": True}, "return_token_ids"),
    ("messages", {"return_receipt": True}, "return_receipt"),
    ("messages", {"tool_choice": {"type": []}}, "tool_choice.type"),
    ("messages", {"tool_choice": {"type": "required"}}, "tool_choice.type"),
    ("messages", {"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ("messages", {"stop_sequences": ["x", ""]}, "stop_sequences[1]"),
    ("messages", {"stop": ["x"]}, "stop"),
    ("messages", {"reasoning_effort": "low"}, "reasoning_effort"),
    ("messages", {"tools": [{"name": "", "input_schema": NOTHING}]}, "tools[0].name"),
    ("messages", {"tools": [{"name": "f", "input_schema": NOT, "strict": True}]}, "tools[0].input_schema"),
    ("messages", {"tools": "x"}, "tools"),
    ("messages", {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ("messages", {"output_config": {"format": {"type": "json_schema", "schema": NOT}}}, "output_config.format"),
    ("messages", {"output_config": {"effrt": "low"}}, "output_config.effrt"),
    ("messages", {"output_config": {"effort": 5}}, "output_config.effort"),
    ("messages", {"system": 5}, "system"),
    ("messages", {"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ("messages", {"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    (
        "messages",
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "messages[0].content[0].source.type",
    ),
    ("embeddings", {"input": {"a": 1}}, "input"),
    ("embeddings", {"input": [10**30]}, "input"),
    ("completions", {"prompt": [10**30]}, "prompt"),
    ("completions", {"prompt": [1.0]}, "prompt"),
]


@pytest.mark.parametrize(("path", "fields", "param"), WRONG, ids=lambda value: str(value)[:40])
def test_what_is_wrong_is_named_as_the_client_knows_it(
    host: Hosted, path: str, fields: dict[str, Any], param: str
) -> None:
    data = json.dumps({"model": "tiny", **PATHS[path][2], **fields})
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{host.url}/v1/{path}", content=data, headers=headers, timeout=SECONDS)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"] or "", error["type"]) == (param, "invalid_request_error"), answer.text
    is_long = error["code"] == "context_length_exceeded"  # which has words of its own
    assert is_long or error["message"].startswith(param.partition("[")[0].split(".")[0]), answer.text


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ('"seed": 1, "seed": 1', "seed"),
        ('"max_tokens": 1, "seed": 1, "max_\\u0074okens": 2', "max_tokens"),
        ('"logit_bias": {"5": 1, "5": -1}', "5"),
    ],
)
def test_fields_that_are_there_twice(host: Hosted, fields: str, name: str) -> None:
    for path in ("chat/completions", "messages"):
        data = json.dumps(PATHS[path][2])[:-1] + f', "model": "tiny", {fields}}}'
        headers = {"Content-Type": "application/json"}
        answer = httpx.post(f"{host.url}/v1/{path}", content=data, headers=headers, timeout=SECONDS)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == name and "more than once" in answer.json()["error"]["message"]


def test_many_fields_that_are_there_once(host: Hosted) -> None:
    """The one that is there twice is found in a moment: the others wait meanwhile."""
    fields = ", ".join(f'"f{i}": 0' for i in range(200_000))
    headers = {"Content-Type": "application/json"}
    for last, name in (('"f199999": 1', "f199999"), (r'"\ud800": 1, "\ud800": 2', r"\ud800")):
        data = f'{{"model": "tiny", "metadata": {{{fields}, {last}}}}}'
        answer = httpx.post(f"{host.url}/v1/completions", content=data, headers=headers, timeout=SECONDS)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize(
    ("field", "value", "most"),
    [
        ("stop_token_ids", [1] * 65_537, 65_536),
        ("allowed_token_ids", [1] * 524_289, 524_288),
        ("logit_bias", {str(i): 0 for i in range(65_537)}, 65_536),
        ("stop_token_ids", [1] * 5000, 4096),  # as `RequestLimits` has it
    ],
)
def test_lists_are_bounded(host: Hosted, field: str, value: Any, most: int) -> None:
    answer = post(host, "completions", {"prompt": "x", field: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    assert f"at most {most}" in answer.json()["error"]["message"]


def test_long_texts_are_refused_before_they_are_tokenised(host: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.service.tokenizer, "encode", None)  # which nothing may call
    long = "a b c d " * (1 << 17)
    for path, body in (
        ("completions", {"prompt": long}),
        ("chat/completions", {"messages": [{"role": "user", "content": long}]}),
        ("embeddings", {"input": long}),
    ):
        error = post(host, path, body).json()["error"]
        assert error["code"] == "context_length_exceeded" and "prompt is too long: at least" in error["message"]


def test_what_is_only_tokenised_has_a_bound(host: Hosted) -> None:
    """It may be longer than the context, but not by any number; what is too long is refused before the work."""
    root = host.url
    for path, body, name in (
        ("tokenize", {"prompt": "a" * (1 << 20)}, "prompt"),
        ("detokenize", {"tokens": [5] * (1 << 20)}, "tokens"),
    ):
        assert http_post(f"{root}/{path}", json=body).status_code == 200
        answer = http_post(f"{root}/{path}", json={name: [*body[name], 5] if name == "tokens" else f"{body[name]}a"})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == name
        assert "expected at most 1048576" in answer.json()["error"]["message"]


def test_long_texts_that_are_only_tokenised_hold_up_no_answer(host: Hosted) -> None:
    """A long body that asks for an answer is read while /tokenize is busy with others."""
    may_end = threading.Event()
    busy = host.service.long_tokenizer.submit(may_end.wait, SECONDS)
    try:
        body = {"prompt": [5], "max_tokens": 1, "metadata": {"x": "a" * (1 << 19)}}
        assert post(host, "completions", body).status_code == 200 and not busy.done()
    finally:
        may_end.set()


def test_types_of_errors(host: Hosted) -> None:
    """By the names of each API."""
    for path, told in (("chat/completions", "invalid_request_error"), ("messages", "not_found_error")):
        answer = post(host, path, {**PATHS[path][2], "model": "other"})
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["code"]) == (404, told, "model_not_found")
        shown = answer.headers["x-request-id"] if path == "messages" else None
        assert answer.json().get("request_id") == shown
    host.service.is_draining = True
    try:
        for path, told in (("responses", "server_error"), ("messages", "overloaded_error")):
            answer = post(host, path, PATHS[path][2])
            assert (answer.status_code, answer.json()["error"]["type"]) == (503, told)
            assert answer.json().get("type") == ("error" if path == "messages" else None)
    finally:
        host.service.is_draining = False


@pytest.mark.parametrize("path", ["responses", "messages"])
def test_a_stream_that_fails_ends_with_an_error(host: Hosted, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make = host.service.llm._requests.make

    def failing(prompts: Any, params: Any, sampling: Any) -> Any:
        def fail(token_ids: Any, logits: Any) -> Any:
            raise OSError("on purpose")

        return make(prompts, params, {**sampling, "logits_processor": fail})

    monkeypatch.setattr(host.service.llm._requests, "make", failing)
    answer = post(host, path, {**PATHS[path][2], "stream": True})
    name, data = answer.text.strip().split("\n\n")[-1].split("\n")
    event = json.loads(data.removeprefix("data: "))
    assert name == "event: error" and event["type"] == "error"
    assert "on purpose" in event["error"]["message"]
    assert event["error"]["type"] == ("server_error" if path == "responses" else "api_error")
    if path == "responses":
        assert "on purpose" in event["message"] and {"code", "param"} <= event.keys()


def test_what_clients_are_told_names_no_path(tiny_folder: Path, tmp_path: Path) -> None:
    """The model has the name under which it is served."""
    bare = shutil.copytree(tiny_folder, tmp_path / "bare")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (bare / name).unlink(missing_ok=True)
    tools = CHAT["tools"]
    asked: list[tuple[Path, str, str, dict[str, Any]]] = [
        (tiny_folder, "{{ raise_exception('on purpose') }}", "chat/completions", {"messages": MESSAGES}),
        (tiny_folder, "{{ messages }}", "chat/completions", {"messages": MESSAGES, "tools": tools}),
        (tiny_folder, "{{ '' }}", "chat/completions", {"messages": MESSAGES}),
        (bare, "", "chat/completions", {"messages": MESSAGES}),
        (bare, "", "completions", {"prompt": "x"}),
    ]
    for folder, template, path, body in asked:
        with LLM(folder, chat_template=template or None) as llm, hosted(llm) as running:
            answer = post(running, path, body)
            assert answer.status_code == 400, answer.text
            assert "the model 'tiny'" in (message := answer.json()["error"]["message"])
            assert str(tmp_path) not in message and str(tiny_folder) not in message


def test_allowed_tools(host: Hosted) -> None:
    """A part of the tools, in the words of chats and of responses; the prompt has all of them."""
    functions = [{"name": name, "parameters": {**NOTHING, "additionalProperties": False}} for name in ("a", "b")]
    call = {"messages": MESSAGES, "tools": [{"type": "function", "function": f} for f in functions], "n": 4}
    for mode, tools, names in (("required", ["b"], {"b"}), ("auto", [], set())):
        listed: Any = [{"type": "function", "function": {"name": name}} for name in tools]
        choice: Any = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": listed}}
        found = post(host, "chat/completions", {**call, "tool_choice": choice, "max_tokens": 60}).json()["choices"]
        called = {c["function"]["name"] for choice in found for c in choice["message"].get("tool_calls") or ()}
        assert called == names
    flat = [{"type": "function", **f} for f in functions]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "a"}]}
    items = post(host, "responses", {"input": "Hi", "tools": flat, "tool_choice": choice, "max_output_tokens": 60})
    assert {item["name"] for item in items.json()["output"] if item["type"] == "function_call"} == {"a"}
    for bad in ({"mode": "always", "tools": []}, {"mode": "required", "tools": [{"name": "c"}]}, {"mode": "auto"}):
        answer = post(
            host, "chat/completions", {**call, "tool_choice": {"type": "allowed_tools", "allowed_tools": bad}}
        )
        assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("tool_choice")
