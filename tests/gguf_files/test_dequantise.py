"""Weights of GGUF files as numbers: every type, against formulas in float64 and against the gguf package."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from gguf_files.block_formulas import SIZES, dequantise, random_blocks
from infinilm import _core
from infinilm.checkpoint.dtype_conversion import convert
from infinilm.errors import ConfigError, InfinilmError, WeightError

TYPES = sorted(SIZES)


@pytest.mark.parametrize("type_name", TYPES)
@given(data=st.data())
def test_any_bytes(type_name: str, data: st.DataObject) -> None:
    block, size = SIZES[type_name]
    raw = np.frombuffer(data.draw(st.binary(min_size=size, max_size=4 * size)), np.uint8)
    raw = raw[: len(raw) // size * size]
    got = _core.gguf_dequantise(raw, type_name, [len(raw) // size * block], "float32").numpy()
    with np.errstate(all="ignore"):
        expected = dequantise(type_name, raw).astype(np.float32)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rows(type_name: str, dtype: str) -> None:
    """Of several threads, rounded to nearest."""
    rows, columns = 65, 16384
    raw = random_blocks(type_name, rows * columns // SIZES[type_name][0], seed=1)
    got = _core.gguf_dequantise(raw, type_name, [rows, columns], dtype, num_threads=3).numpy()
    exact = dequantise(type_name, raw).reshape(rows, columns).astype(np.float32)
    expected = exact if dtype == "float32" else convert(exact, "float32", dtype)
    if dtype == "bfloat16":
        expected = (expected.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("type_name", [name for name in TYPES if not name.startswith("Z4")])
def test_against_the_gguf_package(type_name: str) -> None:
    gguf = pytest.importorskip("gguf")
    raw = random_blocks(type_name, 64, seed=2)
    expected = gguf.dequantize(raw, gguf.GGMLQuantizationType[type_name])
    got = _core.gguf_dequantise(raw, type_name, [64 * SIZES[type_name][0]], "float32").numpy()
    np.testing.assert_array_equal(got, expected.reshape(-1))


def test_halves_of_heads_that_take_turns() -> None:
    """The inverse of the order that llama.cpp gives to q and k: [heads, 2, d / 2] -> [heads, d / 2, 2]."""
    heads, d, columns = 3, 8, 32
    wanted = np.arange(heads * d * columns, dtype=np.float32).reshape(heads * d, columns)
    stored = wanted.reshape(heads, 2, d // 2, columns).swapaxes(1, 2).reshape(-1).copy()
    got = _core.gguf_dequantise(stored.view(np.uint8), "F32", wanted.shape, "float32", interleaved_head_dim=d)
    np.testing.assert_array_equal(got.numpy(), wanted)


@given(st.integers(0, 2**16 - 1))
def test_all_of_float16(bits: int) -> None:
    """As float32 and back: the same bits, but for the kind of a NaN."""
    raw = np.full(33, bits, np.uint16)
    got = _core.gguf_dequantise(raw.view(np.uint8), "F16", [33], "float16").numpy()
    np.testing.assert_array_equal(got, raw.view(np.float16))


def test_what_does_not_fit() -> None:
    raw = np.array([1.0, 70000.0], np.float32).view(np.uint8)
    with pytest.raises(WeightError, match="row 0 lies outside the range of float16; use dtype='float32'"):
        _core.gguf_dequantise(raw, "F32", [2], "float16")
    infinite = np.array([1.0, np.inf, np.nan], np.float32)
    got = _core.gguf_dequantise(infinite.view(np.uint8), "F32", [3], "float16").numpy()
    np.testing.assert_array_equal(got, infinite.astype(np.float16))


def test_wrong_arguments() -> None:
    raw = np.zeros(18, np.uint8)
    with pytest.raises(WeightError, match="weights of type IQ2_S are not read in this version, only F32, F16"):
        _core.gguf_dequantise(np.zeros(82, np.uint8), "IQ2_S", [256], "float32")
    with pytest.raises(ConfigError, match="unknown type 'Q9'"):
        _core.gguf_dequantise(raw, "Q9", [32], "float32")
    for shape in ([33], [64], [16, 2]):
        with pytest.raises(InfinilmError, match="18 bytes are no tensor of Q4_0 and shape"):
            _core.gguf_dequantise(raw, "Q4_0", shape, "float32")
    with pytest.raises(InfinilmError, match="1 rows are no heads of 2"):
        _core.gguf_dequantise(raw, "Q4_0", [32], "float32", interleaved_head_dim=2)
