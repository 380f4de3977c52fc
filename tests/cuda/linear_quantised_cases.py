"""Linears of quantised weights: packing, and each kernel against float64 sums of the same numbers."""

from __future__ import annotations

import ctypes
import itertools
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from emulation import ROOT, Array, Gpu
from frames import KINDS, UNIT, Frame, assert_bitwise, assert_close, decode, encode, normal, of
from packing import ORDERS, SPLITS, pack as pack_numbers, split_workspace
from quantised import FORMATS, GROUP, blocks, dequantise, from_8_bits, pack, quantise, to_8_bits

sys.path.insert(0, str(ROOT / "tests"))

from gguf_files import block_formulas

from infinilm.checkpoint.gguf import scaled_nvfp4

KERNELS = ("prefill", "sm90", "split", "decode")  # the numbers of linear_quantised_api.cu
MAX_DECODE_TOKENS, MAX_NORM_TOKENS = 64, 8
SPLIT_FORMATS = ("int8", "fp8", "fp8_pairs", "fp8_block_pairs")
MAX_SPLIT_TOKENS = 64  # where inputs are rounded
FAMILIES = (("prefill", "decode"), ("sm90", "split"))  # kernels of an instruction each, where inputs are rounded
EPS = 1e-5
F64 = np.float64


@dataclass
class Linear:
    """One linear and its input, made from a seed. residual: "", "apart" or "in_place"."""

    seed: int
    tokens: int
    n: int
    k: int
    name: str  # of the format
    kind: str = "bf16"
    order: str = "natural"
    head_dim: int = 0
    bias: bool = False
    norm: bool = False
    residual: str = ""
    out_float32: bool = False
    pad: int = 0
    weight: Array = field(init=False)  # float64, what is stored

    def __post_init__(self) -> None:
        self.x = encode(normal(self.seed, self.tokens, self.k), self.kind)
        # Columns and rows of different sizes, so that a scale of another place shows.
        sizes = 2.0 ** np.random.default_rng(self.seed).integers(-3, 4, (self.n, -(-self.k // 32)))
        floats = normal(self.seed + 1, self.n, self.k) * np.repeat(sizes, 32, 1)[:, : self.k].astype(np.float32)
        stored_as = {"fp8_pairs": "fp8", "fp8_block_pairs": "fp8_blocks"}.get(self.name, self.name)
        stored = quantise(floats, stored_as, 128 * (self.name == "fp8_block_pairs"))
        self.weight = dequantise(stored, stored_as)
        if self.name in GROUP:  # products with scales of groups are rounded; scales of rows meet sums
            rows = stored.rows.astype(F64)[:, None]
            rounded = decode(encode((self.weight / rows).astype(np.float32), self.kind), self.kind)
            self.weight = rounded.astype(F64) * rows
        self.packed = pack(stored, stored_as, self.order, self.head_dim, self.kind)
        self.width = self.n // 2 if self.order == "gate_up" else self.n
        self.out_kind = "f32" if self.out_float32 else self.kind
        self.biases = normal(self.seed + 2, self.n) if self.bias else None
        self.norm_weight = 1 + normal(self.seed + 4, self.k) / 4 if self.norm else None
        self.residuals = encode(normal(self.seed + 3, self.tokens, self.width), self.kind) if self.residual else None

    @property
    def rounds(self) -> bool:
        """Whether what it reads is rounded to FP8."""
        return self.name.endswith("_pairs")

    def run(self, gpu: Gpu, kernel: str, first: int = 0, tokens: int | None = None, *, splits: int = 1) -> Array:
        """Rows [first, first + tokens) of out, as stored; they are all that is in the call."""
        rows = slice(first, first + (self.tokens if tokens is None else tokens))
        x = of(gpu, self.x[rows], self.kind, self.pad)
        inputs, stride = x.pointer, x.stride
        if self.rounds:
            inputs, stride = rounded(gpu, x, self.kind, *self.x[rows].shape, self.name == "fp8_block_pairs", self.pad)
        residual = None
        if self.residuals is not None:
            residual = of(gpu, self.residuals[rows], self.kind, 2 * self.pad)
        shape = (len(self.x[rows]), self.width)
        out = residual if residual and self.residual == "in_place" else Frame(gpu, self.out_kind, shape, 3 * self.pad)
        gpu.call(
            "run_quantised", KERNELS.index(kernel), inputs, ctypes.c_int64(stride), shape[0],
            gpu.upload(self.packed), None if self.biases is None else gpu.upload(self.biases), self.n, self.k,
            KINDS.index(self.kind), ORDERS.index(self.order), self.head_dim, FORMATS.index(self.name),
            None if self.norm_weight is None else gpu.upload(self.norm_weight), ctypes.c_float(EPS),
            residual.pointer if residual else None, ctypes.c_int64(residual.stride if residual else 0), out.pointer,
            ctypes.c_int64(out.stride), int(self.out_float32), split_workspace(gpu, self.n, shape[0], splits), splits,
            0,
        )  # fmt: skip
        got = out.get()
        gpu.close()
        return got

    def check(self, got: Array) -> None:
        """Near the float64 result. A sum is of float32 products with scales: a few roundings more than its terms."""
        x = decode(self.x, self.kind).astype(F64)
        if self.rounds:
            x = round_to_fp8(x, self.name == "fp8_block_pairs").astype(F64)
        unit, slack = UNIT[self.kind], 0.0
        if self.norm_weight is not None:
            x = x / np.sqrt((x * x).mean(1, keepdims=True) + EPS) * self.norm_weight
            slack = 1.01 * unit * (np.abs(x) @ np.abs(self.weight.T))
        y = x @ self.weight.T
        size = np.abs(x) @ np.abs(self.weight.T) / max(1, self.k) ** 0.5 + 1.0
        if self.biases is not None:
            y, size = y + self.biases, size + np.abs(self.biases)
        if self.order == "gate_up":
            (gate, up), (gate_slack, up_slack) = np.split(y, 2, 1), np.split(1.01 * unit * np.abs(y) + slack, 2, 1)
            y = gate / (1 + np.exp(-gate)) * up
            slack = 1.1 * gate_slack * (np.abs(up) + up_slack) + (np.abs(gate) + gate_slack) * up_slack
            size = 2 * size[:, : self.width] * size[:, self.width :]
        if self.residuals is not None:
            slack = slack + 1.01 * unit * np.abs(y)
            y = y + decode(self.residuals, self.kind)
        assert_close(got, y, self.out_kind, self.k, size, slack * (1 + unit))


def rounded(gpu: Gpu, x: Frame, kind: str, tokens: int, k: int, box_scales: bool, pad: int) -> tuple[Any, int]:
    """Rows of 8 bits of x, and the numbers of 16 bits between them."""
    stride = gpu.lib.rounded_bytes(k, int(box_scales)) // 2 + pad
    out = gpu.upload(np.full((tokens, stride), 0xFFFF, np.uint16))
    gpu.call(
        "round_rows", x.pointer, ctypes.c_int64(x.stride), tokens, k, KINDS.index(kind), int(box_scales), out,
        ctypes.c_int64(stride),
    )  # fmt: skip
    return out, stride


def in_groups(x: Array, box_scales: bool) -> Array:
    """Rows [tokens, k] as [tokens, groups, columns], zeros behind k: what has a scale each."""
    width = 128 if box_scales else x.shape[1]
    return np.pad(x, ((0, 0), (0, -x.shape[1] % width))).reshape(len(x), -1, width)


def round_to_fp8(x: Array, box_scales: bool) -> Array:
    """Rows [tokens, k] as linears have them whose inputs are rounded."""
    groups = in_groups(x, box_scales)
    return np.asarray(from_8_bits(*to_8_bits(groups, "fp8"), "fp8").reshape(len(x), -1)[:, : x.shape[1]])


def rounded_rows(gpu: Gpu, tokens: int, k: int, kind: str, box_scales: bool, in_place: bool) -> None:
    """Bytes and scales of rows are those of the rules in numpy, also of rows that are zero, large, or not finite."""
    values = normal(3, tokens, k) * 2.0 ** np.random.default_rng(4).integers(-20, 12, (tokens, 1))
    values = values.astype(np.float32)
    values[0] = 0
    values[1 % tokens, k // 2], values[2 % tokens, k - 1] = np.inf, np.nan
    x = encode(values, kind)
    floats = decode(x, kind)
    codes, scales = to_8_bits(in_groups(floats, box_scales), "fp8")
    steps = -(-k // 32)
    row_bytes = gpu.lib.rounded_bytes(k, int(box_scales))
    stride = max(row_bytes // 2, k) + 8
    memory = np.zeros((tokens, stride), np.uint16)
    memory[:, :k] = x
    given = gpu.upload(memory)
    to = given if in_place else gpu.upload(np.full((tokens, stride), 0xFFFF, np.uint16))
    of_stride = ctypes.c_int64(stride)
    gpu.call("round_rows", given, of_stride, tokens, k, KINDS.index(kind), int(box_scales), to, of_stride)
    got = gpu.download(to).view(np.uint8)
    padded = np.zeros((tokens, steps * 32), np.uint8)
    padded[:, :k] = codes.reshape(tokens, -1)[:, :k]
    order = np.arange(16).reshape(2, 4, 2).transpose(1, 2, 0).reshape(16)  # 0, 8, 1, 9, 2, ..
    expected = padded.reshape(tokens, -1, 16)[:, :, order].reshape(tokens, -1)
    finite = np.isfinite(in_groups(floats, box_scales)).all(-1)  # [tokens, groups]
    whole = finite.all(1)
    np.testing.assert_array_equal(got[whole, : steps * 32], expected[whole])
    got_scales = got[:, steps * 32 : steps * 32 + 4 * scales.shape[1]].copy().view(np.float32)
    np.testing.assert_array_equal(got_scales, np.where(finite, scales, np.nan))
    gpu.close()


def values(gpu: Gpu, kernel: str, shapes: list[dict[str, Any]]) -> None:
    """Outputs are right, and nothing but them is written."""
    for shape in shapes:
        if kernel == "split" and shape["name"] not in SPLIT_FORMATS:
            continue
        linear = Linear(**shape)
        linear.check(linear.run(gpu, kernel))


def same_bits(gpu: Gpu, shape: dict[str, Any], parts: list[tuple[int, int]]) -> None:
    """A row has the same bits from each kernel, whatever other rows are in the call or share its tile."""
    linear = Linear(**shape)
    for kernels in FAMILIES if linear.rounds else (KERNELS,):
        _same_bits_of(gpu, linear, parts, kernels)


def _same_bits_of(gpu: Gpu, linear: Linear, parts: list[tuple[int, int]], kernels: tuple[str, ...]) -> None:
    whole = linear.run(gpu, kernels[0])
    if "sm90" in kernels:
        assert_bitwise(linear.run(gpu, "sm90"), whole)
        assert_bitwise(linear.run(gpu, "sm90", splits=2), whole)
    if "prefill" in kernels:
        for splits in SPLITS:
            assert_bitwise(linear.run(gpu, "prefill", splits=splits), whole)
    for first, tokens in parts:
        for kernel in kernels:
            most = MAX_SPLIT_TOKENS if linear.rounds else tokens
            takes = {
                "decode": tokens <= MAX_DECODE_TOKENS,
                "split": linear.name in SPLIT_FORMATS and tokens <= most,
            }
            if takes.get(kernel, True):
                assert_bitwise(linear.run(gpu, kernel, first, tokens), whole[first : first + tokens])


def twins(
    gpu: Gpu, type_name: str, format: str, n: int, k: int, order: str, head_dim: int, kind: str, seed: int,
    parts: list[tuple[str, int, int]],
) -> None:  # fmt: skip
    """Blocks of files have the bits of their numbers rounded to 16 bits before, as a plainly dequantised model has.

    So have blocks of ups that meet the gates of another linear.
    """
    in_file = type_name.removesuffix("_ROW")
    size, bytes_of_block = block_formulas.SIZES[in_file]
    stored = block_formulas.random_blocks(in_file, n * k // size, seed).reshape(-1, bytes_of_block)
    if type_name.startswith("Z4"):
        stored[:, 2] %= 16  # zero points are codes
    if in_file == "NVFP4":
        stored[::3, 0], stored[::5, 1] = 0x7F, 0xFF  # not a number, which is zero; 480 with a sign, which is none
    stored = stored.reshape(n, -1)
    exact = block_formulas.dequantise(in_file, stored).reshape(n, k).astype(np.float32)
    if type_name == "NVFP4_ROW":  # scales of rows meet sums, which powers of two do not round
        scales = (2.0 ** np.random.default_rng(seed).integers(-9, 5, n)).astype(np.float32)
        stored = np.concatenate([scaled_nvfp4(row[None], scale) for row, scale in zip(stored, scales, strict=True)])
        exact *= scales[:, None]
    half, number = n // 2, FORMATS.index(format)
    where = (n, k, KINDS.index(kind), ORDERS.index(order), head_dim)
    in_half = (half, k, KINDS.index(kind), ORDERS.index("natural"), 0)

    def packed(rows: Array, shape: tuple[int, ...], cuts: list[int]) -> Any:
        data = gpu.upload(np.zeros(gpu.lib.quantised_bytes(*shape[:2], number), np.uint8))
        for first, end in itertools.pairwise(cuts):
            source = gpu.upload(np.ascontiguousarray(rows[first:end]))
            gpu.call("blocks_to_rows", source, type_name.encode(), first, end - first, data, *shape)
        return data

    native = packed(stored, where, [0, half, n])
    back = gpu.empty((n - 8, k))
    gpu.call("rows_to_numbers", native, 8, n - 8, *where, number, back)
    assert_bitwise(gpu.download(back), exact[8:])
    if order == "natural":
        _check_rows(gpu, gpu.download(native), exact.astype(F64), format, kind, is_searched=False)
    versions = [[(native, number, where)], [(gpu.upload(pack_numbers(exact, order, head_dim, kind)), 0, where)]]
    if order == "gate_up":
        gates = gpu.upload(pack_numbers(exact[:half], "natural", 0, kind))
        versions.append([(gates, 0, in_half), (packed(stored[half:], in_half, [0, half]), number, in_half)])
    x = encode(normal(seed + 1, max(tokens for _, tokens, _ in parts), k), kind)
    for kernel, tokens, splits in parts:
        outs = []
        for linears in versions:
            rows_of_x = of(gpu, x[:tokens], kind)
            out = Frame(gpu, kind, (tokens, half if order == "gate_up" else n))
            for i, (data, own, shape) in enumerate(linears):
                gpu.call(
                    "run_quantised", KERNELS.index(kernel), rows_of_x.pointer, ctypes.c_int64(rows_of_x.stride), tokens,
                    data, None, *shape, own, None, ctypes.c_float(EPS), None, ctypes.c_int64(0), out.pointer,
                    ctypes.c_int64(out.stride), 0, split_workspace(gpu, n, tokens, splits), splits, i,
                )  # fmt: skip
            outs.append(out.get())
        for other in outs[1:]:
            assert_bitwise(other, outs[0])
    gpu.close()


def packing(gpu: Gpu, shapes: list[dict[str, Any]]) -> None:
    """The layout bit for bit, in parts, from every type; int4 has the scale of least error; embedding finds rows."""
    for shape in shapes:
        n, k, order, head_dim, name = (shape[key] for key in ("n", "k", "order", "head_dim", "name"))
        for kind in KINDS:
            stored = encode(normal(shape["seed"], n, k), kind)
            floats = decode(stored, kind).astype(np.float32)
            numbers = quantise(floats, name)
            want = pack(numbers, name, order, head_dim)
            assert len(want) == gpu.lib.quantised_bytes(n, k, FORMATS.index(name))
            data = gpu.upload(np.zeros(len(want), np.uint8))
            for first, rows in ((0, n // 2), (n // 2, n - n // 2)):
                part = gpu.upload(np.ascontiguousarray(stored[first : first + rows]))
                gpu.call(
                    "quantise_rows", part, KINDS.index(kind), first, rows, data, n, k, ORDERS.index(order), head_dim,
                    FORMATS.index(name),
                )  # fmt: skip
            got = gpu.download(data)
            if name == "int4":
                # Equally good scales may differ, as errors are added up in float32: few do.
                assert (got != want).mean() < 0.01
            else:
                assert_bitwise(got, want)
            if order == "natural":
                for kind in ("bf16", "f16"):
                    _check_rows(gpu, got, dequantise(numbers, name), name, kind, is_searched=name == "int4")
            gpu.close()


def blocks_of_files(gpu: Gpu, shapes: list[dict[str, Any]]) -> None:
    """Blocks become the layout bit for bit, in parts, and numbers again; embedding finds rows."""
    for shape in shapes:
        n, k, order, head_dim, name = (shape[key] for key in ("n", "k", "order", "head_dim", "name"))
        sizes = 2.0 ** np.random.default_rng(shape["seed"]).integers(-9, 9, (n, -(-k // 32)))
        floats = (normal(shape["seed"], n, k) * np.repeat(sizes, 32, 1)[:, :k]).astype(np.float32)
        stored = quantise(floats, name)
        if name == "int4":  # of a file: any float16, and rows have no scales
            scales = stored.scales.astype(np.float16).astype(np.float32)
            stored = stored._replace(scales=scales, rows=np.ones(n, np.float32))
        if shape["size"] > GROUP.get(name, shape["size"]):  # groups of the size of a block
            repeats = shape["size"] // GROUP[name]
            first = {key: np.repeat(table[:, ::repeats], repeats, 1) for key, table in stored._asdict().items()
                     if key in ("scales", "zeros") and table is not None}  # fmt: skip
            stored = stored._replace(**first)
        if stored.zeros is not None:  # which numbers may be depends on them
            codes = np.random.default_rng(1).integers(0, 16, (n, k))
            stored = stored._replace(numbers=(codes - np.repeat(stored.zeros, GROUP[name], 1)).astype(np.int8))
        source = blocks(stored, name, shape["size"])
        for kind in ("bf16", "f16"):
            want = pack(stored, name, order, head_dim, kind)
            data = gpu.upload(np.zeros(len(want), np.uint8))
            for first_row, rows in ((0, n // 2), (n // 2, n - n // 2)):
                gpu.call(
                    "blocks_to_rows", gpu.upload(np.ascontiguousarray(source[first_row : first_row + rows])),
                    shape["type"].encode(), first_row, rows, data, n, k, KINDS.index(kind), ORDERS.index(order),
                    head_dim,
                )  # fmt: skip
            got = gpu.download(data)
            assert_bitwise(got, want)
            exact = dequantise(stored, name)
            numbers = gpu.empty((n - 8, k))
            gpu.call(
                "rows_to_numbers", data, 8, n - 8, n, k, KINDS.index(kind), ORDERS.index(order), head_dim,
                FORMATS.index(name), numbers,
            )  # fmt: skip
            assert_bitwise(gpu.download(numbers), exact[8:].astype(np.float32))
            if order == "natural":
                _check_rows(gpu, got, exact, name, kind, is_searched=False)
            gpu.close()


def _check_rows(gpu: Gpu, packed: Array, exact: Array, name: str, kind: str, *, is_searched: bool) -> None:
    """What `embedding` gives is the rows of the packed numbers, rounded once."""
    n, k = exact.shape
    ids = np.arange(n, dtype=np.int32)[::-1].copy()
    out = Frame(gpu, kind, (n, k), 8)
    gpu.call(
        "embed_quantised", gpu.upload(ids), gpu.upload(packed), n, k, KINDS.index(kind), FORMATS.index(name),
        out.pointer, ctypes.c_int64(out.stride), n,
    )  # fmt: skip
    got, want = decode(out.get(), kind), exact[ids].astype(np.float32)
    wrong = encode(got, kind) != encode(want, kind)
    assert wrong.mean() <= (0.03 if is_searched else 0.0), f"{wrong.sum()} of {wrong.size}"
    assert_close(encode(got, kind), exact[ids], kind, 1, 0.0, 0.6 if is_searched else 0.0)
