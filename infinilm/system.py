"""What this machine offers: devices, instruction sets, threads."""

from __future__ import annotations

from typing import Any

from infinilm import _core

CUDA_REASON = "this version of infinilm has no CUDA kernels yet"


def backends() -> dict[str, dict[str, Any]]:
    """Devices and whether they can be used.

    Returns
    -------
    dict
        ``{"cpu": {"available": True, "isa": ..., "isas": [...], "num_threads": ..., "bf16_dot": ...},
        "cuda": {"available": False, "reason": ...}}``
    """
    return {
        "cpu": {
            "available": True,
            "reason": "",
            "isa": _core.selected_cpu_isa(),
            "isas": _core.cpu_isas(),
            "bf16_dot": _core.cpu_has_bf16_dot(),
            "num_threads": _core.default_num_threads(),
        },
        "cuda": {"available": False, "reason": CUDA_REASON},
    }
