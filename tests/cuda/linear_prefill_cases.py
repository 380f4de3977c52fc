"""Cases for linear_prefill and linear_sm90 against numpy: float64, and the very bits of the sum order of linear.cuh."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from emulation import ON_GPU, Array, CudaError, Gpu
from frames import KINDS, UNIT, Frame, assert_bitwise, assert_close, decode, encode, normal, of
from packing import BOX_COLUMNS, ORDERS, SLICES, SPLITS, pack, split_workspace

KERNELS = ("prefill", "sm90", "split", "decode")  # the numbers of linear_prefill_api.cu
MAX_DECODE_TOKENS = 96
MOST_PARTS = 512  # in the workspace of linear_prefill
DECODE, PREFILL = 1, 4  # of LinearKernel
PAIRS = ("same_tokens", "same_rows", "same_tile")  # HopperPair
F64 = np.float64


@dataclass
class Linear:
    """One linear and its input, made from a seed. residual: "", "apart" or "in_place"."""

    seed: int
    tokens: int
    n: int
    k: int
    kind: str
    order: str = "natural"
    head_dim: int = 0
    bias: bool = False
    residual: str = ""
    out_float32: bool = False
    pad: int = 0
    x: Array = field(init=False)
    weight: Array = field(init=False)

    def __post_init__(self) -> None:
        self.x = encode(normal(self.seed, self.tokens, self.k), self.kind)
        self.weight = encode(normal(self.seed + 1, self.n, self.k), self.kind)
        self.width = self.n // 2 if self.order == "gate_up" else self.n
        self.out_kind = "f32" if self.out_float32 else self.kind
        self.biases = normal(self.seed + 2, self.n) if self.bias else None
        self.residuals = encode(normal(self.seed + 3, self.tokens, self.width), self.kind) if self.residual else None

    def run(
        self, gpu: Gpu, kernel: str, first: int = 0, tokens: int | None = None, *, splits: int = 1, calls: int = 1
    ) -> Array:
        """Rows [first, first + tokens) of out, as stored; they are all that is in the call."""
        rows = slice(first, first + (self.tokens if tokens is None else tokens))
        x = of(gpu, self.x[rows], self.kind, self.pad)
        residual = None
        if self.residuals is not None:
            residual = of(gpu, self.residuals[rows], self.kind, 2 * self.pad)
        shape = (len(self.x[rows]), self.width)
        out = residual if residual and self.residual == "in_place" else Frame(gpu, self.out_kind, shape, 3 * self.pad)
        workspace = split_workspace(gpu, self.n, shape[0], splits) if kernel == "prefill" else None
        packed = pack(decode(self.weight, self.kind), self.order, self.head_dim, self.kind)
        gpu.call(
            "run_linear", KERNELS.index(kernel), x.pointer, ctypes.c_int64(x.stride), shape[0], gpu.upload(packed),
            None if self.biases is None else gpu.upload(self.biases), self.n, self.k, KINDS.index(self.kind),
            ORDERS.index(self.order), self.head_dim, residual.pointer if residual else None,
            ctypes.c_int64(residual.stride if residual else 0), out.pointer, ctypes.c_int64(out.stride),
            int(self.out_float32), workspace, splits, calls,
        )  # fmt: skip
        got = out.get()
        assert workspace is None or not gpu.download(workspace)[:1024].any(), "a counter is not ready for the next call"
        gpu.close()
        return got

    def sums(self) -> Array:
        """x . weight^T as linear.cuh orders it, [tokens, n] float32; the emulator's mma adds one product at a time."""
        x, weight = decode(self.x, self.kind), decode(self.weight, self.kind)
        boxes, total = -(-self.k // BOX_COLUMNS), np.zeros((self.tokens, self.n), np.float32)
        for part in range(SLICES):
            chain = np.zeros_like(total)
            begin, end = (BOX_COLUMNS * (boxes * i // SLICES) for i in (part, part + 1))
            for k in range(begin, min(end, self.k)):
                chain += x[:, k, None] * weight[None, :, k]  # products of 16-bit floats are exact
            total += chain
        return total

    def finished(self, sums: Array) -> Array:
        """Outputs of sums [tokens, n], in their type."""
        y = sums if self.biases is None else sums + self.biases
        if self.order == "gate_up":
            gate, up = self._rounded(y[:, : self.width]), self._rounded(y[:, self.width :])
            y = gate / (1 + np.exp(-gate)) * up
        return y if self.residuals is None else self._rounded(y) + decode(self.residuals, self.kind)

    def _rounded(self, values: Array) -> Array:
        """As the kernels round what meets silu or the residual; float64, of which the oracle is made, stays."""
        return values if values.dtype == F64 else decode(encode(values, self.kind), self.kind)

    def _slack(self, sums: Array) -> Array | float:
        """What those roundings may add to an output."""
        y = sums if self.biases is None else sums + self.biases
        if self.order == "gate_up":
            gate, up = np.split(np.abs(y), 2, 1)
            return 2.2 * UNIT[self.kind] * (1 + gate) * up  # |silu'| is at most 1.1
        return 0.0 if self.residuals is None else 1.01 * UNIT[self.kind] * np.abs(y)

    def check(self, got: Array) -> None:
        """Near the float64 result; on the emulator the very bits of its order, where no exp is in it.

        A GPU adds the 16 products of a step and the accumulator together, in an order of its own.
        """
        x, weight = decode(self.x, self.kind).astype(F64), decode(self.weight, self.kind).astype(F64)
        want = self.finished(x @ weight.T)
        scale = self._scale(np.abs(x) @ np.abs(weight.T) / max(1, self.k) ** 0.5)
        assert_close(got, want, self.out_kind, self.k, scale, self._slack(x @ weight.T))
        if self.order != "gate_up" and not ON_GPU:
            assert_bitwise(got, encode(self.finished(self.sums()), self.out_kind))

    def _scale(self, size: Array) -> Array:
        """About how large the terms of an output are, given those of its sums: for the tolerance."""
        size = size + 1.0 + (0.0 if self.biases is None else np.abs(self.biases))
        if self.order != "gate_up":
            return size
        return 2 * size[:, : self.width] * size[:, self.width :]


def values(gpu: Gpu, kernel: str, shapes: list[dict[str, Any]]) -> None:
    """Outputs are right, and nothing but them is written."""
    for shape in shapes:
        linear = Linear(**shape)
        linear.check(linear.run(gpu, kernel))


def splits(gpu: Gpu, shapes: list[dict[str, Any]]) -> None:
    """Blocks that share a tile give the bits of one that has it alone, also when the next linear follows at once."""
    for shape in shapes:
        linear = Linear(**shape)
        whole = linear.run(gpu, "prefill")
        linear.check(whole)
        for count in SPLITS:
            assert_bitwise(linear.run(gpu, "prefill", splits=count, calls=2), whole)


def pairs(gpu: Gpu, shapes: list[dict[str, Any]]) -> None:
    """Pairs of blocks of linear_sm90 that share a tile give the bits of one that has it alone."""
    for shape in shapes:
        linear = Linear(**shape)
        whole = linear.run(gpu, "sm90")
        linear.check(whole)
        assert_bitwise(linear.run(gpu, "sm90", splits=2, calls=2), whole)


def refused_splits(gpu: Gpu) -> None:
    """What k or the workspace has no room for, and numbers that are none of splits."""
    refused_calls: list[tuple[str, dict[str, Any], int]] = [
        ("prefill", {"tokens": 33, "n": 8, "k": 7 * BOX_COLUMNS}, 2),  # fewer boxes than slices
        ("prefill", {"tokens": 33, "n": 8, "k": 512}, 3),
        ("prefill", {"tokens": 64 * 103, "n": 8, "k": 512}, 2),  # 103 tiles of 5 parts
        ("sm90", {"tokens": 33, "n": 8, "k": 7 * BOX_COLUMNS}, 2),
        ("sm90", {"tokens": 33, "n": 8, "k": 512}, 4),
    ]
    for kernel, shape, count in refused_calls:
        with pytest.raises(CudaError) as refused:
            Linear(seed=0, kind="bf16", **shape).run(gpu, kernel, splits=count)
        assert refused.value.name == "cudaErrorInvalidValue"
        gpu.close()


def choose(gpu: Gpu, *arguments: int) -> list[int]:
    """LinearKernel, tokens of a tile, splits and parts, see linear_prefill_api.cu."""
    chosen = (ctypes.c_int * 4)()
    gpu.lib.choose(*(int(a) for a in arguments), *([0] if len(arguments) == 8 else []), chosen)
    return list(chosen)


def choice(gpu: Gpu, devices: list[tuple[bool, int]], calls: list[dict[str, Any]]) -> None:
    """Which kernel a linear takes, and how linear_prefill divides it."""
    for hopper, sms in devices:
        for call in calls:
            sizes = [call[name] for name in ("tokens", "n", "k", "format", "order")]
            for has_workspace in (0, 1):
                kernel, tile, splits, parts = choose(gpu, hopper, sms, *sizes, has_workspace)
                assert tile == 64 or (tile == 128 and splits == 1 and call["format"] == 0)
                assert splits in (1, *SPLITS) and parts <= MOST_PARTS
                assert has_workspace or splits == 1
                assert -(-call["k"] // BOX_COLUMNS) >= SLICES or splits == 1
                tiles = -(-call["n"] // 128) * -(-call["tokens"] // 64)
                assert splits == 1 or tiles < sms  # else no SM is idle
                if not hopper and call["tokens"] <= 32:
                    assert kernel == DECODE
                if not hopper and call["tokens"] > (64 if call["format"] else MAX_DECODE_TOKENS):
                    assert kernel == PREFILL
                for count in SPLITS:  # what is asked for, is taken or refused
                    asked = choose(gpu, hopper, sms, *sizes, has_workspace, count)
                    assert asked[1:3] in ([64, count], [0, 1])


def choose_hopper(gpu: Gpu, *arguments: int) -> tuple[int, str, int]:
    """Tokens of a tile, what a pair of blocks shares, and how many pairs there are, see linear_prefill_api.cu."""
    chosen = (ctypes.c_int * 3)()
    gpu.lib.choose_hopper(*(int(a) for a in arguments), chosen)
    return chosen[0], PAIRS[chosen[1]], chosen[2]


def hopper_choice(gpu: Gpu, calls: list[dict[str, Any]]) -> None:
    """How linear_sm90 divides a product."""
    for call in calls:
        sizes = [call[name] for name in ("tokens", "n", "k", "format")]
        for sms in (114, 132):
            for float32 in (0, 1):
                tile, pair, places = choose_hopper(gpu, sms, *sizes, float32, 0)
                assert tile in ((64, 128) if call["format"] else (32, 64, 128) if float32 else (32, 64, 128, 176, 192))
                blocks = -(-call["n"] // 128) * -(-call["tokens"] // tile)
                if pair == "same_tile":  # each has tile and SM, and whole slices
                    assert places == blocks and 2 * places <= sms and tile <= 64
                    assert -(-call["k"] // BOX_COLUMNS) >= SLICES
                else:
                    assert 2 * places >= blocks
                apart = choose_hopper(gpu, sms, *sizes, float32, 1)
                assert apart[1] != "same_tile" and (pair == "same_tile" or apart == (tile, pair, places))
                asked = choose_hopper(gpu, sms, *sizes, float32, 2)
                assert asked[1] == "same_tile" or asked[0] == 0


def known_hopper_choices(gpu: Gpu, known: list[tuple[list[int], list[Any]]]) -> None:
    """On an H100: (tokens, n, k, format), and tokens of a tile with what a pair shares."""
    for sizes, expected in known:
        got = choose_hopper(gpu, 132, *sizes, 0, 0)
        assert list(got[:2]) == list(expected), (sizes, got)


def known_choices(gpu: Gpu, num_sms: int, known: list[tuple[list[int], list[int]]]) -> None:
    """The choices for 16-bit weights in their natural order."""
    for (tokens, n, k), expected in known:
        got = choose(gpu, False, num_sms, tokens, n, k, 0, 0, 1)
        assert got[:3] == expected, (tokens, n, k, got)


def batch(gpu: Gpu, kernel: str, shape: dict[str, Any], parts: list[tuple[int, int]]) -> None:
    """A row's bits do not depend on the other rows of the call, and few rows get the same from linear_decode."""
    linear = Linear(**shape)
    whole = linear.run(gpu, kernel)
    for first, tokens in parts:
        assert_bitwise(linear.run(gpu, kernel, first, tokens), whole[first : first + tokens])
        if tokens <= MAX_DECODE_TOKENS:
            assert_bitwise(linear.run(gpu, "decode", first, tokens), whole[first : first + tokens])


def kernels_agree(gpu: Gpu, shapes: list[dict[str, Any]]) -> None:
    """linear_sm90 has the very bits of linear_prefill: wgmma adds the products of a step as mma does."""
    for shape in shapes:
        linear = Linear(**shape)
        assert_bitwise(linear.run(gpu, "sm90"), linear.run(gpu, "prefill"))
