"""Builds kernels for the host compiler: `build(sources, out_dir, sanitize)` gives a shared library to load with ctypes.

Called by the fixtures of tests/cuda, and by hand to debug a kernel; needs only a C++ compiler, which is called through
ccache where that is installed. Objects are cached in out_dir by the content of the source, of every header it includes
and of the command; processes that share out_dir take turns. The runtime of the emulator is compiled without sanitizers
on purpose and linked into every library.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]
RUNTIME = ("device.cpp", "device_memory.cpp", "fiber.cpp", "report.cpp", "scheduler.cpp", "shared_memory.cpp",
           "streams.cpp", "sync.cpp")  # fmt: skip
Sanitizer = Literal["address", "thread"]

# In kernels reading a uint4 as eight bf16 breaks silently at -O2, or with strict aliasing. GNU unique symbols would be
# shared between the libraries that a test process loads.
COMMON = [
    "-std=c++20",
    "-O1",
    "-fPIC",
    "-fno-gnu-unique",
    "-fno-strict-aliasing",
    "-Wall",
    "-Wextra",
    "-DINFINILM_CUDA_EMULATOR",
]
KERNEL = ["-Wno-unknown-pragmas", "-Wno-attributes", "-Wno-psabi", "-Wno-tsan"]
LINES = "-g1"  # what reports of sanitizers need; it takes a tenth longer to compile, and -g half as long again
SANITIZE: dict[str, list[str]] = {
    # alignment: CUDA casts pointers freely; the emulated instructions check what the hardware checks.
    "address": [
        LINES,
        "-fsanitize=address,undefined",
        "-fno-sanitize=alignment,vptr",
        "-fno-sanitize-recover=undefined",
    ],
    "thread": [LINES, "-fsanitize=thread"],
}
LAUNCHER = ["ccache"] if shutil.which("ccache") else []
TOLD = {"address": ["-DINFINILM_EMULATOR_ASAN"], "thread": ["-DINFINILM_EMULATOR_TSAN"]}


def build(
    sources: Sequence[Path | str],
    out_dir: Path | str,
    sanitize: Sanitizer | None = None,
    *,
    defines: Sequence[str] = (),
    includes: Sequence[Path | str] = (),
    ucontext: bool = False,
) -> Path:
    """Compile .cu and .cpp sources and the emulator into one shared library.

    Parameters
    ----------
    sources
        Kernels (.cu) and host code (.cpp) that uses the simulated `<cuda_runtime.h>`.
    out_dir
        Where objects and libraries are kept; made if it is not there.
    sanitize
        Instruments the sources, not the emulator. Loading the library needs `environment(sanitize)`.
    defines
        Macros for the sources, `"NAME"` or `"NAME=value"`.
    includes
        Further include directories.
    ucontext
        Use the portable context switch.

    Returns
    -------
    Path
        The library. Its name depends on all of its content.

    Raises
    ------
    RuntimeError
        With the compiler's output, when something does not compile.
    """
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    include = [
        *(f"-I{ROOT / name}" for name in ("cuda/emulator", "", "src")),
        *(f"-I{directory}" for directory in includes),
    ]
    kernel = [*COMMON, *KERNEL, *include, *(f"-D{macro}" for macro in defines), *SANITIZE.get(sanitize or "", [])]
    told = TOLD.get(sanitize or "", []) + (["-DINFINILM_EMULATOR_UCONTEXT"] if ucontext else [])
    # Threads meet in the runtime all the time: -O2 takes a quarter off a step of a model.
    runtime = [*COMMON, "-O2", *include, *told]
    link = [_compiler(), "-shared", "-Wl,-Bsymbolic", *SANITIZE.get(sanitize or "", []), "-pthread", "-ldl"]
    stem = Path(sources[0]).stem if sources else "emulator"
    unity = out / "emulator.cpp"  # one unit: the headers are parsed once, which is most of the time
    text = "".join(f'#include "cuda/emulator/{name}"\n' for name in RUNTIME)
    with (out / "lock").open("w") as lock, ThreadPoolExecutor(os.cpu_count()) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not unity.exists() or unity.read_text() != text:
            unity.write_text(text)
        units = [(unity.resolve(), runtime), *((Path(source).resolve(), kernel) for source in sources)]
        objects = list(pool.map(lambda unit: _compile(*unit, out), units))
        key = _digest(json.dumps([[o.name for o in objects], link]).encode())
        library = out / f"{stem}-{sanitize or 'plain'}-{key}.so"
        if not library.exists():
            partial = library.with_suffix(".tmp")
            _run([*link, *(str(o) for o in objects), "-o", str(partial)])
            partial.replace(library)
    return library


def environment(sanitize: Sanitizer | None) -> dict[str, str]:
    """Variables a Python process needs before it can load a library that was built with this sanitizer."""
    if sanitize is None:
        return {}
    names = {"address": "libasan.so", "thread": "libtsan.so"}
    preload = [_run([_compiler(), f"-print-file-name={name}"]).strip() for name in (names[sanitize], "libstdc++.so")]
    return {
        "LD_PRELOAD": " ".join(preload),
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONMALLOC": "malloc",
        # Python leaks by design; fibers have no fake stacks; our handler explains faults on device memory better.
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:allow_user_segv_handler=1:halt_on_error=1",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "TSAN_OPTIONS": "halt_on_error=1:exitcode=66:history_size=4:report_signal_unsafe=0",
    }


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _compile(source: Path, flags: list[str], out: Path) -> Path:
    """The object of a source: the cached one where nothing it was made from has changed."""
    command = [_compiler(), *flags]
    key = _digest(json.dumps([str(source), command]).encode())
    record = out / f"{source.stem}-{key}.json"
    if record.exists():
        entry = json.loads(record.read_text())
        cached: Path = out / entry["object"]
        if cached.exists() and all(_digest_file(Path(p)) == d for p, d in entry["inputs"].items()):
            return cached
    depfile, partial = out / f"{key}.d", out / f"{key}.o"
    language = ["-x", "c++"] if source.suffix == ".cu" else []
    _run([*LAUNCHER, *command, "-MD", "-MF", str(depfile), *language, "-c", str(source), "-o", str(partial)])
    text = depfile.read_text().replace("\\\n", " ").split(":", 1)[1]
    inputs = {path: _digest_file(Path(path)) for path in text.split()}
    depfile.unlink()
    result = out / f"{source.stem}-{_digest(json.dumps([key, inputs]).encode())}.o"
    partial.replace(result)
    record.write_text(json.dumps({"object": result.name, "inputs": inputs}))
    return result


def _digest_file(path: Path) -> str:
    try:
        return _digest(path.read_bytes())
    except OSError:
        return "missing"
