"""Builds infinilm for the GPU of this machine without installing it, and the libraries that gpu.py measures."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import ROOT

CUDA_TESTS = ROOT / "tests/cuda"
if str(CUDA_TESTS) not in sys.path:
    sys.path.insert(0, str(CUDA_TESTS))

import nvcc_build  # noqa: E402
from emulation import BACKEND, load_build  # noqa: E402

BENCH = ROOT / "bench/gpu_kernels.cu"
WORK = ROOT / "src/ops/attention_work.cpp"  # a part of the core, not of the CUDA library


@dataclass(frozen=True)
class Built:
    """Where things are: the library of gpu_kernels.cu, and what a process needs to import infinilm."""

    bench: Path
    folder: Path  # to run processes in: nothing there shadows the package
    environment: dict[str, str]


class BuildError(RuntimeError):
    """A tool failed; the message has its output's end."""


def compile_all(folder: Path, device: nvcc_build.Device, seconds: float) -> None:
    """Meson's build for the device's architecture in `folder`."""
    until = time.monotonic() + seconds
    folder.mkdir(parents=True, exist_ok=True)
    environment = _environment()
    options = ["--buildtype=release", "-Db_ndebug=true", "-Dcuda=enabled", f"-Dgpu_archs={device.architecture}"]
    again = ["--reconfigure"] if (folder / "build.ninja").exists() else []
    tool = [sys.executable, "-m", "mesonbuild.mesonmain"] if importlib.util.find_spec("mesonbuild") else ["meson"]
    _run([*tool, "setup", *again, *options, str(folder), str(ROOT)], environment, until)
    _run([*tool, "compile", "-C", str(folder)], environment, until)


def use(folder: Path, device: nvcc_build.Device) -> Built:
    """What is in `folder`, of this machine or of another: a site folder of links, and the benchmark's library."""
    site = make_site(folder)
    objects = sorted((folder / "cuda").glob("*.cu.o"))
    hopper = (folder / "cuda/linear_sm90.cu.o") in objects
    bench = nvcc_build.build(
        [BENCH, WORK],
        folder / "bench",
        defines=[f"INFINILM_SM90={int(hopper)}"],
        includes=[ROOT / "src"],
        architecture=device.architecture,
        objects=objects,
        cudart="static",
    )
    environment = _environment()
    python_path = os.pathsep.join(p for p in (str(site), os.environ.get("PYTHONPATH", "")) if p)
    return Built(bench, site, {**environment, "PYTHONPATH": python_path})


def _environment() -> dict[str, str]:
    """This one, with the tools that are installed beside this Python."""
    return {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}


def make_site(folder: Path) -> Path:
    """A folder for sys.path: the package of the source tree with the modules of a build folder."""
    package = folder / "site/infinilm"
    shutil.rmtree(package, ignore_errors=True)
    package.mkdir(parents=True)
    modules = [*folder.glob("_core*.so"), *(folder / "cuda").glob("libinfinilm_cuda.so")]
    if len(modules) != 2:
        raise BuildError(f"{folder} has {[m.name for m in modules]}, expected the module and the CUDA library")
    built_for = modules[0].name.removeprefix("_core")
    if built_for not in importlib.machinery.EXTENSION_SUFFIXES:
        raise BuildError(
            f"{modules[0]} was built for another Python than this one ({sys.version.split()[0]}, which loads "
            f"{importlib.machinery.EXTENSION_SUFFIXES[0]}): prepare the build with the same minor version"
        )
    made = [*modules, folder / "_version.py"]
    for path in [*(p for p in (ROOT / "infinilm").iterdir() if p.name != "__pycache__"), *made]:
        (package / path.name).symlink_to(path.resolve())
    return package.parent


def simulate(cache: Path) -> Built:
    """The same with the emulator: one library that is the backend and the benchmark, for the installed infinilm."""
    library = load_build().build([*BACKEND, BENCH, WORK], cache, defines=["INFINILM_SM90=1"], includes=[ROOT / "src"])
    environment = {**os.environ, "INFINILM_CUDA_LIBRARY": str(library), "INFINILM_EMULATOR_SMS": "4"}
    return Built(library, cache, environment)


def run_bounded(command: Sequence[str], folder: Path, environment: dict[str, str], seconds: float) -> tuple[int, str]:
    """Exit code and output; when the time is up, it and all it started are ended, and BuildError is raised."""
    try:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise BuildError(f"{command[0]} is not installed: {error}") from error
    try:
        output = process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{' '.join(command)}: not done after {seconds:.0f} s") from error
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode, output


def _run(command: Sequence[str], environment: dict[str, str], until: float) -> None:
    code, output = run_bounded(command, ROOT, environment, max(1.0, until - time.monotonic()))
    if code != 0:
        raise BuildError(f"{' '.join(command)}\n{output[-4000:]}")
