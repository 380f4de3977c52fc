"""`infinilm pack`: the folder it writes serves every command, and what it says when it cannot write one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from gguf_files.conversion import convert, quantised
from llm import tiny

from cli.support import run
from infinilm.checkpoint import resolve_model
from infinilm.checkpoint.quantised.writer import quantise_model

DEMO = resolve_model("demo")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_checkpoint(tmp_path_factory.mktemp("pack") / "tiny")


@pytest.mark.parametrize("quantization", [[], ["--quantization", "int8"], ["--quantization", "int4"]])
def test_all_commands_take_the_folder(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], quantization: list[str]
) -> None:
    out = tmp_path / "packed"
    assert run("pack", folder, out, *quantization) == 0
    assert capsys.readouterr().out.startswith(f"{out}: ")
    options = ["--temperature", "0", "--max-tokens", "9"]
    assert run("generate", "the", "--model", folder, *options, *quantization) == 0
    expected = capsys.readouterr().out
    assert run("generate", "the", "--model", out, *options) == 0
    assert capsys.readouterr().out == expected
    plans = []
    for model, more in ((folder, quantization), (out, [])):
        assert run("plan", model, "--json", "--kv-cache", "1MiB", *more) == 0
        plans.append(json.loads(capsys.readouterr().out))
    plain, packed = plans
    assert packed == plain | {"path": str(out), "packed": True}
    assert run("info", out) == 0
    assert f"packed as {quantization[1] if quantization else 'float32'}," in capsys.readouterr().out
    assert run("plan", folder, *quantization) == 0
    assert f"stored as float32, {'used as ' if quantization else 'computed'}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["FOLDER"], "the following arguments are required: OUT"),
        (["FOLDER", "FOLDER"], "is not empty; pass the name of a new folder"),
        (["FOLDER", "FOLDER/config.json"], "config.json is a file; pass the name of a new folder"),
        (["missing", "OUT"], "model folder 'missing' does not exist"),
        (
            ["FOLDER", "OUT", "--quantization", "int3"],
            "--quantization: expected None, 'int8', 'int4' or 'fp8', got 'int3'",
        ),
        (["FOLDER", "OUT", "--dtype", "int8"], "--dtype: expected 'auto'"),
        (["FOLDER", "OUT", "--num-threads", "0"], "--num-threads"),
        (["FOLDER", "/proc/packed"], "/proc/packed"),
        (["FOLDER", "LOOP/packed"], "packed: no folder can be made here: Too many levels of symbolic links"),
        (["FOLDER", "x" * 300], "no folder can be made here: File name too long"),
        (["x" * 300, "OUT"], "cannot be read: File name too long"),
    ],
)
def test_bad_arguments(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    (tmp_path / "LOOP").symlink_to("LOOP")
    places = {"FOLDER": str(folder), "OUT": str(tmp_path / "out"), "LOOP": str(tmp_path / "LOOP")}
    named = [re.sub("|".join(places), lambda found: places[found[0]], argument) for argument in arguments]
    assert run("pack", *named) == 2
    captured = capsys.readouterr()
    assert message in captured.err and not captured.out
    assert not (tmp_path / "out").exists()


def test_settings_that_contradict_the_folder(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "packed"
    assert run("pack", folder, out, "--quantization", "int8") == 0
    assert run("pack", out, tmp_path / "again") == 2
    assert "is packed already" in capsys.readouterr().err
    assert run("generate", "the", "--model", out, "--quantization", "int4") == 2
    assert "contradicts" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["GGUF", "w4a16-g32"])
def test_quantised_weights_are_unpacked_with_a_word(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The layout has none of their formats; who wants a small folder is told how to get one."""
    model, name = tmp_path / "model", "compressed-tensors int4 g32"
    if kind == "GGUF":
        model, name = tmp_path / "fox.gguf", "Q8_0"
        convert(DEMO, quantised("Q8_0")).write(model)
    else:
        quantise_model("demo", model, kind, use_tqdm=False)
    assert run("pack", model, tmp_path / "out") == 0
    (told,) = caplog.messages
    assert name in told and "are packed as plain numbers in" in told and "quantization='int8'" in told
    caplog.clear()
    assert run("pack", model, tmp_path / "int8", "--quantization", "int8") == 0
    assert not caplog.messages
