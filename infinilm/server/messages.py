"""/v1/messages and /v1/messages/count_tokens: a chat in the words of Anthropic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from infinilm.outputs import RequestOutput
from infinilm.server.answers import CALL_PREFIX, finish_reason, new_id, usage
from infinilm.server.blocks import BlockBuilder, Event
from infinilm.server.bodies import (
    ApiError,
    Body,
    UnknownFields,
    anything,
    boolean,
    integer,
    list_of,
    mapping,
    one_of,
    text,
)
from infinilm.server.chat import ChatCall, read_chat
from infinilm.server.service import Service
from infinilm.text.messages import arguments_object

__all__ = ["MessageBuilder", "read_message"]


_NAMES = {
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "stop": "stop_sequences",
    r"(tools\[\d+])\.function\.parameters": r"\1.input_schema",
    r"(tools\[\d+])\.function": r"\1",
}

_MEDIA_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")

# No effect here: they are about caches, accounts and machines of a hosted service.
_HARMLESS = (
    "betas",
    "cache_control",
    "context_management",
    "diagnostics",
    "fallbacks",
    "inference_geo",
    "speed",
    "user_profile_id",
    "workspace_id",
)


def read_message(
    service: Service, values: Mapping[str, Any], unknown: UnknownFields | None = None, *, counts_only: bool = False
) -> tuple[ChatCall, MessageBuilder]:
    """Check a body; runs outside the event loop. Raises ApiError that names the field."""
    body = Body(values, unknown=unknown)
    messages = body.need("messages", list_of(mapping))
    system = _plain(body.take("system", anything))
    limit = (body.take if counts_only else body.need)("max_tokens", integer(1))
    tools = [_tool(i, tool) for i, tool in enumerate(body.take("tools", list_of(mapping)) or [])]
    choice = body.take("tool_choice", mapping) or {}
    config = body.inner("output_config")
    effort, form = config.take("effort", anything), config.take("format", anything)
    config.skip("task_budget")
    config.finish()
    body.skip(*_HARMLESS)
    body.refuse("mcp_servers", "tools are called by the client", [])
    body.refuse("container", "tools are called by the client")
    for name in ("n", "logprobs", "top_logprobs", "max_completion_tokens", "parallel_tool_calls", "stream_options"):
        body.refuse(name, "it is a field of /v1/chat/completions")
    for name in ("stop", "response_format", "reasoning_effort"):
        body.refuse(name, f"it is a field of /v1/chat/completions; here it is {_NAMES[name]}")
    for name in ("return_token_ids", "timings_per_token", "return_receipt"):
        body.refuse(name, "ask /v1/chat/completions for them", False)
    chosen = None if not choice else one_of("auto", "any", "tool", "none")("tool_choice.type", choice.get("type"))
    function = text("tool_choice.name", choice.get("name")) if chosen == "tool" else None
    named = {"type": "function", "function": {"name": function}}
    chat: dict[str, Any] = {
        "messages": ([{"role": "system", "content": system}] if system else [])
        + [m for i, message in enumerate(messages) for m in _messages(f"messages[{i}]", message)],
        "max_tokens": limit,
        "stop": body.take("stop_sequences", anything),
        "tools": tools or None,
        "tool_choice": {None: None, "any": "required", "tool": named}.get(chosen, chosen),
        "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") else None,
        "reasoning_effort": effort,
        "response_format": form,
    }
    last = chat["messages"][-1] if chat["messages"] else {}
    if last.get("role") == "assistant" and last["content"] and not last.get("tool_calls"):
        chat["continue_final_message"] = True  # as Anthropic's API goes on with it
    chat |= body.rest()
    call = read_chat(service, chat, unknown, _NAMES)
    return call, MessageBuilder(call.model)


def _plain(value: object) -> Any:
    """The system prompt: a text, or blocks of text."""
    if value is None or isinstance(value, str):
        return value
    return [{"type": "text", "text": text("system", block.get("text"))} for block in list_of(mapping)("system", value)]


def _tool(index: int, tool: Mapping[str, Any]) -> Mapping[str, Any]:
    if tool.get("type", "custom") != "custom":
        return {"type": tool["type"]}  # of the other server; passed over
    function = {
        "name": text(f"tools[{index}].name", tool.get("name")),
        "description": tool.get("description") or "",
        "parameters": mapping(f"tools[{index}].input_schema", tool.get("input_schema")),
    }
    return {"type": "function", "function": function | ({"strict": True} if tool.get("strict") is True else {})}


def _messages(where: str, message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Messages of a chat from one of these: results of tools are messages of their own there."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(content, list):
        yield {"role": role, "content": content}
        return
    parts: list[Any] = []
    calls: list[Any] = []
    thought = ""
    for i, block in enumerate(content):
        kind = mapping(f"{where}.content[{i}]", block).get("type")
        if kind == "tool_result":
            result = _result(f"{where}.content[{i}]", block)
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result}
        elif kind == "tool_use":
            if not isinstance(block.get("input"), dict):
                raise ApiError(f"{where}.content[{i}].input: expected an object", param="messages")
            function = {"name": block.get("name"), "arguments": block["input"]}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking":
            thought += str(block.get("thinking") or "")
        elif kind != "redacted_thinking":
            parts.append(_part(f"{where}.content[{i}]", block))
    if parts or calls or not content:
        yield {
            "role": role,
            "content": parts or None if calls else parts,
            **({"tool_calls": calls} if calls else {}),
            **({"reasoning_content": thought} if thought else {}),
        }


def _part(where: str, block: Mapping[str, Any]) -> Mapping[str, Any]:
    """A part of a message of a chat from a block that is a text or a picture."""
    kind = block.get("type")
    if kind == "text":
        return {"type": "text", "text": block.get("text")}
    if kind != "image":
        raise ApiError(f"{where}: blocks of type {kind!r} are not supported", param="messages")
    if block.get("transformations"):
        raise ApiError(f"{where}.transformations: pictures are read as they are; leave it out", param="messages")
    source = mapping(f"{where}.source", block.get("source"))
    if source.get("type") == "file":
        raise ApiError(f"{where}.source: no files are kept here; send the picture as base64", param="messages")
    if one_of("base64", "url")(f"{where}.source.type", source.get("type")) == "url":
        url = text(f"{where}.source.url", source.get("url"))
    else:
        media_type = one_of(*_MEDIA_TYPES)(f"{where}.source.media_type", source.get("media_type"))
        url = f"data:{media_type};base64,{text(f'{where}.source.data', source.get('data'))}"
    return {"type": "image_url", "image_url": {"url": url}}


def _result(where: str, block: Mapping[str, Any]) -> Any:
    """What a tool gave. Templates have no field for a failure, so the text says it, as tools do elsewhere."""
    content = block.get("content")
    content = "" if content is None else content
    if not isinstance(content, str):
        blocks = list_of(mapping)(f"{where}.content", content)
        content = [_part(f"{where}.content[{i}]", inner) for i, inner in enumerate(blocks)]
    is_error = block.get("is_error")
    if is_error is None or not boolean(f"{where}.is_error", is_error):
        return content
    if isinstance(content, str):
        return f"Error: {content}"
    return [{"type": "text", "text": "Error:"}, *content]


_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}


class MessageBuilder(BlockBuilder):
    """Makes a message and its events.

    Parameters
    ----------
    model : str
        The name under which it was asked.
    """

    def __init__(self, model: str) -> None:
        super().__init__()
        self._model, self._id = model, new_id("msg_")
        self._arguments = ""  # of the call that is open, JSON text

    def _usage(self, output: RequestOutput) -> dict[str, Any]:
        counted = usage([output])
        cached = counted["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counted["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": counted["completion_tokens"],
        }

    def _ending(self, output: RequestOutput) -> dict[str, Any]:
        choice = output.outputs[0]
        num_calls = sum(block["type"] == "tool_use" for block in self.blocks)
        reason = finish_reason(choice.finish_reason, num_calls)
        stop = choice.stop_reason if isinstance(choice.stop_reason, str) else None
        if stop is not None and not num_calls:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": None if reason is None else _STOP_REASONS.get(reason), "stop_sequence": None}

    def answer(self, output: RequestOutput) -> dict[str, Any]:
        """The message."""
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": list(self.blocks),
            **self._ending(output),
            "usage": self._usage(output),
        }

    def begin(self, output: RequestOutput) -> Iterator[Event]:
        """The empty message."""
        started = {**self.answer(output), "stop_reason": None, "stop_sequence": None}
        yield {"type": "message_start", "message": started}

    def end(self, output: RequestOutput) -> Iterator[Event]:
        """Why it ended."""
        yield {"type": "message_delta", "delta": self._ending(output), "usage": self._usage(output)}
        yield {"type": "message_stop"}

    def _open(self, kind: str, call: Mapping[str, Any]) -> Iterator[Event]:
        block: dict[str, Any] = {"type": "text", "text": ""}
        if kind == "call":
            call_id = call["id"]
            if call_id.startswith(CALL_PREFIX):  # those of some families have a form of their own
                call_id = "toolu_" + call_id.removeprefix(CALL_PREFIX)
            block = {"type": "tool_use", "id": call_id, "name": call["function"]["name"], "input": {}}
            self._arguments = ""
        elif kind == "reasoning":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        self.blocks.append(block)
        yield {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)}

    def _add(self, kind: str, text: str) -> Iterator[Event]:
        block = self.blocks[-1]
        if kind == "call":
            self._arguments += text
            delta = {"type": "input_json_delta", "partial_json": text}
        else:
            block[block["type"]] += text
            delta = {"type": f"{block['type']}_delta", block["type"]: text}
        yield {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}

    def _close(self, kind: str, is_cut: bool) -> Iterator[Event]:
        if kind == "call":
            self.blocks[-1]["input"] = arguments_object(self._arguments)
        yield {"type": "content_block_stop", "index": len(self.blocks) - 1}
