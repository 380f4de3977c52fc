"""Messages of a conversation as callers send them, brought to the form that chat templates read.

What a template reads is seen from its syntax tree, as vLLM does it (vllm/entrypoints/chat_utils.py,
`_detect_content_format`): one that loops over a message's content wants parts, all others want text.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from infinilm.errors import RequestError

if TYPE_CHECKING:
    import jinja2

__all__ = [
    "Address",
    "TemplateTraits",
    "arguments_object",
    "check_messages",
    "check_tools",
    "filled_tools",
    "take_pictures",
]

_PICTURE_PARTS = ("image_url", "input_image", "image")
_PICTURE = {"type": "image"}  # what a template reads where a picture is
_DETAILS = ("auto", "low", "high", "original")  # OpenAI's
_TEXT_PARTS = ("text", "input_text", "output_text")

# Around arguments that are no JSON object, for templates and APIs that read objects alone. The name is the one that
# Anthropic's documentation gives to clients for the same purpose (fine-grained tool streaming).
_INVALID = "INVALID_JSON"

_LENGTHS = frozenset({"length", "count"})  # filters
_MEASURES = _LENGTHS | {"tojson", "items", "dictsort"}  # filters that give something else


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What a chat template can read.

    Attributes
    ----------
    reads_parts : bool
        Content as a list of parts; otherwise their texts are joined by line ends.
    reads_tool_parts : bool
        The same in messages of tools, whose content some such templates print as it is.
    reads_none : bool
        Content that is None, beside tool calls; otherwise it becomes the empty text.
    knows_developer : bool
        The role `developer`; otherwise it becomes `system`, whose newer name it is.
    reads_text_arguments : bool
        Arguments of calls as texts, beside objects.
    needs_text_arguments : bool
        Arguments of calls as texts alone, as templates do that join them with other texts.
    ids : str
        What ids of calls look like, see `ToolCallFormat.ids`.
    reads_thinking : bool
        The reasoning of a message as `thinking`, and by no other name, as gpt-oss's does.
    joins_thinking : bool
        It refuses both content and `thinking` beside calls.
    reads_one_call : bool
        The first call of a message alone, as the templates of Llama 3 and gpt-oss do: it refuses more, or leaves them
        out.
    variables : frozenset of str
        Names that it reads of what is given to it.
    """

    reads_parts: bool = False
    reads_tool_parts: bool = True
    reads_none: bool = False
    knows_developer: bool = False
    reads_text_arguments: bool = False
    needs_text_arguments: bool = False
    ids: str = ""
    reads_thinking: bool = False
    joins_thinking: bool = False
    reads_one_call: bool = False
    variables: frozenset[str] = frozenset()

    @classmethod
    def of(cls, source: str, tree: jinja2.nodes.Template) -> TemplateTraits:
        """Read them off the text of a template and its syntax tree."""
        import jinja2.meta
        import jinja2.nodes as nodes

        content, arguments, calls = _Field("content", tree), _Field("arguments", tree), _Field("tool_calls", tree)
        listed = [loop.iter for loop in tree.find_all(nodes.For)]
        lists_calls = any(map(calls.is_read_by, listed))
        # What may be the calls of a message as well, as in templates that read them of either, is no list of parts.
        loops = any(content.is_read_by(node) and not calls.is_read_by(node) for node in listed)
        indexed = [
            item.node
            for item in tree.find_all(nodes.Getitem)
            if isinstance(item.arg, nodes.Const) and isinstance(item.arg.value, int)
        ]
        indexes = any(map(content.is_read_by, indexed))  # content[0]['text']
        tests = [*tree.find_all(nodes.Test)]
        joined = [operand for add in tree.find_all(nodes.Add) for operand in (add.left, add.right)]
        joined += [operand for concat in tree.find_all(nodes.Concat) for operand in concat.nodes]
        joined = [operand for operand in joined if arguments.is_read_by(operand)]
        as_json = [item.node for item in tree.find_all(nodes.Filter) if item.name == "tojson"]
        as_json = [node for node in as_json if arguments.is_read_by(node)]
        tested = any(test.name in ("string", "mapping") and arguments.is_read_by(test.node) for test in tests)
        printed = [node for output in tree.find_all(nodes.Output) for node in output.nodes]
        if any(_is_of_function(node) for node in as_json):  # what is joined beside it is of another form of calls
            joined = [operand for operand in joined if _is_of_function(operand)]
        needs_text = bool(joined) or (not tested and not as_json and any(map(arguments.is_read_by, printed)))
        # None has no length. Who measures the content treats the empty text as none.
        measured = any(item.name in _LENGTHS and content.is_read_by(item.node) for item in tree.find_all(nodes.Filter))
        return cls(
            reads_parts=loops or indexes,
            reads_none=not measured and any(test.name == "none" and content.is_read_by(test.node) for test in tests),
            knows_developer="developer" in source,
            reads_text_arguments=needs_text or tested,
            needs_text_arguments=needs_text,
            # Mistral's and Kimi's
            ids="short" if "[TOOL_CALLS]" in source else "counted" if "<|tool_calls_section_begin|>" in source else "",
            reads_thinking=_reads_of_messages("thinking", tree)
            and not any(_reads_of_messages(name, tree) for name in ("reasoning", "reasoning_content")),
            joins_thinking="both content and thinking" in source,
            reads_one_call=not lists_calls and any(map(calls.is_read_by, indexed)),
            variables=frozenset(jinja2.meta.find_undeclared_variables(tree)),
        )


def _is_of_function(node: Any) -> bool:
    """Whether the arguments that an expression reads are of `function`, as in OpenAI's form, or may be."""
    import jinja2.nodes as nodes

    holder = getattr(node, "node", None)
    if isinstance(node, nodes.Filter):
        return _is_of_function(holder)
    if isinstance(node, nodes.Getattr) or (isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const)):
        if isinstance(holder, nodes.Name):
            return holder.name == "function"
        if isinstance(holder, nodes.Getattr):
            return bool(holder.attr == "function")
        if isinstance(holder, nodes.Getitem):
            return isinstance(holder.arg, nodes.Const) and holder.arg.value == "function"
    return True


def _reads_of_messages(name: str, tree: jinja2.nodes.Template) -> bool:
    """Whether a template reads a field of messages, which are what it reads a role of."""
    import jinja2.nodes as nodes

    def holders(field: str) -> set[str]:
        reads = [(item.node, item.attr) for item in tree.find_all(nodes.Getattr)]
        reads += [
            (item.node, item.arg.value) for item in tree.find_all(nodes.Getitem) if isinstance(item.arg, nodes.Const)
        ]
        return {holder.name for holder, read in reads if read == field and isinstance(holder, nodes.Name)}

    return not holders(name).isdisjoint(holders("role"))


class _Field:
    """A field of messages or calls, such as "content", in the syntax tree of a template."""

    def __init__(self, name: str, tree: jinja2.nodes.Template) -> None:
        self._name = name
        self._holders: set[str] = set()  # variables and parameters of macros that hold it somewhere
        while (found := self._holders | self._find_holders(tree)) != self._holders:
            self._holders = found

    def is_read_by(self, node: Any) -> bool:
        """Whether an expression is the field: `message.content`, a name that holds it, or a choice of it."""
        import jinja2.nodes as nodes

        if isinstance(node, nodes.Name):
            return node.name in self._holders
        if isinstance(node, nodes.Getattr):
            return bool(node.attr == self._name)
        if isinstance(node, nodes.Getitem):
            return isinstance(node.arg, nodes.Const) and node.arg.value == self._name
        if isinstance(node, nodes.Filter):
            return node.node is not None and node.name not in _MEASURES and self.is_read_by(node.node)
        if isinstance(node, nodes.CondExpr):
            return self.is_read_by(node.expr1) or (node.expr2 is not None and self.is_read_by(node.expr2))
        return False

    def _find_holders(self, tree: jinja2.nodes.Template) -> set[str]:
        import jinja2.nodes as nodes

        macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
        found: set[str] = set()
        for assign in tree.find_all(nodes.Assign):
            if isinstance(assign.target, nodes.Name) and self.is_read_by(assign.node):
                found.add(assign.target.name)
        for call in tree.find_all(nodes.Call):
            macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
            if macro is not None:
                found |= {p.name for p, a in zip(macro.args, call.args, strict=False) if self.is_read_by(a)}
                found |= {k.key for k in call.kwargs if self.is_read_by(k.value)}
        return found


def check_messages(messages: object, traits: TemplateTraits | None = None) -> list[dict[str, Any]]:
    """Check a conversation and return it as a template with these traits reads it.

    Parameters
    ----------
    messages : sequence of mappings
        Each with `role` (str) and `content`: a str, a list of parts such as ``{"type": "text", "text": "Hello"}``, or
        None beside `tool_calls`, whose arguments may be objects or JSON text of objects. A text that is no such JSON is
        what a model wrote wrongly, and a conversation must go on behind it: it is shown as it is.
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
    ids = _CallIds(traits.ids)
    checked = [_checked_message(f"messages[{i}]", message, traits, ids) for i, message in enumerate(messages)]
    return _one_call_each(checked) if traits.reads_one_call else checked


@dataclass(frozen=True, slots=True)
class Address:
    """Where a picture is, as a message says it: no path of a file, since messages may be of strangers.

    `is_small`: a small picture is enough, which OpenAI's API calls low detail.
    """

    url: str
    is_small: bool = False


def take_pictures(messages: Any, placeholder: str = "") -> tuple[Any, list[Any]]:
    """Take the pictures out of a conversation, whatever else it is.

    Parameters
    ----------
    messages : sequence of mappings
    placeholder : str
        What stands for a picture in texts, for templates that read no parts.

    Returns
    -------
    tuple
        The conversation with ``{"type": "image", "text": placeholder}`` in the place of each, and the pictures in their
        order: an `Address` of parts ``{"type": "image_url", "image_url": {"url": ...}}``, or of ``input_image``, and
        what parts ``{"type": "image", "image": ...}`` hold, which is no text.

    Raises
    ------
    RequestError
        A part of such a type holds no picture.
    """
    pictures: list[Any] = []

    def without(where: str, part: Any) -> Any:
        if not isinstance(part, Mapping) or part.get("type") not in _PICTURE_PARTS or dict(part) == _PICTURE:
            return part
        if part.get("file_id") is not None:
            raise RequestError(f"{where} has a file_id: no files are kept here; send the picture as 'image_url'")
        found: Any = part.get("image" if part["type"] == "image" else "image_url")
        detail = part.get("detail")
        if part["type"] != "image" and isinstance(found, Mapping):
            found, detail = found.get("url"), found.get("detail", detail)
        if detail is not None and detail not in _DETAILS:
            raise RequestError(f"{where} has the detail {detail!r:.80}; expected one of {', '.join(_DETAILS)}")
        if found is None or isinstance(found, str) == (part["type"] == "image"):
            expected = (
                "'image', a picture of Pillow, an array, bytes or a Path"
                if part["type"] == "image"
                else "'image_url', an address such as 'data:image/png;base64,...'"
            )
            raise RequestError(f"{where} (type {part['type']!r}) must have {expected}")
        pictures.append(Address(found, detail == "low") if isinstance(found, str) else found)
        return {**_PICTURE, "text": placeholder}

    def of_message(i: int, message: Any) -> Any:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list):
            return message
        parts = [without(f"messages[{i}]['content'][{j}]", part) for j, part in enumerate(content)]
        return {**message, "content": parts} if pictures else message

    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        return messages, []
    return [of_message(i, message) for i, message in enumerate(messages)], pictures


def _one_call_each(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation with a message for each call, and the results of a call behind it."""
    made: list[dict[str, Any]] = []
    rest = list(messages)
    while rest:
        message = rest.pop(0)
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            made.append(message)
            continue
        results = list(itertools.takewhile(lambda other: other["role"] == "tool", rest))
        del rest[: len(results)]
        for i, call in enumerate(calls):
            if i == 0:
                made.append({**message, "tool_calls": [call]})
            else:  # what was said and thought stands before the first
                made.append({"role": message["role"], "content": "", "tool_calls": [call]})
            answers = [other for other in results if other.get("tool_call_id") == call.get("id")]
            made += answers
            results = [other for other in results if not any(other is answer for answer in answers)]
        made += results
    return made


def _checked_message(where: str, message: object, traits: TemplateTraits, ids: _CallIds) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be a dict with 'role' and 'content', got {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where} must have a 'role' such as 'user', got {role!r}; its keys are {list(message)}")
    result = dict(message)
    if role == "assistant" and traits.reads_thinking:
        _move_reasoning(result, traits)
    content = result.get("content")
    if role == "developer" and not traits.knows_developer:
        result["role"] = "system"
    calls = message.get("tool_calls")
    if calls:
        result["tool_calls"] = _checked_calls(f"{where}['tool_calls']", calls, traits, ids)
    if isinstance(answered := message.get("tool_call_id"), str):
        result["tool_call_id"] = ids.of_result(answered)
    if isinstance(content, str):
        return result
    if content is None and calls:
        if not traits.reads_none:
            result["content"] = ""
        return result
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        got = "no 'content'" if "content" not in message else f"'content' of type {type(content).__name__}"
        raise RequestError(f"{where} (role {role!r}) must have a 'content' that is a str or a list of parts, got {got}")
    if traits.reads_parts and (role != "tool" or traits.reads_tool_parts):
        result["content"] = [
            _PICTURE if _is_picture(part) else {"type": "text", "text": _part_text(f"{where}['content'][{i}]", part)}
            for i, part in enumerate(content)
        ]
    else:
        result["content"] = "\n".join(_part_text(f"{where}['content'][{i}]", part) for i, part in enumerate(content))
    return result


def _move_reasoning(message: dict[str, Any], traits: TemplateTraits) -> None:
    """Give a message its reasoning by the name that its template reads."""
    thought = message.get("thinking") or message.get("reasoning_content") or message.get("reasoning")
    if not isinstance(thought, str) or not thought:
        return
    content = message.get("content")
    if traits.joins_thinking and message.get("tool_calls") and isinstance(content, str) and content:
        thought, message["content"] = f"{thought}\n\n{content}", ""
    message["thinking"] = thought


def _is_picture(part: Mapping[str, Any]) -> bool:
    """Whether a part stands for a picture that was taken out of the conversation."""
    return part.get("type") == "image" and part.keys() <= {"type", "text"}


def _part_text(where: str, part: Mapping[str, Any]) -> str:
    """The text of a part of a message."""
    kind = part.get("type")
    if _is_picture(part) and part.get("text"):
        return str(part["text"])
    if not isinstance(kind, str):
        raise RequestError(f"{where} must be like {{'type': 'text', 'text': 'Hello'}}, got {part!r:.80}")
    if kind not in (*_TEXT_PARTS, "refusal"):
        raise RequestError(f"{where} has the type {kind!r}: parts are of type 'text', or pictures where a model sees")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise RequestError(f"{where} (type {kind!r}) must have a 'text' that is a str, got {text!r:.80}")
    return text


def _checked_calls(where: str, calls: object, traits: TemplateTraits, ids: _CallIds) -> list[Any]:
    """Tool calls as a template reads them."""
    if isinstance(calls, (str, bytes, Mapping)) or not isinstance(calls, Sequence):
        raise RequestError(f"{where} must be a list of calls, got {type(calls).__name__}")
    result = []
    for i, call in enumerate(calls):
        if not isinstance(call, Mapping):
            raise RequestError(f"{where}[{i}] must be a dict with a 'function', got {type(call).__name__}")
        function = call.get("function")
        checked = dict(call)
        if isinstance(call.get("id"), str):
            checked["id"] = ids.of_call(call["id"], (function if isinstance(function, Mapping) else call).get("name"))
        if isinstance(function, Mapping):
            checked["function"] = {**function, "arguments": _read_arguments(function.get("arguments"), traits)}
        else:
            checked["arguments"] = _read_arguments(call.get("arguments"), traits)
        result.append(checked)
    return result


def _read_arguments(arguments: object, traits: TemplateTraits) -> object:
    """Arguments of a call: an object, which templates write as JSON themselves, or a text."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    if isinstance(arguments, Mapping) and arguments.keys() == {_INVALID}:
        arguments = arguments[_INVALID]
    if not isinstance(arguments, str):
        is_object = isinstance(arguments, Mapping)
        return json.dumps(arguments, ensure_ascii=False) if is_object and traits.needs_text_arguments else arguments
    if traits.needs_text_arguments:
        return arguments
    value = arguments_object(arguments)
    return arguments if traits.reads_text_arguments and value.keys() == {_INVALID} else value


def arguments_object(arguments: str) -> dict[str, Any]:
    """Arguments of a call as an object; those that are none stand in one, as they were written."""
    try:
        value = json.loads(arguments, parse_constant=_refuse)
        if value is None:  # as some clients say that there are none
            return {}
        if isinstance(value, dict):
            # Fails at half a character, which JSON can spell, and at a number that is too large to be one.
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
            return value
    except (ValueError, RecursionError):
        pass
    return {_INVALID: arguments}


def _refuse(word: str) -> None:
    raise ValueError(word)  # NaN and Infinity, which are no JSON


class _CallIds:
    """Ids of the calls of a conversation as its template takes them, the same for a call and for its result.

    Conversations that began with another model or server have ids of any form.
    """

    def __init__(self, form: str) -> None:
        self._form = form
        self._found: dict[str, str] = {}  # of calls so far; a later call may have the id of an earlier one
        self._num_calls = 0

    def of_call(self, call_id: str, name: object) -> str:
        """The id of the next call, of a function of this name."""
        is_good = self._form != "counted" or re.fullmatch(r"functions\..+:\d+", call_id) is not None
        self._found[call_id] = call_id if is_good else f"functions.{name}:{self._num_calls}"
        self._num_calls += 1
        return self.of_result(call_id)

    def of_result(self, call_id: str) -> str:
        """The id under which the result of a call is shown."""
        if self._form == "short" and not re.fullmatch("[a-zA-Z0-9]{9}", call_id):
            return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:9]
        return self._found.get(call_id, call_id)


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


def filled_tools(tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Tools with the fields that OpenAI's API may leave out, which some templates read in any case."""

    def filled(function: Mapping[str, Any]) -> Mapping[str, Any]:
        parameters = function.get("parameters") or {}
        return {
            **function,
            "description": function.get("description") or "",
            "parameters": {"type": "object", "properties": {}, **parameters},
        }

    return [
        {**tool, "function": filled(tool["function"])} if isinstance(tool.get("function"), Mapping) else tool
        for tool in tools
    ]
