"""Arrays of other libraries as tensors of the core, and as numpy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm import _core
from infinilm.errors import DeviceError, InfinilmError

_DLPACK_CPU = 1  # kDLCPU of dlpack.h


def as_tensor(
    value: Any, name: str, dtype: str | None = None, *, error: type[InfinilmError] = InfinilmError
) -> _core.Tensor:
    """A tensor that shares the memory of `value`.

    Parameters
    ----------
    value
        Anything with DLPack or the buffer protocol (numpy, torch, cupy, `infinilm.Tensor`), in host memory.
    name
        What it is, for messages.
    dtype
        Which dtype it must have; an array of uint16 holds the bits of "bfloat16" or "float16".
    error
        Raised where the dtype is another.

    Raises
    ------
    TypeError
        It is no array.
    DeviceError
        It is in the memory of another device.
    """
    device = getattr(value, "__dlpack_device__", None)
    if device is not None and device()[0] != _DLPACK_CPU:
        raise DeviceError(
            f"{name}: expected an array in host memory, got one on DLPack device type {int(device()[0])}; copy it to "
            "the host first, such as with .cpu()"
        )
    try:
        return _core.from_numpy(value, dtype)
    except TypeError:
        raise TypeError(
            f"{name}: expected an array with DLPack or the buffer protocol (numpy, torch, cupy, infinilm.Tensor), got "
            f"{type(value).__name__}"
        ) from None
    except InfinilmError as cause:
        raise error(f"{name}: {cause}") from cause


def to_array(tensor: Any) -> npt.NDArray[Any]:
    """A numpy array of anything with DLPack or the buffer protocol; bfloat16 comes as float32."""
    if isinstance(tensor, np.ndarray):
        return tensor
    array: npt.NDArray[Any] = as_tensor(tensor, "tensor").numpy()
    return array
