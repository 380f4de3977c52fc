"""Packed weights (see cuda/linear/packed_weight.h) in numpy, written a second time for the tests of the linears."""

from __future__ import annotations

from typing import Any

import numpy as np
from emulation import Buffer, Gpu, from_16, to_16
from numpy.typing import ArrayLike, NDArray

ORDERS = ("natural", "gate_up", "rope_pairs")  # the numbers of RowOrder
TYPES = ("f32", "bf16", "f16")  # the numbers of Type
SLICES, BOX_COLUMNS = 8, 64  # of k: slices are added in their order, and are of whole boxes of columns
SPLITS = (2, 4, 8)  # blocks that may share a tile of linear_prefill


def feature_of_row(n: int, order: str = "natural", head_dim: int = 0) -> NDArray[np.int64]:
    """The feature in each packed row, [num_tiles * 16]; n or more is padding."""
    rows: NDArray[np.int64] = np.arange(-(-n // 16) * 16)
    tile, r = rows // 16, rows % 16
    if order == "gate_up":
        rows = 8 * tile + r % 8 + r // 8 * (n // 2)
    elif order == "rope_pairs":
        head, j = np.divmod(tile, head_dim // 16)
        rows = head * head_dim + 8 * j + r % 8 + r // 8 * (head_dim // 2)
    else:
        assert order == "natural", order
    return rows


def _elements() -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Row and column, in a tile of 16 x 16, of each element of a fragment: [32 lanes][8]."""
    lane, i = np.meshgrid(np.arange(32), np.arange(8), indexing="ij")
    return lane // 4 + i // 2 % 2 * 8, lane % 4 * 2 + i % 2 + i // 4 * 8


def pack(weight: ArrayLike, order: str = "natural", head_dim: int = 0, kind: str = "bf16") -> NDArray[np.uint16]:
    """Float weight [n, k], features as the checkpoint has them, to bits [num_tiles, num_steps, 32, 8]."""
    values = np.asarray(weight, np.float32)
    n, k = values.shape
    features = feature_of_row(n, order, head_dim)
    steps = -(-k // 16)
    padded = np.zeros((max(n, int(features.max()) + 1), steps * 16), np.float32)
    padded[:n, :k] = values
    tiles = padded[features].reshape(-1, 16, steps, 16).transpose(0, 2, 1, 3)  # tile, step, row, column
    row, column = _elements()
    return np.ascontiguousarray(to_16(tiles[:, :, row, column], kind))


def unpack(
    packed: NDArray[Any], n: int, k: int, order: str = "natural", head_dim: int = 0, kind: str = "bf16"
) -> NDArray[np.float32]:
    """The inverse of `pack`: bits to float [n, k]; checks that the padding is zero."""
    features = feature_of_row(n, order, head_dim)
    num_tiles, steps = packed.shape[:2]
    tiles = np.empty((num_tiles, steps, 16, 16), np.float32)
    row, column = _elements()
    tiles[:, :, row, column] = from_16(packed, kind)
    rows = tiles.transpose(0, 2, 1, 3).reshape(num_tiles * 16, steps * 16)
    assert not rows[:, k:].any() and not rows[features >= n].any(), "padding is not zero"
    weight = np.empty((n, k), np.float32)
    weight[features[features < n]] = rows[features < n, :k]
    return weight


def split_workspace(gpu: Gpu, n: int, tokens: int, splits: int) -> Buffer | None:
    """The workspace of linear_prefill with shared tiles: counters of zero, then NaN, and no byte too many."""
    if splits == 1:
        return None
    tiles, parts = -(-n // 128) * -(-tokens // 64), SLICES - SLICES // splits + 1
    return gpu.upload(np.concatenate([np.zeros(1024, np.uint8), np.full(tiles * parts * 128 * 64 * 4, 0xFF, np.uint8)]))
