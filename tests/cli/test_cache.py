"""`infinilm cache`: what it keeps is found by a later LLM; folders are listed and pruned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infinilm import LLM
from infinilm.cli.main import main

TEXT = "Once upon a time there was a little fox. " * 40


def test_save_list_and_prune(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "kept"
    (tmp_path / "text").write_text(TEXT)
    for prompt in ([TEXT], ["-f", str(tmp_path / "text")]):
        assert main(["cache", "save", str(folder), *prompt, "-m", "demo", "--quiet"]) == 0
    told = capsys.readouterr().out.splitlines()
    count = int(told[0].split()[-2])
    assert count >= 256 and count % 256 == 0 and told[0] == told[1] == f"{folder}: {count} tokens"
    with LLM("demo", disk_cache=folder, use_tqdm=False) as llm:
        llm._thread.exchange.prepare(None)
        (output,) = llm.generate(TEXT + "It", max_tokens=1, use_tqdm=False)
        assert output.metrics.cached_tokens == count
    assert main(["cache", "list", str(folder), "--json"]) == 0
    files = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(files) == count // 256 and all(Path(one["file"]).stat().st_size == one["bytes"] for one in files)
    assert main(["cache", "list", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{len(files)} files, ")
    assert main(["cache", "prune", str(folder), "--size", "2MB"]) == 0
    assert main(["cache", "prune", str(folder), "--size", "0.000001MB"]) == 0
    assert not list(folder.glob("*/*.prefix"))


def test_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, what in (
        (["list", str(tmp_path / "none")], "there is no folder"),
        (["prune", str(tmp_path)], "--size"),
        (["prune", str(tmp_path), "--size", "7"], "say the unit"),
        (["save", str(tmp_path), "-m", "demo"], "expected a PROMPT or --file FILE"),
        (["drop", str(tmp_path)], "invalid choice: 'drop'"),
    ):
        assert main(["cache", *words]) == 2
        assert what in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
