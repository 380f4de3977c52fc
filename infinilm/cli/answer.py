"""An answer as it comes: the model's thoughts on stderr, dimmed, and its text on stdout."""

from __future__ import annotations

import sys
from typing import Protocol

from infinilm.cli.output import put, put_aside
from infinilm.cli.terminal import WordWrap, dim, terminal_width
from infinilm.text.answers import ChoiceMaker

__all__ = ["AnswerPrinter", "ChoiceSplitter", "Splitter"]


class Splitter(Protocol):
    """Knows thoughts from the answer, for any cut of the text."""

    def push(self, text: str) -> tuple[str, str]:
        """Take more text; return the thoughts and the answer that are certain now."""
        ...

    def finish(self) -> tuple[str, str]:
        """Return what was held back: no more text comes."""
        ...


class ChoiceSplitter:
    """A `Splitter` of answers in any format, whose calls are no part of either."""

    def __init__(self, maker: ChoiceMaker) -> None:
        self._maker = maker

    def push(self, text: str) -> tuple[str, str]:
        """See `Splitter`."""
        piece = self._maker.push(text)
        return piece.reasoning, piece.content

    def finish(self) -> tuple[str, str]:
        """See `Splitter`."""
        piece = self._maker.push("", final=True)
        return piece.reasoning, piece.content


class AnswerPrinter:
    """Prints one answer; see `Printer`.

    Parameters
    ----------
    splitter : Splitter, optional
        Knows thoughts from the answer; None: there are none.
    shows_thoughts : bool

    Attributes
    ----------
    text : str
        The answer so far, without thoughts.
    """

    def __init__(self, splitter: Splitter | None, shows_thoughts: bool) -> None:
        self._splitter, self._shows_thoughts = splitter, shows_thoughts
        self._thoughts = WordWrap(lambda text: put_aside(dim(text)), terminal_width(sys.stderr))
        self._answer = WordWrap(put, terminal_width(sys.stdout))
        self._has_thoughts = False
        self.text = ""

    def push(self, text: str) -> None:
        """Take more text."""
        self._show(*(("", text) if self._splitter is None else self._splitter.push(text)))

    def finish(self) -> None:
        """End the last line."""
        if self._splitter is not None:
            self._show(*self._splitter.finish())
        self._end_thoughts()
        self._answer.finish()
        put("\n")

    def _show(self, thoughts: str, answer: str) -> None:
        if self._shows_thoughts:
            thoughts = thoughts if self._has_thoughts else thoughts.lstrip()
            if thoughts:
                self._has_thoughts = True
                self._thoughts.push(thoughts)
        if answer:
            self._end_thoughts()
            self.text += answer
            self._answer.push(answer)

    def _end_thoughts(self) -> None:
        if self._has_thoughts:
            self._has_thoughts = False
            self._thoughts.finish()
            put_aside("\n\n")
