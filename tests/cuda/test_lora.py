"""Requests with LoRA adapters on the emulator."""

from __future__ import annotations

from pathlib import Path

import pytest
from emulation import Run


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cuda-lora-models"))


@pytest.mark.parametrize(
    ("name", "dtype", "tp_size"), [("llama", "float16", 1), ("qwen3", "bfloat16", 1), ("llama", "bfloat16", 2)]
)
def test_logits(simulate: Run, models: str, fake_nccl: str, name: str, dtype: str, tp_size: int) -> None:
    settings = {"INFINILM_EMULATOR_DEVICES": str(tp_size), "INFINILM_EMULATOR_SMS": "64"}
    parameters = {"name": name, "folder": models, "dtype": dtype, "tp_size": tp_size, "nccl": fake_nccl}
    outcome = simulate("lora_cases:logits", settings=settings, **parameters)
    assert outcome.ok, outcome.text


@pytest.mark.parametrize(("base_name", "dtype"), [("deepseek-v2", "bfloat16"), ("qwen3-next", "float32")])
def test_families(simulate: Run, tmp_path: Path, fake_nccl: str, base_name: str, dtype: str) -> None:
    settings = {"INFINILM_EMULATOR_DEVICES": "2", "INFINILM_EMULATOR_SMS": "64"}
    parameters = {"base_name": base_name, "folder": str(tmp_path), "dtype": dtype, "nccl": fake_nccl}
    outcome = simulate("lora_cases:of_a_family", settings=settings, **parameters)
    assert outcome.ok, outcome.text


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gates_and_ups_of_two_types(simulate: Run, models: str, dtype: str) -> None:
    outcome = simulate("lora_cases:of_two_types", folder=models, dtype=dtype)
    assert outcome.ok, outcome.text


def test_company(simulate: Run, models: str) -> None:
    outcome = simulate("lora_cases:company", name="llama", folder=models, dtype="bfloat16")
    assert outcome.ok, outcome.text
