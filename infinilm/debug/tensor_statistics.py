"""`tensor_stats`: what a tensor holds, in a line, for debugging weights and activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from infinilm.checks import dtype_name
from infinilm.devices.arrays import to_array

__all__ = ["TensorStats", "tensor_stats"]


@dataclass(frozen=True, slots=True)
class TensorStats:
    """Statistics of a tensor.

    Attributes
    ----------
    shape : tuple of int
    dtype : str
    size : int
        Number of elements.
    minimum, maximum, mean, std, norm : float
        Statistics of the finite elements; NaN when there is none. `norm` is the root of the sum of squares.
    num_nan, num_inf, num_zero : int
        Elements that are NaN, infinite, and exactly zero.
    """

    shape: tuple[int, ...]
    dtype: str
    size: int
    minimum: float
    maximum: float
    mean: float
    std: float
    norm: float
    num_nan: int
    num_inf: int
    num_zero: int

    def __str__(self) -> str:
        """One line; what is wrong comes last."""
        faults = "".join(
            f", {count} {name}" for name, count in (("NaN", self.num_nan), ("infinite", self.num_inf)) if count
        )
        zeros = f", {self.num_zero / self.size:.0%} zeros" if self.num_zero else ""
        return (
            f"{self.dtype} {list(self.shape)}: {self.minimum:.4g} .. {self.maximum:.4g}, mean {self.mean:.4g}, "
            f"std {self.std:.4g}, norm {self.norm:.4g}{zeros}{faults}"
        )


def tensor_stats(tensor: Any) -> TensorStats:
    """Statistics of a tensor.

    Parameters
    ----------
    tensor
        A number array of any shape: numpy, `infinilm.Tensor`, or anything with DLPack. Nothing is kept of it.
    """
    array = to_array(tensor)
    flat = array.reshape(-1).astype(np.float64)
    is_nan, is_inf = np.isnan(flat), np.isinf(flat)
    finite = flat[~(is_nan | is_inf)]
    empty = not finite.size
    return TensorStats(
        shape=tuple(int(n) for n in array.shape),
        dtype=dtype_name(getattr(tensor, "dtype", array.dtype)),
        size=flat.size,
        minimum=np.nan if empty else float(finite.min()),
        maximum=np.nan if empty else float(finite.max()),
        mean=np.nan if empty else float(finite.mean()),
        std=np.nan if empty else float(finite.std()),
        norm=np.nan if empty else float(np.linalg.norm(finite)),
        num_nan=int(is_nan.sum()),
        num_inf=int(is_inf.sum()),
        num_zero=int((flat == 0).sum()),
    )
