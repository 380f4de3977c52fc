"""`pooling_type` of a GGUF file says how vectors are made of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from goldens import golden

from gguf_files.conversion import convert
from infinilm import LLM, ConfigError

IDS = [1, 5, 9, 77, 3]


def write(path: Path, value: Any) -> Path:
    made = convert(golden("llama-mha"))
    file = replace(made, metadata={**made.metadata, "llama.pooling_type": value})
    return file.write(path)


@pytest.mark.parametrize(("value", "pooling"), [(0, "mean"), (1, "mean"), (2, "cls"), (3, "last")])
def test_pooling_of_a_file(tmp_path: Path, value: int, pooling: str) -> None:
    with LLM(write(tmp_path / "m.gguf", value), max_model_len=32, use_tqdm=False) as llm:
        assert llm.embed(IDS).tobytes() == llm.embed(IDS, pooling, normalize=True).tobytes()
        assert llm.task == ("embed" if value else "generate")


@pytest.mark.parametrize(("value", "message"), [(4, "a reranker with a head"), (9, "9; supported"), ("mean", "'mean'")])
def test_other_values_are_refused(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"pooling_type is {message}"):
        LLM(write(tmp_path / "m.gguf", value), max_model_len=32, use_tqdm=False)
