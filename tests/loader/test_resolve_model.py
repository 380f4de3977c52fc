"""What the `model` argument may be."""

import sys
import types
from pathlib import Path

import pytest

import infinilm
from infinilm.checkpoint import Checkpoint
from infinilm.checkpoint.folder import resolve_model
from infinilm.config import AutoConfig
from infinilm.errors import ConfigError, WeightError

BUNDLED = Path(infinilm.__file__).parent / "assets" / "demo"


def test_demo():
    assert resolve_model("demo") == BUNDLED


def test_a_folder_called_demo(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="'demo' does not exist"):
        resolve_model(Path("demo"))
    (tmp_path / "demo").mkdir()
    assert resolve_model("demo") == BUNDLED
    assert not caplog.records
    (tmp_path / "demo" / "config.json").write_text("{}")
    for path in (Path("demo"), Path("./demo"), "./demo"):
        assert resolve_model(path) == Path("demo")
    assert resolve_model("demo") == BUNDLED
    assert "the folder of this name here is './demo'" in caplog.text


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
    with pytest.raises(ConfigError, match=r"is a file, and none of GGUF; pass a GGUF file, or the folder"):
        resolve_model(tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="empty string"):
        resolve_model("")
    for nothing in (None, 5, b"demo"):
        with pytest.raises(TypeError, match="model: expected a folder, 'demo' or a hub id, got "):
            resolve_model(nothing)


def test_what_is_not_read_in_this_version(tmp_path):
    (tmp_path / "llama.gguf").write_bytes(b"GGUF")
    assert resolve_model(tmp_path) == resolve_model(tmp_path / "llama.gguf") == tmp_path / "llama.gguf"
    with pytest.raises(WeightError, match=r"llama\.gguf: a file of 4 bytes is too short for GGUF"):
        AutoConfig.from_pretrained(tmp_path / "llama.gguf")
    with pytest.raises(FileNotFoundError, match=r"only a GGUF file: pass the path of that"):
        AutoConfig.from_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"this is a LoRA adapter.*merge_lora=folder"):
        AutoConfig.from_pretrained(tmp_path)
    with pytest.raises(WeightError, match=r"this is a LoRA adapter.*merge_lora=folder"):
        Checkpoint(tmp_path)


def test_hub_not_installed(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"pip install huggingface_hub"):
        resolve_model("org/name")


def test_hub(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    hub = types.ModuleType("huggingface_hub")
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    calls = []

    def snapshot_download(name, *, revision, allow_patterns, ignore_patterns, tqdm_class):
        calls.append((name, allow_patterns, ignore_patterns, revision))
        return str(tmp_path)

    hub.snapshot_download = snapshot_download
    assert resolve_model("org/name-1.5B") == tmp_path
    assert calls[0][0] == "org/name-1.5B"
    assert {"*.safetensors", "*.json", "*.jinja"} <= set(calls[0][1])
    assert resolve_model("org/name", revision="v2") == tmp_path
    assert [call[3] for call in calls] == [None, "v2"]
    with pytest.raises(ConfigError, match="revision='v2' is for models of the hub"):
        resolve_model("demo", revision="v2")

    def fail(*_args, **_kwargs):
        raise OSError("no network")

    hub.snapshot_download = fail
    with pytest.raises(ConfigError, match=r"'org/name' is no folder here, and could not be fetched.*no network"):
        resolve_model("org/name")
