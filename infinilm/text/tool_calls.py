"""Tool calls in the text of a model, as it is generated: content and calls apart, for any cut of the text.

A model writes a call in the way its chat template taught it. The table of chat formats tells which way that is; a
`ToolCallParser` takes the text in pieces and gives content, names and arguments as soon as they are certain.

Invariant: the deltas joined depend on the text alone, not on where it was cut. No text is lost: what looks like a call
and is none is content, up to where its arguments begin. From there on it is a call, as streams have given it out: its
arguments are the text that the model wrote, up to the mark that ends the call, also where that is no JSON, which the
JSON parser of a client then tells. What stands behind the arguments and belongs to no call is content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from infinilm.text.call_readers import Reader, WholeCalls
from infinilm.text.detokenize import overlap
from infinilm.text.tagged_calls import TaggedCall, Tags

__all__ = ["PLAIN_CALLS", "ToolCallDelta", "ToolCallFormat", "ToolCallParser"]

_SPACE = " \t\r\n"
_CALL_ID = "[CALL_ID]"  # between the name and an id, before the arguments
_MAX_HEAD = 512  # characters of what stands before the arguments, where a name stands in plain text


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
        as it is, $ID nine letters and digits, $KEY ten small letters and digits, $COUNT a number, and $ARGUMENTS the
        arguments.
    between : str
        What stands between two calls.
    around : tuple of str
        What stands before the first and behind the last.
    tags : Tags, optional
        For models that write calls between tags. JSON is read, too: calls that a grammar forces are such, since it can
        hold JSON to any schema.
    hidden : tuple of str
        Marks around all calls, which are neither content nor part of a call.
    name_pattern : str
        Where the name stands in plain text: a regular expression of all that comes before the arguments, whose first
        group is the name.
    is_keyed : bool
        An object has the name for its only key, and the arguments for its value.
    read : Reader, optional
        For calls that are read once they have ended, and not while they come.
    has_plain_values : bool
        In what `read` gives, texts may stand for values of other types, which the schema of a tool names.
    also : tuple of str
        What some of the models write instead of `begin`.
    inner : tuple of str
        Marks within a call that nothing above names.
    has_channels : bool
        Calls and texts are messages with channels, as gpt-oss writes them; `HarmonyParser` reads them.
    ids : str
        What ids of calls look like: "short" are nine letters and digits, as the template refuses any other; "counted"
        are `functions.NAME:COUNT`, as the model itself writes and reads them, COUNT being over the conversation; "":
        they may be anything.
    text_head : str
        Where prompts end with `begin`, so that an answer begins with the name of a tool: what stands there before a
        text; "": prompts do not end so.
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
    hidden: tuple[str, ...] = ()
    name_pattern: str = ""
    is_keyed: bool = False
    read: Reader | None = None
    has_plain_values: bool = False
    also: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    has_channels: bool = False
    ids: str = ""
    text_head: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        """What may begin a call: `begin`, or the tag behind it, as models of Qwen3-Coder's kind forget the former."""
        tag = self.tags.name[0] if self.tags is not None else ""
        return tuple(mark for mark in (self.begin, *self.also, tag) if mark)

    @property
    def written(self) -> tuple[str, ...]:
        """All that is written around names and arguments."""
        tags = self.tags
        inside = (*tags.name, *tags.key, *tags.value, tags.end) if tags is not None else ()
        return (
            self.begin,
            *self.also,
            self.end,
            self.name_before,
            self.pattern,
            *self.around,
            *self.hidden,
            *self.inner,
            *inside,
        )

    def as_json(self) -> ToolCallFormat:
        """For answers whose calls a grammar writes: what stands between tags is no call then, but text."""
        return replace(self, tags=None, read=None)


PLAIN_CALLS = ToolCallFormat("json", "", separators=_SPACE + ";", between="; ")
"""For models that were taught no way, whose calls are forced."""


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
    prompt : str
        As rendered: it may end with the mark of a call.
    """

    def __init__(self, form: ToolCallFormat, schemas: Mapping[str, Mapping[str, Any]], prompt: str = "") -> None:
        self._form = form
        self._schemas = schemas
        self._names = frozenset(schemas)
        self._text = ""  # not yet read
        self._call: _Call | TaggedCall | WholeCalls | None = None  # being read
        # `begin` was read, and what follows says how the call is written.
        self._has_begun = bool(form.text_head) and prompt.endswith(form.begin)
        self._mark = ""  # `begin`, as it was written in the answer
        self._in_calls = self._has_begun  # after `begin`
        self._at_start = True  # nothing but space and a hidden mark has come
        self._end = form.end  # or the hidden mark that ends calls without a mark of their own
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
            while self._at_start and form.hidden and stripped.startswith(form.hidden[0]):
                stripped = self._text = stripped[len(form.hidden[0]) :]
                self._end = form.hidden[-1]
            if self._at_start and stripped.startswith("{" if form.read is None else "["):
                self._in_calls, self._at_start = form.read is None, False
                if form.read is not None:
                    self._call = self._whole_calls(form.read, self._end, "")
                return
            if self._at_start and not final and (not stripped or any(h.startswith(stripped) for h in form.hidden)):
                return  # only space so far, or a part of a mark
            self._at_start = False
        marks = form.marks + form.hidden
        found = [(place, mark) for mark in marks if (place := self._text.find(mark)) >= 0]
        if found:
            place, mark = min(found)
            yield ToolCallDelta(self._text[:place])
            if mark in form.hidden:
                self._text, self._after_call = self._text[place + len(mark) :], True
                if not form.begin and mark == form.hidden[0]:  # behind it calls may begin, also behind a text
                    self._at_start, self._end = True, form.hidden[-1]
                return
            self._text, self._in_calls = self._text[place + len(mark) :], True
            if mark in (form.begin, *form.also):
                self._has_begun, self._mark = True, mark
            elif form.tags is not None:
                tags = replace(form.tags, name=("", form.tags.name[1]))  # the rest of a call whose mark is forgotten
                self._call = TaggedCall(tags, form.end, self._schemas, mark, self.num_calls)
            return
        keep = 0 if final else max((overlap(self._text, mark) for mark in marks), default=0)
        yield ToolCallDelta(self._text[: len(self._text) - keep])
        self._text = self._text[len(self._text) - keep :]

    def _begin_call(self, final: bool) -> None:
        form, text = self._form, self._text.lstrip(_SPACE)
        if not text and not final:
            return
        self._has_begun = False
        if form.read is not None:
            self._call = self._whole_calls(form.read, form.end, self._mark)
        elif form.tags is None or text.startswith("{"):
            self._call = _Call(form, self._names, self._mark, self.num_calls)
        else:
            self._call = TaggedCall(form.tags, form.end, self._schemas, self._mark, self.num_calls)

    def _whole_calls(self, read: Reader, end: str, mark: str) -> WholeCalls:
        return WholeCalls(read, end, self._schemas, mark, self.num_calls, self._form.has_plain_values)

    def _read_between(self, final: bool) -> Iterator[ToolCallDelta]:
        """After a call: the end mark, another object, another mark, or content again."""
        begin, end = self._form.begin, self._form.end
        text = self._text.lstrip(_SPACE)
        if end and "," in self._form.separators and not text.startswith(end):
            inner = text.lstrip(self._form.separators)
            if inner.startswith("{"):  # the next one of a list that ends with the mark
                self._text, self._call = inner, _Call(self._form, self._names, "", self.num_calls)
                return
            text = inner
        if not final and any(mark.startswith(text) for mark in (begin, end) if mark):
            return  # may become the mark
        self._in_calls, self._after_call = False, True
        if end and text.startswith(end):
            self._text = text[len(end) :]
        elif final and end.startswith(text):  # an answer that was cut short within the mark
            self._text = ""
        elif not (begin and text.startswith(begin)) and not end:
            while text and text[0] in self._form.separators and not (begin and begin.startswith(text[: len(begin)])):
                text = text[1:]  # what separates may begin like the mark
            self._text = text
            if self._text.startswith("{"):
                self._in_calls, self._call = True, _Call(self._form, self._names, "", self.num_calls)
            elif not final and begin.startswith(text):
                self._in_calls = True
        yield from ()

    def _read_call(self, call: _Call | TaggedCall | WholeCalls, final: bool) -> Iterator[ToolCallDelta]:
        if isinstance(call, WholeCalls):
            self._text = self._text[call.push(self._text, final) :]
            if call.is_done or call.is_broken:
                self._call, self._in_calls, self._after_call = None, False, call.is_done
                for name, arguments in call.calls:
                    yield ToolCallDelta(index=self.num_calls, name=name, arguments=arguments)
                    self.num_calls += 1
                if call.is_broken:
                    yield ToolCallDelta(call.raw)
            return
        was_told = call.is_told
        self._text = self._text[call.push(self._text, final) :]
        if call.is_told:
            if not was_told:
                yield ToolCallDelta(index=call.index, name=call.name)
                self.num_calls = call.index + 1
            if arguments := call.take_arguments():
                yield ToolCallDelta(index=call.index, arguments=arguments)
        if call.is_done or call.is_cut:
            self._call = None
        elif call.is_broken or final:
            self._call, self._in_calls = None, False
            if call.is_broken or not call.is_told:
                yield ToolCallDelta(call.raw)


class _Call:
    """One call being read: a JSON object with "name" and "arguments" (or "parameters"), character by character.

    Attributes
    ----------
    name : str or None
        Once it is known, and that of a tool.
    is_told : bool
        Arguments have begun behind a name: from now on this is a call, whatever follows.
    is_cut : bool
        A mark stands where the arguments go on: they are no JSON, and the call has ended.
    raw : str
        What is content if the call is broken: all that was read, or what came behind the arguments of one that is told.
    """

    def __init__(self, form: ToolCallFormat, names: frozenset[str], mark: str, index: int) -> None:
        self._form = form
        self._names = names
        self.index = index
        self._raw = [mark]  # pieces: to join texts one by one would take quadratic time
        self.name: str | None = None
        self.is_done = self.is_broken = self.is_cut = False
        self._arguments: list[str] = []  # not given out yet
        self._has_arguments = False
        self._has_others = False  # objects under keys that say nothing here, which a model may mean for arguments
        self._plain_name = False  # it stood before the object, which is the arguments
        self._state = "start"  # then name, or next, key, colon, value, next ...
        self._key = ""
        self._value: list[str] = []  # characters of a key, value or plain name, so far
        self._depth = 0
        self._in_string = self._escaped = False
        self._marks = tuple(mark for mark in (form.begin, form.end, *form.hidden) if mark)
        self._firsts = frozenset(mark[0] for mark in self._marks)  # their first characters

    def push(self, text: str, final: bool) -> int:
        """Read text up to the end of the call; returns how many characters were read."""
        for count, char in enumerate(text):
            if self.is_done or self.is_broken:
                return count
            if char in self._firsts and self.is_told and self._state == "value" and not self._in_string:
                if text.startswith(self._marks, count):
                    self.is_cut = True
                    return count
                if not final and any(mark.startswith(text[count : count + len(mark)]) for mark in self._marks):
                    return count
            self._raw.append(char)
            self._step(char)
        return len(text)

    @property
    def is_told(self) -> bool:
        """See above."""
        return self.name is not None and (self.is_done or self._has_arguments)

    @property
    def raw(self) -> str:
        """See above."""
        return "".join(self._raw)

    def take_arguments(self) -> str:
        """JSON text of the arguments that was not taken yet."""
        if self.is_done and not self._has_arguments:
            self._arguments, self._has_arguments = ["{}"], True
        taken, self._arguments = self._arguments, []
        return "".join(taken)

    def _step(self, char: str) -> None:
        if self._state == "value":
            self._read_value(char)
        elif self._state == "name":
            self._read_plain_name(char)
        elif self._state == "key":
            self._value.append(char)
            if self._ends_string(char):
                self._key, self._state = str(self._load("".join(self._value))), "colon"
        elif char in _SPACE or (self._state == "start" and char in self._form.separators):
            return
        elif self._state == "start" and char == "{":
            self._state = "next"
        elif self._state == "start" and self._form.name_before and (char.isalnum() or char == "_"):
            self._state, self._value = "name", [char]
        elif self._state == "next" and char == '"':
            self._state, self._value, self._in_string = "key", [char], True
        elif self._state == "next" and char == ",":
            return
        elif self._state == "next" and char == "}":
            self.is_done = self.name is not None and (self._has_arguments or not self._has_others)
            self.is_broken = not self.is_done
        elif self._state == "colon" and char == ":":
            if self._form.is_keyed and self.name is None:
                self._set_name(self._key)
                self._key = "arguments"
            self._begin_value(self._key)
        else:
            self.is_broken = True

    def _begin_value(self, key: str) -> None:
        self._state, self._key, self._value, self._depth = "value", key, [], 0

    def _read_plain_name(self, char: str) -> None:
        """A name in plain text, up to the mark before the arguments or the arguments themselves."""
        if char == "{":
            head = "".join(self._value)
            if self._form.name_pattern:
                match = re.fullmatch(self._form.name_pattern, head, re.S)
                name = match[1] if match else ""
            else:
                name = head.strip(_SPACE).removesuffix(self._form.name_before).partition(_CALL_ID)[0]
            self._set_name(name.strip(_SPACE))
            self._plain_name = True
            self._begin_value("arguments")
            self._read_value(char)
        elif len(self._value) > _MAX_HEAD:
            self.is_broken = True
        elif self._form.name_before == "\n":  # what is no line with the name of a tool is known to be text at once
            name, line_end, space = "".join([*self._value, char]).partition("\n")
            self.is_broken = bool(space.strip(_SPACE)) or not any(
                other == name or (not line_end and other.startswith(name)) for other in self._names
            )
        elif char == "\n" and not self._form.name_pattern:
            self.is_broken = True
        if self._state == "name":
            self._value.append(char)

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
        self._value.append(char)
        if self._is_arguments() and self._value[0] == "{":
            self._arguments.append(char)
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
        if self._is_arguments() and self._value[0] == "{" and self.name is not None:
            self._raw, self.is_done = [], self._plain_name  # they are told as they are
            return
        value = self._load("".join(self._value))
        if self._key in ("name", "tool_name"):
            self._set_name(value)
        elif self._is_arguments() and isinstance(value, str):  # JSON inside a string
            self.is_broken |= not isinstance(self._load(value), dict)
            if not self.is_broken:
                self._arguments, self._has_arguments = [value], True
        elif self._is_arguments() and value is not None and not isinstance(value, dict):
            self.is_broken = True
        elif isinstance(value, (dict, list)) and not self._is_arguments():
            self._has_others = True
        self.is_done = self._plain_name and not self.is_broken
        if self.is_told and not self.is_broken:
            self._raw = []

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
