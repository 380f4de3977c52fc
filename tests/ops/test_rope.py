"""rope_table and qk_norm_rope_store_kv: values, what is left alone, and what reaches the cache."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from reference import ops as oracle
from reference.ops import FLOATING, Array, load, store

from ops import support
from ops.support import (
    Output,
    assert_bitwise,
    assert_close,
    backend,
    call,
    each_dtype,
    each_isa,
    each_threads,
    every_backend,
    framed,
)

EPS = 1e-6


@each_isa
@each_threads
@given(
    num_tokens=support.sizes,
    half=st.sampled_from((1, 2, 3, 8, 16, 20, 32, 48, 64, 128)),
    theta=st.sampled_from((1e4, 5e5, 1e6)),
    factor=st.sampled_from((1.0, 0.75, 1.2079441)),
    longest=st.sampled_from((8, 4096, 131072)),
    seed=support.seeds,
    scaled=st.booleans(),
    num_axes=st.integers(0, 4),
)
def test_rope_table(
    isa: str,
    threads: int,
    num_tokens: int,
    half: int,
    theta: float,
    factor: float,
    longest: int,
    seed: int,
    scaled: bool,
    num_axes: int,
) -> None:
    """cos and sin of position * inv_freq; the angle may carry the rounding of one float32 product. Scaled by position
    where that is asked for. With axes, a frequency turns by the position on its own, and by no other.
    """
    rng = np.random.default_rng(seed)
    positions = rng.integers(0, longest, (max(num_axes, 1), num_tokens)).astype(np.int32)
    positions[:, 0] = longest - 1
    axes = rng.integers(0, num_axes, half).astype(np.int32) if num_axes else None
    inv_freq = (theta ** (-np.arange(half) / half)).astype(np.float32)
    out = Output((num_tokens, 2 * half))
    scaling = (0.25, 1000) if scaled else (0.0, 1)
    given_positions = framed(positions) if num_axes else framed(positions[0])
    own_axes = None if axes is None else framed(axes)
    call(backend(isa, threads), "rope_table", given_positions, framed(inv_freq), factor, out, *scaling, own_axes)
    turned_by = positions[np.zeros(half, int) if axes is None else axes].T.astype(np.float64)  # [num_tokens, half]
    scale = factor * (1 + np.tile(turned_by * inv_freq, 2))
    want = oracle.rope_table(turned_by, inv_freq.astype(np.float64), float(np.float32(factor)))
    if scaled:
        want = want * np.tile(1 + 0.25 * np.log(1 + np.floor(turned_by / 1000)), 2)
    assert_close(out.check(), want, length=1, scale=scale)


@dataclass(frozen=True)
class Case:
    """One call of qk_norm_rope_store_kv."""

    num_tokens: int
    heads: tuple[int, int]  # num_heads, num_kv_heads
    head_dim: int
    rotary_dim: int
    norms: bool
    norm_dtype: str
    block_size: int
    pad: tuple[int, int]
    seed: int

    @property
    def width(self) -> int:
        return (self.heads[0] + 2 * self.heads[1]) * self.head_dim


def cases() -> Any:
    dims = (2, 4, 6, 16, 30, 64, 80, 96, 128, 192, 256)

    def build(
        tokens: int, heads: Any, dim: int, share: int, norms: bool, kind: str, block: int, pad: Any, seed: int
    ) -> Case:
        rotary = dim if share == 0 else max(2, dim * share // 4 // 2 * 2)
        return Case(tokens, heads, dim, rotary, norms, kind, block, pad, seed)

    return st.builds(
        build,
        support.batches,
        st.sampled_from(((1, 1), (2, 1), (4, 4), (6, 2), (7, 1), (8, 2))),
        st.sampled_from(dims),
        st.integers(0, 3),
        st.booleans(),
        st.sampled_from(FLOATING),
        st.sampled_from((1, 3, 8, 16, 32)),
        support.pads,
        support.seeds,
    )


@dataclass
class Result:
    qkv: Array
    k_cache: Array
    v_cache: Array


class Inputs:
    """Values of a case: qkv, the table, norms, and slots (distinct, in shuffled blocks, some of them -1)."""

    def __init__(self, case: Case, dtype: str) -> None:
        rng = np.random.default_rng(case.seed)
        self.case, self.dtype = case, dtype
        self.qkv = support.activations(rng, case.num_tokens, case.width)
        angle = rng.uniform(0, 100, (case.num_tokens, case.rotary_dim // 2))
        self.cos_sin = np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)
        norms = [support.stored(rng, case.norm_dtype, case.head_dim) for _ in "qk"]
        self.norms: list[Array | None] = list(norms) if case.norms else [None, None]
        self.num_blocks = case.num_tokens // case.block_size + 2
        slots = rng.permutation(self.num_blocks * case.block_size)[: case.num_tokens]
        self.slots = np.where(rng.random(case.num_tokens) < 0.2, -1, slots).astype(np.int64)
        self.shape = (self.num_blocks, case.heads[1], case.block_size, case.head_dim)

    def run(
        self,
        b: Any,
        tokens: slice = slice(None),
        outputs: tuple[Output, Output] | None = None,
        parts: tuple[str, ...] = ("norms", "rope", "store"),
        qkv_values: Array | None = None,
        v_norm: Array | None = None,
        value_dim: int = 0,
    ) -> Result:
        """Some parts of the op, over some of the tokens.

        outputs: where to store, else fresh ones full of NaN; qkv_values: in place of the inputs' own.
        """
        case, kind = self.case, (store(np.zeros(1), self.dtype)).dtype
        k_cache, v_cache = outputs or (flat_cache(self.shape, kind), flat_cache(self.shape, kind))
        part = (self.qkv if qkv_values is None else qkv_values)[tokens]
        qkv = Output(part.shape, pad=case.pad, values=part)
        norms = [(None if n is None or "norms" not in parts else framed(n), case.norm_dtype) for n in self.norms]
        table = framed(self.cos_sin[tokens]) if "rope" in parts else None
        slots = framed(self.slots[tokens]) if "store" in parts else None
        caches = [support.tensor(c.view, self.dtype) for c in (k_cache, v_cache)]
        scalars = *case.heads, case.head_dim, EPS
        of_values = None if v_norm is None else (framed(v_norm), case.norm_dtype)
        call(
            b,
            "qk_norm_rope_store_kv",
            qkv,
            table,
            *norms,
            slots,
            *caches,
            *scalars,
            None,
            None,
            of_values,
            None,
            value_dim,
        )
        return Result(qkv.check(), k_cache.check(), v_cache.check())


def flat_cache(shape: tuple[int, ...], kind: Any) -> Output:
    """A contiguous cache full of NaN in a frame: one row of numel, seen as `shape`."""
    out = Output((1, int(np.prod(shape))), kind, pad=(3, 4))
    out.view = out.view.reshape(shape)
    return out


@every_backend
@given(case=cases())
def test_qkv_and_cache(isa: str, dtype: str, threads: int, case: Case) -> None:
    """q and k against the oracle; v unchanged; the cache holds exactly the rounded k and v, and nothing
    elsewhere.
    """
    inputs = Inputs(case, dtype)
    got = inputs.run(backend(isa, threads))
    norms = [None if n is None else load(n, case.norm_dtype) for n in inputs.norms]
    args = (
        inputs.cos_sin.astype(np.float64),
        norms[0],
        norms[1],
        *case.heads,
        case.head_dim,
        float(np.float32(EPS)),
    )
    want = oracle.qk_norm_rope(inputs.qkv.astype(np.float64), *args)
    # A rotated pair is as large as its two parts, though their sum may cancel.
    turned = np.tile(np.abs(args[0]), 1)
    flat = oracle.qk_norm_rope(inputs.qkv.astype(np.float64), np.repeat([[1.0, 0.0]], len(turned), 0), *args[1:])
    pairs = oracle.rope(
        np.abs(flat).reshape(len(flat), -1, case.head_dim), np.ones((len(flat), case.rotary_dim))
    )  # |a| - |b| and |b| + |a|
    half = case.rotary_dim // 2
    pairs[..., :half] = pairs[..., half : 2 * half]
    assert_close(got.qkv, want, length=case.head_dim, scale=pairs.reshape(flat.shape), what="qkv")

    q_width, kv_width = (h * case.head_dim for h in case.heads)
    k, v = got.qkv[:, q_width : q_width + kv_width], got.qkv[:, q_width + kv_width :]
    assert_bitwise(v, inputs.qkv[:, q_width + kv_width :], "v in qkv")
    empty = flat_cache(inputs.shape, got.k_cache.dtype).view
    for name, rows, cache in (("k_cache", k, got.k_cache), ("v_cache", v, got.v_cache)):
        rows = store(rows, dtype).reshape(case.num_tokens, case.heads[1], case.head_dim)
        assert_bitwise(cache, oracle.store_kv(rows, inputs.slots, empty), name)


@each_isa
@each_dtype
@given(case=cases())
def test_norm_of_values(isa: str, dtype: str, case: Case) -> None:
    """The bits of rms_norm, on their way into the cache; q and k stay as they are without it."""
    case = replace(case, norms=True)
    inputs, b = Inputs(case, dtype), backend(isa, 2)
    without = inputs.run(b)
    weight = support.stored(np.random.default_rng(case.seed + 1), case.norm_dtype, case.head_dim)
    got = inputs.run(b, v_norm=weight)
    heads = inputs.qkv.reshape(case.num_tokens, -1, case.head_dim)[:, sum(case.heads) :]
    want = Output((case.num_tokens * case.heads[1], case.head_dim))
    call(b, "rms_norm", framed(heads.reshape(want.view.shape)), (framed(weight), case.norm_dtype), want, EPS)
    end = sum(case.heads) * case.head_dim
    assert_bitwise(got.qkv[:, :end], without.qkv[:, :end], "q and k")
    assert_bitwise(got.qkv[:, end:], want.check().reshape(case.num_tokens, -1), "v")
    rows = store(want.check(), dtype).reshape(case.num_tokens, case.heads[1], case.head_dim)
    empty = flat_cache(inputs.shape, got.v_cache.dtype).view
    assert_bitwise(got.v_cache, oracle.store_kv(rows, inputs.slots, empty), "v_cache")
    assert_bitwise(got.k_cache, without.k_cache, "k_cache")


@each_isa
@each_dtype
@given(case=cases(), part=st.floats(0, 1))
def test_values_that_are_shorter(isa: str, dtype: str, case: Case, part: float) -> None:
    """They fill the beginnings of their rows of the cache, whose ends stay; all else has the bits that it has."""
    inputs, b = Inputs(case, dtype), backend(isa, 2)
    value_dim, begin = 1 + int(part * (case.head_dim - 1)), sum(case.heads) * case.head_dim
    rows = inputs.qkv[:, begin:].reshape(case.num_tokens, case.heads[1], case.head_dim)
    short = rows[..., :value_dim].reshape(case.num_tokens, case.heads[1] * value_dim)
    want = inputs.run(b)
    got = inputs.run(b, qkv_values=np.hstack([inputs.qkv[:, :begin], short]), value_dim=value_dim)
    assert_bitwise(got.qkv, np.hstack([want.qkv[:, :begin], short]), "qkv")
    assert_bitwise(got.k_cache, want.k_cache, "k_cache")
    assert_bitwise(got.v_cache[..., :value_dim], want.v_cache[..., :value_dim], "v_cache")
    empty = flat_cache(inputs.shape, got.v_cache.dtype).view
    assert_bitwise(got.v_cache[..., value_dim:], empty[..., value_dim:], "the ends of rows of v_cache")


@each_isa
@each_dtype
@given(case=cases())
def test_tokens_do_not_depend_on_each_other(isa: str, dtype: str, case: Case) -> None:
    """All tokens in one call, one at a time, or in two parts, by 1, 2 and 3 threads: the same bits
    everywhere.
    """
    inputs = Inputs(case, dtype)
    want = inputs.run(backend(isa, 1))
    n = case.num_tokens
    for threads, edges in ((1, range(n + 1)), (2, (0, n)), (3, (0, n // 3, n)), (3, (0, n))):
        caches = (flat_cache(inputs.shape, want.k_cache.dtype), flat_cache(inputs.shape, want.k_cache.dtype))
        parts = [
            inputs.run(backend(isa, threads), slice(a, z), caches).qkv for a, z in itertools.pairwise(edges) if a < z
        ]
        assert_bitwise(np.concatenate(parts), want.qkv, f"qkv, {threads} threads")
        assert_bitwise(caches[0].check(), want.k_cache, "k_cache")
        assert_bitwise(caches[1].check(), want.v_cache, "v_cache")


@each_isa
@each_dtype
@given(case=cases())
def test_parts_one_after_the_other(isa: str, dtype: str, case: Case) -> None:
    """Norm, then rotation, then the cache, each in a call of its own: the bits of one call."""
    inputs, b = Inputs(case, dtype), backend(isa, 2)
    want = inputs.run(b)
    normed = inputs.run(b, parts=("norms",))
    turned = inputs.run(b, parts=("rope",), qkv_values=normed.qkv)
    empty = flat_cache(inputs.shape, want.k_cache.dtype).view
    for cache in (normed.k_cache, normed.v_cache, turned.k_cache, turned.v_cache):
        assert_bitwise(cache, empty, "nothing is stored")
    assert_bitwise(turned.qkv, want.qkv, "qkv")
    stored = inputs.run(b, parts=("store",), qkv_values=turned.qkv)
    assert_bitwise(stored.qkv, turned.qkv, "qkv, only stored")
    assert_bitwise(stored.k_cache, want.k_cache, "k_cache")
    assert_bitwise(stored.v_cache, want.v_cache, "v_cache")


@each_isa
@each_dtype
def test_rounding_into_the_cache(isa: str, dtype: str) -> None:
    """Ties go to even, large values to infinity or stay finite, subnormals survive: v reaches the cache
    exactly rounded.
    """
    head_dim = 64
    ties = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 2**-25, 1.5 * 2**-25]
    large = [65504, 65519.99, 65520, 1e38, -1e38, 3.3895314e38, 3.4e38, np.inf, -np.inf]
    small = [0.0, -0.0, 1.0, 2**-14, 2**-24, -(2**-20), 3e-39]
    values = np.array([*ties, *large, *small], np.float32)
    v = np.resize(values, (1, head_dim))
    qkv = np.concatenate([np.zeros((1, 2 * head_dim), np.float32), v], axis=1)
    kind = store(np.zeros(1), dtype).dtype
    caches = flat_cache((1, 1, 1, head_dim), kind), flat_cache((1, 1, 1, head_dim), kind)
    table = np.repeat([[1, 0]], 32, 1).reshape(1, 64).astype(np.float32)
    tensors = [support.tensor(c.view, dtype) for c in caches]
    out, slot = Output(qkv.shape, values=qkv), np.zeros(1, np.int64)
    call(backend(isa, 1), "qk_norm_rope_store_kv", out, table, None, None, slot, *tensors, 1, 1, head_dim, EPS)
    assert_bitwise(caches[1].check().reshape(1, -1), store(v, dtype), "v_cache")


@each_isa
@each_threads
@given(case=cases())
def test_int8_cache(isa: str, threads: int, case: Case) -> None:
    """Each head of k and v is kept as integers of at most 127 times its largest magnitude / 127, and nothing elsewhere;
    the same bits one token at a time.
    """
    inputs = Inputs(case, "float32")
    q_width, kv_width = (h * case.head_dim for h in case.heads)

    def run(edges: Any) -> tuple[Array, list[Array], list[Array]]:
        parts = []
        caches = [flat_cache(inputs.shape, np.int8) for _ in "kv"]
        scales = [flat_cache(inputs.shape[:3], np.float32) for _ in "kv"]
        for begin, end in itertools.pairwise(edges):
            qkv = Output((end - begin, case.width), pad=case.pad, values=inputs.qkv[begin:end])
            norms = [None if n is None else (framed(n), case.norm_dtype) for n in inputs.norms]
            table, slots = framed(inputs.cos_sin[begin:end]), framed(inputs.slots[begin:end])
            scalars = *case.heads, case.head_dim, EPS
            b = backend(isa, threads)
            call(b, "qk_norm_rope_store_kv", qkv, table, *norms, slots, *caches, *scalars, *scales)
            parts.append(qkv.check())
        return np.concatenate(parts), [c.check() for c in caches], [s.check() for s in scales]

    qkv, caches, scales = run((0, case.num_tokens))
    for at, cache, of_rows in zip((q_width, q_width + kv_width), caches, scales, strict=True):
        rows = qkv[:, at : at + kv_width].reshape(case.num_tokens, case.heads[1], case.head_dim)
        integers, want = oracle.store_int8(rows)
        assert_bitwise(of_rows, oracle.store_kv(want, inputs.slots, np.full_like(of_rows, np.nan)), "scales")
        placed = oracle.store_kv(integers, inputs.slots, np.full_like(cache, -128))
        difference = np.abs(cache.astype(int) - placed)
        assert difference.max() <= 1  # a tie of float32 may not be one of float64
        exact = oracle.store_kv(rows / want[..., None].clip(2**-149), inputs.slots, np.full(cache.shape, np.nan))
        assert np.nanmax(np.where(difference > 0, np.abs(cache - exact), 0), initial=0) <= 0.5 + 127 * 2**-22
    again, same_caches, same_scales = run(range(case.num_tokens + 1))
    for got, expected in ((again, qkv), *zip(same_caches, caches, strict=True), *zip(same_scales, scales, strict=True)):
        assert_bitwise(got, expected)


@each_isa
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_int8_head_with_nan_or_infinity_is_nan(isa: str, value: float) -> None:
    """Its scale is, so that what attends to it cannot pass for right; its neighbours are not touched by it."""
    case = Case(2, (2, 2), 20, 20, False, "float32", 4, (0, 0), 1)
    inputs = Inputs(case, "float32")
    inputs.qkv[1, -7] = value  # in the last head of v
    caches = [flat_cache(inputs.shape, np.int8) for _ in "kv"]
    of_heads = [flat_cache(inputs.shape[:3], np.float32) for _ in "kv"]
    tensors = Output(inputs.qkv.shape, values=inputs.qkv), framed(inputs.cos_sin), None, None, np.array([0, 1])
    call(backend(isa, 1), "qk_norm_rope_store_kv", *tensors, *caches, 2, 2, 20, EPS, *of_heads)
    scales = np.array([s.check()[0, :, :2] for s in of_heads])  # [k or v, head, token]
    assert np.argwhere(np.isnan(scales)).tolist() == [[1, 1, 1]]


@pytest.mark.parametrize("norms", (False, True))
@each_isa
def test_no_tokens(isa: str, norms: bool) -> None:
    """A call with no tokens stores nothing."""
    case = Case(0, (4, 2), 16, 16, norms, "float32", 8, (0, 0), 1)
    got = Inputs(case, "float32").run(backend(isa, 2))
    assert np.isnan(got.k_cache).all() and np.isnan(got.v_cache).all()
