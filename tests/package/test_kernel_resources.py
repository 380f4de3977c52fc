"""The rules for the machine code of kernels: tools/kernel_resources.py, by code written here."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[2] / "tools/kernel_resources.py"
WAIT, LOAD, STORE = "ACQBULK", "LDG.E.128.CONSTANT", "STG.E.128"


@pytest.fixture(scope="module")
def kernel_resources() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernel_resources", TOOL)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("kernel", "arch", "code", "fault"),
    [
        ("act_mul_kernel", "sm_90a", [WAIT, LOAD, STORE], ""),
        ("act_mul_kernel", "sm_80", [LOAD, STORE], ""),
        ("act_mul_kernel", "sm_90a", [LOAD, STORE], "never waits for the kernel in front"),
        ("act_mul_kernel", "sm_90a", [LOAD, WAIT, STORE], "reads before it waits: LDG.E.128.CONSTANT"),
        ("delta_rule_kernel", "sm_90a", [LOAD, WAIT, STORE], ""),
        ("delta_rule_kernel", "sm_90a", [LOAD, STORE, WAIT], "writes before it waits: STG.E.128"),
        ("act_mul_kernel", "sm_80", [LOAD, "STL.64"], "touches local memory: STL.64"),
        ("linear_decode_kernel<1>", "sm_90a", ["CCTL.E.PF2", WAIT, LOAD], ""),
        ("linear_decode_kernel<1>", "sm_90a", [LOAD, WAIT], ""),
        ("linear_decode_kernel<1>", "sm_90a", [WAIT, LOAD], "asks for no weight before it waits"),
        ("linear_decode_kernel<1>", "sm_80", ["LDG.E.64"], "reads weights in less than 16 bytes"),
        ("linear_sm90_kernel<1>", "sm_90a", [WAIT, "HMMA.16816.F32"], "has no wgmma"),
    ],
)
def test_rules(kernel_resources: ModuleType, kernel: str, arch: str, code: list[str], fault: str) -> None:
    name, _, argument = kernel.partition("<")  # as the compiler mangles it
    mangled = f"_ZN8infinilm4cuda{len(name)}{name}" + (f"ILi{argument[0]}EEEvv" if argument else "Ev")
    lines = [f"arch = {arch}", f"\t\tFunction : {mangled}"]
    lines += [f"        /*{16 * i:04x}*/              @!P0 {each} R1, R2 ;" for i, each in enumerate(code)]
    faults = kernel_resources.check_code(lines)
    assert len(faults) == bool(fault) and all(fault in each for each in faults), faults
