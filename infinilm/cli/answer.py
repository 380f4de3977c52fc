"""An answer as it comes: the model's thoughts on stderr, dimmed, and its text on stdout."""

from __future__ import annotations

import sys

from infinilm.cli.output import put, put_aside
from infinilm.cli.terminal import WordWrap, dim, terminal_width
from infinilm.text.answers import Choice, ChoiceMaker

__all__ = ["AnswerPrinter"]


class AnswerPrinter:
    """Prints one answer; see `Printer`.

    Parameters
    ----------
    maker : ChoiceMaker
        Knows thoughts from the answer.
    shows_thoughts : bool

    Attributes
    ----------
    text : str
        The answer so far, without thoughts.
    """

    def __init__(self, maker: ChoiceMaker, shows_thoughts: bool) -> None:
        self._maker, self._shows_thoughts = maker, shows_thoughts
        self._thoughts = WordWrap(lambda text: put_aside(dim(text)), terminal_width(sys.stderr))
        self._answer = WordWrap(put, terminal_width(sys.stdout))
        self._has_thoughts = False
        self.text = ""

    def push(self, text: str) -> None:
        """Take more text."""
        self._show(self._maker.push(text))

    def finish(self) -> None:
        """End the last line."""
        self._show(self._maker.push("", final=True))
        self._end_thoughts()
        self._answer.finish()
        put("\n")

    def _show(self, piece: Choice) -> None:
        thoughts, answer = piece.reasoning, piece.content
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
