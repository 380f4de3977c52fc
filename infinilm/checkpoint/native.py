"""Weights that a device computes with as they are stored: the types of blocks that it takes, and which must agree.

Called with what `checkpoint.gguf` and `checkpoint.quantised` find in the files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from infinilm import _core

__all__ = ["CUDA_BLOCKS", "Linears", "LoadParam", "bytes_of_block", "choose_native", "type_on"]

Linears = Mapping[str, tuple[list[str], bool, int]]
"""The result of `_core.linears`: the weights, if these are gate and up, and where ranks cut inputs."""

LoadParam = Callable[[str, _core.Tensor, str], Sequence[str] | None]
"""Gives an engine a weight in blocks of a type, by its name: `_core.InferEngine.load_param`."""

CUDA_BLOCKS: Mapping[str, int] = MappingProxyType(
    {"Q4_0": 18, "Q8_0": 34, "Q4_K": 160, "Q5_K": 192, "Q6_K": 216, "Z4_64": 36, "Z4_128": 72, "MXFP4": 18}
    | {"Q2_K": 96, "Q3_K": 120, "Q4_1": 20, "Q5_1": 24, "NVFP4": 36, "NVFP4_ROW": 36}
    | {"F8_ROW": 32, "F8_32": 33, "F8_128": 132}
)
"""The types that kernels of GPUs take, and the bytes of a block there (cuda/linear/packed_layout.h)."""

_EXPERT = re.compile(r"\.experts\.\d+\.")


def bytes_of_block(type_name: str, device: str) -> int:
    """Return the bytes of a block where a device, "cpu" or "cuda", computes with it as it is; 0: it does not."""
    packed: int = CUDA_BLOCKS.get(type_name, 0) if device == "cuda" else _core.gguf_type(type_name)[3]
    return packed


def type_on(type_name: str, device: str) -> str:
    """Return the type that blocks of a file have on a device, "cpu" or "cuda", whose kernels may take another one."""
    is_taken = device != "cuda" or type_name in CUDA_BLOCKS
    return type_name if is_taken else _core.gguf_regrouped_type(type_name) or type_name


def choose_native(linears: Linears, types: Mapping[str, str], device: str) -> dict[str, str]:
    """Return the weights that a device computes with as they are stored, and the types of their blocks.

    Ranks must cut the inputs of a linear at multiples of a block. On a CPU gate and up must be of one type; on a GPU
    the gates of a layer's experts must be, and so their ups and their downs. Other weights that a linear joins, such as
    q, k and v, may differ.

    Parameters
    ----------
    linears : Linears
    types : mapping of str to str
        The type of each weight that is stored in blocks, or can be.
    device : str
        "cpu" or "cuda".
    """
    alike: dict[tuple[str, int], list[tuple[str, int]]] = {}  # weights that must be of one type
    for linear, (names, pairs, unit) in linears.items():
        shared = _EXPERT.sub(".experts.", linear) if device == "cuda" else linear  # experts share a table of weights
        for part, name in enumerate(names):
            key = (shared, 0 if pairs and device == "cpu" else part)
            alike.setdefault(key, []).append((name, unit))
    native: dict[str, str] = {}
    for weights in alike.values():
        fits = {}
        for name, unit in weights:
            type_name = types.get(name)
            if type_name and bytes_of_block(type_name, device) and unit % _core.gguf_type(type_name)[0] == 0:
                fits[name] = type_name
        if len(fits) == len(weights) and len(set(fits.values())) == 1:
            native |= fits
    return native
