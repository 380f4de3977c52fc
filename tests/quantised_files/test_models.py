"""Models from quantised safetensors: the logits of the same weights in float32, and integers kept as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli.support import run
from goldens import golden

from infinilm import LLM, _core, plan_memory
from infinilm.checkpoint import loading, resolve_model
from infinilm.checkpoint.pack_writer import pack_model
from infinilm.engine.infer_engine import InferEngine
from infinilm.errors import ConfigError
from infinilm.models.reference import ReferenceModel
from quantised_files.conversion import quantise, quantise_experts, resized, write_plain
from quantised_files.writers import (
    FORMATS,
    Format,
    awq,
    bnb4,
    ct_fp4,
    ct_int8,
    ct_packed,
    fp8_block,
    gptq,
    hqq,
    torchao,
)

DEMO = resolve_model("demo")


def rounds() -> bool:
    """Whether inputs are rounded to bfloat16 beside weights of bfloat16 and FP8."""
    return bool(_core.cpu_multiplies_bf16())


IDS = [1, 5, 9, 77, 3, 21, 40, 8, 2, 6, 13, 90]


def logits(model: Path, dtype: str = "float32", **settings: Any) -> np.ndarray:
    """[tokens, vocab_size]"""
    with LLM(model, dtype=dtype, max_model_len=32, max_num_seqs=2, use_tqdm=False, **settings) as llm:
        return np.array(llm.forward(IDS))


def rms(values: np.ndarray) -> float:
    return float(np.sqrt((values**2).mean()))


def progress_of(model: Path) -> float:
    """What share of its bytes loading a model has told at the end."""
    told: list[float] = []

    @contextmanager
    def bar(total: int, *_: Any, **__: Any) -> Iterator[Callable[[int], None]]:
        yield lambda count: told.append(count / total)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "progress_bar", bar)
        logits(model)
    return sum(told)


PLAIN = [
    ct_packed(8, 32, sym=False),
    gptq(3, 64),
    gptq(4, 32, sym=False, act=True),
    fp8_block((128, 128), "F32"),
    bnb4(double=True),
    ct_fp4("nvfp4"),
    hqq(4, 64),
    torchao("int4", 64),
]


@pytest.mark.parametrize("form", PLAIN, ids=repr)
def test_plain_numbers(form: Format, tmp_path: Path) -> None:
    """Weights that are made plain numbers: exact in float32, float16 where nothing is asked for.

    Some CPUs then round the inputs of the plain bfloat16 weights, here those of the embedding.
    """
    weights = quantise(DEMO, tmp_path / "quantised", form)
    expected = logits(write_plain(DEMO, tmp_path / "plain", weights))
    np.testing.assert_allclose(logits(tmp_path / "quantised"), expected, rtol=0, atol=2e-5 * rms(expected))
    for dtype, bar in (("float16", 1.5e-3), ("auto", 2e-2)):
        assert np.abs(logits(tmp_path / "quantised", dtype) - expected).max() < bar * 4 * rms(expected), dtype


@pytest.mark.parametrize("form", [f for f in FORMATS if f.native and "v2" not in f.name], ids=repr)
def test_integers_as_they_are(form: Format, tmp_path: Path) -> None:
    """Integers and scales stay what they are; what differs from the exact weights is the rounding of inputs."""
    folder = tmp_path / "quantised"
    weights = quantise(DEMO, folder, form)
    exact = logits(write_plain(DEMO, tmp_path / "plain", weights))
    plain = logits(folder)
    np.testing.assert_allclose(plain, exact, rtol=0, atol=2e-5 * rms(exact))
    with LLM(folder, max_model_len=32, use_tqdm=False) as llm:
        got = llm.forward(IDS)
        one_by_one = [llm.forward(IDS[: i + 1])[-1] for i in range(len(IDS))]
        state = {name: tensor.numpy() for name, tensor in llm._engine.state_dict()[0].items()}
        used = llm.memory.weight_bytes
    np.testing.assert_array_equal(got, one_by_one)
    assert rms(got - exact) / rms(exact) < 0.05
    assert not np.array_equal(got, plain)
    for name, weight in weights.items():
        np.testing.assert_allclose(state[name], weight, rtol=2.5e-7, err_msg=name)
    assert used < plan_memory(folder, dtype="float16").weight_bytes
    assert used < 1.25 * (folder / "model.safetensors").stat().st_size  # scales are repeated for each 32
    np.testing.assert_array_equal(logits(folder, "auto", num_threads=1), got)


@pytest.mark.parametrize(
    "form", [ct_packed(4, 64), gptq(4, 32, sym=False, act=True), fp8_block((128, 128), "F32")], ids=repr
)
def test_ranks_and_the_reference(form: Format, tmp_path: Path) -> None:
    """Ranks cut plain numbers or blocks; the numpy model reads what the engine reads."""
    folder = tmp_path / "quantised"
    quantise(DEMO, folder, form)
    expected = logits(folder)
    np.testing.assert_allclose(logits(folder, tensor_parallel_size=2), expected, rtol=0, atol=2e-5 * rms(expected))
    auto = logits(folder, "auto")  # where the sums of ranks differ in a last bit, an input may be rounded otherwise
    np.testing.assert_allclose(logits(folder, "auto", tensor_parallel_size=2), auto, rtol=0, atol=5e-3 * rms(auto))
    reference = ReferenceModel.from_pretrained(folder).forward([IDS])
    np.testing.assert_allclose(reference, expected, rtol=0, atol=1e-4 * rms(expected))


def test_state_dict_of_floats(tmp_path: Path) -> None:
    """Codes are not among what it gives; who asks for them is told where they are."""
    weights = quantise(DEMO, tmp_path / "quantised", gptq(4, 32))
    with InferEngine(tmp_path / "quantised") as engine:
        engine.load_weights(tmp_path / "quantised", use_tqdm=False)
        (state,) = engine.state_dict(dequantize=True)
        for key, tensor in engine.state_dict()[0].items():
            np.testing.assert_array_equal(state[key].numpy(), tensor.numpy(), key)
            np.testing.assert_allclose(state[key].numpy(), weights[key], rtol=2.5e-7, err_msg=key)
        with pytest.raises(ConfigError, match=r"dequantize must be True; got False.*read the files of the model"):
            engine.state_dict(dequantize=False)
        with pytest.raises(TypeError, match="dequantize must be True or False; got 'no'"):
            engine.state_dict(dequantize="no")  # type: ignore[arg-type]


def test_zero_points_where_none_are_said(tmp_path: Path) -> None:
    """What the config says of them is only believed for the plan: here plain numbers are made after all."""
    form = gptq(4, 64, sym=False)
    weights = quantise(DEMO, tmp_path / "quantised", replace(form, config=form.config | {"sym": True}))
    expected = logits(write_plain(DEMO, tmp_path / "plain", weights))
    with LLM(tmp_path / "quantised", max_model_len=32, use_tqdm=False) as llm:
        assert llm._plan.native_types
        assert np.abs(llm.forward(IDS) - expected).max() < 2e-2 * 4 * rms(expected)


def test_packed(tmp_path: Path) -> None:
    """`infinilm pack` makes plain numbers, or integers of its own; a packed folder says nothing of the old ones."""
    quantise(DEMO, tmp_path / "quantised", awq(64))
    pack_model(tmp_path / "quantised", tmp_path / "packed", use_tqdm=False)
    halves = logits(tmp_path / "quantised", "float16", kv_cache_dtype="float32")
    np.testing.assert_allclose(logits(tmp_path / "packed"), halves, rtol=0, atol=1e-4 * rms(halves))
    pack_model(tmp_path / "quantised", tmp_path / "int8", quantization="int8", use_tqdm=False)
    np.testing.assert_array_equal(
        logits(tmp_path / "int8"), logits(tmp_path / "quantised", "auto", quantization="int8", kv_cache_dtype="float32")
    )


@pytest.mark.parametrize(
    ("form", "told"),
    [
        (
            ct_int8(),
            "compressed-tensors int8 used as they are (inputs of linears rounded to int8 per 32 of a token; the format "
            "asks for int8 per token)",
        ),
        (
            fp8_block((128, 128), "F32"),
            "fp8 128x128 used as they are (inputs of linears {rounded}; the format asks for fp8 per 128 of a token)",
        ),
        (
            ct_int8(sym=False),
            "compressed-tensors int8 asymmetric made float16 (inputs of linears not rounded; the format asks for int8 "
            "per token)",
        ),
    ],
    ids=repr,
)
def test_what_info_tells(form: Format, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is computed as it is, what becomes floats, and what the format asks for beside."""
    quantise(DEMO, tmp_path / "quantised", form)
    assert run("info", tmp_path / "quantised", "--device", "cpu") == 0
    told = told.format(rounded="rounded to bfloat16" if rounds() else "not rounded")
    scheme, _, _ = told.replace(" made ", " used ").partition(" used ")
    stored = f"stored as {scheme} (84.3 %), bfloat16 (15.7 %)"  # the embedding
    assert f"{stored}, {told}, computed in {'bfloat16' if rounds() else 'float32'} on cpu" in capsys.readouterr().out
    assert run("info", tmp_path / "quantised", "--device", "cpu", "--dtype", "float32") == 0
    out = capsys.readouterr().out
    assert "made float32 (inputs of linears not rounded; the format asks for" in out
    assert "used as they are" not in out


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("phi3", ct_packed(4, -1)),
        ("glm4", awq(-1)),
        ("qwen3-moe", ct_int8()),
        ("deepseek-v3", fp8_block((16, 16), "F32")),
        ("youtu", ct_int8()),
    ],
)
def test_other_names(name: str, form: Format, tmp_path: Path) -> None:
    """Parts of one tensor, rows in another order, experts, keys that are transposed."""
    weights = quantise(golden(name), tmp_path / "quantised", form)
    expected = logits(write_plain(golden(name), tmp_path / "plain", weights))
    np.testing.assert_allclose(logits(tmp_path / "quantised"), expected, rtol=0, atol=2e-5 * rms(expected))
    auto = logits(tmp_path / "quantised", "auto")
    assert rms(auto - expected) < 0.05 * rms(expected)


@pytest.mark.parametrize(("name", "form"), [("glm4", gptq(4, 32)), ("qwen2", ct_int8())])
def test_integers_of_other_families(name: str, form: Format, tmp_path: Path) -> None:
    """Parts of one tensor, rows in another order, and biases beside integers, in sizes that fit groups of 32."""
    shapes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "head_dim": 32}
    plain = resized(golden(name), tmp_path / "source", **shapes, num_key_value_heads=1)
    weights = quantise(plain, tmp_path / "quantised", form)
    exact = logits(write_plain(plain, tmp_path / "plain", weights))
    with LLM(tmp_path / "quantised", max_model_len=32, use_tqdm=False) as llm:
        got = llm.forward(IDS)
        state = {key: tensor.numpy() for key, tensor in llm._engine.state_dict()[0].items()}
    with InferEngine(tmp_path / "plain") as engine:
        engine.load_weights(tmp_path / "plain", use_tqdm=False)
        for key, tensor in engine.state_dict()[0].items():
            np.testing.assert_allclose(state[key], tensor.numpy(), rtol=1e-6, err_msg=key)
    assert 1e-4 < rms(got - exact) / rms(exact) < 0.05


def test_experts_of_gpt_oss(tmp_path: Path) -> None:
    """Its experts in MXFP4, as they are downloaded: outputs are rows there, and columns where they are plain."""
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    plain = resized(golden("gpt-oss"), tmp_path / "source", **sizes)
    folder = tmp_path / "quantised"
    weights = quantise_experts(plain, folder)
    exact_logits = logits(write_plain(plain, tmp_path / "plain", weights))
    assert [progress_of(model) for model in (folder, tmp_path / "plain")] == [pytest.approx(1, abs=0.01)] * 2
    np.testing.assert_allclose(logits(folder), exact_logits, rtol=0, atol=2e-5 * rms(exact_logits))
    with LLM(folder, max_model_len=32, use_tqdm=False) as llm:
        assert llm._plan.native_types == ("mxfp4 g32",)
        got = llm.forward(IDS)
        state = {key: tensor.numpy() for key, tensor in llm._engine.state_dict()[0].items()}
    gate_up = weights["model.layers.1.mlp.experts.gate_up_proj"][3]  # [inputs, outputs]: gate and up take turns
    np.testing.assert_array_equal(state["model.layers.1.mlp.experts.3.gate_proj.weight"], gate_up[:, ::2].T)
    np.testing.assert_array_equal(state["model.layers.1.mlp.experts.3.up_proj.weight"], gate_up[:, 1::2].T)
    assert 1e-4 < rms(got - exact_logits) / rms(exact_logits) < 0.05
    np.testing.assert_allclose(logits(folder, "auto", tensor_parallel_size=2), got, rtol=0, atol=0.05 * rms(got))
