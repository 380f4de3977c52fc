"""Cases for cuda/experts and linears of listed rows against float64 numpy, and bit for bit against other kernels."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np
from emulation import ROOT, Array, Gpu
from frames import KINDS, UNIT, Frame, assert_bitwise, assert_close, decode, encode, normal, of
from packing import ORDERS, pack
from quantised import FORMATS, GROUP, dequantise, pack as pack_quantised, quantise

sys.path.insert(0, str(ROOT / "tests"))
from gguf_files import block_formulas
from reference import ops as oracle

MAX_DENSE = 64  # tokens of linear_decode
WEIGHT = np.dtype([("data", np.uint64), ("bias", np.uint64), ("scale", np.float32), ("padding", np.float32)])
MAP_BYTES, ITEM_ROWS = 128, 128  # of linear_grouped_sm90
JOINED = ("together", "apart", "in_out")


def _long(value: int) -> ctypes.c_int64:
    return ctypes.c_int64(value)


# ---------------------------------------------------------------------------------------------- route


def route(gpu: Gpu, shapes: list[dict[str, Any]]) -> None:
    """Experts and weights of each token; one whose logits are bad says so in its weights."""
    for shape in shapes:
        tokens, experts, top_k, groups = (shape[name] for name in ("tokens", "experts", "top_k", "groups"))
        logits = normal(shape["seed"], tokens, experts) * np.float32(3)
        bias = normal(shape["seed"] + 1, experts) if shape["corrected"] else None
        scales = normal(shape["seed"] + 2, experts) if shape["scaled"] else None
        is_bad = np.zeros(tokens, bool)
        if tokens > 2:
            is_bad[[0, tokens - 1]] = True
            logits[0, experts // 2], logits[-1, 0] = np.nan, np.inf
        given = of(gpu, logits, "f32", 3)
        weights = Frame(gpu, "f32", (tokens, top_k), 1)
        ids = gpu.upload(np.full((tokens, top_k + 2), -7, np.int32))
        gpu.call(
            "run_route", given.pointer, _long(given.stride), None if bias is None else gpu.upload(bias), ids,
            _long(top_k + 2), weights.pointer, _long(weights.stride), tokens, experts, top_k, int(shape["sigmoid"]),
            int(shape["normalize"]), 2.5, groups, shape["top_groups"], shape["group_best"],
            None if scales is None else gpu.upload(scales),
        )  # fmt: skip
        got_ids, got = gpu.download(ids), weights.get()
        assert (got_ids[:, top_k:] == -7).all()
        got_ids = got_ids[:, :top_k]
        np.testing.assert_array_equal(got_ids[is_bad], np.broadcast_to(np.arange(top_k), (is_bad.sum(), top_k)))
        assert np.isnan(got[is_bad]).all()
        wide = logits[~is_bad].astype(np.float64)
        scores = 1 / (1 + np.exp(-wide)) if shape["sigmoid"] else oracle.softmax(wide)
        choice = scores if bias is None else scores + bias
        want_ids = oracle.best_experts(choice, top_k, groups, shape["top_groups"], shape["group_best"])
        np.testing.assert_array_equal(got_ids[~is_bad], want_ids)
        want = np.take_along_axis(scores, want_ids, 1)
        want = want / want.sum(1, keepdims=True) if shape["normalize"] else want
        want = want if scales is None else want * scales[want_ids]
        assert_close(got[~is_bad], want * 2.5, "f32", experts)
        gpu.close()


# ---------------------------------------------------------------------------------------------- linears


def _grouped(gpu: Gpu, ids: Array, num_experts: int, tile: int) -> dict[str, Any]:
    """Sorts parts on the device; checks what comes."""
    tokens, top_k = ids.shape
    parts = tokens * top_k
    most = min(parts, num_experts) + parts // tile
    padded = np.full((tokens, top_k + 1), 10**6, np.int32)
    padded[:, :top_k] = ids
    order, part_of = gpu.empty(parts, np.int32), gpu.empty((tokens, top_k), np.int32)
    items, num_items = gpu.upload(np.full((most, 4), -1, np.int32)), gpu.empty(1, np.int32)
    gpu.call(
        "run_group_rows", gpu.upload(padded), _long(top_k + 1), tokens, top_k, num_experts, tile, order, part_of,
        items, num_items,
    )  # fmt: skip
    found = {"order": order, "part_of": part_of, "items": items, "num_items": num_items, "most_items": most}
    places = gpu.download(part_of)
    assert sorted(places.ravel().tolist()) == list(range(parts))
    np.testing.assert_array_equal(gpu.download(order)[places], np.broadcast_to(np.arange(tokens)[:, None], ids.shape))
    expert_of = np.empty(parts, np.int32)
    expert_of[places] = ids
    assert (np.diff(expert_of) >= 0).all()
    listed = gpu.download(items)[: int(gpu.download(num_items)[0])]
    assert (listed[:, 2] >= 1).all() and (listed[:, 2] <= tile).all() and (listed[:, 3] == 0).all()
    covered = [(first + i, expert) for expert, first, count, _ in listed.tolist() for i in range(count)]
    assert covered == list(enumerate(expert_of.tolist()))
    counts = np.bincount(ids.ravel(), minlength=num_experts)
    assert len(listed) == sum(-(-int(count) // tile) for count in counts)
    return found


def _pack(weight: Array, name: str, order: str, kind: str) -> Array:
    if name:
        return pack_quantised(quantise(weight, name), name, order, kind=kind)
    return weight if kind == "f32" else pack(weight, order, kind=kind)


def grouped(gpu: Gpu, shapes: list[dict[str, Any]]) -> None:
    """Each part has the bits that a dense linear gives its row; rows are listed on either side, or on none."""
    for shape in shapes:
        _grouped_shape(gpu, shape)
        gpu.close()


def _grouped_shape(gpu: Gpu, shape: dict[str, Any]) -> None:
    rng = np.random.default_rng(shape["seed"])
    n, k, experts, kind, name, tile = (shape[key] for key in ("n", "k", "experts", "kind", "name", "tile"))
    order = shape["order"]
    ids = np.argsort(rng.random((shape["tokens"], experts)), axis=1)[:, : shape["top_k"]].astype(np.int32)
    if shape["skewed"]:
        ids[:-5, 0] = 0
    lists = _grouped(gpu, ids, experts, tile)
    matrices = [_pack(normal(shape["seed"] + e, n, k) / np.float32(k**0.5), name, order, kind) for e in range(experts)]
    packed = [gpu.upload(matrix) for matrix in matrices]
    biases = [gpu.upload(normal(shape["seed"] - e - 1, n)) for e in range(experts)]
    table = np.zeros(experts, WEIGHT)
    for e in range(experts):
        table[e] = (packed[e].pointer, biases[e].pointer, 1, 0)
    weights = gpu.upload(table.view(np.uint8))
    rows, parts = encode(normal(shape["seed"] + 99, shape["tokens"], k), kind), ids.size
    width = n // 2 if order == "gate_up" else n
    x = of(gpu, rows, kind, 8)
    settings = (n, k, KINDS.index(kind), ORDERS.index(order), FORMATS.index(name))

    def call(out: Frame, residual: Frame | None, x: Frame, count: int, *chosen: Any) -> Array:
        residuals = (residual.pointer, _long(residual.stride)) if residual else (None, _long(0))
        gpu.call(
            "run_linear", *chosen, x.pointer, _long(x.stride), count, *settings, *residuals, out.pointer,
            _long(out.stride), None, 0,
        )  # fmt: skip
        return out.get()

    def dense(part_rows: Array, expert: int, residual: Array | None = None) -> Array:
        if len(part_rows) > MAX_DENSE:
            rest = None if residual is None else residual[MAX_DENSE:]
            first = dense(part_rows[:MAX_DENSE], expert, None if residual is None else residual[:MAX_DENSE])
            return np.concatenate([first, dense(part_rows[MAX_DENSE:], expert, rest)])
        added = None if residual is None else of(gpu, residual, kind)
        none = (None, None, None, 0, tile, None, None)
        out = Frame(gpu, kind, (len(part_rows), width), 8)
        return call(out, added, of(gpu, part_rows, kind), len(part_rows), packed[expert], biases[expert], *none)

    listed = (None, None, weights, lists["items"], lists["num_items"], lists["most_items"], tile)
    got = call(Frame(gpu, kind, (parts, width), 8), None, x, parts, *listed, lists["order"], None)
    places = gpu.download(lists["part_of"])
    for expert in range(experts):
        tokens, slots = np.nonzero(ids == expert)
        if len(tokens):
            assert_bitwise(got[places[tokens, slots]], dense(rows[tokens], expert))
    if shape["top_k"] > 1:
        return
    # One part for each token: rows of x in their order, those of out listed, and what was there stays.
    residual = encode(normal(shape["seed"] + 7, shape["tokens"], width), kind)
    out, sorted_x = of(gpu, residual, kind, 8), of(gpu, rows[gpu.download(lists["order"])], kind)
    got = call(out, out, sorted_x, parts, *listed, None, lists["order"])
    for expert in range(experts):
        tokens = np.nonzero(ids[:, 0] == expert)[0]
        if len(tokens):
            assert_bitwise(got[tokens], dense(rows[tokens], expert, residual[tokens]))


def by_wgmma(gpu: Gpu, shapes: list[dict[str, Any]]) -> None:
    """Rows by wgmma are near their float64 results, and have the bits of linear_grouped for any size of items."""
    for shape in shapes:
        _by_wgmma(gpu, shape)
        gpu.close()


def _numbers(gpu: Gpu, seed: int, name: str, order: str, kind: str, n: int, k: int) -> tuple[Array, Any]:
    """A weight as float64, and packed on the device: blocks of files where these are its format."""
    if name not in block_formulas.SIZES:
        floats = normal(seed, n, k) / np.float32(k**0.5)
        if not name:
            stored = encode(floats, kind)
            return decode(stored, kind).astype(np.float64), gpu.upload(pack(floats, order, kind=kind))
        numbers = quantise(floats, name)
        exact = dequantise(numbers, name)
        if name in GROUP:  # products with scales of groups are rounded; scales of rows meet sums
            scales = numbers.rows.astype(np.float64)[:, None]
            exact = decode(encode((exact / scales).astype(np.float32), kind), kind).astype(np.float64) * scales
        return exact, gpu.upload(pack_quantised(numbers, name, order, kind=kind))
    size, number = block_formulas.SIZES[name][0], FORMATS.index(name.lower())
    blocks = block_formulas.random_blocks(name, n * k // size, seed).reshape(n, -1)
    exact = decode(encode(block_formulas.dequantise(name, blocks).reshape(n, k).astype(np.float32), kind), kind)
    data = gpu.upload(np.zeros(gpu.lib.quantised_bytes(n, k, number), np.uint8))
    where = (n, k, KINDS.index(kind), ORDERS.index(order), 0)
    gpu.call("blocks_to_rows", gpu.upload(blocks), name.encode(), 0, n, data, *where)
    return exact.astype(np.float64), data


def _by_wgmma(gpu: Gpu, shape: dict[str, Any]) -> None:
    counts, n, k, kind, name = (shape[key] for key in ("counts", "n", "k", "kind", "name"))
    order, joined, seed = shape["order"], shape["joined"], shape["seed"]
    rng, experts = np.random.default_rng(seed), len(counts)
    ids = rng.permutation(np.repeat(np.arange(experts), counts)).astype(np.int32)[:, None]
    found = [_numbers(gpu, seed + e, name, order, kind, n, k) for e in range(experts)]
    biases = normal(seed + 97, experts, n)
    table = np.zeros(experts, WEIGHT)
    for e, (_, packed) in enumerate(found):
        table[e] = (packed.pointer, gpu.upload(biases[e]).pointer if shape["bias"] else 0, 1, 0)
    maps, number = np.zeros(experts * MAP_BYTES, np.uint8), FORMATS.index(name.lower())
    gpu.call(
        "run_weight_maps", ctypes.c_void_p(table.ctypes.data), experts, n, k, KINDS.index(kind), number,
        ctypes.c_void_p(maps.ctypes.data),
    )  # fmt: skip
    weights, on_device = gpu.upload(table.view(np.uint8)), gpu.upload(maps)
    width = n // 2 if order == "gate_up" and joined == "together" else n
    x, gates = encode(normal(seed + 99, len(ids), k), kind), encode(normal(seed + 98, len(ids), n), kind)

    def run(tile: int) -> Array:
        lists = _grouped(gpu, ids, experts, tile)
        places, sources = gpu.download(lists["part_of"])[:, 0], gpu.download(lists["order"])
        rows = of(gpu, x[sources], kind, 8)
        out = of(gpu, gates[sources], kind, 16) if joined == "in_out" else Frame(gpu, kind, (len(ids), width), 16)
        gpu.call(
            "run_linear", None, None, weights, lists["items"], lists["num_items"], lists["most_items"], tile, None,
            None, rows.pointer, _long(rows.stride), len(ids), n, k, KINDS.index(kind), ORDERS.index(order), number,
            None, _long(0), out.pointer, _long(out.stride), on_device if tile == ITEM_ROWS else None,
            JOINED.index(joined),
        )  # fmt: skip
        return out.get()[places]

    got = run(ITEM_ROWS)
    for tile in (8, 32, 64):
        assert_bitwise(got, run(tile))
    values, unit = decode(x, kind).astype(np.float64), UNIT[kind]
    for e, (exact, _) in enumerate(found):
        own = ids[:, 0] == e
        y = values[own] @ exact.T + (biases[e] if shape["bias"] else 0)
        size = np.abs(values[own]) @ np.abs(exact.T) / k**0.5 + np.abs(biases[e])
        slack: Array | float = 0.0
        if width < n or joined == "in_out":
            gate, up, gate_slack, up_slack = decode(gates[own], kind).astype(np.float64), y, 0.0, 1.01 * unit * abs(y)
            if width < n:
                (gate, up), (gate_slack, up_slack) = np.split(y, 2, 1), np.split(1.01 * unit * abs(y), 2, 1)
                size = 2 * size[:, :width] * size[:, width:]
            else:
                size = 2 * size * (1 + np.abs(gate))
            y = gate / (1 + np.exp(-gate)) * up
            slack = 1.1 * gate_slack * (abs(up) + up_slack) + (abs(gate) + gate_slack) * up_slack
        assert_close(got[own], y, kind, k, size, slack)


def weigh(gpu: Gpu, shapes: list[dict[str, Any]]) -> None:
    """A token, or it times the weight of each of its parts, where that part is in the order of experts."""
    for shape in shapes:
        tokens, top_k, width, kind, seed = (shape[key] for key in ("tokens", "top_k", "width", "kind", "seed"))
        x, weights = encode(normal(seed, tokens, width), kind), normal(seed + 1, tokens, top_k)
        part_of = np.random.default_rng(seed).permutation(tokens * top_k).reshape(tokens, top_k).astype(np.int32)
        placed, weighed, out = (
            of(gpu, x, kind, 16),
            of(gpu, weights, "f32", 1),
            Frame(gpu, kind, (part_of.size, width), 8),
        )
        gpu.call(
            "run_weigh", placed.pointer, _long(placed.stride), gpu.upload(part_of),
            weighed.pointer if shape["weighed"] else None, _long(weighed.stride), out.pointer, _long(out.stride),
            tokens, top_k, width, KINDS.index(kind),
        )  # fmt: skip
        factors = weights[..., None] if shape["weighed"] else np.ones((tokens, top_k, 1), np.float32)
        products = factors * decode(x, kind)[:, None]  # [tokens, top_k, width] float32
        assert_bitwise(out.get()[part_of], encode(products, kind))
        gpu.close()


def combine(gpu: Gpu, shapes: list[dict[str, Any]]) -> None:
    """The sum of a token's parts, the shared expert, and the residual, which may be where the result goes."""
    for shape in shapes:
        tokens, top_k, width, kind, seed = (shape[key] for key in ("tokens", "top_k", "width", "kind", "seed"))
        rng = np.random.default_rng(seed)
        stored = {name: encode(normal(seed + i, tokens, width), kind) for i, name in enumerate(("shared", "residual"))}
        parts, gates = encode(normal(seed + 2, tokens * top_k, width), kind), normal(seed + 3, tokens, 1)
        part_of = rng.permutation(tokens * top_k).reshape(tokens, top_k).astype(np.int32)
        weights = normal(seed + 4, tokens, top_k)
        frames = {name: of(gpu, stored[name], kind, 8) for name in stored if shape[name]}
        gate = of(gpu, gates, "f32", 7) if shape["gated"] else None
        weighed = of(gpu, weights, "f32", 1)
        out = frames["residual"] if shape["residual"] else Frame(gpu, kind, (tokens, width), 8)
        placed = of(gpu, parts, kind, 16)
        pointers = [
            (frame.pointer, _long(frame.stride)) if frame else (None, _long(0))
            for frame in (frames.get("shared"), gate, frames.get("residual"))
        ]
        gpu.call(
            "run_combine", placed.pointer, _long(placed.stride), gpu.upload(part_of), weighed.pointer,
            _long(weighed.stride), *pointers[0], *pointers[1], *pointers[2], out.pointer, _long(out.stride), tokens,
            top_k, width, KINDS.index(kind),
        )  # fmt: skip
        values = decode(parts, kind).astype(np.float64)[part_of]  # [tokens, top_k, width]
        want = (values * weights[..., None]).sum(1)
        size = np.abs(values * weights[..., None]).sum(1)
        if shape["shared"]:
            shared = decode(stored["shared"], kind) / (1 + np.exp(-gates.astype(np.float64)) if shape["gated"] else 1)
            want, size = want + shared, size + np.abs(shared)
        slack: Array | float = 0.0
        if shape["residual"]:
            slack = 0.0 if kind == "f32" else 1.01 * UNIT[kind] * np.abs(want)
            want = want + decode(stored["residual"], kind)
        assert_close(out.get(), want, kind, top_k + 1, size, slack)
        gpu.close()
