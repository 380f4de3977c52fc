"""What is installed: every module and file, and an import that is cheap and touches nothing."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import infinilm
from infinilm.extras import how_to_install

SOURCE = Path(__file__).parents[2] / "infinilm"
INSTALLED = Path(infinilm.__file__).parent


def test_every_file_is_installed() -> None:
    """Also the type stub, py.typed and the bundled model."""
    if INSTALLED == SOURCE:
        pytest.skip("an editable install")
    kept = {".py", ".pyi", ".typed", ".json", ".safetensors", ".jinja", ".html", ".css", ".js"}
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
    """Names that are imported for type checkers are loaded on first use from the same modules."""
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imported = {
        alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert imported == infinilm._LAZY
    for name in infinilm.__all__:
        assert getattr(infinilm, name) is not None
    assert set(imported) < set(infinilm.__all__)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with a source tree: Python started there finds it before the installed package."""
    shutil.copytree(SOURCE, tmp_path / "checkout/infinilm", ignore=shutil.ignore_patterns("*.so", "assets"))
    return tmp_path / "checkout"


def run_without_packages(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """-S: nothing is installed, and the finder of an editable install does not run."""
    command = [sys.executable, "-S", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env={"PATH": os.environ["PATH"]})


def test_a_source_tree_says_that_it_is_one(checkout: Path) -> None:
    """Where no package is installed that could take its place."""
    code = "try: from infinilm import _core\nexcept ImportError as error: print(error)"
    message = "has no compiled core: it is a source tree. Install it with 'pip install .'"
    assert message in run_without_packages(checkout, "-c", code).stdout
    done = run_without_packages(checkout, "-m", "infinilm", "info")
    assert done.returncode == 1 and message in done.stderr and done.stderr.count("\n") == 1


def test_a_source_tree_gives_way_to_the_installed_package(checkout: Path, tmp_path: Path) -> None:
    """As a whole: what is imported afterwards comes from there, too, by any name."""
    installed = tmp_path / "site/infinilm"
    (installed / "text").mkdir(parents=True)
    (installed / "__init__.py").write_text("from infinilm._version import __version__\n")
    (installed / "_version.py").write_text('__version__ = "7.0.0"\n')
    for name in ("errors", "text/__init__", "__main__"):
        (installed / f"{name}.py").write_text("print(__name__, __file__)\n")
    code = (
        "import sys; sys.path.append(sys.argv[1])\n"
        "import infinilm.text, infinilm.errors\n"
        "from infinilm import __version__\n"
        "print(__version__, infinilm.__version__, infinilm.__file__, infinilm is sys.modules['infinilm'])\n"
        "import runpy; runpy.run_module('infinilm', run_name='__main__')\n"
    )
    done = run_without_packages(checkout, "-c", code, str(installed.parent))
    assert done.stdout.splitlines() == [
        f"infinilm.text {installed / 'text/__init__.py'}",
        f"infinilm.errors {installed / 'errors.py'}",
        f"7.0.0 7.0.0 {installed / '__init__.py'} True",
        f"__main__ {installed / '__main__.py'}",
    ], done.stderr


def test_cuda_library_says_why_it_is_not_usable(tmp_path: Path) -> None:
    """Where the library was built, it opens without a driver and says so."""
    if not (INSTALLED / "libinfinilm_cuda.so").exists():
        pytest.skip("built without nvcc")
    cuda = infinilm.backends()["cuda"]
    assert cuda["available"] or "driver" in cuda["reason"] or "device" in cuda["reason"]


def test_version() -> None:
    """One number, which the build writes into the metadata and into the package."""
    assert infinilm.__version__ == importlib.metadata.version("infinilm")


def test_how_to_install_what_is_optional() -> None:
    """By the names of the packages: they are on every index, whatever infinilm itself was installed from."""
    assert re.fullmatch(r"pip install 'llguidance[<>=,.\d]+'", how_to_install("constraint"))
    told = how_to_install("router")
    for package in ("aiohttp", "starlette", "uvicorn", "llguidance"):
        assert re.search(rf" '{package}[<>]", told)
    assert "infinilm" not in told
    assert how_to_install("unheard-of") == "pip install 'infinilm[unheard-of]'"
