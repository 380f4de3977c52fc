"""What this machine offers: devices, instruction sets, threads."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infinilm import _core
from infinilm._version import cuda_toolkit
from infinilm.errors import DeviceError
from infinilm.logs import logger

_FP8_CAPABILITY = (8, 9)  # of a GPU with tensor cores for FP8
_LEAST_CAPABILITY = (8, 0)  # of a GPU: `mma.sync` of bfloat16 and `cp.async` came with it
_DRIVER = Path("/proc/driver/nvidia/version")  # there while NVIDIA's driver is
# How reasons of the core begin: there is nothing to use; there is a driver, in a build that could use it.
_NOTHING_TO_USE = ("no NVIDIA driver", "the NVIDIA driver finds no device")
_UNUSABLE_DRIVER = ("the NVIDIA driver is too old", "CUDA is not usable")


def backends() -> dict[str, dict[str, Any]]:
    """Devices and whether they can be used.

    Returns
    -------
    dict
        ``{"cpu": {"available": True, "isa": ..., "isas": [...], "num_threads": ..., "multiplies_bf16": ...},
        "cuda": {"available": bool, "reason": why not, "toolkit": that built the library, such as "13.0", or "",
        "devices": [{"name", "compute_capability", "total_bytes", "num_sms", "reason": why it cannot be used, or
        ""}, ..]}}``
    """
    devices: list[dict[str, Any]] = []
    reason = ""
    try:
        devices = _cuda_devices()
        reason = "" if usable_gpus(devices) else _none_usable(devices)
    except DeviceError as error:
        reason = str(error)
    return {
        "cpu": {
            "available": True,
            "reason": "",
            "isa": _core.selected_cpu_isa(),
            "isas": _core.cpu_isas(),
            "multiplies_bf16": _core.cpu_multiplies_bf16(),
            "num_threads": _core.default_num_threads(),
        },
        "cuda": {"available": not reason, "reason": reason, "toolkit": cuda_toolkit, "devices": devices},
    }


_has_found_gpus = False  # in this process, or in one that it was forked from


def _cuda_devices() -> list[dict[str, Any]]:
    """The devices that `_core` finds, each with why it cannot be used, if it cannot; one that can be is remembered."""
    global _has_found_gpus
    devices = [{**device, "reason": _why_not(device)} for device in _core.cuda_devices()]
    _has_found_gpus = bool(usable_gpus(devices))
    return devices


def _why_not(device: dict[str, Any]) -> str:
    major, _, minor = device["compute_capability"].partition(".")
    if (int(major), int(minor)) >= _LEAST_CAPABILITY:
        return ""
    needed = ".".join(map(str, _LEAST_CAPABILITY))
    return f"has compute capability {device['compute_capability']}; infinilm needs {needed} or later"


def _none_usable(devices: list[dict[str, Any]]) -> str:
    listed = "; ".join(f"cuda:{i} ({device['name']}) {device['reason']}" for i, device in enumerate(devices))
    return f"no GPU here can be used: {listed}; use device='cpu'"


def multiplies_fp8(device: str) -> bool:
    """Whether a device has tensor cores for FP8; one that is not here is taken to have them, if it is a GPU."""
    if device == "cpu":
        return False
    index = int(device.partition(":")[2] or 0)
    try:
        major, _, minor = _core.cuda_devices()[index]["compute_capability"].partition(".")
    except (DeviceError, IndexError):
        return True
    return (int(major), int(minor)) >= _FP8_CAPABILITY


def usable_gpus(devices: list[dict[str, Any]] | None = None) -> list[int]:
    """Indices of the GPUs that an engine can run on; DeviceError: there is no GPU at all, or no driver."""
    found = _cuda_devices() if devices is None else devices
    return [index for index, device in enumerate(found) if not device["reason"]]


def kernel_class(device: str, dtype: str) -> str:
    """What decides how sums are rounded: "fma", another instruction set, or a kind of GPU.

    All CPUs add in one order, and those that fuse products and sums (AVX2 and later, NEON) fuse the same ones. Those
    that have instructions for products of bfloat16 use them where that is the `dtype` of the computation, which rounds
    otherwise.
    """
    if device == "cpu":
        multiplies_bf16 = _core.cpu_multiplies_bf16() and dtype == "bfloat16"
        return "fma" if _core.cpu_fuses_products() and not multiplies_bf16 else _core.selected_cpu_isa()
    index = int(device.partition(":")[2] or 0)
    return "sm_" + str(_core.cuda_devices()[index]["compute_capability"]).replace(".", "")


def kernel_class_of_split(devices: Sequence[str], dtypes: Sequence[str], cut: int) -> str:
    """`kernel_class` of a model whose layers from `cut` on are on another device than those before.

    Answers depend on the cut, since each device rounds as it does, and so does the name.
    """
    first, last = map(kernel_class, devices, dtypes)
    return f"{first}, {last} from layer {cut} on"


def resolve_device(device: str) -> str:
    """What `device="auto"` means here: the first GPU that is usable, else the CPU; others are only checked.

    Where there is a GPU or a driver and neither can be used, a warning says why, once: an answer at the speed of a CPU
    would be laid at the engine's door.

    Raises
    ------
    DeviceError
        A GPU was found before, and cannot be used now: above all in a process that was forked since. That is told, for
        on the CPU a user would notice it by nothing but the time that all takes.
    """
    if not isinstance(device, str):
        raise TypeError(f"device: expected a text such as 'cpu', 'cuda' or 'cuda:1', got {device!r}")
    if device != "auto":
        _core.parse_device(device)
        return device
    try:
        devices = _cuda_devices()
    except DeviceError as error:
        if _has_found_gpus:
            raise
        reason = str(error)
        if reason.startswith(_UNUSABLE_DRIVER) or (_DRIVER.exists() and not reason.startswith(_NOTHING_TO_USE)):
            _warn_once(reason)
        return "cpu"
    usable = usable_gpus(devices)
    if not usable:
        _warn_once(_none_usable(devices))
        return "cpu"
    return f"cuda:{usable[0]}" if usable[0] else "cuda"


@functools.cache
def _warn_once(reason: str) -> None:
    logger.warning("running on the CPU: %s", reason)


def device_free_memory(device: str) -> int:
    """Bytes that are free on a GPU such as "cuda:1"."""
    devices = _cuda_devices()
    index = _core.parse_device(device)[1]
    if index >= len(devices):
        raise DeviceError(f"device {device!r}: there are {len(devices)} CUDA devices")
    return _core.cuda_free_bytes(index)


def nccl_library() -> str:
    """Path of the library in an nvidia-nccl wheel, or "": the core then asks the system for it. Nothing is imported."""
    found = importlib.util.find_spec("nvidia")
    for folder in () if found is None else found.submodule_search_locations or ():
        path = Path(folder) / "nccl" / "lib" / "libnccl.so.2"
        if path.exists():
            return str(path)
    return ""
