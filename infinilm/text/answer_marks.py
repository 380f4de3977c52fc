"""What is in the text of an answer and no part of it: marks around the content, and special tokens."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

from infinilm.text.detokenize import overlap

__all__ = ["AnswerMarks", "Edges", "TextFilter"]


class Edges(NamedTuple):
    """What stands around the content of an answer.

    Attributes
    ----------
    begin, end : str
        Marks; an answer without the first has none.
    speaker : str
        Who speaks, which may stand before the first word, with and without marks; "": the models do not say it.
    """

    begin: str
    end: str
    speaker: str = ""


class AnswerMarks:
    """Text in, in pieces; text without what stands around it out, which does not depend on where it was cut.

    An answer has marks if it begins with the first; without that one, the last is text as well. Space behind the
    first, a line end before the last, and space behind that are taken with them.

    Parameters
    ----------
    edges : Edges
    is_begun : bool
        The first mark has been written.
    """

    def __init__(self, edges: Edges, is_begun: bool = False) -> None:
        self._begin, self._end, self._speaker = edges
        self._state = "inside" if is_begun else "start"  # then gap and inside, and behind, or at once text
        self._text = ""

    @classmethod
    def after(cls, prompt: str, edges: Edges) -> AnswerMarks:
        """For the answer to a rendered prompt, which has begun the answer where it is one that goes on."""
        return cls(edges, not edges.begin or prompt.rfind(edges.begin) > prompt.rfind(edges.end))

    def push(self, text: str, *, final: bool = False) -> str:
        """Take more text; return what is certain now. `final`: no more comes."""
        self._text += text
        if self._state == "start":
            stripped = self._text.lstrip()
            if stripped.startswith(self._begin):
                self._state, self._text = "gap", stripped[len(self._begin) :]
            elif self._speaker and stripped.startswith(self._speaker):
                self._state, self._text = "text", stripped[len(self._speaker) :]
            elif final or not (self._begin.startswith(stripped) or self._speaker.startswith(stripped)):
                self._state = "text"
        made = ""
        if self._state == "gap":
            self._text = self._text.lstrip()
            if self._speaker and self._text.startswith(self._speaker):
                self._state, self._text = "inside", self._text[len(self._speaker) :]
            elif final or (self._text and not self._speaker.startswith(self._text)):
                self._state = "inside"
        if self._state == "inside":
            made, mark, rest = self._text.partition(self._end)
            if mark:
                made, self._state, self._text = made.removesuffix("\n"), "behind", rest
            else:
                keep = 0 if final else max(overlap(made, self._end), overlap(made, "\n" + self._end))
                made, self._text = made[: len(made) - keep], made[len(made) - keep :]
        if self._state == "behind":
            self._text = self._text.lstrip()
            self._state = "text" if self._text else "behind"
        if self._state == "text":
            made, self._text = made + self._text, ""
        return made


class TextFilter:
    """Text in, in pieces; the text without some tokens out, such as special tokens that are no part of an answer."""

    def __init__(self, tokens: Collection[str]) -> None:
        longest_first = sorted(tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)))
        self._by_first: dict[str, list[str]] = {}
        for token in longest_first:
            self._by_first.setdefault(token[0], []).append(token)
        self._longest = len(longest_first[0])
        self._text = ""  # what may begin a token

    def push(self, text: str, *, final: bool = False) -> str:
        """Take more text; return what is certain now. `final`: no more comes."""
        made: list[str] = []
        text = self._text + text
        place = 0
        for found in self._pattern.finditer(text):
            made.append(text[place : found.start()])
            place = found.start()
            rest = text[place : place + self._longest]
            if not final and any(token.startswith(rest) and token != found[0] for token in self._by_first[rest[0]]):
                self._text = text[place:]  # may become a longer token
                return "".join(made)
            place = found.end()
        keep = 0 if final else self._num_kept(text[max(place, len(text) - self._longest) :])
        made.append(text[place : len(text) - keep])
        self._text = text[len(text) - keep :]
        return "".join(made)

    def _num_kept(self, tail: str) -> int:
        likely = (token for first, tokens in self._by_first.items() if first in tail for token in tokens)
        return max((overlap(tail, token) for token in likely), default=0)
