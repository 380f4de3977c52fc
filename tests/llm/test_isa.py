"""INFINILM_CPU_ISA picks the CPU kernels, and says what can be picked when it cannot."""

from __future__ import annotations

import pytest

from infinilm import DeviceError, _core


@pytest.mark.parametrize("isa", _core.cpu_isas())
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
    monkeypatch.setenv("INFINILM_CPU_ISA", "generic")
    _core.Backend("cpu", isa="emulated512")
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
    assert _core.cpu_multiplies_bf16() == (_core.selected_cpu_isa() in ("amx_bf16", "avx512_bf16"))
    for isa, multiplies in (("generic", False), ("emulated512", True), ("emulated_amx", True)):
        monkeypatch.setenv("INFINILM_CPU_ISA", isa)
        assert _core.cpu_multiplies_bf16() == multiplies
