"""`Pieces`: cuts the text of an answer so that parsers which look at a piece again and again take linear time."""

from __future__ import annotations

import re

__all__ = ["Pieces"]

_LENGTH = 256  # characters of a piece behind its space
_PIECE = re.compile(rf"\s*(?:\S.{{0,{_LENGTH - 1}}})?", re.S)


class Pieces:
    """Text in, in pieces of any sizes; the same text out, in pieces that are cheap to read.

    A parser searches what it has for each of its marks after each call, and looks at space again while it cannot tell
    what the space belongs to. So long texts are cut, and of long space a part is held back that grows with it: each
    character is looked at a bounded number of times then.
    """

    def __init__(self) -> None:
        self._held: list[str] = []  # space that has not been passed on
        self._num_held = 0
        self._num_passed = 0  # of the space before it

    def push(self, text: str, *, final: bool = False) -> list[str]:
        """Take more text; return the pieces that are to be read now. `final`: no more comes."""
        if text.isspace() and not final:
            self._held.append(text)
            self._num_held += len(text)
            if 8 * self._num_held < self._num_passed:
                return []
            self._num_passed += self._num_held
            text = ""
        elif text or final:
            self._num_passed = 0
        if self._held:
            text = "".join(self._held) + text
            self._held, self._num_held = [], 0
        return _PIECE.findall(text)[:-1] if len(text) > _LENGTH else [text]
