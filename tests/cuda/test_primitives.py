"""Every primitive of cuda/core on the emulator, under every schedule, against numpy."""

from __future__ import annotations

from typing import Any

import pytest
from emulation import SCHEDULES, Run
from orders import every_order

Case = tuple[str, str, dict[str, Any]]

PRIMITIVES: list[Case] = [
    ("primitives.cu", "conversions", {"kind": "bf16"}),
    ("primitives.cu", "conversions", {"kind": "f16"}),
    ("primitives.cu", "reductions", {}),
    ("primitives.cu", "shuffles", {}),
    ("primitives.cu", "random_numbers", {}),
    ("primitives.cu", "wide_copies", {}),
    ("primitives.cu", "named_barriers", {}),
    ("primitives.cu", "last_arriver", {}),
    ("primitives.cu", "matrix_loads", {}),
    ("primitives.cu", "mma", {"kind": "bf16"}),
    ("primitives.cu", "mma", {"kind": "f16"}),
    ("gemm.cu", "gemm", {"kind": "bf16", "m": 1, "n": 7, "k": 8}),
    ("gemm.cu", "gemm", {"kind": "bf16", "m": 37, "n": 70, "k": 264}),
    ("gemm.cu", "gemm", {"kind": "f16", "m": 64, "n": 32, "k": 256}),
]


def _wgmma(columns: int, kind: str, variant: int, swizzle_a: bool, swizzle_b: bool, k: int = 32) -> Case:
    parameters = {"columns": columns, "kind": kind, "variant": variant, "swizzle_a": swizzle_a, "swizzle_b": swizzle_b}
    return "hopper.cu", "wgmma", {**parameters, "k": k}


HOPPER: list[Case] = [
    _wgmma(64, "bf16", 0, False, False),
    _wgmma(64, "bf16", 0, True, True, k=64),
    _wgmma(64, "bf16", 0, True, False, k=64),
    _wgmma(64, "bf16", 1, False, False),
    _wgmma(64, "bf16", 2, False, True),
    _wgmma(64, "bf16", 3, False, True),
    _wgmma(64, "bf16", 3, False, False),
    _wgmma(32, "f16", 1, False, False),
    _wgmma(72, "bf16", 1, False, False),
    _wgmma(176, "f16", 0, False, False),
    _wgmma(192, "bf16", 0, True, True, k=64),
    ("hopper.cu", "hopper_gemm", {"m": 64, "n": 32, "k": 64}),
    ("hopper.cu", "hopper_gemm", {"m": 70, "n": 40, "k": 456}),
    ("hopper.cu", "cluster", {}),
    ("hopper.cu", "dependent_launches", {}),
]
CASES = PRIMITIVES + HOPPER
IDS = ["-".join([case, *(str(v) for v in parameters.values())]) for _, case, parameters in CASES]


@every_order
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_primitive(emulate: Run, case: Case, schedule: str, asynchronous: str) -> None:
    source, name, parameters = case
    if name == "conversions" and (schedule, asynchronous) != ("fifo", "late"):
        pytest.skip("nothing to schedule")
    settings = {"INFINILM_EMULATOR_ASYNC": asynchronous}
    outcome = emulate([source], f"emulator_cases:{name}", schedule=schedule, settings=settings, **parameters)
    assert outcome.ok, outcome.text


@pytest.mark.sanitizer
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("sanitize", ["address", "thread"])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_primitive_sanitized(emulate: Run, case: Case, sanitize: str, schedule: str) -> None:
    source, name, parameters = case
    if name == "conversions" and schedule != "fifo":
        pytest.skip("nothing to schedule")
    outcome = emulate([source], f"emulator_cases:{name}", sanitize=sanitize, schedule=schedule, **parameters)
    assert outcome.ok, outcome.text


@pytest.mark.sanitizer
@pytest.mark.parametrize("case", [PRIMITIVES[-2], HOPPER[-3]], ids=["gemm", "hopper_gemm"])
def test_portable_context_switch(emulate: Run, case: Case) -> None:
    """The ucontext fibers of machines other than x86-64."""
    source, name, parameters = case
    outcome = emulate([source], f"emulator_cases:{name}", ucontext=True, **parameters)
    assert outcome.ok, outcome.text


def test_older_device(emulate: Run) -> None:
    """Hopper's instructions are refused where the simulated device is not one."""
    settings = {"INFINILM_EMULATOR_CC": "80"}
    outcome = emulate(["hopper.cu"], "emulator_cases:hopper_gemm", settings=settings, m=64, n=32, k=64)
    assert not outcome.ok and "[compute-capability] mbarrier.init needs sm_90" in outcome.text, outcome.text
