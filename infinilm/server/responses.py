"""/v1/responses: OpenAI's newer form of a chat, without memory: the whole conversation comes with each request."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from infinilm.outputs import RequestOutput
from infinilm.server.answers import new_id
from infinilm.server.blocks import BlockBuilder, Event
from infinilm.server.bodies import ApiError, Body, UnknownFields, anything, integer, list_of, mapping, text
from infinilm.server.chat import ChatCall, read_chat
from infinilm.server.service import Service

__all__ = ["ResponseBuilder", "read_response"]


_NAMES = {
    "response_format": "text.format",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    r"(tools\[\d+])\.function": r"\1",
}

# Taken without effect: what they add is of items that are never made here.
_INCLUDED = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
)


def read_response(
    service: Service, values: Mapping[str, Any], unknown: UnknownFields | None = None
) -> tuple[ChatCall, ResponseBuilder]:
    """Check a body; runs outside the event loop. Raises ApiError that names the field."""
    body = Body(values, unknown=unknown)
    given = body.need("input", anything)
    instructions = body.take("instructions", text)
    why = "this server keeps no conversations; send the whole one as input"
    body.refuse("previous_response_id", why)
    body.refuse("conversation", why)
    body.refuse("prompt", "this server keeps no prompts")
    body.refuse("background", "answers are not kept to be asked for later", False)
    body.refuse("truncation", "a conversation is never cut", "disabled")
    body.refuse("top_logprobs", "ask /v1/chat/completions for log-probabilities", 0)
    body.refuse("max_tool_calls", "tools are called by the client")
    for name in ("messages", "n", "logprobs"):
        body.refuse(name, "it is a field of /v1/chat/completions")
    for name in ("max_tokens", "max_completion_tokens"):
        body.refuse(name, "it is a field of /v1/chat/completions; here it is max_output_tokens")
    for name in ("response_format", "reasoning_effort"):
        body.refuse(name, f"it is a field of /v1/chat/completions; here it is {_NAMES[name]}")
    for name in ("return_token_ids", "timings_per_token", "return_receipt"):
        body.refuse(name, "ask /v1/chat/completions for them", False)
    for item in body.take("include", list_of(text)) or []:
        if item == "message.output_text.logprobs":
            raise ApiError(f"include: {item} is not supported; ask /v1/chat/completions", param="include")
        if item not in _INCLUDED:
            raise ApiError(f"include: expected some of {', '.join(_INCLUDED)}; got {item!r:.80}", param="include")
    reasoning, style = body.inner("reasoning"), body.inner("text")
    effort, form = reasoning.take("effort", anything), style.take("format", anything)
    reasoning.skip("summary", "generate_summary", "context", "mode")  # the reasoning itself is told
    style.skip("verbosity")
    reasoning.finish()
    style.finish()
    tools, spaces = _tools(body.take("tools", list_of(mapping)) or [])
    chat: dict[str, Any] = {
        "messages": ([{"role": "system", "content": instructions}] if instructions else []) + _messages(given),
        "max_completion_tokens": body.take("max_output_tokens", integer(1)),
        "tools": tools or None,
        "reasoning_effort": effort,
        "response_format": form,
    }
    body.skip("client_metadata", "context_management")  # a conversation is never made shorter
    chat |= body.rest()
    call = read_chat(service, chat, unknown, _NAMES)
    if call.stream_options.continuous_usage_stats:
        name = "stream_options.continuous_usage_stats"
        raise ApiError(f"{name} is not supported: ask /v1/chat/completions", param=name)
    return call, ResponseBuilder({**values, "model": call.model}, instructions, spaces, call.usage)


def _tools(listed: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], dict[str, tuple[str, str]]]:
    """As chat has them, where names have no spaces; and by such a name the namespace and the name there."""
    tools: list[Mapping[str, Any]] = []
    spaces: dict[str, tuple[str, str]] = {}
    for i, tool in enumerate(listed):
        if tool.get("type") != "namespace":
            tools.append(_tool(f"tools[{i}]", tool))
            continue
        space = text(f"tools[{i}].name", tool.get("name"))
        for j, inner in enumerate(list_of(mapping)(f"tools[{i}].tools", tool.get("tools"))):
            if inner.get("type") == "function":
                name = text(f"tools[{i}].tools[{j}].name", inner.get("name"))
                spaces[_in_space(space, name)] = space, name
                tools.append(_tool(f"tools[{i}].tools[{j}]", {**inner, "name": _in_space(space, name)}))
    return tools, spaces


def _in_space(space: str, name: str) -> str:
    """The name of a function in a namespace, as the model sees it."""
    return f"{space}__{name}"


def _tool(where: str, tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """As chat has it; tools of other types are passed over there."""
    if tool.get("type") != "function" or "function" in tool:
        return tool
    name = text(f"{where}.name", tool.get("name"))
    if tool.get("parameters") is not None:
        mapping(f"{where}.parameters", tool["parameters"])
    return {
        "type": "function",
        "function": {k: v for k, v in tool.items() if k != "type"} | {"name": name},
    }


def _messages(given: object) -> list[dict[str, Any]]:
    """The messages of a chat from the items of an input."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    thought = ""
    for i, item in enumerate(list_of(mapping)("input", given)):
        kind = item.get("type", "message")
        if kind == "message":
            message = {"role": item.get("role"), "content": item.get("content")}
        elif kind == "function_call":
            name, space = item.get("name"), item.get("namespace")
            if space is not None:
                name = _in_space(text(f"input[{i}].namespace", space), text(f"input[{i}].name", name))
            function = {"name": name, "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if messages and messages[-1]["role"] == "assistant":
                messages[-1].setdefault("tool_calls", []).append(call)
                continue
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
            continue
        elif kind == "reasoning":
            parts = list_of(mapping)(f"input[{i}].content", item.get("content") or [])
            thought = "".join(text(f"input[{i}].content.text", part.get("text", "")) for part in parts)
            continue
        else:
            raise ApiError(f"input[{i}]: items of type {kind!r} are not supported", param="input")
        if thought and message["role"] == "assistant":
            message |= {"reasoning_content": thought}
        thought = ""
        messages.append(message)
    return messages


class ResponseBuilder(BlockBuilder):
    """Makes a response and its events.

    Parameters
    ----------
    values : mapping
        The body, some fields of which the answer repeats.
    instructions : str or None
    spaces : mapping of str to (str, str)
        Namespace and name of functions that are in one, by the name that the model knows.
    usage : callable
        Counts tokens, as chats tell them.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        instructions: str | None,
        spaces: Mapping[str, tuple[str, str]],
        usage: Callable[[RequestOutput], Mapping[str, Any]],
    ) -> None:
        super().__init__()
        self._usage = usage
        self._values, self._instructions, self._spaces = values, instructions, spaces
        self._id, self._created = new_id("resp_"), int(time.time())
        self._number = 0

    def _event(self, kind: str, **fields: Any) -> Event:
        self._number += 1
        return {"type": f"response.{kind}", "sequence_number": self._number - 1, **fields}

    def answer(self, output: RequestOutput) -> dict[str, Any]:
        """The response."""
        reason = output.outputs[0].finish_reason
        status = {None: "in_progress", "length": "incomplete"}.get(reason, "completed")
        said = self._values.get
        counted = self._usage(output)
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": self._instructions,
            "max_output_tokens": said("max_output_tokens"),
            "model": said("model"),
            "output": list(self.blocks),
            "parallel_tool_calls": said("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None, **(said("reasoning") or {})},
            "store": False,
            "temperature": said("temperature"),
            "text": {"format": {"type": "text"}, **(said("text") or {})},
            "tool_choice": said("tool_choice") or "auto",
            "tools": said("tools") or [],
            "top_p": said("top_p"),
            "truncation": "disabled",
            "metadata": said("metadata") or {},
            "usage": None
            if reason is None
            else {
                "input_tokens": counted["prompt_tokens"],
                "input_tokens_details": {**counted["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": counted["completion_tokens"],
                "output_tokens_details": counted["completion_tokens_details"],
                "total_tokens": counted["total_tokens"],
            },
        }

    def begin(self, output: RequestOutput) -> Iterator[Event]:
        """The empty response."""
        started = {**self.answer(output), "status": "in_progress", "usage": None, "incomplete_details": None}
        yield self._event("created", response=started)
        yield self._event("in_progress", response=started)

    def end(self, output: RequestOutput) -> Iterator[Event]:
        """The whole response."""
        answer = self.answer(output)
        yield self._event(answer["status"], response=answer)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.blocks[-1]["id"], "output_index": len(self.blocks) - 1}

    def _open(self, kind: str, call: Mapping[str, Any]) -> Iterator[Event]:
        item: dict[str, Any]
        if kind == "call":
            item = {"type": "function_call", "id": new_id("fc_"), "call_id": call["id"], "arguments": ""}
            name = call["function"]["name"]
            space, inner = self._spaces.get(name, (None, name))
            item |= {"name": inner} | ({} if space is None else {"namespace": space})
        elif kind == "content":
            item = {"type": "message", "id": new_id("msg_"), "role": "assistant", "content": []}
        else:
            item = {"type": "reasoning", "id": new_id("rs_"), "summary": [], "content": []}
        item["status"] = "in_progress"
        self.blocks.append(item)
        shown = item | ({"content": []} if kind != "call" else {})
        yield self._event("output_item.added", output_index=len(self.blocks) - 1, item=shown)
        if kind != "call":
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
            if kind == "content":
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item["content"].append(part)
            yield self._event("content_part.added", **self._place(), content_index=0, part=dict(part))

    def _add(self, kind: str, text: str) -> Iterator[Event]:
        item = self.blocks[-1]
        if kind == "call":
            item["arguments"] += text
            yield self._event("function_call_arguments.delta", **self._place(), delta=text)
            return
        part = item["content"][0]
        part["text"] += text
        more: dict[str, Any] = {"logprobs": []} if kind == "content" else {}
        yield self._event(f"{part['type']}.delta", **self._place(), content_index=0, delta=text, **more)

    def _close(self, kind: str, is_cut: bool) -> Iterator[Event]:
        item, place = self.blocks[-1], self._place()
        # The limit may come right behind the arguments of a call, which a client can then make.
        is_cut = is_cut and not (kind == "call" and _is_json(item["arguments"]))
        item["status"] = "incomplete" if is_cut else "completed"
        if kind == "call":
            yield self._event("function_call_arguments.done", **place, name=item["name"], arguments=item["arguments"])
        else:
            part = item["content"][0]
            more: dict[str, Any] = {"logprobs": []} if kind == "content" else {}
            yield self._event(f"{part['type']}.done", **place, content_index=0, text=part["text"], **more)
            yield self._event("content_part.done", **place, content_index=0, part=dict(part))
        yield self._event("output_item.done", output_index=place["output_index"], item=dict(item))


def _is_json(value: str) -> bool:
    try:
        json.loads(value)
    except ValueError:
        return False
    return True
