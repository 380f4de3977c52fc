"""Messages of a conversation as callers send them, brought to the form that chat templates read.

What a template reads is seen from its syntax tree, as vLLM does it (vllm/entrypoints/chat_utils.py,
`_detect_content_format`): one that loops over a message's content wants parts, all others want text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from infinilm.errors import RequestError

if TYPE_CHECKING:
    import jinja2

__all__ = ["TemplateTraits", "check_messages", "check_tools"]

_TEXT_PARTS = ("text", "input_text", "output_text")


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What a chat template can read.

    Attributes
    ----------
    reads_parts : bool
        Content as a list of parts; otherwise their texts are joined by line ends.
    reads_none : bool
        Content that is None, beside tool calls; otherwise it becomes the empty text.
    knows_developer : bool
        The role `developer`; otherwise it becomes `system`, whose newer name it is.
    """

    reads_parts: bool = False
    reads_none: bool = False
    knows_developer: bool = False

    @classmethod
    def of(cls, source: str, environment: jinja2.Environment) -> TemplateTraits:
        """Read them off the text of a template, which must be valid."""
        import jinja2.nodes as nodes

        tree = environment.parse(source)
        holders = _names_of_content(tree)
        loops = any(_is_content(loop.iter, holders) for loop in tree.find_all(nodes.For))
        # content[0]['text']
        indexes = any(
            isinstance(item.arg, nodes.Const) and isinstance(item.arg.value, int) and _is_content(item.node, holders)
            for item in tree.find_all(nodes.Getitem)
        )
        tests_none = any(test.name == "none" and _is_content(test.node, holders) for test in tree.find_all(nodes.Test))
        return cls(loops or indexes, tests_none, "developer" in source)


def _is_content(node: Any, holders: set[str]) -> bool:
    """Whether an expression is the content of a message: `message.content`, a name that holds it, or a choice of it."""
    import jinja2.nodes as nodes

    if isinstance(node, nodes.Name):
        return node.name in holders
    if isinstance(node, nodes.Getattr):
        return bool(node.attr == "content")
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    if isinstance(node, nodes.Filter):
        return node.node is not None and _is_content(node.node, holders)
    if isinstance(node, nodes.CondExpr):
        return _is_content(node.expr1, holders) or (node.expr2 is not None and _is_content(node.expr2, holders))
    return False


def _names_of_content(tree: jinja2.nodes.Template) -> set[str]:
    """Variables and parameters of macros that hold the content of a message somewhere in the template."""
    import jinja2.nodes as nodes

    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    holders: set[str] = set()
    while True:
        found = set(holders)
        for assign in tree.find_all(nodes.Assign):
            if isinstance(assign.target, nodes.Name) and _is_content(assign.node, holders):
                found.add(assign.target.name)
        for call in tree.find_all(nodes.Call):
            macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
            if macro is not None:
                found |= {p.name for p, a in zip(macro.args, call.args, strict=False) if _is_content(a, holders)}
                found |= {k.key for k in call.kwargs if _is_content(k.value, holders)}
        if found == holders:
            return holders
        holders = found


def check_messages(messages: object, traits: TemplateTraits | None = None) -> list[dict[str, Any]]:
    """Check a conversation and return it as a template with these traits reads it.

    Parameters
    ----------
    messages : sequence of mappings
        Each with `role` (str) and `content`: a str, a list of parts such as ``{"type": "text", "text": "Hello"}``, or
        None beside `tool_calls`, whose arguments may be objects or JSON text of objects.
    traits : TemplateTraits, optional
        None: of a template that reads plain texts.

    Raises
    ------
    RequestError
        Says which message is wrong and how.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError(
            "messages must be a list of {'role': ..., 'content': ...} dicts, got "
            f"{type(messages).__name__}; for plain text use generate()"
        )
    if not messages:
        raise RequestError("messages must hold at least one message, got an empty list")
    traits = TemplateTraits() if traits is None else traits
    return [_checked_message(f"messages[{i}]", message, traits) for i, message in enumerate(messages)]


def _checked_message(where: str, message: object, traits: TemplateTraits) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be a dict with 'role' and 'content', got {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where} must have a 'role' such as 'user', got {role!r}; its keys are {list(message)}")
    result = dict(message)
    if role == "developer" and not traits.knows_developer:
        result["role"] = "system"
    calls = message.get("tool_calls")
    if calls:
        result["tool_calls"] = _checked_calls(f"{where}['tool_calls']", calls)
    content = message.get("content")
    if isinstance(content, str):
        return result
    if content is None and calls:
        if not traits.reads_none:
            result["content"] = ""
        return result
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        got = "no 'content'" if "content" not in message else f"'content' of type {type(content).__name__}"
        raise RequestError(f"{where} (role {role!r}) must have a 'content' that is a str or a list of parts, got {got}")
    texts = [_part_text(f"{where}['content'][{i}]", part) for i, part in enumerate(content)]
    if traits.reads_parts:
        result["content"] = [{"type": "text", "text": text} for text in texts]
    else:
        result["content"] = "\n".join(texts)
    return result


def _part_text(where: str, part: Mapping[str, Any]) -> str:
    """The text of a part of a message."""
    kind = part.get("type")
    if not isinstance(kind, str):
        raise RequestError(f"{where} must be like {{'type': 'text', 'text': 'Hello'}}, got {part!r:.80}")
    if kind not in (*_TEXT_PARTS, "refusal"):
        raise RequestError(f"{where} has the type {kind!r}: models read text only here, parts of type 'text'")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise RequestError(f"{where} (type {kind!r}) must have a 'text' that is a str, got {text!r:.80}")
    return text


def _checked_calls(where: str, calls: object) -> list[Any]:
    """Tool calls with their arguments as objects: templates write them as JSON themselves."""
    if isinstance(calls, (str, bytes, Mapping)) or not isinstance(calls, Sequence):
        raise RequestError(f"{where} must be a list of calls, got {type(calls).__name__}")
    result = []
    for i, call in enumerate(calls):
        if not isinstance(call, Mapping):
            raise RequestError(f"{where}[{i}] must be a dict with a 'function', got {type(call).__name__}")
        function = call.get("function")
        if isinstance(function, Mapping):
            result.append({**call, "function": _with_arguments(f"{where}[{i}]['function']", function)})
        else:
            result.append(_with_arguments(f"{where}[{i}]", call))
    return result


def _with_arguments(where: str, function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return dict(function)
    try:
        value = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where}['arguments'] must be an object, or JSON text of one: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(f"{where}['arguments'] must be an object, or JSON text of one, got {arguments!r:.80}")
    return {**function, "arguments": value}


def check_tools(tools: object) -> list[Mapping[str, Any]] | None:
    """Check the schemas of tools; None where there are none. RequestError: says which is wrong."""
    if tools is None:
        return None
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise RequestError(f"tools must be a list of JSON schema dicts, got {type(tools).__name__}")
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise RequestError(f"tools[{i}] must be a JSON schema dict, got {type(tool).__name__}")
    return list(tools) or None
