"""The rules for the machine code of kernels: tools/kernel_resources.py and tools/sass.py, by code written here."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
FENCE, SUMS_ARE_THERE, ONE_LEFT = "WARPGROUP.ARRIVE", "WARPGROUP.DEPBAR.LE gsb0, 0x0", "WARPGROUP.DEPBAR.LE gsb0, 0x1"
# Products of rows in R96 to R99, or in R92 to R95, to sums in R24 to R55; each ends a group.
QGMMA = "QGMMA.64x64x32.F32.E4M3.E4M3 R24, R96, gdesc[UR4], R24, gsb0"
ROWS_96, ROWS_92 = (f"HGMMA.64x64x16.F32.BF16 R24, R{r}, gdesc[UR4], R24, gsb0" for r in (96, 92))
WAIT, LOAD, STORE = "ACQBULK", "LDG.E.128.CONSTANT R4, [R2.64]", "STG.E.128 [R2.64], R4"


@pytest.fixture
def kernel_resources(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("kernel_resources")


def printed(kernel: str, arch: str, code: list[str]) -> list[str]:
    """As cuobjdump prints it: an instruction has 16 bytes, and its bits beside it and in a line of their own."""
    name, _, argument = kernel.partition("<")  # as the compiler mangles it
    mangled = f"_ZN8infinilm4cuda{len(name)}{name}" + (f"ILi{argument[0]}EEEvv" if argument else "Ev")
    lines = [f"arch = {arch}", f"\t\tFunction : {mangled}", '\t.headerflags\t@"EF_CUDA_SM90"']
    for i, each in enumerate(code):
        pad = "" if each.startswith("@") else " " * 5
        lines.append(f"        /*{16 * i:04x}*/              {pad}{each} ;    /* 0x0000000000007919 */")
        lines.append("                                                /* 0x000e220000002100 */")
    return lines


@pytest.mark.parametrize(
    ("kernel", "arch", "code", "fault"),
    [
        ("act_mul_kernel", "sm_90a", [WAIT, LOAD, STORE], ""),
        ("act_mul_kernel", "sm_80", [LOAD, STORE], ""),
        ("act_mul_kernel", "sm_90a", [LOAD, STORE], "never waits for the kernel in front"),
        ("act_mul_kernel", "sm_90a", [LOAD, WAIT, STORE], "reads before it waits: LDG.E.128.CONSTANT"),
        ("delta_rule_kernel", "sm_90a", [LOAD, WAIT, STORE], ""),
        ("delta_rule_kernel", "sm_90a", [LOAD, STORE, WAIT], "writes before it waits: STG.E.128"),
        ("act_mul_kernel", "sm_80", [LOAD, "STL.64 [R1], R2"], "touches local memory: STL.64"),
        ("linear_decode_kernel<1>", "sm_90a", ["CCTL.E.PF2 [R2]", WAIT, LOAD], ""),
        ("linear_decode_kernel<1>", "sm_90a", [LOAD, WAIT], ""),
        ("linear_decode_kernel<1>", "sm_90a", [WAIT, LOAD], "asks for no weight before it waits"),
        ("linear_decode_kernel<1>", "sm_80", ["LDG.E.64 R4, [R2.64]"], "reads weights in less than 16 bytes"),
        ("linear_sm90_kernel<1>", "sm_90a", [WAIT, "HMMA.16816.F32 R4, R8, R12, R4"], "has no wgmma"),
        # Branches: what a way leads to that has not waited, wherever it stands.
        ("act_mul_kernel", "sm_90a", ["@P0 BRA 0x20", WAIT, STORE, "EXIT"], "writes before it waits: STG.E.128"),
        ("act_mul_kernel", "sm_90a", ["BRA P0, 0x20", WAIT, STORE, "EXIT"], "writes before it waits: STG.E.128"),
        ("act_mul_kernel", "sm_90a", ["BRA.U UP0, 0x20", WAIT, STORE, "EXIT"], "writes before it waits: STG.E.128"),
        ("act_mul_kernel", "sm_90a", ["@!UP1 ACQBULK", STORE, "EXIT"], "writes before it waits: STG.E.128"),
        ("act_mul_kernel", "sm_90a", ["@P0 BRA 0x30", WAIT, "EXIT", LOAD, "EXIT"], "reads before it waits: LDG.E"),
        ("act_mul_kernel", "sm_90a", ["BRA 0x30", STORE, "EXIT", WAIT, LOAD, "BRA 0x10"], ""),
        ("act_mul_kernel", "sm_90a", ["@P0 BRA 0x30", WAIT, STORE, "EXIT"], ""),
        ("act_mul_kernel", "sm_90a", ["@P0 EXIT", WAIT, LOAD, "@P1 BRA 0x20", STORE, "EXIT"], ""),
        ("act_mul_kernel", "sm_90a", ["CALL.REL.NOINC 0x40", WAIT, STORE, "EXIT", LOAD, "RET.REL R2"], "reads before"),
        ("act_mul_kernel", "sm_90a", [WAIT, "CALL.REL.NOINC 0x30", "EXIT", LOAD, "RET.REL.NODEC R2 0x0"], ""),
        ("act_mul_kernel", "sm_90a", ["BRX R2 -0x40", WAIT, STORE, "EXIT"], "writes before it waits: STG.E.128"),
        # What may be read before is named, with the instructions that read it.
        ("linear_sm90_kernel", "sm_90a", ["UTMALDG.2D [UR8], [UR4]", WAIT, STORE], ""),
        ("linear_sm90_kernel", "sm_90a", ["LDG.E.128 R4, [R2.64]", WAIT, STORE], "reads before it waits: LDG.E.128"),
        # Whatever reads or writes global memory.
        ("act_mul_kernel", "sm_90a", ["UTMALDG.2D [UR8], [UR4]", WAIT], "reads before it waits: UTMALDG.2D"),
        ("act_mul_kernel", "sm_90a", ["UBLKCP.S.G [UR4], [UR6], UR8", WAIT], "reads before it waits: UBLKCP.S.G"),
        ("act_mul_kernel", "sm_90a", ["LDGSTS.E.128 [R1], [R2.64]", WAIT], "reads before it waits: LDGSTS.E.128"),
        ("act_mul_kernel", "sm_90a", ["CCTL.E.PF2 [R2]", WAIT], "reads before it waits: CCTL.E.PF2"),
        ("act_mul_kernel", "sm_90a", ["UTMAPF.L2.2D [UR4]", WAIT], "reads before it waits: UTMAPF.L2.2D"),
        ("act_mul_kernel", "sm_90a", ["UTMAREDG.2D.ADD [UR4], [UR8]", WAIT], "writes before it waits: UTMAREDG"),
        ("act_mul_kernel", "sm_90a", ["ATOMG.E.ADD PT, R2, [R4], R6", WAIT], "writes before it waits: ATOMG.E.ADD"),
        ("act_mul_kernel", "sm_90a", ["UTMACCTL.PF [UR4]", "LDS R2, [R3]", "CCTL.IVALL", WAIT, STORE], ""),
    ],
)
def test_rules(kernel_resources: ModuleType, kernel: str, arch: str, code: list[str], fault: str) -> None:
    """An audit found: Dependent launch was dead code, and ptxas moved the wait in front of the weights. Now: Every
    kernel waits; linears for few tokens, and those of Hopper, ask for weights before.

    It fails where this was planted: The rule for dependent launch in the order of the code alone.
    """
    faults = kernel_resources.check_code(printed(kernel, arch, code))
    assert len(faults) == bool(fault) and all(fault in each for each in faults), faults


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ([FENCE, ROWS_96, SUMS_ARE_THERE, "MOV R96, R2", "FADD R3, R24, R25"], ""),
        ([FENCE, ROWS_96, "MOV R92, R2", FENCE, ROWS_92, ONE_LEFT, "MOV R96, R2", SUMS_ARE_THERE, "MOV R24, R2"], ""),
        ([FENCE, ROWS_96.replace(", gsb0", ""), ROWS_92, SUMS_ARE_THERE, "FADD R3, R24, R25"], ""),
        ([FENCE, "HGMMA.64x64x16.F32 R24, gdesc[UR4], R24, gsb0", "MOV R96, R2", SUMS_ARE_THERE], ""),
        ([FENCE, QGMMA, "FADD R3, R55, R4", SUMS_ARE_THERE], "FADD at 0x20 does not wait for QGMMA"),
        ([FENCE, QGMMA, SUMS_ARE_THERE, "FADD R3, R55, R4"], ""),
        # A is written, or sums are written or read, before the wait.
        ([FENCE, ROWS_96, "MOV R99, R2", SUMS_ARE_THERE], "MOV at 0x20 does not wait for"),
        ([FENCE, ROWS_96, "LDS.128 R92, [R2]", "LDS.64 R98, [R2]", SUMS_ARE_THERE], "LDS.64 at 0x30 does not wait"),
        ([FENCE, ROWS_96, "LDSM.16.M88.4 R94, [R2]", SUMS_ARE_THERE], "LDSM.16.M88.4 at 0x20 does not wait"),
        ([FENCE, ROWS_96, "IMAD.WIDE.U32 R54, R2, R3, R4", SUMS_ARE_THERE], "IMAD.WIDE.U32 at 0x20 does not wait"),
        ([FENCE, ROWS_96, "SHFL.BFLY PT, R97, R2, 0x1, 0x1f", SUMS_ARE_THERE], "SHFL.BFLY at 0x20 does not wait"),
        ([FENCE, ROWS_96, "FADD R3, R55, R4", SUMS_ARE_THERE], "FADD at 0x20 does not wait for HGMMA"),
        ([FENCE, ROWS_96, ONE_LEFT, "MOV R96, R2", SUMS_ARE_THERE], "MOV at 0x30 does not wait for"),
        ([FENCE, ROWS_96.replace(", gsb0", ""), SUMS_ARE_THERE, "MOV R96, R2"], "MOV at 0x30 does not wait for"),
        ([FENCE, ROWS_96, "@P0 WARPGROUP.DEPBAR.LE gsb0, 0x0", "MOV R96, R2"], "MOV at 0x30 does not wait for"),
        ([FENCE, ROWS_96, "@P0 BRA 0x40", SUMS_ARE_THERE, "MOV R96, R2", "EXIT"], "MOV at 0x40 does not wait for"),
        ([FENCE, ROWS_96, "ISETP.NE.U32.AND P0, PT, R96, RZ, PT", "STS.128 [R2], R96", SUMS_ARE_THERE], ""),
        # What products read is written behind the fence, or there is none, on a path of several.
        ([FENCE, "MOV R96, R2", ROWS_96, SUMS_ARE_THERE], "MOV at 0x10 writes behind the fence of HGMMA"),
        ([ROWS_96, SUMS_ARE_THERE], "no fence before HGMMA"),
        (["@P0 BRA 0x20", FENCE, ROWS_96, SUMS_ARE_THERE], "no fence before HGMMA"),
        (
            [FENCE, ROWS_96, SUMS_ARE_THERE, "MOV R96, R2", "@P0 BRA 0x10", "EXIT"],
            "MOV at 0x30 writes behind the fence",
        ),
        # A jump by a table goes to what begins a block, not between a fence and its product.
        (["BRX R2 -0x10", "EXIT", FENCE, "MOV R3, R4", ROWS_96, SUMS_ARE_THERE, "EXIT"], ""),
    ],
)
def test_registers_of_wgmma(kernel_resources: ModuleType, code: list[str], fault: str) -> None:
    module = importlib.import_module("sass")
    (kernel,) = module.read_kernels(printed("attention_kernel", "sm_90a", code))
    faults = kernel.wgmma_faults()
    assert len(faults) == bool(fault) and all(fault in each for each in faults), faults


def test_loops(kernel_resources: ModuleType) -> None:
    """Counted is the loop with most products, or most bytes asked for; a way back that is no loop does not count."""
    load = "LDG.E.LTC128B.64 R4, [R2.64]"  # 8 bytes; the hint for L2 is no width
    code = {
        "straight_kernel": [WAIT, load, STORE, "EXIT", "BRA 0x40"],
        "memory_kernel": [WAIT, load, "@P0 BRA 0x10", "LDG.E R4, [R2]", "FFMA R1, R2", "@P1 BRA 0x30", "EXIT"],
        "products_kernel": [  # the loop, from 0x10 on, goes over a block behind the end
            WAIT, "LDGSTS.E.128 [R1], [R2.64]", "BRA P2, 0x70", "HMMA.16816.F32 R4, R8, R12, R4", "@P0 BRA 0x10",
            STORE, "EXIT", "LDS R2, [R3]", "HMMA.16816.F32 R4, R8, R12, R4", "BRA 0x30",
        ],
    }  # fmt: skip
    lines = [line for name, each in code.items() for line in printed(name, "sm_90a", each)]
    module = importlib.import_module("sass")
    assert kernel_resources.make_loop_table(module.read_kernels(lines)).splitlines() == [
        "| kernel | sm_90a |",
        "| --- | --- |",
        "| `memory` | 2 (0, 8) |",
        "| `products` | 7 (2, 16) |",
        "| `straight` | 5 (0, 8) |",
    ]


def test_what_has_passed_is_compared(
    kernel_resources: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`.ci/run` leaves out the kernels then: whatever may change machine code must be noticed, and named."""
    files = {
        "cuda/meson.build": "foreach source : ['host/backend.cpp']",
        "cuda/rows/norm.cu": '#include "norm.cuh"',
        "cuda/rows/norm.cuh": "int a;",
        "cuda/host/backend.cpp": "int b;",
        "tools/kernel_resources.py": "RULE = 1",
        "tools/sass.py": "",
        "nvcc": "#!/bin/sh\necho 13.0\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "nvcc").chmod(0o755)
    monkeypatch.setattr(kernel_resources.cuda_sources, "ROOT", tmp_path)
    monkeypatch.setattr(kernel_resources, "PASSED", tmp_path / "passed.json")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    kernel_resources.PASSED.write_text(json.dumps(kernel_resources.made_from()))
    kernel_resources.check_passed()
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\necho 13.1" if name == "nvcc" else f"{text} int another;")
        told = "cuda/rows/norm.cu" if name.endswith(".cuh") else name
        with pytest.raises(SystemExit, match=f": {re.escape(told)}$"):
            kernel_resources.check_passed()
        (tmp_path / name).write_text(text)
    (tmp_path / "cuda/rows/new.cu").touch()
    with pytest.raises(SystemExit, match=r": cuda/rows/new\.cu$"):
        kernel_resources.check_passed()
