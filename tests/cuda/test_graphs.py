"""Decode steps as graphs, on the simulated device: what is recorded and launched, and that no bit changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from emulation import Run
from goldens import golden
from quantised_files.conversion import resized


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cuda-graph-models"))


@pytest.mark.parametrize(
    "case",
    [
        "design",
        "masks",
        "changes",
        "log_probs",
        "ahead",
        "uploads",
        "a_bound",
        "threads",
        "steps_without_results",
        "memory_comes_back",
    ],
)
def test_graphs(simulate: Run, models: str, case: str) -> None:
    """An audit found: The next step is prepared when the last one's ids are on the host. Now: Ids stay on the device;
    the next step is submitted while this one runs; the host sends what changed of block tables.

    An audit found: Rows with penalties, masks and log-probabilities leave graphs. Now: They stay.
    """
    outcome = simulate(f"graph_cases:{case}", folder=models)
    assert outcome.ok, outcome.text


def test_changes_of_longer_contexts(simulate: Run, models: str) -> None:
    settings = {"INFINILM_EMULATOR_SMS": "132"}  # so many blocks that every chunk of keys is an item
    outcome = simulate("graph_cases:changes_of_longer_contexts", settings=settings, folder=models)
    assert outcome.ok, outcome.text


@pytest.mark.parametrize(("cooperative", "peers"), [("1", "MemoryPeers"), ("0", "ClusterPeers")])
def test_a_large_vocabulary(simulate: Run, models: str, cooperative: str, peers: str) -> None:
    """An audit found: Blocks that share a row without clusters are launched together, and no device was asked whether
    it can (found later). Now: It is asked; without, a row has one block.

    It fails where this was planted: Cooperative launches where the device has none.
    """
    settings = {
        "INFINILM_EMULATOR_CC": "86",
        "INFINILM_EMULATOR_SMS": "8",
        "INFINILM_EMULATOR_COOPERATIVE": cooperative,
    }
    outcome = simulate("graph_cases:a_large_vocabulary", settings=settings, folder=models, peers=peers)
    assert outcome.ok, outcome.text


@pytest.mark.parametrize(
    ("name", "dtype", "streams", "seed", "steps"),
    [
        ("llama", "bfloat16", "late", 1, 8),
        ("qwen3", "float16", "eager", 2, 8),
        ("mistral-window", "bfloat16", "late", 3, 8),
        ("qwen2", "float32", "late", 4, 8),
        ("qwen2-moe", "bfloat16", "late", 5, 8),
        ("qwen3-5-dense", "bfloat16", "late", 6, 8),
        ("qwen3-next", "bfloat16", "eager", 7, 8),
        ("gemma4-text", "bfloat16", "late", 8, 5),  # whose wide heads and latents take five times as long
        ("gemma4-a4b", "float16", "eager", 9, 5),
        ("deepseek-v3", "bfloat16", "late", 10, 5),
    ],
)
def test_any_steps(simulate: Run, models: str, name: str, dtype: str, streams: str, seed: int, steps: int) -> None:
    settings = {"INFINILM_EMULATOR_STREAMS": streams}
    outcome = simulate(
        "graph_cases:anything", settings=settings, folder=models, name=name, dtype=dtype, seed=seed, steps=steps
    )
    assert outcome.ok, outcome.text


@pytest.mark.parametrize(
    ("name", "dtype", "streams", "seed", "steps"),
    [("llama", "bfloat16", "late", 1, 5), ("qwen3-next", "float16", "late", 2, 4)],
)
def test_stages(simulate: Run, models: str, name: str, dtype: str, streams: str, seed: int, steps: int) -> None:
    settings = {"INFINILM_EMULATOR_STREAMS": streams, "INFINILM_EMULATOR_DEVICES": "4", "INFINILM_EMULATOR_SMS": "64"}
    outcome = simulate(
        "graph_cases:stages", settings=settings, folder=models, name=name, dtype=dtype, seed=seed, steps=steps
    )
    assert outcome.ok, outcome.text


@pytest.mark.parametrize(("name", "dtype"), [("llama", "bfloat16"), ("mistral-window", "float16")])
def test_long_contexts(simulate: Run, models: str, name: str, dtype: str) -> None:
    outcome = simulate("graph_attention_cases:long_contexts", folder=models, name=name, dtype=dtype)
    assert outcome.ok, outcome.text


@pytest.mark.parametrize(("name", "dtype"), [("qwen3", "bfloat16"), ("gemma3-text", "float16")])
def test_keys_that_attention_stores(simulate: Run, models: str, name: str, dtype: str) -> None:
    outcome = simulate("graph_attention_cases:keys_that_attention_stores", folder=models, name=name, dtype=dtype)
    assert outcome.ok, outcome.text


def test_windows_of_their_own(simulate: Run, models: str) -> None:
    outcome = simulate("graph_attention_cases:windows_of_their_own", folder=models)
    assert outcome.ok, outcome.text


def test_layers_by_both_kernels(simulate: Run, tmp_path: Path) -> None:
    """Steps of one token each where the heads of one layer are decode's and those of another one prefill's: 18 wide
    heads on one kv head, and so many multiprocessors that every chunk of keys is an item of decode.
    """
    folder = resized(
        golden("gemma4-text"), tmp_path / "both", num_hidden_layers=2, num_kv_shared_layers=0,
        layer_types=["sliding_attention", "full_attention"], sliding_window=300, max_position_embeddings=512,
        num_attention_heads=18, num_key_value_heads=1, global_head_dim=264, head_dim=32,
        intermediate_size=48, hidden_size_per_layer_input=16,
    )  # fmt: skip
    outcome = simulate(
        "graph_attention_cases:both_kernels", settings={"INFINILM_EMULATOR_SMS": "7"}, folder=str(folder)
    )
    assert outcome.ok, outcome.text


@pytest.mark.parametrize("kernel", ["linear_decode"])
def test_a_capture_that_fails(simulate: Run, models: str, kernel: str) -> None:
    settings = {"INFINILM_EMULATOR_UNCAPTURABLE_KERNEL": kernel}
    outcome = simulate("graph_cases:a_capture_that_fails", settings=settings, folder=models)
    assert outcome.ok, outcome.text


@pytest.mark.parametrize(("tp_size", "sync"), [(2, "0"), (1, "1")])
def test_no_graphs(simulate: Run, models: str, tp_size: int, sync: str) -> None:
    settings = {"INFINILM_CUDA_SYNC": sync}
    outcome = simulate("graph_cases:no_graphs", settings=settings, folder=models, tp_size=tp_size)
    assert outcome.ok, outcome.text


@pytest.mark.sanitizer
def test_sanitized(simulate: Run, models: str) -> None:
    outcome = simulate(
        "graph_cases:anything",
        sanitize="address",
        folder=models,
        name="llama",
        dtype="bfloat16",
        seed=1,
        steps=10,
    )
    assert outcome.ok, outcome.text
