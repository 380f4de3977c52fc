"""What `compare` needs of a model, for each kind there is: run tokens under a tap.

A tap is called with (name, layer, activation as a numpy array) at every hook site, in the order of computation, and may
return what replaces the activation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from infinilm import _core
from infinilm.engine.hooks import HookRegistry, ModelSites
from infinilm.engine.infer_engine import InferEngine
from infinilm.errors import ConfigError
from infinilm.models.engine_model import EngineModel, EngineRows
from infinilm.models.reference import ReferenceModel
from infinilm.sampling_params import SamplingParams
from infinilm.scheduling import sequence as seq

if TYPE_CHECKING:
    from infinilm.config.json.model_config import ModelConfig
    from infinilm.llm import LLM

__all__ = ["Side", "open_side"]

Array = npt.NDArray[Any]
Tap = Callable[[str, int, Array], Array | None]


class Side:
    """One of the two models that are compared."""

    config: ModelConfig
    dtypes: tuple[str, ...]  # computed in, and of keys and values
    max_model_len: int
    gives_every_position: bool  # logits of all tokens, not of the last alone
    tokenize: Callable[[str], list[int]] | None = None

    def run(self, ids: Sequence[int], tap: Tap, last_only: bool) -> None:
        """Compute one sequence of tokens from its beginning; `last_only`: the logits of the last suffice."""
        raise NotImplementedError


def open_side(model: Any, name: str) -> Side:
    """The side of a model; `name` is the argument it came in. Raises TypeError for anything else."""
    if isinstance(model, ReferenceModel):
        return _ReferenceSide(model)
    if isinstance(model, EngineModel):
        model = model.engine
    if isinstance(model, InferEngine):
        return _EngineSide(model)
    from infinilm.llm import LLM

    if isinstance(model, LLM):
        return _LLMSide(model)
    raise TypeError(
        f"{name}: expected an LLM, an InferEngine, or a model of AutoLlamaModel or ReferenceModel, got "
        f"{type(model).__name__}"
    )


def _require_one_rank(num_ranks: int) -> None:
    if num_ranks > 1:
        raise ConfigError(
            f"compare: expected a model on one rank, got {num_ranks} ranks, which have parts of q, k, v and the MLP; "
            "open it with tp_size=1"
        )


class _ReferenceSide(Side):
    gives_every_position = True

    def __init__(self, model: ReferenceModel) -> None:
        self._model = model
        self.config, self.dtypes, self.max_model_len = model.config, (model.dtype,), model.max_model_len

    def run(self, ids: Sequence[int], tap: Tap, last_only: bool) -> None:
        self._model.forward(ids, last_only=last_only, tap=tap)


class _EngineSide(Side):
    gives_every_position = False

    def __init__(self, engine: InferEngine) -> None:
        _require_one_rank(len(engine.ranks))
        self._engine = engine
        self.config, self.dtypes = engine.config, (engine.dtype, engine.cache_layout.dtype)
        self.max_model_len = EngineModel(engine).max_model_len

    def run(self, ids: Sequence[int], tap: Tap, last_only: bool) -> None:
        def callback(name: str, tensor: _core.Tensor, layer: int) -> Array | None:
            return tap(name, layer, tensor.numpy())

        registry = HookRegistry()
        registry.register_hook("*", callback)
        with self._engine.hooked(registry):
            EngineRows(self._engine, 1, len(ids)).forward([np.array(ids, np.int32)], temperature=0.0)


class _LLMSide(Side):
    gives_every_position = True

    def __init__(self, llm: LLM) -> None:
        _require_one_rank(llm.engine.num_ranks)
        self._llm = llm
        self.config, self.max_model_len = llm.config, llm.max_model_len
        self.dtypes = (llm.dtype, llm.memory.kv_cache_dtype)
        self._sites = ModelSites(llm.engine.spec)
        self.tokenize = llm.tokenizer.encode if llm.tokenizer.available else None

    def run(self, ids: Sequence[int], tap: Tap, last_only: bool) -> None:
        def callback(name: str, layer: int, tensor: _core.Tensor, rank: int) -> _core.Tensor | None:
            replacement = tap(name, layer, tensor.numpy())
            return None if replacement is None else _core.from_numpy(replacement)

        llm = self._llm
        sequence = seq.Sequence(np.array(ids, np.int32), SamplingParams(temperature=0.0), seed=0, collect_logits=True)
        with llm.exclusive() as run:  # a request of another thread must not run under these hooks
            llm.engine.set_hooks(callback, self._sites.select("*"))
            try:
                run(sequence)
            finally:
                llm.engine.set_hooks(None, [])
