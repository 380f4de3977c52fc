"""A CUDA compiler that fails costs the package its CUDA library and nothing else, and the package knows why."""

from __future__ import annotations

import importlib.util
import os
import runpy
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "cuda/optional.py"
FAILS = ["sh", "-c", "echo 'a.h(1): warning: odd'; echo 'b.h(2): error: \"no\" \x1b[1mway' >&2; exit 1"]

needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
needs_meson = pytest.mark.skipif(
    not (importlib.util.find_spec("mesonbuild") and importlib.util.find_spec("nanobind") and shutil.which("ninja")),
    reason="needs what builds the package: meson, ninja, nanobind",
)


def optional(*arguments: str | Path) -> str:
    done = subprocess.run([sys.executable, SCRIPT, *arguments], check=True, capture_output=True, text=True)
    return done.stdout


def why_no_cuda(library: Path, folder: Path) -> str:
    code = "import infinilm; print(infinilm.backends()['cuda']['reason'])"
    environment = {**os.environ, "INFINILM_CUDA_LIBRARY": str(library)}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=folder, check=True, capture_output=True, text=True
    ).stdout


def test_probe_is_one_line_or_none() -> None:
    assert optional("probe", "x.cu", "nvcc 12.9", "true").strip() == ""
    said = optional("probe", "x.cu", "nvcc 12.9", *FAILS)
    assert said == 'nvcc 12.9 could not compile x.cu: b.h(2): error: "no" ?[1mway\n'
    assert "could not compile x.cu: exit code 3" in optional("probe", "x.cu", "nvcc", "sh", "-c", "exit 3")


@needs_compiler
def test_a_kernel_that_does_not_compile(tmp_path: Path) -> None:
    """Others may have been compiled by then; a library is made that says why it is empty."""
    good, bad, library = tmp_path / "good.o", tmp_path / "bad.o", tmp_path / "lib.so"
    empty = ["g++", "-c", "-x", "c++", "/dev/null", "-o", str(good)]
    assert optional("compile", "good.cu", "nvcc 12.9", good, *empty) == ""
    assert "a.h(1): warning: odd" in optional("compile", "bad.cu", "nvcc 12.9", bad, *FAILS)
    said = optional("link", library, "g++", "-shared", "-fPIC", "--", good, bad, "-lrt")
    assert "CUDA is left out of this package: nvcc 12.9 could not compile bad.cu: b.h(2)" in said
    assert "--config-settings=setup-args=-Dcuda=disabled" in said
    reason = why_no_cuda(library, tmp_path)
    assert 'this build of infinilm has no CUDA: nvcc 12.9 could not compile bad.cu: b.h(2): error: "no"' in reason
    assert "reinstall with --config-settings=setup-args=-Dcuda=enabled, or use device='cpu'" in reason


@needs_compiler
def test_kernels_that_compile_are_linked(tmp_path: Path) -> None:
    source, compiled, library = tmp_path / "a.cpp", tmp_path / "a.o", tmp_path / "lib.so"
    source.write_text('extern "C" int marker() { return 7; }')
    command = ["g++", "-fPIC", "-c", str(source), "-o", str(compiled)]
    assert optional("compile", "a.cpp", "g++", compiled, *command) == ""
    assert optional("link", library, "g++", "-shared", "--", compiled, "-lrt") == ""
    assert "is not a CUDA library of infinilm" in why_no_cuda(library, tmp_path)  # linked, and no kernels


STAND_IN = """#!/bin/bash
case "$*" in
  *{fails}*) echo "host_config.h(12): error: unsupported GNU version"; exit 1;;
  *--version*) echo "Cuda compilation tools, release {version}, V{version}.20"; exit 0;;
  *--list-gpu-code*) printf 'sm_80\\nsm_90a\\nsm_120\\n'; exit 0;;
  *--dryrun*) echo "#\\$ TOP={toolkit}" >&2; exit 0;;
esac
while [ $# -gt 0 ]; do [ "$1" = -o ] && output=$2; shift; done
g++ -x c++ -c /dev/null -o "$output"
"""


def setup(folder: Path, option: str, version: str, fails: str) -> subprocess.CompletedProcess[str]:
    """`meson setup` with an nvcc of this version, which fails where its command has the word `fails`."""
    nvcc = folder / "toolkit/bin/nvcc"
    (folder / "toolkit/lib64").mkdir(parents=True)
    (folder / "toolkit/lib64/libcudart_static.a").write_bytes(b"!<arch>\n")
    nvcc.parent.mkdir()
    nvcc.write_text(STAND_IN.format(version=version, fails=fails, toolkit=folder / "toolkit"))
    nvcc.chmod(nvcc.stat().st_mode | stat.S_IXUSR)
    environment = {**os.environ, "CUDA_HOME": str(folder / "toolkit")}
    command = [sys.executable, "-m", "mesonbuild.mesonmain", "setup", str(folder / "build"), str(ROOT)]
    return subprocess.run([*command, f"-Dcuda={option}"], env=environment, capture_output=True, text=True)


def test_a_toolkit_that_pip_installed(tmp_path: Path) -> None:
    """The newest with a compiler; other packages of NVIDIA have folders of these names without one."""
    script = runpy.run_path(str(ROOT / "cuda/pip_toolkit.py"))
    assert script["find_toolkit"]([str(tmp_path / "absent"), str(tmp_path)]) == ""
    for name, has_compiler in (("cu9", True), ("cu13", True), ("cu14", False), ("cublas", True)):
        folder = tmp_path / "nvidia" / name / "bin"
        folder.mkdir(parents=True)
        if has_compiler:
            (folder / "nvcc").touch()
    assert script["find_toolkit"]([str(tmp_path)]) == str(tmp_path / "nvidia" / "cu13")


@needs_meson
@pytest.mark.parametrize(
    ("version", "fails", "reason"),
    [
        ("12.2", "no-file", "is older than 12.4"),
        ("of no known version", "--version", "fails where it is asked for its version"),
        ("12.6", "random.cu", "could not compile random.cu: host_config.h(12): error: unsupported GNU version"),
    ],
)
def test_setup_asks_the_compiler(tmp_path: Path, version: str, fails: str, reason: str) -> None:
    done = setup(tmp_path / "auto", "auto", version, fails)
    assert done.returncode == 0, done.stdout
    (line,) = (line for line in done.stdout.splitlines() if "CUDA is left out" in line)
    assert f"nvcc {version} (" in line and reason in line and "--config-settings=setup-args=-Dcuda=disabled" in line
    done = setup(tmp_path / "enabled", "enabled", version, fails)
    assert done.returncode != 0 and f"ERROR: Problem encountered: cuda=enabled, but nvcc {version} (" in done.stdout


@needs_meson
@pytest.mark.parametrize(("version", "compressed"), [("12.9", False), ("13.0", True)])
def test_only_what_every_driver_reads_is_compressed(tmp_path: Path, version: str, compressed: bool) -> None:
    """Compressed kernels take a driver of CUDA 12.4, and programs built by toolkits of 12 run with older ones, too.

    An audit found: Compressed binaries of CUDA 12.8 and 12.9 need newer drivers than the toolkit. Now: Compressed from
    CUDA 13 on, whose drivers all read it.

    It fails where this was planted: Binaries compressed from CUDA 12.8 on.
    """
    done = setup(tmp_path, "enabled", version, "no-file")
    assert done.returncode == 0, done.stdout
    lines = (tmp_path / "build/build.ninja").read_text().splitlines()
    kernels = [line for line in lines if line.lstrip().startswith("COMMAND") and "compute_90" in line]
    assert len(kernels) > 20 and all(("--compress-mode" in line) == compressed for line in kernels)
    driver = "580" if compressed else "525"
    assert f"CUDA {version}: what it builds runs with NVIDIA drivers from {driver} on" in done.stdout
    assert "wgmma" not in done.stdout


@needs_meson
@pytest.mark.parametrize(
    ("own", "archs"), [("12.0\n12.0", "80 90a 120"), ("9.0\n8.6", "80 90a"), ("12.7", "80 90a"), ("[N/A]", "80 90a")]
)
def test_a_newer_gpu_of_this_machine_gets_its_code(
    tmp_path: Path, own: str, archs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the compiler knows it; nothing that the driver's tool may print harms the build."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '%s\\n' '{own}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    done = setup(tmp_path, "enabled", "12.9", "no-file")
    assert done.returncode == 0, done.stdout
    (line,) = (line for line in done.stdout.splitlines() if "GPU architectures" in line)
    assert line.split(":", 1)[1].replace(",", "").split() == archs.split()


@needs_meson
@needs_compiler
def test_a_build_goes_on_without_cuda(tmp_path: Path) -> None:
    """Where it is a later kernel that fails, as one may that needs too much of an old compiler.

    An audit found: A toolkit that fails ends the installation, also of who wants the CPU. Now: The package goes without
    CUDA and says why in a line.
    """
    done = setup(tmp_path, "auto", "12.6", "linear_decode.cu")
    assert done.returncode == 0 and "CUDA 12.6 builds no wgmma for attention with heads of 128" in done.stdout
    target = "cuda/libinfinilm_cuda.so"
    command = ["ninja", "-C", tmp_path / "build", target]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    reason = "could not compile linear_decode.cu: host_config.h(12): error: unsupported GNU version"
    assert "CUDA is left out of this package: nvcc 12.6" in said and reason in said
    assert reason in why_no_cuda(tmp_path / "build" / target, tmp_path)
