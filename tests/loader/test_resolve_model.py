"""What the `model` argument may be."""

import sys
import types
from pathlib import Path

import pytest

import infinilm.checkpoint.folder
from infinilm.checkpoint.folder import resolve_model
from infinilm.errors import ConfigError


def test_demo():
    assert resolve_model("demo") == Path(infinilm.checkpoint.folder.__file__).parent / "assets" / "demo"


def test_folder(tmp_path, monkeypatch):
    assert resolve_model(tmp_path) == tmp_path
    assert resolve_model(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert resolve_model("~/org/model") == tmp_path / "org" / "model"
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/model") == Path("org/model")  # a folder here wins over the hub


@pytest.mark.parametrize("name", ["./llama", "../llama", "/no/such/llama", "~/llama", "llama", "a/b/c", "llama/"])
def test_absent_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"does not exist.*config\.json.*'demo'"):
        resolve_model(name)
    with pytest.raises(FileNotFoundError):
        resolve_model(Path("org/model"))


def test_file_and_empty(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="is a file; pass the folder"):
        resolve_model(tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="empty string"):
        resolve_model("")


def test_hub_not_installed(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"pip install 'infinilm\[hub\]'"):
        resolve_model("org/name")


def test_hub(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    hub = types.ModuleType("huggingface_hub")
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    calls = []

    def snapshot_download(name, *, allow_patterns, ignore_patterns):
        calls.append((name, allow_patterns, ignore_patterns))
        return str(tmp_path)

    hub.snapshot_download = snapshot_download
    assert resolve_model("org/name-1.5B") == tmp_path
    assert calls[0][0] == "org/name-1.5B"
    assert {"*.safetensors", "*.json", "*.jinja"} <= set(calls[0][1])

    def fail(*_args, **_kwargs):
        raise OSError("no network")

    hub.snapshot_download = fail
    with pytest.raises(ConfigError, match=r"'org/name' is no folder here and could not be fetched.*no network"):
        resolve_model("org/name")
