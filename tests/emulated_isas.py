"""Builds the CPU kernels of 16 lanes with baseline instructions, so that tests run wide code on any machine.

`emulated512` is the code of avx512_bf16 and `emulated_amx` that of amx, their special instructions emulated (see
src/cpu/kernels/simd.h). They are in no package: the core adds the libraries that INFINILM_CPU_KERNELS lists, separated
by colons, to the instruction sets it offers. conftest.py builds them and sets that variable before anything is
collected.

    export INFINILM_CPU_KERNELS=$(python tests/emulated_isas.py FOLDER [plain|address|thread])

builds them by hand, under a sanitizer or without.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "dist"))

from cpp_build import ROOT, Builder

KERNELS = ROOT / "src/cpu/kernels"
BUILDS = {"emulated512": "dot", "emulated_amx": "tile"}  # how bfloat16 is multiplied
# As src/cpu/meson.build compiles the others, but for speed: -O1 takes three times as long, for more than what tests of
# ops then save, which take three quarters of the time.
FLAGS = ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi", "-O0"]


def build(folder: Path, kind: str = "plain") -> str:
    """The value of INFINILM_CPU_KERNELS; what is in the folder already is not built again."""
    folder.mkdir(parents=True, exist_ok=True)
    libraries = []
    for name, bf16 in BUILDS.items():
        sources = sorted(KERNELS.glob("*.cpp"))
        defines = [f"{part}={name}" for part in ("ISA", "FLOATS", "INTEGERS")]
        defines += ["WIDTH=16", f"BF16_DOT={bf16 == 'dot':d}", f"TILES={bf16 == 'tile':d}"]
        defines = [f"INFINILM_{define}" for define in [*defines, "EMULATED=1"]]
        libraries.append(Builder(folder, kind).library(sources, name, defines, FLAGS))
    return ":".join(map(str, libraries))


if __name__ == "__main__":
    print(build(Path(sys.argv[1]).resolve(), *sys.argv[2:]))
