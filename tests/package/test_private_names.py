"""A name that begins with an underscore belongs to its package: no other package of infinilm uses it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "infinilm"
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


def trees(folder: Path) -> dict[Path, ast.AST]:
    return {path: ast.parse(path.read_text()) for path in sorted(folder.rglob("*.py"))}


@cache
def package() -> tuple[dict[Path, ast.AST], dict[str, set[str]]]:
    """The files of `infinilm`, and the private names that each of its packages defines."""
    defined: dict[str, set[str]] = {}
    files = trees(PACKAGE)
    for path, tree in files.items():
        defined.setdefault(home(path), set()).update(defined_names(tree))
    return files, defined


def test_no_package_uses_private_names_of_another() -> None:
    files, defined = package()
    foreign = {here: set().union(*(names for name, names in defined.items() if name != here)) for here in defined}
    assert [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for path, tree in files.items()
        for line, name in sorted(used_names(tree))
        if name in foreign[home(path)] - defined[home(path)]
    ] == []


def test_benchmarks_use_public_names() -> None:
    scripts = trees(PACKAGE.parent / "bench")
    own: set[str] = set().union(*map(defined_names, scripts.values()))
    foreign = set().union(*package()[1].values()) - own
    assert [
        f"{path.name}:{line}: {name}"
        for path, tree in scripts.items()
        for line, name in sorted(used_names(tree))
        if name in foreign
    ] == []


def test_a_private_name_is_found() -> None:
    """`bench` once read the engine of an `LLM` by its private name."""
    assert used_names(ast.parse("llm._engine.time_ops(True)")) == {(1, "_engine")}
    _, defined = package()
    assert "_engine" in defined["llm"] - defined["bench"]
