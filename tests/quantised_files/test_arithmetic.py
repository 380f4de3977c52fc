"""Formats that round inputs, too: the engine is no more than 1.5 times as far off as their arithmetic, simulated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from goldens import golden

from infinilm.models.reference import ReferenceModel
from infinilm.models.reference.step import Step
from quantised_files.conversion import quantise, resized, write_plain
from quantised_files.test_models import IDS, logits, rms
from quantised_files.writers import E4M3, Format, ct_fp8, ct_int8, fp8_block

Array = np.ndarray
_POSITIVE = E4M3[:127]


def int8(x: Array) -> Array:
    return np.clip(np.rint(x), -128, 127)


def fp8(x: Array) -> Array:
    """The nearest number of e4m3."""
    nearest = np.searchsorted((_POSITIVE[1:] + _POSITIVE[:-1]) / 2, np.abs(x))
    return np.copysign(_POSITIVE[nearest], x)


def by_token(rounded: Callable[[Array], Array], most: float, x: Array, group: int = 0) -> Array:
    """A scale for each token, or for each so many of its elements."""
    size = group or x.shape[1]
    parts = [x[:, at : at + size] for at in range(0, x.shape[1], size)]
    scales = [np.maximum(np.abs(part).max(axis=1, keepdims=True), 1e-30) / most for part in parts]
    return np.concatenate([rounded(part / scale) * scale for part, scale in zip(parts, scales, strict=True)], axis=1)


def static(rounded: Callable[[Array], Array], most: float, x: Array) -> Array:
    """One scale for all, here that which fits them best."""
    scale = np.abs(x).max() / most
    return rounded(x / scale) * scale


def round_inputs(monkeypatch: pytest.MonkeyPatch, rounds: Callable[[Array], Array]) -> None:
    """Let the numpy model round the inputs of the linears of its layers."""
    exact = Step.linear

    def linear(step: Step, x: Array, name: str, bias: bool) -> Array:
        return exact(step, x if step.layer < 0 else rounds(x).astype(x.dtype), name, bias)

    monkeypatch.setattr(Step, "linear", linear)


@pytest.mark.parametrize(
    ("form", "rounds"),
    [
        (ct_int8(), lambda x: by_token(int8, 127, x)),
        (ct_int8("tensor", dynamic=False), lambda x: static(int8, 127, x)),
        (ct_fp8("channel"), lambda x: by_token(fp8, 448, x)),
        (ct_fp8("tensor"), lambda x: static(fp8, 448, x)),
        (fp8_block((128, 128), "F32"), lambda x: by_token(fp8, 448, x, 128)),
    ],
    ids=["W8A8", "W8A8, static", "FP8", "FP8, static", "FP8, blocks"],
)
def test_no_further_off_than_the_format(
    form: Format, rounds: Callable[[Array], Array], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}
    source = resized(golden("qwen3"), tmp_path / "source", **sizes, num_key_value_heads=2)
    weights = quantise(source, tmp_path / "quantised", form)
    plain = write_plain(source, tmp_path / "plain", weights)
    exact = logits(plain)
    round_inputs(monkeypatch, rounds)
    own = rms(ReferenceModel.from_pretrained(plain).forward([IDS]) - exact) / rms(exact)
    assert 1e-3 < own < 0.2  # the simulation rounds
    assert rms(logits(tmp_path / "quantised", "auto") - exact) / rms(exact) <= 1.5 * own
