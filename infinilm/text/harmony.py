"""Answers of gpt-oss: messages with channels and recipients.

Source: https://cookbook.openai.com/articles/openai-harmony

An answer is any number of ``<|start|>assistant<|channel|>NAME<|message|>TEXT<|end|>``; the prompt has the first mark
and the role already. The channel "analysis" is reasoning; "commentary" and "final" are content; a message to
`functions.NAME` is a call, whose text is the arguments.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from infinilm.text.detokenize import overlap

__all__ = ["HARMONY_MARKS", "HarmonyParser", "HarmonyPart"]

HARMONY_MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
"""All of them are special tokens."""

_MESSAGE = "<|message|>"
_BEGINS = ("<|channel|>", "<|start|>")
_OPENINGS = (*_BEGINS, "to=")
_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>")
_MAX_HEADER = 512  # characters
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")
_RECIPIENT = re.compile(r"\bto=(?!(?:all|assistant|user)\b)([^\s<]+)")  # of a call


@dataclass(frozen=True, slots=True)
class HarmonyPart:
    """A piece of an answer.

    Attributes
    ----------
    kind : str
        "reasoning", "content" or "call".
    text : str
        The text; in a call, a piece of its arguments.
    name : str or None
        The name of the function, with the first piece of a call.
    """

    kind: str
    text: str
    name: str | None = None


class HarmonyParser:
    """Text in, in pieces; parts out. What comes out, joined, does not depend on where the text was cut.

    Parameters
    ----------
    prompt : str
        As rendered: a message that is continued is open at its end.
    names : collection of str
        The tools there are; a message to any other recipient is content, with its header.
    """

    def __init__(self, prompt: str, names: Collection[str]) -> None:
        self._names = names
        self._text = ""  # not read yet
        self._state = "gap"  # then header, body, gap ..., or plain
        self._kind = "content"
        self._has_body = False  # something of this message came
        self._told: set[str] = set()  # kinds that came, whose next message begins a paragraph
        self._name: str | None = None  # of a call that has not been told
        place = prompt.rfind(_MESSAGE)
        begin = prompt.rfind("<|start|>", 0, max(place, 0))
        if place > max(prompt.rfind(mark) for mark in _ENDS) and prompt.startswith("<|start|>assistant", max(begin, 0)):
            self._begin(prompt[begin:place])

    def push(self, text: str, *, final: bool = False) -> list[HarmonyPart]:
        """Take more text; return what is certain now. `final`: no more comes."""
        self._text += text
        parts: list[HarmonyPart] = []
        steps = {"gap": self._read_gap, "header": self._read_header, "body": self._read_body, "plain": self._read_plain}
        while True:
            before = self._state, len(self._text)
            steps[self._state](parts, final)
            if before == (self._state, len(self._text)):
                return parts

    def _read_gap(self, parts: list[HarmonyPart], final: bool) -> None:
        """Between messages: a header, or text without one, which is content."""
        stripped = self._text.lstrip()
        if any(stripped.startswith(mark) for mark in _OPENINGS):
            self._state = "header"
        elif stripped and (final or not any(mark.startswith(stripped) for mark in _OPENINGS)):
            self._be_plain()

    def _be_plain(self) -> None:
        self._state, self._kind, self._has_body = "plain", "content", False

    def _read_header(self, parts: list[HarmonyPart], final: bool) -> None:
        header, mark, rest = self._text.partition(_MESSAGE)
        if mark and len(header) <= _MAX_HEADER:
            self._text = rest
            unknown = self._begin(header)
            if unknown:
                self._give(parts, header + mark)
        elif len(header) > _MAX_HEADER + (0 if mark else len(_MESSAGE) - 1):
            self._be_plain()
        elif final:  # cut off within it: no content has begun, unless this is no header
            if header.lstrip().startswith(_BEGINS):
                self._text = ""
            else:
                self._be_plain()

    def _begin(self, header: str) -> bool:
        """Begin a message; returns whether its recipient is not known."""
        self._state, self._has_body = "body", False
        recipient, channels = _RECIPIENT.search(header), _CHANNEL.findall(header)
        name = recipient[1].removeprefix("functions.") if recipient else None
        self._name = name if name in self._names else None
        if self._name is not None:
            self._kind = "call"
        elif recipient is None and channels[-1:] == ["analysis"]:  # the last one counts, where there are two
            self._kind = "reasoning"
        else:
            self._kind = "content"
        return recipient is not None and self._name is None

    def _read_body(self, parts: list[HarmonyPart], final: bool) -> None:
        if self._kind == "call" and self._name is not None:
            parts.append(HarmonyPart("call", "", self._name))
            self._name = None
        found = [(place, mark) for mark in _ENDS if (place := self._text.find(mark)) >= 0]
        if found:
            place, mark = min(found)
            self._give(parts, self._text[:place])
            if self._kind == "call" and not self._has_body:
                parts.append(HarmonyPart("call", "{}"))
            self._text, self._state = self._text[place + (0 if mark == "<|start|>" else len(mark)) :], "gap"
            return
        keep = 0 if final else max(overlap(self._text, mark) for mark in _ENDS)
        self._give(parts, self._text[: len(self._text) - keep])
        self._text = self._text[len(self._text) - keep :]
        if final and self._kind == "call" and not self._has_body:
            self._has_body = True
            parts.append(HarmonyPart("call", "{}"))

    def _read_plain(self, parts: list[HarmonyPart], final: bool) -> None:
        """Text without a header, up to the next one."""
        skipped = 0 if self._has_body else 1  # what stands at its beginning is no header
        found = [place for mark in _BEGINS if (place := self._text.find(mark, skipped)) >= 0]
        if found:
            self._give(parts, self._text[: min(found)])
            self._text, self._state = self._text[min(found) :], "gap"
            return
        keep = 0 if final else max(overlap(self._text[skipped:], mark) for mark in _BEGINS)
        self._give(parts, self._text[: len(self._text) - keep])
        self._text = self._text[len(self._text) - keep :]

    def _give(self, parts: list[HarmonyPart], text: str) -> None:
        if not text:
            return
        if not self._has_body and self._kind != "call" and self._kind in self._told:
            text = "\n\n" + text
        self._has_body = True
        self._told.add(self._kind)
        parts.append(HarmonyPart(self._kind, text))
