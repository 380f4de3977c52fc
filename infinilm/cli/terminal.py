"""What a terminal shows better than a pipe: colours, and lines that are broken at words."""

from __future__ import annotations

import os
import shutil
import sys
import unicodedata
from collections.abc import Callable
from typing import Any

__all__ = ["WordWrap", "dim", "has_colours", "terminal_width"]


def has_colours(stream: Any) -> bool:
    """Whether a stream shows colours: a terminal, unless NO_COLOR (https://no-color.org) or TERM say otherwise."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def dim(text: str) -> str:
    """A text for stderr, dimmed where it shows colours."""
    return f"\x1b[2m{text}\x1b[0m" if text and has_colours(sys.stderr) else text


def terminal_width(stream: Any) -> int:
    """Columns of the terminal that a stream is; 0: it is none, and lines are as long as they are."""
    return shutil.get_terminal_size().columns if stream.isatty() else 0


class WordWrap:
    """Breaks the lines of a text that comes in pieces at words. Lines of code and of tables stay as they are.

    Parameters
    ----------
    write : callable
        Takes what is certain: a word is held back until its end has come.
    width : int
        Columns of a line; 0 breaks nothing, and holds nothing back.
    """

    def __init__(self, write: Callable[[str], None], width: int) -> None:
        self._write, self._width = write, width
        self._column = 0
        self._line = ""  # as it came, up to the word
        self._space = self._word = ""  # not written yet
        self._in_code = False

    def push(self, text: str) -> None:
        """Take more text."""
        if not self._width:
            self._write(text)
            return
        out: list[str] = []
        for char in text:
            if char == "\n":
                self._end_word(out)
                out.append(f"{self._space}\n")
                self._in_code ^= self._line.lstrip().startswith("```")
                self._column, self._line, self._space = 0, "", ""
            elif char == " ":
                self._end_word(out)
                self._space += char
            elif _columns(char) == 2:  # Chinese and Japanese have no spaces, and may be broken anywhere
                self._end_word(out)
                self._word = char
                self._end_word(out)
            elif self._line and not (_columns(char) or self._word or self._space):  # an accent of a wide character
                out.append(char)
                self._line += char
            else:
                self._word += char
        if out:
            self._write("".join(out))

    def finish(self) -> None:
        """Write what was held back: no more text comes."""
        out: list[str] = []
        self._end_word(out)
        self._write("".join(out))

    def _end_word(self, out: list[str]) -> None:
        if not self._word:
            return
        width = sum(map(_columns, self._space + self._word))
        is_fixed = self._in_code or self._line.startswith(("|", "    ", "```"))
        if self._line and self._column + width > self._width and not is_fixed:
            out.append(f"\n{self._word}")
            self._column = width - len(self._space)
        else:
            out.append(self._space + self._word)
            self._column += width
        self._line += self._space + self._word
        self._space = self._word = ""


def _columns(char: str) -> int:
    """Columns that a character takes in a terminal."""
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
