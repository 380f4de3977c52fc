"""A part of a model on a GPU: which layers are there, while others, or the experts of some, are on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from infinilm.checks import short_repr
from infinilm.devices.system import resolve_device, usable_gpus
from infinilm.distributed import resolve_devices
from infinilm.errors import ConfigError, DeviceError
from infinilm.planning.sizes import parse_size

__all__ = [
    "LEAST_CONTEXT",
    "check_alone",
    "check_one_split",
    "count_gpu_layers",
    "gpu_of",
    "memory_of_devices",
    "most_layers",
    "usable_memory",
]

LEAST_CONTEXT = 4096
"""With "auto", the cache on the GPU has room for a sequence of so many tokens where none was asked for."""


def count_gpu_layers(gpu_layers: Any, num_layers: int) -> int:
    """The number of layers on the GPU, of a model that has so many. ConfigError: it cannot be."""
    if isinstance(gpu_layers, bool) or not hasattr(gpu_layers, "__index__"):
        raise ConfigError(f"gpu_layers: expected 'auto' or a number of layers, got {short_repr(gpu_layers)}")
    count = int(gpu_layers.__index__())
    if not 0 <= count <= num_layers:
        raise ConfigError(
            f"gpu_layers must be 0 to {num_layers}, the layers of the model, or 'auto', for as many as fit; got {count}"
        )
    return count


def check_one_split(gpu_layers: Any, cpu_moe: Any) -> None:
    """ConfigError: a model is divided between the CPU and a GPU in two ways."""
    if gpu_layers is not None and cpu_moe is not None:
        raise ConfigError(
            f"gpu_layers={gpu_layers!r} and cpu_moe={cpu_moe!r}: either whole layers are on the CPU, or the experts of "
            "some; use one of the two"
        )


def check_alone(setting: str, value: Any, tensor_parallel_size: int, pipeline_parallel_size: int) -> None:
    """ConfigError: the model, which `setting` divides between the CPU and a GPU, is divided in another way, too."""
    for name, size in (
        ("tensor_parallel_size", tensor_parallel_size),
        ("pipeline_parallel_size", pipeline_parallel_size),
    ):
        if size != 1:
            raise ConfigError(
                f"{setting}={value!r} and {name}={size}: a model is divided between the CPU and one GPU, or over "
                "ranks or stages of one kind; use one of the two"
            )


def gpu_of(setting: str, device: str, device_ids: Sequence[int] | None, *, must_exist: bool) -> str | None:
    """The GPU of a model that `setting` divides; None: `device` is "auto", and there is none that can be used.

    Raises
    ------
    ConfigError
        The device is no GPU, or several are named.
    DeviceError
        It is absent.
    """
    if device == "cpu":
        raise ConfigError(
            f"{setting}: device='cpu' names no GPU; leave device out, or {setting}, or pass 'cuda' or 'cuda:1'"
        )
    if must_exist and resolve_device(device) == "cpu":
        return None
    named = "cuda" if device == "auto" and (device_ids is not None or not must_exist) else device
    gpu = resolve_devices(named, 1, device_ids, must_exist=must_exist)[0]
    if must_exist:
        try:
            usable = usable_gpus()
        except DeviceError as error:
            raise DeviceError(f"{setting}: {error}") from error
        if int(gpu.partition(":")[2] or 0) not in usable:
            raise DeviceError(f"{setting}: {gpu} is not one of the GPUs that can be used here, {usable}")
    return gpu


def memory_of_devices(memory: Any) -> list[int] | None:
    """What is free of the host and of the GPU, as `memory` says: a size for each of them, or two; None: ask them."""
    if memory is None:
        return None
    given = memory.split(",") if isinstance(memory, str) else memory
    sizes = list(given) if isinstance(given, (list, tuple)) else [given]
    if len(sizes) not in (1, 2):
        raise ConfigError(
            f"memory: expected one size, or those of the host and of the GPU such as '32GiB,8GiB', got {memory!r}"
        )
    parsed = [parse_size("memory", size) for size in sizes]
    return parsed if len(parsed) == 2 else parsed * 2


def usable_memory(free_bytes: int) -> int:
    """What "auto" takes of the memory of a GPU, for what the plan of a model has.

    The rest is for what a device has once, whatever the model: scratch of its kernels, and buffers for copies.
    """
    return free_bytes - min(free_bytes // 16, 256 << 20)


def most_layers(fits: Callable[[int], bool], num_layers: int) -> int:
    """The largest number of layers that fits; those above it do not, and 0 always does."""
    least, most = 0, num_layers  # `least` fits, and no more than `most` do
    while least < most:
        middle = (least + most + 1) // 2
        if fits(middle):
            least = middle
        else:
            most = middle - 1
    return least
