"""Conversion of weights between floating dtypes, rounded to nearest, ties to even, with bounded temporaries.

Called by `loading.py` when a tensor cannot be used as it is stored. bfloat16 is uint16 throughout. Every
source is first made float32 without loss (float64: rounded to odd, so that the second rounding decides as if it were
the only one); the float32 bits then say whether a value fits the target.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm.errors import WeightError

__all__ = ["convert"]

# Elements per slice: temporaries stay in the cache. float32 to bfloat16 on one core, GB/s of input: 1.6 with slices
# of 2**16, 1.2 with 2**20, 1.0 with 2**14.
_SLICE = 1 << 16
# float32 bits, sign removed, of the largest value that does not round to infinity.
_LARGEST = {"float32": 0x7F7FFFFF, "bfloat16": 0x7F7F7FFF, "float16": 0x477FEFFF}
_NUMPY = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.float16}


def _round_to_odd(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Make float32 of float64: exact values stay, others become the neighbour whose last bit is 1."""
    nearest = values.astype(np.float32)
    widened = nearest.astype(np.float64)
    inexact = (widened != values) & ~np.isnan(values)
    away = inexact & (np.abs(widened) > np.abs(values))
    bits = nearest.view(np.uint32) - away.astype(np.uint32)  # one step toward zero
    odd: npt.NDArray[np.uint32] = bits | inexact.astype(np.uint32)
    return odd.view(np.float32)


def _as_float32(values: npt.NDArray[Any], source: str, target: str) -> npt.NDArray[np.float32]:
    """Make float32 of a flat slice, without loss as far as `target` is concerned."""
    if source == "bfloat16":
        widened: npt.NDArray[np.uint32] = values.astype(np.uint32)
        widened <<= 16
        return widened.view(np.float32)
    if source == "float64" and target != "float32":
        return _round_to_odd(values)
    return values.astype(np.float32, copy=False)


def _check_fits(
    values: npt.NDArray[np.float32],
    too_large: npt.NDArray[np.bool_],
    source: npt.NDArray[Any],
    names: tuple[str, str, str],
) -> None:
    """Refuse finite values that become infinite; infinities and NaN of the source may pass."""
    finite = np.isfinite(source) if source.dtype == np.float64 else np.isfinite(values)
    lost = np.flatnonzero(too_large & finite)
    if lost.size:
        name, stored, target = names
        value = float(source[lost[0]]) if source.dtype == np.float64 else float(values[lost[0]])
        advice = "use dtype='bfloat16' or 'float32'" if target == "float16" else "use dtype='float32'"
        raise WeightError(
            f"tensor {name!r}: the value {value:g} (stored as {stored}) lies outside the range of {target}; {advice}"
        )


def _to_bfloat16(values: npt.NDArray[np.float32], out: npt.NDArray[np.uint16], has_special: bool) -> None:
    """Round float32 to bfloat16 bits; NaN stays NaN (quiet)."""
    bits = values.view(np.uint32)
    rounded = bits.copy()
    rounded >>= 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    out[:] = rounded
    if has_special:
        nan = np.isnan(values)
        out[nan] = (bits[nan] >> 16) | 0x40


def convert(values: npt.NDArray[Any], source: str, target: str, *, name: str = "?") -> npt.NDArray[Any]:
    """Convert between floating dtypes, to nearest, ties to even, in slices of bounded size.

    Parameters
    ----------
    values : numpy.ndarray, any shape
        C-contiguous; bfloat16 as uint16.
    source, target : str
        `"float32"`, `"bfloat16"`, `"float16"`; the source also `"float64"`.
    name : str
        The tensor's name, for the error.

    Returns
    -------
    numpy.ndarray, same shape
        A new array; bfloat16 as uint16.

    Raises
    ------
    WeightError
        A finite value lies outside the target's range.
    """
    result = np.empty(values.shape, _NUMPY[target])
    flat_in, flat_out = values.reshape(-1), result.reshape(-1)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for begin in range(0, flat_in.size, _SLICE):
            part, out = flat_in[begin : begin + _SLICE], flat_out[begin : begin + _SLICE]
            wide = _as_float32(part, source, target)
            magnitude = wide.view(np.uint32) & 0x7FFFFFFF
            has_special = bool(magnitude.max() > _LARGEST[target])
            if has_special:
                _check_fits(wide, magnitude > _LARGEST[target], part, (name, source, target))
            if target == "bfloat16":
                _to_bfloat16(wide, out, has_special)
            else:
                out[:] = wide
    return result
