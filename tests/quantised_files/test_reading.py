"""Quantised safetensors: each layout as plain numbers, against the numbers that were written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from infinilm import _core
from infinilm.checkpoint import Checkpoint
from infinilm.checkpoint.opening import open_checkpoint
from infinilm.checkpoint.quantised.checkpoint import QuantisedCheckpoint
from infinilm.checkpoint.sources import Source
from quantised_files.writers import (
    FORMATS,
    Format,
    Tensors,
    awq,
    ct_fp4,
    gptq,
    mlx_floats,
    modelopt_fp4,
    of_bf16,
    save,
)

GOLDEN = Path(__file__).parents[1] / "golden_quantised"


def write(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    save(folder / "model.safetensors", tensors)
    return folder


def write_linear(folder: Path, form: Format, outputs: int, inputs: int, seed: int = 0) -> np.ndarray:
    tensors, weights = form.write(np.random.default_rng(seed), outputs, inputs)
    write(folder, form.config, {f"a.b{suffix}": tensor for suffix, tensor in tensors.items()})
    return weights


@pytest.mark.parametrize("form", FORMATS, ids=repr)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=4, deadline=None)
@given(data=st.data())
def test_weights(form: Format, tmp_path: Path, data: st.DataObject) -> None:
    outputs = 32 * data.draw(st.integers(1, 9))
    inputs = 64 * data.draw(st.integers(1, 12))
    exact = write_linear(tmp_path, form, outputs, inputs, data.draw(st.integers(0, 99)))
    begin = data.draw(st.integers(0, outputs - 1))
    end = data.draw(st.integers(begin, outputs))
    order = np.random.default_rng(0).permutation(end - begin) if data.draw(st.booleans()) else None
    with open_checkpoint(tmp_path) as checkpoint:
        assert isinstance(checkpoint, QuantisedCheckpoint)
        assert set(checkpoint.tensors) == {"a.b.weight"} and checkpoint.tensors["a.b.weight"].shape == exact.shape
        got = checkpoint.read(Source("a.b.weight", begin, end, order), "float32")
        half = checkpoint.read(Source("a.b.weight", begin, end, order), "float16")
    expected = exact[begin:end] if order is None else exact[begin:end][order]
    np.testing.assert_allclose(got, expected, rtol=2.5e-7, atol=0)
    np.testing.assert_array_equal(half, got.astype(np.float16))


@pytest.mark.parametrize("form", [ct_fp4("nvfp4"), modelopt_fp4(), mlx_floats("nvfp4")], ids=repr)
def test_blocks_of_nvfp4(form: Format, tmp_path: Path) -> None:
    """Codes and both scales become blocks that stand for the same numbers, unless a scale is no number."""
    tensors, exact = form.write(np.random.default_rng(0), 24, 192)
    name = next(suffix for suffix in (".weight_scale", ".scales") if suffix in tensors)
    loaded: list[_core.Tensor] = []
    for broken in (False, True):
        if broken:
            dtype, scales = tensors[name]
            tensors[name] = dtype, np.where(np.arange(scales.shape[1]) == 7, np.uint8(0x7F), scales)
        write(tmp_path, form.config, {f"a.b{suffix}": tensor for suffix, tensor in tensors.items()})
        with open_checkpoint(tmp_path) as checkpoint:
            assert isinstance(checkpoint, QuantisedCheckpoint)
            sources = {"a.b.weight": Source("a.b.weight", 8, 24)}
            linears = {"a.b": (["a.b.weight"], False, 64)}
            native = checkpoint.native_weights(linears, sources, "cuda", by_headers=False)
            assert native == ({} if broken else {"a.b.weight": "NVFP4_ROW"})
            assert not checkpoint.native_weights(linears, sources, "cpu")
            assert not checkpoint.native_weights({"a.b": (["a.b.weight"], False, 96)}, sources, "cuda")
            if broken:
                return
            checkpoint.load_blocks(lambda *call: loaded.append(call[1]), "w", sources["a.b.weight"], "NVFP4_ROW")
        (blocks,) = loaded
        got = _core.gguf_dequantise(blocks.numpy().reshape(-1), "NVFP4_ROW", [16, 192], "float32").numpy()
        np.testing.assert_allclose(got, exact[8:], rtol=2.5e-7, atol=0)


AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": True, "data_type": "int"}


def test_auto_round(tmp_path: Path) -> None:
    """What GPTQ and AWQ store under settings of AutoRound's own, which may differ in single modules."""
    rng = np.random.default_rng(0)
    forms = {"a.gate": gptq(4, 64), "a.gate_proj": gptq(8, 32), "b.q": gptq(4, 64, sym=False)}
    written = {module: form.write(rng, 64, 128) for module, form in forms.items()}
    tensors = {module + suffix: tensor for module, (parts, _) in written.items() for suffix, tensor in parts.items()}
    tensors["c.plain.weight"] = ("F32", np.ones((64, 128), np.float32))
    single = {"a.gate_proj": {"bits": 8, "group_size": 32}, r"q$": {"sym": False}, "c.plain": {"bits": 16}}
    write(tmp_path / "gptq", {**AUTO_ROUND, "packing_format": "auto_round:auto_gptq", "extra_config": single}, tensors)
    with open_checkpoint(tmp_path / "gptq") as checkpoint:
        assert isinstance(checkpoint, QuantisedCheckpoint)
        for module, (_, exact) in written.items():
            got = checkpoint.read(Source(f"{module}.weight", 0, 64), "float32")
            np.testing.assert_allclose(got, exact, rtol=2.5e-7, atol=0)
    parts, exact = awq(64).write(rng, 64, 128)
    as_awq = {**AUTO_ROUND, "sym": False, "packing_format": "auto_round:auto_awq"}
    write(tmp_path / "awq", as_awq, {f"a.b{suffix}": tensor for suffix, tensor in parts.items()})
    with open_checkpoint(tmp_path / "awq") as checkpoint:
        assert isinstance(checkpoint, QuantisedCheckpoint)
        got = checkpoint.read(Source("a.b.weight", 0, 64), "float32")
        np.testing.assert_allclose(got, exact, rtol=2.5e-7, atol=0)


def golden(name: str) -> tuple[QuantisedCheckpoint, dict[str, np.ndarray]]:
    checkpoint = open_checkpoint(GOLDEN / name)
    assert isinstance(checkpoint, QuantisedCheckpoint)
    with Checkpoint(GOLDEN / name / "expected.safetensors") as expected:
        return checkpoint, {key: of_bf16(expected.array(key)) for key in expected.tensors}


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir() if path.is_dir()))
def test_files_of_the_tools(name: str) -> None:
    """Weights that the tools wrote, as the tools read them: in bfloat16, some by way of float16."""
    checkpoint, expected = golden(name)
    with checkpoint:
        assert set(checkpoint.tensors) == set(expected)
        for key, weights in expected.items():
            matrices = dict(enumerate(weights)) if weights.ndim == 3 else {None: weights}
            for matrix, exact in matrices.items():
                got = checkpoint.read(Source(key, 0, len(exact), matrix=matrix), "float32")
                np.testing.assert_allclose(got, exact, rtol=2**-8 + 2**-11, atol=0)
