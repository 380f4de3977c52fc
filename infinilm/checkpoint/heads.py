"""Linears behind the model, which the host computes: those of a pooled vector, and the scores of labels.

They are small beside the model, and their input is one vector of a text.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm import _core
from infinilm.checkpoint.dtype_conversion import convert
from infinilm.checkpoint.folder import FLOATS, Checkpoint
from infinilm.config.families import Family
from infinilm.config.json.model_config import ModelConfig
from infinilm.errors import WeightError
from infinilm.gguf.file import is_gguf, open_gguf
from infinilm.pooling.recipe import Dense, Norm

__all__ = ["HostLinear", "HostStep", "label_tensors", "random_label_scores", "read_label_scores", "read_vector_step"]

Float32Array = npt.NDArray[np.float32]

_TORCH_EPS = 1e-5  # of torch's LayerNorm, where nothing else is said

HostStep = Callable[[Float32Array], Float32Array]
"""What the host makes of rows: [num_rows, in_features] to [num_rows, out_features], float32."""


class HostLinear:
    """A linear and an activation, in float32. A row of its result depends on its own input alone.

    Parameters
    ----------
    weight : float32 array, [out_features, in_features]
    bias : float32 array, [out_features], optional
    activation : str
        "identity", "tanh", "relu", "gelu" (of erf) or "sigmoid".
    """

    def __init__(self, weight: Float32Array, bias: Float32Array | None = None, activation: str = "identity") -> None:
        self._backend = _core.Backend("cpu", num_threads=1)
        self._lock = threading.Lock()  # a backend is of one thread at a time
        tensors = [None if array is None else _core.from_numpy(np.ascontiguousarray(array)) for array in (weight, bias)]
        self._linear = self._backend.prepare_linear([(tensors[0], tensors[1])])  # type: ignore[list-item]
        self._activation = activation
        self.out_features: int = weight.shape[0]

    def __call__(self, x: Float32Array) -> Float32Array:
        """[num_rows, in_features] to [num_rows, out_features]."""
        out = np.empty((len(x), self.out_features), np.float32)
        if len(x):
            with self._lock:
                tensors = [_core.from_numpy(array) for array in (np.ascontiguousarray(x), out)]
                self._backend.linear(tensors[0], self._linear, tensors[1])
        return activate(out, self._activation)


class HostNorm:
    """LayerNorm of each row by itself, computed in float64.

    Parameters
    ----------
    weight : float32 array, [size]
    bias : float32 array, [size], optional
    eps : float
    """

    def __init__(self, weight: Float32Array, eps: float, bias: Float32Array | None = None) -> None:
        self._weight, self._eps = weight.astype(np.float64), eps
        self._bias = 0.0 if bias is None else bias.astype(np.float64)

    def __call__(self, x: Float32Array) -> Float32Array:
        """[num_rows, size] to the same."""
        centred = x.astype(np.float64)
        centred -= centred.mean(-1, keepdims=True)
        normed = centred / np.sqrt((centred * centred).mean(-1, keepdims=True) + self._eps) * self._weight
        result: Float32Array = (normed + self._bias).astype(np.float32)
        return result


def activate(x: Float32Array, activation: str) -> Float32Array:
    """What an activation makes of x, computed in float64."""
    wide = x.astype(np.float64)
    if activation == "tanh":
        wide = np.tanh(wide)
    elif activation == "relu":
        wide = np.maximum(wide, 0)
    elif activation == "gelu":
        wide = wide / 2 * (1 + np.vectorize(math.erf, otypes=[np.float64])(wide / math.sqrt(2)))
    elif activation == "sigmoid":
        wide = 1 / (1 + np.exp(-np.clip(wide, -700, None)))
    elif activation == "softmax":  # of each row
        wide = np.exp(wide - wide.max(-1, keepdims=True))
        wide /= wide.sum(-1, keepdims=True)
    return wide.astype(np.float32)


def read_vector_step(step: Dense | Norm) -> HostStep:
    """Read the weights of a module. WeightError: they are not there, or not as its config.json says."""
    return _read_dense(step) if isinstance(step, Dense) else _read_norm(step)


def _read_norm(norm: Norm) -> HostNorm:
    names = ("norm.weight", "norm.bias")
    with Checkpoint(norm.place) as checkpoint:
        arrays = _read(checkpoint, dict.fromkeys(names, (norm.out_features,)), set(checkpoint.tensors))
    return HostNorm(arrays[names[0]], _TORCH_EPS, arrays[names[1]])


def _read_dense(dense: Dense) -> HostLinear:
    weight, bias = f"{dense.name}.weight", f"{dense.name}.bias"
    if is_gguf(dense.place):
        return HostLinear(open_gguf(dense.place).floats(weight), None, dense.activation)
    shapes: dict[str, tuple[int, ...]] = {weight: (dense.out_features, dense.in_features)}
    if dense.bias:
        shapes[bias] = (dense.out_features,)
    with Checkpoint(dense.place) as checkpoint:
        arrays = _read(checkpoint, shapes, set(checkpoint.tensors))
    return HostLinear(arrays[weight], arrays.get(bias), dense.activation)


def label_tensors(family: Family, stored: Collection[str]) -> list[str]:
    """Names that the tensors of a head of labels have in files with tensors of these names."""
    names = (name for module in family.label_head.steps for name in _names_of(family, module))
    return [tensor for name in names for kind in ("weight", "bias") if (tensor := f"{name}.{kind}") in stored]


def _names_of(family: Family, module: str) -> list[str]:
    """Names that a module of the head may have in the files."""
    return [module, *(prefix + module for prefix, _ in family.names.prefixes)]


def read_label_scores(checkpoint: Any, family: Family, num_labels: int, config: ModelConfig) -> list[HostStep]:
    """Read the head of labels of a checkpoint, step by step.

    WeightError: it is not there, or not of this size.
    """
    steps: list[HostStep] = []
    for module, kind, shape in _modules(family, num_labels, config.hidden_size):
        names = [f"{name}.weight" for name in _names_of(family, module)]
        weight = next((name for name in names if name in checkpoint.tensors), names[0])
        if kind == "norm":
            steps.append(HostNorm(_read(checkpoint, {weight: shape}, {weight})[weight], config.rms_norm_eps))
            continue
        bias = weight.removesuffix("weight") + "bias"
        shapes = {weight: shape}
        if bias in checkpoint.tensors:
            shapes[bias] = shape[:1]
        arrays = _read(checkpoint, shapes, set(shapes))
        steps.append(HostLinear(arrays[weight], arrays.get(bias), kind))
    return steps


def random_label_scores(family: Family, num_labels: int, config: ModelConfig, seed: int) -> list[HostStep]:
    """Make the head of labels of a model whose weights are random, too: linears that keep the size of their input."""
    generator = np.random.default_rng(seed)
    steps: list[HostStep] = []
    for _, kind, shape in _modules(family, num_labels, config.hidden_size):
        if kind == "norm":
            steps.append(HostNorm(np.ones(shape, np.float32), config.rms_norm_eps))
        else:
            weight = generator.standard_normal(shape, np.float32) / np.float32(math.sqrt(config.hidden_size))
            steps.append(HostLinear(weight, None, kind))
    return steps


def _modules(family: Family, num_labels: int, hidden_size: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """The modules of a head of labels: the name of each, what it is, and the shape of its weight."""
    *before, last = family.label_head.steps.items()
    for module, kind in before:
        yield module, kind, (hidden_size,) if kind == "norm" else (hidden_size, hidden_size)
    yield *last, (num_labels, hidden_size)


def _read(checkpoint: Any, shapes: Mapping[str, tuple[int, ...]], there: set[str]) -> dict[str, Float32Array]:
    path = checkpoint.path
    arrays: dict[str, Float32Array] = {}
    if other := sorted(there - set(shapes)):
        raise WeightError(f"{path}: holds {other[0]!r}, which its config.json does not announce")
    for name, shape in shapes.items():
        if name not in checkpoint.tensors:
            raise WeightError(f"{path}: has no tensor {name!r}, of shape {list(shape)}; is the download complete?")
        info = checkpoint.info(name)
        if info.dtype not in FLOATS or info.shape != shape:
            raise WeightError(
                f"{path}: tensor {name!r}: expected {list(shape)} of a floating dtype, got {list(info.shape)} of "
                f"{info.dtype}"
            )
        arrays[name] = convert(checkpoint.array(name), info.dtype, "float32", name=name)
    return arrays
