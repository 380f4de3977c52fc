"""Calls that are read once they have ended: lists of calls in Python's syntax, and Gemma's objects without quotes."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from infinilm.text.detokenize import overlap

__all__ = ["Reader", "WholeCalls", "gemma_reader", "read_python", "read_value"]

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
    names : collection of str
        The tools there are.
    mark : str
        What began the calls.
    index : int
        The index of the first call.

    Attributes
    ----------
    calls : list of (str, str)
        Names, and arguments as JSON text, once `is_done`.
    raw : str
        All of the text, which is content if `is_broken`.
    """

    def __init__(self, read: Reader, end: str, names: Collection[str], mark: str, index: int) -> None:
        self._reader, self._end, self._names = read, end, names
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
            found = self._reader(text)
            self.calls = [(name, json.dumps(value, ensure_ascii=False, allow_nan=False)) for name, value in found or ()]
            "".join(arguments for _, arguments in self.calls).encode()
        except (ValueError, TypeError, RecursionError):  # no JSON has such values, half characters among them
            self.calls = []
        if all(name in self._names for name, _ in self.calls) and self.calls:
            self.is_done = True
        else:
            self.calls, self.is_broken = [], True


def read_python(text: str) -> list[tuple[str, dict[str, Any]]] | None:
    """Read `[f(a="x", b=2), g()]`, or calls on lines of their own, with literals of Python or JSON; see `Reader`."""
    body = _parsed(text)
    if body is None:
        return None
    items: list[ast.expr | None] = []
    for line in body:
        value = line.value if isinstance(line, ast.Expr) else None
        items += value.elts if isinstance(value, (ast.List, ast.Tuple)) else [value]
    calls = []
    for item in items:
        if not isinstance(item, ast.Call) or item.args:
            return None
        name = ast.unparse(item.func)
        calls.append((name, {str(word.arg): _literal(word.value) for word in item.keywords if word.arg is not None}))
    return calls


_STRING = re.compile(r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*\'""", re.S)
_ESCAPES = {"\n": "\\n", "\r": "\\r", "\0": "\\x00", "\\\n": "\\\\\\n"}


def _parsed(text: str) -> list[ast.stmt] | None:
    """The statements of a text in Python, whose strings may go over several lines, as models write programs."""

    def on_one_line(string: re.Match[str]) -> str:
        return re.sub(r"\\.|[\n\r\0]", lambda char: _ESCAPES.get(char[0], char[0]), string[0], flags=re.S)

    for is_repaired in (False, True):
        try:
            return ast.parse(_STRING.sub(on_one_line, text.strip()) if is_repaired else text.strip()).body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            pass
    return None


def read_value(text: str) -> Any:
    """Read a value as Python or JSON writes it. ValueError, TypeError, RecursionError: it is none."""
    body = _parsed(text) or ()
    if len(body) != 1 or not isinstance(body[0], ast.Expr):
        raise ValueError("no value")
    return _literal(body[0].value)


_WORDS = {"true": True, "false": False, "null": None}


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {_literal(key): _literal(value) for key, value in pairs if key is not None}
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):  # JSON knows lists alone
        return [_literal(value) for value in node.elts]
    return ast.literal_eval(node)


def gemma_reader(quote: str) -> Reader:
    """Make the reader of `call:NAME{key:value}`, where texts stand between two quotes such as `<escape>`."""

    def read(text: str) -> list[tuple[str, dict[str, Any]]] | None:
        head = re.match(r"\s*call:([^{}\s]+)(?=\{)", text)
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
    word = re.compile(r"[^,\]}\s]+").match(text, place)
    if word is None:
        raise ValueError(f"no value at {place}")
    return json.loads({"None": "null", "True": "true", "False": "false"}.get(word[0], word[0])), word.end()


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
