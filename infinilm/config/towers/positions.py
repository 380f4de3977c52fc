"""Which rows of a table of positions the patches of a picture add, and by which weights."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["buckets", "stretched"]


def stretched(
    places: npt.NDArray[np.int32], grid: tuple[int, int], side: int, *, is_cubic: bool
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Stretch a table to a grid: bilinearly, so that corners lie on corners; or bicubically, so that edges do."""
    taps, weights = [], []
    for axis, count in enumerate(grid):
        place = places[axis].astype(np.float32)
        if is_cubic:
            at = (place + np.float32(0.5)) * np.float32(side) / np.float32(count) - np.float32(0.5)
        else:
            at = place * np.float32(side - 1) / np.float32(max(count - 1, 1))
        low = np.floor(at)
        part = at - low
        steps = np.arange(-1, 3) if is_cubic else np.arange(2)
        taps.append(np.clip(low[:, None].astype(np.int32) + steps, 0, side - 1))
        weights.append(_cubic_weights(part) if is_cubic else np.stack([1 - part, part], axis=1))
    rows = (taps[0][:, :, None] * side + taps[1][:, None]).reshape(places.shape[1], -1).astype(np.int32)
    return rows, (weights[0][:, :, None] * weights[1][:, None]).reshape(rows.shape).astype(np.float32)


def _cubic_weights(part: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The weights of four neighbours, [count, 4], of which the place is so far behind the second: Keys' kernel."""
    distance = np.abs(part[:, None] - np.arange(-1, 3, dtype=np.float32))
    a = np.float32(-0.75)  # as torch has it
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    weights: npt.NDArray[np.float32] = np.where(distance <= 1, near, far)
    return weights


def buckets(count: int, side: int) -> npt.NDArray[np.int64]:
    """For each of `count` steps, the part of `side` equal ones that it begins in, [count], rounded as in transformers.

    A step that should begin where a part does may, by float32, begin in the part before; models were trained with it.
    """
    boundaries = (1 / side + np.arange(side - 1) * (1 / side)).astype(np.float32)
    begins = np.arange(count, dtype=np.float32) * (np.float32(1) / np.float32(count))
    begins = np.minimum(begins, np.float32(1 - 1e-6))
    buckets: npt.NDArray[np.int64] = np.searchsorted(boundaries, begins, side="right")
    return buckets
