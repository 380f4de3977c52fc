"""infinilm: LLM inference with hand-written kernels.

    >>> import infinilm
    >>> llm = infinilm.LLM("demo")
    >>> llm.generate("Once upon a time", temperature=0)[0].outputs[0].text  # doctest: +SKIP

Importing touches no device and no model; classes that need the compiled core load it on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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
    from infinilm.config import AutoConfig, LlamaConfig
    from infinilm.llm import LLM
    from infinilm.memory import MemoryPlan, plan_memory
    from infinilm.outputs import CompletionOutput, RequestMetrics, RequestOutput, TokenEvent
    from infinilm.sampling_params import SamplingParams
    from infinilm.system import backends

__version__ = "0.1.0"

# Where each public name lives; loaded on first use (PEP 562), which keeps `import infinilm` fast.
_LAZY = {
    "AutoConfig": "infinilm.config",
    "CompletionOutput": "infinilm.outputs",
    "LLM": "infinilm.llm",
    "LlamaConfig": "infinilm.config",
    "MemoryPlan": "infinilm.memory",
    "RequestMetrics": "infinilm.outputs",
    "RequestOutput": "infinilm.outputs",
    "SamplingParams": "infinilm.sampling_params",
    "Tensor": "infinilm._core",
    "TokenEvent": "infinilm.outputs",
    "backends": "infinilm.system",
    "from_dlpack": "infinilm._core",
    "plan_memory": "infinilm.memory",
}

__all__ = [
    "LLM",
    "AutoConfig",
    "CacheFullError",
    "CompletionOutput",
    "ConfigError",
    "DeviceError",
    "EngineDeadError",
    "InfinilmError",
    "LlamaConfig",
    "MemoryPlan",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "Tensor",
    "TokenEvent",
    "WeightError",
    "backends",
    "from_dlpack",
    "plan_memory",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'infinilm' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
