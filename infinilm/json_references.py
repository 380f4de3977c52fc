"""References within a JSON schema: which schema a `$ref` names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

__all__ = ["References", "each_part_once", "escaped", "parts_of"]

_MOST_COPIED = 200  # levels of a schema, which may have fewer


class References:
    """Finds the schemas that `$ref` names: by pointers, `$id` and `$anchor`.

    Parameters
    ----------
    root : mapping

    Attributes
    ----------
    schemas : list of mapping
        All of them, the root first.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._pointers = {"": "#"}
        self._targets: dict[str, str | None] = {}
        self._found: dict[str, Any] = {}
        self.schemas: list[Mapping[str, Any]] = []
        waiting: list[tuple[str, Any]] = [("#", root)]
        while waiting:
            pointer, node = waiting.pop()
            if isinstance(node, Mapping):
                self.schemas.append(node)
                for key, sign in (("$id", ""), ("id", ""), ("$anchor", "#")):
                    if isinstance(node.get(key), str):
                        self._pointers.setdefault(sign + node[key].rstrip("#"), pointer)
                waiting += [(f"{pointer}/{escaped(key)}", value) for key, value in node.items()]
            elif isinstance(node, list):
                waiting += [(f"{pointer}/{i}", value) for i, value in enumerate(node)]

    def pointer(self, reference: str) -> str | None:
        """Where the schema stands that a `$ref` names, such as "#/$defs/a"; None: not within this schema."""
        if reference not in self._targets:
            self._targets[reference] = self._pointer(reference)
        return self._targets[reference]

    def _pointer(self, reference: str) -> str | None:
        base, _, fragment = reference.partition("#")
        if fragment and not fragment.startswith("/"):
            return self._pointers.get(f"#{fragment}")
        start = self._pointers.get(base)
        pointer = None if start is None else start + unquote(fragment)
        return pointer if pointer is not None and isinstance(self.find(pointer), (Mapping, bool)) else None

    def find(self, pointer: str) -> Any:
        """What stands there; None: nothing."""
        if pointer not in self._found:
            self._found[pointer] = self._find(pointer)
        return self._found[pointer]

    def _find(self, pointer: str) -> Any:
        node: Any = self._root
        for part in parts_of(pointer):
            if isinstance(node, Mapping):
                node = node.get(part)
            else:
                is_place = isinstance(node, list) and part.isdecimal() and len(part) < 9 and int(part) < len(node)
                node = node[int(part)] if is_place else None
        return node

    def target(self, schema: Any) -> Any:
        """The schema that a schema refers to; None: it refers to none."""
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        pointer = self.pointer(reference) if isinstance(reference, str) else None
        return None if pointer is None else self.find(pointer)


def parts_of(pointer: str) -> list[str]:
    """The names on the way to what a pointer such as "#/$defs/a" names."""
    return [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]


def escaped(name: str) -> str:
    """A name as a pointer has it."""
    return name.replace("~", "~0").replace("/", "~1")


def each_part_once(node: Any, depth: int = 0) -> Any:
    """A copy of a schema in which no object stands in two places: what is known of a part is kept by its identity."""
    if depth < _MOST_COPIED and isinstance(node, Mapping):
        return {key: each_part_once(value, depth + 1) for key, value in node.items()}
    if depth < _MOST_COPIED and isinstance(node, list):
        return [each_part_once(value, depth + 1) for value in node]
    return node
