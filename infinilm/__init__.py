"""infinilm: LLM inference with hand-written kernels.

    >>> import infinilm
    >>> llm = infinilm.LLM("demo")
    >>> llm.generate("Once upon a time", temperature=0)[0].outputs[0].text  # doctest: +SKIP

Importing touches no device and no model; classes that need the compiled core load it on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

try:
    from infinilm._version import __version__
except ModuleNotFoundError:  # a source tree
    from infinilm._source_tree import __version__

from infinilm.errors import (
    CacheFullError,
    ConfigError,
    DeviceError,
    EngineDeadError,
    InfinilmError,
    RequestError,
    WeightError,
)

if TYPE_CHECKING:
    from infinilm._core import Tensor, from_dlpack
    from infinilm.cache import CacheConfig, PagedCacheConfig, PagedKVCacheConfig, StaticKVCacheConfig
    from infinilm.comparison import Comparison, compare
    from infinilm.config import AutoConfig, LlamaConfig
    from infinilm.distributed import CommunicationGroup, DistConfig, RankInfo
    from infinilm.engine import InferEngine
    from infinilm.generation import GenerationMixin
    from infinilm.hooks import HookRegistry
    from infinilm.llm import LLM
    from infinilm.memory import MemoryPlan, plan_memory
    from infinilm.models import AutoLlamaModel, AutoModelForCausalLM, DynamicCache, ReferenceModel
    from infinilm.outputs import CompletionOutput, EngineMetrics, RequestMetrics, RequestOutput, Score, TokenEvent
    from infinilm.request import Request
    from infinilm.sampling_params import SamplingParams
    from infinilm.system import backends
    from infinilm.tensor_statistics import TensorStats, tensor_stats

# Where each public name lives; loaded on first use (PEP 562), as are the modules people name in full, which keeps
# `import infinilm` fast.
_LAZY = {
    "AutoConfig": "infinilm.config",
    "AutoLlamaModel": "infinilm.models",
    "AutoModelForCausalLM": "infinilm.models",
    "CacheConfig": "infinilm.cache",
    "CommunicationGroup": "infinilm.distributed",
    "Comparison": "infinilm.comparison",
    "CompletionOutput": "infinilm.outputs",
    "DistConfig": "infinilm.distributed",
    "DynamicCache": "infinilm.models",
    "EngineMetrics": "infinilm.outputs",
    "GenerationMixin": "infinilm.generation",
    "HookRegistry": "infinilm.hooks",
    "InferEngine": "infinilm.engine",
    "LLM": "infinilm.llm",
    "LlamaConfig": "infinilm.config",
    "MemoryPlan": "infinilm.memory",
    "PagedCacheConfig": "infinilm.cache",
    "PagedKVCacheConfig": "infinilm.cache",
    "RankInfo": "infinilm.distributed",
    "ReferenceModel": "infinilm.models",
    "Request": "infinilm.request",
    "RequestMetrics": "infinilm.outputs",
    "RequestOutput": "infinilm.outputs",
    "SamplingParams": "infinilm.sampling_params",
    "Score": "infinilm.outputs",
    "StaticKVCacheConfig": "infinilm.cache",
    "Tensor": "infinilm._core",
    "TensorStats": "infinilm.tensor_statistics",
    "TokenEvent": "infinilm.outputs",
    "backends": "infinilm.system",
    "compare": "infinilm.comparison",
    "from_dlpack": "infinilm._core",
    "plan_memory": "infinilm.memory",
    "tensor_stats": "infinilm.tensor_statistics",
}

_MODULES = ("cache", "distributed", "engine", "generation", "hooks", "models")

__all__ = [
    "LLM",
    "AutoConfig",
    "AutoLlamaModel",
    "AutoModelForCausalLM",
    "CacheConfig",
    "CacheFullError",
    "CommunicationGroup",
    "Comparison",
    "CompletionOutput",
    "ConfigError",
    "DeviceError",
    "DistConfig",
    "DynamicCache",
    "EngineDeadError",
    "EngineMetrics",
    "GenerationMixin",
    "HookRegistry",
    "InferEngine",
    "InfinilmError",
    "LlamaConfig",
    "MemoryPlan",
    "PagedCacheConfig",
    "PagedKVCacheConfig",
    "RankInfo",
    "ReferenceModel",
    "Request",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "Score",
    "StaticKVCacheConfig",
    "Tensor",
    "TensorStats",
    "TokenEvent",
    "WeightError",
    "backends",
    "compare",
    "from_dlpack",
    "plan_memory",
    "tensor_stats",
]


def __getattr__(name: str) -> Any:
    if name == "_core":
        try:
            return importlib.import_module("infinilm._core")
        except ModuleNotFoundError as error:
            if error.name != "infinilm._core":
                raise
            raise ImportError(
                f"infinilm in {__path__[0]} has no compiled core: it is a source tree. Install it with "
                "'pip install .', and run from another folder"
            ) from None
    if name in _MODULES:
        return importlib.import_module(f"infinilm.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'infinilm' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
