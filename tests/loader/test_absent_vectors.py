"""Vectors that files may leave out, and tensors that no math reads: as A.X K1 is published."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from goldens import golden, write_weights
from reference.checkpoint import read_checkpoint

from infinilm import LLM
from infinilm.errors import WeightError

IDS = [1, 5, 9, 77, 3, 21, 40]
CORRECTION = "model.layers.{}.mlp.gate.e_score_correction_bias"


def write(folder: Path, name: str, changes: dict[str, np.ndarray | None]) -> Path:
    """The golden with some tensors changed, or left out."""
    weights = read_checkpoint(golden(name))
    folder.mkdir()
    shutil.copy(golden(name) / "config.json", folder)
    write_weights(folder, {key: own for key, own in (weights | changes).items() if own is not None}, "bfloat16")
    return folder


def logits(folder: Path) -> np.ndarray:
    with LLM(folder, dtype="float32", max_model_len=32, max_num_seqs=1, use_tqdm=False) as llm:
        return np.array(llm.forward(IDS))


def test_no_correction_is_one_of_zeros(tmp_path: Path) -> None:
    """The norm behind the MLP of a layer without experts is in the files, and not read."""
    layers = range(1, 3)
    zeros = write(tmp_path / "zeros", "ax-k1", {CORRECTION.format(layer): np.zeros(8) for layer in layers})
    dense = {"model.layers.0.post_mlp_layernorm.weight": np.full(64, 7.0)}
    absent = write(tmp_path / "absent", "ax-k1", {CORRECTION.format(layer): None for layer in layers} | dense)
    np.testing.assert_array_equal(logits(absent), logits(zeros))
    assert not np.array_equal(logits(zeros), logits(golden("ax-k1")))


def test_other_families_need_theirs(tmp_path: Path) -> None:
    absent = write(tmp_path / "absent", "deepseek-v3", {CORRECTION.format(1): None})
    with pytest.raises(WeightError, match=r"1 missing from the files: model.layers.1.mlp.gate.e_score_correction_bias"):
        logits(absent)


def test_a_norm_that_no_layer_has_is_not_passed_over(tmp_path: Path) -> None:
    extra = write(tmp_path / "extra", "deepseek-v3", {"model.layers.0.post_mlp_layernorm.weight": np.ones(64)})
    with pytest.raises(WeightError, match=r"model.layers.0.post_mlp_layernorm.weight"):
        logits(extra)


def test_masks_of_codegen_are_not_read(tmp_path: Path) -> None:
    masks = {f"transformer.h.{layer}.attn.causal_mask": np.ones((1, 1, 8, 8)) for layer in range(2)}
    np.testing.assert_array_equal(
        logits(write(tmp_path / "masks", "codegen", dict(masks))), logits(write(tmp_path / "none", "codegen", {}))
    )
