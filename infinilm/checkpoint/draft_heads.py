"""Loads heads that draft, such as those of EAGLE-3, from checkpoints of their own beside that of their model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm import _core
from infinilm.checkpoint.dtype_conversion import convert
from infinilm.checkpoint.folder import Checkpoint
from infinilm.checkpoint.loading import WeightEngine, load_weights
from infinilm.checkpoint.safetensors_header import TensorInfo
from infinilm.checkpoint.sources import FoundTensors, Source
from infinilm.errors import WeightError

__all__ = ["has_lm_head", "is_of_head", "load_head"]

_LM_HEAD = "lm_head.weight"
_LAYERS = ("midlayer.", "layers.0.")  # what stands before the names of its layer: in the authors' form, in speculators
# The embedding is that of the model: heads are trained with a copy of it that stays as it is.
_NOT_READ = ("embed_tokens.weight", "d2t", "t2d")
_RENAMED = {
    "enorm": "input_layernorm",
    "hnorm": "hidden_norm",
}


def has_lm_head(folder: Path) -> bool:
    """Whether a head has an lm_head of its own; raises what `Checkpoint` does."""
    with Checkpoint(folder) as checkpoint:
        return _LM_HEAD in checkpoint.tensors


def is_of_head(name: str, num_layers: int) -> bool:
    """Whether a parameter is of a layer behind those of the model."""
    layer = name.removeprefix("model.layers.").partition(".")[0]
    return layer.isdigit() and int(layer) >= num_layers


def load_head(
    folder: Path,
    engine: WeightEngine,
    spec: _core.ModelSpec,
    *,
    dtype: str,
    progress: bool = True,
    from_numpy: Callable[..., Any] | None = None,
    stage: int = -1,
) -> npt.NDArray[np.int32] | None:
    """Load a head into an engine of its model.

    Parameters
    ----------
    folder : Path
    engine : WeightEngine
        Its other parameters are in the checkpoint of the model.
    spec : ModelSpec
        What the engine was made with.
    dtype, progress, from_numpy, stage
        As for `load_weights`.

    Returns
    -------
    int32 array or None
        [ids of the head]: their ids in the vocabulary of the model. None: they are the same.

    Raises
    ------
    FileNotFoundError, WeightError
        The files are not there, or not as config.json says.
    """
    assert spec.mtp is not None
    find = _find_assistant if spec.mtp.hidden_size else _find_eagle3

    def add_offset(name: str, array: npt.NDArray[Any], kept: str) -> npt.NDArray[Any]:
        """The engine adds to each norm what the norms of its model lack; those of a head lack nothing."""
        if not name.endswith("norm.weight") or not spec.norm_offset:
            return array
        return convert(convert(array, kept, "float32") - np.float32(spec.norm_offset), "float32", kept, name=name)

    with Checkpoint(folder) as checkpoint:
        load_weights(
            checkpoint,
            engine,
            dtype=dtype,
            progress=progress,
            from_numpy=from_numpy,
            change=add_offset,
            find=lambda expected, stored: find(spec, expected, stored),
            is_whole=False,
            is_wanted=lambda name: is_of_head(name, spec.num_layers),
            stage=stage,
        )
        return None if find is _find_assistant else _token_ids(checkpoint, spec)


def _find_assistant(
    spec: _core.ModelSpec, expected: Mapping[str, tuple[int, ...]], stored: Mapping[str, TensorInfo]
) -> FoundTensors:
    """Find the tensors of Gemma 4's drafters. Their lm_head is their embedding, which nothing else reads."""
    sources: dict[str, Source] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    lm_head = _LM_HEAD if _LM_HEAD in stored else "model.embed_tokens.weight"
    for name, shape in expected.items():
        number, _, module = name.removeprefix("model.layers.").partition(".")
        order, num_rows = None, shape[0]
        if module.startswith("pre_projection."):  # of the embedding, then of the hidden state
            part, tensor = int(module.split(".")[1]), "pre_projection.weight"
            order = np.arange(shape[1]) + part * shape[1]
            shape = shape[0], 2 * shape[1]
        elif module == "shared_head.head.weight":
            tensor, shape = lm_head, (spec.vocab_size, shape[1])
        elif module == "shared_head.norm.weight":
            tensor = "model.norm.weight"
        elif module == "post_projection.weight":
            tensor = module
        else:
            tensor = f"model.layers.{int(number) - spec.num_layers}.{module}"
        sources[name], shapes[tensor] = Source(tensor, 0, num_rows, column_order=order), shape
    # Clusters of ids spare a part of the lm_head, and all of it is read here. Keys and values are those of the model.
    not_read = ("masked_embedding.", "model.embed_tokens.", "lm_head.")
    of_keys = ("k_proj.weight", "v_proj.weight", "k_norm.weight")
    left = tuple(
        name for name in stored if name not in shapes and (name.startswith(not_read) or name.endswith(of_keys))
    )
    return FoundTensors(sources, shapes, left)


def _find_eagle3(
    spec: _core.ModelSpec, expected: Mapping[str, tuple[int, ...]], stored: Mapping[str, TensorInfo]
) -> FoundTensors:
    of_layer = next((names for names in _LAYERS if any(tensor.startswith(names) for tensor in stored)), _LAYERS[0])
    assert spec.mtp is not None
    num_taps = len(spec.mtp.taps)
    sources: dict[str, Source] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in expected.items():
        module, _, kind = name.split(".", 3)[3].rpartition(".")
        order = None
        if module.startswith("fc."):
            tap, tensor = int(module.removeprefix("fc.")), f"fc.{kind}"
            order = np.arange(shape[1]) + tap * shape[1]
            shape = shape[0], num_taps * shape[1]
        elif module.startswith("shared_head."):
            tensor = {"norm": f"norm.{kind}", "head": _LM_HEAD}[module.removeprefix("shared_head.")]
        else:
            tensor = f"{of_layer}{_RENAMED.get(module, module)}.{kind}"
        sources[name], shapes[tensor] = Source(tensor, 0, shape[0], column_order=order), shape
    return FoundTensors(sources, shapes, tuple(name for name in _NOT_READ if name in stored))


def _token_ids(checkpoint: Checkpoint, spec: _core.ModelSpec) -> npt.NDArray[np.int32] | None:
    """What the ids of a head are: `d2t` has what is to be added to each."""
    assert spec.mtp is not None
    size = spec.mtp.lm_head_size or spec.vocab_size
    if "d2t" not in checkpoint.tensors:
        if size != spec.vocab_size:
            raise WeightError(
                f"{checkpoint.path}: has no tensor 'd2t', which tells what the {size} ids of the head are among the "
                f"{spec.vocab_size} of the model; is the download complete?"
            )
        return None
    info = checkpoint.info("d2t")
    if info.shape != (size,) or not info.dtype.startswith("int"):
        raise WeightError(
            f"{info.file}: tensor 'd2t': expected [{size}] integers, got {list(info.shape)} of {info.dtype}"
        )
    token_ids = np.arange(size) + checkpoint.array("d2t").astype(np.int64)
    if token_ids.min() < 0 or token_ids.max() >= spec.vocab_size:
        raise WeightError(
            f"{info.file}: tensor 'd2t' names ids from {token_ids.min()} to {token_ids.max()}, and the model has "
            f"{spec.vocab_size}; take the head that was trained with this model"
        )
    return token_ids.astype(np.int32)
