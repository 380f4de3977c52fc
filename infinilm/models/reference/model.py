"""`ReferenceModel`: the whole model in numpy, the readable specification of the engine.

`AutoLlamaModel.from_pretrained(path, backend="python")` returns it; `infinilm.compare` holds the engine against it.
Read `decoder.py`, then `attention.py` and `mlp.py`: that is all the math of a Llama. What differs between families
comes from the `ModelSpec`, which the engine reads, too. Work is packed as in the engine: the new tokens of all rows one
behind the other, every op on [num_tokens, ...], and only attention looks at one row at a time.

Sources: Llama (arXiv 2302.13971), RMSNorm (1910.07467), RoPE (2104.09864), SwiGLU (2002.05202), GQA (2305.13245).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm import _core
from infinilm.checkpoint.draft_heads import is_of_head, load_head
from infinilm.checkpoint.folder import resolve_model
from infinilm.checkpoint.loading import load_weights
from infinilm.checkpoint.opening import open_checkpoint
from infinilm.config.json.model_config import AutoConfig, ModelConfig
from infinilm.config.spec import GivenEmbeddings, MtpFormat, build_spec, longest_text
from infinilm.devices.arrays import to_array
from infinilm.engine.hooks import HookRegistry, ModelSites
from infinilm.errors import CacheFullError, ConfigError, RequestError, WeightError, did_you_mean
from infinilm.generation import GenerationMixin, Sampling, TokenRows, as_token_rows, log_softmax, sample_tokens
from infinilm.lora import read_adapter
from infinilm.models.dynamic_cache import DynamicCache
from infinilm.models.reference.decoder import draft, forward, rotation
from infinilm.models.reference.ops import Array, stored_array
from infinilm.models.reference.step import Step, Tap
from infinilm.text.generation_config import GenerationConfig

__all__ = ["ReferenceModel"]


DTYPES = ("float32", "float64")


class ReferenceModel(GenerationMixin):
    """A Llama-like decoder in numpy.

    Parameters
    ----------
    config : ModelConfig
    dtype : str
        What it computes in: "float32", or "float64" to judge float32 by.
    max_model_len : int, optional
        Longest sequence in tokens; fixes the rotary frequencies (see `rope`). Default: max_position_embeddings.
    mtp : MtpFormat, optional
        With the MTP head of the checkpoint, see `draft`; of the format, `lm_head_size` counts.
    given : GivenEmbeddings, optional
        What `forward` gives it besides token ids, such as what a tower makes of images.

    Attributes
    ----------
    weights : dict of str to numpy.ndarray
        By the names of the checkpoint, in `dtype`; linears are [out_features, in_features]. May be changed in place.

    Raises
    ------
    ConfigError
        The configuration or the dtype is not supported.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: str = "float32",
        max_model_len: int | None = None,
        mtp: MtpFormat | None = None,
        given: GivenEmbeddings | None = None,
    ) -> None:
        if dtype not in DTYPES:
            raise ConfigError(f"the reference model computes in one of {', '.join(DTYPES)}, got dtype={dtype!r}")
        self.config = copy.deepcopy(config)
        self.dtype = dtype
        self.device = "cpu"
        self.max_model_len = longest_text(config) if max_model_len is None else max_model_len
        self.use_generation_config(GenerationConfig())
        self.spec = build_spec(config, dtype="float32", max_model_len=self.max_model_len, mtp=mtp, given=given)
        self._shapes = _core.param_shapes(self.spec)
        self._sites = ModelSites(self.spec)
        self.weights: dict[str, Array] = {}
        self._registry: HookRegistry | None = None

    def __repr__(self) -> str:
        return f"<ReferenceModel {self.config.model_type}, {self.dtype} in numpy>"

    @classmethod
    def from_pretrained(
        cls, path: str | os.PathLike[str], *, dtype: str = "float32", max_model_len: int | None = None
    ) -> ReferenceModel:
        """Read config.json and the weights of a checkpoint folder; see the class for the parameters.

        Raises
        ------
        FileNotFoundError, ConfigError, WeightError
            As for `LLM`.
        """
        folder = resolve_model(path)
        model = cls(AutoConfig.from_pretrained(folder), dtype=dtype, max_model_len=max_model_len)
        model.use_generation_config(GenerationConfig.from_folder(folder))
        model.load_weights(folder)
        return model

    # ---- weights ----

    def param_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Names and shapes of the parameters, as a checkpoint has them."""
        return self._shapes

    def load_param(self, name: str, tensor: Any) -> None:
        """Take one parameter; a copy in the model's dtype is kept.

        Raises
        ------
        WeightError
            The model has no such parameter, or it has another shape.
        """
        if name not in self._shapes:
            raise WeightError(f"the model has no parameter {name!r}{did_you_mean(name, self._shapes)}")
        array = to_array(tensor)
        if array.shape != self._shapes[name]:
            raise WeightError(f"parameter {name!r}: expected shape {self._shapes[name]}, got {array.shape}")
        if array.dtype.kind != "f":
            raise WeightError(f"parameter {name!r}: expected a floating dtype, got {array.dtype}")
        self.weights[name] = array.astype(self.dtype)

    def load_params(self, params: Iterable[tuple[str, Any]] | Mapping[str, Any]) -> None:
        """Take parameters from pairs of name and tensor, or a mapping such as `InferEngine.state_dict()[0]`."""
        for name, tensor in params.items() if isinstance(params, Mapping) else params:
            self.load_param(name, tensor)

    def load_weights(self, path: str | os.PathLike[str], head: str | os.PathLike[str] | None = None) -> None:
        """Read all parameters of a checkpoint: a folder, "demo", or a hub id. Raises WeightError if it does not fit.

        `head`: the checkpoint of the head, in a model that was made with one that has its own.
        """
        options: dict[str, Any] = {"dtype": "float32", "progress": False, "from_numpy": stored_array}
        with open_checkpoint(resolve_model(path)) as checkpoint:
            is_wanted = None if head is None else lambda name: not is_of_head(name, self.spec.num_layers)
            load_weights(checkpoint, self, config=self.config, is_wanted=is_wanted, **options)
        if head is not None:
            load_head(resolve_model(head), self, self.spec, **options)

    def merge_lora(self, folder: str | os.PathLike[str]) -> None:
        """Add a LoRA adapter, as PEFT saves it, to the weights, which are loaded; raises what `read_adapter` raises."""
        for name, weight in read_adapter(folder, self.config, merged=True).weights.items():
            self.weights[name] = self.weights[name] + weight.delta(self.dtype)

    # ---- forward ----

    def new_cache(self, num_rows: int = 1) -> DynamicCache:
        """Return an empty cache for `num_rows` sequences."""
        caches = [layer.cache for layer in self._layers]
        return DynamicCache([(own.num_kv_heads, own.head_dim) for own in caches], num_rows, self.dtype)

    def forward(
        self,
        input_ids: Any,
        cache: DynamicCache | None = None,
        *,
        last_only: bool = False,
        tap: Tap | None = None,
        token_types: npt.ArrayLike | None = None,
        rope_positions: npt.ArrayLike | None = None,
        given: Mapping[int, Array] | None = None,
    ) -> Array:
        """Compute the logits of new tokens, or of an encoder their states after the last norm.

        Parameters
        ----------
        input_ids : array-like of int
            The new tokens: [seq_len] of one sequence, [num_rows, seq_len], or a list of lists of different lengths
            (an empty one: nothing new in that row).
        cache : DynamicCache, optional
            What came before; the new tokens are added. None: nothing came before, and nothing is kept.
        last_only : bool
            Only the last new token of each row that has one.
        tap : callable, optional
            Sees and replaces activations, see `Tap`. The names are those of the engine's hooks.
        token_types : array-like of int, optional
            The type of each token, of all rows one behind the other, for encoders that tell the texts of a pair apart.
            None: all are 0.
        rope_positions : array-like of int, optional
            [num_axes, num_tokens]: the positions that RoPE turns by, in models made with `given`. None: those in each
            row.
        given : mapping of int to numpy.ndarray, optional
            By token, of all rows one behind the other: its embedding, and what is added to it behind the first layers,
            [given_levels * hidden_size].

        Returns
        -------
        numpy.ndarray
            [num_tokens, vocab_size], or of an encoder [num_tokens, hidden_size]: the rows of the batch one behind the
            other; with `last_only` one row of each.

        Raises
        ------
        RequestError
            Token ids out of range, or another number of rows than the cache has.
        CacheFullError
            A row would be longer than `max_model_len`.
        WeightError
            A parameter was never loaded.
        """
        chunks = as_token_rows(input_ids, self.config.vocab_size, allow_empty=True)
        cache = self.new_cache(len(chunks)) if cache is None else cache
        self._check_ready(chunks, cache)
        positions = None if rope_positions is None else np.asarray(rope_positions, np.int64)
        step = self._step(chunks, cache, self._registry_tap() if tap is None else tap, positions)
        if not self.spec.lm_head and any(cache.lengths):
            raise RequestError("tokens of an encoder see those behind them: pass each text whole, without a cache")
        types = None if token_types is None else np.asarray(token_types, np.int64).reshape(-1)
        logits = forward(step, np.concatenate(chunks), last_only, types, given)
        cache.advance([len(chunk) for chunk in chunks])
        return logits

    def draft(
        self, next_ids: Any, hidden: Array, cache: DynamicCache | None = None, module: int = 0
    ) -> tuple[Array, Array]:
        """Compute the MTP head, at the positions that follow those in `cache`.

        Parameters
        ----------
        next_ids : array-like of int
            The token behind each position, in rows as `input_ids` of `forward`.
        hidden : numpy.ndarray
            [num_tokens, hidden_size]: at each position the output of the final norm, or that of the head in a chain. An
            EAGLE-3 head begins with [num_tokens, num_taps * hidden_size] instead, which is the residual stream at the
            beginning of `spec.mtp.taps`, side by side. With `spec.mtp.before_norm` they are what no norm has changed.
        cache : DynamicCache, optional
            The cache of the head alone. None: nothing came before, and nothing is kept. A head whose layers read keys
            and values of the model needs the cache of that, and takes one token for each row, behind its newest one.
        module : int
            The one that is computed, of a head that has several. Each has a cache of its own. It reads what the one
            before has left, and tokens that are one further than those of that.

        Returns
        -------
        tuple of numpy.ndarray
            Logits of the token behind each of `next_ids`, [num_tokens, vocab_size] or those that an lm_head of its own
            gives, and what a chain takes as `hidden`.

        Raises
        ------
        ConfigError
            The model was made without its head.
        RequestError, CacheFullError, WeightError
            As `forward` does.
        """
        if self.spec.mtp is None:
            raise ConfigError("this model has no MTP head: pass mtp=MtpFormat() where the checkpoint has one")
        chunks = as_token_rows(next_ids, self.config.vocab_size, allow_empty=True)
        cache = self.new_cache(len(chunks)) if cache is None else cache
        self._check_ready(chunks, cache)
        counts, positions = [len(chunk) for chunk in chunks], None
        if self.spec.mtp.layers[0].cache.kind == "shared":
            if set(counts) != {1} or not cache.lengths.all():
                raise RequestError("a head without keys of its own takes one token of each row, behind the model's")
            positions = cache.lengths[None].copy()  # of the tokens; what they see ends one before
            cache.advance([-1] * len(chunks))
        drafted = draft(self._step(chunks, cache, None, positions), np.concatenate(chunks), hidden, module)
        cache.advance(counts)
        return drafted

    @property
    def _layers(self) -> list[_core.LayerSpec]:
        head = self.spec.mtp
        return [*self.spec.layers, *([] if head is None else head.layers)]

    def _step(
        self, chunks: Sequence[Array], cache: DynamicCache, tap: Tap | None, rope_positions: Array | None = None
    ) -> Step:
        counts = [len(chunk) for chunk in chunks]
        positions = np.concatenate([np.arange(n) + begin for n, begin in zip(counts, cache.lengths, strict=True)])
        return Step(
            spec=self.spec,
            layers=self._layers,
            weights=self.weights,
            dtype=self.dtype,
            ropes=[
                rotation(positions[None] if rope_positions is None else rope_positions, rope, self.dtype)
                for rope in self.spec.ropes
            ],
            starts=np.cumsum([0, *counts]),
            positions=positions,
            cache=cache,
            tap=tap,
        )

    # ---- checks, hooks, generation ----

    def _check_ready(self, chunks: Sequence[Array], cache: DynamicCache) -> None:
        if missing := self._shapes.keys() - self.weights.keys():
            raise WeightError(
                f"{len(missing)} of {len(self._shapes)} parameters were never loaded, such as {min(missing)!r}: "
                "call load_weights(folder), or load_param for each"
            )
        if cache.num_rows != len(chunks):
            raise RequestError(f"input_ids has {len(chunks)} rows, the cache {cache.num_rows}; they must be equal")
        if cache.num_layers != len(self._layers):
            raise RequestError(
                f"the cache has {cache.num_layers} layers, the model {len(self._layers)}: use new_cache()"
            )
        if not any(map(len, chunks)):
            raise RequestError("input_ids holds no token: at least one row needs one")
        for row, (chunk, length) in enumerate(zip(chunks, cache.lengths.tolist(), strict=True)):
            if length + len(chunk) > self.max_model_len:
                raise CacheFullError(
                    f"row {row} has {length} tokens and {len(chunk)} new ones; the model holds {self.max_model_len} "
                    "per row: shorten it, or raise max_model_len"
                )

    def set_hook_registry(self, registry: HookRegistry | None) -> None:
        """Fire the hooks of a registry in `forward` and `generate`; None: no more.

        Callbacks get an `infinilm.Tensor` over the activation, as on the engine.

        Raises
        ------
        ConfigError
            A pattern fits no site of this model, or the model computes in float64, which `Tensor` has not: pass `tap=`
            to `forward` instead.
        """
        if registry is not None and self.dtype != "float32":
            raise ConfigError(f"hooks need dtype='float32', this model computes in {self.dtype}: use forward(tap=...)")
        if registry is not None:
            registry.attach(self._sites)
        if self._registry is not None and self._registry is not registry:
            self._registry.detach(self._sites)
        self._registry = registry

    def _registry_tap(self) -> Tap | None:
        dispatch = None if self._registry is None else self._registry.dispatch(self._sites, set())
        if dispatch is None:
            return None
        wanted = frozenset(dispatch.names)

        def tap(name: str, layer: int, activation: Array) -> Array | None:
            if name not in wanted:
                return None
            replacement = dispatch(name, layer, _core.from_numpy(activation))
            return None if replacement is None else to_array(replacement)

        return tap

    @contextmanager
    def _rows(self, num_rows: int, num_tokens: int) -> Iterator[TokenRows]:
        yield _ReferenceRows(self, self.new_cache(num_rows))

    def close(self) -> None:
        """Forget the weights."""
        self.weights.clear()


class _ReferenceRows(TokenRows):
    """Rows that are generated together; see `GenerationMixin`."""

    def __init__(self, model: ReferenceModel, cache: DynamicCache) -> None:
        self._model, self._cache = model, cache

    def step(
        self,
        chunks: Sequence[npt.NDArray[np.int32]],
        sampling: Sampling,
        random_val: npt.NDArray[np.float32],
        seen: npt.NDArray[np.bool_] | None,
    ) -> npt.NDArray[np.int32]:
        """See `TokenRows.step`."""
        busy = [row for row, chunk in enumerate(chunks) if len(chunk)]
        logits = self._model.forward(chunks, self._cache, last_only=True)
        tokens = np.zeros(len(chunks), np.int32)
        tokens[busy] = sample_tokens(logits, sampling, random_val[busy], None if seen is None else seen[busy])
        return tokens

    def log_probs(self, chunks: Sequence[npt.NDArray[np.int32]]) -> npt.NDArray[np.float32]:
        """See `TokenRows.log_probs`."""
        busy = [row for row, chunk in enumerate(chunks) if len(chunk)]
        logits = self._model.forward(chunks, self._cache, last_only=True)
        out = np.zeros((len(chunks), logits.shape[-1]), np.float32)
        out[busy] = log_softmax(logits)
        return out

    def copy(self, rows: Sequence[tuple[int, int]]) -> None:
        """See `TokenRows.copy`."""
        for row, other in rows:
            self._cache.copy(row, other)
