"""The walk through the delta rule in docs/design/sublayers.md: each step leads to what it names."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/design/sublayers.md"
FILE = re.compile(r"[\w.]+(?:/[\w.]+)+|README\.md")


def walk() -> str:
    return PAGE.read_text(encoding="utf-8").partition("## A walk: the delta rule\n")[2].partition("\n## ")[0]


def test_each_name_is_in_its_file() -> None:
    """'`name` in `file`': the file has the name, also where it is defined within a namespace."""
    steps = re.findall(r"`([^`\n]+)`\s+in\s+`([^`\n]+)`", walk())
    assert len(steps) > 10
    missing = [f"{name} in {file}" for name, file in steps if name not in (ROOT / file).read_text(encoding="utf-8")]
    assert not missing


def test_each_file_exists() -> None:
    files = [name for name in re.findall(r"`([^`\n]+)`", walk()) if FILE.fullmatch(name)]
    assert len(set(files)) > 10
    assert not [name for name in files if not (ROOT / name).exists()]


def test_it_begins_where_a_reader_does() -> None:
    """README leads to the architecture, which leads to the folder of kinds and to the page itself."""
    assert "(docs/architecture.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
    architecture = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    assert "`sublayers/*`" in architecture and "(design/sublayers.md)" in architecture


def test_what_the_walk_runs_is_declared() -> None:
    text = (ROOT / "src/ops/ops.h").read_text(encoding="utf-8")
    assert all(f"void {op}(" in text for op in ("causal_conv", "delta_rule"))


def test_every_kind_has_the_files_that_the_page_promises() -> None:
    folder = ROOT / "src/model/sublayers"
    kinds = sorted(path.name.removesuffix("_spec.h") for path in folder.glob("*_spec.h"))
    kinds = [kind for kind in kinds if kind not in ("sublayer", "mixer")]
    assert {"attention", "delta", "latent", "mlp", "experts", "own_vectors"} <= set(kinds)
    for kind in kinds:
        assert (folder / f"{kind}.h").exists() and (folder / f"{kind}.cpp").exists(), kind
