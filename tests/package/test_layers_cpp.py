"""The floors of the C++ code: what each folder may include, read from its #include lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# From the bottom up: what a folder may include besides itself. An entry names folders above it in this list only.
MAY_INCLUDE: dict[str, tuple[str, ...]] = {
    "src/core": (),
    "src/numerics": (),
    "src/gguf": ("src/core",),
    "src/codes": ("src/numerics", "src/core"),
    "src/cpu/kernels": ("src/numerics",),
    "src/ops": ("src/core",),
    "src/cpu": ("src/cpu/kernels", "src/ops", "src/numerics", "src/gguf", "src/core"),
    "cuda": ("src/ops", "src/numerics", "src/core"),
    "src/dist": ("src/ops", "src/core"),
    "src/model": ("src/dist", "src/ops", "src/core"),
    "src/engine": ("src/model", "src/dist", "src/cpu", "src/ops", "src/core"),
    "src/bind": ("src/engine", "src/model", "src/dist", "src/cpu", "src/ops", "src/gguf", "src/codes", "src/core"),
}
# What of src/model puts kinds of sublayers together; all else there knows no kind.
ABOVE_KINDS = ("model/model.h", "model/decoder.h", "model/logits.h", "model/params.h")
# Files that several kinds share, and kinds that are made of others.
SHARED = ("mixer", "paged")
MADE_OF = {"experts": ("mlp",)}
SUFFIXES = (".h", ".cpp", ".cu", ".cuh")


def floor_of(path: Path) -> str:
    """The folder of the list that a file is in: `cuda` for a file of `cuda/emulator`."""
    folders = [folder for folder in MAY_INCLUDE if path.is_relative_to(ROOT / folder)]
    assert folders, f"{path.relative_to(ROOT)}: its folder has no floor; add it to MAY_INCLUDE"
    return max(folders, key=len)


def sources() -> Iterator[Path]:
    for top in ("src", "cuda"):
        yield from (path for path in sorted((ROOT / top).rglob("*")) if path.suffix in SUFFIXES)


def included(path: Path) -> Iterator[tuple[str, str]]:
    """(file, its folder) of each include in quotes."""
    for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.MULTILINE):
        found = [base / name for base in (path.parent, ROOT / "src", ROOT / "cuda") if (base / name).exists()]
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
        known = {path.stem, *SHARED, *MADE_OF.get(path.stem, ())}
        for name, _ in included(path):
            assert name not in ABOVE_KINDS, path.name
            assert not name.startswith("model/sublayers/") or Path(name).stem in known, (path.name, name)


def test_what_kinds_stand_on_knows_no_kind() -> None:
    above = {Path(name).stem for name in ABOVE_KINDS}
    for path in sorted((ROOT / "src/model").glob("*.*")):
        if path.stem in above:
            continue
        assert not [name for name, _ in included(path) if name.startswith("model/sublayers/")], path.name


def test_no_file_includes_itself_by_way_of_others() -> None:
    includes = {
        str(path.relative_to(ROOT / "src")): [name for name, _ in included(path)]
        for path in sorted((ROOT / "src").rglob("*.h"))
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
