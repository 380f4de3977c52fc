"""Cases for cuda/rows, attention/rope.cu and linear/linear_f32.cu against float64 numpy. Run by the worker process.

A case loops over the shapes it is given, each a dict of the numbers that one call needs, and over the types.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from typing import Any

import numpy as np
from emulation import ROOT, Array, Gpu
from frames import KINDS, UNIT, Frame, assert_bitwise, assert_close, decode, encode, normal, of
from packing import ORDERS, pack
from quantised import from_8_bits, to_8_bits

sys.path.insert(0, str(ROOT / "tests"))
from reference import ops as oracle

F64 = np.float64
Shape = dict[str, Any]
EPS = 1e-6


def _long(value: int) -> ctypes.c_int64:
    return ctypes.c_int64(value)


def _stored(seed: int, kind: str, *shape: int, scale: float = 1.0) -> tuple[Array, Array]:
    """Random values as stored, and the float64 values of that."""
    stored = encode(normal(seed, *shape) * np.float32(scale), kind)
    return stored, decode(stored, kind).astype(F64)


# ---------------------------------------------------------------------------------------------- norm.cu


def _norm(
    gpu: Gpu,
    kind: str,
    x: Array,
    residual: Array | None,
    weight: Array | None,
    pad: int,
    in_place: bool,
    multiplier: float = 1.0,
    bias: Array | None = None,
    mean_square: Array | None = None,
    scale: float = 1.0,
    num_groups: int = 1,
) -> list[Array]:
    rows, width = x.shape
    out = Frame(gpu, kind, x.shape, pad) if not in_place else None
    dx = of(gpu, x, kind, 2 * pad)
    total = of(gpu, residual, kind, 3 * pad) if residual is not None else None
    target = out or dx
    vectors = [None if vector is None else gpu.upload(vector) for vector in (weight, bias, mean_square)]
    gpu.call(
        "norm_rows", dx.pointer, total.pointer if total else None, *vectors, target.pointer, _long(dx.stride),
        _long(total.stride if total else 0), _long(target.stride), rows, num_groups, width // num_groups, EPS,
        multiplier, scale, KINDS.index(kind),
    )  # fmt: skip
    return [target.get(), *([total.get()] if total else [])]


def rms_norm(gpu: Gpu, shapes: list[Shape]) -> None:
    """Values; residual rounded to T; in place; a row alone has the bits it has among others."""
    for shape in shapes:
        rows, width, pad, seed = (shape[n] for n in ("rows", "width", "pad", "seed"))
        weight = normal(seed, width)
        for kind in KINDS:
            x, exact = _stored(seed + 1, kind, rows, width, scale=shape["scale"])
            residual, residual_exact = _stored(seed + 2, kind, rows, width)
            for added in (False, True):
                want = exact
                if added:
                    want = decode(encode((residual_exact + exact).astype(np.float32), kind), kind).astype(F64)
                got = _norm(gpu, kind, x, residual if added else None, weight, pad, False)
                if added:
                    assert_bitwise(got[1], encode(want, kind))
                mean = (want * want).mean(1, keepdims=True)
                assert_close(got[0], want / np.sqrt(mean + np.float32(EPS)) * weight, kind, width)
                assert_bitwise(_norm(gpu, kind, x, residual if added else None, weight, pad, True)[0], got[0])
                row = rows // 2
                alone = slice(row, row + 1)
                assert_bitwise(
                    _norm(gpu, kind, x[alone], residual[alone] if added else None, weight, 0, False)[0], got[0][alone]
                )


def layer_norm(gpu: Gpu, shapes: list[Shape]) -> None:
    """With a bias it is LayerNorm, also behind an addition; a row alone has the bits it has among others."""
    for shape in shapes:
        rows, width, pad, seed = (shape[n] for n in ("rows", "width", "pad", "seed"))
        weight, bias = normal(seed, width), normal(seed + 3, width)
        for kind in KINDS:
            x, exact = _stored(seed + 1, kind, rows, width)
            residual, residual_exact = _stored(seed + 2, kind, rows, width)
            for added in (False, True):
                total = encode((residual_exact + exact).astype(np.float32), kind) if added else x
                want = decode(total, kind).astype(F64)
                got = _norm(gpu, kind, x, residual if added else None, weight, pad, False, bias=bias)
                if added:
                    assert_bitwise(got[1], total)
                centred = want - want.mean(1, keepdims=True)
                scale = 1 / np.sqrt((centred * centred).mean(1, keepdims=True) + np.float32(EPS))
                size = np.abs(want).max(1, keepdims=True) * scale * np.abs(weight) + np.abs(bias)
                assert_close(got[0], centred * scale * weight + bias, kind, width, scale=size)
                alone = slice(rows // 2, rows // 2 + 1)
                assert_bitwise(_norm(gpu, kind, total[alone], None, weight, 0, True, bias=bias)[0], got[0][alone])


def layer_norm_of_groups(gpu: Gpu, shapes: list[Shape]) -> None:
    """Each group of a row has the bits of a row of its own, with its part of the weight and of the bias."""
    for shape in shapes:
        rows, width, pad, seed, groups = (shape[n] for n in ("rows", "width", "pad", "seed", "groups"))
        weight, bias = normal(seed, groups * width), normal(seed + 3, groups * width)
        for kind in KINDS:
            x, _ = _stored(seed + 1, kind, rows, groups * width)
            got = _norm(gpu, kind, x, None, weight, pad, shape["in_place"], bias=bias, num_groups=groups)[0]
            for i in range(groups):
                own = slice(i * width, (i + 1) * width)
                want = _norm(gpu, kind, x[:, own].copy(), None, weight[own].copy(), 0, False, bias=bias[own].copy())
                assert_bitwise(got[:, own], want[0])


def mean_square(gpu: Gpu, shapes: list[Shape]) -> None:
    """Written without a weight; given with one, it takes the place of the row's own, which has the same bits."""
    for shape in shapes:
        rows, width, pad, seed = (shape[n] for n in ("rows", "width", "pad", "seed"))
        weight = normal(seed, width)
        for kind in KINDS:
            x, exact = _stored(seed + 1, kind, rows, width)
            dx, out = of(gpu, x, kind, pad), gpu.upload(np.full(rows, np.nan, np.float32))
            strides = _long(dx.stride), _long(0), _long(dx.stride)
            nothing = (None, None)
            gpu.call(
                "norm_rows", dx.pointer, None, *nothing, out, dx.pointer, *strides, rows, 1, width, EPS, 0.5,
                1.0, KINDS.index(kind),
            )  # fmt: skip
            assert_bitwise(dx.get(), x)
            halves = gpu.download(out)
            assert np.allclose(halves, (exact * exact).mean(1) / 2, rtol=1e-5)
            own = _norm(gpu, kind, x, None, weight, pad, False)[0]
            assert_bitwise(_norm(gpu, kind, x, None, weight, pad, False, mean_square=2 * halves)[0], own)


def add_rms_norm(gpu: Gpu, shapes: list[Shape]) -> None:
    """A multiple of x is added, in float32 and rounded to T once; without a weight that is all."""
    for shape in shapes:
        rows, width, pad, seed = (shape[n] for n in ("rows", "width", "pad", "seed"))
        weight, multiplier = normal(seed, width), np.float32(shape["multiplier"])
        for kind in KINDS:
            x, exact = _stored(seed + 1, kind, rows, width)
            residual, residual_exact = _stored(seed + 2, kind, rows, width)
            product = exact.astype(np.float32) * multiplier
            scaled = (residual_exact.astype(np.float32) + product) * np.float32(0.3)
            _, added = _norm(gpu, kind, x, residual, None, pad, True, float(multiplier), scale=0.3)
            assert_bitwise(added, encode(scaled, kind))
            total = encode(residual_exact.astype(np.float32) + product, kind)
            out, added = _norm(gpu, kind, x, residual, weight, pad, False, float(multiplier))
            assert_bitwise(added, total)
            assert_bitwise(out, _norm(gpu, kind, total, None, weight, 0, False)[0])
            out, added = _norm(gpu, kind, x, residual, None, pad, True, float(multiplier))
            assert_bitwise(added, total)
            assert_bitwise(out, x)


# ---------------------------------------------------------------------------------------------- rope.cu


def rope_table(gpu: Gpu, shapes: list[Shape]) -> None:
    """Large positions too: as exact as the CPU backend."""
    for shape in shapes:
        tokens, half, factor = shape["rows"], shape["half"], float(np.float32(shape["factor"]))
        positions: Array = (
            np.random.default_rng(shape["seed"]).integers(0, shape["longest"], (tokens,)).astype(np.int32)
        )
        positions[0] = shape["longest"] - 1
        inv_freq: Array = (shape["theta"] ** (-np.arange(half) / half)).astype(np.float32)
        out = Frame(gpu, "f32", (1, tokens * 2 * half))
        axes = (np.arange(half) % 3).astype(np.int32) if shape["seed"] % 2 else None  # of each frequency
        if axes is not None:
            positions = np.stack([positions, positions[::-1], positions // 2]).astype(np.int32)
        gpu.call(
            "make_rope_table", gpu.upload(positions), gpu.upload(inv_freq),
            None if axes is None else gpu.upload(axes), out.pointer, tokens, half, factor,
            *((0.25, 1000, 3) if tokens % 2 else (0.0, 1, 0)),
        )  # fmt: skip
        by = positions[:, None].repeat(half, axis=1) if axes is None else positions[axes].T  # [tokens, half]
        angle = by.astype(F64) * inv_freq
        scale = 1 + 0.25 * np.log1p((np.tile(by, 2) + 3) // 1000) if tokens % 2 else 1.0
        want = np.concatenate([np.cos(angle), np.sin(angle)], 1) * factor * scale
        error = np.abs(out.get().reshape(tokens, 2 * half) - want)
        assert (error <= UNIT["f32"] * np.abs(want) + 1e-12).all(), error.max()


def _rope_call(
    gpu: Gpu, kind: str, shape: Shape, data: dict[str, Any], pad: int, has_v: bool = True, cache: str = ""
) -> list[Array]:
    """[qkv, k_cache, v_cache] afterwards; caches as [.., head_dim] rows. data may have v_norm and q_turned.

    cache: "int8" or "fp8": then the scales of rows follow, first those of keys.
    """
    heads, kv_heads, head_dim, block_size = (shape[n] for n in ("heads", "kv_heads", "head_dim", "block_size"))
    qkv = of(gpu, data["qkv"], kind, pad)
    caches: list[Any] = [of(gpu, data["cache"], kind) for _ in range(2)]
    scales = [None, None]
    if cache:
        caches = [gpu.upload(np.full(data["cache"].shape, 0x55, np.uint8)) for _ in range(2)]
        scales = [gpu.upload(np.full(len(data["cache"]), -1, np.float32)) for _ in range(2)]
    k_cache, v_cache = (c if cache else c.pointer for c in caches)
    norms = [gpu.upload(data[n]) if shape["norm"] else None for n in ("q_norm", "k_norm")]
    cos_sin = gpu.upload(data["cos_sin"]) if shape["rotary_dim"] else None
    slots = None if data["slots"] is None else gpu.upload(data["slots"])
    v_norm = gpu.upload(data["v_norm"]) if "v_norm" in data else None
    turned = of(gpu, data["q_turned"], kind, 8) if "q_turned" in data else None
    strides = _long(turned.stride if turned else 0), _long(shape["rotary_dim"])
    gpu.call(
        "rope_store", qkv.pointer, _long(qkv.stride), len(data["qkv"]), cos_sin, *norms, v_norm, slots,
        k_cache, v_cache if has_v else None, turned.pointer if turned else None, *strides, heads,
        kv_heads, head_dim, shape.get("value_dim", head_dim), shape["rotary_dim"], block_size, EPS,
        KINDS.index(kind), *scales, {"": KINDS.index(kind), "int8": 3, "fp8": 4}[cache],
    )  # fmt: skip
    if cache:
        return [qkv.get(), *(gpu.download(buffer) for buffer in (*caches, *scales) if buffer is not None)]
    return [qkv.get(), *(c.get() for c in caches)]


def _rope_data(kind: str, shape: Shape) -> dict[str, Any]:
    tokens, head_dim, rotary_dim, seed = (shape[n] for n in ("rows", "head_dim", "rotary_dim", "seed"))
    heads, kv_heads, block_size = shape["heads"], shape["kv_heads"], shape["block_size"]
    num_blocks = -(-2 * tokens // block_size)
    rng = np.random.default_rng(seed)
    slots = rng.permutation(num_blocks * block_size)[:tokens].astype(np.int64)
    slots[rng.random(tokens) < 0.2] = -1
    angle = rng.random((tokens, rotary_dim // 2)) * 7
    return {
        "qkv": _stored(seed, kind, tokens, (heads + 2 * kv_heads) * head_dim)[0],
        "cos_sin": np.concatenate([np.cos(angle), np.sin(angle)], 1).astype(np.float32),
        "q_norm": normal(seed + 1, head_dim),
        "k_norm": normal(seed + 2, head_dim),
        "slots": slots,
        "cache": _stored(seed + 3, kind, num_blocks * kv_heads * block_size, head_dim)[0],
    }


def _rope_want(kind: str, shape: Shape, data: dict[str, Any]) -> tuple[Array, Array]:
    """q and k turned, [tokens, heads + kv_heads, head_dim], and the size of what was added in them."""
    heads, kv_heads, head_dim, half = shape["heads"], shape["kv_heads"], shape["head_dim"], shape["rotary_dim"] // 2
    qkv = decode(data["qkv"], kind).astype(F64).reshape(shape["rows"], heads + 2 * kv_heads, head_dim)
    x = qkv[:, : heads + kv_heads]
    if shape["norm"]:
        weight = np.repeat([data["q_norm"], data["k_norm"]], [heads, kv_heads], axis=0)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(EPS)) * weight
    cosine, sine = np.split(data["cos_sin"].astype(F64)[:, None], 2, axis=-1)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = [first * cosine - second * sine, second * cosine + first * sine, rest]
    size = np.abs(first) + np.abs(second)
    return np.concatenate(turned, -1), np.concatenate([size, size, np.abs(rest)], -1)


def rope_store(gpu: Gpu, shapes: list[Shape]) -> None:
    """q and k normed and turned in place, v left alone, both caches at the slots; alone as among others."""
    for shape in shapes:
        tokens, heads, kv_heads, head_dim = (shape[n] for n in ("rows", "heads", "kv_heads", "head_dim"))
        for kind in KINDS:
            data = _rope_data(kind, shape)
            got, *caches = _rope_call(gpu, kind, shape, data, shape["pad"])
            by_head = got.reshape(tokens, -1, head_dim)
            before = data["qkv"].reshape(by_head.shape)
            want, size = _rope_want(kind, shape, data)
            rounded = 1.1 * UNIT[kind] * size if shape["norm"] else 0.0  # before it is turned, too
            assert_close(by_head[:, : heads + kv_heads], want, kind, head_dim, size, rounded)
            assert_bitwise(by_head[:, heads + kv_heads :], before[:, heads + kv_heads :])
            for cache, first in zip(caches, (heads, heads + kv_heads), strict=True):
                expected = data["cache"].reshape(-1, kv_heads, shape["block_size"], head_dim).copy()
                for token, slot in enumerate(data["slots"].tolist()):
                    if slot >= 0:
                        block, offset = divmod(slot, shape["block_size"])
                        expected[block, :, offset] = by_head[token, first : first + kv_heads]
                assert_bitwise(cache, expected.reshape(cache.shape))
            row = tokens // 2
            alone = {n: v[row : row + 1] if n in ("qkv", "cos_sin", "slots") else v for n, v in data.items()}
            assert_bitwise(_rope_call(gpu, kind, shape, alone, 0)[0], got[row : row + 1])
            # One after the other, each in a call of its own.
            steps = [{"rotary_dim": 0}, {"norm": False}, {"rotary_dim": 0, "norm": False}]
            qkv, slots, last = data["qkv"], (None, None, data["slots"]), []
            for step, at in zip(steps, slots, strict=True):
                last = _rope_call(gpu, kind, {**shape, **step}, {**data, "qkv": qkv, "slots": at}, shape["pad"])
                if at is None:
                    assert all(np.array_equal(cache, data["cache"]) for cache in last[1:])
                qkv = last[0]
            for one, several in zip([got, *caches], last, strict=True):
                assert_bitwise(several, one)


def rows_of(cache: Array, shape: Shape) -> Array:
    """[num_blocks, num_kv_heads, block_size, ..] of what has a row for each."""
    return cache.reshape(-1, shape["kv_heads"], shape["block_size"], *cache.shape[1:])


def rope_store_8_bits(gpu: Gpu, shapes: list[Shape]) -> None:
    """What a cache of 8 bits keeps: of rows as they come the bytes and scales of the rule; of others near what 16 bits
    keep. qkv is as beside a cache of 16 bits, and a row that is not a number is none when it is read.
    """
    for shape, kind in ((shape, kind) for shape in shapes for kind in KINDS):
        kv_heads, head_dim, block_size = (shape[n] for n in ("kv_heads", "head_dim", "block_size"))
        data, first_k = _rope_data(kind, shape), shape["heads"] * head_dim
        plain = {**shape, "rotary_dim": 0, "norm": False}
        stored = [(t, *divmod(slot, block_size)) for t, slot in enumerate(data["slots"].tolist()) if slot >= 0]
        bad = {**data, "qkv": data["qkv"].copy()}
        if stored:
            bad["qkv"][stored[0][0], first_k] = encode(np.float32(np.inf), kind)
        for cache in ("int8", "fp8"):
            _, *kept = _rope_call(gpu, kind, plain, data, shape["pad"], cache=cache)
            qkv, *of_8 = _rope_call(gpu, kind, shape, data, shape["pad"], cache=cache)
            want_qkv, *of_16 = _rope_call(gpu, kind, shape, data, shape["pad"])
            assert_bitwise(qkv, want_qkv)
            of_bad = _rope_call(gpu, kind, plain, bad, shape["pad"], cache=cache)[1:]
            for part in range(2):
                want = np.full(data["cache"].shape, 0x55, np.uint8), np.full(len(data["cache"]), -1, np.float32)
                begin = first_k + part * kv_heads * head_dim
                for token, block, offset in stored:
                    x = decode(data["qkv"][token, begin : begin + kv_heads * head_dim], kind).reshape(kv_heads, -1)
                    for rows, values in zip(want, to_8_bits(x, cache), strict=True):
                        rows_of(rows, shape)[block, :, offset] = values
                    numbers, scales = (rows_of(of_8[i], shape)[block, :, offset] for i in (part, part + 2))
                    exact = decode(rows_of(of_16[part], shape)[block, :, offset], kind).astype(F64)
                    error = np.abs(from_8_bits(numbers, scales, cache) - exact)
                    # Half a step: of the largest number, or of the number itself; and one rounding to 16 bits.
                    step = np.abs(exact).max(-1, keepdims=True) / 127 if cache == "int8" else np.abs(exact) / 8
                    least = 0 if cache == "int8" else scales[:, None] * 2.0**-10
                    assert (error <= 0.51 * step + least + 2 * UNIT[kind] * np.abs(exact)).all(), (shape, kind, cache)
                for got, expected in zip(kept[part::2], want, strict=True):
                    assert_bitwise(got, expected)
            if stored:
                _, block, offset = stored[0]
                assert np.isnan(rows_of(of_bad[2], shape)[block, 0, offset])
                assert not np.isnan(of_bad[3]).any()


def rope_parts(gpu: Gpu, shapes: list[Shape]) -> None:
    """Values that are normed, or shorter than keys, queries without keys, keys without values, of which queries are
    turned from elsewhere.

    Each is what it is in a call that has all.
    """
    for shape in shapes:
        tokens, heads, kv_heads, head_dim = (shape[n] for n in ("rows", "heads", "kv_heads", "head_dim"))
        rotary = shape["rotary_dim"] // 8 * 8
        shape, first_v = {**shape, "rotary_dim": rotary}, (heads + kv_heads) * head_dim
        for kind in KINDS:
            data = _rope_data(kind, shape)
            got, k_cache, v_cache = _rope_call(gpu, kind, shape, data, shape["pad"])
            v_norm = normal(shape["seed"] + 9, head_dim)
            normed, k_of_normed, v_of_normed = _rope_call(gpu, kind, shape, {**data, "v_norm": v_norm}, shape["pad"])
            assert_bitwise(normed[:, :first_v], got[:, :first_v])
            assert_bitwise(k_of_normed, k_cache)
            v = decode(data["qkv"][:, first_v:], kind).astype(F64).reshape(tokens, kv_heads, head_dim)
            want = v / np.sqrt((v * v).mean(-1, keepdims=True) + np.float32(EPS)) * v_norm
            assert_close(normed[:, first_v:].reshape(want.shape), want, kind, head_dim)
            for token, slot in enumerate(data["slots"].tolist()):
                block, offset = divmod(max(slot, 0), shape["block_size"])
                stored = v_of_normed.reshape(-1, kv_heads, shape["block_size"], head_dim)[block, :, offset]
                if slot >= 0:
                    assert_bitwise(stored, normed[token, first_v:].reshape(kv_heads, head_dim))
            if head_dim > 8:  # shorter ones fill the beginnings of their rows, whose ends stay
                size = head_dim // 16 * 8
                short = data["qkv"][:, first_v:].reshape(tokens, kv_heads, head_dim)[..., :size].reshape(tokens, -1)
                of_short = {**data, "qkv": np.hstack([data["qkv"][:, :first_v], short])}
                own, own_k, own_v = _rope_call(gpu, kind, {**shape, "value_dim": size}, of_short, shape["pad"])
                assert_bitwise(own, np.hstack([got[:, :first_v], short]))
                assert_bitwise(own_k, k_cache)
                assert_bitwise(own_v, np.hstack([v_cache[:, :size], data["cache"][:, size:]]))
            queries = {**data, "qkv": data["qkv"][:, : heads * head_dim], "slots": None}
            assert_bitwise(_rope_call(gpu, kind, {**shape, "kv_heads": 0}, queries, 8)[0], got[:, : heads * head_dim])
            if shape["norm"] or not rotary:
                continue
            rows, q_size = data["qkv"][:, :first_v], heads * head_dim
            q = rows[:, :q_size].reshape(tokens, heads, head_dim)
            elsewhere = rows.copy()
            elsewhere[:, :q_size].reshape(tokens, heads, head_dim)[..., :rotary] = encode(np.float32(np.nan), kind)
            turned = {**data, "qkv": elsewhere, "q_turned": q[..., :rotary].reshape(tokens, heads * rotary)}
            latent = _rope_call(gpu, kind, shape, turned, shape["pad"], has_v=False)
            assert_bitwise(latent[0], got[:, :first_v])
            assert_bitwise(latent[1], k_cache)
            assert_bitwise(latent[2], data["cache"])
        gpu.close()


# ---------------------------------------------------------------------------------------------- rowwise.cu


def embedding(gpu: Gpu, shapes: list[Shape]) -> None:
    """Rows of a packed table times the multiplier; NaN for an id that is none."""
    for shape in shapes:
        tokens, width, vocab_size, pad = (shape[n] for n in ("rows", "width", "vocab_size", "pad"))
        multiplier = np.float32(shape["multiplier"])
        ids = np.random.default_rng(shape["seed"]).integers(0, vocab_size, tokens).astype(np.int32)
        ids[-1] = vocab_size - 1
        bad = {0: -1, tokens // 2: vocab_size} if tokens > 2 else {}
        ids[list(bad)] = list(bad.values())
        for kind in KINDS:
            rows, exact = _stored(shape["seed"], kind, vocab_size, width)
            table = rows if kind == "f32" else pack(exact, kind=kind)
            out = Frame(gpu, kind, (tokens, width), pad)
            gpu.call(
                "embed", gpu.upload(ids), gpu.upload(table), vocab_size, width, KINDS.index(kind), out.pointer,
                _long(out.stride), tokens, float(multiplier),
            )  # fmt: skip
            got = out.get()
            good = np.setdiff1d(np.arange(tokens), list(bad))
            assert_bitwise(got[good], encode(decode(rows[ids[good]], kind) * multiplier, kind))
            assert np.isnan(decode(got[list(bad)], kind)).all()


ACTIVATIONS = ("silu", "gelu_tanh", "clamped_swiglu", "relu2", "sigmoid", "gelu", "quick_gelu", "relu", "xielu")
ACTIVATIONS += ("clamped_silu", "softplus")  # by their numbers
ALPHAS = (0.75, 1.25)  # of xielu, exact in float32
LIMIT = 0.75  # of clamped_silu
GATES = (ACTIVATIONS.index("sigmoid"), ACTIVATIONS.index("softplus"))


def act_mul(gpu: Gpu, shapes: list[Shape]) -> None:
    """Large gates of both signs too; up behind gate, or in rows of its own, where the result may take gate's place."""
    for shape in shapes:
        rows, width, pad = shape["rows"], shape["width"], shape["pad"]
        for kind in KINDS:
            x, exact = _stored(shape["seed"], kind, rows, 2 * width, scale=shape["scale"])
            gate, up = exact[:, :width], exact[:, width:]
            for number, activation in enumerate(ACTIVATIONS):
                dx, out = of(gpu, x, kind, pad), Frame(gpu, kind, (rows, width), 2 * pad)
                alone, apart = of(gpu, x[:, :width], kind, pad), of(gpu, x[:, width:], kind, 8)
                behind = ctypes.c_void_p((dx.pointer.value or 0) + width * x.itemsize)
                for frame, ups, stride, to in (
                    (dx, behind, dx.stride, out),
                    (alone, apart.pointer, apart.stride, alone),
                ):
                    gpu.call(
                        "multiply_gate", frame.pointer, ups, to.pointer, _long(frame.stride), _long(stride),
                        _long(to.stride), rows, width, number, KINDS.index(kind),
                        *map(ctypes.c_float, (*ALPHAS, LIMIT)), 1,
                    )  # fmt: skip
                assert_bitwise(alone.get(), out.get())
                want = (
                    oracle.xielu(gate, *ALPHAS) * up
                    if activation == "xielu"
                    else oracle.join(activation, gate, up, LIMIT)
                )
                if kind == "f16":  # which squares may be too large for
                    want = np.where(np.abs(want) >= 65520, np.copysign(np.inf, want), want)
                # An error in the exponent of e^-2u is one of the result, of |2u| times the size.
                exponent = 1.6 * np.abs(gate) * (1 + 0.045 * gate**2) * number
                # exp(89) is infinite: 0 instead of 1e-36
                scale = 1e-28 + np.abs(want) * (1 + exponent)
                if activation == "xielu":  # a sum, whose terms may cancel each other
                    scale += 2 * np.abs(gate * up) * (1 + np.abs(gate))
                assert_close(out.get(), want, kind, 1, scale=scale)


def gate_of_heads(gpu: Gpu, shapes: list[Shape]) -> None:
    """One element of the gate for each group of columns has the bits of as many equal elements."""
    for shape in shapes:
        rows, width = shape["rows"], shape["width"]
        for kind in KINDS:
            gate, _ = _stored(shape["seed"], kind, rows, width // 8)
            up, _ = _stored(shape["seed"] + 1, kind, rows, width)
            got = []
            for group, activation in itertools.product((8, 1), GATES):
                of_gate = of(gpu, gate if group > 1 else np.repeat(gate, 8, axis=1), kind, 3 if group > 1 else 8)
                of_up, out = of(gpu, up, kind, 8), Frame(gpu, kind, (rows, width), 8)
                gpu.call(
                    "multiply_gate", of_gate.pointer, of_up.pointer, out.pointer, _long(of_gate.stride),
                    _long(of_up.stride), _long(out.stride), rows, width, activation, KINDS.index(kind),
                    *map(ctypes.c_float, (*ALPHAS, LIMIT)), group,
                )  # fmt: skip
                got.append(out.get())
            for shared, apart in zip(got[:2], got[2:], strict=True):
                assert_bitwise(shared, apart)


def clip(gpu: Gpu, shapes: list[Shape]) -> None:
    """Columns between others, in place or not; bounds are rounded as what they bound."""
    for shape in shapes:
        rows, width, pad = shape["rows"], shape["width"], shape["pad"]
        for kind in KINDS:
            x, exact = _stored(shape["seed"], kind, rows, width, scale=shape["scale"])
            x[0, 0] = encode(np.float32(np.nan), kind)
            dx, out = of(gpu, x, kind, pad), Frame(gpu, kind, (rows, width), 2 * pad)
            low, high = np.float32(-0.3 * shape["scale"]), np.float32(0.7 * shape["scale"])
            for to in (out, dx):
                gpu.call(
                    "clip_rows", dx.pointer, _long(dx.stride), to.pointer, _long(to.stride), rows, width, float(low),
                    float(high), KINDS.index(kind),
                )  # fmt: skip
                got = to.get()
                assert np.isnan(decode(got[0, :1], kind)).all()
                want = encode(np.clip(exact.astype(np.float32), low, high), kind)
                want[0, 0] = got[0, 0]
                assert_bitwise(got, want)


def soft_cap(gpu: Gpu, shapes: list[Shape]) -> None:
    """In place; of any number of columns."""
    for shape in shapes:
        rows, width, cap = shape["rows"], shape["width"] - shape["rows"] % 3, 30.0
        x, exact = _stored(shape["seed"], "f32", rows, width, scale=shape["scale"])
        dx = of(gpu, x, "f32", shape["pad"])
        gpu.call("cap_rows", dx.pointer, _long(dx.stride), rows, width, cap)
        assert_close(dx.get(), oracle.soft_cap(exact, cap), "f32", 1, scale=cap)


def gather_rows(gpu: Gpu, shapes: list[Shape]) -> None:
    for shape in shapes:
        rows, width, pad = shape["rows"], shape["width"], shape["pad"]
        index = np.random.default_rng(shape["seed"]).integers(0, rows, 2 * rows + 1).astype(np.int32)
        for kind in KINDS:
            x = _stored(shape["seed"], kind, rows, width)[0]
            dx, out = of(gpu, x, kind, pad), Frame(gpu, kind, (len(index), width), 2 * pad)
            gpu.call(
                "gather", dx.pointer, gpu.upload(index), out.pointer, _long(dx.stride), _long(out.stride), len(index),
                width, KINDS.index(kind),
            )  # fmt: skip
            assert_bitwise(out.get(), x[index])


def join_columns(gpu: Gpu, shapes: list[Shape]) -> None:
    """Matrices below each other come to lie side by side, in wider rows."""
    for shape in shapes:
        parts, rows, columns = shape["parts"], shape["rows"], shape["columns"]
        x = _stored(shape["seed"], "f32", parts * rows, columns)[0]
        out = Frame(gpu, "f32", (rows, parts * columns), shape["pad"])
        gpu.call("join", gpu.upload(x), out.pointer, _long(out.stride), parts, rows, columns)
        assert_bitwise(out.get(), x.reshape(parts, rows, columns).swapaxes(0, 1).reshape(rows, -1))


def update_step(gpu: Gpu, shapes: list[Shape]) -> None:
    """Ids of the step before, where there are any, and entries of the table; either part may be empty."""
    for shape in shapes:
        num_tokens, num_rows, num_entries = shape["tokens"], shape["rows"], shape["entries"]
        rng = np.random.default_rng(shape["seed"])
        previous = rng.integers(-3, 1000, num_rows).astype(np.int32)
        rows = rng.integers(-1, num_rows, num_tokens + 1).astype(np.int32)
        ids, table = rng.integers(0, 1000, num_tokens + 1).astype(np.int32), np.arange(501, dtype=np.int32)
        entries = np.stack([rng.permutation(501), rng.integers(0, 9, 501)], 1).astype(np.int32)[: num_entries + 1]
        dids, dtable = gpu.upload(ids), gpu.upload(table)
        gpu.call(
            "update", gpu.upload(previous), gpu.upload(rows), dids, num_tokens, dtable, gpu.upload(entries), num_entries
        )
        table[entries[:num_entries, 0]] = entries[:num_entries, 1]
        taken = np.where(rows < 0, ids, np.maximum(previous[rows], 0))
        taken[num_tokens:] = ids[num_tokens:]
        assert_bitwise(gpu.download(dids), taken)
        assert_bitwise(gpu.download(dtable), table)


def sum_parts(gpu: Gpu, shapes: list[Shape]) -> None:
    """float32 additions in the order of the parts, rounded once: exact to the bit; minus zeros stay."""
    for shape in shapes:
        num_parts, width = shape["rows"], shape["width"]
        for kind in KINDS:
            parts = _stored(shape["seed"], kind, num_parts, width, scale=shape["scale"])[0]
            parts[:, 0] = encode(np.float32(-0.0), kind)
            flat, out = of(gpu, parts.reshape(1, -1), kind), Frame(gpu, kind, (1, width), 8)
            gpu.call("add_parts", flat.pointer, out.pointer, num_parts, _long(width), KINDS.index(kind))
            total = decode(parts[0], kind)
            for part in parts[1:]:
                total = total + decode(part, kind)
            assert_bitwise(out.get()[0], encode(total, kind))


def convert(gpu: Gpu, counts: list[int]) -> None:
    """Every pair of types, any count; overflow and subnormals of f16 among the values."""
    for count in counts:
        values = normal(count, 1, count) * np.float32(10.0) ** np.linspace(-9, 9, count, dtype=np.float32)
        for source in KINDS:
            with np.errstate(over="ignore"):
                stored = encode(values, source)
                expected = {kind: encode(decode(stored, source), kind) for kind in KINDS}
            src = of(gpu, stored, source)
            for target in KINDS:
                dst = Frame(gpu, target, (1, count))
                gpu.call(
                    "convert_elements", src.pointer, KINDS.index(source), dst.pointer, KINDS.index(target), _long(count)
                )
                assert_bitwise(dst.get(), expected[target])


def pack_weight(gpu: Gpu, shapes: list[Shape]) -> None:
    """The layout of packing.py, bit for bit: in parts, with padding, from every type into every type."""
    for shape in shapes:
        order, parts, k, head_dim = shape["order"], shape["parts"], shape["k"], shape["head_dim"]
        n = sum(parts)
        for source in KINDS:
            stored = encode(normal(shape["seed"], n, k), source)
            values = decode(stored, source)
            for target in KINDS:
                want = values if target == "f32" else pack(values, order, head_dim, target)
                empty = np.zeros((1, want.size), want.dtype)
                data = of(gpu, empty, target)
                first = 0
                for rows in parts:
                    part = of(gpu, stored[first : first + rows], source)
                    gpu.call(
                        "pack_rows", part.pointer, KINDS.index(source), first, rows, data.pointer, n, k,
                        KINDS.index(target), ORDERS.index(order), head_dim,
                    )  # fmt: skip
                    first += rows
                assert_bitwise(data.get().reshape(want.shape), want)


# ---------------------------------------------------------------------------------------------- linear_f32.cu


def _linear(gpu: Gpu, x: Array, weight: Array, bias: Array | None, residual: Array | None, shape: Shape) -> Array:
    gate_up, pad = shape["gate_up"], shape["pad"]
    n, k = weight.shape
    width = n // 2 if gate_up else n
    dx, out = of(gpu, x, "f32", pad), Frame(gpu, "f32", (len(x), width), 2 * pad)
    added = of(gpu, residual, "f32", 3 * pad) if residual is not None else None
    gpu.call(
        "multiply_f32", dx.pointer, _long(dx.stride), len(x), gpu.upload(weight),
        None if bias is None else gpu.upload(bias), n, k, int(gate_up), shape["activation"],
        added.pointer if added else None,
        _long(added.stride if added else 0), out.pointer, _long(out.stride),
    )  # fmt: skip
    return out.get()


def linear_f32(gpu: Gpu, shapes: list[Shape]) -> None:
    """With and without bias, residual and activation(gate) * up; alone as among others."""
    for shape in shapes:
        tokens, n, k, seed = (shape[name] for name in ("rows", "n", "k", "seed"))
        width = n // 2 if shape["gate_up"] else n
        x, weight = normal(seed, tokens, k), normal(seed + 1, n, k)
        bias = normal(seed + 2, n) if shape["bias"] else None
        residual = normal(seed + 3, tokens, width) if shape["residual"] else None
        got = _linear(gpu, x, weight, bias, residual, shape)
        want = x.astype(F64) @ weight.T.astype(F64) + (0 if bias is None else bias)
        size: Array = np.sqrt(float(k)) * np.ones((tokens, width))
        if shape["gate_up"]:
            gate, up = want[:, :width], want[:, width:]
            size = size * (1 + np.abs(gate) + np.abs(up))
            want = list(oracle.ACTIVATIONS.values())[shape["activation"]](gate) * up
        if residual is not None:
            want = want + residual
        assert_close(got, want, "f32", k, size)
        row = slice(tokens // 2, tokens // 2 + 1)
        alone = _linear(gpu, x[row], weight, bias, None if residual is None else residual[row], shape)
        assert_bitwise(alone, got[row])
