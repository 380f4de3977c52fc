"""Linears of e4m3 weights: bit for bit those of the float32 numbers that codes and scales stand for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from quantised_files.writers import E4M3, bf16
from reference.ops import Array, load, silu, store

from ops import support
from ops.support import Rows, backend, each_isa, rows

BLOCKS = {"F8_ROW": 32, "F8_32": 32, "F8_128": 128}
MULTIPLY_BF16 = ("avx512_bf16", "amx", "emulated512", "emulated_amx")


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
@given(
    case=rows(size=st.sampled_from([1, 2, 5, 9])),
    out=st.integers(1, 70),
    kind=st.sampled_from(("plain", "act_mul")),
    threads=st.sampled_from(support.THREADS),
)
def test_bits_beside_rounded_inputs(isa: str, type_name: str, case: Rows, out: int, kind: str, threads: int) -> None:
    """With compute_dtype="bfloat16", where the kernels multiply that: what shares a scale gives the bits of bfloat16
    weights that are the codes, which has all of their numbers; then come the scales. Elsewhere nothing changes."""
    rng, b, k = case.rng(), backend(isa, threads, "bfloat16"), 128 * case.size
    made = [f8_blocks(rng, type_name, out, k) for _ in range(2 if kind == "act_mul" else 1)]
    x = case.x(rng, k)
    linear = b.prepare_linear(
        [(support.tensor(data), None) for data, _ in made], kind=kind, types=[type_name] * len(made)
    )
    got = support.run_linear(b, linear, x, out, None, case.pad_in, case.pad_out)
    if isa not in MULTIPLY_BF16:
        exact = backend(isa, threads)
        plain = exact.prepare_linear([(support.tensor(weights), None) for _, weights in made], kind=kind)
        support.assert_bitwise(got, support.run_linear(exact, plain, x, out, None, case.pad_in, case.pad_out))
        return
    if kind == "act_mul":  # of the two alone
        both = [b.prepare_linear([(support.tensor(data), None)], types=[type_name]) for data, _ in made]
        gate, up = (support.run_linear(b, one, x, out) for one in both)
        wide = gate.astype(np.float64)
        support.assert_close(got, silu(wide) * up, length=1, scale=np.abs(wide * up))
        return
    stored = made[0][0].reshape(out, -1, BLOCKS[type_name] + 4)
    scales = stored[:, :, :4].copy().view(np.float32)[:, :, 0]
    codes = E4M3[stored[:, :, 4:]].astype(np.float32)  # [out, blocks, block]
    if type_name == "F8_ROW":
        codes, scales = codes.reshape(out, 1, k), scales[:, :1]
    want = np.zeros(got.shape, np.float32)
    for i in range(codes.shape[1]):
        size = codes.shape[2]
        plain = b.prepare_linear([(support.tensor(bf16(codes[:, i]), "bfloat16"), None)])
        of_scale = (
            support.run_linear(b, plain, np.ascontiguousarray(x[:, i * size : (i + 1) * size]), out) * scales[:, i]
        )
        want = want + of_scale if i else of_scale
    support.assert_bitwise(got, want)
    rounded = load(store(x, "bfloat16"), "bfloat16").astype(np.float64)
    weights = made[0][1].astype(np.float64)
    support.assert_close(got, rounded @ weights.T, length=k, scale=np.abs(rounded) @ np.abs(weights).T / k**0.5)


@each_isa
def test_a_row_in_any_batch_beside_rounded_inputs(isa: str) -> None:
    """Across the edges of groups and of blocks of tokens, in one block of k and in several."""
    rng = np.random.default_rng(6)
    for type_name in BLOCKS:
        data, _ = f8_blocks(rng, type_name, 37, 640)
        b = backend(isa, 2, "bfloat16")
        linear = b.prepare_linear([(support.tensor(data), None)], types=[type_name])
        x = support.activations(rng, 260, 640)
        whole = support.run_linear(b, linear, x, 37)
        for tokens in (1, 2, 3, 7, 13, 17, 40, 256):
            got = support.run_linear(b, linear, np.ascontiguousarray(x[-tokens:]), 37)
            support.assert_bitwise(got, whole[-tokens:], f"{type_name}, {tokens} tokens")


@each_isa
@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("type_name", BLOCKS)
def test_a_weight_that_is_no_number(isa: str, type_name: str, compute_dtype: str) -> None:
    """It makes its own output NaN, and no other one."""
    rng, b = np.random.default_rng(5), backend(isa, 1, compute_dtype)
    data, _ = f8_blocks(rng, type_name, 20, 256)
    data[7, 6] = 0xFF
    linear = b.prepare_linear([(support.tensor(data), None)], types=[type_name])
    for tokens in (1, 5):
        got = support.run_linear(b, linear, support.activations(rng, tokens, 256), 20)
        assert np.isnan(got[:, 7]).all() and np.isfinite(np.delete(got, 7, axis=1)).all()
