"""What `compare` needs of a model, for each kind there is: run tokens under a tap.

A tap is called with (name, layer, activation as a numpy array) at every hook site, in the order of computation, and may
return what replaces the activation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from infinilm import _core
from infinilm.engine.hooks import HookRegistry, ModelSites
from infinilm.engine.infer_engine import InferEngine
from infinilm.errors import ConfigError
from infinilm.images import Patches
from infinilm.models.engine_model import EngineModel, EngineRows
from infinilm.models.reference import ReferenceModel
from infinilm.models.reference.tower import ReferenceTower
from infinilm.sampling_params import SamplingParams
from infinilm.scheduling import sequence as seq
from infinilm.serving.tower import TowerEngine, TowerTile

if TYPE_CHECKING:
    from infinilm.config.json.model_config import ModelConfig
    from infinilm.llm import LLM

__all__ = ["Side", "TextSide", "TowerSide", "open_side"]

Array = npt.NDArray[Any]
Tap = Callable[[str, int, Array], Array | None]


class Side:
    """One of the two models that are compared."""

    sizes: Mapping[str, int]  # in which both must be alike
    longest_sum: int  # numbers that any sum of a token has, but those over tokens
    dtypes: tuple[str, ...]  # computed in, and of keys and values


class TextSide(Side):
    """A model of texts."""

    vocab_size: int
    max_model_len: int
    gives_every_position: bool  # logits of all tokens, not of the last alone
    tokenize: Callable[[str], list[int]] | None = None

    def set_config(self, config: ModelConfig) -> None:
        """Take the sizes of a configuration."""
        names = (
            "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
            "head_dim", "vocab_size",
        )  # fmt: skip
        self.sizes, self.vocab_size = {name: getattr(config, name) for name in names}, config.vocab_size
        self.longest_sum = max(
            config.hidden_size, config.intermediate_size, config.num_attention_heads * config.head_dim
        )

    def run(self, ids: Sequence[int], tap: Tap, last_only: bool) -> None:
        """Compute one sequence of tokens from its beginning; `last_only`: the logits of the last suffice."""
        raise NotImplementedError


class TowerSide(Side):
    """A tower: that of an `LLM`, or one in numpy."""

    def __init__(self, model: TowerEngine | ReferenceTower) -> None:
        self.model = model
        spec = model.spec
        layer = spec.layers[0]
        head, mlp, tower = layer.cache, layer.mlp, spec.tower
        assert mlp is not None and tower is not None
        self.sizes = {
            "num_layers": spec.num_layers,
            "hidden_size": spec.hidden_size,
            "intermediate_size": mlp.intermediate_size,
            "num_heads": head.num_heads,
            "head_dim": head.head_dim,
            "patch_dim": tower.patch_dim,
            "merged_patches": tower.merged_patches,
        }
        self.longest_sum = max(
            tower.patch_dim,
            tower.merged_patches * spec.hidden_size,
            mlp.intermediate_size,
            head.num_heads * head.head_dim,
            *(linear.size for linear in tower.merger),
        )
        self.dtypes = (model.dtype,)

    def run(self, pictures: Sequence[Patches], tiles: Sequence[TowerTile], tap: Tap) -> None:
        """Compute pictures, which consist of these tiles."""
        if isinstance(self.model, ReferenceTower):
            rows = self.model.forward(
                [tile.tokens for tile in tiles],
                [tile.turned_by for tile in tiles],
                [tile.positions for tile in tiles],
                np.concatenate([tile.window_lens for tile in tiles]).tolist(),
                tap=tap,
            )
            ends = np.cumsum([len(tile.order) for tile in tiles])[:-1]
            found = [tile.sorted(own) for tile, own in zip(tiles, np.split(rows, ends), strict=True)]
        else:
            registry = HookRegistry()
            registry.register_hook("*", lambda name, tensor, layer: tap(name, layer, tensor.numpy()))
            with self.model.hooked(registry):
                found = self.model(pictures)
        tap("rows", -1, np.concatenate(found))


def open_side(model: Any, name: str) -> TextSide | TowerSide:
    """The side of a model; `name` is the argument it came in. Raises TypeError for anything else."""
    if isinstance(model, (TowerEngine, ReferenceTower)):
        return TowerSide(model)
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
        f"{name}: expected an LLM, an InferEngine, a model of AutoLlamaModel or ReferenceModel, or a tower, got "
        f"{type(model).__name__}"
    )


def _require_one_rank(num_ranks: int) -> None:
    if num_ranks > 1:
        raise ConfigError(
            f"compare: expected a model on one rank, got {num_ranks} ranks, which have parts of q, k, v and the MLP; "
            "open it with tp_size=1"
        )


class _ReferenceSide(TextSide):
    gives_every_position = True

    def __init__(self, model: ReferenceModel) -> None:
        self._model = model
        self.set_config(model.config)
        self.dtypes, self.max_model_len = (model.dtype,), model.max_model_len

    def run(self, ids: Sequence[int], tap: Tap, last_only: bool) -> None:
        self._model.forward(ids, last_only=last_only, tap=tap)


class _EngineSide(TextSide):
    gives_every_position = False

    def __init__(self, engine: InferEngine) -> None:
        _require_one_rank(len(engine.ranks))
        self._engine = engine
        self.set_config(engine.config)
        self.dtypes = engine.dtype, engine.cache_layout.dtype
        self.max_model_len = EngineModel(engine).max_model_len

    def run(self, ids: Sequence[int], tap: Tap, last_only: bool) -> None:
        def callback(name: str, tensor: _core.Tensor, layer: int) -> Array | None:
            return tap(name, layer, tensor.numpy())

        registry = HookRegistry()
        registry.register_hook("*", callback)
        with self._engine.hooked(registry):
            EngineRows(self._engine, 1, len(ids)).forward([np.array(ids, np.int32)], temperature=0.0)


class _LLMSide(TextSide):
    gives_every_position = True

    def __init__(self, llm: LLM) -> None:
        _require_one_rank(llm.engine.num_ranks)
        self._llm = llm
        self.set_config(llm.config)
        self.max_model_len = llm.max_model_len
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
