"""What tools/check_ptx.py complains about, told by programs that print what ptxas prints."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "tools/check_ptx.py"
FINE = """\
ptxas info    : Compiling entry function 'norm' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 1024 bytes smem
"""


@pytest.fixture
def check_ptx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_ptx", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "CACHE", tmp_path)
    return module


@pytest.mark.parametrize(
    ("printed", "code", "faults"),
    [
        (FINE, 0, 0),
        (FINE + "    8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", 0, 1),
        ("ptxas warning : Registers are spilled to local memory in function 'f', 4 bytes spill stores", 0, 1),
        ("ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized", 0, 1),
        ("ptxas fatal   : Unsupported .version 9.0; current version is '8.4'", 255, 1),
        (FINE, 255, 1),
    ],
)
def test_complaints(check_ptx: ModuleType, tmp_path: Path, printed: str, code: int, faults: int) -> None:
    """Only what passed is remembered, and not compiled again."""
    ptx, log, ptxas = tmp_path / "x.ptx", tmp_path / "log", tmp_path / "ptxas"
    ptx.write_text("// PTX")
    log.write_text(printed)
    ptxas.write_text(f"#!/bin/sh\ncat {log}\nexit {code}\n")
    ptxas.chmod(0o755)
    for _ in range(2):
        assert len(check_ptx.complaints_of(ptxas, ptx, "90a")) == faults
    log.write_text("error: another answer")
    assert (check_ptx.complaints_of(ptxas, ptx, "90a") == []) == (faults == 0)
