"""The GPU of this machine, and kernels built for it: what cuda/emulator/build.py does, with nvcc.

With INFINILM_TEST_GPU=1 the fixture `emulate` builds by this, and the cases run on the GPU. INFINILM_TEST_GPU_OBJECTS
names a folder where Meson has compiled cuda/*/*.cu for this GPU (<build folder>/cuda): those objects are taken as they
are, so that the tests run the installed library. INFINILM_TEST_GPU_PREPARE=90a stands for a GPU that is elsewhere: the
libraries of all cases are built and no case runs. They are found again in another folder of another machine, whose
time is then spent on running.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAJOR, MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_..
PREPARE = os.environ.get("INFINILM_TEST_GPU_PREPARE")  # the architecture of a GPU that is not here
FLAGS = ["-O3", "--expt-relaxed-constexpr", "-lineinfo", "-Xcompiler=-fPIC,-fno-gnu-unique"]


@dataclass(frozen=True)
class Device:
    """The first GPU; `cuda` is the newest version the driver supports, 1000 * major + 10 * minor."""

    name: str
    major: int
    minor: int
    cuda: int

    @property
    def is_hopper(self) -> bool:
        return self.major == 9

    @property
    def architecture(self) -> str:
        """As Meson's option gpu_archs and nvcc want it."""
        return "90a" if (self.major, self.minor) == (9, 0) else f"{self.major}{self.minor}"


@functools.cache
def find_device() -> Device | None:
    """The first GPU, by the driver's library alone; None where there is no driver or no GPU."""
    if PREPARE:
        return device_of(PREPARE)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, version, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(256)
    capability = ctypes.c_int(), ctypes.c_int()
    done = [
        driver.cuInit(0),
        driver.cuDeviceGet(ctypes.byref(device), 0),
        driver.cuDriverGetVersion(ctypes.byref(version)),
    ]
    done.append(driver.cuDeviceGetName(name, 256, device))
    for attribute, value in zip((MAJOR, MINOR), capability, strict=True):
        done.append(driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device))
    return None if any(done) else Device(name.value.decode(), capability[0].value, capability[1].value, version.value)


def device_of(architecture: str) -> Device:
    """A GPU that is not here."""
    number = int(architecture.rstrip("a"))
    return Device(f"a GPU of architecture {architecture}, elsewhere", number // 10, number % 10, 0)


def find_nvcc() -> str | None:
    """The compiler: on PATH, in CUDA_HOME or in /usr/local/cuda."""
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin/nvcc"
    return shutil.which("nvcc") or (str(home) if home.exists() else None)


def environment(_: str | None) -> dict[str, str]:
    """What a process needs to load a library of `build`: nothing."""
    return {}


def build(
    sources: Sequence[Path | str],
    out_dir: Path | str,
    sanitize: str | None = None,
    *,
    defines: Sequence[str] = (),
    includes: Sequence[Path | str] = (),
    ucontext: bool = False,
    architecture: str | None = None,
    objects: Sequence[Path] = (),
    cudart: str = "shared",
) -> Path:
    """Compile .cu and .cpp sources into a shared library, with `objects` besides. Raises RuntimeError as nvcc says.

    With a shared cudart it has the runtime's functions too, for `emulation.Gpu`; a static one does not disturb that of
    torch. Sources for Hopper alone are compiled for it on any GPU; there, nothing calls them.
    """
    assert sanitize is None and not ucontext, "there are no sanitizers on a GPU"
    if architecture is None:
        device = find_device()
        assert device, "no GPU"
        architecture = device.architecture
    nvcc = find_nvcc()
    if nvcc is None:
        raise RuntimeError("no nvcc on PATH, in CUDA_HOME or in /usr/local/cuda")
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    digest = _digest_of_headers()
    shared = [
        nvcc,
        *FLAGS,
        f"-I{ROOT}",
        f"-I{ROOT / 'src'}",
        *(f"-I{path}" for path in includes),
        *(f"-D{d}" for d in defines),
    ]
    compiled = [*objects, *(_compile(Path(source).resolve(), shared, architecture, digest, out) for source in sources)]
    lib = Path(nvcc).resolve().parents[1]
    rpath = [f"-Xlinker=-rpath,{lib / name}" for name in ("lib64", "lib")]
    link = [
        nvcc,
        "-shared",
        "-cudart",
        cudart,
        f"-arch=sm_{architecture}",
        "-Xlinker=-Bsymbolic,--exclude-libs=ALL",
        *rpath,
        "-ldl",
    ]
    contents = [hashlib.sha256(o.read_bytes()).hexdigest() for o in compiled]
    key = hashlib.sha256(repr([architecture, cudart, contents]).encode()).hexdigest()[:16]
    library = out / f"{Path(sources[0]).stem}-gpu-{key}.so"
    if not library.exists():
        _produce(lambda partial: [*link, *(str(o) for o in compiled), "-o", str(partial)], library)
    return library


@functools.cache
def _digest_of_headers() -> bytes:
    headers = [p for folder in ("cuda", "src", "tests/cuda/kernels") for p in sorted((ROOT / folder).rglob("*.*h"))]
    return hashlib.sha256(b"".join(p.read_bytes() for p in headers)).digest()


def _compile(source: Path, shared: list[str], architecture: str, headers: bytes, out: Path) -> Path:
    """The object: Meson's, the cached one, or a new one."""
    ready = Path(os.environ.get("INFINILM_TEST_GPU_OBJECTS", "/nonexistent")) / f"{source.name}.o"
    if source.parent.parent == ROOT / "cuda" and ready.exists():
        return ready
    for_hopper = "sm90" in source.name or "hopper" in source.name
    number = "90a" if for_hopper else architecture
    standard = ["-std=c++20"] if source.suffix == ".cpp" else ["-std=c++17"]
    command = [*shared, *standard, f"-gencode=arch=compute_{number},code=sm_{number}", "-c", str(source)]
    words = repr(command[1:]).replace(str(ROOT), "")  # the same in another folder, by another path of nvcc
    key = hashlib.sha256(words.encode() + headers + source.read_bytes()).hexdigest()[:16]
    target = out / f"{source.stem}-gpu-{key}.o"
    if not target.exists():
        _produce(lambda partial: [*command, "-o", str(partial)], target)
    return target


def _produce(command_to: Callable[[Path], list[str]], target: Path) -> None:
    """Run a compiler; the target appears when it is whole."""
    partial = target.with_suffix(f".{os.getpid()}{target.suffix}")
    command = command_to(partial)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    partial.replace(target)
