"""Adapters that become part of the weights while these are read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm.checkpoint.dtype_conversion import convert
from infinilm.lora.peft import PeftAdapter

__all__ = ["Merge"]


class Merge:
    """Adds adapters to parameters, in float32; the sum has the dtype that the parameter had.

    Parameters
    ----------
    adapters : sequence of PeftAdapter
        In the order in which they are added.
    """

    def __init__(self, adapters: Sequence[PeftAdapter]) -> None:
        self._adapters = adapters

    @property
    def folders(self) -> tuple[Path, ...]:
        """Where the adapters came from, in that order."""
        return tuple(adapter.folder for adapter in self._adapters)

    def __call__(self, name: str, array: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
        """The parameter with what adapters add to it; itself where they add nothing. bfloat16 as uint16."""
        weights = [adapter.weights[name] for adapter in self._adapters if name in adapter.weights]
        if not weights:
            return array
        total: npt.NDArray[np.float32] = convert(np.ascontiguousarray(array), dtype, "float32", name=name)
        for weight in weights:
            total += weight.delta()
        return convert(total, "float32", dtype, name=name)
