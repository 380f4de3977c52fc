"""Rounds the weights of a linear to integers with scales: each by itself, or so that the output changes least.

The second way is GPTQ: inputs are rounded one after the other, and what one loses the later ones make up for, as far as
the inputs of a calibration text go together. Source of the idea: Frantar et al., "GPTQ: Accurate Post-Training
Quantization for Generative Pre-trained Transformers", arXiv 2210.17323.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm import _core
from infinilm.checkpoint.dtype_conversion import convert

__all__ = ["quantise_linear"]

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]

_BLOCK = 128  # inputs whose corrections reach the inputs behind them at once; a multiple or a divisor of a group
_DAMPING = 0.1  # of the mean square of an input, added to that of each: what a short text has not shown


def quantise_linear(
    weights: Floats, bits: int, group_size: int, gram: npt.NDArray[np.floating[Any]] | None = None
) -> tuple[npt.NDArray[np.int8], Array]:
    """Round weights to integers, symmetric, with a bfloat16 scale for each group.

    Parameters
    ----------
    weights
        [outputs, inputs].
    bits
        4: of each group's scale some are tried, for the least squared error; 8: the largest weight is 127.
    group_size
        Inputs that share the scale of an output: 32 or 128 of 4 bits; 0 of 8: all.
    gram
        [inputs, inputs]: sums of products of the linear's inputs over the tokens of a text. None: each weight is
        rounded to the nearest.

    Returns
    -------
    integers : int8
        [outputs, inputs].
    scales : uint16
        [outputs, groups]: bfloat16.
    """
    if gram is None:
        scales = _scales(weights, bits, group_size)
        return _nearest(weights, np.repeat(_widen(scales), group_size or weights.shape[1], 1), bits), scales
    return _compensated(weights, bits, group_size or weights.shape[1], gram)


def _scales(weights: Floats, bits: int, group_size: int) -> npt.NDArray[np.uint16]:
    if bits == 4:
        _, made = _core.quantise_int4(np.ascontiguousarray(weights), group_size)
        return np.asarray(made.memory()).view(np.uint16).reshape(len(weights), -1)
    return convert(np.abs(weights).max(1, keepdims=True) / np.float32(127), "float32", "bfloat16")


def _widen(scales: npt.NDArray[np.uint16]) -> Floats:
    return (scales.astype(np.uint32) << 16).view(np.float32)


def _nearest(weights: Floats, scales: Floats, bits: int) -> npt.NDArray[np.int8]:
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=np.abs(scales) > 2.0**-119)
    low, high = (-8, 7) if bits == 4 else (-127, 127)
    codes: npt.NDArray[np.int8] = np.clip(np.rint(weights * inverse), low, high).astype(np.int8)
    return codes


def _compensated(
    weights: Floats, bits: int, group_size: int, gram: npt.NDArray[np.floating[Any]]
) -> tuple[npt.NDArray[np.int8], Array]:
    outputs, inputs = weights.shape
    factor = _inverse_factor(gram)
    left = np.ascontiguousarray(weights.T)  # [inputs, outputs]: what is still to be rounded
    integers = np.empty((inputs, outputs), np.int8)
    scales = _scales(weights, bits, group_size) if group_size >= inputs else np.empty((outputs, 0), np.uint16)
    for begin in range(0, inputs, _BLOCK):
        end = min(begin + _BLOCK, inputs)
        block, errors = left[begin:end], np.empty((end - begin, outputs), np.float32)
        for i in range(end - begin):
            if (begin + i) % group_size == 0 and group_size < inputs:
                group = np.ascontiguousarray(left[begin + i : begin + i + group_size].T)
                scales = np.concatenate([scales, _scales(group, bits, group_size)], 1)
            scale = _widen(scales[:, -1])
            integers[begin + i] = _nearest(block[i], scale, bits)
            errors[i] = (block[i] - integers[begin + i] * scale) / factor[begin + i, begin + i]
            block[i + 1 :] -= factor[begin + i, begin + i + 1 : end, None] * errors[i]
        left[end:] -= factor[begin:end, end:].T @ errors
    return np.ascontiguousarray(integers.T), scales


def _inverse_factor(gram: npt.NDArray[np.floating[Any]]) -> Floats:
    """The upper triangular factor U of the inverse of a damped Gram matrix: U^T U; [inputs, inputs]."""
    damped = gram.astype(np.float64)
    diagonal = np.einsum("ii->i", damped)
    diagonal[diagonal == 0] = 1  # an input that was always 0 has no influence on others
    diagonal += _DAMPING * diagonal.mean()
    # With rows and columns in reverse order, the lower factor of the matrix is the upper factor of another product,
    # whose inverse is U: no inverse of the whole matrix is needed.
    upper = np.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1]
    return np.linalg.inv(upper).astype(np.float32)
