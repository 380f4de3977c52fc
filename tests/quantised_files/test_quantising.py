"""`infinilm quantize`: what it writes is read again, and costs what the scheme must cost."""

from __future__ import annotations

import contextlib
import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest
from goldens import golden
from hypothesis import given, settings, strategies as st

from bench.compare_models import to_quantised
from infinilm import LLM, _core
from infinilm.checkpoint import Checkpoint, resolve_model
from infinilm.checkpoint.opening import open_checkpoint
from infinilm.checkpoint.quantised.checkpoint import QuantisedCheckpoint
from infinilm.checkpoint.quantised.rounding import quantise_linear
from infinilm.checkpoint.quantised.writer import quantise_model
from infinilm.checkpoint.sources import Source
from infinilm.cli.main import main
from infinilm.debug.calibration import Calibration
from infinilm.debug.loss import measure_loss
from infinilm.engine.hooks import HookRegistry
from infinilm.errors import ConfigError
from quantised_files.conversion import quantise
from quantised_files.writers import Format, awq, bnb4, bnb8, ct_fp4, of_bf16

DEMO = resolve_model("demo")
IDS = [1, 5, 9, 77, 3, 21, 40, 8, 2, 6, 13, 90]


@pytest.fixture(scope="module")
def stories() -> list[str]:
    tools = str(Path(__file__).parents[2] / "tools" / "demo")
    sys.path.insert(0, tools)
    try:
        import corpus
    finally:
        sys.path.remove(tools)
    rng = random.Random("heldout-99")
    return [corpus.make_story(rng, "heldout")[1] for _ in range(18)]


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
    loss = measure_loss("demo", out, stories[:6])
    assert loss.num_tokens > 500 and 1e-7 < loss.kl < bar
    assert loss.other_best < 0.03 and abs(loss.other_perplexity / loss.perplexity - 1) < 0.02


@pytest.mark.parametrize(("name", "bar"), [("fp8", 1.6e-4), ("gptq", 2.4e-3), ("awq", 1.8e-3)])
def test_what_formats_of_other_tools_cost(name: str, bar: float, tmp_path: Path, stories: list[str]) -> None:
    """Rounded to nearest: what docs/formats.md says that the real tools' files cost."""
    to_quantised(DEMO, name, tmp_path / "out")
    loss = measure_loss("demo", tmp_path / "out", stories[:6])
    assert bar / 4 < loss.kl < bar


@pytest.mark.parametrize(
    ("form", "bar"),
    [(bnb8(), 1.1e-5), (bnb4(double=False), 1.8e-3), (ct_fp4("nvfp4"), 2.2e-3), (ct_fp4("mxfp4"), 3.6e-3)],
    ids=repr,
)
def test_what_tables_of_values_cost(form: Format, bar: float, tmp_path: Path, stories: list[str]) -> None:
    quantise(DEMO, tmp_path / "out", form, rounded=True)
    loss = measure_loss("demo", tmp_path / "out", stories[:6])
    assert bar / 4 < loss.kl < bar


@settings(deadline=None, max_examples=20)
@given(
    bits=st.sampled_from([4, 8]),
    inputs=st.sampled_from([32, 96, 192, 288]),
    tokens=st.sampled_from([3, 500]),
    seed=st.integers(0, 99),
)
def test_rounding_with_a_gram_matrix(bits: int, inputs: int, tokens: int, seed: int) -> None:
    """Outputs over the tokens change less than with each weight's nearest; inputs that are never there do no harm."""
    rng = np.random.default_rng(seed)
    weights = rng.normal(size=(24, inputs)).astype(np.float32)
    x = rng.normal(size=(tokens, 8)) @ rng.normal(size=(8, inputs)) + 0.1 * rng.normal(size=(tokens, inputs))
    x[:, 5] = 0
    group = 32 if bits == 4 else 0
    changes = []
    for gram in (None, (x.T @ x).astype(np.float32)):
        integers, scales = quantise_linear(weights, bits, group, gram)
        assert integers.shape == weights.shape and scales.shape == (24, inputs // (group or inputs))
        assert integers.min() >= (-8 if bits == 4 else -127) and integers.max() <= (7 if bits == 4 else 127)
        rounded = integers * np.repeat(of_bf16(scales), group or inputs, 1)
        changes.append(float((((rounded - weights) @ x.T) ** 2).sum()))
    assert changes[1] < 0.7 * changes[0]


@pytest.mark.parametrize(
    "name", ["demo", "gemma2", "olmo2", "cohere", "phi3", "qwen2-moe", "qwen3-5", "lfm2", "falcon-h1", "gemma4-moe"]
)
def test_what_a_calibration_sees(name: str) -> None:
    """Sums over the tokens that the model computes: each linear's output is its weights times what was seen."""
    model = DEMO if name == "demo" else golden(name)
    layer = {"qwen3-5": 3, "lfm2": 2}.get(name, 1)  # the first that keeps no state
    hooks, outputs = HookRegistry(), {}
    sites = {"self_attn.v_proj": "v_proj", "self_attn.o_proj": "o_proj", "mlp.up_proj": "up_proj"}
    sites |= {"mlp.down_proj": "down_proj"}
    for site in sites.values():
        with contextlib.suppress(ConfigError):
            hooks.register_hook(f"layer{layer}_{site}", lambda n, t, _: outputs.__setitem__(n, t.numpy().copy()))
    with Calibration(model, IDS) as calibration:
        with LLM(model, dtype="float32", hooks=hooks, max_num_seqs=1, use_tqdm=False) as llm:
            state = {}
            llm.forward(IDS)
            state = {n: t.numpy().astype(np.float64) for n, t in llm._engine.state_dict()[0].items()}
        for module, site in sites.items():
            gram = calibration.gram(f"model.layers.{layer}.{module}.weight")
            if f"layer{layer}_{site}" not in outputs:
                assert gram is None or module == "mlp.up_proj"
                continue
            assert gram is not None
            out = outputs[f"layer{layer}_{site}"].reshape(len(IDS), -1) - state.get(
                f"model.layers.{layer}.{module}.bias", 0
            )
            weight = state[f"model.layers.{layer}.{module}.weight"]
            np.testing.assert_allclose(weight @ gram @ weight.T, out.T @ out, rtol=1e-3, atol=1e-3 * (out**2).sum())
        if name == "qwen3-5":
            of_q = calibration.gram("model.layers.3.self_attn.q_proj.weight")
            np.testing.assert_array_equal(calibration.gram("model.layers.3.self_attn.gate_proj.weight"), of_q)
            for module in ("in_proj_qkv", "in_proj_z", "out_proj"):
                assert calibration.gram(f"model.layers.1.linear_attn.{module}.weight") is not None
        if name == "falcon-h1":
            assert all(
                calibration.gram(f"model.layers.1.mamba.{part}_proj.weight") is not None for part in ("in", "out")
            )
        if name == "lfm2":
            assert all(
                calibration.gram(f"model.layers.1.conv.{part}_proj.weight") is not None for part in ("in", "out")
            )
        assert calibration.gram("lm_head.weight") is None


def test_calibration_costs_less(tmp_path: Path, stories: list[str]) -> None:
    """The bundled model is calibrated by stories other than those it is judged by."""
    out = tmp_path / "searched", tmp_path / "calibrated"
    quantise_model("demo", out[0], "w4a16-g32", use_tqdm=False)
    with Calibration("demo", "\n".join(stories[4:])) as calibration:
        quantise_model("demo", out[1], "w4a16-g32", use_tqdm=False, gram_of=calibration.gram)
    searched, calibrated = (measure_loss("demo", folder, stories[:4]).kl for folder in out)
    assert calibrated < 0.85 * searched


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("Once upon a time there was a little fox.")
    assert main(["quantize", "demo", str(tmp_path / "out"), "--scheme", "w8a8", "--text", str(tmp_path / "text")]) == 0
    said = capsys.readouterr().out
    assert "in w8a8" in said and "KL" in said and "perplexity" in said
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["lm_head"] and config["format"] == "int-quantized"


def test_the_default_scheme(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Groups of 128 inputs do not divide those of the bundled model, the first that a new user quantises."""
    assert main(["quantize", "demo", str(tmp_path / "out"), "--device", "cpu"]) == 0
    said = capsys.readouterr()
    assert "in w4a16-g32" in said.out and "tokens of a text of its own" in said.out
    assert "pass one with --text" in said.err


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has 192 inputs, which are no multiple of 128; use w4a16-g32"):
        quantise_model("demo", tmp_path / "out", "w4a16")
    with pytest.raises(ConfigError, match="scheme: expected w4a16, w4a16-g32, w8a16, w8a8, got 'int3'"):
        quantise_model("demo", tmp_path / "out", "int3")
    assert not (tmp_path / "out").exists()
    quantise(DEMO, tmp_path / "quantised", awq(64))
    with pytest.raises(ConfigError, match="expected plain safetensors"):
        quantise_model(tmp_path / "quantised", tmp_path / "out", "w8a8")
