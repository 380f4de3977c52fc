"""`--image` of `infinilm chat` and `infinilm generate`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from images.test_opening import bomb
from llm.test_vision import TEMPLATE
from PIL import Image
from vision import make_model, pictures_of, tokenizer_of

from cli.support import run
from infinilm import LLM

NAME = "qwen3-vl"
GREEDY = ("--temperature", "0", "--max-tokens", "4", "--dtype", "float32", "--quiet")
PLACE = "<|vision_start|> <|image_pad|> <|vision_end|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_model(tmp_path_factory.mktemp("eyes") / "model", NAME)
    tokenizer_of(NAME).save(str(made / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (made / "tokenizer_config.json").write_text(json.dumps(config))
    return made


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A picture as PNG, another one as BMP."""
    made = tmp_path_factory.mktemp("pictures")
    for name, picture in zip(("a.png", "b b.bmp"), pictures_of(NAME), strict=False):
        Image.fromarray(picture).save(made / name)
    return [made / "a.png", made / "b b.bmp"]


def of_images(files: Sequence[Path]) -> list[str]:
    return [argument for file in files for argument in ("--image", str(file))]


def test_several_pictures(folder: Path, files: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    """They come before the question of a chat, and in the places of marks in a prompt; their tokens are counted."""
    with LLM(folder, dtype="float32", use_tqdm=False) as llm:
        content = [*({"type": "image", "image": file} for file in files), {"type": "text", "text": "w5"}]
        (talked,) = llm.chat([{"role": "user", "content": content}], temperature=0, max_tokens=4)
        prompt = f"w4 {PLACE} w6 {PLACE} w7"
        (said,) = llm.generate([{"prompt": prompt, "images": files}], temperature=0, max_tokens=4)
    assert run("chat", "-m", folder, *of_images(files), *GREEDY, "w5") == 0
    assert capsys.readouterr().out.strip() == talked.text.strip()
    assert run("generate", "-m", folder, *of_images(files), *GREEDY, "--no-echo", "--stats", prompt) == 0
    told = capsys.readouterr()
    assert told.out.strip() == said.text.strip()
    assert f"{len(said.prompt_token_ids)} prompt tokens" in told.err


@pytest.mark.parametrize(
    ("command", "content", "told"),
    [
        ("chat", None, r"picture 1: there is no file '.*wrong.png'"),
        ("generate", b"no picture", r"picture 1 is no picture that can be read"),
        ("generate", bomb(), r"picture 1 .*2500000000 pixels|picture 1 has 50000 x 50000 pixels"),
    ],
)
def test_files_that_are_no_pictures(
    command: str,
    content: bytes | None,
    told: str,
    folder: Path,
    files: list[Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    wrong = tmp_path / "wrong.png"
    if content is not None:
        wrong.write_bytes(content)
    question = "w5" if command == "chat" else f"{PLACE} {PLACE}"
    assert run(command, "-m", folder, *of_images([files[0], wrong]), *GREEDY, question) == 2
    captured = capsys.readouterr()
    assert re.search(told, captured.err) and not captured.out


def test_pictures_without_a_place(
    folder: Path, files: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("generate", "-m", folder, *of_images(files), *GREEDY, PLACE) == 2
    assert "1 places for pictures (<|image_pad|>) and 2 pictures; each needs one" in capsys.readouterr().err
    assert run("generate", "-m", "demo", *of_images(files[:1]), *GREEDY, "Once") == 2
    assert "this model reads no pictures: it has no tower" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    assert run("chat", "-m", folder, *of_images(files[:1]), *GREEDY) == 2
    assert "--image: give the question about it, too" in capsys.readouterr().err


def test_a_tower_in_a_file_of_its_own(
    folder: Path, files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--mmproj` names it, and plan and info tell of it; without one the question is refused."""
    pytest.importorskip("gguf")
    from gguf_files.test_projectors import files_of

    text, tower = files_of(NAME)[1:]
    model, projector = text.write(tmp_path / "model.gguf"), tower.write(tmp_path / "tower.gguf")
    asked = ("--tokenizer", folder, "--chat-template", TEMPLATE, *of_images(files), *GREEDY, "w5")
    assert run("chat", "-m", folder, *of_images(files), *GREEDY, "w5") == 0
    expected = capsys.readouterr().out
    assert run("chat", "-m", model, "--mmproj", projector, *asked) == 0
    assert capsys.readouterr().out == expected
    assert run("chat", "-m", model, *asked) == 2
    assert "there is no mmproj file" in capsys.readouterr().err
    assert run("chat", "-m", model, "--mmproj", model, *asked) == 2
    assert "general.type is" in capsys.readouterr().err
    for command in ("plan", "info"):
        for given, told in (((), False), (("--mmproj", projector), True)):
            assert run(command, model, *given, "--kv-cache", "1MiB") == 0
            out = capsys.readouterr().out
            assert ("pictures are read, by a tower of" in out and "in tower.gguf: up to" in out) == told


def test_receipts_of_pictures(
    folder: Path, files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    receipt = tmp_path / "receipt.json"
    prompt = f"w4 {PLACE} w6 {PLACE} w7"
    assert run("generate", "-m", folder, *of_images(files), *GREEDY, "--receipt", receipt, prompt) == 0
    verify = ("verify", receipt, "-m", folder, "--dtype", "float32", "--quiet")
    capsys.readouterr()
    assert run(*verify, *of_images(files[::-1])) == 0
    assert capsys.readouterr().out == f"{receipt}: equal\n"
    assert run(*verify, *of_images(files[:1])) == 1
    assert "incomparable" in (out := capsys.readouterr().out) and "picture 1 of its prompt is missing" in out
    assert run(*verify, "--image", tmp_path / "absent.png") == 2
    assert "there is no file" in capsys.readouterr().err
