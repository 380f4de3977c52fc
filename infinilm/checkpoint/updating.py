"""Other values of parameters of a model that is loaded, as tensors with the names of its checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from infinilm import _core
from infinilm.checkpoint.dtype_conversion import convert
from infinilm.checkpoint.folder import is_used_in_place
from infinilm.checkpoint.loading import is_harmless
from infinilm.checkpoint.sources import find_tensors
from infinilm.config.json.model_config import ModelConfig
from infinilm.errors import WeightError, did_you_mean
from infinilm.token_ids import host_array

__all__ = ["digest_of", "read_update"]

_FLOATS = ("float64", "float32", "float16")


class _ParamEngine(Protocol):
    def param_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all parameters."""


def read_update(
    tensors: Mapping[str, Any], engine: _ParamEngine, config: ModelConfig, stored: str, dtype: str
) -> list[tuple[str, _core.Tensor]]:
    """The parameters that tensors of a checkpoint hold, each whole, by the engine's names.

    Parameters
    ----------
    tensors : mapping of str to array
        By their names in the checkpoint: float64, float32, float16 or bfloat16 arrays of numpy, torch, jax, ...
    engine, config
        The model that is loaded, and its configuration, which says how the checkpoint calls and divides parameters.
    stored, dtype : str
        The dtype that the checkpoint's weights are stored in, and that of the computation. These are rounded to both as
        those are.

    Raises
    ------
    WeightError
        A name that the model has not, another shape or dtype.
    """
    kept = stored if is_used_in_place(stored, dtype) else dtype
    arrays = {name: convert(_as_stored(name, one, stored), stored, kept, name=name) for name, one in tensors.items()}
    expected = engine.param_shapes()
    found = find_tensors(config, expected, arrays)
    params: list[tuple[str, _core.Tensor]] = []
    taken = set()
    for name, source in found.sources.items():
        if source.tensor not in arrays:
            continue
        taken.add(source.tensor)
        array = arrays[source.tensor]
        if array.shape != found.shapes[source.tensor]:
            raise WeightError(
                f"tensor {source.tensor!r}: expected shape {found.shapes[source.tensor]}, got {array.shape}"
            )
        own = np.ascontiguousarray(source.take(array)).reshape(expected[name])
        params.append((name, _core.from_numpy(own.copy() if np.shares_memory(own, array) else own, dtype=kept)))
    for name in arrays:
        if name not in taken and not is_harmless(name, found.shapes):
            hint = did_you_mean(name, list(found.shapes))
            raise WeightError(f"the model has no tensor {name!r}{hint}; it has {len(found.shapes)} of them")
    return params


def _as_stored(name: str, value: Any, dtype: str) -> npt.NDArray[Any]:
    """An array in a dtype of weights; bfloat16 as uint16."""
    if str(getattr(value, "dtype", "")).endswith("bfloat16"):  # which numpy has not
        value = value.detach().cpu().contiguous() if hasattr(value, "detach") else value
        array: Any = _core.from_dlpack(value).numpy()  # as float32
    else:
        array = host_array(value)
    kept = str(getattr(array, "dtype", type(value).__name__))
    if not isinstance(array, np.ndarray) or kept not in _FLOATS:
        raise WeightError(f"tensor {name!r}: expected an array of floats, got {kept}")
    return convert(np.ascontiguousarray(array), kept, dtype, name=name)


def digest_of(params: list[tuple[str, _core.Tensor]]) -> str:
    """SHA-256 of names, dtypes and bytes, in hexadecimal digits."""
    digest = hashlib.sha256()
    for name, tensor in sorted(params, key=lambda one: one[0]):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(np.ascontiguousarray(tensor.numpy()).data)
    return digest.hexdigest()
