"""Tensor parallelism on simulated devices: ranks that share one, and ranks with one each."""

from __future__ import annotations

import pytest
from emulation import Run, Worker


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cuda-rank-models"))


@pytest.mark.parametrize(
    ("name", "dtype", "tp_size"),
    [
        ("llama", "bfloat16", 2),
        ("llama-biases", "float32", 2),
        ("qwen3", "float16", 2),
        ("granite", "bfloat16", 2),
        ("llama", "float32", 4),
        ("olmo2", "bfloat16", 2),
        ("qwen2-moe", "bfloat16", 2),
        ("qwen3-next", "bfloat16", 2),
        ("gemma4-text", "float32", 2),
        ("gemma4-a4b", "float32", 2),
        ("deepseek-v3", "bfloat16", 2),
        ("kimi-k2", "float32", 2),
    ],
)
def test_ranks_that_share_a_device(simulate: Run, models: str, name: str, dtype: str, tp_size: int) -> None:
    outcome = simulate("rank_cases:parity", name=name, folder=models, dtype=dtype, tp_size=tp_size)
    assert outcome.ok, outcome.text


@pytest.mark.parametrize(("name", "cache"), [("qwen3", "int8"), ("deepseek-v3", "fp8")])
def test_ranks_with_a_cache_of_8_bits(simulate: Run, models: str, name: str, cache: str) -> None:
    """The numbers of a head are those that one rank alone would keep of it."""
    shape = {"name": name, "dtype": "bfloat16", "tp_size": 2, "cache": cache}
    outcome = simulate("rank_cases:parity", folder=models, **shape)
    assert outcome.ok, outcome.text


def test_a_rank_that_fails(simulate: Run, models: str) -> None:
    outcome = simulate("rank_cases:a_rank_that_fails", folder=models)
    assert outcome.ok, outcome.text


@pytest.mark.parametrize(
    ("name", "dtype", "tp_size", "layers"),
    [
        ("llama", "bfloat16", 2, 2),
        ("llama-biases", "float32", 2, 1),
        ("qwen3", "float16", 4, 1),
        ("olmo2", "bfloat16", 4, 1),
        ("qwen2-moe", "bfloat16", 2, 1),
        # Layers that differ: all are there.
        ("qwen3-next", "bfloat16", 2, 3),
        ("gemma4-text", "bfloat16", 2, 5),
        ("gemma4-a4b", "float16", 2, 4),
        ("kimi-k2", "bfloat16", 2, 3),
    ],
)
def test_ranks_with_a_device_each(
    simulate: Run, models: str, fake_nccl: str, name: str, dtype: str, tp_size: int, layers: int
) -> None:
    """An audit found: Peer access is believed where the driver says yes. Now: Each peer proves that it can write; else
    sums go over NCCL.

    It fails where this was planted: What peers wrote is not looked at.
    """
    devices = {"INFINILM_EMULATOR_DEVICES": str(tp_size), "INFINILM_EMULATOR_SMS": "64"}
    parameters = {"name": name, "folder": models, "dtype": dtype, "tp_size": tp_size, "layers": layers}
    outcome = simulate("rank_cases:same_bits", settings=devices, nccl=fake_nccl, **parameters)
    assert outcome.ok, outcome.text


@pytest.mark.parametrize(("name", "dtype"), [("llama", "bfloat16"), ("gemma2", "float16"), ("qwen3-next", "bfloat16")])
def test_stages_with_a_device_each(simulate: Run, models: str, name: str, dtype: str) -> None:
    devices = {"INFINILM_EMULATOR_DEVICES": "2", "INFINILM_EMULATOR_SMS": "64"}
    outcome = simulate("rank_cases:stages", settings=devices, name=name, folder=models, dtype=dtype)
    assert outcome.ok, outcome.text


def test_stages_in_processes(simulate: Run, models: str, fake_nccl: str) -> None:
    devices = {"INFINILM_EMULATOR_DEVICES": "2", "INFINILM_EMULATOR_SMS": "64"}
    parameters = {"folder": models, "dtype": "bfloat16", "tp_size": 2, "nccl": fake_nccl}
    outcome = simulate("rank_cases:stage_processes", settings=devices, **parameters)
    assert outcome.ok, outcome.text


@pytest.mark.parametrize(
    ("delay", "peers", "queue", "layers"), [(20, 1, 1024, 1), (500, 0, 1024, 1), (500, 1, 160, 20)]
)
def test_a_rank_that_is_late(
    simulate: Run, models: str, fake_nccl: str, delay: int, peers: int, queue: int, layers: int
) -> None:
    """The driver's lock and its short queues never make ranks wait for each other for ever.

    An audit found: Kernels are loaded when first needed, under a lock of the driver, while those of other ranks wait.
    Now: All kernels are loaded before the first collective (kernel_list.h).

    It fails where this was planted: Kernels are loaded when first needed; ids come by pageable memory.
    """
    settings = {
        "INFINILM_EMULATOR_DEVICES": "2",
        "INFINILM_EMULATOR_SMS": "64",
        "INFINILM_EMULATOR_PEERS": str(peers),
        "INFINILM_EMULATOR_DELAY_US": str(delay),
        "INFINILM_EMULATOR_QUEUE": str(queue),
    }
    outcome = simulate("rank_cases:eager_steps", settings=settings, folder=models, nccl=fake_nccl, layers=layers)
    assert outcome.ok, outcome.text


def test_what_ranks_have_is_joined_by_one_kernel(simulate: Run, models: str, fake_nccl: str) -> None:
    """An audit found: A copy a rank to join logits and candidates. Now: One kernel.

    It fails where this was planted: A copy for each rank joins what they have.
    """
    devices = {"INFINILM_EMULATOR_DEVICES": "4", "INFINILM_EMULATOR_SMS": "64"}
    outcome = simulate("rank_cases:joined_by_one_kernel", settings=devices, folder=models, nccl=fake_nccl)
    assert outcome.ok, outcome.text


def test_two_engines_on_the_same_devices(simulate: Run, models: str, fake_nccl: str) -> None:
    """An audit found: Two engines of several GPUs can fill these with blocks that wait for each other. Now: The second
    is refused; the emulator counts the blocks that wait.
    """
    devices = {"INFINILM_EMULATOR_DEVICES": "3"}
    outcome = simulate("rank_cases:two_engines", settings=devices, folder=models, nccl=fake_nccl)
    assert outcome.ok, outcome.text


@pytest.mark.parametrize("graphs", [False, True])
def test_only_its_own_devices(
    simulate: Run, emulator_workers: dict[str | None, Worker], models: str, fake_nccl: str, graphs: bool
) -> None:
    """No context is made on other GPUs, by looking at them or by closing an engine.

    An audit found: Processes have contexts on GPUs that they do not use. Now: Devices are asked for what needs no
    context.

    It fails where this was planted: Free memory is asked of every device.
    """
    for worker in emulator_workers.values():
        worker.stop()  # what processes before have used counts no more
    settings = {"INFINILM_EMULATOR_DEVICES": "4", "INFINILM_EMULATOR_SMS": "64"}
    outcome = simulate("rank_cases:contexts", settings=settings, folder=models, nccl=fake_nccl, graphs=graphs)
    assert outcome.ok, outcome.text


def test_a_forked_process(simulate: Run) -> None:
    """An audit found: A process forked from one that looked at GPUs fails somewhere. Now: The first call says so.

    It fails where this was planted: A forked process is not told.
    """
    outcome = simulate("rank_cases:after_a_fork")
    assert outcome.ok, outcome.text
