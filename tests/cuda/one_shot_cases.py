"""Cases for cuda/ranks/one_shot.cu: several ranks at once, against float64 numpy, rms_norm and each other."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
from emulation import Array, CudaError, Gpu
from frames import KINDS, UNIT, Frame, assert_bitwise, assert_close, decode, encode, normal, of

F64 = np.float64
Shape = dict[str, Any]
EPS = 1e-6
ONE_SHOT, TWO_SHOT = 256 << 10, 512 << 10  # longest messages
Ways = tuple[int, int]
WAYS: dict[str, Ways] = {"one": (ONE_SHOT, 0), "two": (0, TWO_SHOT), "by size": (4096, TWO_SHOT)}


@dataclass
class Ranks:
    """What all ranks hold: tensors of [rounds * max_tokens, hidden_size], stored."""

    kind: str
    x: list[Array]  # one a rank
    residual: Array
    weight: Array
    num_tokens: list[int]  # one a round

    @property
    def max_tokens(self) -> int:
        return len(self.residual) // len(self.num_tokens)

    def rows(self) -> Array:
        """The rows that rounds use."""
        starts = [(i * self.max_tokens, n) for i, n in enumerate(self.num_tokens)]
        return np.concatenate([np.arange(start, start + n) for start, n in starts])


def make(kind: str, size: int, hidden: int, num_tokens: list[int], seed: int, scale: float = 1.0) -> Ranks:
    rows = max(num_tokens) * len(num_tokens)
    x = [encode(normal(seed + r, rows, hidden) * np.float32(scale), kind) for r in range(size)]
    return Ranks(kind, x, encode(normal(seed + 90, rows, hidden), kind), normal(seed + 91, hidden), num_tokens)


def run(
    gpu: Gpu,
    ranks: Ranks,
    pad: int = 0,
    replays: int = 0,
    seed: int = 0,
    absent: int = -1,
    last_round: int = 0,
    way: str = "one",
) -> list[tuple[Array, Array]]:
    """(residual, out) of each rank afterwards; workspaces look as if `last_round` had been the last exchange."""
    size, (rows, hidden), kind = len(ranks.x), ranks.residual.shape, ranks.kind
    count = ctypes.c_int()
    gpu.check(gpu.lib.cudaGetDeviceCount(ctypes.byref(count)))
    gpu.lib.workspace_bytes.restype = ctypes.c_int64
    workspaces, frames, weights = [], [], []
    for r in range(size):
        gpu.call("cudaSetDevice", r % count.value)
        num_bytes = gpu.lib.workspace_bytes(size, *WAYS[way])
        workspaces.append(gpu.upload(np.full(num_bytes // 4, last_round, np.uint32)))
        weights.append(gpu.upload(ranks.weight))
        x, residual = of(gpu, ranks.x[r], kind, 2 * pad), of(gpu, ranks.residual, kind, 3 * pad)
        frames.append((x, residual, Frame(gpu, kind, (rows, hidden), pad)))
    gpu.call("cudaSetDevice", 0)

    def pointers(values: list[int | None]) -> Any:
        return (ctypes.c_void_p * size)(*values)

    tensors = [pointers([f[i].pointer.value for f in frames]) for i in range(3)]
    strides = [ctypes.c_int64(frame.stride) for frame in frames[0]]
    num_tokens = (ctypes.c_int * len(ranks.num_tokens))(*ranks.num_tokens)
    gpu.call(
        "run_ranks", size, *WAYS[way], pointers([w.pointer for w in workspaces]), *tensors,
        pointers([w.pointer for w in weights]), *strides, hidden, EPS, KINDS.index(kind), ranks.max_tokens,
        len(ranks.num_tokens), num_tokens, replays, seed, absent,
    )  # fmt: skip
    result = [(f[1].get(), f[2].get()) for f in frames]
    for x, _, _ in frames:
        x.get()  # nothing wrote around it
    gpu.close()
    return result


def added(ranks: Ranks, residual: Array) -> Array:
    """`residual` after one round, bit for bit: float32 sums in rank order, rounded, added, rounded."""
    total = decode(ranks.x[0], ranks.kind)
    for x in ranks.x[1:]:
        total = total + decode(x, ranks.kind)
    total = decode(encode(total, ranks.kind), ranks.kind)
    return encode(decode(residual, ranks.kind) + total, ranks.kind)


def check(gpu: Gpu, ranks: Ranks, got: list[tuple[Array, Array]], times: int = 1) -> None:
    """All ranks have the same bits, which are those of the definition and of rms_norm, and near float64."""
    kind, rows, hidden = ranks.kind, ranks.rows(), ranks.residual.shape[1]
    for residual, out in got[1:]:
        assert_bitwise(residual, got[0][0])
        assert_bitwise(out, got[0][1])
    before = ranks.residual
    for _ in range(times - 1):
        before = added(ranks, before)
    residual, out = got[0][0][rows], got[0][1][rows]
    assert_bitwise(residual, added(ranks, before)[rows])

    parts = [decode(x, kind).astype(F64)[rows] for x in ranks.x]
    total, size = np.sum(parts, axis=0), np.sum(np.abs(parts), axis=0)
    exact = decode(before, kind).astype(F64)[rows]
    slack = 0.0 if kind == "f32" else 1.01 * UNIT[kind] * np.abs(total)  # the sum is rounded before it is added
    assert_close(residual, exact + total, kind, len(parts) + 1, size + np.abs(exact), slack)
    stored = decode(residual, kind).astype(F64)
    mean = (stored * stored).mean(1, keepdims=True)
    assert_close(out, stored / np.sqrt(mean + np.float32(EPS)) * ranks.weight, kind, hidden)
    if hidden % 8 == 0:
        normed = Frame(gpu, kind, residual.shape)
        strides = [ctypes.c_int64(n) for n in (hidden, 0, hidden)]
        gpu.call(
            "norm_rows", of(gpu, residual, kind).pointer, None, gpu.upload(ranks.weight), None, None, normed.pointer,
            *strides, len(rows), 1, hidden, EPS, 1.0, 1.0, KINDS.index(kind),
        )  # fmt: skip
        assert_bitwise(out, normed.get())

    unused = np.setdiff1d(np.arange(len(ranks.residual)), rows)
    assert_bitwise(got[0][0][unused], ranks.residual[unused])
    assert np.isnan(decode(got[0][1][unused], kind)).all()


# ---------------------------------------------------------------------------------------------- cases


def rounds(gpu: Gpu, shapes: list[Shape]) -> None:
    """Rounds of any lengths one after the other, ranks delayed at random."""
    for shape in shapes:
        ranks = make(shape["kind"], shape["size"], shape["hidden"], shape["num_tokens"], shape["seed"], shape["scale"])
        check(gpu, ranks, run(gpu, ranks, shape["pad"], seed=shape["seed"], way=shape["way"]))


def alone(gpu: Gpu, kind: str, size: int, hidden: int) -> None:
    """A row has the bits it has among others, whichever way the sums go."""
    among = make(kind, size, hidden, [7], seed=3)
    residual, out = run(gpu, among)[0]
    row = slice(4, 5)
    single = Ranks(kind, [x[row] for x in among.x], among.residual[row], among.weight, [1])
    for way in WAYS:
        got = run(gpu, single, way=way)[0]
        assert_bitwise(got[0], residual[row])
        assert_bitwise(got[1], out[row])


def replays(gpu: Gpu, kind: str, size: int, times: int, way: str) -> None:
    """A graph of an odd number of rounds, launched many times: the residual grows by the same sum each time."""
    ranks = make(kind, size, 1000 if way == "by size" else 72, [3, 1, 2], seed=5)
    check(gpu, ranks, run(gpu, ranks, replays=times, way=way), times)


def counters_wrap(gpu: Gpu, way: str) -> None:
    """The number of an exchange goes from 2^32 - 1 to 0."""
    ranks = make("bf16", 3, 72, [2, 1, 2, 2, 1], seed=6)
    check(gpu, ranks, run(gpu, ranks, last_round=2**32 - 3, way=way))


def abort(gpu: Gpu, size: int, way: str) -> None:
    """One rank never comes: the others give up when told, and leave their tensors alone."""
    ranks = make("bf16", size, 64, [2], seed=7)
    for rank, (residual, out) in enumerate(run(gpu, ranks, absent=size - 1, way=way)):
        assert_bitwise(residual, ranks.residual)
        assert np.isnan(decode(out, "bf16")).all(), rank


def refusals(gpu: Gpu) -> None:
    """Arguments that no launch can take."""
    good = {"size": 2, "rank": 0, "one": 4096, "two": 0, "tokens": 0, "hidden": 64, "kind": 1}
    gpu.call("launch_alone", *good.values())
    for wrong in (
        {"size": 9}, {"size": 0}, {"rank": 2}, {"rank": -1}, {"one": 4000}, {"two": 4000}, {"tokens": 33},
        {"hidden": 0}, {"tokens": 32, "hidden": 65}, {"tokens": 17, "kind": 0}, {"tokens": -1},
        {"one": 2048, "two": 4096, "tokens": 33}, {"one": 2048, "two": 4096, "tokens": 32, "hidden": 65},
    ):  # fmt: skip
        try:
            gpu.call("launch_alone", *{**good, **wrong}.values())
        except CudaError as error:
            assert error.name == "cudaErrorInvalidValue", wrong
        else:
            raise AssertionError(f"{wrong} was taken")


def not_connected(gpu: Gpu) -> None:
    """Devices that connect_peers refuses."""
    try:
        run(gpu, make("bf16", 2, 64, [1], seed=1))
    except CudaError as error:
        assert error.name == "cudaErrorNotSupported"
    else:
        raise AssertionError("ran all the same")
