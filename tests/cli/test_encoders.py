"""Commands that write text, given an encoder: an error that says what it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from encoders import make_encoder
from llm.test_encoders import add_word_pieces

from cli.support import run


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_an_encoder_writes_no_text(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_encoder(tmp_path / "bert", "bert")
    add_word_pieces(folder)
    assert run(command, "-m", folder, "the fox") != 0
    told = capsys.readouterr().err
    assert "BertModel is an encoder" in told and "embed()" in told and "Traceback" not in told


def test_a_model_of_labels_has_no_perplexity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_encoder(tmp_path / "labels", "bert-labels")
    add_word_pieces(folder)
    (text := tmp_path / "text").write_text("the red fox")
    assert run("perplexity", "-m", folder, text) != 0
    told = capsys.readouterr().err
    assert "BertForSequenceClassification is an encoder" in told and "classify()" in told and "Traceback" not in told
