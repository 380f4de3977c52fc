"""Functions of arrays that several sublayers consist of: RoPE, activations, soft caps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["JOINS", "Array", "rotate", "sigmoid", "silu", "soft_cap", "stored_array", "xielu"]

Array = npt.NDArray[Any]  # of the model's dtype


def rotate(x: Array, cos_sin: tuple[Array, Array]) -> Array:
    """RoPE of the first R elements of a head: i turns with i + R / 2; x [num_tokens, num_heads, head_dim]."""
    cos, sin = cos_sin
    first, second, rest = np.split(x, [cos.shape[-1], 2 * cos.shape[-1]], axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def silu(x: Array) -> Array:
    """X times its sigmoid."""
    with np.errstate(over="ignore"):  # far below zero: x / inf is the 0 it should be
        result: Array = x / (1 + np.exp(-x))
    return result


def sigmoid(x: Array) -> Array:
    """1 / (1 + e^-x)."""
    with np.errstate(over="ignore"):
        result: Array = 1 / (1 + np.exp(-x))
    return result


def gelu_tanh(x: Array) -> Array:
    result: Array = x / 2 * (1 + np.tanh(x.dtype.type((2 / np.pi) ** 0.5) * (x + x.dtype.type(0.044715) * x * x * x)))
    return result


def gelu(x: Array) -> Array:
    result: Array = x / 2 * (1 + np.vectorize(math.erf, otypes=[x.dtype])(x / math.sqrt(2)))
    return result


def quick_gelu(x: Array) -> Array:
    """An approximation of gelu by a sigmoid."""
    result: Array = x * sigmoid(x * x.dtype.type(1.702))
    return result


def xielu(x: Array, alpha_p: Array, alpha_n: Array) -> Array:
    """Apply xIELU with its two numbers, see `src/args/activation.h`."""
    scalar = x.dtype.type
    below = (np.expm1(np.minimum(x, scalar(-1e-6))) - x) * alpha_n
    result: Array = np.where(x > 0, alpha_p * x * x, below) + x * scalar(0.5)
    return result


def clamped_swiglu(gate: Array, up: Array) -> Array:
    scalar = gate.dtype.type
    gate, up = np.minimum(gate, scalar(7)), np.clip(up, scalar(-7), scalar(7))
    result: Array = silu(gate * scalar(1.702)) / scalar(1.702) * (up + 1)
    return result


JOINS: Mapping[str, Callable[[Array, Array], Array]] = {
    "silu": lambda gate, up: silu(gate) * up,
    "gelu_tanh": lambda gate, up: gelu_tanh(gate) * up,
    "gelu": lambda gate, up: gelu(gate) * up,
    "quick_gelu": lambda gate, up: quick_gelu(gate) * up,
    "relu2": lambda gate, up: np.square(np.maximum(gate, 0)) * up,
    "relu": lambda gate, up: np.maximum(gate, 0) * up,
    "clamped_swiglu": clamped_swiglu,
}
"""The activation of an MLP: of gate and up, both [num_tokens, intermediate_size]."""


def soft_cap(x: Array, cap: float) -> Array:
    """Cap * tanh(x / cap); 0: none."""
    return x if cap == 0 else x.dtype.type(cap) * np.tanh(x / x.dtype.type(cap))


def stored_array(array: Array, dtype: str) -> Array:
    """A tensor of a checkpoint, bfloat16 (uint16 in numpy) widened."""
    return (array.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else array
