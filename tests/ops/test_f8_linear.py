"""Linears of e4m3 weights: bit for bit those of the float32 numbers that codes and scales stand for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from quantised_files.writers import E4M3
from reference.ops import Array

from ops import support
from ops.support import Rows, backend, each_isa, rows

BLOCKS = {"F8_ROW": 32, "F8_32": 32, "F8_128": 128}


def f8_blocks(rng: np.random.Generator, type_name: str, outputs: int, inputs: int) -> tuple[Array, Array]:
    """Rows of blocks [outputs, bytes] with any codes but NaN and scales of any size and sign; the weights."""
    block = BLOCKS[type_name]
    codes = rng.integers(0, 256, (outputs, inputs // block, block)).astype(np.uint8)
    codes[codes & 127 == 127] &= 0x87  # NaN becomes subnormal
    scales = (rng.standard_normal((outputs, inputs // block, 1)) * 10.0 ** rng.integers(-6, 2)).astype(np.float32)
    if type_name == "F8_ROW":
        scales[:] = scales[:, :1]
    stored = np.concatenate([scales.view(np.uint8).reshape(*scales.shape[:2], 4), codes], axis=2)
    return stored.reshape(outputs, -1), (E4M3[codes].astype(np.float32) * scales).reshape(outputs, inputs)


@each_isa
@pytest.mark.parametrize("type_name", BLOCKS)
@given(
    case=rows(size=st.sampled_from([1, 2, 5])),
    out=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    kind=st.sampled_from(("plain", "act_mul")),
    threads=st.sampled_from(support.THREADS),
)
def test_bits_of_plain_numbers(isa: str, type_name: str, case: Rows, out: list[int], kind: str, threads: int) -> None:
    """In any batch, with any threads; the last part of several may be plain numbers."""
    rng, b, k = case.rng(), backend(isa, threads), 128 * case.size
    sizes = [out[0]] * 2 if kind == "act_mul" else out
    made = [f8_blocks(rng, type_name, n, k) for n in sizes]
    parts: list[Any] = [(support.tensor(data), None) for data, _ in made]
    plain: list[Any] = [(support.tensor(weights), None) for _, weights in made]
    types = [type_name] * len(sizes)
    if kind == "plain" and len(sizes) == 3:
        parts[2], types[2] = plain[2], ""
    linear, expected = b.prepare_linear(parts, kind=kind, types=types), b.prepare_linear(plain, kind=kind)
    for i, (_, weights) in enumerate(made):
        support.assert_bitwise(b.unpack_linear(linear, i).numpy(), weights)
    x, outputs = case.x(rng, k), sizes[0] if kind == "act_mul" else sum(sizes)
    got = support.run_linear(b, linear, x, outputs, None, case.pad_in, case.pad_out)
    support.assert_bitwise(got, support.run_linear(b, expected, x, outputs, None, case.pad_in, case.pad_out))


@each_isa
@pytest.mark.parametrize("type_name", BLOCKS)
def test_a_weight_that_is_no_number(isa: str, type_name: str) -> None:
    """It makes its own output NaN, and no other one."""
    rng, b = np.random.default_rng(5), backend(isa)
    data, _ = f8_blocks(rng, type_name, 20, 256)
    data[7, 6] = 0xFF
    linear = b.prepare_linear([(support.tensor(data), None)], types=[type_name])
    for tokens in (1, 5):
        got = support.run_linear(b, linear, support.activations(rng, tokens, 256), 20)
        assert np.isnan(got[:, 7]).all() and np.isfinite(np.delete(got, 7, axis=1)).all()
