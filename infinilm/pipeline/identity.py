"""What must be equal in all stages of a pipeline, and the part of the model's memory that one has."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from infinilm._version import __version__
from infinilm.checkpoint.opening import open_checkpoint
from infinilm.errors import ConfigError
from infinilm.planning.memory import ModelPlan

__all__ = ["check_parts", "one_or_each", "parts_of"]

_T = TypeVar("_T")


def parts_of(plan: ModelPlan, *, dummy: bool) -> dict[str, str]:
    """Names and values, which the first stage compares with those of each other stage."""
    tensors = ""
    if not dummy:
        with open_checkpoint(plan.path) as checkpoint:
            tensors = repr(sorted((name, info.dtype, tuple(info.shape)) for name, info in checkpoint.tensors.items()))
    return {
        "version": __version__,
        "config.json": _digest(json.dumps(plan.config.to_dict(), sort_keys=True, default=str)),
        "tensors of the checkpoint": _digest(tensors),
        "dtype": plan.dtype,
        "quantization": f"{plan.quantization}, {', '.join(plan.native_types)}, {plan.quantised_dtype}",
        "activations": "fp8" if plan.fp8_inputs else "dtype",
        "kv_cache_dtype": plan.memory.kv_cache_dtype,
        "max_model_len": str(plan.memory.max_model_len),
    }


def check_parts(name: str, own: Mapping[str, str], others: Mapping[str, Any]) -> None:
    """ConfigError: the stage of that name differs."""
    for what, value in own.items():
        if others.get(what) != value:
            raise ConfigError(
                f"{name}: its {what} is {others.get(what)}, that of the first stage is {value}; all stages must be of "
                "one model, version and kind of machine"
            )


def one_or_each(values: Sequence[_T]) -> _T | str:
    """What all stages have, or what each of them has: the layers of a stage follow from how many there are."""
    return values[0] if len(set(values)) == 1 else ", ".join(map(str, values))


def _digest(of: str) -> str:
    return hashlib.sha256(of.encode()).hexdigest()[:16]
