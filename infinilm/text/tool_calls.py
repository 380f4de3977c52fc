"""Tool calls in the text of a model, as it is generated: content and calls apart, for any cut of the text.

A model writes a call in the way its chat template taught it. `tool_call_format` tells which way that is; a
`ToolCallParser` takes the text in pieces and gives content, names and arguments as soon as they are certain.

Invariant: the deltas joined depend on the text alone, not on where it was cut. What looks like a call and is none is
content, so no text is lost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from infinilm.text.detokenize import overlap
from infinilm.text.tagged_calls import TaggedCall, Tags

__all__ = ["PLAIN_CALLS", "ToolCallDelta", "ToolCallFormat", "ToolCallParser", "takes_one_call", "tool_call_format"]

_SPACE = " \t\r\n"
_CALL_ID = "[CALL_ID]"  # between the name and an id, before the arguments


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """How a model writes calls: `begin`, then JSON objects with a name and arguments or tagged texts, then `end`.

    Attributes
    ----------
    name : str
    begin : str
        "" for calls without a mark: the text is calls from its first character on, or has none.
    end : str
        "" where the end of the JSON ends the call.
    separators : str
        Characters between the objects of one mark, brackets of a list among them.
    name_before : str
        Where the name stands in plain text before the arguments, what comes between them: `begin name [ARGS] {...}`.
    pattern : str
        How the model writes a call, which is read in more ways than this: $NAME is the name as JSON, $TOOL the name
        as it is, $ID nine letters and digits, and $ARGUMENTS the arguments.
    between : str
        What stands between two calls.
    around : tuple of str
        What stands before the first and behind the last.
    tags : Tags, optional
        For models that write calls between tags. JSON is read, too: calls that a grammar forces are such, since it can
        hold JSON to any schema.
    has_short_ids : bool
        The template takes ids of calls that are nine letters and digits, and refuses any other.
    """

    name: str
    begin: str
    end: str = ""
    separators: str = _SPACE
    name_before: str = ""
    pattern: str = '{"name": $NAME, "arguments": $ARGUMENTS}'
    between: str = "\n"
    around: tuple[str, str] = ("", "")
    tags: Tags | None = None
    has_short_ids: bool = False

    @property
    def has_special_mark(self) -> bool:
        """Whether the mark of a call is a special token, which texts leave out unless they are asked for it."""
        return self.begin.startswith("[")

    @property
    def marks(self) -> tuple[str, ...]:
        """What may begin a call: `begin`, or the tag behind it, as models of Qwen3-Coder's kind forget the former."""
        return tuple(mark for mark in (self.begin, self.tags.name[0] if self.tags is not None else "") if mark)

    def as_json(self) -> ToolCallFormat:
        """For answers whose calls a grammar writes: what stands between tags is no call then, but text."""
        return replace(self, tags=None)


# Sources: the chat templates of the models' repositories.
_HERMES = ToolCallFormat(  # Hermes 2 and 3, Qwen2.5, Qwen3
    "hermes",
    "<tool_call>",
    "</tool_call>",
    pattern='<tool_call>\n{"name": $NAME, "arguments": $ARGUMENTS}\n</tool_call>',
)
_QWEN3_CODER = replace(  # and Qwen3.5, Nemotron 3, Step 3.5
    _HERMES,
    name="qwen3 coder",
    tags=Tags(("<function=", ">"), ("<parameter=", ">"), ("", "</parameter>"), end="</function>", has_lines=True),
)
_SEED = replace(  # Seed-OSS
    _QWEN3_CODER,
    name="seed oss",
    begin="<seed:tool_call>",
    end="</seed:tool_call>",
    pattern='<seed:tool_call>\n{"name": $NAME, "arguments": $ARGUMENTS}\n</seed:tool_call>',
    tags=Tags(("<function=", ">"), ("<parameter=", ">"), ("", "</parameter>"), end="</function>"),
)
_GLM = replace(  # of 4.5 and later
    _HERMES,
    name="glm",
    tags=Tags(("", ""), ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>")),
)
_MISTRAL = ToolCallFormat(
    "mistral",
    "[TOOL_CALLS]",
    separators=_SPACE + "[],",
    name_before="[ARGS]",
    between=", ",
    around=("[TOOL_CALLS][", "]"),
    has_short_ids=True,
)
_MISTRAL_NAMES = replace(  # of 2025
    _MISTRAL, name="mistral names", pattern="[TOOL_CALLS]$TOOL[ARGS]$ARGUMENTS", between="", around=("", "")
)
_MISTRAL_IDS = replace(  # Mistral Small 3.2; the client gets an id of the server's, as with all other formats
    _MISTRAL_NAMES, name="mistral ids", pattern=f"[TOOL_CALLS]$TOOL{_CALL_ID}$ID[ARGS]$ARGUMENTS"
)
_LLAMA3 = ToolCallFormat(
    "llama3", "", separators=_SPACE + ";", pattern='{"name": $NAME, "parameters": $ARGUMENTS}', between="; "
)
PLAIN_CALLS = ToolCallFormat("json", "", separators=_SPACE + ";", between="; ")
"""For models that were taught no way, whose calls are forced."""

# The mark, Jinja's quotes and line ends, then the JSON or the expression that writes it.
_HERMES_CALL = re.compile(
    r"""<tool_call>(?:\\n|[\s"'{}~+-])*(?:\{\s*\\?["'](?:name|arguments)|[\w.\['"\]]+\s*\|\s*tojson)"""
)

_QWEN3_CODER_CALL = re.compile(r"<tool_call>(?:\\n|\s)*<function=")


def tool_call_format(template: str) -> ToolCallFormat | None:
    """The format that a chat template (its Jinja text) teaches; None: it has no calls, or others than are known.

    A mark alone does not tell the format: several families write `<tool_call>` around what is no JSON.
    """
    if _HERMES_CALL.search(template):
        return _HERMES
    if _QWEN3_CODER_CALL.search(template):
        return _QWEN3_CODER
    if _SEED.begin in template and "<function=" in template:
        return _SEED
    if "<tool_call>" in template and "<arg_key>" in template:
        return _GLM
    if "[TOOL_CALLS]" in template:
        if "[ARGS]" not in template:
            return _MISTRAL
        return _MISTRAL_IDS if _CALL_ID in template else _MISTRAL_NAMES
    if "<function=" in template:  # Functionary's, which have the tag of Llama 3 for code alone
        return None
    if '"parameters": dictionary of argument name and its value' in template or "<|python_tag|>" in template:
        return _LLAMA3
    return None


def takes_one_call(template: str) -> bool:
    """Whether a chat template refuses messages with more calls than one, as those of Llama 3 do."""
    return "only supports single tool-calls" in template


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of the answer: content, or a part of a call.

    Attributes
    ----------
    content : str
    index : int or None
        Which call, from 0; None: this is content.
    name : str or None
        With the first delta of a call.
    arguments : str
        JSON text; the pieces of a call, joined, are one JSON object.
    """

    content: str = ""
    index: int | None = None
    name: str | None = None
    arguments: str = ""


class ToolCallParser:
    """Text in, in pieces; content and calls out.

    Parameters
    ----------
    form : ToolCallFormat
    schemas : mapping of str to mapping
        JSON schemas of the parameters of the tools there are, by name; a call of any other is content.
    """

    def __init__(self, form: ToolCallFormat, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self._form = form
        self._schemas = schemas
        self._names = frozenset(schemas)
        self._text = ""  # not yet read
        self._call: _Call | TaggedCall | None = None  # being read
        self._has_begun = False  # `begin` was read, and what follows says how the call is written
        self._in_calls = False  # after `begin`
        self._at_start = True  # nothing but space has come
        self._after_call = False  # space here separates, and is no content
        self.num_calls = 0

    def push(self, text: str) -> list[ToolCallDelta]:
        """Take more text; return what is certain now."""
        self._text += text
        return list(self._merged(self._read(final=False)))

    def finish(self) -> list[ToolCallDelta]:
        """Return what was held back: no more text comes."""
        return list(self._merged(self._read(final=True)))

    def _merged(self, deltas: Iterator[ToolCallDelta]) -> Iterator[ToolCallDelta]:
        """Join pieces of content, and drop empty ones."""
        content = ""
        for delta in deltas:
            if delta.index is None:
                content += delta.content
                continue
            if content:
                yield ToolCallDelta(content)
                content = ""
            yield delta
        if content:
            yield ToolCallDelta(content)

    def _read(self, final: bool) -> Iterator[ToolCallDelta]:
        while True:
            before = len(self._text), self._in_calls, self._has_begun, self._call is not None
            if self._has_begun:
                self._begin_call(final)
            elif self._call is not None:
                yield from self._read_call(self._call, final)
            elif self._in_calls:
                yield from self._read_between(final)
            else:
                yield from self._read_content(final)
            if before == (len(self._text), self._in_calls, self._has_begun, self._call is not None):
                return

    def _read_content(self, final: bool) -> Iterator[ToolCallDelta]:
        form = self._form
        if self._after_call:
            self._text = self._text.lstrip(_SPACE)
            self._after_call = not self._text
        if not form.begin:
            stripped = self._text.lstrip(_SPACE)
            if self._at_start and stripped.startswith("{"):
                self._in_calls, self._at_start = True, False
                return
            if self._at_start and not stripped and not final:
                return  # only space so far
            self._at_start = False
        found = [(place, mark) for mark in form.marks if (place := self._text.find(mark)) >= 0]
        if found:
            place, mark = min(found)
            yield ToolCallDelta(self._text[:place])
            self._text, self._in_calls = self._text[place + len(mark) :], True
            if mark == form.begin:
                self._has_begun = True
            elif form.tags is not None:
                tags = replace(form.tags, name=("", form.tags.name[1]))  # the rest of a call whose mark is forgotten
                self._call = TaggedCall(tags, form.end, self._schemas, mark, self.num_calls)
            return
        keep = 0 if final else max((overlap(self._text, mark) for mark in form.marks), default=0)
        yield ToolCallDelta(self._text[: len(self._text) - keep])
        self._text = self._text[len(self._text) - keep :]

    def _begin_call(self, final: bool) -> None:
        form, text = self._form, self._text.lstrip(_SPACE)
        if not text and not final:
            return
        self._has_begun = False
        if form.tags is None or text.startswith("{"):
            self._call = _Call(form, self._names, form.begin, self.num_calls)
        else:
            self._call = TaggedCall(form.tags, form.end, self._schemas, form.begin, self.num_calls)

    def _read_between(self, final: bool) -> Iterator[ToolCallDelta]:
        """After a call: the end mark, another object, another mark, or content again."""
        begin, end = self._form.begin, self._form.end
        text = self._text.lstrip(_SPACE)
        if not final and any(mark.startswith(text) for mark in (begin, end) if mark):
            return  # may become the mark
        self._in_calls, self._after_call = False, True
        if end and text.startswith(end):
            self._text = text[len(end) :]
        elif final and end.startswith(text):  # an answer that was cut short within the mark
            self._text = ""
        elif not (begin and text.startswith(begin)) and not end:
            self._text = text.lstrip(self._form.separators)
            if self._text.startswith("{"):
                self._in_calls, self._call = True, _Call(self._form, self._names, "", self.num_calls)
            elif not self._text and not final:
                self._in_calls = True
        yield from ()

    def _read_call(self, call: _Call | TaggedCall, final: bool) -> Iterator[ToolCallDelta]:
        is_told = call.name is not None
        self._text = self._text[call.push(self._text, final) :]
        if call.name is not None:
            if not is_told:
                yield ToolCallDelta(index=call.index, name=call.name)
            if arguments := call.take_arguments():
                yield ToolCallDelta(index=call.index, arguments=arguments)
        if call.is_done:
            self._call = None
        elif call.is_broken or final:
            self._call, self._in_calls = None, False
            if call.name is None:
                yield ToolCallDelta(call.raw)
        if call.name is not None:
            self.num_calls = call.index + 1


class _Call:
    """One call being read: a JSON object with "name" and "arguments" (or "parameters"), character by character.

    Attributes
    ----------
    name : str or None
        Once it is known, and that of a tool; a call that has one is given out.
    raw : str
        All that was read: the content, if this is no call.
    """

    def __init__(self, form: ToolCallFormat, names: frozenset[str], mark: str, index: int) -> None:
        self._form = form
        self._names = names
        self.index = index
        self.raw = mark
        self.name: str | None = None
        self.is_done = self.is_broken = False
        self._arguments = ""  # not given out yet
        self._has_arguments = False
        self._plain_name = False  # it stood before the object, which is the arguments
        self._state = "start"  # then name, or next, key, colon, value, next ...
        self._key = ""
        self._value = ""  # JSON text of a key or value, so far
        self._depth = 0
        self._in_string = self._escaped = False

    def push(self, text: str, final: bool) -> int:
        """Read text up to the end of the call; returns how many characters were read."""
        for count, char in enumerate(text):
            if self.is_done or self.is_broken:
                return count
            self.raw += char
            self._step(char)
        return len(text)

    def take_arguments(self) -> str:
        """JSON text of the arguments that was not taken yet."""
        if self.is_done and not self._has_arguments:
            self._arguments, self._has_arguments = "{}", True
        taken, self._arguments = self._arguments, ""
        return taken

    def _step(self, char: str) -> None:
        if self._state == "value":
            self._read_value(char)
        elif self._state == "name":
            self._read_plain_name(char)
        elif self._state == "key":
            self._value += char
            if self._ends_string(char):
                self._key, self._state = str(self._load(self._value)), "colon"
        elif char in _SPACE or (self._state == "start" and char in self._form.separators):
            return
        elif self._state == "start" and char == "{":
            self._state = "next"
        elif self._state == "start" and self._form.name_before and (char.isalnum() or char == "_"):
            self._state, self._value = "name", char
        elif self._state == "next" and char == '"':
            self._state, self._value, self._in_string = "key", char, True
        elif self._state == "next" and char == ",":
            return
        elif self._state == "next" and char == "}":
            self.is_done, self.is_broken = self.name is not None, self.name is None
        elif self._state == "colon" and char == ":":
            self._begin_value(self._key)
        else:
            self.is_broken = True

    def _begin_value(self, key: str) -> None:
        self._state, self._key, self._value, self._depth = "value", key, "", 0

    def _read_plain_name(self, char: str) -> None:
        """A name in plain text, up to the mark before the arguments or the arguments themselves."""
        if char == "{":
            name = self._value.strip(_SPACE).removesuffix(self._form.name_before).partition(_CALL_ID)[0]
            self._set_name(name.strip(_SPACE))
            self._plain_name = True
            self._begin_value("arguments")
            self._read_value(char)
        elif char == "\n" or len(self._value) > 256:
            self.is_broken = True
        self._value += char if self._state == "name" else ""

    def _read_value(self, char: str) -> None:
        if self._in_string:
            self._take(char)
            if self._ends_string(char) and self._depth == 0:
                self._end_value()
            return
        if not self._value and char in _SPACE:
            return
        if self._depth == 0 and self._value and char in ",}" + _SPACE:  # the end of a number or a word
            self._end_value()
            if char not in _SPACE and not self.is_broken:
                self._step(char)
            return
        self._take(char)
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._end_value()
            elif self._depth < 0:
                self.is_broken = True

    def _take(self, char: str) -> None:
        self._value += char
        if self._is_arguments() and self._value[0] == "{":
            self._arguments += char
            self._has_arguments = True

    def _is_arguments(self) -> bool:
        return self._key in ("arguments", "parameters")

    def _ends_string(self, char: str) -> bool:
        """Follow a string, whose first quote has been read; returns whether this character ends it."""
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            return True
        return False

    def _end_value(self) -> None:
        self._state = "next"
        value = self._load(self._value)
        if self._key == "name":
            self._set_name(value)
        elif self._is_arguments() and isinstance(value, str):  # JSON inside a string
            self.is_broken |= not isinstance(self._load(value), dict)
            self._arguments, self._has_arguments = ("" if self.is_broken else value), True
        self.is_done = self._plain_name and not self.is_broken

    def _set_name(self, value: object) -> None:
        if isinstance(value, str) and value in self._names:
            self.name = value
        else:
            self.is_broken = True

    def _load(self, text: str) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            self.is_broken = True
            return None
