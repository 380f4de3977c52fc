"""Cases for cuda/sampling/sampling.cu: ids equal to two oracles, and the best of a row. Run by the worker process.

One is the float64 sampler of tests/reference, which shares nothing with the kernel; its ids count where no decision is
within 1e-9 of a boundary. The other adds the integer weights of src/cpu/sampling.cpp one by one in order; its ids must
be met always, and so must those of the CPU backend.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from typing import Any

import numpy as np
import pytest
from emulation import HERE, Array, CudaError, Gpu
from frames import Frame, assert_bitwise, of

sys.path.insert(0, str(HERE.parent))
from reference import ops as oracle

F64 = np.float64
BELOW_ONE = np.float32(1 - 2**-24)
Blocks = int | tuple[int, Any, int]  # of a row, 0: as the launcher chooses; with the workspace and its places
NAN_LOGIT, INFINITE_LOGIT, NO_LOGIT = -1, -2, -3  # SampleFault
COLUMNS = (("temperature", np.float32), ("top_k", np.int32), ("top_p", np.float32), ("min_p", np.float32),
           ("random_val", np.float32))  # fmt: skip


def make_logits(rng: np.random.Generator, rows: int, vocab_size: int, kind: str) -> Array:
    """Smooth, with many ties, all equal, nearly so, one dominant, or with masked (-inf) entries."""
    logits = (rng.standard_normal((rows, vocab_size)) * 3).astype(np.float32)
    if kind == "ties":
        logits = np.round(logits)  # -0 among them
    elif kind == "equal":
        logits[...] = logits[:, :1]
    elif kind == "close":  # differ in the last bits of the key only
        logits = np.float32(5) + rng.integers(-3, 4, logits.shape).astype(np.float32) * np.float32(2**-21)
    elif kind == "peaked":
        logits[np.arange(rows), rng.integers(0, vocab_size, rows)] += 30
    elif kind == "masked":
        hidden = rng.random(logits.shape) < 0.7
        hidden[np.arange(rows), rng.integers(0, vocab_size, rows)] = False
        logits[hidden] = -np.inf
    return logits


def make_requests(rng: np.random.Generator, rows: int, vocab_size: int) -> dict[str, Array]:
    """Every row its own parameters, extreme ones among them."""
    values = {
        "temperature": rng.choice([0.0, 1e-38, 1e-3, 0.3, 0.7, 1.0, 1.0, 1.5, 1e3, 1e37], rows),
        "top_k": rng.choice([-1, 0, 0, 0, 1, 2, 5, 40, vocab_size - 1, vocab_size, 2**31 - 1], rows),
        "top_p": rng.choice([0.0, 1e-6, 0.1, 0.5, 0.9, 0.999, 1.0, 1.0, 1.0], rows),
        "min_p": rng.choice([0.0, 0.0, 0.0, 1e-9, 0.01, 0.5, 1.0], rows),
        "random_val": np.where(rng.random(rows) < 0.3, rng.choice([0.0, BELOW_ONE], rows), rng.random(rows)),
    }
    drawn = {name: values[name].astype(kind) for name, kind in COLUMNS}
    drawn["random_val"] = np.minimum(drawn["random_val"], BELOW_ONE)
    return drawn


def draw(
    gpu: Gpu,
    logits: Array,
    requests: dict[str, Array],
    pad: int = 0,
    token_ids: Array | None = None,
    mask: oracle.Mask | None = None,
    blocks: Blocks = 0,
) -> Array:
    """Ids. token_ids: of the columns, [rows, vocab_size]; blocks: of a row."""
    rows, vocab_size = logits.shape
    ids = gpu.upload(np.full(rows + 1, -77, np.int32))
    inside = of(gpu, logits, "f32", pad)
    columns = [gpu.upload(requests[name]) for name, _ in COLUMNS]
    gpu.call(
        "draw", inside.pointer, ctypes.c_int64(inside.stride), rows, vocab_size, *columns, ids,
        None if token_ids is None else gpu.upload(np.pad(token_ids, ((0, 0), (0, pad)), constant_values=-77)),
        ctypes.c_int64(vocab_size + pad), *_mask_arguments(gpu, mask), *_blocks(blocks),
    )  # fmt: skip
    got = gpu.download(ids)
    assert got[-1] == -77
    return got[:-1]


def _mask_arguments(gpu: Gpu, mask: oracle.Mask | None) -> list[Any]:
    """The masks, a word of absurd bits after each, and the rows'."""
    if mask is None:
        return [None, ctypes.c_int64(0), None]
    padded = np.pad(mask.allowed, ((0, 0), (0, 1)), constant_values=0x55555555)
    return [gpu.upload(padded), ctypes.c_int64(padded.shape[1]), gpu.upload(mask.allowed_row)]


def _blocks(blocks: Blocks) -> list[Any]:
    return [blocks, None, 0] if isinstance(blocks, int) else list(blocks)


def find_best(
    gpu: Gpu,
    logits: Array,
    k: int,
    first_id: int = 0,
    pad: int = 0,
    mask: oracle.Mask | None = None,
    blocks: Blocks = 0,
) -> tuple[Array, Array]:
    """The best and their ids, [rows, k]."""
    rows, n = logits.shape
    best, ids = Frame(gpu, "f32", (rows, k)), gpu.upload(np.full((rows + 1, k), -77, np.int32))
    inside = of(gpu, logits, "f32", pad)
    gpu.call(
        "best", inside.pointer, ctypes.c_int64(inside.stride), rows, n, k, first_id, best.pointer, ids,
        *_mask_arguments(gpu, mask), *_blocks(blocks),
    )  # fmt: skip
    got = gpu.download(ids)
    assert (got[-1] == -77).all()
    return best.get(), got[:-1]


# ---------------------------------------------------------------------------------------------- the exact oracle


def weights(logits: Array, temperature: np.float32) -> tuple[Array, int]:
    """The integer weights of src/cpu/sampling.cpp, and that of the largest logit; numpy fuses nothing either."""
    largest = logits.max()
    one = 2 ** min(45, 63 - int(logits.size).bit_length())
    with np.errstate(all="ignore"):
        reach = np.minimum(np.float32(32) * temperature, np.finfo(np.float32).max)
        near = largest - logits <= reach
        x = np.where(near, (logits.astype(F64) - F64(largest)) / F64(temperature), 0.0)
    magic = F64(1.5 * 2**52)
    shifted = x * float.fromhex("0x1.71547652b82fep0") + magic
    n = shifted - magic
    r = (x - n * float.fromhex("0x1.62e42fee00000p-1")) - n * float.fromhex("0x1.a39ef35793c76p-33")
    p = np.full_like(r, 1 / 6227020800)
    for factor in (479001600, 39916800, 3628800, 362880, 40320, 5040, 720, 120, 24, 6, 2, 1, 1):
        p = p * r + 1 / factor
    bits = p.view(np.uint64) + (shifted.view(np.uint64) << np.uint64(52))
    whole = (bits.view(F64) * one + 2.0**52).view(np.uint64) & np.uint64(2**52 - 1)
    return np.where(near, whole, np.uint64(0)), one


def exact_row(
    logits: Array, temperature: np.float32, top_k: int, top_p: np.float32, min_p: np.float32, random_val: np.float32
) -> int:
    """SampleParams with those weights, added in order."""
    order = np.argsort(-logits, kind="stable")
    if temperature == 0:
        return int(order[0])
    w, one = weights(logits, temperature)
    if top_k > 0:
        order = order[:top_k]
    w = w[order]
    if top_p < 1:
        running = np.cumsum(w).astype(F64)
        w = w[: int(np.argmax(running >= F64(top_p) * running[-1])) + 1]
    if min_p > 0:
        w = w[w.astype(F64) >= min(F64(min_p), 1.0) * one]
    running = np.cumsum(w).astype(F64)
    return int(order[int(np.argmax(running > F64(random_val) * running[-1]))])


# ---------------------------------------------------------------------------------------------- cases


def sample(gpu: Gpu, shapes: list[dict[str, Any]]) -> None:
    """Both oracles; a row alone as among others, and the work of one block as that of several."""
    for shape in shapes:
        rows, vocab_size = shape["rows"], shape["vocab_size"]
        rng = np.random.default_rng(shape["seed"])
        logits, requests = make_logits(rng, rows, vocab_size, shape["kind"]), make_requests(rng, rows, vocab_size)
        ids = draw(gpu, logits, requests, shape["pad"], blocks=shape["blocks"])
        columns = [requests[name] for name, _ in COLUMNS]
        for row in range(rows):
            parameters = tuple(c[row] for c in columns)
            want = exact_row(logits[row], *parameters)
            assert ids[row] == want, f"row {row}: {ids[row]} != {want} with {parameters}"
        want_ids, margin = oracle.sample(logits.astype(F64), *columns)
        wrong = np.flatnonzero((ids != want_ids) & (margin > 1e-9))
        assert wrong.size == 0, [(int(r), int(ids[r]), int(want_ids[r]), [float(c[r]) for c in columns]) for r in wrong]
        row = rows // 2
        alone = {name: column[row : row + 1] for name, column in requests.items()}
        again = draw(gpu, logits[row : row + 1], alone, blocks=2 if shape["blocks"] == 1 else 1)
        assert_bitwise(again, ids[row : row + 1])


def faults(gpu: Gpu, vocab_sizes: list[int]) -> None:
    """Rows that are no distribution; their neighbours are drawn as ever."""
    for vocab_size in vocab_sizes:
        logits = np.zeros((7, vocab_size), np.float32)
        at = vocab_size // 2
        logits[1, at], logits[2, at], logits[3] = np.nan, np.inf, -np.inf
        logits[4, 0], logits[4, vocab_size - 1] = np.inf, -np.nan  # NaN is told first
        logits[5] = -np.inf
        logits[5, at] = -50.0
        for temperature in (0.0, 1.0):
            values = {"temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "random_val": 0.0}
            requests = {n: np.full(7, values[n], kind) for n, kind in COLUMNS}
            ids = draw(gpu, logits, requests, blocks=2)
            assert ids.tolist() == [0, NAN_LOGIT, INFINITE_LOGIT, NO_LOGIT, NAN_LOGIT, at, 0]


def ties(gpu: Gpu, vocab_sizes: list[int]) -> None:
    """Equal logits: greedy, top_k = 1, top_p = 0 and min_p = 1 take the lowest id; -0 ties with 0."""
    for vocab_size in vocab_sizes:
        logits = np.full((4, vocab_size), -1, np.float32)
        first = vocab_size // 2
        logits[:, first:] = 0.0
        logits[:, first] = -0.0
        columns = ([0, 1, 1, 0.5], [0, 1, 0, 0], [1, 1, 0, 1], [0, 0, 0, 1], [0.9, 0.99, 0.99, 0])
        requests = {n: np.array(c, kind) for (n, kind), c in zip(COLUMNS, columns, strict=True)}
        got = draw(gpu, logits, requests).tolist()
        assert got == [first] * 4, f"{got} {first}"


def boundaries(gpu: Gpu, vocab_sizes: list[int]) -> None:
    """random_val and top_p as near to a boundary between candidates as float32 allows: every bit of a sum counts."""
    for vocab_size in vocab_sizes:
        rng = np.random.default_rng(vocab_size)
        rows = 10
        logits = make_logits(rng, rows, vocab_size, "smooth")
        values = {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "random_val": BELOW_ONE}
        requests = {name: np.full(rows, values[name], kind) for name, kind in COLUMNS}
        for row in range(rows):
            w = weights(logits[row], np.float32(1.5))[0]
            running = np.cumsum(np.sort(w)[::-1]).astype(F64)
            name = ("random_val", "top_p")[row % 2]
            requests[name][row] = min(running[rng.integers(vocab_size // 2)] / running[-1], BELOW_ONE)
        ids = draw(gpu, logits, requests, blocks=8)
        want = [exact_row(logits[row], *(requests[name][row] for name, _ in COLUMNS)) for row in range(rows)]
        assert ids.tolist() == want


def named(gpu: Gpu, vocab_sizes: list[int]) -> None:
    """What is drawn is told by its token id; faults stay what they are."""
    for vocab_size in vocab_sizes:
        rng = np.random.default_rng(vocab_size)
        logits, requests = make_logits(rng, 5, vocab_size, "ties"), make_requests(rng, 5, vocab_size)
        logits[3] = np.nan
        token_ids = rng.integers(0, 2**31 - 1, logits.shape).astype(np.int32)
        ids = draw(gpu, logits, requests, pad=3)
        got = draw(gpu, logits, requests, pad=3, token_ids=token_ids)
        assert_bitwise(got, np.where(ids < 0, ids, token_ids[np.arange(5), ids]))
        assert got[3] == NAN_LOGIT


def best(gpu: Gpu, sizes: list[int], ks: list[int]) -> None:
    """As the oracle finds them, whatever the row holds: equal ones may not fit the list. Alone as among others."""
    for n in sizes:
        logits = oracle.awkward_logits(np.random.default_rng(n), n)
        for k in ks:
            found = find_best(gpu, logits, k, first_id=7 * n, pad=1 + k % 4, blocks=1 if k % 2 else 4)
            oracle.assert_best(found, logits, 7 * n)
            for alone, among in zip(find_best(gpu, logits[1:2], k, 7 * n, pad=8, blocks=8), found, strict=True):
                assert_bitwise(alone, among[1:2])
    assert find_best(gpu, np.zeros((0, 5), np.float32), 3)[0].size == 0


def masked(gpu: Gpu, shapes: list[dict[str, Any]]) -> None:
    """Ids and faults are those of logits that are -inf where a bit is 0; NaN there does not count.

    Rows have masks of their own, shared ones and none; one mask allows nothing.
    """
    for shape in shapes:
        rows, vocab_size = shape["rows"], shape["vocab_size"]
        rng = np.random.default_rng(shape["seed"])
        logits, requests = make_logits(rng, rows, vocab_size, shape["kind"]), make_requests(rng, rows, vocab_size)
        mask = oracle.random_mask(rng, rows, vocab_size)
        mask.allowed[0] = 0
        want = mask.apply(logits)
        logits[mask.hidden(vocab_size)] = np.nan
        got = draw(gpu, logits, requests, shape["pad"], mask=mask, blocks=shape["blocks"])
        assert_bitwise(got, draw(gpu, want, requests, shape["pad"], blocks=2))
        assert (got[mask.allowed_row == 0] == NO_LOGIT).all()


def masked_best(gpu: Gpu, sizes: list[int], ks: list[int]) -> None:
    """Bits are by token id, wherever in a word the first column is."""
    for n in sizes:
        rng = np.random.default_rng(n)
        logits = oracle.awkward_logits(rng, n)
        for k in ks:
            first_id = int(rng.integers(100))
            mask = oracle.random_mask(rng, 8, first_id + n)
            found = find_best(gpu, logits, k, first_id, 1 + k % 4, mask, 2 if k % 2 else 1)
            oracle.assert_best(found, mask.apply(logits, first_id), first_id)


def changes(gpu: Gpu, vocab_sizes: list[int]) -> None:
    """Biases and penalties of whole rows, and of parts of a vocabulary side by side: every bit as it is defined.

    Undone, the logits are what they were.
    """
    for n in vocab_sizes:
        rng = np.random.default_rng(n)
        logits = make_logits(rng, 6, n, "masked")
        lists = oracle.random_changes(rng, 6, n)
        input_ids, rows = rng.integers(0, n, 9).astype(np.int32), rng.permutation(9)[:6].astype(np.int32)
        taken = lists["change_tokens"][lists["change_rows"][:, 0].clip(max=len(lists["change_tokens"]) - 1), 0]
        input_ids[rows[::2]] = taken[::2].clip(0)  # tokens that are in the list, mostly
        want = oracle.change_logits(logits, lists, input_ids[rows])
        for parts in (1, 2):
            edges = np.linspace(0, n, parts + 1).astype(int)
            for begin, end in itertools.pairwise(edges):
                inside = of(gpu, logits[:, begin:end], "f32", 3)
                arrays = [gpu.upload(x) for x in (*lists.values(), input_ids, rows)]
                for undo, expected in ((False, want), (True, logits)):
                    gpu.call(
                        "change", inside.pointer, ctypes.c_int64(inside.stride), 6, int(end - begin), int(begin),
                        *arrays, undo,
                    )  # fmt: skip
                    assert_bitwise(inside.get(), expected[:, begin:end])


def log_probs(gpu: Gpu, sizes: list[int], widths: list[int]) -> None:
    """As the oracle has them, whatever a row holds; alone as among others, and by one block as by several."""
    for n, width in itertools.product(sizes, widths):
        rng = np.random.default_rng(1000 * width + n)
        logits = np.concatenate([oracle.awkward_logits(rng, n), make_logits(rng, 2, n, "peaked")])
        logits[3, rng.integers(n)] = 1  # else it may be -inf alone
        drawn = np.where(np.arange(10) == 7, NAN_LOGIT, rng.integers(0, n, 10)).astype(np.int32)
        most = min(width - 1, n)
        counts = np.append(rng.integers(-1, most + 1, 8), [most, 0]).astype(np.int32)
        got = _log_probs(gpu, logits, drawn, counts, width, blocks=1 if n % 2 else 4)
        oracle.assert_log_probs(got, logits, drawn, counts, -77)
        for row in (0, 8):
            part = slice(row, row + 1)
            alone = _log_probs(gpu, logits[part], drawn[part], counts[part], width, blocks=8)
            for values, among in zip(alone, got, strict=True):
                assert_bitwise(values, among[part])


def _log_probs(gpu: Gpu, logits: Array, drawn: Array, counts: Array, width: int, blocks: Blocks) -> tuple[Array, Array]:
    """Ids and log-probabilities, [rows, width]."""
    rows, n = logits.shape
    ids, logprobs = (gpu.upload(np.full((rows + 1, width), -77, kind)) for kind in (np.int32, np.float32))
    inside = of(gpu, logits, "f32", 3)
    gpu.call(
        "log_probs", inside.pointer, ctypes.c_int64(inside.stride), rows, n, width, gpu.upload(drawn),
        gpu.upload(counts), ids, logprobs, *_blocks(blocks),
    )  # fmt: skip
    got = gpu.download(ids), gpu.download(logprobs)
    assert all((x[-1] == -77).all() for x in got)
    return got[0][:-1], got[1][:-1]


def without_clusters(gpu: Gpu, shapes: list[dict[str, Any]]) -> None:
    """Blocks of a row that talk by memory have the bits of one block, however many used that memory before them."""
    places = max(shape["rows"] * shape["blocks"] for shape in shapes)
    gpu.lib.workspace_bytes.restype = ctypes.c_int64
    workspace = gpu.upload(np.zeros(gpu.lib.workspace_bytes(places), np.uint8))
    for shape in shapes:
        rows, vocab_size = shape["rows"], shape["vocab_size"]
        rng = np.random.default_rng(shape["seed"])
        logits, requests = make_logits(rng, rows, vocab_size, shape["kind"]), make_requests(rng, rows, vocab_size)
        mask, k = oracle.random_mask(rng, rows, vocab_size), min(vocab_size, 40)
        drawn, counts = rng.integers(0, vocab_size, rows).astype(np.int32), np.full(rows, k, np.int32)
        ways: tuple[Blocks, Blocks] = (shape["blocks"], workspace, places), 1
        several, one = (
            [
                draw(gpu, logits, requests, shape["pad"], blocks=blocks),
                draw(gpu, logits, requests, shape["pad"], mask=mask, blocks=blocks),
                *find_best(gpu, logits, k, blocks=blocks),
                *_log_probs(gpu, logits, drawn, counts, k + 1, blocks),
            ]
            for blocks in ways
        )
        for got, want in zip(several, one, strict=True):
            assert_bitwise(got, want)


def too_many_blocks(gpu: Gpu) -> None:
    """More than the device runs at one time are refused, as they would wait for each other for ever."""
    gpu.lib.workspace_bytes.restype = ctypes.c_int64
    workspace = gpu.upload(np.zeros(gpu.lib.workspace_bytes(16), np.uint8))
    logits = np.zeros((2, 9000), np.float32)
    for blocks, places, name in (
        (8, 16, "cudaErrorCooperativeLaunchTooLarge"),
        (4, 7, "cudaErrorInvalidValue"),
    ):
        with pytest.raises(CudaError, match=name):
            find_best(gpu, logits, 1, blocks=(blocks, workspace, places))
    for blocks in (0, 2):  # by itself the launcher takes as many as fit
        _, ids = find_best(gpu, logits, 1, blocks=(blocks, workspace, 16))
        assert ids.tolist() == [[0], [0]]
