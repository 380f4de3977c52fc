"""The command for a machine with a GPU, on the emulator: that it builds, measures and reports, not how fast."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench import ROOT, command, gpu, gpu_build


def run(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command("gpu"), *options],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator needs g++")
def test_everything_is_measured(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    cache = getattr(request.config, "cache", None)
    if cache:  # what tests/cuda has compiled need not be compiled again
        (tmp_path / "emulator").symlink_to(cache.mkdir("cuda-emulator"))
    out = tmp_path / "out.json"
    done = run("--simulate", "--quick", "--budget=3000", f"--build-dir={tmp_path}", f"--out={out}")
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    rows = result["rows"]
    assert {row["group"] for row in rows} == {
        "decode linear", "prefill linear", "quantised linear", "decode attention", "prefill attention", "delta rule",
        "experts", "row-wise", "sampling", "decode", "mixed", "prefill",
    }  # fmt: skip
    for row in rows:
        assert row["floor_ms"] > 0 and row["name"] in done.stdout
        for name, share in row["share"].items():
            assert 0 < share == row["floor_ms"] / row["ms"][name]["median"]
    assert [entry["what"] for entry in result["not_measured"]] == ["tests", "torch and flashinfer"]
    assert result["facts"]["wgmma equals mma.sync bit for bit"] == "yes"
    assert set(result["limits"]) == {"kernels", "engine"}


@pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator needs g++")
def test_a_kernel_that_fails(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """It is reported, and what comes after it is measured: by another process, since its device is lost.

    An audit found: The benchmark ends at the first kernel that fails. Now: It tells and goes on.

    It fails where this was planted: The benchmark does not catch the error of a kernel.
    """
    cache = getattr(request.config, "cache", None)
    if cache:
        (tmp_path / "emulator").symlink_to(cache.mkdir("cuda-emulator"))
    out = tmp_path / "out.json"
    options = ["--simulate", "--quick", "--only=kernels", "--budget=3000", f"--build-dir={tmp_path}", f"--out={out}"]
    done = run(*options, INFINILM_EMULATOR_FAILING_KERNEL="qk_norm_rope_store")
    assert done.returncode == 1, done.stderr
    result = json.loads(out.read_text())
    rows = {row["name"]: row["ms"] for row in result["rows"]}
    (failed,) = (name for name in rows if name.startswith("rope + store"))
    assert not rows[failed] and all(rows[name] for name in rows if name != failed), rows
    assert any(name.startswith("find_best") for name in rows), "measured after it"
    (why, *_) = (entry["why"] for entry in result["not_measured"] if entry["what"].startswith("row-wise: rope"))
    assert "cudaErrorLaunchFailure" in why


def test_every_file_of_tests_runs() -> None:
    """Those left out say nothing of a GPU: they are of the emulator, its runtime, other devices, and nvcc alone."""
    tests = {path.stem.removeprefix("test_") for path in (ROOT / "tests/cuda").glob("test_*.py")}
    assert tests - set(gpu.TEST_FILES) == {"bugs", "nvcc", "runtime", "shared_memory"}
    assert set(gpu.TEST_FILES) <= tests


def test_no_gpu() -> None:
    done = run(CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1 and "no NVIDIA GPU" in done.stderr and "--simulate" in done.stderr


def test_shares_of_the_time() -> None:
    """Steps divide what is left with those that are still to come: one alone has all of it."""
    assert gpu.share_of("tests", gpu.STEPS) == 2 / 5
    assert gpu.share_of("kernels", gpu.STEPS) == 2 / 3
    for step in ("tests", "kernels", "engine"):
        assert gpu.share_of(step, [step]) == 1
    assert gpu.share_of("tests", ["build", "tests"]) == 1


def test_cases_that_are_done_are_kept(tmp_path: Path) -> None:
    """A file of tests that is ended leaves the cases that it had finished."""
    report = tmp_path / "cases.jsonl"
    environment = {**os.environ, "INFINILM_TEST_GPU_CASES": str(report)}
    tests = ["tests/cuda/test_device.py::test_unusable_libraries", "tests/cuda/test_device.py::test_sanitized"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    counts = gpu.count_cases("device", report.read_text())
    assert (counts["passed"], counts["skipped"], counts["failures"]) == (3, 1, {})
    with report.open("a") as file:  # one that fails, and fails again where it is cleaned up
        for text in ("first", "second"):
            file.write(json.dumps({"name": "x", "outcome": "failed", "seconds": 1.0, "text": text}) + "\n")
    counts = gpu.count_cases("device", report.read_text())
    assert (counts["passed"], counts["skipped"], counts["failures"]) == (3, 1, {"x": "second"})


def test_a_build_for_another_python(tmp_path: Path) -> None:
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda/libinfinilm_cuda.so").touch()
    (tmp_path / "_core.cpython-39-x86_64-linux-gnu.so").touch()
    with pytest.raises(gpu.BuildError, match="was built for another Python than this one"):
        gpu_build.make_site(tmp_path)


def test_chosen_rows_and_models() -> None:
    from bench.gpu_engine import MODELS, Sizes
    from bench.gpu_measure import those_of

    cases = list(Sizes().cases())
    assert {name for name, _ in cases} >= MODELS.keys()
    assert [name for name, _ in those_of(cases, "8b int")] == ["Llama-3.1-8B int4", "Llama-3.1-8B int8"]
    with pytest.raises(SystemExit, match="--only=9B: nothing that is measured here has this in its name"):
        those_of(cases, "9B")


def test_floors() -> None:
    """Computed by hand for 4.3 TB/s and 790 Tflop/s: steps of a batch, then of a prompt, in milliseconds."""
    from bench.gpu_engine import MODELS, floor_of
    from bench.gpu_measure import Limits
    from infinilm.config.json.model_config import LlamaConfig
    from infinilm.config.spec import build_spec

    limits = Limits(read=4.3e12, copy=4.3e12, flops=790e12)
    expected = {
        "Llama-3.2-1B": (0.583, 2.80, 5.39),
        "Qwen3-0.6B": (0.305, 7.38, 2.89),
        "Llama-3.1-8B": (3.52, 12.85, 37.6),
    }
    for name, (one, many, prompt) in expected.items():
        spec = build_spec(LlamaConfig.from_dict(MODELS[name]), dtype="bfloat16", max_model_len=8192)
        got = [floor_of(spec, limits, n, 1, 1024) for n in (1, 256)]
        got.append(floor_of(spec, limits, 1, 2048, 2048))
        assert got == pytest.approx([one, many, prompt], rel=0.01), name
