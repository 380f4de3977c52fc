"""GGUF files of the Hugging Face hub, which is a folder here."""

from __future__ import annotations

import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infinilm.checkpoint import resolve_model
from infinilm.errors import ConfigError

FILES = [
    "README.md",
    "fox-Q4_K_M.gguf",
    "fox-Q4_K_S.gguf",
    "fox-Q8_0-00001-of-00002.gguf",
    "fox-Q8_0-00002-of-00002.gguf",
    "fox-UD-Q2_K_XL.gguf",
    "mmproj-fox-BF16.gguf",
    "mmproj-fox-F16.gguf",
    "other/mmproj-F32.gguf",
]


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is fetched of a repository with these files."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    names: list[str] = []

    def snapshot_download(hub_id: str, revision: str | None, allow_patterns: list[str], **_: Any) -> str:
        assert (hub_id, revision) == ("org/fox", "main")
        for name in FILES:
            if any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns):
                (tmp_path / name).touch()
                names.append(name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    siblings = [SimpleNamespace(rfilename=name) for name in FILES]
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: SimpleNamespace(siblings=siblings))
    return names


@pytest.mark.parametrize(
    ("model", "files"),
    [
        ("org/fox:fox-Q4_K_M.gguf", ["fox-Q4_K_M.gguf"]),
        ("org/fox:Q4_K_M", ["fox-Q4_K_M.gguf"]),
        ("org/fox:q4_k_s", ["fox-Q4_K_S.gguf"]),
        ("org/fox:Q8_0", ["fox-Q8_0-00001-of-00002.gguf", "fox-Q8_0-00002-of-00002.gguf"]),
        ("org/fox:fox-Q8_0-00002-of-00002.gguf", ["fox-Q8_0-00001-of-00002.gguf", "fox-Q8_0-00002-of-00002.gguf"]),
        ("org/fox:UD", ["fox-UD-Q2_K_XL.gguf"]),
    ],
)
def test_files_by_name(model: str, files: list[str], fetched: list[str]) -> None:
    """The file, all parts of it, and of the towers beside it the one of the best precision."""
    path = resolve_model(model, "main")
    assert fetched == [*files, "mmproj-fox-BF16.gguf"] and path.name in files and path.is_file()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("org/fox:fox", "model 'org/fox:fox': several GGUF files of this name; there are fox-Q4_K_M.gguf, "),
        ("org/fox:Q5_0", "model 'org/fox:Q5_0': no GGUF file of this name; there are fox-Q4_K_M.gguf"),
        ("org/fox:Q4_K", "several GGUF files of this name; there are fox-Q4_K_M.gguf, fox-Q4_K_S.gguf$"),
        ("org/fox:F16", "no GGUF file of this name"),
        ("org/fox:other.gguf", "there is no such file in org/fox"),
        ("org/fox", "has its weights as GGUF files: pass 'org/fox:FILE', one of fox-Q4_K_M.gguf"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("fetched")
def test_what_is_refused(model: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_model(model, "main")


def test_what_was_fetched_before_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    (tmp_path / "fox-Q8_0.gguf").touch()

    def model_info(*_: Any, **__: Any) -> None:
        raise OSError("no network")

    def snapshot_download(hub_id: str, **options: Any) -> str:
        if hub_id == "org/other":
            raise OSError("not in the cache")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model("org/fox:Q8_0") == tmp_path / "fox-Q8_0.gguf"
    with pytest.raises(ConfigError, match=r"'org/fox:Q4_0': no GGUF file of this name; there are fox-Q8_0.gguf"):
        resolve_model("org/fox:Q4_0")
    with pytest.raises(ConfigError, match=r"'org/other:Q8_0' is no folder here, and could not be fetched.*no network"):
        resolve_model("org/other:Q8_0")
