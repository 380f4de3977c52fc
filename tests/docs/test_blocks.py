"""Documents do what they say: Python blocks run in order, in one namespace, and the guide has every public name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import infinilm

ROOT = Path(__file__).resolve().parents[2]
NEED_A_SERVER = {"serving.md"}  # its blocks are clients of a running server: tests/server/test_docs.py runs them
DOCUMENTS = [
    path
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if "```python" in path.read_text() and path.name not in NEED_A_SERVER
]


def test_documents_have_blocks() -> None:
    assert {"README.md", "guide.md", "guide-engine.md"} <= {path.name for path in DOCUMENTS}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_blocks_run(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # what a block writes is written here
    text = document.read_text(encoding="utf-8")
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    assert text.count("```python") == len(blocks)
    namespace: dict[str, object] = {"__name__": "document"}
    for block in blocks:
        line = text.count("\n", 0, block.start(1))
        code = compile("\n" * line + block[1], str(document), "exec")  # a traceback names the document's own line
        exec(code, namespace)


def test_the_real_model_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its block names a model of the hub, which is not fetched here: the bundled one stands in for it."""
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"^```py\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert '"Qwen/Qwen3-0.6B"' in block
    exec(compile(block.replace('"Qwen/Qwen3-0.6B"', '"demo"'), "README.md", "exec"), {"__name__": "document"})


@pytest.mark.parametrize("name", infinilm.__all__)
def test_public_names(name: str) -> None:
    """guide.md names every public name; its parameters and fields are in api.md, which is made of the docstrings."""
    guide = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$", "", guide, flags=re.MULTILINE | re.DOTALL)
    assert name in re.findall(r"\w+", " ".join(re.findall(r"`[^`]+`", prose)))
