"""Regular expressions of strangers, which no text can make slow.

Files of models and adapters name modules by regular expressions of Python. Its own engine goes back over a text again
and again, for longer than anyone waits with `([a-z]+)*!`, and keeps the interpreter meanwhile. Here a pattern is a
graph of steps, and no step is tried twice at the same place of a text: the time is at most the product of the two. A
look-ahead is a pattern of its own at each place where it stands, so none may stand within another.
Source of the idea: Russ Cox, "Regular Expression Matching Can Be Simple And Fast" (swtch.com/~rsc/regexp/regexp1.html).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from infinilm.checks import short_repr

if sys.version_info >= (3, 11):
    from re import _constants as ops, _parser as parser  # type: ignore[attr-defined]
else:
    import sre_constants as ops
    import sre_parse as parser

__all__ = ["Pattern"]

_MAX_PATTERN = 4096  # characters
_MAX_STEPS = 1024  # parts of a pattern, its counted repeats written out
_MAX_TEXT = 256  # characters of a name
_ACCEPT = 0

Step = Callable[[str, int], tuple[int, Sequence[int]]]
"""Gets a text and a place in it; returns how many characters it takes, and the steps that may follow: none if it fails.
"""


class Pattern:
    """A regular expression in Python's syntax, of which some parts are not supported.

    These are references to groups, atomic groups, looks behind, and a look-ahead within another.

    Parameters
    ----------
    text : str

    Raises
    ------
    ValueError
        It is none, or too long, or has what is not supported: says which.
    """

    def __init__(self, text: str) -> None:
        if len(text) > _MAX_PATTERN:
            raise ValueError(f"a regular expression has at most {_MAX_PATTERN} characters, got {len(text)}")
        self._steps: list[Step] = [lambda _, __: (0, ())]
        self._num_parts = 0
        self._is_ahead = False  # whether what is added stands in a look-ahead
        try:
            tree = parser.parse(text)
            self._begin = self._sequence(tree, tree.state.flags, _ACCEPT)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"{short_repr(text)} is no regular expression: {error}") from None

    def matches(self, text: str, begin: int = 0, *, whole: bool = False) -> bool:
        """Whether the text from `begin` on begins with the pattern, or is it as a whole.

        A text that is longer than any name matches nothing.
        """
        return len(text) <= _MAX_TEXT and self._reaches(self._begin, text, begin, whole)

    def _reaches(self, begin: int, text: str, place: int, whole: bool) -> bool:
        waiting, seen = [(begin, place)], {(begin, place)}
        while waiting:
            step, place = waiting.pop()
            if step == _ACCEPT and (place == len(text) or not whole):
                return True
            taken, following = self._steps[step](text, place)
            new = {(other, place + taken) for other in following} - seen
            seen |= new
            waiting += new
        return False

    def _add(self, step: Step) -> int:
        self._steps.append(step)
        return len(self._steps) - 1

    def _split(self, *following: int) -> int:
        return self._add(lambda _, __: (0, following))

    def _sequence(self, items: Any, flags: int, follow: int) -> int:
        """Add what stands one behind the other, and then `follow`; returns the first step."""
        for op, argument in reversed(list(items)):
            follow = self._item(op, argument, flags, follow)
        return follow

    def _item(self, op: Any, argument: Any, flags: int, follow: int) -> int:
        self._num_parts += 1
        if self._num_parts > _MAX_STEPS:
            raise ValueError(f"a regular expression has at most {_MAX_STEPS} steps, its repeats written out")
        if op in (ops.LITERAL, ops.NOT_LITERAL, ops.ANY, ops.IN):
            takes = _character(op, argument, flags)
            return self._add(lambda text, i: (1, (follow,)) if i < len(text) and takes(text[i]) else (0, ()))
        if op is ops.AT:
            holds = _PLACES[argument]
            return self._add(lambda text, i: (0, (follow,) if holds(text, i) else ()))
        if op is ops.BRANCH:
            return self._split(*(self._sequence(branch, flags, follow) for branch in argument[1]))
        if op is ops.SUBPATTERN:
            return self._sequence(argument[3], (flags | argument[1]) & ~argument[2], follow)
        if op in (ops.MAX_REPEAT, ops.MIN_REPEAT):
            least, most, items = argument
            return self._repeat(least, most, items, flags, follow)
        if op in (ops.ASSERT, ops.ASSERT_NOT) and argument[0] > 0:
            if self._is_ahead:
                raise ValueError("regular expressions with a look-ahead within a look-ahead are not supported")
            self._is_ahead = True
            ahead, wanted = self._sequence(argument[1], flags, _ACCEPT), op is ops.ASSERT
            self._is_ahead = False
            return self._add(lambda text, i: (0, (follow,) if self._reaches(ahead, text, i, False) == wanted else ()))
        raise ValueError(f"regular expressions with {str(op).lower()} are not supported")

    def _repeat(self, least: int, most: int, items: Any, flags: int, follow: int) -> int:
        if most == ops.MAXREPEAT:
            following: list[int] = []
            loop = self._add(lambda _, __: (0, following))
            following += [self._sequence(items, flags, loop), follow]
            begin = loop
        else:
            begin = follow
            for _ in range(most - least):
                again = self._sequence(items, flags, begin)
                if again == begin:  # nothing is repeated, as in "(?:){9}"
                    break
                begin = self._split(again, follow)
        for _ in range(least):
            again = self._sequence(items, flags, begin)
            if again == begin:
                break
            begin = again
        return begin


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


def _at_boundary(text: str, i: int) -> bool:
    return (i > 0 and _is_word(text[i - 1])) != (i < len(text) and _is_word(text[i]))


def _at_end(text: str, i: int) -> bool:
    return i == len(text)


_PLACES: dict[Any, Callable[[str, int], bool]] = {
    ops.AT_BEGINNING: lambda _, i: i == 0,
    ops.AT_BEGINNING_STRING: lambda _, i: i == 0,
    ops.AT_END: _at_end,  # names have no lines
    ops.AT_END_STRING: _at_end,
    ops.AT_BOUNDARY: _at_boundary,
    ops.AT_NON_BOUNDARY: lambda text, i: not _at_boundary(text, i),
}
_CATEGORIES: dict[Any, Callable[[str], bool]] = {
    ops.CATEGORY_DIGIT: str.isdecimal,
    ops.CATEGORY_NOT_DIGIT: lambda c: not c.isdecimal(),
    ops.CATEGORY_SPACE: str.isspace,
    ops.CATEGORY_NOT_SPACE: lambda c: not c.isspace(),
    ops.CATEGORY_WORD: _is_word,
    ops.CATEGORY_NOT_WORD: lambda c: not _is_word(c),
}


def _character(op: Any, argument: Any, flags: int) -> Callable[[str], bool]:
    """What says whether a character is the one that is wanted."""
    if op is ops.ANY:
        return lambda c: c != "\n" or bool(flags & re.DOTALL)
    items = argument if op is ops.IN else [(ops.LITERAL, argument)]
    negated = op is ops.NOT_LITERAL or (op is ops.IN and items[0][0] is ops.NEGATE)

    def is_one(c: str) -> bool:
        for kind, value in items:
            if (
                (kind is ops.LITERAL and ord(c) == value)
                or (kind is ops.RANGE and value[0] <= ord(c) <= value[1])
                or (kind is ops.CATEGORY and _CATEGORIES[value](c))
            ):
                return True
        return False

    def takes(c: str) -> bool:
        spelt = {c, c.lower(), c.upper()} if flags & re.IGNORECASE else {c}
        return any(is_one(one) for one in spelt if len(one) == 1) != negated

    return takes
