"""What GGUF files of MiMo V2 and Laguna say of heads, where layers with a window have others than those without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from goldens import golden
from quantised_files.conversion import resized

from gguf_files.families import FAMILIES, convert_family
from gguf_files.test_loading import logits
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


def laguna(folder: Path, changes: dict[str, Any], keys: dict[str, Any]) -> tuple[Path, Path]:
    """A checkpoint with random weights, and the file of it."""
    pytest.importorskip("gguf")
    source = resized(golden("laguna"), folder / "source", **changes)
    rules = FAMILIES["laguna"]
    return source, convert_family(source, replace(rules, keys=rules.keys | keys)).write(folder / "model.gguf")


ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "attention_factor": 1.25}


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"gating": "per-element"}, {}),
        (
            {"rope_parameters": {"full_attention": ROPE | YARN, "sliding_attention": ROPE}},
            {"rope.dimension_count_swa": 8},
        ),
        (
            {"layer_types": ["full_attention"] * 3, "num_attention_heads_per_layer": [4] * 3, "sliding_window": None}
            | {"rope_parameters": {"full_attention": ROPE}},
            {"attention.head_count": As("int32", [4] * 3)}
            | dict.fromkeys(("rope.freq_base_swa", "rope.dimension_count_swa")),
        ),
    ],
    ids=["a gate of each element", "yarn without a window", "no windows"],
)
def test_kinds_of_laguna(changes: dict[str, Any], keys: dict[str, Any], tmp_path: Path) -> None:
    """XS has a gate of each head, M one of each element and no windows; YaRN stretches layers without a window."""
    source, path = laguna(tmp_path, changes, keys)
    np.testing.assert_allclose(logits(path), logits(source), rtol=1e-4, atol=1e-5)


def test_layers_of_laguna_with_a_window(tmp_path: Path) -> None:
    """All but each fourth one where a file does not list them."""
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    changes = {"num_hidden_layers": 6, "layer_types": (kinds + kinds[1:2] + kinds)[:6]}
    heads = [4, 6, 6, 6, 4, 6]
    changes |= {"num_attention_heads_per_layer": heads}
    for pattern in (None, 4, As("bool", [False, True, True, True, False, True])):
        folder = tmp_path / str(type(pattern).__name__)
        folder.mkdir()
        keys = {"attention.head_count": As("int32", heads), "attention.sliding_window_pattern": pattern}
        _, path = laguna(folder, changes, keys)
        config = AutoConfig.from_pretrained(path)
        assert config.layer_types == changes["layer_types"]
        assert (config.num_attention_heads, config.swa_num_attention_heads) == (4, 6)


def test_a_laguna_without_gates_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    file = convert_family(golden("laguna"), FAMILIES["laguna"])
    tensors = {name: tensor for name, tensor in file.tensors.items() if name != "blk.0.attn_gate.weight"}
    with pytest.raises(ConfigError, match=r"has no tensor 'blk\.0\.attn_gate\.weight', which says gating"):
        AutoConfig.from_pretrained(File(file.metadata, tensors).write(tmp_path / "model.gguf"))
