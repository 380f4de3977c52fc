"""Builds the CPU kernels of 16 lanes with baseline instructions, so that tests run wide code on any machine.

`emulated512` is the code of avx512_bf16 and `emulated_amx` that of amx, their special instructions emulated (see
src/cpu/kernels/simd.h). They are in no package: the core adds the libraries that INFINILM_CPU_KERNELS lists, separated
by colons, to the instruction sets it offers. A test file that runs on every instruction set takes their names from
`offered`, which builds the emulations and sets that variable; without such a file nothing is built.

    export INFINILM_CPU_KERNELS=$(python tests/emulated_isas.py FOLDER [plain|address|thread])

builds them by hand, under a sanitizer or without.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "dist"))

from covering import THOROUGH
from cpp_build import ROOT, Builder

folder: Path | None = None  # where `offered` builds them; None: it builds none. Set by conftest.py.

KERNELS = ROOT / "src/cpu/kernels"
BUILDS = {"emulated512": "dot", "emulated_amx": "tile"}  # how bfloat16 is multiplied
# With the same code, on a machine that has its instructions.
TWINS = {"emulated512": "avx512_bf16", "emulated_amx": "amx"}
# As src/cpu/meson.build compiles the others, but for speed: -O1 takes three times as long, for more than what tests of
# ops then save, which take three quarters of the time.
FLAGS = ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi", "-O0"]


@functools.cache
def offered() -> tuple[str, ...]:
    """The instruction sets that tests run on: those of this machine, and emulations of what it lacks, which come first.

    With `--hypothesis-profile=thorough` also emulations of what it has, which compute the same by the same code.
    Processes that tests start inherit the variable. The core reads it once, when it is first asked for an instruction
    set: test files ask at import, by this function, since all are imported before the first test runs.
    """
    from infinilm import _core

    if folder and "INFINILM_CPU_KERNELS" not in os.environ and shutil.which("g++"):
        native = _of_this_machine()
        lacking = [name for name, twin in TWINS.items() if THOROUGH or twin not in native]
        os.environ["INFINILM_CPU_KERNELS"] = build(folder, names=lacking)
        if not set(lacking) <= set(_core.cpu_isas()):
            raise RuntimeError("a test file asked the core for its instruction sets before: ask emulated_isas.offered")
    return tuple(_core.cpu_isas())


def _of_this_machine() -> list[str]:
    """Asked of another process, since the core of this one reads INFINILM_CPU_KERNELS when it is first asked."""
    code = "from infinilm import _core; print(*_core.cpu_isas())"
    return subprocess.run(
        [sys.executable, "-c", code], cwd="/", capture_output=True, text=True, check=True
    ).stdout.split()


def build(folder: Path, kind: str = "plain", names: Iterable[str] = tuple(BUILDS)) -> str:
    """The value of INFINILM_CPU_KERNELS; what is in the folder already is not built again."""
    folder.mkdir(parents=True, exist_ok=True)
    libraries = []
    for name in names:
        sources = sorted(KERNELS.glob("*.cpp"))
        defines = [f"{part}={name}" for part in ("ISA", "FLOATS", "INTEGERS")]
        defines += ["WIDTH=16", f"BF16_DOT={BUILDS[name] == 'dot':d}", f"TILES={BUILDS[name] == 'tile':d}"]
        defines = [f"INFINILM_{define}" for define in [*defines, "EMULATED=1"]]
        libraries.append(Builder(folder, kind).library(sources, name, defines, FLAGS))
    return ":".join(map(str, libraries))


if __name__ == "__main__":
    print(build(Path(sys.argv[1]).resolve(), *sys.argv[2:]))
