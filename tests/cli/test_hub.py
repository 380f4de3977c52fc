"""Models, adapters and tokenizers by their hub ids, of a hub on loopback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf_files.conversion import convert
from gguf_files.test_projectors import files_of
from goldens import golden
from hub_server import Hub, running_hub
from huggingface_hub import constants
from llm import tiny
from lora.adapters import make_adapter
from ports import free_port
from vision import make_model

from cli.support import run
from infinilm import LLM, hub as infinilm_hub, plan_memory
from infinilm.checkpoint import resolve_model
from infinilm.checkpoint.quantised.writer import quantise_model
from infinilm.errors import ConfigError

TESTS = Path(__file__).parents[1]
SHOWN = ("--kv-cache", "1MiB", "--json")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with running_hub(tmp_path / "hub", tmp_path / "cache", monkeypatch) as made:
        yield made


def shown(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> object:
    assert run(*arguments, *SHOWN) == 0
    captured = capsys.readouterr()
    assert not captured.err
    return json.loads(captured.out)


@pytest.mark.parametrize(
    "source",
    ["llama-sharded", "llama-llama3-rope-tied", "w8a16", "GGUF", "tower", "GGUF with a tower"],
)
@pytest.mark.parametrize("revision", [(), ("--revision", "v2")], ids=["main", "v2"])
def test_plan_and_info_read_headers_alone(
    hub: Hub, capsys: pytest.CaptureFixture[str], source: str, revision: tuple[str, ...]
) -> None:
    here = hub.root / "org" / "name"
    name: str = "org/name"
    path = here
    if source == "GGUF":  # whose factors of RoPE are a tensor, and part of the plan
        here.mkdir(parents=True)
        path = here / "fox-F32.gguf"
        convert(golden("llama-llama3-rope-tied")).write(path)
        name = "org/name:F32"
    elif source == "tower":
        make_model(here, "idefics3")
    elif source == "GGUF with a tower":
        text, tower = files_of("idefics3")[1:]
        here.mkdir(parents=True)
        path = text.write(here / "fox-F32.gguf")
        tower.write(here / "mmproj-fox-BF16.gguf")
        name = "org/name:F32"
    elif source == "w8a16":
        quantise_model("demo", here, source)
    else:
        shutil.copytree(golden(source), here)
    for command in ("plan", "info"):
        of_hub, local = (json.dumps(shown(capsys, command, model)) for model in (name, path))
        assert of_hub == local.replace(str(path), name)
        assert ('"tower": null' not in of_hub) == ("tower" in source)
    for file in here.rglob("*"):
        if file.suffix in (".safetensors", ".gguf"):
            assert not any(r.startswith("GET") and file.name in r and "bytes=" not in r for r in hub.requests)
    assert not list(hub.root.parent.glob("infinilm-*"))
    assert run("plan", name, *revision) == 0


def test_weights_are_not_fetched(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    here = tiny.make_checkpoint(hub.root / "org" / "name", vocab_size=20_000)
    file = here / "model.safetensors"
    assert run("plan", "org/name") == 0
    assert capsys.readouterr().out.startswith("org/name: LlamaForCausalLM, ")
    assert plan_memory("org/name", kv_cache="1MiB") == plan_memory(here, kv_cache="1MiB")
    assert hub.sent["org/name/model.safetensors"] < 400_000 < file.stat().st_size / 10


def test_what_was_fetched_needs_no_network(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    here = tiny.make_checkpoint(hub.root / "org" / "name")
    (hub.root / "org" / "gguf").mkdir()
    convert(golden("llama-mha")).write(hub.root / "org" / "gguf" / "fox-F32.gguf")
    for model in ("org/name", "org/gguf:F32"):
        fetched = resolve_model(model, use_tqdm=False)
        hub.requests.clear()
        assert run("plan", model) == 0
        assert capsys.readouterr().out.startswith(f"{fetched}: LlamaForCausalLM")
        assert hub.requests == []
    # A shard is absent from the cache: the hub is asked after all.
    (here / "model.safetensors").rename(here / "model-1.safetensors")
    next((hub.root.parent / "cache").rglob("model.safetensors")).unlink()
    assert run("plan", "org/name") == 0
    assert capsys.readouterr().out.startswith("org/name: ")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("org/none", "has none of this name that it would show: check the name; if it is private, log in with"),
        ("org/gated", "is gated: ask for access at https://huggingface.co/org/gated, then log in with `hf auth login`"),
        ("org/broken", "could not be fetched from the Hugging Face hub: "),
        ("org/ggufs", "has its weights as GGUF files: pass 'org/ggufs:FILE', one of a-Q4_0.gguf, a-Q8_0.gguf"),
        ("org/ggufs:Q5_0", "no GGUF file of this name; there are a-Q4_0.gguf, a-Q8_0.gguf"),
        ("org/ggufs:b.gguf", "there is no such file in org/ggufs"),
        ("https://huggingface.co/org/name", "is the address of a page; pass 'org/name'"),
        ("https://huggingface.co/org/name/tree/main", "is the address of a page; pass 'org/name'"),
        ("https://huggingface.co/org/name/blob/main/a/x.gguf?download=true", "pass 'org/name:a/x.gguf'"),
    ],
)
def test_what_cannot_be_fetched(hub: Hub, capsys: pytest.CaptureFixture[str], model: str, message: str) -> None:
    hub.statuses |= {"org/gated": (403, "GatedRepo"), "org/broken": (400, "Broken")}
    (hub.root / "org" / "ggufs").mkdir(parents=True)
    for name in ("a-Q4_0.gguf", "a-Q8_0.gguf"):
        (hub.root / "org" / "ggufs" / name).touch()
    for command in (["plan"], ["generate", "x", "--model"]):
        assert run(*command, model) == 2
        captured = capsys.readouterr()
        assert message in captured.err and not captured.out


@pytest.mark.parametrize("model", ["org/name", "org/name:Q4_0"])
@pytest.mark.parametrize("command", [("plan",), ("generate", "x", "--model")], ids=lambda command: command[0])
def test_without_a_network(
    hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], model: str
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    for is_offline, why in (
        (False, f"and the Hugging Face hub, {constants.ENDPOINT}, cannot be reached; its cache, "),
        (True, "and HF_HUB_OFFLINE forbids to ask the Hugging Face hub; its cache, "),
    ):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
        assert run(*command, model) == 2
        error = capsys.readouterr().err
        assert f"{model!r} is no folder here, {why}{hub.root.parent / 'cache'}, has not all of it." in error
        assert "run `hf download org/name --local-dir FOLDER`" in error and error.count("\n") == 1


def test_a_damaged_header_is_told_by_the_name_of_the_model(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    here = tiny.make_checkpoint(hub.root / "org" / "name")
    file = here / "model.safetensors"
    file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])
    assert run("plan", "org/name") == 2
    assert "error: org/name/model.safetensors: the header claims" in capsys.readouterr().err


def test_adapters_and_tokenizers(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = tiny.make_checkpoint(tmp_path / "base", tokenizer=False)
    tiny.add_tokenizer(tmp_path / "base")
    here = hub.root / "org"
    adapter = make_adapter(here / "adapter", base)
    (here / "tokenizer").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.move(base / name, here / "tokenizer" / name)
    (here / "tokenizer" / "model.safetensors").touch()  # which is not wanted
    options = ["--model", base, "--temperature", "0", "--max-tokens", "9"]
    outs = []
    for place in ("org", here):
        for lora in (["--lora", f"x={place}/adapter"], ["--merge-lora", f"{place}/adapter"]):
            assert run("generate", "the", *options, "--tokenizer", f"{place}/tokenizer", *lora) == 0
            outs.append(capsys.readouterr().out)
    assert outs[:2] == outs[2:]
    assert adapter.is_dir() and "org/tokenizer/model.safetensors" not in hub.sent
    assert run("generate", "the", *options, "--tokenizer", "org/none") == 2
    assert "tokenizer 'org/none' is no folder here" in capsys.readouterr().err
    assert run("generate", "the", *options, "--lora", "x=org/none") == 2
    assert "adapter 'org/none' is no folder here" in capsys.readouterr().err


@pytest.mark.parametrize("wanted", [True, False])
def test_bars_of_the_hub(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wanted: bool
) -> None:
    """They go as they came, so that the text has its lines for itself; and `use_tqdm=False` is for them too."""
    tiny.make_checkpoint(hub.root / "org" / "name")
    monkeypatch.setattr(infinilm_hub, "can_show", lambda: True)
    with LLM("org/name", use_tqdm=wanted) as llm:
        assert llm.max_model_len == 128
    err = capsys.readouterr().err
    assert bool(err) == wanted
    shutil.rmtree(hub.root.parent / "cache")
    assert run("generate", "the", "--model", "org/name", "-n", "2", *([] if wanted else ["--quiet"])) == 0
    assert bool(capsys.readouterr().err) == wanted
    assert not err.rpartition("\r")[2].strip()


def test_a_revision_is_of_models_of_the_hub() -> None:
    with pytest.raises(ConfigError, match="revision='v2' is for models of the hub"):
        resolve_model("demo", "v2")
