"""Tensor parallelism on the simulated device, whose ranks share it."""

from __future__ import annotations

import pytest
from emulation import Run


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cuda-rank-models"))


@pytest.mark.parametrize(
    ("name", "dtype", "tp_size"),
    [("llama", "bfloat16", 2), ("llama-biases", "float32", 2), ("qwen3", "float16", 2), ("llama", "float32", 4)],
)
def test_ranks_that_share_a_device(simulate: Run, models: str, name: str, dtype: str, tp_size: int) -> None:
    outcome = simulate("rank_cases:parity", name=name, folder=models, dtype=dtype, tp_size=tp_size)
    assert outcome.ok, outcome.text


def test_a_rank_that_fails(simulate: Run, models: str) -> None:
    outcome = simulate("rank_cases:a_rank_that_fails", folder=models)
    assert outcome.ok, outcome.text
