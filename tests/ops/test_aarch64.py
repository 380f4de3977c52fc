"""The kernels of aarch64, compiled by a cross compiler and run by an emulator of its instructions (qemu-user).

An output of a linear is one accumulator, to which every build adds the same products in the same order; both NEON and
AVX2 fuse a multiplication and an addition. So the bits are those of AVX2, which other tests compare with the oracle.
Sums of attention over keys, and those of norms, go across lanes, of which the two have different numbers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference.ops import FLOATING, Array, store

from infinilm import _core
from ops import support
from ops.support import tensor
from ops.test_f8_linear import BLOCKS as F8, f8_blocks
from ops.test_gguf_linear import NATIVE, blocks

sys.path.insert(0, str(Path(__file__).parents[1] / "dist"))
from cpp_build import CORE, ROOT, Builder

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
KERNELS = ("attention", "delta", "elementwise", "linear_floats", "linear_integers", "microbenchmarks", "norm", "pack",
           "rope", "selective_scan", "table")  # fmt: skip
DEFINES = [f"-DINFINILM_{part}=generic" for part in ("ISA", "FLOATS", "INTEGERS")]
DEFINES += [f"-DINFINILM_{value}" for value in ("WIDTH=4", "BF16_DOT=0", "TILES=0", "EMULATED=0")]
FLAGS = ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi", *DEFINES]

pytestmark = [
    pytest.mark.skipif(not (shutil.which(COMPILER) and shutil.which(EMULATOR)), reason=f"no {COMPILER}, {EMULATOR}"),
    pytest.mark.skipif("avx2" not in _core.cpu_isas(), reason="needs AVX2 to compare with"),
]


def numbers(shape: tuple[int, ...], seed: int) -> Array:
    """number() of aarch64_program.cpp."""
    i = np.arange(1, 1 + int(np.prod(shape)), dtype=np.uint32)
    v = i * np.uint32(2654435761) + np.uint32(seed * 2246822519 % 2**32)
    v = (v ^ v >> np.uint32(15)) * np.uint32(2246822519)
    v ^= v >> np.uint32(13)
    return ((v >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)).reshape(shape)


def linears(b: Any) -> Array:
    k, n = 200, 40
    results = []
    for quantization in (None, "int8", "int4"):
        for dtype in FLOATING:
            weight, bias = (
                tensor(store(numbers(shape, seed), dtype), dtype) for shape, seed in (((n, k), 1), ((n,), 2))
            )
            linear = b.prepare_linear([(weight, bias)], kind="plain", quantization=quantization or "none")
            results += [support.run_linear(b, linear, numbers((tokens, k), 3), n) for tokens in (1, 2, 3, 7, 16)]
    return np.concatenate([result.reshape(-1) for result in results])


def block_rows() -> dict[str, Array]:
    """By type: rows of blocks, as files have them."""
    rng, n = np.random.default_rng(0), 40
    made = {name: blocks(rng, name, n, 512) for name in NATIVE}
    return made | {name: f8_blocks(rng, name, n, 384)[0] for name in F8}


def sent(made: dict[str, Array]) -> bytes:
    """What aarch64_program.cpp reads."""
    pieces = []
    for name, data in made.items():
        sizes = np.array([*_core.gguf_type(name)[:2], *data.shape], np.int64)
        pieces += [name.encode().ljust(16, b"\0"), sizes.tobytes(), data.tobytes()]
    return b"".join(pieces)


def linears_of_blocks(b: Any, made: dict[str, Array]) -> Array:
    results = []
    for name, data in made.items():
        block, size = _core.gguf_type(name)[:2]
        k, n = data.shape[1] // size * block, len(data)
        linear = b.prepare_linear([(tensor(data), None)], types=[name])
        results += [support.run_linear(b, linear, numbers((tokens, k), 3), n) for tokens in (1, 2, 3, 7, 16)]
    return np.concatenate([result.reshape(-1) for result in results])


def attention(b: Any) -> Array:
    cache, queries = (20, 2, 16, 24), 150
    table = np.tile((np.arange(20, dtype=np.int32) * 7 + 3) % 20, (2, 1))
    lists = [tensor(np.asarray(values, np.int32)) for values in (table, [0, queries, queries + 1], [300, 257])]
    results = []
    for dtype in FLOATING:
        k, v = (tensor(store(numbers(cache, seed), dtype), dtype) for seed in (4, 5))
        out = np.zeros((queries + 1, 6, 24), np.float32)
        b.paged_attention(tensor(numbers(out.shape, 6)), k, v, *lists, tensor(out), 0.2)
        results.append(out)
    return np.concatenate([result.reshape(-1) for result in results])


def layers_with_a_state(b: Any) -> Array:
    """A new sequence of 20 tokens, and one that goes on by one token from state 2 to state 1."""
    k_heads, heads, k_dim, v_dim, taps = 2, 4, 12, 24, 4
    channels = 2 * k_heads * k_dim + heads * v_dim
    shapes = ((21, channels), (taps, channels), (3, taps - 1, channels), (21, heads * v_dim), (21, heads), (21, heads),
              (heads,), (heads,), (v_dim,), (3, heads, k_dim, v_dim))  # fmt: skip
    x, weight, conv_state, *rest, state = (numbers(shape, 7 + i) for i, shape in enumerate(shapes))
    sequences = [tensor(np.array(values, np.int32)) for values in ([0, 20, 21], [-1, 2], [0, 1])]
    mixed, out = np.zeros_like(x), np.zeros((21, heads * v_dim), np.float32)
    b.causal_conv(*map(tensor, (x, weight, conv_state)), *sequences, tensor(mixed))
    rest[3][:] = -0.5  # rates of decay are below 0
    gates = np.zeros((21, 2 * heads), np.float32)
    b.delta_rule(*map(tensor, (x, *rest, state)), *sequences, tensor(gates), tensor(out), num_k_heads=k_heads, eps=1e-6)
    groups, size = 2, heads * v_dim
    shapes = ((21, size + 2 * groups * k_dim), (21, heads), (heads,), (heads,), (heads,), (3, heads, k_dim, v_dim),
              (21, size), (size,))  # fmt: skip
    xbc, dt, *vectors, scanned, gate, weight = (numbers(shape, 17 + i) for i, shape in enumerate(shapes))
    vectors[0][:] = -0.5
    space = np.zeros((21, size), np.float32)
    b.selective_scan(*map(tensor, (xbc, dt, *vectors, scanned)), *sequences, tensor(gates), tensor(space), groups)
    b.gated_norm(*map(tensor, (space, gate, weight, space)), group_size=size // groups, eps=1e-6)
    return np.concatenate([result.reshape(-1) for result in (mixed, conv_state, out, state, space, scanned)])


@pytest.mark.parametrize("target", ["armv8-a", "armv8.2-a+dotprod"])
def test_neon_has_the_bits_of_avx2(target: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    sources = [ROOT / f"src/cpu/kernels/{name}.cpp" for name in KERNELS]
    sources += [*sorted((ROOT / "src/cpu").glob("*.cpp")), *(path for path in CORE if "dist" not in path.parts)]
    sources = [path for path in dict.fromkeys(sources) if path.stem != "rank_worker"]
    builder = Builder(tmp_path_factory.mktemp("aarch64"), "plain", COMPILER)
    program = builder.program(
        [*sources, Path(__file__).with_name("aarch64_program.cpp")], "kernels", [*FLAGS, f"-march={target}"]
    )
    command = [EMULATOR, "-L", "/usr/aarch64-linux-gnu", str(program)]
    others = {name: value for name, value in os.environ.items() if name != "INFINILM_CPU_KERNELS"}  # of this machine
    made = block_rows()
    done = subprocess.run(command, input=sent(made), stdout=subprocess.PIPE, check=True, timeout=300, env=others)
    got = np.frombuffer(done.stdout, np.float32)
    b = support.backend("avx2")
    same = np.concatenate([linears(b), linears_of_blocks(b, made)])
    close = np.concatenate([attention(b), layers_with_a_state(b)])
    np.testing.assert_array_equal(got[: same.size].view(np.uint32), same.view(np.uint32))
    np.testing.assert_allclose(got[same.size :], close, rtol=0, atol=1e-6)
