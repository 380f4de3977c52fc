"""Which device "auto" means, and what is told where a GPU is there and cannot be used."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import infinilm
from infinilm import _core
from infinilm.cli.describe import info_lines
from infinilm.devices import system
from infinilm.devices.system import resolve_device, usable_gpus
from infinilm.distributed import resolve_devices
from infinilm.errors import ConfigError, DeviceError
from infinilm.planning.cache_plan import parse_cache_budget


def gpu(capability: str) -> dict[str, Any]:
    name = "RTX 4090" if capability == "8.9" else "Tesla T4"
    return {"name": name, "compute_capability": capability, "total_bytes": 1 << 34, "num_sms": 40}


@pytest.fixture(autouse=True)
def anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """As in a process that has looked at no device, on a machine without NVIDIA's driver."""
    monkeypatch.setattr(system, "_has_found_gpus", False)
    monkeypatch.setattr(system, "_DRIVER", tmp_path / "version")
    system._warn_once.cache_clear()
    yield
    system._warn_once.cache_clear()


def have(monkeypatch: pytest.MonkeyPatch, *capabilities: str, reason: str = "") -> None:
    def devices() -> list[dict[str, Any]]:
        if reason:
            raise DeviceError(reason)
        return [gpu(capability) for capability in capabilities]

    monkeypatch.setattr(_core, "cuda_devices", devices)


@pytest.mark.parametrize(
    ("capabilities", "device", "ids"),
    [(("8.9",), "cuda", [0]), (("7.5", "8.9"), "cuda:1", [1]), (("12.0", "7.0"), "cuda", [0]), (("7.5",), "cpu", [])],
)
def test_auto_is_the_first_that_is_usable(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capabilities: tuple[str, ...],
    device: str,
    ids: list[int],
) -> None:
    have(monkeypatch, *capabilities)
    with caplog.at_level(logging.WARNING):
        assert [resolve_device("auto"), resolve_device("auto")] == [device, device]
    assert usable_gpus() == ids and resolve_device("cuda:0") == "cuda:0"
    cuda = infinilm.backends()["cuda"]
    assert cuda["available"] == bool(ids)
    if ids:
        assert not caplog.records
    else:
        (record,) = caplog.records  # once
        assert record.getMessage() == f"running on the CPU: {cuda['reason']}"
        assert "cuda:0 (Tesla T4) has compute capability 7.5; infinilm needs 8.0 or later" in cuda["reason"]
        assert "device='cpu'" in cuda["reason"]


def test_several_of_those_that_are_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, "7.5", "8.0", "8.0", "9.0")
    assert resolve_devices("auto") == ("cuda:1",)
    assert resolve_devices("auto", 2) == ("cuda:1", "cuda:2")
    assert resolve_devices("auto", 2, [1, 3]) == ("cuda:1", "cuda:3")
    with pytest.raises(ConfigError, match="has 3 devices, but tensor_parallel_size is 4"):
        resolve_devices("auto", 4)


@pytest.mark.parametrize(
    ("reason", "has_driver", "is_told"),
    [
        ("the NVIDIA driver is too old: it supports CUDA 12.2, this build needs 13.0", False, True),
        ("CUDA is not usable: cudaErrorSystemNotReady", False, True),
        ("this build of infinilm has no CUDA library (no libinfinilm_cuda.so)", True, True),
        ("this build of infinilm has no CUDA library (no libinfinilm_cuda.so)", False, False),
        ("no NVIDIA driver is installed (libcuda.so.1 was not found)", False, False),
        ("the NVIDIA driver finds no device (is CUDA_VISIBLE_DEVICES set?)", True, False),
    ],
)
def test_a_driver_that_cannot_be_used_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reason: str, has_driver: bool, is_told: bool
) -> None:
    have(monkeypatch, reason=reason)
    if has_driver:
        system._DRIVER.touch()
    with caplog.at_level(logging.WARNING):
        assert resolve_device("auto") == "cpu"
    assert [record.getMessage() for record in caplog.records] == [f"running on the CPU: {reason}"] * is_told


def test_a_gpu_that_was_there_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, "8.9")
    assert resolve_device("auto") == "cuda"
    have(monkeypatch, reason="CUDA cannot be used in this process")
    with pytest.raises(DeviceError, match="in this process"):
        resolve_device("auto")


def test_info_says_why_a_card_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, "8.9", "7.5")
    lines = info_lines({"version": "", "python": "", "platform": "", **infinilm.backends()})
    old, new = (next(line for line in lines if line.startswith(f"cuda:{index}")) for index in (1, 0))
    assert old.endswith("not used: it has compute capability 7.5; infinilm needs 8.0 or later") and "not" not in new


@pytest.mark.parametrize(("toolkit", "lacks"), [("12.6", True), ("12.8", False), ("13.0", False)])
def test_info_says_what_an_older_toolkit_leaves_out(toolkit: str, lacks: bool) -> None:
    cuda = {"available": True, "reason": "", "toolkit": toolkit, "devices": []}
    lines = info_lines({"version": "", "python": "", "platform": "", **infinilm.backends(), "cuda": cuda})
    (line,) = (line for line in lines if line.startswith("toolkit"))
    assert f"CUDA {toolkit}" in line and ("wgmma" in line) == lacks


def test_the_share_of_a_cache() -> None:
    """A GPU mostly serves one model."""
    assert parse_cache_budget(None, 1000, "cpu") == 500
    assert [parse_cache_budget(None, 1000, device) for device in ("cuda", "cuda:1")] == [880, 880]
    assert parse_cache_budget("50%", 1000, "cuda") == 500
