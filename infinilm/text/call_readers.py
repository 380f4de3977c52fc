"""Calls that are read once they have ended, among them Gemma's objects without quotes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from infinilm.text.detokenize import overlap
from infinilm.text.typed_values import read_json, typed_value, types_of

__all__ = ["Reader", "WholeCalls", "gemma_reader"]

Reader = Callable[[str], "list[tuple[str, dict[str, Any]]] | None"]
"""Reads the text between the marks of calls: names and arguments; None: it is no call."""

_MAX_DEPTH = 64  # of nested values


class WholeCalls:
    """One or several calls between two marks, of which nothing is given out before the end.

    Parameters
    ----------
    read : Reader
    end : str
        The mark behind the calls; "": they end with the answer.
    schemas : mapping of str to mapping
        JSON schemas of the parameters of the tools, by name.
    mark : str
        What began the calls.
    index : int
        The index of the first call.
    has_plain_values : bool
        Texts may stand for values of other types, which the schemas name.

    Attributes
    ----------
    calls : list of (str, str)
        Names, and arguments as JSON text, once `is_done`.
    raw : str
        All of the text, which is content if `is_broken`.
    """

    def __init__(
        self,
        read: Reader,
        end: str,
        schemas: Mapping[str, Mapping[str, Any]],
        mark: str,
        index: int,
        has_plain_values: bool = False,
    ) -> None:
        self._reader, self._end, self._schemas = read, end, schemas
        self._has_plain_values = has_plain_values
        self._pieces = [mark]
        self._begin = mark
        self._tail = ""  # of the text, which may begin the end mark
        self.calls: list[tuple[str, str]] = []
        self.index = index
        self.name: str | None = None
        self.is_done = self.is_broken = False

    @property
    def raw(self) -> str:
        """All that was read."""
        return "".join(self._pieces)

    def push(self, text: str, final: bool) -> int:
        """Read text up to the end of the calls; returns how many characters were read."""
        joined = self._tail + text
        place = joined.find(self._end) if self._end else -1
        if place >= 0:
            count = place + len(self._end) - len(self._tail)
            self._pieces.append(text[:count])
            self._finish(self.raw[len(self._begin) : -len(self._end)])
            return count
        self._pieces.append(text)
        keep = overlap(joined, self._end) if self._end else 0
        self._tail = joined[len(joined) - keep :]
        if final:
            inner = self.raw[len(self._begin) :]
            self._finish(inner[: len(inner) - keep])
        return len(text)

    def _finish(self, text: str) -> None:
        try:
            found = [(name, self._typed(name, value)) for name, value in self._reader(text) or ()]
            self.calls = [(name, json.dumps(value, ensure_ascii=False, allow_nan=False)) for name, value in found]
            "".join(arguments for _, arguments in self.calls).encode()
        except (ValueError, TypeError, RecursionError):  # no JSON has such values, half characters among them
            self.calls = []
        if all(name in self._schemas for name, _ in self.calls) and self.calls:
            self.is_done = True
        else:
            self.calls, self.is_broken = [], True

    def _typed(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Arguments whose texts are the values that the schema of a tool wants, where it wants no texts."""
        if not self._has_plain_values:
            return arguments
        made = dict(arguments)
        for key, value in arguments.items():
            kinds = types_of(key, self._schemas.get(name, {}))
            if isinstance(value, str) and kinds and "string" not in kinds:
                made[key] = typed_value(value, kinds)
        return made


def gemma_reader(quote: str) -> Reader:
    """Make the reader of `call:NAME{key:value}`, where texts stand between two quotes such as `<escape>`."""

    def read(text: str) -> list[tuple[str, dict[str, Any]]] | None:
        head = re.match(r"\s*(?:call)?:([^{}\s]+)(?=\{)", text)  # Gemma 4 forgets the first word now and then
        if head is None:
            return None
        value, place = _gemma_value(text, head.end(), quote, 0)
        if text[place:].strip() or not isinstance(value, Mapping):
            return None
        return [(head[1], dict(value))]

    return read


def _gemma_value(text: str, place: int, quote: str, depth: int) -> tuple[Any, int]:
    """The value that begins at a place, and where it ends. ValueError: there is none."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"more than {_MAX_DEPTH} nested values")
    if text.startswith(quote, place):
        end = text.index(quote, place + len(quote))
        return text[place + len(quote) : end], end + len(quote)
    if text[place : place + 1] == "{":
        return _gemma_object(text, place + 1, quote, depth)
    if text[place : place + 1] == "[":
        items: list[Any] = []
        place = _past_space(text, place + 1)
        while text[place : place + 1] != "]":
            value, place = _gemma_value(text, place, quote, depth + 1)
            items.append(value)
            place = _past_comma(text, place, "]")
        return items, place + 1
    unopened = re.compile(r"([^:\[\]{}<]{0,255}[^:\[\]{}<,\s])" + re.escape(quote)).match(text, place)
    if unopened is not None:  # a text whose first quote the model forgot
        return unopened[1], unopened.end()
    word = re.compile(r"[^,\]}\s]+").match(text, place)
    if word is None:
        raise ValueError(f"no value at {place}")
    return _bare_value(word[0]), word.end()


def _bare_value(word: str) -> Any:
    """What stands without quotes: JSON, a word of Python, a number such as `108.`, or a text that lacks its quotes."""
    if re.fullmatch(r"-?\d+\.", word):
        return float(word)
    try:
        return read_json(word)
    except ValueError:
        return word


def _gemma_object(text: str, place: int, quote: str, depth: int) -> tuple[dict[str, Any], int]:
    made: dict[str, Any] = {}
    place = _past_space(text, place)
    while text[place : place + 1] != "}":
        if text.startswith(quote, place):
            end = text.index(quote, place + len(quote))
            key, place = text[place + len(quote) : end], end + len(quote)
            if text[place : place + 1] != ":":
                raise ValueError(f"no colon at {place}")
        else:
            end = text.index(":", place)
            key, place = text[place:end].strip(), end
        made[key], place = _gemma_value(text, _past_space(text, place + 1), quote, depth + 1)
        place = _past_comma(text, place, "}")
    return made, place + 1


def _past_space(text: str, place: int) -> int:
    while text[place : place + 1].isspace():
        place += 1
    return place


def _past_comma(text: str, place: int, end: str) -> int:
    place = _past_space(text, place)
    if text[place : place + 1] == ",":
        return _past_space(text, place + 1)
    if text[place : place + 1] != end:
        raise ValueError(f"expected a comma or {end} at {place}")
    return place
