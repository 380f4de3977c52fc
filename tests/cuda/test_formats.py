"""Weights of others' files on the emulator: kept as they are where kernels have a layout for them, else 16 bits."""

from __future__ import annotations

from typing import Any

import pytest
from emulation import LINEARS, ROOT, Run

RANKS = {"INFINILM_EMULATOR_DEVICES": "2", "INFINILM_EMULATOR_SMS": "64"}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cuda-formats"))


@pytest.mark.parametrize(
    ("name", "form", "arguments", "dtype", "tp_size", "native"),
    [
        ("llama", "awq", [64], "bfloat16", 1, True),
        ("llama-biases", "gptq", [4, 64, False], "float16", 2, True),
        ("qwen3", "ct_packed", [4, 32], "bfloat16", 2, True),
        ("qwen2-moe", "ct_packed", [4, 32], "float16", 1, True),
        ("llama", "ct_int8", [], "bfloat16", 1, True),
        ("llama", "ct_fp8", ["channel"], "float16", 2, True),
        ("llama", "fp8_block", [[128, 128], "F32"], "bfloat16", 2, True),
        ("qwen2-moe", "ct_fp8", ["block", [64, 32]], "bfloat16", 1, True),
        ("qwen2-moe", "ct_fp4", ["mxfp4"], "float16", 2, True),
        # With states, with experts beside layers of several shapes, and with latents, as their publishers write them:
        ("qwen3-5-dense", "fp8_block", [[128, 128], "F32"], "bfloat16", 1, True),
        ("qwen3-5-dense", "ct_packed", [4, 32], "bfloat16", 2, True),
        ("gemma4-a4b", "ct_packed", [4, 32], "bfloat16", 1, True),
        ("deepseek-v3", "fp8_block", [[128, 128], "F32"], "bfloat16", 1, True),
        ("llama", "mlx", [4, 64], "bfloat16", 1, True),
        ("llama", "ct_fp4", ["nvfp4"], "float16", 2, True),
        ("llama", "awq", [32], "bfloat16", 1, False),
        ("llama", "bnb4", [True], "float16", 1, False),
    ],
)
def test_safetensors(
    simulate: Run,
    models: str,
    fake_nccl: str,
    name: str,
    form: str,
    arguments: list[Any],
    dtype: str,
    tp_size: int,
    native: bool,
) -> None:
    parameters = {"name": name, "form": form, "arguments": arguments, "dtype": dtype, "tp_size": tp_size}
    where = {"folder": models, "nccl": fake_nccl, "settings": RANKS if tp_size > 1 else None}
    outcome = simulate("formats_cases:safetensors", native=native, **where, **parameters)
    assert outcome.ok, outcome.text


@pytest.mark.parametrize(
    ("name", "blocks", "dtype", "tp_size", "capability"),
    [
        ("llama", False, "bfloat16", 1, "90"),
        ("llama", True, "bfloat16", 1, "90"),
        ("llama", False, "float16", 2, "89"),
        ("llama", True, "bfloat16", 2, "120"),
        ("qwen2-moe", False, "bfloat16", 1, "89"),
        ("qwen2-moe", False, "bfloat16", 2, "90"),
        ("qwen2-moe", True, "bfloat16", 1, "89"),
        ("qwen2-moe", True, "float16", 1, "90"),
    ],
)
def test_fp8_inputs(
    simulate: Run, models: str, fake_nccl: str, name: str, blocks: bool, dtype: str, tp_size: int, capability: str
) -> None:
    settings = {"INFINILM_EMULATOR_CC": capability, **(RANKS if tp_size > 1 else {})}
    where = {"folder": models, "nccl": fake_nccl, "settings": settings}
    outcome = simulate("formats_cases:fp8_inputs", name=name, blocks=blocks, dtype=dtype, tp_size=tp_size, **where)
    assert outcome.ok, outcome.text


def test_fp8_inputs_of_fp8_weights(simulate: Run, models: str) -> None:
    outcome = simulate("formats_cases:fp8_inputs_of_fp8_weights", folder=models)
    assert outcome.ok, outcome.text


def test_fp8_inputs_without_such_tensor_cores(simulate: Run, models: str) -> None:
    settings = {"INFINILM_EMULATOR_CC": "80"}
    outcome = simulate("formats_cases:no_fp8_inputs", folder=models, settings=settings)
    assert outcome.ok, outcome.text


@pytest.mark.parametrize(
    ("name", "type_name", "embedding", "dtype", "tp_size"),
    [
        ("llama", "Q4_0", "Q8_0", "bfloat16", 2),
        ("llama-mqa-tied", "Q8_0", "Q4_0", "float16", 1),
        ("llama", "Q4_K_M", "", "bfloat16", 2),
        ("qwen2-moe", "dynamic", "", "float16", 1),
        ("llama-mqa-tied", "Q5_K", "Q6_K", "bfloat16", 1),
        ("llama", "Q2_K mix", "", "bfloat16", 2),
        ("llama", "Q5_1", "Q4_1", "float16", 2),
        ("qwen2-moe", "NVFP4", "Q5_1", "bfloat16", 1),
        # As blocks of another type:
        ("llama", "Q5_0", "F16", "bfloat16", 1),
        ("llama", "IQ4_NL", "F16", "float16", 2),
        ("llama", "IQ3_S", "Q3_K", "bfloat16", 2),
        ("qwen2-moe", "IQ3_XXS", "F16", "bfloat16", 1),
        ("llama", "TQ2_0", "Q8_0", "bfloat16", 1),
        ("llama", "IQ4_XS", "IQ1_S", "float16", 1),
        ("llama", "IQ2_XXS", "IQ2_S", "bfloat16", 1),
    ],
)
def test_gguf(
    simulate: Run,
    models: str,
    fake_nccl: str,
    name: str,
    type_name: str,
    embedding: str,
    dtype: str,
    tp_size: int,
) -> None:
    pytest.importorskip("gguf")
    parameters = {"name": name, "type_name": type_name, "embedding": embedding, "dtype": dtype, "tp_size": tp_size}
    where = {"folder": models, "nccl": fake_nccl, "settings": RANKS if tp_size > 1 else None}
    outcome = simulate("formats_cases:gguf", **where, **parameters)
    assert outcome.ok, outcome.text


def test_a_weight_that_float16_cannot_hold(simulate: Run, models: str) -> None:
    outcome = simulate("formats_cases:beyond_float16", folder=models)
    assert outcome.ok, outcome.text


def test_what_the_package_knows_of_the_library(emulate: Run) -> None:
    sources = [*LINEARS, ROOT / "cuda/rows/rowwise.cu", ROOT / "cuda/linear/pack.cu", "linear_quantised_api.cu"]
    outcome = emulate(sources, "formats_cases:block_types")
    assert outcome.ok, outcome.text
