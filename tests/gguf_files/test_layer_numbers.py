"""Numbers of layers that a GGUF file has in its metadata: those of the activation of Apertus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from goldens import golden

from gguf_files.families import FAMILIES, convert_family
from gguf_files.writer import As
from infinilm.checkpoint.gguf import GgufCheckpoint
from infinilm.errors import ConfigError


def test_they_are_parameters(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    file = convert_family(golden("apertus"), FAMILIES["apertus"])
    file.metadata["xielu.alpha_n"] = As("float32", [0.25, -3.0])
    name = "model.layers.{}.mlp.act_fn.alpha_n"
    with GgufCheckpoint(file.write(tmp_path / "model.gguf")) as checkpoint:
        found = checkpoint.find({name.format(layer): (1,) for layer in range(2)})
    assert not found.sources and not found.shapes
    np.testing.assert_array_equal([found.values[name.format(layer)] for layer in range(2)], [[0.25], [-3.0]])


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("alpha_p", None, r"xielu.alpha_p must have a number for each of 2 layers; got None"),
        ("alpha_n", As("float32", [1.0]), r"xielu.alpha_n must have a number for each of 2 layers; got \[1.0\]"),
        ("alpha_n", As("float32", [1.0, float("inf")]), r"xielu.alpha_n must have .*; got \[1.0, inf\]"),
        ("beta", As("float32", [0.5, 0.25]), r"xielu.beta is \[0.5, 0.25\]; only 0.5 is supported"),
        ("eps", "none", "xielu.eps must have a number for each of 2 layers; got 'none'"),
    ],
)
def test_bad_lists_are_refused(key: str, value: Any, message: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    file = convert_family(golden("apertus"), FAMILIES["apertus"])
    file.metadata[f"xielu.{key}"] = value
    if value is None:
        del file.metadata[f"xielu.{key}"]
    with pytest.raises(ConfigError, match=message):
        GgufCheckpoint(file.write(tmp_path / "model.gguf"))
