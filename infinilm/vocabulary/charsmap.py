"""How SentencePiece replaces characters before it cuts a text: the longest text of a table, from left to right.

Source: normalizer.cc of google/sentencepiece, whose `precompiled_charsmap` is a trie in a double array (darts-clone)
and the texts that it leads to. The tokenizers library reads the same table by graphemes, and there the shortest text
that it has, so that a combining mark can be lost; models of SentencePiece were not trained so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["CharacterRules", "CharacterTable"]

_LONGEST = 16  # characters of a text that is replaced: those of Unicode have at most four


class CharacterTable:
    """A `precompiled_charsmap`: texts that are replaced, and by which. It has some 200,000, and so is not unfolded.

    Raises
    ------
    ValueError
        It is damaged.
    """

    def __init__(self, data: bytes) -> None:
        size = int.from_bytes(data[:4], "little")
        if len(data) < 4 or size % 4 or size == 0 or 4 + size > len(data):
            raise ValueError("the table of characters is cut off")
        self._units = [int.from_bytes(data[at : at + 4], "little") for at in range(4, 4 + size, 4)]
        self._texts = data[4 + size :]

    def _children(self, place: int) -> list[tuple[int, int, bool]]:
        """The nodes behind one: a byte, where the children of that begin, and whether a text ends there."""
        found = []
        for byte in range(1, 256):
            unit = self._unit(place ^ byte)
            if unit & 0x800000FF == byte:
                found.append((byte, place ^ byte ^ _offset(unit), bool(unit & 0x100)))
        return found

    def _unit(self, place: int) -> int:
        return self._units[place] if place < len(self._units) else 0

    def longest(self, text: str) -> tuple[int, str]:
        """How many characters at the beginning of a text are replaced, at most, and by which; 0: none are."""
        place, end, value = _offset(self._unit(0)), 0, 0
        data = text[:_LONGEST].encode()
        for i, byte in enumerate(data):
            place ^= byte
            unit = self._unit(place)
            if byte == 0 or unit & 0x800000FF != byte:
                break
            place ^= _offset(unit)
            if unit & 0x100:
                end, value = i + 1, self._unit(place) & 0x7FFFFFFF
        stop = self._texts.find(b"\0", value)
        made = self._texts[value : stop if stop >= 0 else len(self._texts)]
        return len(data[:end].decode(errors="ignore")), made.decode(errors="replace")

    def begins(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]], list[tuple[int, int]]]:
        """Ranges of code points: those that are replaced alone, that begin longer texts, and that come second there."""
        alone, first, second = list[int](), list[int](), set[int]()
        todo = [(b"", _offset(self._unit(0)), False)]
        while todo:
            key, place, is_end = todo.pop()
            if key and len(key) == _size(key[0]):
                code = ord(key.decode(errors="replace")[:1])
                alone += [code] if is_end else []
                if more := {byte for byte, _, _ in self._children(place)}:
                    first.append(code)
                    second |= more
            elif len(key) < 4:
                todo += [(key + bytes([byte]), child, ends) for byte, child, ends in self._children(place)]
        ranges = ((b, b) if b < 128 else _of_lead(b) for b in sorted(second) if b < 128 or 0xC2 <= b < 0xF5)
        return [(code, code) for code in sorted(alone)], [(code, code) for code in sorted(first)], list(ranges)


def _offset(unit: int) -> int:
    """Where the children of a node begin, from the place of the node."""
    return (unit >> 10) << ((unit & 0x200) >> 6)


def _size(lead: int) -> int:
    """The bytes of a character whose first is this one."""
    return 1 if lead < 0x80 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4


def _of_lead(lead: int) -> tuple[int, int]:
    """The code points whose first byte is this one."""
    size = _size(lead)
    bits = 6 * (size - 1)
    begin = (lead & (0x7F >> size)) << bits
    return begin, min(begin + (1 << bits) - 1, 0x10FFFF)


class CharacterRules:
    """Replaces characters as SentencePiece does, outside of the tokens that are cut out of a text before.

    Parameters
    ----------
    table : CharacterTable
    tokens : iterable of str
        Added tokens: they stay, and none comes into being where characters are replaced, as `＜s＞` would become one.
        Such characters stay as they are.
    """

    def __init__(self, table: CharacterTable, tokens: Iterable[str] = ()) -> None:
        self._table = table
        alone, first, second = table.begins()
        some = [_class(alone)] if alone else []
        some += [f"{_class(first)}(?={_class(second)})"] if second else []
        self._begins = re.compile("|".join(some) or r"(?!)")
        kept = sorted(filter(None, tokens), key=len, reverse=True)
        self._tokens = re.compile("|".join(map(re.escape, kept)) or r"(?!)")

    def __call__(self, text: str) -> str:
        """The text as the model's vocabulary writes it."""
        made, at = list[str](), 0
        for token in self._tokens.finditer(text):
            made += [self._part(text[at : token.start()]), token[0]]
            at = token.end()
        return "".join([*made, self._part(text[at:])])

    def _part(self, text: str) -> str:
        made, at = list[str](), 0
        while (found := self._begins.search(text, at)) is not None:
            place = found.start()
            length, new = self._table.longest(text[place : place + _LONGEST])
            made += [text[at:place], new if length else text[place]]
            at = place + (length or 1)
        whole = "".join([*made, text[at:]])
        return text if made and self._tokens.search(whole) else whole


def _class(ranges: Iterable[tuple[int, int]]) -> str:
    """A class of characters."""
    return "[" + "".join(f"\\U{begin:08x}-\\U{end:08x}" for begin, end in ranges) + "]"
