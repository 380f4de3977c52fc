"""Linears whose weights are the blocks of a GGUF file: against float64 sums of what the blocks stand for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gguf_files.block_formulas import HALVES, SIZES, dequantise, random_blocks
from hypothesis import given, strategies as st
from reference.ops import Array

from infinilm import _core
from infinilm.errors import InfinilmError
from ops import support
from ops.support import Rows, backend, each_isa, rows
from ops.test_quantised_linear import quantised_x

NATIVE = sorted(name for name in SIZES if _core.gguf_type(name)[3])
each_type = pytest.mark.parametrize("type_name", [name for name in NATIVE if name != "Z4_64"])  # as Z4_128
outs = st.integers(1, 70)


def test_native_types() -> None:
    """Bytes of their blocks, stored and packed."""
    more = {name: _core.gguf_type(name)[3] - SIZES[name][1] for name in NATIVE}
    larger = {"Q3_K": 4, "MXFP4": 1, "IQ4_XS": 2, "TQ1_0": 12, "IQ1_S": 20, "IQ1_M": 26, "IQ2_XXS": 36, "IQ2_XS": 32}
    larger |= {"IQ2_S": 24, "IQ3_XXS": 36, "IQ3_S": 24}  # entries of grids are made the integers that they stand for
    assert more == {name: larger.get(name, 0) for name in more}
    assert set(more) == set(SIZES) - {"F32", "F16", "BF16"}


def blocks(rng: np.random.Generator, type_name: str, num_rows: int, in_features: int) -> Array:
    """Any integers, the least and the largest among them; scales of any size and sign: [rows, bytes]."""
    block, size = SIZES[type_name]
    count = num_rows * in_features // block
    scale = 10.0 ** rng.integers(-6, 2, (count, 1))
    data = random_blocks(type_name, count, int(rng.integers(2**32)), scale).reshape(count, size)
    scales = [at + i for at in HALVES.get(type_name, (0,)) for i in range(2)] or [0]
    if type_name == "IQ1_M":
        scales = [49, 51, 53, 55]
    inside = [at for at in range(size) if at not in scales]
    for first, byte in enumerate((0, 0xFF, 0x80) if type_name in NATIVE else ()):
        data[first::7, inside] = byte
    return data.reshape(num_rows, -1)


def in_rows(weights: Array, in_features: int) -> Array:
    """[rows, in_features] float32"""
    return weights.reshape(-1, in_features).astype(np.float32)


# Codes are stored with an offset, whose part of a sum may be taken off at its end.
OFFSETS = {"Q4_0": 8, "Q5_0": 16}


def terms(type_name: str, data: Array) -> Array:
    """How large what is added up for a weight is: its part with the scale, and its minimum."""
    whole = dequantise(type_name, data)
    if type_name.startswith("Z4"):
        without = data.reshape(-1, SIZES[type_name][1]).copy()
        without[:, 2] = 0  # the zero point
        scaled = dequantise(type_name, without)
        return np.abs(scaled) + np.abs(whole - scaled)
    if type_name.startswith("IQ1"):  # the minimum is beside the weights, of which all are now the largest
        largest = data.reshape(-1, SIZES[type_name][1]).copy()
        if type_name == "IQ1_S":
            largest[:, 2:34] = largest[:, 34::2] = 0xFF
            largest[:, 35::2] |= np.uint8(0x0F)
        else:
            largest[:, :32] = 0xFF
            largest[:, 32:48] |= np.uint8(0x77)
        return np.abs(whole) + 2 * np.abs(dequantise(type_name, largest))
    if offset := OFFSETS.get(type_name):
        scales = np.abs(data.reshape(-1, SIZES[type_name][1])[:, :2].copy().view(np.float16).astype(np.float64))
        block, _ = SIZES[type_name]
        return np.abs(whole) + offset * np.repeat(scales, block).astype(whole.dtype).reshape(whole.shape)
    if len(halves := HALVES.get(type_name, ())) < 2:
        return np.abs(whole)
    without = data.copy()
    without[:, halves[1] : halves[1] + 2] = 0
    scaled = dequantise(type_name, without)
    return np.abs(scaled) + np.abs(whole - scaled)


@each_isa
@each_type
@given(
    case=rows(size=st.sampled_from([1, 2, 5])),
    out=st.lists(outs, min_size=1, max_size=3),
    others=st.lists(st.sampled_from([*NATIVE, "F32"]), min_size=2, max_size=2),
    kind=st.sampled_from(("plain", "act_mul")),
    threads=st.sampled_from(support.THREADS),
)
def test_matches_the_sums_of_the_stored_integers(
    isa: str,
    type_name: str,
    case: Rows,
    out: list[int],
    others: list[str],
    kind: str,
    threads: int,
) -> None:
    """Also where parts are of different types, or plain numbers."""
    rng, b = case.rng(), backend(isa, threads)
    types = [type_name] * 2 if kind == "act_mul" else [type_name, *others][: len(out)]
    k = 256 * case.size if any(SIZES[t][0] > 32 for t in types) else 32 * (1 + 7 * (case.size - 1))
    sizes = (out[0], out[0]) if kind == "act_mul" else (6 * out[0], *out[1:])
    layer = support.LinearCase(k, sizes, (False,) * len(sizes), kind, "float32", 0, case.seed)
    magnitudes = support.LinearCase(k, sizes, (False,) * len(sizes), kind, "float32", 0, case.seed)
    parts = []
    for i, (name, n) in enumerate(zip(types, sizes, strict=True)):
        data = blocks(rng, name, n, k)
        in_blocks = data.reshape(-1, SIZES[name][1])
        if name == "F32":
            data = data.view(np.float32)
        layer.parts[i] = (in_rows(dequantise(name, in_blocks), k), None)
        magnitudes.parts[i] = (in_rows(terms(name, in_blocks), k), None)
        parts.append((support.tensor(data), None))
    stored = ["" if name == "F32" else name for name in types]
    linear = b.prepare_linear(parts, kind=kind, types=stored)
    for i in range(len(sizes)):
        np.testing.assert_array_equal(b.unpack_linear(linear, i).numpy(), layer.parts[i][0])
    x = case.x(rng, k)
    got = support.run_linear(b, linear, x, layer.out_features, None, case.pad_in, case.pad_out)
    seen = [x.astype(np.float64) if name == "F32" else quantised_x(x) for name in types]
    if kind == "act_mul":
        want, scale = layer.expected(seen[0], None)
        scale += magnitudes.expected(seen[0], None)[1]
    else:
        want = np.concatenate(
            [part @ w.astype(np.float64).T for part, (w, _) in zip(seen, layer.parts, strict=True)], axis=-1
        )
        pairs = zip(seen, magnitudes.parts, strict=True)
        scale = np.concatenate([np.sqrt((part * part) @ (w.astype(np.float64) ** 2).T) for part, (w, _) in pairs], -1)
    support.assert_close(got, want, length=k, scale=scale)


@each_isa
@each_type
def test_a_row_does_not_depend_on_its_batch_or_the_threads(isa: str, type_name: str) -> None:
    rng, k, n = np.random.default_rng(3), 768, 77
    x, data = support.activations(rng, 40, k, outliers=True), blocks(rng, type_name, n, k)
    want = None
    for threads in support.THREADS:
        b = backend(isa, threads)
        linear = b.prepare_linear([(support.tensor(data), None)], types=[type_name])
        want = support.run_linear(b, linear, x, n) if want is None else want
        for batch in (1, 3, 4, 5, 7, 13, 40):
            chosen = slice(0, batch)
            support.assert_bitwise(support.run_linear(b, linear, x[chosen], n), want[chosen])


def test_what_is_refused() -> None:
    b, data = backend(support.ISAS[0]), blocks(np.random.default_rng(0), "Q8_0", 4, 64)
    part, other = (support.tensor(data), None), (support.tensor(data[:, :34].copy()), None)

    def refused(match: str, parts: list[Any], types: list[str], kind: str = "plain", **more: Any) -> None:
        with pytest.raises(InfinilmError, match=match):
            b.prepare_linear(parts, kind=kind, types=types, **more)

    refused("blocks of type Q1_0 are not computed as they are stored on cpu", [part], ["Q1_0"])
    refused("unknown type 'Q9' of a GGUF file", [part], ["Q9"])
    refused("type Q4_2 was removed", [part], ["Q4_2"])
    refused("68 bytes of a row are no blocks of 18", [part], ["Q4_0"])
    refused("in_features is 64 .from weight of part 0., got 32", [part, other], ["Q8_0"] * 2)
    up = (support.tensor(data[:, :36].copy()), None)
    refused("gate and up as blocks of one type", [part, up], ["Q8_0", "Q4_0"], kind="act_mul")
    refused("blocks are not quantised again", [part], ["Q8_0"], quantization="int4")
    refused("expected dtype uint8, got float32", [(support.tensor(np.ones((2, 34), np.float32)), None)], ["Q8_0"])
