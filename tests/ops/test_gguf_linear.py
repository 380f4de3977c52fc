"""Linears whose weights are the blocks of a GGUF file: against float64 sums of what the blocks stand for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gguf_files.block_formulas import SIZES, dequantise
from hypothesis import given, strategies as st
from reference.ops import Array

from infinilm import _core
from infinilm.errors import ConfigError, InfinilmError
from ops import support
from ops.support import Rows, backend, each_isa, rows
from ops.test_quantised_linear import quantised_x

each_type = pytest.mark.parametrize("type_name", ("Q8_0", "Q4_0"))
outs = st.integers(1, 70)


def blocks(rng: np.random.Generator, type_name: str, num_rows: int, in_features: int) -> Array:
    """Any integers, the least among them; scales of any size and sign: [bytes]."""
    data = rng.integers(0, 256, (num_rows * in_features // 32, SIZES[type_name][1]), dtype=np.uint8)
    data[::3, 2:] = 0x80 if type_name == "Q8_0" else 0  # -128 and -8
    data[:, :2] = (rng.normal(0, 1, (len(data), 1)) * 10.0 ** rng.integers(-6, 3)).astype(np.float16).view(np.uint8)
    return data.reshape(-1)


def weights(type_name: str, data: Array, in_features: int, head_dim: int = 0) -> Array:
    """[rows, in_features] float32; with a head_dim in the order that the checkpoint of Hugging Face has."""
    found = dequantise(type_name, data).reshape(-1, in_features)
    if head_dim:
        found = found.reshape(-1, head_dim // 2, 2, in_features).swapaxes(1, 2).reshape(-1, in_features)
    return found.astype(np.float32)


def packed(b: Any, type_name: str, parts: list[tuple[Array, int]], k: int, kind: str, num_threads: int = 2) -> Any:
    """A prepared linear; parts: bytes and head_dim."""
    sizes = [len(data) // (k // 32 * SIZES[type_name][1]) for data, _ in parts]
    made = [(data, [n, k], head_dim) for (data, head_dim), n in zip(parts, sizes, strict=True)]
    panels, scales = _core.gguf_pack(type_name, made, kind == "act_mul", num_threads=num_threads)
    return b.adopt_linear(panels, scales, sizes, k, kind)


@each_isa
@each_type
@given(
    case=rows(size=st.sampled_from([32, 64, 320, 544, 1056])),
    out=st.lists(outs, min_size=1, max_size=3),
    kind=st.sampled_from(("plain", "act_mul")),
    heads=st.booleans(),
    threads=st.sampled_from(support.THREADS),
)
def test_matches_the_sums_of_the_stored_integers(
    isa: str, type_name: str, case: Rows, out: list[int], kind: str, heads: bool, threads: int
) -> None:
    rng, b, k = case.rng(), backend(isa, threads), case.size
    sizes = (out[0], out[0]) if kind == "act_mul" else (6 * out[0], *out[1:])
    parts = [(blocks(rng, type_name, n, k), 6 if heads and i == 0 and n % 6 == 0 else 0) for i, n in enumerate(sizes)]
    linear = packed(b, type_name, parts, k, kind, threads)
    layer = support.LinearCase(k, sizes, (False,) * len(sizes), kind, "float32", 0, case.seed)
    for i, (data, head_dim) in enumerate(parts):
        layer.parts[i] = (weights(type_name, data, k, head_dim), None)
        support.assert_bitwise(b.unpack_linear(linear, i).numpy(), layer.parts[i][0])
    x = case.x(rng)
    got = support.run_linear(b, linear, x, layer.out_features, None, case.pad_in, case.pad_out)
    want, scale = layer.expected(quantised_x(x), None)
    support.assert_close(got, want, length=k, scale=scale)


@each_isa
@each_type
def test_a_row_does_not_depend_on_its_batch_or_the_threads(isa: str, type_name: str) -> None:
    rng, k, n = np.random.default_rng(3), 352, 77
    x, data = support.activations(rng, 40, k, outliers=True), blocks(rng, type_name, n, k)
    want = None
    for threads in support.THREADS:
        b = backend(isa, threads)
        linear = packed(b, type_name, [(data, 0)], k, "plain", threads)
        want = support.run_linear(b, linear, x, n) if want is None else want
        for batch in (1, 3, 4, 13, 40):
            chosen = slice(0, batch)
            support.assert_bitwise(support.run_linear(b, linear, x[chosen], n), want[chosen])


def test_what_is_refused() -> None:
    data = blocks(np.random.default_rng(0), "Q8_0", 4, 64)
    with pytest.raises(ConfigError, match="weights of type Q4_1 are not packed, only Q8_0 and Q4_0"):
        _core.gguf_pack("Q4_1", [(data, [4, 64], 0)], False)
    with pytest.raises(InfinilmError, match=r"272 bytes are no tensor of Q8_0 and shape \[4, 32\]"):
        _core.gguf_pack("Q8_0", [(data, [4, 32], 0)], False)
    for parts, pairs in (([], False), ([(data, [4, 64], 0)], True), ([(data, [4, 64], 0), (data, [2, 128], 0)], False)):
        with pytest.raises(InfinilmError, match="the parts do not belong to one linear"):
            _core.gguf_pack("Q8_0", parts, pairs)
    with pytest.raises(InfinilmError, match="4 rows are no heads of 6"):
        _core.gguf_pack("Q8_0", [(data, [4, 64], 6)], False)
