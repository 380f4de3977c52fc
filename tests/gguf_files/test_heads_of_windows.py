"""What a GGUF file of MiMo V2 says of heads, where layers with a window have others than those without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from goldens import golden

from gguf_files.families import FAMILIES, convert_family
from gguf_files.writer import As, File
from infinilm.config import AutoConfig
from infinilm.errors import ConfigError


def file_of(**changes: Any) -> File:
    pytest.importorskip("gguf")
    file = convert_family(golden("mimo-v2"), FAMILIES["mimo-v2"])
    for key, value in changes.items():
        file.metadata[f"mimo2.{key}"] = value
    return file


def test_lists_go_on_behind_the_last_layer(tmp_path: Path) -> None:
    """Files of models with three layers that guess later tokens list those layers, too."""
    file = file_of(nextn_predict_layers=3, block_count=7)
    file.metadata["mimo2.attention.sliding_window_pattern"] = As("int32", [0, 1, 1, 0, 1, 1, 1])
    file.metadata["mimo2.attention.head_count_kv"] = As("int32", [2, 4, 4, 2, 8, 8, 8])
    longer = AutoConfig.from_pretrained(file.write(tmp_path / "longer.gguf"))
    assert longer == AutoConfig.from_pretrained(file_of().write(tmp_path / "model.gguf"))
    assert (longer.num_hidden_layers, longer.num_key_value_heads, longer.swa_num_key_value_heads) == (4, 2, 4)


def test_one_number_of_heads_is_that_of_all(tmp_path: Path) -> None:
    file = file_of()
    file.metadata["mimo2.attention.head_count_kv"] = 2
    config = AutoConfig.from_pretrained(file.write(tmp_path / "model.gguf"))
    assert (config.num_key_value_heads, config.swa_num_key_value_heads, config.v_head_dim) == (2, 2, 16)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("sliding_window_pattern", 2, "sliding_window_pattern is 2: expected a number for each of 4 layers"),
        ("sliding_window_pattern", As("int32", [0, 1]), r"sliding_window_pattern is \[0, 1\]: expected a number for"),
        ("head_count_kv", As("int32", [2, 4, 4]), r"head_count_kv is \[2, 4, 4\]: expected a number for each layer"),
        ("head_count_kv", As("int32", [2, 4, 8, 2]), "expected one number where layers have a window, and one elsewhe"),
    ],
)
def test_lists_that_fit_no_configuration(key: str, value: Any, message: str, tmp_path: Path) -> None:
    file = file_of()
    file.metadata[f"mimo2.attention.{key}"] = value
    with pytest.raises(ConfigError, match=message):
        AutoConfig.from_pretrained(file.write(tmp_path / "model.gguf"))
