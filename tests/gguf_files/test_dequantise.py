"""Weights of GGUF files as numbers: every type, against formulas in float64 and against the gguf package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from quantised_files.writers import of_bf16

from gguf_files.block_formulas import SIZES, dequantise, random_blocks
from infinilm import _core
from infinilm.checkpoint import Checkpoint, resolve_model
from infinilm.checkpoint.dtype_conversion import convert
from infinilm.errors import ConfigError, InfinilmError, WeightError

TYPES = sorted(SIZES)
LLAMA_CPP = Path(__file__).parents[1] / "golden_quantised" / "llama.cpp.npz"


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
    """Several threads make rows, rounded to nearest."""
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


@given(st.integers(0, 2**16 - 1))
def test_all_of_float16(bits: int) -> None:
    """As float32 and back: the same bits, but for the kind of a NaN."""
    raw = np.full(33, bits, np.uint16)
    got = _core.gguf_dequantise(raw.view(np.uint8), "F16", [33], "float16").numpy()
    np.testing.assert_array_equal(got, raw.view(np.float16))


def test_what_does_not_fit() -> None:
    raw = np.array([1.0, 70000.0], np.float32).view(np.uint8)
    with pytest.raises(WeightError, match="row 0 lies outside the range of float16; use dtype='bfloat16' or 'float32'"):
        _core.gguf_dequantise(raw, "F32", [2], "float16")
    infinite = np.array([1.0, np.inf, np.nan], np.float32)
    got = _core.gguf_dequantise(infinite.view(np.uint8), "F32", [3], "float16").numpy()
    np.testing.assert_array_equal(got, infinite.astype(np.float16))


def test_wrong_arguments() -> None:
    raw = np.zeros(18, np.uint8)
    with pytest.raises(WeightError, match="weights of type Q1_0 are not read in this version, only F32, F16"):
        _core.gguf_dequantise(np.zeros(18, np.uint8), "Q1_0", [128], "float32")
    with pytest.raises(ConfigError, match="unknown type 'Q9'"):
        _core.gguf_dequantise(raw, "Q9", [32], "float32")
    for shape in ([33], [64], [16, 2]):
        with pytest.raises(InfinilmError, match="18 bytes are no tensor of Q4_0 and shape"):
            _core.gguf_dequantise(raw, "Q4_0", shape, "float32")


# What rounding to a type by llama.cpp loses, of the root mean square of the weights below: 4% more than was measured.
LOST = {"Q8_0": 5.5e-3, "Q6_K": 1.83e-2, "Q5_K": 3.73e-2, "Q5_1": 3.9e-2, "Q5_0": 4.41e-2, "Q4_K": 7.32e-2}
LOST |= {"Q4_1": 8.04e-2, "Q4_0": 8.93e-2, "IQ4_NL": 7.9e-2, "IQ4_XS": 7.95e-2, "MXFP4": 0.1185, "Q3_K": 0.1543}
LOST |= {"Q2_K": 0.301, "TQ1_0": 0.813, "TQ2_0": 0.813, "NVFP4": 0.099, "IQ3_S": 0.141, "IQ3_XXS": 0.19}
LOST |= {"IQ2_S": 0.258, "IQ2_XS": 0.312, "IQ2_XXS": 0.355, "IQ1_M": 0.465, "IQ1_S": 0.507}


@pytest.mark.parametrize("type_name", LOST)
def test_files_of_llama_cpp(type_name: str) -> None:
    """Rows of the bundled model, filled up with zeros, as llama.cpp rounded them: what it loses and no more.

    Grids have no zero: of these types there are the first 256 columns.
    """
    with Checkpoint(resolve_model("demo")) as checkpoint:
        exact = of_bf16(checkpoint.array("model.layers.0.mlp.down_proj.weight"))[:16]
    raw = np.load(LLAMA_CPP)[type_name].reshape(-1)
    block, size = SIZES[type_name]
    shape = 16, len(raw) // size * block // 16
    exact = exact[:, : shape[1]]
    got = _core.gguf_dequantise(raw, type_name, shape, "float32").numpy()
    np.testing.assert_array_equal(got, dequantise(type_name, raw).astype(np.float32).reshape(shape))
    assert not got[:, exact.shape[1] :].any()
    assert np.sqrt(((got[:, : exact.shape[1]] - exact) ** 2).mean() / (exact**2).mean()) < LOST[type_name]


@pytest.mark.parametrize("type_name", [name for name in TYPES if _core.gguf_regrouped_type(name)])
@given(data=st.data())
def test_regrouped(type_name: str, data: st.DataObject) -> None:
    """Blocks as those of another type have the same numbers, to where that one rounds."""
    block, size = SIZES[type_name]
    raw = np.frombuffer(data.draw(st.binary(min_size=size, max_size=4 * size)), np.uint8)
    rows = len(raw) // size
    raw = raw[: rows * size]
    got = _core.gguf_regroup(raw, type_name, [rows, block]).numpy().reshape(-1)
    with np.errstate(all="ignore"):
        numbers = dequantise(_core.gguf_regrouped_type(type_name), got)
        expected = dequantise(type_name, raw)
    # Half a step of the smallest float16, times the largest integers that it is multiplied by.
    smallest = {"IQ3_XXS": 31 * 31, "IQ1_S": 9 * 15, "IQ1_M": 9 * 15, "IQ4_XS": 127, "IQ2_XXS": 43, "IQ2_XS": 127}
    smallest["IQ2_S"] = 127
    absolute = np.full(expected.shape, 2.0**-25 * smallest.get(type_name, 0))
    relative = 2.0**-11 if type_name in ("IQ4_XS", "IQ2_XXS") else 0  # of a scale that is rounded to a float16
    if type_name in ("IQ2_XS", "IQ2_S"):  # half a step of 127, whose scale is rounded, too
        largest = np.abs(expected).reshape(-1, 32).max(1, keepdims=True).repeat(32, 1).reshape(expected.shape)
        absolute += largest * (0.5 / 127 + 2.0**-11)
    in_range = np.abs(expected) < 65504  # beyond it a scale may be too large for a float16
    within = np.abs(numbers - expected) <= absolute + relative * np.abs(expected)
    assert (within | np.isnan(expected) | ~in_range).all()


def test_threads_regroup_all_rows() -> None:
    """As many rows as three threads share, in parts that are not alike."""
    block, size = SIZES["IQ3_S"]
    rows, columns = 1601, 2 * block
    raw = np.random.default_rng(0).integers(0, 256, rows * columns // block * size, dtype=np.uint8)
    one, three = (_core.gguf_regroup(raw, "IQ3_S", [rows, columns], num_threads=n).numpy() for n in (1, 3))
    np.testing.assert_array_equal(three, one)
    last = _core.gguf_regroup(raw[-2 * size :], "IQ3_S", [1, columns]).numpy()
    np.testing.assert_array_equal(one[-1:], last)


def test_what_is_not_regrouped() -> None:
    assert not _core.gguf_regrouped_type("Q2_K")
    with pytest.raises(InfinilmError, match="blocks of Q2_K are those of no other type"):
        _core.gguf_regroup(np.zeros(84, np.uint8), "Q2_K", [1, 256])
