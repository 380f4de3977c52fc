"""A name that begins with an underscore belongs to its package: no other package of infinilm uses it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "infinilm"
TREES = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
MODULES = {"_core", "_source_tree", "_version"}  # modules, which the floors of `test_layers.py` hold


def home(path: Path) -> str:
    """The package or module of `infinilm` that a file belongs to."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in MODULES


def defined_names(tree: ast.AST) -> set[str]:
    """Private names that a module gives to functions, classes, variables and attributes."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return {name for name in names if is_private(name)}


def used_names(tree: ast.AST) -> set[tuple[int, str]]:
    """Private names that a module takes from another object or module, with their lines."""
    uses: set[tuple[int, str]] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not is_own and is_private(node.attr):
                uses.add((node.lineno, node.attr))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("infinilm"):
            uses |= {(node.lineno, alias.name) for alias in node.names if is_private(alias.name)}
    return uses


DEFINED: dict[str, set[str]] = {}
for _path, _tree in TREES.items():
    DEFINED.setdefault(home(_path), set()).update(defined_names(_tree))


def reaches(path: Path) -> list[str]:
    """Uses of private names that only other packages define."""
    here = home(path)
    elsewhere: set[str] = set().union(*(names for name, names in DEFINED.items() if name != here))
    foreign = elsewhere - DEFINED[here]
    return [f"{path.name}:{line}: {name}" for line, name in sorted(used_names(TREES[path])) if name in foreign]


@pytest.mark.parametrize("path", TREES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_package_uses_private_names_of_another(path: Path) -> None:
    assert not reaches(path)


SCRIPTS = {path: ast.parse(path.read_text()) for path in sorted((PACKAGE.parent / "bench").glob("*.py"))}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_benchmarks_use_public_names(path: Path) -> None:
    own: set[str] = set().union(*map(defined_names, SCRIPTS.values()))
    foreign = set().union(*DEFINED.values()) - own
    assert [name for _, name in sorted(used_names(SCRIPTS[path])) if name in foreign] == []


def test_a_private_name_is_found() -> None:
    """`bench` once read the engine of an `LLM` by its private name."""
    assert used_names(ast.parse("llm._engine.time_ops(True)")) == {(1, "_engine")}
    assert "_engine" in DEFINED["llm"] - DEFINED["bench"]
