"""The kernels of aarch64, compiled by a cross compiler and run by an emulator of its instructions (qemu-user).

NEON and AVX2 both fuse a multiplication and an addition, and every build adds in one order, whatever the width of its
vectors. So all bits are those of AVX2, which other tests compare with the oracle.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from reference.ops import Array

from infinilm import _core
from ops import support
from ops.fused_ops import attention, block_rows, layers_with_a_state, linears, linears_of_blocks, rows

sys.path.insert(0, str(Path(__file__).parents[1] / "dist"))
from cpp_build import CORE, ROOT, Builder

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
# Without those of bfloat16 and of tiles, for which aarch64 has no build.
KERNELS = [path for path in sorted((ROOT / "src/cpu/kernels").glob("*.cpp"))
           if path.stem not in ("attention_bf16", "linear_bf16", "linear_tiles")]  # fmt: skip
DEFINES = [f"-DINFINILM_{part}=generic" for part in ("ISA", "FLOATS", "INTEGERS")]
DEFINES += [f"-DINFINILM_{value}" for value in ("WIDTH=4", "BF16_DOT=0", "TILES=0", "EMULATED=0")]
FLAGS = ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi", *DEFINES]

pytestmark = [
    pytest.mark.skipif(not (shutil.which(COMPILER) and shutil.which(EMULATOR)), reason=f"no {COMPILER}, {EMULATOR}"),
    pytest.mark.skipif("avx2" not in _core.cpu_isas(), reason="needs AVX2 to compare with"),
]


def sent(made: dict[str, Array]) -> bytes:
    """What aarch64_program.cpp reads."""
    pieces = []
    for name, data in made.items():
        sizes = np.array([*_core.gguf_type(name)[:2], *data.shape], np.int64)
        pieces += [name.encode().ljust(16, b"\0"), sizes.tobytes(), data.tobytes()]
    return b"".join(pieces)


@pytest.mark.parametrize("target", ["armv8-a", "armv8.2-a+dotprod"])
def test_neon_has_the_bits_of_avx2(target: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    sources = [
        *KERNELS,
        *sorted((ROOT / "src/cpu").glob("*.cpp")),
        *(path for path in CORE if "dist" not in path.parts),
    ]
    sources = [path for path in dict.fromkeys(sources) if path.stem != "rank_worker"]
    builder = Builder(tmp_path_factory.mktemp("aarch64"), "plain", COMPILER)
    program = builder.program(
        [*sources, Path(__file__).with_name("aarch64_program.cpp")], "kernels", [*FLAGS, f"-march={target}"]
    )
    command = [EMULATOR, "-L", "/usr/aarch64-linux-gnu", str(program)]
    others = {name: value for name, value in os.environ.items() if name != "INFINILM_CPU_KERNELS"}  # of this machine
    made = block_rows()
    done = subprocess.run(command, input=sent(made), stdout=subprocess.PIPE, check=True, timeout=300, env=others)
    got = np.frombuffer(done.stdout, np.uint32)
    b = support.backend("avx2")
    expected = [linears(b), linears_of_blocks(b, made), attention(b), layers_with_a_state(b), rows(b)]
    np.testing.assert_array_equal(got, np.concatenate([part.view(np.uint32) for part in expected]))
