"""What is installed: every module and file, and an import that is cheap and touches nothing."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import infinilm

SOURCE = Path(__file__).parents[2] / "infinilm"
INSTALLED = Path(infinilm.__file__).parent


def test_every_file_is_installed() -> None:
    """Also the type stub, py.typed and the bundled model."""
    if INSTALLED == SOURCE:
        pytest.skip("an editable install")
    kept = {".py", ".pyi", ".typed", ".json", ".safetensors", ".jinja"}
    wanted = {p.relative_to(SOURCE) for p in SOURCE.rglob("*") if p.suffix in kept or p.name == "py.typed"}
    assert {Path("py.typed"), Path("_core.pyi"), Path("llm.py")} <= wanted
    missing = [str(p) for p in sorted(wanted) if not (INSTALLED / p).exists()]
    assert not missing


def run(code: str, folder: Path) -> str:
    """The output of Python code in a folder without a source tree, which would be imported instead."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=folder).stdout


def test_import_is_cheap(tmp_path: Path) -> None:
    """Importing loads neither numpy nor the core, so neither a device nor a thread pool: classes come on first use."""
    loaded = run("import sys, infinilm; print(*sys.modules)", tmp_path).split()
    heavy = {"numpy", "tokenizers", "jinja2", "safetensors", "tqdm", "infinilm._core", "infinilm.llm"}
    assert "infinilm" in loaded and not heavy & set(loaded)


def test_type_checkers_and_users_see_the_same_names() -> None:
    """What is imported for type checkers is what is loaded on first use, from the same modules."""
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imported = {
        alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert imported == infinilm._LAZY
    for name in infinilm.__all__:
        assert getattr(infinilm, name) is not None
    assert set(imported) < set(infinilm.__all__)


def test_a_source_tree_says_that_it_is_one(tmp_path: Path) -> None:
    """Without its compiled core, as when Python is started in a checkout."""
    shutil.copytree(SOURCE, tmp_path / "infinilm", ignore=shutil.ignore_patterns("*.so", "assets"))
    code = "try: from infinilm import _core\nexcept ImportError as error: print(error)"
    # -S: an editable install would import the core from where it was built.
    said = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "has no compiled core: it is a source tree. Install it with 'pip install .'" in said.stdout


def test_cuda_library_says_why_it_is_not_usable(tmp_path: Path) -> None:
    """Where the library was built, it opens without a driver and says so."""
    if not (INSTALLED / "libinfinilm_cuda.so").exists():
        pytest.skip("built without nvcc")
    cuda = infinilm.backends()["cuda"]
    assert cuda["available"] or "driver" in cuda["reason"] or "device" in cuda["reason"]


def test_version() -> None:
    assert infinilm.__version__.count(".") == 2
