"""Calls between tags instead of JSON: `<function=f><parameter=key>value</parameter></function>` and the like."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infinilm.text.detokenize import overlap
from infinilm.text.typed_values import typed_value, types_of

__all__ = ["TaggedCall", "Tags"]

_SPACE = " \t\r\n"
_MAX_KEY = 256  # characters: what goes on for longer is no name of a parameter


@dataclass(frozen=True, slots=True)
class Tags:
    """What stands around the parts of a call: `name[0] NAME name[1] (key[0] KEY key[1] value[0] VALUE value[1])* end`.

    Space may stand between any two of them.

    Attributes
    ----------
    name, key, value : (str, str)
        Without a tag behind it, a name ends at space or at the next tag.
    end : str
        "" where the end mark of the format ends the call.
    section : (str, str)
        What may stand around a value within its tags, so that it may have any text in it, as `CDATA` does in XML.
    says_kind : bool
        A key has `" string="true` behind it, or `false` for values that are JSON, so that no schema is needed.
    has_lines : bool
        A line end behind the first tag of a value, and one before the last, are not of the value.
    """

    name: tuple[str, str]
    key: tuple[str, str]
    value: tuple[str, str]
    end: str = ""
    has_lines: bool = False
    says_kind: bool = False
    section: tuple[str, str] = ("", "")


class TaggedCall:
    """One call being read.

    Parameters
    ----------
    tags : Tags
    end : str
        Mark of the format that ends a call; it is left in the text.
    schemas : mapping of str to mapping
        JSON schemas of the parameters of the tools, by name.
    mark : str
        What began the call.
    index : int

    Attributes
    ----------
    name : str or None
        The name of a tool, once something of a call follows it.
    is_told : bool
        Arguments have begun behind a name, or there are none: from now on this is a call, whatever follows.
    is_cut : bool
        False: marks end such a call where they stand between its parts, and are text elsewhere.
    raw : str
        What is content if the call is broken: all that was read, or the tag of a key of one that is told.
    """

    is_cut = False

    def __init__(self, tags: Tags, end: str, schemas: Mapping[str, Mapping[str, Any]], mark: str, index: int) -> None:
        self._tags, self._end, self._schemas = tags, end, schemas
        self.raw, self.index = mark, index
        self.name: str | None = None
        self._named = ""  # the name, until it is known that this is a call
        self.is_done = self.is_broken = False
        self._arguments = ""  # not given out yet
        self._has_arguments = False
        self._state = "name"  # then next, key, value, next ...
        self._key = ""
        self._value: list[str] = []  # pieces that are read and not given out
        self._behind = tags.value[1]  # what ends the value
        self._is_string = self._has_begun = False  # of the value
        self._unseen: set[str] = set()  # arguments of the tool that have not come

    def push(self, text: str, final: bool) -> int:
        """Read what is certain; returns how many characters were read. `final`: no more text comes."""
        place = 0
        while not self.is_done and not self.is_broken:
            step = {"name": self._read_name, "next": self._read_next, "key": self._read_key, "value": self._read_value}
            state, count = self._state, step[self._state](text[place:], final)
            place += count
            if count == 0 and state == self._state:
                break
        if final and self.name is not None and not (self.is_done or self.is_broken):  # it was cut
            if self._state == "value":
                self._arguments += "".join(self._value)
            elif self._state == "key" and place < len(text):
                self._arguments += self._separator() + json.dumps(text[place:], ensure_ascii=False)[:-1]
                self._has_arguments = True
            return len(text) if self.is_told else place
        return place

    @property
    def is_told(self) -> bool:
        """See above."""
        return self.name is not None and (self.is_done or self._has_arguments)

    def _separator(self) -> str:
        return ", " if self._has_arguments else "{"

    def take_arguments(self) -> str:
        """JSON text of the arguments that was not taken yet."""
        taken, self._arguments = self._arguments, ""
        return taken

    def _read_name(self, text: str, final: bool) -> int:
        before, behind = self._tags.name
        begin = len(text) - len(text.lstrip(_SPACE))
        if not text.startswith(before, begin):
            self.is_broken = not before.startswith(text[begin:])
            return 0
        begin += len(before)
        found = re.compile(re.escape(behind) if behind else r"[\s<]").search(text, begin)
        if found is None:
            begun = text[begin : len(text) - overlap(text[begin:], behind)] if behind else text[begin:]
            self.is_broken = not any(name.startswith(begun) for name in self._schemas)
            return 0
        name = text[begin : found.start()]
        if name not in self._schemas:
            self.is_broken = True
            return 0
        properties = self._schemas[name].get("properties")
        self._unseen = set(properties) if self._tags.has_lines and isinstance(properties, Mapping) else set()
        end = found.end() if behind else found.start()
        self._named, self._state, self.raw = name, "next", self.raw + text[:end]
        return end

    def _read_next(self, text: str, final: bool) -> int:
        """Behind the name or a value: another key, or the end."""
        key, end = self._tags.key[0], self._tags.end
        rest = text.lstrip(_SPACE)
        space = len(text) - len(rest)
        if rest.startswith(key):
            self.name, self._state = self._named, "key"
            self.raw = key if self._has_arguments else self.raw + text[: space + len(key)]
            return space + len(key)
        ends = [mark for mark in (end, self._end) if mark]
        if any(rest.startswith(mark) for mark in ends) or (final and len(rest) > 1 and ends[0].startswith(rest)):
            self._arguments += "}" if self._has_arguments else "{}"
            self.name, self.is_done = self._named, True
            return space + (min(len(end), len(rest)) if end and not rest.startswith(self._end) else 0)
        self.is_broken = not any(mark.startswith(rest) for mark in (key, *ends))
        return 0

    def _read_key(self, text: str, final: bool) -> int:
        mark, begin = self._tags.key[1], self._tags.value[0]
        key, found, rest = text.partition(mark)
        if not found or len(key) > _MAX_KEY:
            self.is_broken = len(key) > _MAX_KEY + (0 if found else len(mark) - 1)  # a part of the mark may be there
            return 0
        stripped = rest.lstrip(_SPACE) if begin else rest
        if not stripped.startswith(begin):
            self.is_broken = not begin.startswith(stripped)
            return 0
        self._key, self._state, self._value, self._has_begun = key.strip(_SPACE), "value", [], False
        self._behind = self._tags.value[1]
        root = self._schemas[self.name or ""]
        if self._tags.says_kind:
            self._key, _, kind = self._key.partition('" string="')
            self._is_string = kind != "false"
        else:
            self._is_string = types_of(self._key, root) == {"string"}
        self._unseen.discard(self._key)
        self._arguments += self._separator() + json.dumps(self._key, ensure_ascii=False) + ": "
        self._arguments += '"' if self._is_string else ""
        self._has_arguments, self.raw = True, ""
        return len(text) - len(stripped) + len(begin)

    def _read_value(self, text: str, final: bool) -> int:
        if not text:
            return 0
        section = self._tags.section
        if section[0] and not self._has_begun:
            if text.startswith(section[0]):
                self._behind, self._has_begun = section[1] + self._behind, True
                return len(section[0])
            if section[0].startswith(text):
                return 0
        begin = 1 if self._tags.has_lines and not self._has_begun and text[0] == "\n" else 0
        mark = self._behind
        line_end = "\n" if self._tags.has_lines else ""
        place = text.find(mark, begin)
        before, behind = self._tags.key
        others = [f"\n{before}{key}{behind}" for key in self._unseen]
        found = min((other for other in (text.find(mark, begin) for mark in others) if other >= 0), default=-1)
        if found >= 0 and (place < 0 or found < place):  # models forget the end of a value now and then
            place, mark = found, ""
        if place < 0:
            keep = max(overlap(text[begin:], mark), overlap(text[begin:], line_end + mark))
            keep = max([keep, *(overlap(text[begin:], other) for other in others)])
            self._take(text[begin : len(text) - keep])
            self._has_begun = self._has_begun or begin > 0 or len(text) > keep
            return len(text) - keep
        self._take(text[begin:place].removesuffix(line_end) if line_end else text[begin:place])
        if self._is_string:
            self._arguments += '"'
        else:
            root = self._schemas[self.name or ""]
            value = typed_value("".join(self._value), types_of(self._key, root))
            self._arguments += json.dumps(value, ensure_ascii=False)
        self._state = "next"
        return place + len(mark)

    def _take(self, text: str) -> None:
        """A part of the value."""
        if self._is_string:
            self._arguments += json.dumps(text, ensure_ascii=False)[1:-1]
        else:
            self._value.append(text)
