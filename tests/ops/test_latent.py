"""What latent attention adds to the ops: linears by head, values that are the ends of keys, and rows without values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from reference.ops import FLOATING, Array

from infinilm.errors import InfinilmError
from ops import support
from ops.support import Output, assert_bitwise, backend, call, each_isa, framed, tensor
from ops.test_attention import Case, Layout, Values, attend, block_sizes, each_cache_dtype, sequences

formats = st.sampled_from((*((dtype, "none") for dtype in FLOATING), ("float32", "int8"), ("float32", "int4")))
head_sizes = st.sampled_from((1, 8, 12, 16, 24, 33, 64))


def strided(values: Array, before: int, behind: int) -> Array:
    """The same heads [num_tokens, num_heads, size] in rows that have other elements around each head."""
    wide = np.full((*values.shape[:2], before + values.shape[2] + behind), np.nan, np.float32)
    wide[..., before : before + values.shape[2]] = values
    return wide[..., before : before + values.shape[2]]


@each_isa
@given(
    num_tokens=support.batches,
    num_heads=st.integers(1, 5),
    head_dim=head_sizes,
    in_features=head_sizes,
    stored=formats,
    compute=st.sampled_from(("float32", "bfloat16")),
    threads=st.sampled_from(support.THREADS),
    seed=support.seeds,
)
def test_each_head_has_its_linear(
    isa: str,
    num_tokens: int,
    num_heads: int,
    head_dim: int,
    in_features: int,
    stored: tuple[str, str],
    compute: str,
    threads: int,
    seed: int,
) -> None:
    """The bits of a linear of that head alone; also of tensors that another one gave, and as they are unpacked."""
    dtype, quantization = stored
    rng = np.random.default_rng(seed)
    b = backend(isa, threads, compute)
    x = support.activations(rng, num_tokens, num_heads, in_features)
    weight = support.stored(rng, dtype, num_heads * head_dim, in_features)
    prepared = b.prepare_linear(
        [(tensor(weight, dtype), None)], kind="by_head", head_dim=head_dim, quantization=quantization
    )
    out = Output((num_tokens, num_heads, head_dim), pad=(2, 1))
    b.head_linear(tensor(strided(x, 3, 2)), prepared, tensor(out.view))
    got = out.check()
    for head in range(num_heads):
        own = weight[head * head_dim : (head + 1) * head_dim]
        alone = b.prepare_linear([(tensor(np.ascontiguousarray(own), dtype), None)], quantization=quantization)
        want = support.run_linear(b, alone, np.ascontiguousarray(x[:, head]), head_dim)
        assert_bitwise(got[:, head], want, f"head {head}")
    if stored == ("float32", "none"):
        np.testing.assert_array_equal(b.unpack_linear(prepared).numpy(), weight)
    adopted = b.adopt_linear(*prepared.tensors, [num_heads * head_dim], in_features, "by_head", head_dim)
    again = Output((num_tokens, num_heads, head_dim))
    b.head_linear(tensor(x), adopted, tensor(again.view))
    assert_bitwise(again.check(), got, "from packed tensors")


@each_isa
@each_cache_dtype
@given(
    heads=st.sampled_from(((1, 1), (4, 1), (7, 1), (16, 1), (4, 2))),
    sizes=st.sampled_from(((8, 8), (12, 5), (24, 16), (40, 33), (96, 64), (144, 128), (576, 512))),
    lengths=sequences(longest=500, most_queries=19, most=3),
    block_size=block_sizes,
    threads=st.sampled_from(support.THREADS),
    seed=support.seeds,
)
def test_values_that_are_the_ends_of_keys(
    isa: str,
    dtype: str,
    heads: tuple[int, int],
    sizes: tuple[int, int],
    lengths: tuple[tuple[int, int], ...],
    block_size: int,
    threads: int,
    seed: int,
) -> None:
    """The bits of attention whose values are those ends, apart, with zeros behind."""
    head_dim, value_dim = sizes
    case = Case(heads, head_dim, lengths, 0, seed)
    if not any(n for _, n in lengths):
        return
    values = Values(case, dtype)
    for v, k in zip(values.v, values.k, strict=True):
        v[:] = 0
        v[..., :value_dim] = k[..., head_dim - value_dim :]
    values.v_scales = values.k_scales
    layout = Layout(values, block_size, seed)
    b = backend(isa, threads)
    want = np.concatenate(attend(b, values, layout, values.whole()))[..., :value_dim]
    q = np.concatenate(values.q)
    out = Output((len(q), heads[0], value_dim))
    edges = np.concatenate([[0], np.cumsum([n for _, n in lengths])]).astype(np.int32)
    ends = np.array([c for c, _ in lengths], np.int32)
    call(
        b,
        "paged_attention",
        framed(q),
        (layout.caches[0], dtype),
        None,
        framed(layout.table),
        framed(edges),
        framed(ends),
        out,
        case.softmax_scale,
        0,
        *(layout.scales[:1] or [None]),
    )
    assert_bitwise(out.check(), want)


@each_isa
@each_cache_dtype
@pytest.mark.parametrize(("num_heads", "head_dim", "rotary_dim"), [(3, 12, 4), (16, 40, 8), (2, 576, 64)])
def test_rows_without_values(isa: str, dtype: str, num_heads: int, head_dim: int, rotary_dim: int) -> None:
    """q is turned from elsewhere, k where it is: the bits of the op where both are in one tensor, with values."""
    rng, num_tokens, b = np.random.default_rng(3), 5, backend(isa, 2)
    width = num_heads * head_dim
    qkv = support.activations(rng, num_tokens, width + 2 * head_dim)
    angle = rng.uniform(0, 100, (num_tokens, rotary_dim // 2))
    table = np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)
    slots = np.array([4, 1, -1, 7, 2], np.int64)
    shape, kind = (2, 1, 4, head_dim), {"bfloat16": np.uint16, "float16": np.float16, "int8": np.int8}
    caches = [np.zeros(shape, kind.get(dtype, np.float32)) for _ in "kvk"]
    scales = [np.zeros(shape[:3], np.float32) if dtype == "int8" else None for _ in "kvk"]
    scalars = num_heads, 1, head_dim, 1e-6
    full = qkv.copy()
    tensors = [tensor(cache, dtype) for cache in caches]
    b.qk_norm_rope_store_kv(
        tensor(full), tensor(table), None, None, tensor(slots), *tensors[:2], *scalars, *map(tensor, scales[:2])
    )
    apart = qkv[:, : width + head_dim].copy()
    queries = apart[:, :width].reshape(num_tokens, num_heads, head_dim)
    turned = strided(queries[..., :rotary_dim], 0, 3)
    queries[..., :rotary_dim] = np.nan
    arguments = tensor(apart), tensor(table), None, None, tensor(slots), tensors[2], None
    b.qk_norm_rope_store_kv(*arguments, *scalars, tensor(scales[2]), None, q_turned=tensor(turned))
    assert_bitwise(apart, full[:, : width + head_dim])
    np.testing.assert_array_equal(caches[2], caches[0])
    if dtype == "int8":
        np.testing.assert_array_equal(scales[2], scales[0])


def test_bad_input() -> None:
    b = backend(support.ISAS[0])

    def refuse(message: str, run: Any) -> None:
        with pytest.raises(InfinilmError, match=message):
            run()

    weight = tensor(np.zeros((12, 6), np.float32))
    prepared = b.prepare_linear([(weight, None)], kind="by_head", head_dim=4)
    x, out = (tensor(np.zeros((2, 3, size), np.float32)) for size in (6, 4))
    b.head_linear(x, prepared, out)
    refuse("weight: has 12 outputs, and out 3 heads of 6", lambda: b.head_linear(x, prepared, x))
    refuse("x: .*6", lambda: b.head_linear(out, prepared, out))
    refuse("prepared by_head", lambda: b.head_linear(x, b.prepare_linear([(weight, None)]), out))
    refuse("multiple of head_dim", lambda: b.prepare_linear([(weight, None)], kind="by_head", head_dim=5))
    refuse("head_dim", lambda: b.prepare_linear([(weight, None)], kind="by_head"))
    # A value that is longer than its key.
    keys, wide = (tensor(np.zeros((1, 1, 4, 8), np.float32)), tensor(np.zeros((1, 1, 9), np.float32)))
    lists = [tensor(np.array(values, np.int32)) for values in ([[0]], [0, 1], [1])]
    q = tensor(np.zeros((1, 1, 8), np.float32))
    refuse("at the end of a key, of 8 elements has no 9", lambda: b.paged_attention(q, keys, None, *lists, wide, 1.0))
