"""Models with `generate`: `AutoLlamaModel` opens them, on the engine or as the numpy reference model."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infinilm.models.auto import AutoLlamaModel, AutoModelForCausalLM
    from infinilm.models.dynamic_cache import DynamicCache
    from infinilm.models.engine_model import EngineModel
    from infinilm.models.reference import ReferenceModel

_LAZY = {
    "AutoLlamaModel": "auto",
    "AutoModelForCausalLM": "auto",
    "DynamicCache": "dynamic_cache",
    "EngineModel": "engine_model",
    "ReferenceModel": "reference",
}

__all__ = ["AutoLlamaModel", "AutoModelForCausalLM", "DynamicCache", "EngineModel", "ReferenceModel"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'infinilm.models' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"infinilm.models.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
