"""The oracle against independent formulas. Needs no backend: what the other tests trust is checked here."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, strategies as st
from reference import ops as oracle
from reference.ops import load, store

seeds = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_every_stored_value_survives(dtype: str) -> None:
    """load then store is the identity on all 65536 bit patterns that are not NaN; NaN stays NaN."""
    patterns = np.arange(65536, dtype=np.uint16)
    stored = patterns if dtype == "bfloat16" else patterns.view(np.float16)
    values = load(stored, dtype)
    again = store(values, dtype).view(np.uint16)
    keep = ~np.isnan(values)
    assert np.array_equal(again[keep], patterns[keep])
    assert np.isnan(load(store(values[~keep], dtype), dtype)).all()


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@given(seed=seeds)
def test_store_rounds_to_nearest_even(dtype: str, seed: int) -> None:
    """No stored neighbour is closer; exact ties take the even pattern."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(500) * 2.0 ** rng.integers(-20, 15, 500)).astype(np.float32)
    bits = store(x, dtype).view(np.uint16)

    def value(pattern: np.ndarray) -> np.ndarray:
        return load(pattern if dtype == "bfloat16" else pattern.view(np.float16), dtype)

    error = np.abs(value(bits) - x)
    for step in (-1, 1):
        neighbour = np.abs(value((bits.astype(np.int32) + step).clip(0, 65535).astype(np.uint16)) - x)
        assert np.all((error < neighbour) | ((error == neighbour) & (bits % 2 == 0)) | np.isnan(neighbour))


def test_rms_norm_by_hand() -> None:
    """[3, 4] has root mean square sqrt(12.5); eps is inside the root."""
    got = oracle.rms_norm(np.array([[3.0, 4.0]]), np.array([1.0, 2.0]), 0.0)
    assert np.allclose(got, [[3 / math.sqrt(12.5), 8 / math.sqrt(12.5)]], rtol=1e-15)
    assert np.allclose(oracle.rms_norm(np.array([[1.0]]), np.array([1.0]), 3.0), 0.5, rtol=1e-15)


def test_silu_by_hand() -> None:
    """silu(x) + silu(-x) = x tanh(x / 2); extremes do not overflow."""
    x = np.linspace(-30, 30, 61)
    assert np.allclose(oracle.silu(x) + oracle.silu(-x), x * np.tanh(x / 2), rtol=1e-14, atol=1e-14)
    assert np.allclose(oracle.silu(x) - oracle.silu(-x), x, rtol=1e-14, atol=1e-14)
    with np.errstate(all="raise", under="ignore"):
        assert oracle.silu(np.array([-2000.0, 2000.0])).tolist() == [0.0, 2000.0]


@given(seed=seeds, half=st.integers(1, 32), rest=st.integers(0, 9))
def test_rope_is_complex_multiplication(seed: int, half: int, rest: int) -> None:
    """The pair (i, i + half) as a complex number times exp(i angle); what lies past the pairs stays."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((5, 3, 2 * half + rest))
    positions, inv_freq = rng.integers(0, 1000, 5), rng.random(half)
    got = oracle.rope(x, oracle.rope_table(positions, inv_freq, 1.0))
    turned = (x[..., :half] + 1j * x[..., half : 2 * half]) * np.exp(1j * positions[:, None, None] * inv_freq)
    assert np.allclose(got[..., :half], turned.real, rtol=1e-12, atol=1e-12)
    assert np.allclose(got[..., half : 2 * half], turned.imag, rtol=1e-12, atol=1e-12)
    assert np.array_equal(got[..., 2 * half :], x[..., 2 * half :])


@given(
    seed=seeds, context=st.integers(1, 12), queries=st.integers(1, 12), window=st.integers(0, 13),
    heads=st.sampled_from(((1, 1), (4, 2), (3, 1))),
)  # fmt: skip
def test_attention_by_loops(seed: int, context: int, queries: int, window: int, heads: tuple[int, int]) -> None:
    """One query, one head, one key at a time, with math.exp and no maximum subtracted."""
    queries = min(queries, context)
    rng = np.random.default_rng(seed)
    num_heads, num_kv_heads = heads
    q = rng.standard_normal((queries, num_heads, 5))
    k, v = rng.standard_normal((2, context, num_kv_heads, 5))
    got, magnitude = oracle.attention(q, k, v, 0.4, window)
    for i, h in itertools.product(range(queries), range(num_heads)):
        position, kv = context - queries + i, h * num_kv_heads // num_heads
        keys = [j for j in range(context) if j <= position and (window == 0 or position - j < window)]
        weights = [math.exp(0.4 * sum(q[i, h, d] * k[j, kv, d] for d in range(5))) for j in keys]
        want = sum(w * v[j, kv] for w, j in zip(weights, keys, strict=True)) / math.fsum(weights)
        assert np.allclose(got[i, h], want, rtol=1e-12, atol=1e-12)
        assert np.all(magnitude[i, h] >= np.abs(want) * (1 - 1e-12))


@given(seed=seeds, block_size=st.integers(1, 9))
def test_paged_attention_is_attention_per_sequence(seed: int, block_size: int) -> None:
    """Scattered into blocks by store_kv, gathered through the table."""
    rng = np.random.default_rng(seed)
    contexts, counts = [7, 1, 12, 3], [3, 1, 0, 3]
    tables = [rng.permutation(40)[:12] for _ in contexts]  # blocks of one sequence are distinct; sequences are apart:
    caches = [np.full((160, 2, block_size, 6), np.nan) for _ in "kv"]
    rows, qs = [], []
    for s, (context, count) in enumerate(zip(contexts, counts, strict=True)):
        tables[s] = tables[s] + 40 * s
        positions = np.arange(context)
        slots = tables[s][positions // block_size] * block_size + positions % block_size
        kv = rng.standard_normal((2, context, 2, 6))
        caches = [oracle.store_kv(r, slots, cache) for r, cache in zip(kv, caches, strict=True)]
        rows.append(kv)
        qs.append(rng.standard_normal((count, 4, 6)))
    edges = np.concatenate([[0], np.cumsum(counts)])
    got, _ = oracle.paged_attention(
        np.concatenate(qs), caches[0], caches[1], np.array(tables), edges, np.array(contexts), 0.3, 4
    )
    want = [oracle.attention(q, kv[0], kv[1], 0.3, 4)[0] for q, kv in zip(qs, rows, strict=True) if len(q)]
    assert np.array_equal(got, np.concatenate(want))


def test_linear_by_hand() -> None:
    """Two parts with one bias and a residual; act_mul of the same."""
    x = np.array([[1.0, 2.0]])
    first, second = np.array([[1.0, 1.0]]), np.array([[0.5, -1.0]])
    got = oracle.linear(x, [(first, np.array([10.0])), (second, None)], "plain", np.array([[100.0, 200.0]]))
    assert got.tolist() == [[113.0, 198.5]]
    gated = oracle.linear(x, [(first, np.array([10.0])), (second, None)], "act_mul", np.array([[1.0]]))
    assert np.allclose(gated, 1 - 1.5 * 13 / (1 + math.exp(-13)), rtol=1e-15)


def test_sampling_by_hand() -> None:
    """Shares 0.4, 0.3, 0.2, 0.1 at ids 2, 0, 3, 1: every knob by its definition."""
    logits = np.log(np.array([0.3, 0.1, 0.4, 0.2]))

    def pick(
        random_val: float, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
    ) -> int:
        return oracle.sample_row(logits, temperature, top_k, top_p, min_p, random_val)[0]

    assert [pick(r) for r in (0.0, 0.39, 0.41, 0.69, 0.71, 0.89, 0.91, 0.999)] == [2, 2, 0, 0, 3, 3, 1, 1]
    assert pick(0.99, temperature=0) == 2
    assert [pick(r, top_k=2) for r in (0.57, 0.58, 0.99)] == [2, 0, 0]  # 4/7 = 0.571
    assert [pick(0.99, top_k=k) for k in (-1, 0, 1, 3, 9)] == [1, 1, 2, 3, 1]
    assert [pick(0.99, top_p=p) for p in (0.0, 0.39, 0.41, 0.69, 0.71, 0.95, 1.0)] == [2, 2, 0, 0, 3, 1, 1]
    assert [pick(0.99, min_p=p) for p in (0.2, 0.3, 0.6, 0.8, 1.0)] == [1, 3, 0, 2, 2]
    assert pick(0.99, top_k=3, top_p=0.75) == 0  # of 4/9, 3/9, 2/9 the first two reach 0.75
    assert [pick(r, temperature=0.5) for r in (0.53, 0.54)] == [2, 0]  # 16 / 30 = 0.533


def test_sampling_ties() -> None:
    """Equal logits are ordered by id."""
    logits = np.array([0.0, 1.0, 1.0, 0.0])
    assert oracle.sample_row(logits, 0, 0, 1, 0, 0.9)[0] == 1
    assert oracle.sample_row(logits, 1, 1, 1, 0, 0.9)[0] == 1
    assert oracle.sample_row(logits, 1, 3, 1, 0, 0.999)[0] == 0


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    (
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ),
)
def test_philox_known_answers(counter: str, key: str, words: str) -> None:
    """kat_vectors of Random123 (DEShawResearch/random123), philox 4x32 10."""

    def numbers(text: str) -> list[int]:
        return [int(word, 16) for word in text.split()]

    assert list(oracle.philox4x32(numbers(counter), numbers(key))) == numbers(words)


def test_uniform_by_hand() -> None:
    """seed 0, position 0: 0x6627e8d5 >> 8 over 2^24."""
    assert oracle.uniform(0, 0) == 0x6627E8 / 2**24
    assert len({oracle.uniform(s, p) for s in (0, 1, 2**32, 2**63) for p in (0, 1, 2**32)}) == 12
