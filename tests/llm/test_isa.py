"""INFINILM_CPU_ISA picks the CPU kernels, and says what can be picked when it cannot."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import emulated_isas
import pytest

from infinilm import LLM, DeviceError, _core
from infinilm.devices.system import kernel_class
from llm import tiny
from llm.support import PATIENCE

pytestmark = pytest.mark.one_rank


@pytest.mark.parametrize("isa", emulated_isas.offered())
def test_environment_picks(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFINILM_CPU_ISA", isa)
    assert _core.selected_cpu_isa() == isa


@pytest.mark.parametrize("isa", ["avx3", "AVX2", "avx512 "])
def test_unknown_choice(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFINILM_CPU_ISA", isa)
    with pytest.raises(DeviceError) as error:
        _core.Backend("cpu")
    assert "INFINILM_CPU_ISA" in str(error.value) and repr(isa)[1:-1] in str(error.value)
    assert all(name in str(error.value) for name in _core.cpu_isas())


def test_argument_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFINILM_CPU_ISA", "no-such")
    _core.Backend("cpu", isa="generic")
    monkeypatch.setenv("INFINILM_CPU_ISA", "generic")
    with pytest.raises(DeviceError, match="no-such"):
        _core.Backend("cpu", isa="no-such")


def test_default_is_the_fastest_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INFINILM_CPU_ISA", raising=False)
    selected, runnable = _core.selected_cpu_isa(), _core.cpu_isas()
    assert not selected.startswith("emulated")
    # AVX512_BF16 only where it is measured to be faster than float32.
    assert selected in runnable[-2:] if runnable[-1] == "avx512_bf16" else selected == runnable[-1]
    assert all(_core.selected_cpu_isa() == selected for _ in range(10))


def test_bfloat16_is_multiplied_by_the_builds_that_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INFINILM_CPU_ISA", raising=False)
    assert _core.cpu_multiplies_bf16() == (_core.selected_cpu_isa() in ("amx", "avx512_bf16"))
    for isa in emulated_isas.offered():
        monkeypatch.setenv("INFINILM_CPU_ISA", isa)
        assert _core.cpu_multiplies_bf16() == (isa in ("emulated512", "emulated_amx", "avx512_bf16", "amx"))


# The builds of a group fuse products and additions alike, and so they give the same bits.
GROUPS = (("avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx"), ("generic", "emulated512", "emulated_amx"))


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_bits_do_not_depend_on_the_width_of_vectors(
    quantization: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits behind prompts of several chunks, and receipts: what one build has computed another one verifies.

    Instructions for products of bfloat16 are the exception, where that is the dtype.
    """
    folder = tiny.make_checkpoint(tmp_path / "tiny")
    offered = emulated_isas.offered()
    for group in GROUPS:
        expected, receipts, kinds = None, [], set()
        for isa in (isa for isa in group if isa in offered):
            monkeypatch.setenv("INFINILM_CPU_ISA", isa)
            with LLM(folder, quantization=quantization, dtype="float32", max_model_len=700, use_tqdm=False) as llm:
                logits = [llm.forward([(7 * i * i + 3 * i) % 90 + 3 for i in range(n)]) for n in (1, 37, 600)]
                if group is GROUPS[0]:
                    output = llm.generate("the", seed=1, max_tokens=9, return_receipt=True, use_tqdm=False)[0]
                    receipts.append(output.outputs[0].receipt)
                    assert all(verdict.status == "equal" for verdict in llm.verify(receipts, use_tqdm=False))
                    kinds.add(kernel_class("cpu", "float32"))
            bits = [one.tobytes() for one in logits]
            expected = expected or bits
            assert bits == expected, isa
        assert kinds <= {"fma"}
    bf16 = {isa for isa in offered if isa in ("avx512_bf16", "amx")}
    for isa in bf16:
        monkeypatch.setenv("INFINILM_CPU_ISA", isa)
        assert kernel_class("cpu", "bfloat16") == isa


def _isas_with(libraries: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """What another process answers that adds these libraries; in a folder without a source tree."""
    code = "from infinilm import _core; print(*_core.cpu_isas())"
    environment = {**os.environ, "INFINILM_CPU_KERNELS": libraries}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=folder, capture_output=True, text=True, timeout=PATIENCE
    )


def test_the_package_itself_emulates_nothing(tmp_path: Path) -> None:
    isas = _isas_with("", tmp_path).stdout.split()
    assert "generic" in isas and not any("emulated" in isa for isa in isas)
    assert {*isas, "emulated512", "emulated_amx"} >= set(_core.cpu_isas())


@pytest.mark.parametrize(
    ("library", "message"),
    [
        ("no-such-file.so", "cannot open 'no-such-file.so'"),
        (_core.__file__, f"'{_core.__file__}' holds no CPU kernels of infinilm"),
    ],
)
def test_a_library_without_kernels(library: str, message: str, tmp_path: Path) -> None:
    done = _isas_with(library, tmp_path)
    assert done.returncode != 0 and f"DeviceError: INFINILM_CPU_KERNELS: {message}" in done.stderr


@pytest.mark.skipif(not shutil.which("g++"), reason="a library is built")
def test_a_library_of_another_version(tmp_path: Path) -> None:
    """Its declarations have other sizes; the core does not call into it."""
    source, library = tmp_path / "other.cpp", tmp_path / "other.so"
    source.write_text(
        'extern "C" const void* infinilm_cpu_kernels(unsigned long layout) { return layout == 1 ? "" : 0; }'
    )
    subprocess.run(["g++", "-shared", "-fPIC", source, "-o", library], check=True)
    done = _isas_with(str(library), tmp_path)
    assert "was built for another version of infinilm" in done.stderr
