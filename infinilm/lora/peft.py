"""A folder of PEFT as changes of the engine's parameters.

The tensors are called by the modules of the model as transformers has it, `base_model.model.<module>.lora_A.weight`.
Which of the engine's parameters a module holds, in which rows and in which order, is what `find_tensors` knows of its
weight: an adapter of Phi-3's `qkv_proj` is one of q, of k and of v, with the same A and some rows of B each. Which
parameters requests can have adapters of is what the core's `adapter_params` lists; all of layers can be merged.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm import _core
from infinilm.checkpoint.dtype_conversion import convert
from infinilm.checkpoint.folder import FLOATS, Checkpoint
from infinilm.checkpoint.sources import Source, find_tensors
from infinilm.checks import DTYPES, short_repr
from infinilm.config.families import family_of
from infinilm.config.json.model_config import ModelConfig
from infinilm.config.spec import build_spec, longest_text
from infinilm.errors import WeightError
from infinilm.hub import download_folder
from infinilm.lora.settings import CONFIG_FILE, LoraSettings

__all__ = ["LoraWeight", "PeftAdapter", "read_adapter"]

Array = npt.NDArray[Any]

_FILE = "adapter_model.safetensors"
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")
_VOCABULARY = ("model.embed_tokens.weight", "model.embed_tokens_per_layer.weight", "lm_head.weight")
_ROUND = 32  # outputs and inputs of packed weights are filled up to a multiple of this


@dataclass(frozen=True, slots=True, eq=False)
class LoraWeight:
    """A matrix that is added to a parameter: scale * b @ a.

    Attributes
    ----------
    a, b : numpy.ndarray
        [rank, in_features], [out_features, rank]; bfloat16 as uint16. Where a parameter is a transposed matrix
        of each head, one below the other, a has one of each head, too, [num_heads * rank, in_features]; all share b.
    a_dtype, b_dtype : str
    scale : float
    divided : str
        What ranks divide: the rows of b, "rows"; the columns of a, or its heads, "columns"; or nothing, "whole".
    """

    a: Array
    b: Array
    a_dtype: str
    b_dtype: str
    scale: float
    divided: str

    @property
    def rank(self) -> int:
        """Columns of b."""
        return int(self.b.shape[1])

    def delta(self, dtype: str = "float32") -> Array:
        """The whole change of the parameter, in float32 or float64."""
        a, b = (convert(*part, "float32").astype(dtype) for part in ((self.a, self.a_dtype), (self.b, self.b_dtype)))
        result: Array = a.dtype.type(self.scale) * (b @ a.reshape(-1, self.rank, a.shape[1]))
        return result.reshape(-1, a.shape[1])

    def packed_bytes(self, num_ranks: int) -> int:
        """Bytes that it takes, of all ranks: each has a part of what they divide, and the rest whole."""

        def filled(size: int) -> int:
            return -(-size // _ROUND) * _ROUND

        width = 2 if self.a_dtype != "float32" else 4
        num_heads = len(self.a) // self.rank
        a, b = (filled(self.rank) * filled(size) * width for size in (num_heads * self.a.shape[1], len(self.b)))
        return (1 if self.divided == "columns" else num_ranks) * a + (1 if self.divided == "rows" else num_ranks) * b


@dataclass(frozen=True, slots=True, eq=False)
class PeftAdapter:
    """An adapter that fits a model.

    Attributes
    ----------
    folder : Path
    weights : Mapping of str to LoraWeight
        By the engine's names of parameters.
    """

    folder: Path
    weights: Mapping[str, LoraWeight]

    @property
    def most_rank(self) -> int:
        """The largest rank of its weights."""
        return max(weight.rank for weight in self.weights.values())

    def packed_bytes(self, num_ranks: int) -> int:
        """Bytes that it takes, of all ranks."""
        return sum(weight.packed_bytes(num_ranks) for weight in self.weights.values())


def read_adapter(folder: str | os.PathLike[str], config: ModelConfig, *, merged: bool = False) -> PeftAdapter:
    """Read the adapter of a model from a folder that PEFT saved.

    Parameters
    ----------
    folder : path
        Or a hub id, of which it is fetched.
    config : ModelConfig
        The configuration of the model.
    merged : bool
        It becomes part of the weights, which all linears of layers can take. Else requests have it.

    Raises
    ------
    FileNotFoundError
        There is no such folder, or no adapter_config.json in it.
    ConfigError
        The adapter is of a kind that is not supported: names the key.
    WeightError
        Its tensors do not fit the model, or are damaged: names the tensor.
    """
    path = Path(download_folder("adapter", folder, (CONFIG_FILE, _FILE))).expanduser()
    if not (path / CONFIG_FILE).exists():
        raise FileNotFoundError(
            f"{path}: expected the folder of a LoRA adapter as PEFT saves it, with {CONFIG_FILE} and {_FILE}"
        )
    settings = LoraSettings.read(path)
    file = path / _FILE
    if not file.exists():
        pickled = " (adapter_model.bin is not read; save it again with safe_serialization=True)"
        raise WeightError(f"{file}: there is no such file{pickled if (path / 'adapter_model.bin').exists() else ''}")
    with Checkpoint(file) as checkpoint:
        pairs = _pairs(checkpoint, settings)
        spec = build_spec(config, dtype="float32", max_model_len=longest_text(config))
        places, divided = _places(config, spec), _core.adapter_params(spec)
        weights: dict[str, LoraWeight] = {}
        for module, (name_a, name_b) in pairs.items():
            if module not in places:
                raise WeightError(
                    f"{file}: tensor {name_a!r} is of a module that an adapter cannot change here: linears of layers "
                    "can be, not embeddings, the lm_head or modules of other models"
                )
            rows, columns, params = places[module]
            if not merged and not all(param in divided for param, _ in params):
                raise WeightError(
                    f"{file}: tensor {name_a!r} is of a module that requests cannot have an adapter of: experts, and "
                    "what chooses and weighs them, can only be changed for all requests; merge the adapter "
                    "(merge_lora), or train other modules"
                )
            (a, a_dtype), (b, b_dtype) = _array(checkpoint, name_a), _array(checkpoint, name_b)
            rank = settings.rank_of(module)
            for name, got, expected in ((name_a, a.shape, (rank, columns)), (name_b, b.shape, (rows, rank))):
                if got != expected:
                    raise WeightError(
                        f"{file}: tensor {name!r}: expected shape {list(expected)}, of rank {rank} for a weight of "
                        f"{[rows, columns]}, got {list(got)}; is the adapter of another model?"
                    )
            scale = settings.scale_of(module)
            for param, source in params:
                own = np.ascontiguousarray(source.take(b))
                if source.transposed:  # (b a)^T = a^T b^T of each head
                    weights[param] = LoraWeight(own, np.ascontiguousarray(a.T), b_dtype, a_dtype, scale, "columns")
                else:
                    weights[param] = LoraWeight(a, own, a_dtype, b_dtype, scale, divided.get(param, "whole"))
    return PeftAdapter(path, weights)


def _pairs(checkpoint: Checkpoint, settings: LoraSettings) -> dict[str, tuple[str, str]]:
    """The names of A and B by module; what is neither is refused."""
    found: dict[str, dict[str, str]] = {}
    for name in checkpoint.tensors:
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise WeightError(
                f"{checkpoint.path}: tensor {name!r} is not supported: expected lora_A.weight and lora_B.weight of "
                "linears alone, base_model.model.<module> before them"
            )
        module, part = match.groups()
        if part in found.setdefault(module, {}):
            raise WeightError(f"{checkpoint.path}: tensors {found[module][part]!r} and {name!r} are the same")
        found[module][part] = name
    for module, parts in found.items():
        if len(parts) < 2:
            (name,) = parts.values()
            raise WeightError(f"{checkpoint.path}: tensor {name!r} has no partner: A and B belong together")
        if not settings.is_target(module):
            raise WeightError(
                f"{checkpoint.path}: tensor {parts['A']!r} is of no module that target_modules of {settings.path} "
                f"means: {short_repr(settings.target_modules)}"
            )
    targets = settings.target_modules
    for target in () if isinstance(targets, str) else targets:
        if not any(module == target or module.endswith(f".{target}") for module in found):
            raise WeightError(
                f"{checkpoint.path}: no tensor is of {target!r}, which target_modules of "
                f"{settings.path} names; is the file complete?"
            )
    if not found:
        raise WeightError(f"{checkpoint.path}: there are no tensors")
    return {module: (parts["A"], parts["B"]) for module, parts in found.items()}


def _places(config: ModelConfig, spec: _core.ModelSpec) -> dict[str, tuple[int, int, list[tuple[str, Source]]]]:
    """Rows and columns of the weight of each linear but those of the vocabulary, and the parameters it holds."""
    expected = _core.param_shapes(spec)
    places: dict[str, tuple[int, int, list[tuple[str, Source]]]] = {}
    for prefix, _ in family_of(config.architecture).names.prefixes:  # transformers has renamed some in time
        found = find_tensors(config, expected, [f"{prefix}embed_tokens.weight"])
        for name, source in found.sources.items():
            if len(expected[name]) == 2 and name not in _VOCABULARY:
                rows, columns = found.shapes[source.tensor]
                module = source.tensor.removesuffix(".weight")
                params = places.setdefault(module, (rows, columns, []))[2]
                if all(param != name for param, _ in params):
                    params.append((name, source))
    return places


def _array(checkpoint: Checkpoint, name: str) -> tuple[Array, str]:
    """A tensor, a copy, and its dtype."""
    stored = checkpoint.info(name).dtype
    if stored not in FLOATS:
        raise WeightError(f"{checkpoint.path}: tensor {name!r}: expected a floating dtype, got {stored}")
    array = checkpoint.array(name)
    if array.ndim != 2:
        raise WeightError(f"{checkpoint.path}: tensor {name!r}: expected a matrix, got shape {list(array.shape)}")
    if stored not in DTYPES:
        return convert(array, stored, "float32", name=name), "float32"
    return array.copy(), stored
