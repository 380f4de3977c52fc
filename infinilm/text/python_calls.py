"""Calls and values in Python's syntax, as models write them that were taught it: `[f(a="x", b=2), g()]`."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

__all__ = ["read_python", "read_value"]


def read_python(text: str) -> list[tuple[str, dict[str, Any]]] | None:
    """Read `[f(a="x", b=2), g()]`, or calls on lines of their own, with literals of Python or JSON.

    Calls may be JSON as well, `[{"name": "f", "arguments": {}}]`, which these models write where a prompt asks for it.
    None: they are no calls.
    """
    if (as_json := _json_calls(text)) is not None:
        return as_json
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


def _json_calls(text: str) -> list[tuple[str, dict[str, Any]]] | None:
    try:
        loaded = json.loads(text)
    except (ValueError, RecursionError):
        return None
    calls = []
    for item in loaded if isinstance(loaded, list) else [loaded]:
        name = item.get("name") if isinstance(item, dict) else None
        arguments = item.get("arguments", item.get("parameters", {})) if isinstance(item, dict) else None
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        calls.append((name, arguments))
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
