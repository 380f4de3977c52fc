"""What this machine offers: devices, instruction sets, threads."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from infinilm import _core
from infinilm.errors import DeviceError


def backends() -> dict[str, dict[str, Any]]:
    """Devices and whether they can be used.

    Returns
    -------
    dict
        ``{"cpu": {"available": True, "isa": ..., "isas": [...], "num_threads": ..., "multiplies_bf16": ...},
        "cuda": {"available": bool, "reason": why not, "devices": [{"name", "compute_capability", "total_bytes",
        "num_sms"}, ..]}}``
    """
    devices: list[dict[str, Any]] = []
    reason = ""
    try:
        devices = _cuda_devices()
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
        "cuda": {"available": bool(devices), "reason": reason, "devices": devices},
    }


_has_found_gpus = False  # in this process, or in one that it was forked from


def _cuda_devices() -> list[dict[str, Any]]:
    """Those of `_core`, and that there were any is remembered."""
    global _has_found_gpus
    devices = _core.cuda_devices()
    _has_found_gpus = bool(devices)
    return devices


def resolve_device(device: str) -> str:
    """What `device="auto"` means here: the first GPU if one is usable, else the CPU; others are only checked.

    Raises
    ------
    DeviceError
        A GPU was found before, and cannot be used now: above all in a process that was forked since. That is told, for
        on the CPU nobody would notice but by the time that all takes.
    """
    if not isinstance(device, str):
        raise TypeError(f"device: expected a text such as 'cpu', 'cuda' or 'cuda:1', got {device!r}")
    if device != "auto":
        _core.parse_device(device)
        return device
    try:
        _cuda_devices()
    except DeviceError:
        if _has_found_gpus:
            raise
        return "cpu"
    return "cuda"


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
