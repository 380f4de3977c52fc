"""The same kernels through nvcc, where there is one: no spills, no warnings, Hopper's instructions used."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
from emulation import load_build

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FLAGS = [
    "-ccbin", "c++", "-std=c++17", "-O3", "--expt-relaxed-constexpr", "-Werror=all-warnings",
    "-Xcompiler=-fPIC,-Wall,-Wextra", "-Xptxas=-v,-warn-spills,-Werror",
]  # fmt: skip
ARCHITECTURES = {"80": "arch=compute_80,code=sm_80", "90a": "arch=compute_90a,code=sm_90a"}
FILES = [
    ("primitives", "80"),
    ("primitives", "90a"),
    ("gemm", "80"),
    ("gemm", "90a"),
    ("bugs", "80"),
    ("hopper", "90a"),
]


def _nvcc() -> str | None:
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin/nvcc"
    return shutil.which("nvcc") or (str(home) if home.exists() else None)


needs_nvcc = pytest.mark.skipif(_nvcc() is None, reason="no nvcc on PATH, in CUDA_HOME or /usr/local/cuda")


def compile_kernels(source: Path, architecture: str, cache: Path) -> tuple[Path, str]:
    """The object and what the compiler said, from the cache when neither the file nor a header has changed."""
    command = [
        *load_build().LAUNCHER,  # ccache, which also keeps what the compiler says: some files take a minute
        str(_nvcc()),
        *FLAGS,
        f"-gencode={ARCHITECTURES[architecture]}",
        f"-I{ROOT}",
        f"-I{ROOT / 'src'}",
        "-c",
        str(source),
    ]
    digest = hashlib.sha256(repr(command).encode())
    for path in [source, *(p for top in ("cuda", "src") for p in sorted((ROOT / top).rglob("*.*h")))]:
        digest.update(path.read_bytes())
    target = cache / f"{source.stem}-sm_{architecture}-{digest.hexdigest()[:16]}.o"
    log = target.with_suffix(".log")
    with (cache / "nvcc.lock").open("w") as lock:  # another process of these tests may want the same
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not log.exists():
            done = subprocess.run([*command, "-o", str(target)], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
            log.write_text(done.stdout + done.stderr)
    return target, log.read_text()


@needs_nvcc
@pytest.mark.parametrize(("name", "architecture"), FILES)
def test_compiles(emulator_cache: Path, name: str, architecture: str) -> None:
    log = compile_kernels(HERE / "kernels" / f"{name}.cu", architecture, emulator_cache)[1]
    assert "Used " in log and "serialized" not in log, log  # ptxas says so when it has to give up wgmma's asynchrony


@needs_nvcc
def test_hopper_instructions(emulator_cache: Path) -> None:
    """The SASS holds the instructions that the wrappers are for."""
    wheel = Path(sysconfig.get_path("purelib")) / "nvidia/cu13/bin"  # PyPI nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm
    path = os.pathsep.join([os.environ["PATH"], str(wheel)])
    dump = shutil.which("cuobjdump", path=path)
    if not dump or not shutil.which("nvdisasm", path=path):
        pytest.skip(
            "no cuobjdump and nvdisasm, neither on PATH nor installed by pip (nvidia-cuda-cuobjdump, -nvdisasm)"
        )
    library = compile_kernels(HERE / "kernels/hopper.cu", "90a", emulator_cache)[0]
    environment = {**os.environ, "PATH": path}
    sass = subprocess.run([dump, "-sass", library], capture_output=True, text=True, check=True, env=environment).stdout
    for instruction in ("HGMMA.64x192x16.F32.BF16", "UTMALDG.2D", "SYNCS", "ACQBULK", "UCGABAR_ARV"):
        assert instruction in sass, f"no {instruction}"
