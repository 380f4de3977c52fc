"""Cases for attention and attention_f32: against float64, and bit for bit however the work is cut or shared.

Caches hold the keys in shuffled blocks, NaN everywhere else and where no query sees them; blocks wholly unseen are not
in the table; q is a part of wider rows, NaN besides; out lies between guards.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from emulation import ROOT, Array, Buffer, Gpu, from_16, to_16
from numpy.typing import NDArray

sys.path.insert(0, str(ROOT / "tests"))
from quantised import from_8_bits, to_8_bits
from reference import ops as oracle

F64 = np.float64
TYPES = {"f32": 0, "bf16": 1, "f16": 2, "int8": 3, "fp8": 4}
UNIT = {"f32": 2.0**-24, "bf16": 2.0**-8, "f16": 2.0**-11}  # half of the distance between neighbours of 1
AMPLE = 1 << 20  # rows of partial results: there is room for all
CHUNK, AT_ONCE = 128, 4  # keys; chunks that a block takes at a time
NUM_SMS = 4  # that lists are made for, unless said otherwise
Part = tuple[int, int, int]  # sequence, first query, past the last query


def _store(values: Array, kind: str) -> Array:
    return values.astype(np.float32) if kind == "f32" else to_16(values, kind)


def _load(bits: Array, kind: str) -> Array:
    return (bits if kind == "f32" else from_16(bits, kind)).astype(F64)


def row_floats(head_dim: int) -> int:
    """Float32 numbers of a row of partial results."""
    return next(width for width in (32, 64, 80, 96, 128, 256, 512, 576) if head_dim <= width) + 4


@dataclass(frozen=True)
class Work:
    """The list of one window: `array` as kernels read it, and its parts."""

    array: NDArray[np.int32]  # [len(prefill) + 4 * num_decode, 4]
    prefill: NDArray[np.int32]  # [.., 4]: seq, tile
    # [.., 16], without the empty ones: seq, row0, first_chunk, slot; first_token, query_len, context_len, width; blocks
    decode: NDArray[np.int32]
    num_decode: int  # with the empty ones
    num_rows: int  # of partial results

    @property
    def width(self) -> int:
        """Chunks of an item that is not all of its tile."""
        return int(self.decode[0, 7]) if len(self.decode) else 1


def first_key(end: int, window: int, chunked: bool) -> int:
    """The first of the keys up to `end` that a row sees."""
    if not window:
        return 0
    return (end - 1) // window * window if chunked else max(0, end - window)


def list_work(
    gpu: Gpu,
    edges: NDArray[np.int32],
    contexts: Sequence[int],
    heads: tuple[int, int],
    head_dim: int,
    window: int,
    num_rows: int,
    num_sms: int,
    value_dim: int = 0,
    chunked: bool = False,
    two_way: bool = False,
    spans: Sequence[bool] = (),
    table: NDArray[np.int32] | None = None,
    block_size: int = 0,
) -> Work:
    """What there is to do for sequences of these contexts, whose queries end at `edges[1:]`; spans: see `Case`.

    table: [num_seqs, columns], where items are to have the numbers of their first blocks.
    """
    capacity = 64 + 8 * (sum(contexts) * heads[0] + 2 * len(contexts))
    array, known, lengths = np.empty((capacity, 4), np.int32), np.empty(3, np.int64), np.array(contexts, np.int32)
    listing, pointers = gpu.lib.attention_list, [ctypes.c_void_p(a.ctypes.data) for a in (edges, lengths, array, known)]
    flags = np.array(spans, np.int32)
    columns = 0 if table is None else table.shape[1]
    blocks = None if table is None else ctypes.c_void_p(table.ctypes.data)
    listing.restype = ctypes.c_int64
    room = ctypes.c_int64(4 * row_floats(head_dim) * num_rows)
    count = listing(
        len(contexts), *pointers[:2], *heads, head_dim, value_dim or head_dim, window, int(chunked), int(two_way),
        ctypes.c_void_p(flags.ctypes.data) if len(flags) else None, blocks, ctypes.c_int64(columns), block_size,
        num_sms, room, pointers[2], ctypes.c_int64(capacity), pointers[3],
    )  # fmt: skip
    num_decode, num_prefill, decode_begin = known.tolist()
    assert count == num_prefill + 4 * num_decode and decode_begin == num_prefill, (count, known)
    items = array[decode_begin:count].reshape(num_decode, 16)
    decode = items[items[:, 0] >= 0]
    places = 0 if len(decode) == 0 else max(16, 1 << (len(decode) - 1).bit_length())
    assert num_decode == places and (items[len(decode) :, 0] == -1).all(), (
        "empty items are at the end, as few as may be"
    )
    assert (decode[:, 4] == edges[decode[:, 0]]).all() and (decode[:, 6] == lengths[decode[:, 0]]).all()
    assert (decode[:, 5] == np.diff(edges)[decode[:, 0]]).all() and (decode[:, 7] == decode[:1, 7]).all()
    used, group = 0, heads[0] // heads[1]
    for seq, row0, _, slot in decode[decode[:, 3] >= 0, :4]:
        queries = int(edges[seq + 1] - edges[seq])
        last = min(row0 + 16, queries * group) - 1
        first = contexts[seq] - queries + 1 + row0 // group
        sees_all = (two_way and not window) or (len(flags) > 0 and flags[seq])
        ahead = contexts[seq] if sees_all else window - 1 if two_way else 0
        end = min(contexts[seq], contexts[seq] - queries + 1 + last // group + ahead)
        chunks = -(-end // CHUNK) - first_key(first, window, chunked) // CHUNK
        used = max(used, int(slot) + chunks * (last + 1 - row0) * heads[1])
    assert used <= num_rows
    return Work(array[:count], array[:num_prefill], decode, num_decode, used)


@dataclass(frozen=True)
class Case:
    """Sequences are (context, queries): the queries are the last of the context. block_size 0: one block each."""

    kind: str
    heads: tuple[int, int]  # num_heads, num_kv_heads
    head_dim: int
    sequences: tuple[tuple[int, int], ...]
    block_size: int = 16
    window: int = 0
    pad: int = 0  # elements after a row
    score_cap: float = 0.0
    seed: int = 0
    sinks: bool = False
    value_dim: int = 0  # a value is so many elements at the end of its key; 0: it is one of its own
    own_values: bool = False  # it is so many elements at the beginning of its own row
    chunked: bool = False  # the window does not slide
    two_way: bool = False  # keys behind a query's position are seen, too
    position_bias: bool = False
    spans: tuple[bool, ...] = ()  # sequences whose queries see all keys behind them
    cache: str = ""  # "int8" or "fp8", with a scale for each row; else of the kind

    @property
    def out_dim(self) -> int:
        """Columns of a head's output."""
        return self.value_dim or self.head_dim


@dataclass(frozen=True)
class Store:
    """What is left to do of q, k and v of sequences of one token each."""

    fused: bool  # by attention; else by a kernel in front of it
    norms: bool
    rotary_dim: int  # 0: no RoPE
    own_kv: bool  # else there is q alone


class Problem:
    """A case's values and its caches on the device."""

    def __init__(self, gpu: Gpu, case: Case, same_as: Problem | None = None) -> None:
        """same_as: a problem whose cache holds the same values in another way."""
        self.gpu, self.case = gpu, case
        rng = np.random.default_rng(case.seed)
        (heads, kv_heads), dim, kind = case.heads, case.head_dim, case.kind
        self.scale = float(np.float32(dim**-0.5))
        self.sinks = (8 * rng.standard_normal(heads)).astype(np.float32) if case.sinks else None
        longest = max(c for c, _ in case.sequences)
        self.bias: Array | None = None  # [num_heads, distances]
        if case.position_bias:
            self.bias = (4 * rng.standard_normal((heads, 2 * longest - 1 + 2 * (case.seed % 2)))).astype(np.float32)
        self.q = [_store(2 * rng.standard_normal((n, heads, dim)), kind) for _, n in case.sequences]
        self.k, self.v = (
            [_store(rng.standard_normal((c, kv_heads, dim)), kind) for c, _ in case.sequences] for _ in range(2)
        )
        if same_as is not None:
            self.k, self.v = same_as.k, same_as.v
        elif case.own_values:
            self.v = [v[..., : case.value_dim] for v in self.v]
        kept = [self.k, self.v]  # as the cache has them, and the scales
        scales: list[list[Array]] = []
        if case.cache:
            pairs = [[to_8_bits(_load(x, kind), case.cache) for x in values] for values in kept]
            kept, scales = ([[pair[i] for pair in of] for of in pairs] for i in range(2))
            self.k, self.v = ([_store(from_8_bits(*pair, case.cache), kind) for pair in of] for of in pairs)
        if case.value_dim and not case.own_values:
            self.v = [k[..., dim - case.value_dim :] for k in self.k]
            kept[1:], scales[1:] = kept[:1], scales[:1]
        block_size = case.block_size or longest
        per_sequence = -(-longest // block_size)
        blocks = rng.permutation(len(case.sequences) * per_sequence + 3)
        self.block_size, self.table = block_size, np.full((len(case.sequences), per_sequence + 1), -1, np.int32)
        shape = blocks.size, kv_heads, block_size
        of_kind = [_store(np.full((*shape, dim), np.nan), kind) for _ in range(2)]
        caches = [rng.integers(0, 256, (*shape, dim), np.uint8) for _ in range(2)] if case.cache else of_kind
        of_rows = [np.full(shape, np.nan, np.float32) for _ in scales]
        for s, (context, queries) in enumerate(case.sequences):
            first = first_key(context - queries + 1, case.window, case.chunked)
            for i in range(first // block_size, -(-context // block_size)):
                self.table[s, i] = block = blocks[s * per_sequence + i]
                at = np.arange(max(i * block_size, first), min((i + 1) * block_size, context))
                for cache, values in zip(caches, kept, strict=True):
                    cache[block][:, at % block_size, : values[s].shape[2]] = values[s][at].transpose(1, 0, 2)
                for rows, of_values in zip(of_rows, scales, strict=True):
                    rows[block][:, at % block_size] = of_values[s][at].T
        self.caches: list[Any] = [gpu.upload(cache) for cache in caches]
        self.scales: list[Any] = [gpu.upload(rows) for rows in of_rows] or [None, None]
        self.wide: list[Any] = [gpu.upload(cache) for cache in of_kind] if case.cache else [None, None]
        if case.value_dim and not case.own_values:
            for buffers in (self.caches, self.wide):
                if (k := buffers[0]) is not None:
                    buffers[1] = Buffer(k.pointer + (dim - case.value_dim) * k.dtype.itemsize, (), k.dtype)

    def whole(self) -> list[Part]:
        return [(s, 0, n) for s, (_, n) in enumerate(self.case.sequences)]

    def run(
        self,
        parts: list[Part],
        num_rows: int = AMPLE,
        num_sms: int = NUM_SMS,
        known: bool = True,
        sm90: int = 0,
        store: Store | None = None,
    ) -> list[Array]:
        """One call whose sequences are the parts, in their order: the bits of out, by part.

        num_rows: that the workspace has for partial results, at most; num_sms: that its list is made for; known:
        items of decode have the numbers of their first blocks; sm90: 1: by attention_sm90, 2: in turns; store: q, k
        and v are drawn instead, and k and v go to the cache.
        """
        gpu, case = self.gpu, self.case
        heads, kv_heads = case.heads
        width, out_width, kind = heads * case.head_dim, heads * case.out_dim, case.kind
        queries = [end - begin for _, begin, end in parts]
        edges = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
        q_stride, out_stride = width + 2 * kv_heads * case.head_dim + case.pad, out_width + case.pad
        q = _store(np.full((max(edges[-1], 1), q_stride), np.nan), kind)
        for (s, begin, end), at in zip(parts, edges, strict=False):
            q[at : at + end - begin, :width] = self.q[s][begin:end].reshape(end - begin, width)
        rng, draws = np.random.default_rng(case.seed + 1), [None] * 5
        if store:
            q[:, : width + 2 * kv_heads * case.head_dim] = _store(
                rng.standard_normal((len(q), width + 2 * kv_heads * case.head_dim)), kind
            )
        contexts = [case.sequences[s][0] - case.sequences[s][1] + end for s, _, end in parts]
        guard = np.uint32(0x5A5A5A5A) if kind == "f32" else np.uint16(0x5A5A)
        out = gpu.upload(np.full((edges[-1] + 2, out_stride), guard))
        shape = case.heads, case.head_dim, case.window, num_rows, num_sms, case.out_dim, case.chunked, case.two_way
        spans = [case.spans[s] for s, _, _ in parts] if case.spans else []
        table = self.table[[s for s, _, _ in parts]]
        blocks = (table, self.block_size) if known else ()
        work = list_work(gpu, edges, contexts, *shape, spans, *blocks)
        rows = np.full((max(work.num_rows, 1), row_floats(case.head_dim)), -1, np.int32)  # NaN
        rows[:, -2] = 0  # where blocks are counted
        workspace = gpu.upload(rows)
        array = work.array if work.array.size else np.zeros((1, 4), np.int32)
        arrays = q, table, edges, np.array(contexts, np.int32), array
        inputs = [gpu.upload(a) for a in arrays]
        flags = np.array(spans, np.int32) if spans else None
        sinks, bias, flags = (None if a is None else gpu.upload(a) for a in (self.sinks, self.bias, flags))
        if store:
            last = [(s, case.sequences[s][0] - 1) for s, _, _ in parts]
            slots = [self.table[s, at // self.block_size] * self.block_size + at % self.block_size for s, at in last]
            norms = [rng.standard_normal(case.head_dim).astype(np.float32) for _ in range(3)]
            turns = rng.standard_normal((len(parts), store.rotary_dim)).astype(np.float32)
            draws = [
                np.array(slots, np.int64),
                *(norms if store.norms else [None] * 3),
                turns if store.rotary_dim else None,
            ]
        on_device = [None if a is None else gpu.upload(a) for a in draws]
        distances = 0 if self.bias is None else self.bias.shape[1]
        centre = None if bias is None else Buffer(bias.pointer + distances // 2 * 4, (), bias.dtype)
        row = Buffer(out.pointer + out_stride * guard.itemsize, (), out.dtype)
        gpu.call(
            "run_attention", sm90, TYPES[kind], inputs[0], *self.caches, *inputs[1:4], row, inputs[4], workspace,
            work.num_decode, len(work.prefill), q_stride, out_stride, self.table.shape[1],
            len(parts), heads, kv_heads, case.head_dim, case.out_dim, self.block_size, max(queries), self.scale,
            float(case.score_cap), case.window, int(case.chunked), int(case.two_way), sinks, flags, centre, distances,
            TYPES[case.cache or kind], *self.scales, *self.wide, 1 + store.fused if store else 0, len(parts),
            int(bool(store and store.own_kv)), *on_device, store.rotary_dim if store else 0,
        )  # fmt: skip
        got = gpu.download(out)
        assert (got[[0, -1]] == guard).all() and (got[:, out_width:] == guard).all(), "wrote outside of out"
        assert not gpu.download(workspace)[:, -2].any(), "a counter was left behind"
        for buffer in (out, workspace, *inputs, *(b for b in (sinks, bias, flags, *on_device) if b is not None)):
            gpu.free(buffer)
        values = got[1:-1, :out_width].view(np.float32) if kind == "f32" else got[1:-1, :out_width]
        return np.split(values.reshape(-1, heads, case.out_dim), edges[1:-1])

    def check(self, got: list[Array]) -> None:
        """Against float64.

        Weights, and so their sum, and outputs are rounded to the type: that bounds every element; being independent,
        their errors average to no more than the rounding of out by norm. The rest are float32 sums, as in tests/ops.
        """
        case, unit = self.case, UNIT[self.case.kind]
        spans = case.spans or (False,) * len(got)
        for bits, q, k, v, span in zip(got, self.q, self.k, self.v, spans, strict=True):
            if len(q) == 0:
                continue
            inputs = [_load(x, case.kind) for x in (q, k)]
            sinks, bias = (None if a is None else a.astype(F64) for a in (self.sinks, self.bias))
            scalars = self.scale, case.window, case.score_cap, sinks, case.chunked, case.two_way, bias, span
            want, magnitude = oracle.attention(*inputs, _load(v, case.kind), *scalars)
            rounded = oracle.attention(*inputs, np.abs(_load(v, case.kind)), *scalars)[0]
            sums = 8 * 2.0**-24 * (1 + (case.head_dim + len(k)) ** 0.5) * magnitude
            tiny = 2.0**-25 * len(k) * np.abs(_load(v, case.kind)).max()  # weights below f16's normal numbers
            error = np.abs(_load(bits, case.kind) - want)
            assert np.isfinite(error).all(), f"{case}: not finite"
            bound = unit * (rounded + 2 * np.abs(want)) + 4 * sums + tiny
            assert (error <= bound).all(), f"{case}: worst error {(error / bound).max():.3g} of its bound"
            norms = [float(np.linalg.norm(x)) for x in (error, want, sums)]
            assert norms[0] <= 2 * unit * norms[1] + norms[2], f"{case}: relative norm {norms[0] / norms[1]:.3g}"


def attention(gpu: Gpu, shape: dict[str, Any], cuts: list[float] | None = None, hopper: bool = True) -> None:
    """Whole against float64; then bit for bit by wgmma, on Hopper; then, if there are cuts, alone, backwards, in parts,
    in little memory.
    """
    problem = Problem(gpu, Case(**shape))
    whole = problem.whole()
    want = problem.run(whole)
    problem.check(want)

    def same(parts: list[Part], what: str, **how: Any) -> None:
        for (s, begin, end), bits in zip(parts, problem.run(parts, **how), strict=True):
            unequal = np.argwhere(bits.view(np.uint8) != want[s][begin:end].view(np.uint8))
            assert len(unequal) == 0, f"{problem.case}, {what}: sequence {s}, first at {unequal[0]} from query {begin}"

    if problem.case.cache:  # as over a cache in 16 bits, or float32, that holds what these rows say
        twin = Problem(gpu, dataclasses.replace(problem.case, cache=""), same_as=problem).run(whole)
        assert all(np.array_equal(*pair) for pair in zip(want, twin, strict=True)), "not the bits of the widened keys"
    if hopper and problem.case.kind != "f32" and problem.case.head_dim <= 128:  # of wider heads it is the same
        same(whole, "by wgmma", sm90=1)
        same(whole, "by wgmma, in turns", sm90=2)
    if cuts is None:
        return
    for part in whole[:2]:
        same([part], "alone")
    same(whole[::-1], "backwards, by many blocks", num_sms=200, known=False)
    if problem.case.two_way:
        return  # a part of a text would see that part alone
    spans = problem.case.spans or (False,) * len(whole)
    edges = [
        sorted({0, n, *(round(c * n) for c in cuts if not span)})
        for (_, n), span in zip(problem.case.sequences, spans, strict=True)
    ]
    same([(s, *pair) for s, e in enumerate(edges) for pair in itertools.pairwise(e)], f"cut at {edges}")
    # The end of a span alone sees what it saw with all of it.
    single = [
        (s, i, n if spans[s] else i + 1) for s, _, n in whole for i in {0, n // 2, *range(max(0, n - 5), n)} if i < n
    ]
    same(single, "token by token")
    same(single[::-1], "token by token, not cut", num_rows=0)
    same(single, "token by token, some cut", num_rows=40, num_sms=200)


def stored(gpu: Gpu, shape: dict[str, Any], num_sms: int, **how: Any) -> None:
    """Norms of heads, RoPE and the cache within attention, and by a kernel in front of it: the same bits everywhere."""
    results = []
    for fused in (False, True):
        problem = Problem(gpu, Case(**shape))
        out = problem.run(problem.whole(), num_sms=num_sms, store=Store(fused=fused, **how))
        results.append([*out, *(gpu.download(b) for b in (*problem.caches, *problem.scales) if b is not None)])
    for want, got in zip(*results, strict=True):
        unequal = np.argwhere(want.view(np.uint8) != got.view(np.uint8))
        assert len(unequal) == 0, f"{shape}: first at {unequal[0]} of {want.shape}"


def not_a_number(gpu: Gpu, kind: str) -> None:
    """A query that is not a number makes its own rows NaN and no others, by either kernel."""
    problem = Problem(gpu, Case(kind, (2, 1), 64, ((300, 1), (140, 40)), 16, 0, 8))
    want = problem.run(problem.whole())
    bad = {0: 0, 1: 7}  # the query of each sequence
    for s, i in bad.items():
        problem.q[s][i, 1, 5] = _store(np.array(np.nan), kind)
    for parts in (problem.whole(), [(s, i, i + 1) for s, i in bad.items()]):
        for (s, begin, end), got in zip(parts, problem.run(parts), strict=True):
            values = _load(got, kind)
            assert np.isnan(values[bad[s] - begin, 1]).all(), f"sequence {s}: the row is not NaN"
            others = np.ones(values.shape[:2], bool)
            others[bad[s] - begin, 1] = False
            assert (got[others] == want[s][begin:end][others]).all(), f"sequence {s}: other rows changed"


def lists(gpu: Gpu, seed: int) -> None:
    """Every chunk that a row sees is in one item, blocks have about as much to do, and each has its own workspace."""
    rng = np.random.default_rng(seed)
    for _ in range(50):
        kv_heads, group = int(rng.choice([1, 2, 8])), int(rng.choice([1, 3, 4, 8, 40]))
        window, num_sms = int(rng.choice([0, 0, 100, 1000])), int(rng.choice([1, 16, 132]))
        chunked = window > 0 and bool(rng.integers(2))
        num_seqs = int(rng.integers(1, 20))
        queries = rng.choice([0, 1, 1, 1, 5, 70], num_seqs)
        contexts = np.maximum(queries, rng.integers(0, 3000, num_seqs)).astype(int)
        edges = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
        num_rows = int(rng.choice([0, 3000, AMPLE]))
        work = list_work(
            gpu, edges, contexts.tolist(), (kv_heads * group, kv_heads), 128, window, num_rows, num_sms, chunked=chunked
        )
        want, used = {}, np.zeros(num_rows, np.int64)
        got: dict[tuple[int, int], list[int]] = {}
        slots: dict[tuple[int, int], int] = {}
        alone, total = [], 0
        for seq, row0, first_chunk, slot in work.decode[:, :4].tolist():
            got.setdefault((seq, row0), []).append(first_chunk)
            slots.setdefault((seq, row0), slot)
        for seq in np.flatnonzero((queries > 0) & (queries * group <= 32)).tolist():
            for row0 in range(0, int(queries[seq]) * group, 16):
                rows = min(int(queries[seq]) * group - row0, 16)
                ends = contexts[seq] - queries[seq] + 1 + np.arange(row0, row0 + rows) // group
                first = first_key(int(ends[0]), window, chunked) // CHUNK
                chunks = -(-int(ends[-1]) // CHUNK) - first
                slot = slots[seq, row0]
                want[seq, row0] = [0] if slot < 0 else list(range(0, chunks, work.width))
                if slot >= 0:
                    used[slot : slot + chunks * rows * kv_heads] += 1
                elif num_rows == AMPLE:
                    alone.append(chunks)
                total += chunks
        assert got == want
        assert all(chunks <= max(work.width, total * kv_heads / (num_sms * 1.5)) for chunks in alone), "a fair share"
        assert (used <= 1).all(), "two tiles have the same workspace"
        rows = (queries * group).tolist()
        tiles = [(seq, tile) for seq, n in enumerate(rows) if n > 32 for tile in range(-(-n // 128))]
        assert sorted(map(tuple, work.prefill[:, :2].tolist())) == tiles


def wide_lists(gpu: Gpu) -> None:
    """Wide heads and latents are prefill's where that is no slower than decode, which cuts and spreads them."""

    def prefill_tiles(
        heads: tuple[int, int], dims: tuple[int, int], contexts: list[int], queries: int = 1
    ) -> list[tuple[int, ...]]:
        edges = queries * np.arange(len(contexts) + 1, dtype=np.int32)
        work = list_work(gpu, edges, contexts, heads, dims[0], 0, AMPLE, 132, dims[1])
        rows = queries * heads[0] // heads[1]
        tiles = [(s, tile) for s in range(len(contexts)) for tile in range(-(-rows // 64))]
        found = sorted(map(tuple, work.prefill[:, :2].tolist()))
        assert found in ([], tiles) and bool(found) != bool(len(work.decode))
        return found

    latent, wide = (576, 512), (512, 512)
    assert not prefill_tiles((128, 1), latent, [8192])
    assert len(prefill_tiles((128, 1), latent, [8192] * 9)) == 18
    assert not prefill_tiles((128, 1), latent, [131072, *[1000] * 63])  # one block would walk through all of it
    assert not prefill_tiles((20, 1), latent, [1024] * 32)
    assert len(prefill_tiles((20, 1), latent, [1024] * 33)) == 33
    assert not prefill_tiles((16, 1), latent, [1024] * 256)  # a tile of decode has all rows
    assert len(prefill_tiles((20, 1), latent, [2048], 2048)) == 640
    assert len(prefill_tiles((32, 4), wide, [8192], 512)) == 64
    assert not prefill_tiles((32, 4), (576, 576), [8192], 512)  # more columns of values than there are registers for


def drafts(gpu: Gpu) -> None:
    """The tokens of a draft share reads of keys: a block reads them for a tile, and rows of a sequence fill tiles."""

    def reads(group: int, edges: list[int], contexts: list[int]) -> int:
        """How often the keys of a kv head are read."""
        work = list_work(gpu, np.array(edges, np.int32), contexts, (8 * group, 8), 128, 0, AMPLE, 132)
        return len({(seq, row0) for seq, row0 in work.decode[:, :2].tolist()}) + len(work.prefill)

    for group in (1, 2, 3, 4, 5, 6, 7, 8):
        for queries in range(1, 17):  # the longest draft has 15 tokens
            context, rows = 8192, queries * group
            together = reads(group, [0, queries], [context])
            apart = reads(group, list(range(queries + 1)), [context - i for i in reversed(range(queries))])
            assert apart == queries
            assert together == (2 if 16 < rows <= 32 else 1), (group, queries)


def one_long(gpu: Gpu) -> None:
    """A long sequence among many short ones, of which one block would have to take all keys where bounds were cut."""
    contexts = [131072, *[1000] * 63]
    edges = np.arange(65, dtype=np.int32)
    gpu.lib.attention_bytes.restype = ctypes.c_int64
    room = gpu.lib.attention_bytes(32, 8, 128, ctypes.c_int64(sum(contexts))) // (4 * row_floats(128))
    work = list_work(gpu, edges, contexts, (32, 8), 128, 0, room, 132)
    assert len(work.decode) == 1024 // AT_ONCE + 63  # the long one is cut, nothing beyond what the keys need
    assert ((work.decode[:, 3] >= 0) == (work.decode[:, 0] == 0)).all() and len(work.prefill) == 0
    assert gpu.lib.attention_bytes(32, 8, 128, ctypes.c_int64(1 << 40)) == 128 << 20
