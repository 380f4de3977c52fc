"""NaN and infinities in a file: no way of rounding weights to integers hides them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from infinilm import LLM, WeightError
from infinilm.checkpoint import resolve_model
from infinilm.checkpoint.quantised.writer import quantise_model

NAME = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(params=["nan", "-inf"])
def damaged(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The bundled model with one such value, in row 1 and column 2 of a weight."""
    folder = tmp_path / "model"
    shutil.copytree(resolve_model("demo"), folder)
    file = folder / "model.safetensors"
    raw = bytearray(file.read_bytes())
    length = int.from_bytes(raw[:8], "little")
    entry = json.loads(raw[8 : 8 + length])[NAME]
    assert entry["dtype"] == "BF16"
    at = 8 + length + entry["data_offsets"][0] + 2 * (entry["shape"][1] + 2)
    raw[at : at + 2] = np.float32(request.param).tobytes()[2:]
    file.write_bytes(raw)
    return folder


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_rounded_while_it_is_loaded(damaged: Path, quantization: str) -> None:
    message = rf"parameter '{re.escape(NAME)}': row 1, column 2 is NaN or infinite"
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(WeightError, match=message):
            LLM(damaged, quantization=quantization, dtype=dtype, use_tqdm=False, num_threads=1)


@pytest.mark.parametrize("scheme", ["w4a16-g32", "w8a16", "w8a8"])
def test_written_with_few_bits(damaged: Path, scheme: str, tmp_path: Path) -> None:
    with pytest.raises(WeightError, match=rf"tensor '{re.escape(NAME)}': the weights are not all finite"):
        quantise_model(damaged, tmp_path / "out", scheme, use_tqdm=False)
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_as_it_is(damaged: Path) -> None:
    """Each request says so."""
    with LLM(damaged, use_tqdm=False, num_threads=1) as llm, pytest.raises(Exception, match=r"hold NaN|infinite|\+inf"):
        llm.generate("Once upon a time", max_tokens=8, temperature=0, use_tqdm=False)
