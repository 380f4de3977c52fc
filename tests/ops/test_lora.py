"""Adapters: what they add to a linear's output, of the rows that are listed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from reference import ops as oracle
from reference.ops import F64, FLOATING, Array, load

from infinilm.errors import InfinilmError
from ops import support
from ops.support import Output, assert_bitwise, assert_close, backend, each_isa, framed, tensor

widths = st.sampled_from((1, 8, 31, 32, 64, 111))
ranks = st.sampled_from((1, 3, 8, 16, 33))
Lora = tuple[F64, F64, float]


@dataclass
class Adapter:
    """As the backend has it, and as numbers."""

    a: Any
    b: Any
    scale: float
    values: Lora


def make_adapter(
    b: Any, rng: np.random.Generator, dtype: str, in_features: int, out_features: int, rank: int
) -> Adapter:
    down = support.stored(rng, dtype, rank, in_features, scale=in_features**-0.5)
    up = support.stored(rng, dtype, out_features, rank, scale=rank**-0.5)
    scale = float(np.float32(rng.uniform(0.1, 4)))
    linears = [b.prepare_linear([(tensor(weight, dtype), None)]) for weight in (down, up)]
    return Adapter(*linears, scale, (load(down, dtype), load(up, dtype), scale))


def run(b: Any, x: Array, y: Array, parts: list[tuple[Adapter, Array]]) -> Array:
    num_rows, most_rank = sum(len(rows) for _, rows in parts), max(a.values[0].shape[0] for a, _ in parts)
    out = Output(y.shape, pad=(3, 1), values=y)
    inner, delta = Output((num_rows, most_rank), pad=(1, 0)), Output((num_rows, y.shape[1]), pad=(0, 2))
    listed = [(a.a, a.b, a.scale, tensor(framed(rows.astype(np.int32), (1, 1)))) for a, rows in parts]
    b.lora(tensor(framed(x, (1, 2))), listed, tensor(out.view), tensor(inner.view), tensor(delta.view))
    inner.check()
    delta.check()
    return out.check()


@each_isa
@given(
    num_tokens=st.sampled_from((1, 2, 7, 19, 33)), in_features=widths, out_features=widths, data=st.data(),
    seed=support.seeds, threads=st.sampled_from(support.THREADS), compute=st.sampled_from(("float32", "bfloat16")),
)  # fmt: skip
def test_lora(
    isa: str, num_tokens: int, in_features: int, out_features: int, data: st.DataObject, seed: int, threads: int,
    compute: str,
) -> None:  # fmt: skip
    """Any adapters of any dtypes and ranks over any rows, the rest untouched; weights are never rounded."""
    rng, b = np.random.default_rng(seed), backend(isa, threads, compute)
    x, y = support.activations(rng, num_tokens, in_features), support.activations(rng, num_tokens, out_features)
    owner = rng.integers(-1, 3, num_tokens)
    parts = [
        (make_adapter(b, rng, data.draw(st.sampled_from(FLOATING)), in_features, out_features, data.draw(ranks)), rows)
        for rows in (np.flatnonzero(owner == own) for own in range(3))
    ]
    want, size = y.astype(np.float64), np.abs(y.astype(np.float64))
    for adapter, rows in parts:
        want[rows] = oracle.lora(want[rows], x[rows].astype(np.float64), *adapter.values)
        down, up, scale = adapter.values
        size[rows] += scale * (np.abs(x[rows]) @ np.abs(down).T) @ np.abs(up).T
    got = run(b, x, y, parts)
    assert_close(got, want, length=in_features + out_features, scale=size)
    assert_bitwise(got[owner < 0], y[owner < 0], "rows without an adapter")


@each_isa
@pytest.mark.parametrize("dtype", FLOATING)
@given(data=st.data(), in_features=widths, out_features=widths, rank=ranks, seed=support.seeds)
def test_a_row_does_not_depend_on_its_company(
    isa: str, dtype: str, data: st.DataObject, in_features: int, out_features: int, rank: int, seed: int
) -> None:
    """The same bits alone, in any chunk, with any threads, and beside any other adapters."""
    rng, num_tokens = np.random.default_rng(seed), 40
    adapters = [
        make_adapter(backend(isa), rng, kind, in_features, out_features, size)
        for kind, size in ((dtype, rank), ("float32", 5))
    ]
    x, y = support.activations(rng, num_tokens, in_features), support.activations(rng, num_tokens, out_features)
    one = np.zeros(1, np.intp)
    alone = [[run(backend(isa), x[[t]], y[[t]], [(a, one)])[0] for t in range(num_tokens)] for a in adapters]
    for threads in support.THREADS:
        chunk = data.draw(st.integers(1, num_tokens))
        order = rng.permutation(num_tokens)
        for begin in range(0, num_tokens, chunk):
            own = order[begin : begin + chunk]
            which = rng.integers(0, 2, len(own))
            parts = [(a, np.flatnonzero(which == i)) for i, a in enumerate(adapters)]
            got = run(backend(isa, threads), x[own], y[own], parts)
            assert_bitwise(got, np.stack([alone[i][t] for i, t in zip(which, own, strict=True)]), f"tokens {own}")


def test_lora_refuses_what_does_not_fit() -> None:
    rng, b = np.random.default_rng(1), backend(support.ISAS[-1])
    x, y, rows = support.activations(rng, 2, 8), support.activations(rng, 2, 6), np.array([0, 1])
    adapter = make_adapter(b, rng, "float32", 8, 6, 4)
    with pytest.raises(InfinilmError, match=r"rows\[1\] is 2, expected 0 to 1"):
        run(b, x, y, [(adapter, np.array([0, 2]))])
    with pytest.raises(InfinilmError, match="a goes from 7 to 4 features, b from 4 to 6; x has 8 and out 6"):
        run(b, x, y, [(make_adapter(b, rng, "float32", 7, 6, 4), rows)])
    out, small = tensor(y), tensor(np.zeros((1, 6), np.float32))
    listed = [(adapter.a, adapter.b, 1.0, tensor(rows.astype(np.int32)))]
    with pytest.raises(InfinilmError, match=r"inner: expected at least \[2, 4\], got \[1, 6\]"):
        b.lora(tensor(x), listed, out, small, small)
