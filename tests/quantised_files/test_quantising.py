"""`infinilm quantize`: what it writes is read again, and costs what the scheme must cost."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from infinilm import _core
from infinilm.checkpoint import Checkpoint, resolve_model
from infinilm.checkpoint.opening import open_checkpoint
from infinilm.checkpoint.quantised.checkpoint import QuantisedCheckpoint
from infinilm.checkpoint.quantised.writer import quantise_model
from infinilm.checkpoint.sources import Source
from infinilm.cli.main import main
from infinilm.debug.loss import measure_loss
from infinilm.errors import ConfigError
from quantised_files.conversion import quantise
from quantised_files.writers import awq, of_bf16

DEMO = resolve_model("demo")


@pytest.fixture(scope="module")
def stories() -> list[str]:
    tools = str(Path(__file__).parents[2] / "tools" / "demo")
    sys.path.insert(0, tools)
    try:
        import corpus
    finally:
        sys.path.remove(tools)
    rng = random.Random("heldout-99")
    return [corpus.make_story(rng, "heldout")[1] for _ in range(6)]


@settings(deadline=None)
@given(
    rows=st.integers(1, 9),
    groups=st.integers(1, 3),
    size=st.sampled_from([8, 32, 128]),
    seed=st.integers(0, 99),
    threads=st.integers(1, 3),
)
def test_searched_scales(rows: int, groups: int, size: int, seed: int, threads: int) -> None:
    """In no group worse than rounding to the nearest of 15 or 16 steps; zeros stay zeros."""
    rng = np.random.default_rng(seed)
    weights = (rng.normal(size=(rows, groups * size)) * rng.choice([0, 1e-3, 1, 50], (rows, 1))).astype(np.float32)
    codes, scales = _core.quantise_int4(weights, size, num_threads=threads)
    q, s = codes.numpy().reshape(rows, groups, size), scales.numpy().astype(np.float64)[..., None]
    assert q.min() >= -8 and q.max() <= 7
    exact = weights.astype(np.float64).reshape(rows, groups, size)
    largest = np.take_along_axis(exact, np.abs(exact).argmax(-1)[..., None], -1)
    step = of_bf16(np.round((largest / -8).astype(np.float32).view(np.uint32) / 65536).astype(np.uint16))
    with np.errstate(divide="ignore", invalid="ignore"):
        nearest = np.clip(np.rint(np.nan_to_num(exact / step)), -8, 7) * step
    error, simple = (((w - exact) ** 2).sum(-1) for w in (q * s, nearest))
    assert (error <= simple * 1.0001 + 1e-12).all()


@pytest.mark.parametrize(("scheme", "bar"), [("w4a16-g32", 1.9e-3), ("w8a16", 3e-5), ("w8a8", 3e-5)])
def test_what_it_costs(scheme: str, bar: float, tmp_path: Path, stories: list[str]) -> None:
    out = quantise_model("demo", tmp_path / "out", scheme, use_tqdm=False)
    with open_checkpoint(out) as checkpoint, Checkpoint(DEMO) as plain:
        assert isinstance(checkpoint, QuantisedCheckpoint)
        assert {n: t.shape for n, t in checkpoint.tensors.items()} == {n: t.shape for n, t in plain.tensors.items()}
        for name, info in plain.tensors.items():
            exact = of_bf16(plain.array(name))
            if not checkpoint.is_quantised(name):
                np.testing.assert_array_equal(of_bf16(checkpoint.array(name)), exact)
                continue
            error = checkpoint.read(Source(name, 0, info.shape[0]), "float32") - exact
            assert np.abs(error).max() < np.abs(exact).max() / (7 if scheme.startswith("w4") else 120)
        sources = {name: Source(name, 0, info.shape[0]) for name, info in plain.tensors.items()}
        native = {checkpoint.native_type(sources[n]) for n in sources if checkpoint.is_quantised(n)}
        assert native == {"Q4_0" if scheme.startswith("w4") else "Q8_0"}
    loss = measure_loss("demo", out, stories)
    assert loss.num_tokens > 500 and 1e-7 < loss.kl < bar
    assert loss.other_best < 0.03 and abs(loss.other_perplexity / loss.perplexity - 1) < 0.02


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("Once upon a time there was a little fox.")
    assert main(["quantize", "demo", str(tmp_path / "out"), "--scheme", "w8a8", "--text", str(tmp_path / "text")]) == 0
    said = capsys.readouterr().out
    assert "in w8a8" in said and "KL" in said and "perplexity" in said
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["lm_head"] and config["format"] == "int-quantized"


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has 192 inputs, which are no multiple of 128; use w4a16-g32"):
        quantise_model("demo", tmp_path / "out", "w4a16")
    with pytest.raises(ConfigError, match="scheme: expected w4a16, w4a16-g32, w8a16, w8a8, got 'int3'"):
        quantise_model("demo", tmp_path / "out", "int3")
    assert not (tmp_path / "out").exists()
    quantise(DEMO, tmp_path / "quantised", awq(64))
    with pytest.raises(ConfigError, match="expected plain safetensors"):
        quantise_model(tmp_path / "quantised", tmp_path / "out", "w8a8")
