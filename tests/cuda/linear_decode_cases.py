"""Cases for linear_decode and linear_split_sm90: every prologue and epilogue against float64, and bits that must not
depend on the call.

A `Spec` is one call. Activations and outputs have strides larger than their width; what lies between, and the rows
behind, must stay as it was.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import frames
import numpy as np
from emulation import Array, Buffer, Gpu, from_16, to_16
from frames import UNIT, assert_bitwise, decode
from packing import ORDERS, TYPES, pack

F64 = np.float64
EPS = 1e-5
KERNELS = ("decode", "split")  # the numbers of linear_decode_api.cu
MAX_TOKENS, MAX_NORM_TOKENS = 96, 16  # of linear_decode


@dataclass(frozen=True)
class Spec:
    """One call; heads are (num_heads, num_kv_heads, head_dim) of rope_pairs, whose n they give."""

    num_tokens: int
    k: int
    n: int = 0
    kind: str = "bf16"
    order: str = "natural"
    heads: tuple[int, int, int] = (0, 0, 0)
    bias: bool = False
    norm: bool = False
    residual: str = ""  # "", "apart" or "out": the output itself
    float32: bool = False
    rope: bool = False
    pad: int = 8  # elements between rows
    sms: int = 4  # of the simulated device; more of them give smaller groups of rows
    seed: int = 0
    kernel: str = "decode"

    @property
    def features(self) -> int:
        num_heads, num_kv_heads, head_dim = self.heads
        return (num_heads + 2 * num_kv_heads) * head_dim or self.n

    @property
    def width(self) -> int:
        """Columns of out."""
        if self.rope:
            return self.heads[0] * self.heads[2]
        return self.features // 2 if self.order == "gate_up" else self.features


class Inputs:
    """Random inputs of a spec, rounded to its type; x and residual have at least `rows` rows."""

    def __init__(self, s: Spec, rows: int = 0) -> None:
        rng = np.random.default_rng(s.seed)
        rows = max(rows, s.num_tokens)
        head_dim = s.heads[2]

        def normal(*shape: int) -> Array:
            return rng.standard_normal(shape).astype(np.float32)

        self.x = to_16(normal(rows, s.k) * 1.5, s.kind)
        self.weight = to_16(normal(s.features, s.k) / np.sqrt(s.k), s.kind)
        self.bias, self.norm_weight = normal(s.features), 1 + normal(s.k) / 4
        self.residual = to_16(normal(rows, s.width), s.kind)
        angles = rng.uniform(0, 6, (rows, max(head_dim // 2, 1)))
        self.cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
        self.block_size = 4
        self.num_blocks = rows // self.block_size + 2
        self.slots = rng.permutation(self.num_blocks * self.block_size)[:rows].astype(np.int64)
        self.slots[rows // 2] = -1


@dataclass(frozen=True)
class Outputs:
    """What a call wrote: out [num_tokens, width] as bits or float32; the caches where there is RoPE."""

    out: Array
    k_cache: Array
    v_cache: Array


def run(gpu: Gpu, s: Spec, inputs: Inputs, first: int = 0, x: Array | None = None) -> Outputs:
    """Call it for tokens first .. first + num_tokens, with x instead of the inputs' where given."""
    os.environ["INFINILM_EMULATOR_SMS"] = str(s.sms)
    rows = slice(first, first + s.num_tokens)
    num_heads, num_kv_heads, head_dim = s.heads
    framed = np.full((s.num_tokens, s.k + s.pad), 0xFFFF, np.uint16)  # no row behind: AddressSanitizer sees reads there
    framed[:, : s.k] = (inputs.x if x is None else x)[rows]
    dx = gpu.upload(framed)
    weight = gpu.upload(pack(from_16(inputs.weight, s.kind), s.order, head_dim, s.kind))
    residual = frames.of(gpu, inputs.residual[rows], s.kind, s.pad)
    out = frames.Frame(gpu, "f32" if s.float32 else s.kind, (s.num_tokens, s.width), s.pad)
    if s.residual == "out":
        out = residual
    cache = np.full((inputs.num_blocks, max(num_kv_heads, 1), inputs.block_size, max(head_dim, 1)), 0xFFFF, np.uint16)
    caches = [gpu.upload(cache), gpu.upload(cache)]

    def given(condition: object, array: Array) -> Buffer | None:
        return gpu.upload(array) if condition else None

    gpu.call(
        "run_linear_decode", KERNELS.index(s.kernel), TYPES.index(s.kind), dx, s.k + s.pad, s.num_tokens,
        weight, given(s.bias, inputs.bias), s.features, s.k, ORDERS.index(s.order), head_dim,
        given(s.norm, inputs.norm_weight), EPS, residual.pointer if s.residual else None, residual.stride,
        out.pointer, out.stride, int(s.float32),
        int(s.rope), given(s.rope, inputs.cos_sin[rows]), given(s.rope, inputs.slots[rows]), *caches,
        num_heads, num_kv_heads, inputs.block_size,
    )  # fmt: skip
    got = Outputs(out.get(), *(gpu.download(c) for c in caches))
    gpu.close()
    return got


# ---------------------------------------------------------------------------------------------- against float64


def _check(got: Array, expected: Array, bound: Array, what: object) -> None:
    error = np.abs(got.astype(F64) - expected)
    wrong = ~(error <= bound)  # NaN is wrong
    assert not wrong.any(), f"{what}: {wrong.sum()} of {wrong.size} wrong, first at {np.argwhere(wrong)[0]}"


def compare(gpu: Gpu, s: Spec) -> None:
    """A call against float64, with a bound on the error of every element: rounding of the sums, of x, of the output."""
    inputs = Inputs(s)
    got = run(gpu, s, inputs)
    unit, x, w = UNIT[s.kind], from_16(inputs.x, s.kind).astype(F64), from_16(inputs.weight, s.kind).astype(F64)
    if s.norm:
        x = x / np.sqrt((x * x).mean(1, keepdims=True) + EPS) * inputs.norm_weight
    y = x @ w.T
    terms = s.k + 8 * 2 + 8
    bound = (np.abs(x) @ np.abs(w).T) * (2.0**-24 * terms + (1.01 * unit if s.norm else 0.0))
    if s.bias:
        y, bound = y + inputs.bias, bound + 2.0**-22 * (np.abs(y) + np.abs(inputs.bias))
    if s.rope:
        _compare_rope(s, inputs, got, y, bound)
        return
    if s.order == "gate_up":
        (gate, up), (gate_bound, up_bound) = np.split(y, 2, 1), np.split(bound, 2, 1)
        gate_bound, up_bound = gate_bound + 1.01 * unit * np.abs(gate), up_bound + 1.01 * unit * np.abs(up)
        silu = gate / (1 + np.exp(-gate))
        y = silu * up
        bound = 1.1 * gate_bound * (np.abs(up) + up_bound) + np.abs(silu) * up_bound + 2.0**-20 * np.abs(y)
    if s.residual:
        residual = from_16(inputs.residual, s.kind)
        bound = bound * (1 + unit) + 1.01 * unit * np.abs(y)  # the sum is rounded before it meets the residual
        y, bound = y + residual, bound + 2.0**-22 * (np.abs(y) + np.abs(residual))
    value = decode(got.out, "f32" if s.float32 else s.kind)
    rounding = 2.0**-23 if s.float32 else unit
    _check(value, y, bound + rounding * (np.abs(y) + bound) + frames.SMALLEST[s.kind], s)


def _compare_rope(s: Spec, inputs: Inputs, got: Outputs, y: Array, bound: Array) -> None:
    """Queries in out; keys and values in the cache, and nothing else there."""
    num_heads, num_kv_heads, head_dim = s.heads
    unit, half = UNIT[s.kind], head_dim // 2
    y = y.reshape(s.num_tokens, -1, 2, half)
    bound = bound.reshape(y.shape) + 1.01 * unit * np.abs(y)
    cos, sin = (inputs.cos_sin[: s.num_tokens, None, i : i + half].astype(F64) for i in (0, half))
    turned = np.stack([y[:, :, 0] * cos - y[:, :, 1] * sin, y[:, :, 1] * cos + y[:, :, 0] * sin], 2)
    keys = num_heads + num_kv_heads
    expected = np.concatenate([turned[:, :keys], y[:, keys:]], 1)
    total = (
        bound.sum(2, keepdims=True) * 1.01 + 1.01 * unit * np.abs(expected) + 2.0**-22 * np.abs(y).sum(2, keepdims=True)
    )
    expected, total = (a.reshape(s.num_tokens, -1, head_dim) for a in (expected, np.broadcast_to(total, y.shape)))
    queries = from_16(got.out, s.kind).reshape(s.num_tokens, num_heads, head_dim)
    _check(queries, expected[:, :num_heads], total[:, :num_heads], s)
    written = np.zeros(got.k_cache.shape[0] * inputs.block_size, bool)
    written[inputs.slots[inputs.slots >= 0]] = True
    valid = inputs.slots >= 0
    for cache, head in ((got.k_cache, num_heads), (got.v_cache, keys)):
        by_slot = cache.transpose(0, 2, 1, 3).reshape(-1, num_kv_heads, head_dim)
        assert (by_slot[~written] == 0xFFFF).all(), "wrote to a slot of nobody"
        stored = from_16(by_slot[inputs.slots[valid]], s.kind)
        heads = slice(head, head + num_kv_heads)
        _check(stored, expected[valid, heads], total[valid, heads], s)


def matches_float64(gpu: Gpu, specs: list[dict[str, Any]]) -> None:
    for parameters in specs:
        compare(gpu, make_spec(parameters))


def make_spec(parameters: dict[str, Any]) -> Spec:
    """From JSON."""
    return Spec(**{**parameters, "heads": tuple(parameters.get("heads", (0, 0, 0)))})


# ---------------------------------------------------------------------------------------------- bit for bit


def rows_alone(gpu: Gpu, kind: str, k: int, n: int, norm: bool) -> None:
    """A row's bits do not depend on how many share the call, on where it stands, or on the number of SMs."""
    most = MAX_NORM_TOKENS if norm else MAX_TOKENS
    largest = Spec(most, k, n, kind, float32=True, bias=True, norm=norm, sms=132)
    inputs = Inputs(largest)
    expected = run(gpu, largest, inputs).out
    for sms in (1, 132):
        for first, count in [(0, 96), (95, 1), (3, 8), (80, 16), (61, 17), (31, 33), (30, 65)]:
            first, count = first % most, min(count, most - first % most)
            spec = replace(largest, num_tokens=count, sms=sms)
            assert_bitwise(run(gpu, spec, inputs, first).out, expected[first : first + count])


def norm_is_the_same(gpu: Gpu, specs: list[dict[str, Any]]) -> None:
    """The prologue gives the bits of the norm kernel's arithmetic followed by a linear without it."""
    for parameters in specs:
        fused = replace(make_spec(parameters), norm=True)
        inputs = Inputs(fused)
        got = run(gpu, fused, inputs)
        normed = gpu.upload(inputs.x)
        arguments = (TYPES.index(fused.kind), normed, fused.k, gpu.upload(inputs.norm_weight), normed)
        gpu.call("run_norm_rows", *arguments, inputs.x.shape[0], fused.k, EPS)
        expected = run(gpu, replace(fused, norm=False), inputs, x=gpu.download(normed))
        for name in ("out", "k_cache", "v_cache"):
            assert_bitwise(getattr(got, name), getattr(expected, name))


def split_is_the_same(gpu: Gpu, num_tokens: int, kind: str) -> None:
    """Slices that blocks of a cluster sum have the bits of slices that one sums: float32 shows their order."""
    split = Spec(num_tokens, 1400, 24, kind, float32=True, kernel="split")
    inputs = Inputs(split)
    np.testing.assert_array_equal(run(gpu, split, inputs).out, run(gpu, replace(split, kernel="decode"), inputs).out)


def float32_rounds_to_the_output(gpu: Gpu, kind: str) -> None:
    """The 16-bit output is the float32 one rounded."""
    spec = Spec(5, 136, 40, kind, bias=True)
    inputs = Inputs(spec)
    full = run(gpu, replace(spec, float32=True), inputs)
    assert_bitwise(run(gpu, spec, inputs).out, to_16(full.out, kind))
