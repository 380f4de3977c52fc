"""The floors of the C++ code: what each folder may include, read from its #include lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# From the bottom up: what a folder may include besides itself. An entry names folders above it in this list only.
MAY_INCLUDE: dict[str, tuple[str, ...]] = {
    "src/args": (),
    "src/core": ("src/args",),
    "src/numerics": (),
    "src/gguf": ("src/core",),
    "src/codes": ("src/numerics", "src/core"),
    "src/lookup": ("src/core",),
    "src/cpu/kernels": ("src/numerics", "src/args"),
    "src/ops": (
        "src/core",
        "src/args",
    ),
    "src/cpu": ("src/cpu/kernels", "src/ops", "src/numerics", "src/gguf", "src/core", "src/args"),
    "cuda/emulator": (),
    "cuda/core": ("cuda/emulator", "src/core", "src/args"),
    "cuda/attention": ("cuda/core", "src/ops", "src/numerics", "src/core", "src/args"),
    "cuda/linear": ("cuda/attention", "cuda/core", "src/ops", "src/numerics", "src/core", "src/args"),
    "cuda/rows": ("cuda/linear", "cuda/core", "src/ops", "src/core", "src/args"),
    "cuda/delta": ("cuda/core", "src/ops", "src/core", "src/args"),
    "cuda/experts": ("cuda/linear", "cuda/core", "src/ops", "src/core", "src/args"),
    "cuda/sampling": ("cuda/core", "src/ops", "src/core"),
    "cuda/ranks": ("cuda/rows", "cuda/core", "src/ops", "src/core"),
    "cuda/host": (
        *("cuda/ranks", "cuda/sampling", "cuda/experts", "cuda/delta", "cuda/rows", "cuda/linear", "cuda/attention"),
        *("cuda/core", "src/ops", "src/core"),
    ),
    "src/dist": ("src/ops", "src/core"),
    "src/model": ("src/dist", "src/ops", "src/core"),
    "src/engine": ("src/model", "src/dist", "src/cpu", "src/ops", "src/gguf", "src/core"),
    "src/bind": (
        *("src/engine", "src/model", "src/dist", "src/cpu", "src/ops", "src/gguf", "src/codes", "src/lookup"),
        "src/core",
    ),
}
# What of src/model puts kinds of sublayers together; all else there knows no kind.
ABOVE_KINDS = ("model/model.h", "model/decoder.h", "model/logits.h", "model/params.h")
# What of src/model puts their specifications together.
OF_SPECS = ("model/spec.h",)
# Files that several kinds share, and kinds that are made of others.
SHARED = ("mixer", "paged", "sublayer")
MADE_OF = {"attention": ("indexer",), "experts": ("mlp",), "latent": ("indexer",), "shared_block": ("attention", "mlp")}
SUFFIXES = (".h", ".cpp", ".cu", ".cuh")


def floor_of(path: Path) -> str:
    """The folder of the list that a file is in: `src/model` for a file of `src/model/sublayers`."""
    folders = [folder for folder in MAY_INCLUDE if path.is_relative_to(ROOT / folder)]
    assert folders, f"{path.relative_to(ROOT)}: its folder has no floor; add it to MAY_INCLUDE"
    return max(folders, key=len)


def sources() -> Iterator[Path]:
    for top in ("src", "cuda"):
        yield from (path for path in sorted((ROOT / top).rglob("*")) if path.suffix in SUFFIXES)


def included(path: Path) -> Iterator[tuple[str, str]]:
    """(file, its folder) of each include in quotes."""
    for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.MULTILINE):
        found = [base / name for base in (path.parent, ROOT, ROOT / "src") if (base / name).exists()]
        assert found, f'{path.relative_to(ROOT)}: "{name}" is no file of the project'
        yield name, floor_of(found[0].resolve())


def upward(path: Path, folder: str) -> list[str]:
    """The includes of a file that its folder may not have."""
    allowed = (folder, *MAY_INCLUDE[folder])
    return [name for name, of in included(path) if of not in allowed]


def test_the_list_goes_upwards() -> None:
    below: set[str] = set()
    for folder, allowed in MAY_INCLUDE.items():
        assert set(allowed) <= below, folder
        below.add(folder)


@pytest.mark.parametrize("folder", MAY_INCLUDE)
def test_nothing_includes_upwards(folder: str) -> None:
    files = [path for path in sources() if floor_of(path) == folder]
    assert files
    found = {str(path.relative_to(ROOT)): names for path in files if (names := upward(path, folder))}
    assert not found


def test_an_upward_include_is_found() -> None:
    """src/engine knows all but src/bind, so as a file of any lower folder it includes upwards."""
    path = ROOT / "src/engine/infer_engine.cpp"
    assert not upward(path, "src/engine")
    for folder in ("src/core", "src/ops", "src/cpu", "src/dist", "src/model"):
        assert upward(path, folder)


def test_a_kind_of_sublayer_knows_no_other() -> None:
    """A kind has its own files, which include what all kinds stand on, and others only where it is made of them."""
    for path in sorted((ROOT / "src/model/sublayers").iterdir()):
        kind = path.stem.removesuffix("_spec")
        known = {kind, *SHARED, *MADE_OF.get(kind, ())}
        for name, _ in included(path):
            assert name not in ABOVE_KINDS, path.name
            assert not name.startswith("model/sublayers/") or Path(name).stem.removesuffix("_spec") in known, (
                path,
                name,
            )


def test_what_a_kind_says_of_itself_stands_on_numbers_alone() -> None:
    """The specification of a kind needs no weights and no step: a plan of memory is made of it alone."""
    for path in sorted((ROOT / "src/model/sublayers").glob("*_spec.h")):
        names = [name for name, _ in included(path)]
        assert all(name.startswith("core/") or name.endswith(("_spec.h", "/shard.h")) for name in names), path.name


def test_what_kinds_stand_on_knows_no_kind() -> None:
    above = {Path(name).stem for name in (*ABOVE_KINDS, *OF_SPECS)}
    for path in sorted((ROOT / "src/model").glob("*.*")):
        if path.stem in above:
            continue
        assert not [name for name, _ in included(path) if name.startswith("model/sublayers/")], path.name


def test_no_file_includes_itself_by_way_of_others() -> None:
    includes = {
        str(path.relative_to(ROOT / "src" if path.is_relative_to(ROOT / "src") else ROOT)): [
            name for name, _ in included(path)
        ]
        for path in sources()
        if path.suffix in (".h", ".cuh")
    }
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " -> ".join((*way, name))
        if name not in done:
            for other in includes.get(name, ()):
                visit(other, (*way, name))
            done.add(name)

    for name in includes:
        visit(name, ())


def test_the_page_has_the_same_folders() -> None:
    """docs/architecture.md says of each folder of src what it may include; src/cpu calls its kernels its own."""
    page = " ".join((ROOT / "docs/architecture.md").read_text().split())
    listed = dict(re.findall(r"- `(src/[\w/]+)`\. Contents: .*?May include: (.*?)\.", page))
    names = {folder: set(names.replace("its kernels", "cpu/kernels").split(", ")) for folder, names in listed.items()}
    held = {
        folder: {name.removeprefix("src/") for name in names} or {"nothing"}
        for folder, names in MAY_INCLUDE.items()
        if folder.startswith("src/")
    }
    assert names == held
