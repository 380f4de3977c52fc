"""The options for LoRA adapters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from llm import tiny
from lora.adapters import make_adapter

from cli.support import run
from infinilm import LLM

GREEDY = ("--temperature", "0", "--max-tokens", "20")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    at = tmp_path_factory.mktemp("cli")
    base = tiny.make_checkpoint(at / "base")
    return base, make_adapter(at / "adapter", base)


def test_generate_with_an_adapter(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    base, adapter = folders
    with LLM(base, lora={"x": adapter}, use_tqdm=False) as llm:
        beside, plain = (
            llm.generate("the", temperature=0, max_tokens=20, lora=name)[0].outputs[0].text for name in ("x", None)
        )
    with LLM(base, merge_lora=adapter, use_tqdm=False) as llm:
        merged = llm.generate("the", temperature=0, max_tokens=20)[0].outputs[0].text
    assert beside != plain
    for options, want in ((("--lora", f"x={adapter}"), beside), (("--merge-lora", adapter), merged), ((), plain)):
        assert run("generate", "the", "--model", base, *options, *GREEDY, "--no-echo") == 0
        assert capsys.readouterr().out == f"{want}\n"


def test_a_plan_counts_them(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    base, adapter = folders
    sizes = []
    for options in ((), ("--lora", f"x={adapter}", "--lora", f"y={adapter}")):
        assert run("plan", base, "--json", *options) == 0
        sizes.append(json.loads(capsys.readouterr().out))
    assert sizes[0] != sizes[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "the", "--lora", "x"), "expected NAME=FOLDER, such as polite=adapters/polite, got 'x'"),
        (("generate", "the", "--lora", "x=a", "--lora", "y=b"), "--lora: this command answers with one adapter, got x"),
        (("plan", "--lora", "x=a", "--lora", "x=b"), "--lora: two adapters have the same name"),
        (("generate", "the", "--lora", "x=/nowhere"), "/nowhere: expected the folder of a LoRA adapter as PEFT saves"),
        (("serve", "--lora", "demo=/nowhere"), "--lora: 'demo' is the name of a model; choose another"),
    ],
)
def test_what_is_wrong_is_told(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 2
    assert message in capsys.readouterr().err
