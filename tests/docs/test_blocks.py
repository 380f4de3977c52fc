"""Documents do what they say: Python blocks run in order, in one namespace, and signatures are those of the code."""

from __future__ import annotations

import ast
import dataclasses
import inspect
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


def guide() -> str:
    return (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", infinilm.__all__)
def test_public_names(name: str) -> None:
    """guide.md names every public name, and every field of those that are dataclasses."""
    prose = re.sub(r"^```.*?^```$", "", guide(), flags=re.MULTILINE | re.DOTALL)
    code = set(re.findall(r"\w+", " ".join(re.findall(r"`[^`]+`", prose))))
    value = getattr(infinilm, name)
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) and name != "LlamaConfig" else ()
    assert {name, *(field.name for field in fields)} <= code


@pytest.mark.parametrize("name", ["SamplingParams", "RequestLimits"])
def test_field_tables(name: str) -> None:
    """The list of a class in guide.md has an entry for every field, with its default."""
    (section,) = re.findall(rf"^### {name}\n(.*?)^#", guide(), re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^(?:\| `|- `)(\w+)(?:` \| |`\. Default: )(.*?)(?: \||\. Meaning:)", section, re.MULTILINE)
    written = {field: ast.literal_eval(default) for field, default in rows}
    assert written == {field.name: field.default for field in dataclasses.fields(getattr(infinilm, name))}


@pytest.mark.parametrize(
    "name",
    [
        "LLM",
        "InferEngine",
        "StaticKVCacheConfig",
        "PagedKVCacheConfig",
        "DistConfig",
        "CommunicationGroup",
        "ReferenceModel",
        "compare",
    ],
)
def test_signatures(name: str) -> None:
    """A signature in guide.md, such as `infinilm.LLM(model, *, ...)`, names every parameter and its default."""
    (written,) = re.findall(rf"^infinilm\.{name}\((.*?)\)\n```$", guide(), re.MULTILINE | re.DOTALL)
    signature = inspect.signature(getattr(infinilm, name))
    visible = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    scope: dict[str, object] = {}
    exec(f"def written({written}): pass", scope)
    documented = inspect.signature(scope["written"])  # type: ignore[arg-type]
    assert {p.name: p.default for p in documented.parameters.values()} == {p.name: p.default for p in visible}
