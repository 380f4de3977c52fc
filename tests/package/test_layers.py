"""Imports go down: a floor of the Python package knows the floors below it, and nothing of those above."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "infinilm"

# From the ground up. A name is a module or package of `infinilm`; those of one line know nothing of each other.
FLOORS = (
    ("_core", "_source_tree", "_version", "errors"),  # _core is the compiled module, the build writes _version
    ("checks", "extras", "files", "keywords", "logs", "progress", "signatures", "unsupported"),
    ("json_content", "json_keywords", "json_references", "json_strings", "type_schemas"),
    ("json_disjoint",),
    ("json_schema", "patterns"),
    ("grammar_text",),
    ("constraint", "receipts", "beams"),
    ("sampling_params", "outputs", "devices", "token_ids", "vocabulary"),
    ("gguf", "mistral_params"),
    ("model_files", "hub"),
    ("config", "text", "distributed", "pooling", "images"),
    ("checkpoint", "cache"),
    ("engine", "generation", "lora", "speculation"),
    ("models", "scheduling"),
    ("planning", "requests"),
    ("tiers",),
    ("pipeline", "serving"),
    ("calls",),
    ("llm",),
    ("bench", "debug"),
    ("server",),
    ("router",),
    ("ray",),
    ("cli",),
    ("__main__",),
)
FLOOR_OF = {name: number for number, names in enumerate(FLOORS) for name in names}

# The module itself hands on public names and imports nothing early; only the top may ask it for what it is.
ROOT_IS_KNOWN_TO = {"cli", "__main__"}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(path: Path) -> set[str]:
    """Modules of this package that a file imports anywhere: at the top, inside functions, and for type checking alone.

    "" is the package itself.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import in line {node.lineno}"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                is_module = full == "infinilm._core" or full.removeprefix("infinilm.") in MODULES
                found.add(full if is_module else str(node.module))
    ours = {name for name in found if name.split(".")[0] == "infinilm"}
    return {name.removeprefix("infinilm").removeprefix(".") for name in ours}


@cache
def edges() -> dict[str, set[str]]:
    """What each module imports."""
    return {name: imports(path) for name, path in MODULES.items() if name}


def test_every_module_has_a_floor() -> None:
    assert {name.split(".")[0] for name in MODULES if name} | {"_core", "_version"} == set(FLOOR_OF)


def goes_down(module: str, imported: str) -> bool:
    home, floor = module.split(".")[0], imported.split(".")[0]
    if floor == "":  # the package itself
        return home in ROOT_IS_KNOWN_TO
    return floor == home or FLOOR_OF[floor] < FLOOR_OF[home]


def test_imports_go_down() -> None:
    assert [
        f"{module} imports {imported or 'the package itself'}, which is not below it"
        for module, known in edges().items()
        for imported in sorted(known)
        if not goes_down(module, imported)
    ] == []


# Rooms of `config`, from the ground up.
CONFIG_ROOMS = ("sublayers", "fields", "families", "spec", "json", "towers")


def test_rooms_of_config() -> None:
    def room(module: str) -> int:
        return CONFIG_ROOMS.index(module.split(".")[1])

    assert [
        f"{module} imports {imported}, which is not below it"
        for module, known in edges().items()
        for imported in sorted(known)
        if module.startswith("config.") and imported.startswith("config.") and room(imported) > room(module)
    ] == []


def test_no_circles() -> None:
    """Inside a package, too, and also not for type checking alone."""
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, f"circle: {' -> '.join((*way[way.index(module) :], module))}"
        if module in done:
            return
        for imported in edges().get(module, ()):
            visit(imported, (*way, module))
        done.add(module)

    for module in edges():
        visit(module, ())


def test_sublayers_of_the_reference_know_no_other_kind() -> None:
    """As in C++: a kind knows the step and what it is made of, and the decoder knows all kinds."""
    rooms = {name for name in MODULES if name.startswith("models.reference.")}
    made_of = {"attention": {"indexer"}, "latent": {"attention", "indexer"}, "experts": {"mlp"}}
    for kind in ("attention", "indexer", "latent", "delta", "mlp", "experts", "own_vectors", "stream"):
        known = {name.rpartition(".")[2] for name in edges()[f"models.reference.{kind}"] & rooms}
        assert known <= {"step", "ops"} | made_of.get(kind, set()), kind


def test_the_page_has_the_same_floors() -> None:
    """docs/architecture.md lists the modules from the top to the ground."""
    page = (PACKAGE.parent / "docs/architecture.md").read_text()
    section = page.partition("## Python modules")[2].partition("\n# ")[0]
    listed = [
        re.findall(r"`([\w.]+)`", entry.partition("`:")[0] + "`")
        for entry in re.findall(r"^- (.*)", section, re.MULTILINE)
    ]
    names = [name.removesuffix(".py") for entry in listed for name in entry]
    floors = [FLOOR_OF[name] for name in names]
    assert floors == sorted(floors, reverse=True)
    assert set(FLOOR_OF) - set(names) == {"_source_tree", "_version", "__main__"}
