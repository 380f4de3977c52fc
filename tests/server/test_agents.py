"""What agents send, in form and fields as they do, through a server: a question, a call, its result, an answer.

The bodies follow the sources of these programs as they were in 2026. What the model writes is scripted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from llm import tiny

from server.support import SECONDS, Hosted, ScriptedLLM, hosted
from server.templates import QWEN, WRITERS

MODEL = "tiny"
ARGUMENTS = {"command": "ls -la", "timeout": 1000}
ANSWER = "There are two files."
SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "command": {"type": "string", "description": "The command to execute"},
        "timeout": {"type": "integer", "minimum": 0, "maximum": 9007199254740991, "description": "Milliseconds"},
        "mode": {"type": "string", "enum": ["fast", "slow"], "default": "fast"},
    },
    "required": ["command"],
    "additionalProperties": False,
}
FUNCTION = {"name": "Bash", "description": "Run a command", "parameters": SCHEMA}
CACHE = {"cache_control": {"type": "ephemeral"}}


@dataclass
class Agent:
    """A program: how it asks, and how it goes on when the model has called a tool.

    `begin` is the body of its first request; `go_on` makes messages (or items) of what the call was: id and function.
    """

    path: str
    begin: dict[str, Any]
    key: str  # of the conversation in the body
    go_on: Callable[[str, str], list[Any]]
    headers: Mapping[str, str] = field(default_factory=dict)
    tool: str = "Bash"  # as the model sees it


def chat_turn(call_id: str, function: str, **more: Any) -> list[Any]:
    call = {"id": call_id, "type": "function", "function": {"name": function, "arguments": json.dumps(ARGUMENTS)}}
    result = {"role": "tool", "tool_call_id": call_id, "content": "a\nb", **more}
    return [{"role": "assistant", "content": "", "tool_calls": [call]}, result]


def claude_turn(call_id: str, name: str) -> list[Any]:
    return [
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I look.", "signature": ""},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": call_id, "name": name, "input": ARGUMENTS},
            ],
        },
        {
            "role": "user",
            "content": [
                {"tool_use_id": call_id, "type": "tool_result", "content": "a\nb", "is_error": False},
                {"type": "text", "text": "<system-reminder>\nBe brief\n</system-reminder>", **CACHE},
            ],
        },
        {"role": "system", "content": [{"type": "text", "text": "<total_tokens>9 left</total_tokens>", **CACHE}]},
    ]


def codex_turn(call_id: str, name: str, **more: Any) -> list[Any]:
    return [
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": None},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}], "phase": "x"},
        {"type": "function_call", "name": name, "arguments": json.dumps(ARGUMENTS), "call_id": call_id, **more},
        {"type": "function_call_output", "call_id": call_id, "output": [{"type": "input_text", "text": "a\nb"}]},
    ]


CLAUDE_CODE = {
    "model": MODEL,
    "max_tokens": 32000,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.283.00; cc_entrypoint=cli;"},
        {"type": "text", "text": "You are Claude Code.", **CACHE},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nToday\n</system-reminder>"},
                {"type": "text", "text": "How many files are there?", **CACHE},
            ],
        }
    ],
    "tools": [
        {
            "name": "Bash",
            "description": "Run a command",
            "input_schema": SCHEMA,
            "eager_input_streaming": True,
            **CACHE,
        },
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "metadata": {"user_id": json.dumps({"device_id": "0" * 64, "session_id": "0"})},
    "thinking": {"type": "adaptive", "display": "omitted"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "temperature": 1,
    "stream": True,
}
CODEX = {
    "model": MODEL,
    "instructions": "You are Codex.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "How many files are there?"}]},
    ],
    "tools": [
        {"type": "function", "name": "Bash", "description": "Run", "strict": False, "parameters": SCHEMA},
        {"type": "custom", "name": "apply_patch", "description": "Edit", "format": {"type": "grammar"}},
        {"type": "web_search", "external_web_access": False},
        {
            "type": "namespace",
            "name": "mcp__files",
            "description": "Files",
            "tools": [{"type": "function", "name": "Bash", "strict": False, "parameters": SCHEMA}],
        },
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "service_tier": None,
    "prompt_cache_key": "019a",
    "text": {"verbosity": "medium"},
    "client_metadata": {"x-codex-installation-id": "0"},
}
SAID: list[Any] = [
    {"role": "system", "content": "You are an agent."},
    {"role": "user", "content": "How many files are there?"},
]
CHAT_TOOLS = [{"type": "function", "function": FUNCTION}]

AGENTS = {
    "claude-code": Agent(
        "/v1/messages?beta=true",
        CLAUDE_CODE,
        "messages",
        claude_turn,
        {
            "anthropic-version": "2023-06-01",
            "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,effort-2025-11-24",
            "x-api-key": "k",
            "x-app": "cli",
            "user-agent": "claude-cli/2.1.283 (external, cli)",
        },
    ),
    "codex": Agent("/v1/responses", CODEX, "input", codex_turn, {"accept": "text/event-stream", "originator": "x"}),
    "codex-mcp": Agent(
        "/v1/responses",
        CODEX,
        "input",
        lambda call_id, name: codex_turn(call_id, name, namespace="mcp__files"),
        tool="mcp__files__Bash",
    ),
    "opencode": Agent(
        "/v1/chat/completions",
        {
            "model": MODEL, "max_tokens": 32000, "temperature": 0.55, "top_p": 1, "messages": SAID, "stream": True,
            "tools": [{"type": "function", "function": FUNCTION | {"strict": False}}], "tool_choice": "auto",
            "stream_options": {"include_usage": True}, "reasoning_effort": "medium", "verbosity": "low",
        },
        "messages",
        chat_turn,
    ),
    "continue": Agent(
        "/v1/chat/completions",
        {
            "messages": SAID, "model": MODEL, "max_tokens": 4096, "stream": True, "temperature": 0.01,
            "stop": ["\n\nzzzz", "<end_of_turn>"], "tools": CHAT_TOOLS, "parallel_tool_calls": False,
        },
        "messages",
        chat_turn,
        {"api-key": "k"},
    ),
    # It calls no tools; here it is given one, since LiteLLM, which it asks through, passes them on.
    "aider": Agent(
        "/v1/chat/completions",
        {"messages": SAID, "model": MODEL, "stream": True, "temperature": 0, "tools": CHAT_TOOLS},
        "messages",
        lambda call_id, function: chat_turn(call_id, function, name=function),
        {"x-stainless-raw-response": "true"},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ScriptedLLM, Hosted]]:
    folder = tiny.make_checkpoint(tmp_path_factory.mktemp("agents") / "tiny", max_position_embeddings=8192)
    with ScriptedLLM(folder, chat_template=QWEN) as llm, hosted(llm) as host:
        yield llm, host


def events(agent: Agent, host: Hosted, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    headers = {"Authorization": "Bearer k", **agent.headers}
    answer = httpx.post(host.url + agent.path, json=body, headers=headers, timeout=SECONDS)
    assert answer.status_code == 200, answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def said(found: list[dict[str, Any]]) -> str:
    """The text of a stream, in any of the three APIs."""
    text = [e["delta"]["text"] for e in found if e.get("type") == "content_block_delta"]
    text += [e["delta"] for e in found if e.get("type") == "response.output_text.delta"]
    text += [c["delta"].get("content") or "" for e in found for c in e.get("choices", ())]
    return "".join(text)


def called(found: list[dict[str, Any]]) -> tuple[str, str, Any, str | None]:
    """Id, name, arguments and namespace of the call in a stream."""
    for event in found:
        kind = event.get("type")
        if kind == "response.output_item.done" and event["item"]["type"] == "function_call":
            item = event["item"]
            return item["call_id"], item["name"], json.loads(item["arguments"]), item.get("namespace")
        if kind == "content_block_start" and event["content_block"]["type"] == "tool_use":
            block = event["content_block"]
            pieces = [e["delta"]["partial_json"] for e in found if e.get("delta", {}).get("type") == "input_json_delta"]
            return block["id"], block["name"], json.loads("".join(pieces)), None
    deltas = [d for e in found for c in e.get("choices", ()) for d in c["delta"].get("tool_calls", ())]
    arguments = "".join(d["function"]["arguments"] for d in deltas)
    return deltas[0]["id"], deltas[0]["function"]["name"], json.loads(arguments), None


@pytest.mark.parametrize("name", AGENTS)
def test_a_question_a_call_and_an_answer(served: tuple[ScriptedLLM, Hosted], name: str) -> None:
    llm, host = served
    agent = AGENTS[name]
    llm.script = WRITERS["qwen"]([(agent.tool, ARGUMENTS)])
    call_id, function, arguments, space = called(events(agent, host, agent.begin))
    assert (function, arguments) == ("Bash", ARGUMENTS)
    assert space == ("mcp__files" if "mcp" in name else None)
    llm.script = ANSWER
    turns = [*agent.begin[agent.key], *agent.go_on(call_id, function)]
    assert said(events(agent, host, {**agent.begin, agent.key: turns})) == ANSWER


def test_what_agents_ask_besides(served: tuple[ScriptedLLM, Hosted]) -> None:
    """Whether the key is good, how long a prompt is, a title, what models there are, a completion at the cursor."""
    llm, host = served
    claude = AGENTS["claude-code"]
    llm.script = '{"title": "Files"}'
    with httpx.Client(base_url=host.url, timeout=SECONDS, headers=dict(claude.headers)) as client:
        least = {"model": MODEL, "messages": [{"role": "user", "content": "quota"}], "metadata": {"user_id": "u"}}
        answer = client.post("/v1/messages?beta=true", json={**least, "max_tokens": 1})
        assert answer.status_code == 200 and answer.json()["usage"]["output_tokens"] == 1
        counted = {k: CLAUDE_CODE[k] for k in ("model", "system", "messages", "tools", "thinking")}
        answer = client.post("/v1/messages/count_tokens?beta=true", json=counted)
        assert answer.status_code == 200 and answer.json()["input_tokens"] > 100
        schema = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}
        form = {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}
        title = {**least, "max_tokens": 500, "tools": [], "temperature": 1, "output_config": {"format": form}}
        answer = client.post("/v1/messages?beta=true", json=title)
        assert json.loads(answer.json()["content"][0]["text"]) == {"title": "Files"}
        assert [model["id"] for model in client.get("/v1/models?limit=1000").json()["data"]] == [MODEL]
        fill = {"model": MODEL, "prompt": "<fim_prefix>a<fim_suffix>b<fim_middle>", "max_tokens": 9, "stop": ["\n\n"]}
        answer = client.post("/v1/completions", json={**fill, "temperature": 0.01, "stream": True})
        assert answer.text.endswith("data: [DONE]\n\n")
