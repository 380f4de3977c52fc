"""infinilm: LLM inference with hand-written kernels.

    >>> import infinilm
    >>> llm = infinilm.LLM("demo")
    >>> llm.generate("Once upon a time", temperature=0)[0].text  # doctest: +SKIP

Importing touches no device and no model; classes that need the compiled core load it on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import infinilm.logs  # noqa: F401 (says where warnings go)
from infinilm.errors import (
    CacheFileError as CacheFileError,
    CacheFullError as CacheFullError,
    ConfigError as ConfigError,
    DeviceError as DeviceError,
    EngineDeadError as EngineDeadError,
    InfinilmError as InfinilmError,
    QueueFullError as QueueFullError,
    ReceiptError as ReceiptError,
    RequestError as RequestError,
    TimeLimitError as TimeLimitError,
    WeightError as WeightError,
)

if TYPE_CHECKING:
    from infinilm._core import Tensor as Tensor, from_dlpack as from_dlpack
    from infinilm.cache import (
        CacheConfig as CacheConfig,
        PagedCacheConfig as PagedCacheConfig,
        PagedKVCacheConfig as PagedKVCacheConfig,
        StaticKVCacheConfig as StaticKVCacheConfig,
    )
    from infinilm.calls import AsyncRequests as AsyncRequests, Request as Request
    from infinilm.checkpoint import resolve_model as resolve_model
    from infinilm.config import AutoConfig as AutoConfig, LlamaConfig as LlamaConfig
    from infinilm.constraint import Constraint as Constraint
    from infinilm.debug import (
        Comparison as Comparison,
        TensorStats as TensorStats,
        compare as compare,
        tensor_stats as tensor_stats,
    )
    from infinilm.devices import backends as backends
    from infinilm.distributed import (
        CommunicationGroup as CommunicationGroup,
        DistConfig as DistConfig,
        RankInfo as RankInfo,
    )
    from infinilm.engine import HookRegistry as HookRegistry, InferEngine as InferEngine
    from infinilm.generation import GenerationMixin as GenerationMixin
    from infinilm.images import MediaRules as MediaRules
    from infinilm.llm import LLM as LLM
    from infinilm.models import (
        AutoLlamaModel as AutoLlamaModel,
        AutoModelForCausalLM as AutoModelForCausalLM,
        DynamicCache as DynamicCache,
        ReferenceModel as ReferenceModel,
    )
    from infinilm.outputs import (
        AnswerPart as AnswerPart,
        AnswerPiece as AnswerPiece,
        Classification as Classification,
        CompletionOutput as CompletionOutput,
        Delta as Delta,
        EngineMetrics as EngineMetrics,
        Logprob as Logprob,
        RankedDocument as RankedDocument,
        RequestMetrics as RequestMetrics,
        RequestOutput as RequestOutput,
        Score as Score,
        TokenEvent as TokenEvent,
    )
    from infinilm.planning import MemoryPlan as MemoryPlan, plan_memory as plan_memory
    from infinilm.receipts import Receipt as Receipt, Verdict as Verdict
    from infinilm.requests import RequestLimits as RequestLimits
    from infinilm.sampling_params import SamplingParams as SamplingParams
    from infinilm.text import Tokenizer as Tokenizer
    from infinilm.tiers import PeerRules as PeerRules

# Public names by the module that has them; loaded on first use (PEP 562), which keeps `import infinilm` fast. A test
# holds this against the imports above, which are for type checkers.
_LAZY = {
    name: module
    for module, names in {
        "infinilm._core": ("Tensor", "from_dlpack"),
        "infinilm.cache": ("CacheConfig", "PagedCacheConfig", "PagedKVCacheConfig", "StaticKVCacheConfig"),
        "infinilm.calls": ("AsyncRequests", "Request"),
        "infinilm.checkpoint": ("resolve_model",),
        "infinilm.config": ("AutoConfig", "LlamaConfig"),
        "infinilm.constraint": ("Constraint",),
        "infinilm.debug": ("Comparison", "TensorStats", "compare", "tensor_stats"),
        "infinilm.devices": ("backends",),
        "infinilm.distributed": ("CommunicationGroup", "DistConfig", "RankInfo"),
        "infinilm.engine": ("HookRegistry", "InferEngine"),
        "infinilm.generation": ("GenerationMixin",),
        "infinilm.images": ("MediaRules",),
        "infinilm.llm": ("LLM",),
        "infinilm.models": ("AutoLlamaModel", "AutoModelForCausalLM", "DynamicCache", "ReferenceModel"),
        "infinilm.outputs": (
            "AnswerPart",
            "AnswerPiece",
            "Classification",
            "CompletionOutput",
            "Delta",
            "EngineMetrics",
            "Logprob",
            "RankedDocument",
            "RequestMetrics",
            "RequestOutput",
            "Score",
            "TokenEvent",
        ),
        "infinilm.planning": ("MemoryPlan", "plan_memory"),
        "infinilm.receipts": ("Receipt", "Verdict"),
        "infinilm.requests": ("RequestLimits",),
        "infinilm.sampling_params": ("SamplingParams",),
        "infinilm.text": ("Tokenizer",),
        "infinilm.tiers": ("PeerRules",),
    }.items()
    for name in names
}

# Modules that people name in full after `import infinilm`.
_MODULES = ("cache", "config", "distributed", "engine", "generation", "models")

__all__ = sorted([*_LAZY, *(name for name in globals() if name.endswith("Error"))])


def __getattr__(name: str) -> Any:
    if name == "_core":
        try:
            return importlib.import_module("infinilm._core")
        except ModuleNotFoundError as error:
            if error.name != "infinilm._core":
                raise
            raise ImportError(
                f"infinilm in {__path__[0]} has no compiled core: it is a source tree. Install it with "
                "'pip install .', and use the Python that it was installed for"
            ) from None
    if name in _MODULES:
        return importlib.import_module(f"infinilm.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'infinilm' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names alone: what is imported here besides is not for users."""
    return sorted([*__all__, *_MODULES, *(name for name in globals() if name.startswith("__"))])


try:
    from infinilm._version import __version__ as __version__
except ModuleNotFoundError:  # a source tree: where the package is installed too, that one takes its place
    from infinilm._source_tree import __version__ as __version__
