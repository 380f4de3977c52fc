"""The format of a linear in a quantised checkpoint, and its tensors brought to codes with tables.

`Scheme` comes from the config (`config.py`). A `Layout` (`layouts.py`) says which tensors a linear has then, and makes
`Codes` of them, which the C++ core turns into plain numbers, or into blocks that CPUs compute with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from infinilm import _core

__all__ = ["POWERS", "Codes", "Layout", "Part", "Parts", "Scheme", "Shape"]

Shape = tuple[int, ...]
Array = npt.NDArray[Any]
POWERS: npt.NDArray[np.float32] = np.append(2.0 ** (np.arange(255) - 127.0), np.nan).astype(np.float32)
"""[256]: scales of MXFP4 by their bytes (E8M0)."""
Parts = Mapping[str, Array]
"""The tensors of a linear as they are stored, by suffix; bfloat16 as uint16 and float8 as uint8."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a linear is quantised.

    Attributes
    ----------
    method : str
        The method's name in the config, for messages: "gptq".
    layout : str
        Key of `LAYOUTS`.
    kind : str
        The kind of numbers: "int4", "fp8", "nf4".
    bits : int
        Bits of a code.
    group_size : int
        Weights of an output that share a scale; 0: the layout or the scale's shape says it.
    symmetric : bool
        There are no zero points, or all are in the middle.
    block : (int, int), optional
        Outputs and inputs that share a scale.
    zero_word : int
        Added to the words of zero points (GPTQ v1).
    zero_offset : int
        Added to each zero point (GPTQ v1 of 3 bits, which do not fill words).
    reordered : bool
        Groups may be no neighbours.
    inputs : str
        What the format rounds the inputs of a linear to; "": it does not.
    """

    method: str
    layout: str
    kind: str
    bits: int
    group_size: int = 0
    symmetric: bool = True
    block: tuple[int, int] | None = None
    zero_word: int = 0
    zero_offset: int = 0
    reordered: bool = False
    inputs: str = ""

    def inputs_on_gpus(self) -> str:
        """To what kernels of GPUs round the inputs of such weights, where that is wanted; "": they do not."""
        if self.kind != "fp8" or self.group_size or (self.block and self.block[1] != 128):
            return ""
        return "fp8 per 128 of a token" if self.block else "fp8 per token"

    def __str__(self) -> str:
        """Return a short name such as "gptq int4 g128"."""
        parts = [self.method] if self.method == self.kind else [self.method, self.kind]
        if self.group_size:
            parts.append(f"g{self.group_size}")
        if self.block:
            parts.append("x".join(map(str, self.block)))
        if not self.symmetric:
            parts.append("asymmetric")
        return " ".join(parts)


class Part(NamedTuple):
    """A tensor of a linear."""

    dtypes: tuple[str, ...]
    required: bool = True
    read: bool = True  # False: it does not count for the weights


@dataclass(frozen=True, slots=True)
class Codes:
    """A matrix of codes, see `src/codes/matrix.h`.

    Attributes
    ----------
    data : numpy.ndarray of uint8, one dimension
    order : str
        Where the bits of a code lie.
    bits : int
    shape : (int, int)
        Outputs and inputs.
    values : numpy.ndarray of float32
        [2 ** bits]: what a code stands for.
    scales : numpy.ndarray
        [outputs / scale_rows, groups]: float32, or float16, or bfloat16 as uint16.
    zeros : numpy.ndarray of float32, optional
        Zero points, in the shape of the scales.
    group_size : int
        Inputs of a group.
    scale_rows : int
        Outputs that share scales.
    group_of : numpy.ndarray of int32, optional
        [inputs]: the group of each.
    minima : numpy.ndarray, optional
        What is added to a code times its scale, in the shape of the scales and as they are stored.
    scale_codes : numpy.ndarray of uint8, optional
        The scales as e4m3 numbers, where these times `factor` are what they are.
    factor : float
    """

    data: npt.NDArray[np.uint8]
    order: str
    bits: int
    shape: Shape
    values: npt.NDArray[np.float32]
    scales: Array
    zeros: npt.NDArray[np.float32] | None = None
    group_size: int = 0
    scale_rows: int = 1
    group_of: npt.NDArray[np.int32] | None = None
    minima: Array | None = None
    scale_codes: npt.NDArray[np.uint8] | None = None
    factor: float = 1

    def dequantise(self, dtype: str, begin: int, end: int) -> _core.Tensor:
        """Return rows as plain numbers of `dtype`."""
        return _core.dequantise_codes(
            self.data,
            self.order,
            self.bits,
            self.shape,
            values=self.values,
            scales=as_float32(self.scales),
            zeros=self.zeros,
            minima=None if self.minima is None else as_float32(self.minima),
            group_size=self.group_size,
            scale_rows=self.scale_rows,
            group_of=self.group_of,
            dtype=dtype,
            begin=begin,
            end=end,
        )

    def _is_symmetric(self) -> bool:
        """True if codes stand for integers around the middle one."""
        signed = np.arange(2**self.bits, dtype=np.float32)
        if self.values[0] == 0 and self.values[-1] == -1:  # two's complement
            signed = signed.astype(np.uint8).view(np.int8).astype(np.float32)
            return self.zeros is None and bool((self.values == signed).all())
        middle = np.float32(2 ** (self.bits - 1))
        zero = middle + self.values[0]
        zeros = np.zeros(1, np.float32) if self.zeros is None else self.zeros
        return bool((self.values - self.values[0] == signed).all() and (zeros == zero).all())

    def _zero_bytes(self) -> npt.NDArray[np.uint8] | None:
        """Return the codes of the zero points, as int8, of the shape of the scales; None: there are no such."""
        zeros = (np.zeros(self.scales.shape, np.float32) if self.zeros is None else self.zeros) - self.values[0]
        codes = np.clip(zeros, -128, 127).astype(np.int8)
        fits = np.array_equal(codes, zeros) and bool((np.diff(self.values) == 1).all())
        return codes.view(np.uint8) if fits else None

    def block_scales(self, block_type: str) -> npt.NDArray[np.uint8] | None:
        """Return the scales as blocks have them, [outputs, groups, bytes]; None: the codes do not fit such."""
        exact = as_float32(self.scales)
        if block_type.startswith("F8"):
            stored = np.ascontiguousarray(exact).view(np.uint8).reshape(*exact.shape, 4)
            fits = self.group_of is None and not (np.abs(exact) >= 256).any()  # CPUs keep 2 ** 120 times as much
        elif block_type == "NVFP4_ROW":
            if self.scale_codes is None or (self.scale_codes >= 0x7F).any():  # a sign, or not a number
                return None
            codes = self.scale_codes.reshape(self.shape[0], -1, 4)
            scales = np.empty((*codes.shape[:2], 8), np.uint8)
            scales[..., :4], scales[..., 4:] = np.array([self.factor], "<f4").view(np.uint8), codes
            return scales
        elif block_type == "MXFP4":  # the exponents of powers of two; the largest byte stands for none
            exponents = (exact.view(np.uint32) >> 23).astype(np.uint8)
            fits = bool((exponents < 255).all()) and np.array_equal(POWERS[exponents], exact)
            stored = exponents[:, :, None]
        else:
            stored, fits = _as_halves(exact)
            fits = fits and self.group_of is None
            if self.minima is not None:
                minima, exact_minima = _as_halves(as_float32(self.minima))
                fits = fits and exact_minima
                stored = np.concatenate([stored, minima], axis=2)
            elif block_type.startswith("Z4"):
                zeros = self._zero_bytes()
                fits = fits and zeros is not None
                stored = stored if zeros is None else np.concatenate([stored, zeros[:, :, None]], axis=2)
            else:
                fits = fits and self._is_symmetric()
        if not fits:
            return None
        return np.ascontiguousarray(np.repeat(stored, self.scale_rows, axis=0)[: self.shape[0]])

    def blocks(self, block_type: str, begin: int, end: int) -> npt.NDArray[np.uint8]:
        """Return rows as blocks of Q4_0, Q4_1, Q8_0, MXFP4, NVFP4_ROW, Z4_* or F8_*, [rows, bytes]; they must fit."""
        scales = self.block_scales(block_type)
        assert scales is not None
        block = _core.gguf_type(block_type)[0]
        tensor = _core.make_blocks(
            self.data,
            self.order,
            self.bits,
            self.shape,
            scales=scales,
            group_size=max(self.group_size, block),  # of NVFP4_ROW a block has the scales of four groups
            block=block,
            flip=0x80 if self.values[0] != 0 or self.zeros is not None else 0,
            begin=begin,
            end=end,
        )
        return np.asarray(tensor.memory()).reshape(end - begin, -1)


def _as_halves(table: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.uint8], bool]:
    """The bytes of float16 numbers, [.., 2], and whether they are the same numbers."""
    with np.errstate(over="ignore"):
        halves = table.astype(np.float16)
    return halves.view(np.uint8).reshape(*halves.shape, 2), np.array_equal(halves.astype(np.float32), table)


def as_float32(array: Array) -> npt.NDArray[np.float32]:
    """Widen float16, or bfloat16 as uint16."""
    if array.dtype == np.uint16:
        return np.ascontiguousarray((array.astype(np.uint32) << 16).view(np.float32))
    return np.ascontiguousarray(array.astype(np.float32, copy=False))


@dataclass(frozen=True, slots=True)
class Layout:
    """The tensors of a quantised linear.

    Attributes
    ----------
    parts : mapping of str to Part
        By what follows the name of the module. The first has the codes.
    shape : callable
        (scheme, shape of the first, parts to read now) -> shape of the weight, outputs and inputs.
    expected : callable
        (scheme, shape of the weight) -> shapes that the parts may have.
    codes : callable
        (scheme, shape of the weight, all parts) -> Codes.
    peek : tuple of str
        Parts that `shape` needs, all small.
    scale : str
        The part whose dtype is that of the scales.
    minimum : str
        The part that is added to codes times scales; "": there is none.
    name : str
        What follows the name of the module in the plain checkpoint.
    dims : tuple of int
        How many dimensions the first part may have: two; in stacks of matrices three, or four where blocks count.
    said : callable, optional
        What the metadata of the file say of the weight -> another part to read now, "said", or None where they say
        nothing that counts.
    """

    parts: Mapping[str, Part]
    shape: Callable[[Scheme, Shape, Parts], Shape]
    expected: Callable[[Scheme, Shape], Mapping[str, tuple[Shape, ...]]]
    codes: Callable[[Scheme, Shape, Parts], Codes]
    peek: tuple[str, ...] = ()
    scale: str = ""
    minimum: str = ""
    name: str = ".weight"
    dims: tuple[int, ...] = (2,)
    said: Callable[[str], Array | None] | None = None

    @property
    def main(self) -> str:
        """The part that has the codes."""
        return next(iter(self.parts))
