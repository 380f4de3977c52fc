"""docs/serving.md: its clients against a server that runs with its defaults."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.support import SECONDS, started

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(python|sh)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
PYTHON = [code for kind, code in BLOCKS if kind == "python"]
CURL = [code for kind, code in BLOCKS if kind == "sh" and code.startswith("curl ") and "/chat/completions" in code]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with started("-m", "infinilm", "serve", "--port", "0", folder=tmp_path_factory.mktemp("docs")) as server:
        yield server.url


def of(code: str, url: str) -> str:
    """A block whose server is the one that runs."""
    return code.replace("http://127.0.0.1:8000", url)


def test_there_are_blocks() -> None:
    assert any("from openai import" in code for code in PYTHON) and CURL


def test_python(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In order, in one namespace; without those of clients that are not installed here."""
    namespace: dict[str, object] = {"__name__": "document"}
    for code in PYTHON:
        tree = ast.walk(ast.parse(code))
        imports = [a.name for node in tree if isinstance(node, ast.Import) for a in node.names]
        imports += [str(node.module) for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
        if all(importlib.util.find_spec(name.split(".")[0]) for name in imports):
            exec(compile(of(code, url), "serving.md", "exec"), namespace)
    assert capsys.readouterr().out.strip()  # the first prints its answer


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
@pytest.mark.parametrize("code", CURL)
def test_curl(code: str, url: str) -> None:
    done = subprocess.run(["sh", "-c", of(code, url)], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["choices"][0]["message"]["content"]
