"""Cases for cuda/linear/head_linear.cu against float64 numpy; a token alone has the bits that it has among others."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from emulation import Array, Gpu
from frames import KINDS, Frame, assert_bitwise, assert_close, decode, encode, normal, of
from packing import pack
from quantised import FORMATS, dequantise, pack as pack_quantised, quantise


def _long(value: int) -> ctypes.c_int64:
    return ctypes.c_int64(value)


def head_linear(gpu: Gpu, shapes: list[dict[str, Any]]) -> None:
    """x are the ends of wider heads, out the beginnings."""
    for shape in shapes:
        _check(gpu, *(shape[key] for key in ("seed", "tokens", "heads", "n", "k", "kind", "name")))
        gpu.close()


def _check(gpu: Gpu, seed: int, tokens: int, heads: int, n: int, k: int, kind: str, name: str) -> None:
    stored = normal(seed, heads * n, k) / np.float32(k**0.5)
    if name:
        quantised = quantise(stored, name)
        weight, exact = pack_quantised(quantised, name, kind=kind), dequantise(quantised, name)
    else:
        exact = decode(encode(stored, kind), kind)
        weight = exact if kind == "f32" else pack(stored, kind=kind)
    packed, before, behind = gpu.upload(weight), 16, 8
    rows = encode(normal(seed + 1, tokens, heads * (before + k)), kind)

    def run(rows: Array) -> Array:
        x, out = of(gpu, rows, kind, 8), Frame(gpu, kind, (len(rows), heads * (n + behind)), 8)
        start = ctypes.c_void_p((x.pointer.value or 0) + before * rows.itemsize)
        gpu.call(
            "run_head_linear", start, _long(x.stride), _long(before + k), len(rows), heads, packed, n, k,
            KINDS.index(kind), FORMATS.index(name), out.pointer, _long(out.stride), _long(n + behind),
        )  # fmt: skip
        return out.get().reshape(len(rows), heads, n + behind)

    got = run(rows)
    assert np.isnan(decode(got[..., n:], kind)).all(), "wrote beyond its features"
    x = decode(rows, kind).astype(np.float64).reshape(tokens, heads, before + k)[..., before:]
    by_head = exact.astype(np.float64).reshape(heads, n, k)
    want = np.einsum("thk,hnk->thn", x, by_head)
    size = np.einsum("thk,hnk->thn", np.abs(x), np.abs(by_head))
    assert_close(got[..., :n].reshape(tokens, -1), want.reshape(tokens, -1), kind, k, size.reshape(tokens, -1))
    middle = slice(tokens // 2, tokens // 2 + 1)
    assert_bitwise(run(rows[middle])[..., :n], got[middle][..., :n])
