"""`InferEngine`: the engine layer, for programs that schedule by themselves.

It loads weights, keeps the KV cache and runs one forward at a time. The caller decides what is in a forward
(`InferEngine.Input`) and which part of the cache belongs to which request. `LLM` puts a scheduler on top of the same
core. The path of one step: `forward` -> `batch.make_batch` -> `_core.InferEngine.forward`.
"""

from __future__ import annotations

import atexit
import copy as copying
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeAlias, overload

import numpy as np

from infinilm import _core
from infinilm.cache import CacheConfig, CacheLayout, PagedKVCacheConfig, StaticKVCacheConfig, resolve_cache_dtype
from infinilm.checkpoint.dtype_conversion import convert
from infinilm.checkpoint.folder import resolve_model
from infinilm.checkpoint.loading import load_weights
from infinilm.checkpoint.opening import open_checkpoint
from infinilm.checks import OfThisProcess, as_boolean
from infinilm.config.json.model_config import AutoConfig, ModelConfig
from infinilm.config.spec import build_spec, check_quantization, longest_text
from infinilm.devices.arrays import as_tensor
from infinilm.devices.system import nccl_library, resolve_device
from infinilm.distributed import CommunicationGroup, DistConfig, RankInfo
from infinilm.engine import batch as batches
from infinilm.engine.hooks import EngineHooks, HookRegistry, ModelSites
from infinilm.errors import (
    CacheFullError,
    ConfigError,
    DeviceError,
    EngineDeadError,
    WeightError,
    did_you_mean,
)
from infinilm.signatures import name_keywords

__all__ = ["InferEngine"]

# Engines that exist or are under construction. The lock guards this set and `_exiting`.
_open_engines: weakref.WeakSet[InferEngine] = weakref.WeakSet()
_open_lock = threading.Lock()
_exiting = False


def _start_over() -> None:
    """In a forked child: make a new lock, since the old one may be held, and forget the engines of the parent."""
    global _open_lock, _open_engines
    _open_lock = threading.Lock()
    _open_engines = weakref.WeakSet()


os.register_at_fork(after_in_child=_start_over)


@atexit.register
def _close_all() -> None:
    """Close all engines before the interpreter ends, so that no thread returns from the core after that."""
    global _exiting
    with _open_lock:
        _exiting = True
        engines = list(_open_engines)
    for engine in engines:
        with engine._lock:  # held while an engine is under construction
            if not engine._closed:
                engine.close()


class InferEngine(OfThisProcess):
    """A model, its weights and its KV cache. A context manager; several threads may share it.

    Weights are loaded by `load_weights`, or one by one. The first forward checks that all are loaded. After an error
    the engine is usable as before. With several ranks, a rank that fails while the others wait for it ends the engine:
    this call and all later ones raise `EngineDeadError` with that failure as `__cause__`, and only `close` works.

    Parameters
    ----------
    config
        A `LlamaConfig` (copied), or the model whose config.json is read: a folder, "demo", or a hub id. Its `dtype` is
        the dtype of the computation. RoPE frequencies that depend on the length are those of `max_position_embeddings`
        tokens.
    distributed_config
        The devices of tensor parallelism, a rank on each; default: one. On CPUs `tp_size` ranks share the cores.
    device_type
        "cpu", "cuda", or "auto" (the default): cuda where it is usable.
    cache_config
        Default: ``StaticKVCacheConfig()``, one sequence of max_position_embeddings tokens.
    quantization
        How weights are stored: None, "int8", "int4" or, on GPUs, "fp8"; see `LLM`. Weights that `infinilm pack` has
        packed are loaded as they are, on CPUs. Inputs of FP8 weights stay in the dtype here; `LLM` has `activations`.

    Raises
    ------
    ConfigError
        A configuration that cannot work; also a number of ranks that does not divide the attention heads.
    DeviceError
        A device that is absent or not usable.
    CacheFullError
        A cache that is too small for one block, or too large.
    FileNotFoundError
        No such folder, or no config.json in it.
    TypeError
        An unknown parameter, or an argument of another type.
    """

    Input: TypeAlias = batches.Input
    Output: TypeAlias = batches.Output

    def __init__(
        self,
        config: ModelConfig | str | os.PathLike[str],
        distributed_config: DistConfig | None = None,
        device_type: str | None = None,
        cache_config: CacheConfig | None = None,
        quantization: str | None = None,
        **unknown: NoReturn,
    ) -> None:
        for name in unknown:
            known = ("config", "distributed_config", "device_type", "cache_config", "quantization")
            raise TypeError(f"InferEngine has no parameter {name!r}{did_you_mean(name, known)}")
        self.config: ModelConfig = _read_config(config)
        kind, _, index = _device_kind(device_type).partition(":")
        own = DistConfig(tp_device_ids=[int(index or 0)])  # with "auto", GPUs before it may be too old
        dist_config = own if distributed_config is None else distributed_config
        group = CommunicationGroup(dist_config, kind)
        self.ranks: tuple[RankInfo, ...] = group.ranks
        """The rank of each device."""
        self._dist_config = copying.deepcopy(dist_config)
        cache_config = StaticKVCacheConfig() if cache_config is None else cache_config
        spec = build_spec(
            self.config,
            dtype=self.dtype,
            max_model_len=longest_text(self.config),
            quantization=quantization,
        )
        check_quantization(quantization, dtype=self.dtype, on_cpu=kind == "cpu")
        self._quantization = quantization
        self._rank_spec = _core.local_spec(spec, 0, group.tp_size)  # all ranks have equally many kv heads
        windows = [layer.cache.sliding_window for layer in spec.layers]
        self._sliding_window = 0 if 0 in windows else max(windows)
        self._sites = ModelSites(spec)
        layout = self._layout(cache_config)

        self._process = os.getpid()  # whose threads it has
        self._lock = threading.RLock()  # guards everything below
        self._closed = True  # until there is something to close
        with self._lock:
            with _open_lock:
                if _exiting:
                    raise EngineDeadError("the program is ending: it is too late to make an engine")
                _open_engines.add(self)
            self._core = _core.InferEngine(
                spec, [rank.device for rank in self.ranks], nccl_library=nccl_library() if kind == "cuda" else ""
            )
            self._param_shapes = self._core.param_shapes()
            self._loaded: set[str] = set()
            self._ready = False  # all weights are there and prepared
            self._hooks = EngineHooks(self._core, self._sites, len(self.ranks))
            self._registry: HookRegistry | None = None  # in use
            self._allocate(layout)
            self._cache_config = cache_config
            self._closed = False

    @property
    def dtype(self) -> str:
        """Dtype of the computation. The KV cache has the dtype of its configuration, by default this one."""
        return self.config.dtype

    @property
    def device(self) -> str:
        """Device of rank 0, "cpu" or "cuda:<index>"; `ranks` has those of all ranks."""
        return self.ranks[0].device

    @property
    def has_states(self) -> bool:
        """Whether layers keep a state of each sequence: a row goes on where it was, or begins at 0."""
        return self._rank_spec.state_bytes() > 0

    # ---- weights ----

    def param_shapes(self) -> dict[str, tuple[int, ...]]:
        """Full shape of every parameter, by its name in the checkpoint."""
        return dict(self._param_shapes)

    def load_param(self, name: str, tensor: Any, dtype: str | None = None) -> None:
        """Load a copy of one parameter. The caller may change the array afterwards.

        Parameters
        ----------
        name
            Such as "model.layers.0.self_attn.q_proj.weight"; see `param_shapes`.
        tensor
            The full tensor, with DLPack or the buffer protocol, in host memory: float32, bfloat16, float16 or (numpy)
            float64. It is converted to the engine's dtype, to nearest, ties to even; an engine in float32 keeps 16 bits
            as they are.
        dtype
            "bfloat16" or "float16" where `tensor` is an array of uint16 with such bits.

        Raises
        ------
        WeightError
            An unknown name, one that is loaded already, another shape or dtype, or a value the dtype cannot hold.
        """
        with self._open():
            self._load_param(name, tensor, dtype)

    def load_params(self, params: Iterable[tuple[str, Any]] | Mapping[str, Any]) -> None:
        """Load parameters from pairs of name and tensor, or a mapping, with `load_param`; stops at the first error."""
        with self._open():
            for pair in params.items() if isinstance(params, Mapping) else params:
                if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                    raise TypeError(f"params: expected pairs of name and tensor, got {pair!r:.80}")
                self._load_param(*pair)

    def load_weights(self, folder: str | os.PathLike[str], *, use_tqdm: bool = True) -> None:
        """Load all parameters from a checkpoint: a folder with safetensors files, a GGUF file, "demo", or a hub id.

        Weights are packed for the kernels as they are read; a folder of `infinilm pack` is mapped and used in place.
        Without `quantization`, blocks of a GGUF file and integers of quantised safetensors are kept as they are: on
        CPUs where the dtype of the engine is that of the checkpoint's own configuration, on GPUs where it has 16 bits.
        Nothing is loaded unless the headers of the files fit the model.

        Raises
        ------
        ConfigError
            The weights are packed, and otherwise than `quantization` or the dtype say, or the device is no CPU.
        WeightError
            The files do not fit the model or are damaged, or parameters are loaded already.
        """
        with self._open():
            if self._loaded:
                raise WeightError(
                    f"{len(self._loaded)} parameters are loaded already, such as {min(self._loaded)!r}; load_weights "
                    "loads all: make a new engine"
                )
            with open_checkpoint(resolve_model(folder)) as checkpoint:
                if checkpoint.packed:
                    checkpoint.packed.check_device(self.device)
                    checkpoint.packed.resolve_quantization(self._quantization)
                kind = self.device.partition(":")[0]
                as_stored = self.dtype == checkpoint.checkpoint_dtype() if kind == "cpu" else self.dtype != "float32"
                native_on = kind if as_stored and self._quantization is None else ""
                try:
                    load_weights(
                        checkpoint,
                        self._core,
                        progress=use_tqdm,
                        dtype=self.dtype,
                        config=self.config,
                        native_on=native_on,
                        quantised_dtype="float32" if self._quantization else "float16" if native_on == "cpu" else None,
                    )
                finally:
                    self._loaded.update(self._core.loaded_params())

    def state_dict(self, copy: bool = False, *, dequantize: bool = True) -> list[dict[str, _core.Tensor]]:
        """The parameters as they were loaded, one dict of names and tensors per rank: the part of each that it has.

        From packed weights they are unpacked: exactly, or as float32 where they are int8 or int4.

        A rank has the rows of its query and kv heads, of its MLP columns and of its part of the vocabulary, and the
        matching columns of o_proj and down_proj. Only rank 0 has the biases of these two. Every rank has all norms.

        Parameters
        ----------
        copy
            False: read-only tensors, which share memory where what they were loaded from is still there, such as a
            mapped file. True: copies, for libraries that do not support DLPack 1.0.
        dequantize
            True: quantised weights are given as the floats that they stand for. Nothing else is offered.

        Raises
        ------
        ConfigError
            `dequantize` is False.
        """
        if not as_boolean("dequantize", dequantize):
            raise ConfigError(
                "state_dict: dequantize must be True; got False. Weights are given as floats, since the kernels keep "
                "codes in a layout of their own. The codes as stored: read the files of the model, with safetensors or "
                "gguf; 'infinilm info MODEL' tells which formats they have"
            )
        with self._open():
            ranks = self._core.state_dict()
        if not copy:
            return ranks
        return [{name: _copied(tensor, tensor.dtype, name) for name, tensor in state.items()} for state in ranks]

    def _load_param(self, name: str, tensor: Any, dtype: str | None = None) -> None:
        if name not in self._param_shapes:
            raise WeightError(f"unknown parameter {name!r}{did_you_mean(str(name), self._param_shapes, count=3)}")
        if name in self._loaded:
            raise WeightError(f"parameter {name!r} is already loaded; make a new engine for other weights")
        where = f"parameter {name!r}"
        if not isinstance(tensor, np.ndarray) or tensor.dtype != np.float64:
            tensor = as_tensor(tensor, where, dtype, error=WeightError)
        elif dtype is not None:
            raise WeightError(f"{where}: expected an array of {dtype}, got float64")
        if tuple(tensor.shape) != self._param_shapes[name]:
            raise WeightError(f"{where}: expected shape {list(self._param_shapes[name])}, got {list(tensor.shape)}")
        stored = str(tensor.dtype)
        if stored not in ("float32", "bfloat16", "float16", "float64"):
            raise WeightError(f"{where}: expected float32, bfloat16, float16 or float64, got {stored}")
        kept = stored if self.dtype == "float32" and stored != "float64" else self.dtype
        self._core.load_param(name, _copied(tensor, kept, name))
        self._loaded.add(name)

    # ---- running ----

    @overload
    def forward(self, input: batches.Input, *, return_logits: Literal[True]) -> batches.OutputWithLogits: ...

    @overload
    def forward(self, input: batches.Input, *, return_logits: bool = False) -> batches.Output: ...

    def forward(self, input: batches.Input, *, return_logits: bool = False) -> batches.Output:
        """Run one step: compute the new tokens of every request, put their keys and values into the cache, sample.

        Parameters
        ----------
        input
            The requests; see `InferEngine.Input`. Arrays are read before this returns, and never written.
        return_logits
            Give the logits of each request's last token too.

        Returns
        -------
        InferEngine.Output
            `output_ids` [num_requests] int32, `logits` [num_requests, vocab_size] float32 or None.

        Raises
        ------
        WeightError
            Parameters are missing.
        RequestError
            A field of the input is missing, of another shape or dtype, or out of range.
        CacheFullError
            A request is longer than its part of the cache.
        EngineDeadError
            The engine is closed, or one of several ranks has failed.
        """
        with self._open():
            if not isinstance(input, batches.Input):
                raise TypeError(f"forward: expected an InferEngine.Input, got {type(input).__name__}")
            if not self._ready:
                self._core.finish_loading()  # names the parameters that are missing
                self._ready = True
            batch = batches.make_batch(
                input,
                self._cache,
                vocab_size=self.config.vocab_size,
                sliding_window=self._sliding_window,
                has_states=self.has_states,
                return_logits=return_logits,
            )
            self._hooks.give()
            try:
                step = self._core.forward(batch)
                self._hooks.raise_failure()
            finally:
                self._hooks.take_back()
        assert step.ids is not None  # sampling parameters were given
        if step.logits is not None:
            return batches.OutputWithLogits(step.ids, step.logits)
        return batches.Output(step.ids)

    def set_hook_registry(self, registry: HookRegistry | None) -> None:
        """Use the hooks of a registry from the next forward on, or none.

        Raises
        ------
        ConfigError
            A pattern in it that no site of this model fits; the registry in use stays.
        """
        with self._open():
            self._hooks.use(registry)
            self._registry = registry

    @contextmanager
    def hooked(self, registry: HookRegistry) -> Iterator[None]:
        """Use the hooks of a registry, instead of those in use, inside a ``with`` block.

        Calls of other threads wait until the block ends. Raises as `set_hook_registry` does.
        """
        with self._open():
            before = self._registry
            self.set_hook_registry(registry)
            try:
                yield
            finally:
                self.set_hook_registry(before)

    def check_caller(self) -> None:
        """InfinilmError: this is a hook of the engine, which waits for it."""
        self._hooks.refuse_calls()

    # ---- cache ----

    @property
    def cache_layout(self) -> CacheLayout:
        """Kind, shape and dtype of the cache in use."""
        return self._cache

    def reset_cache(self, cache_config: CacheConfig | None = None) -> None:
        """Empty the cache, and change it if another configuration is given.

        If the sizes stay the same, the memory does, too. If the new cache does not fit, the old one stays.

        Parameters
        ----------
        cache_config
            None: the default of the kind in use, which has room for one sequence of max_position_embeddings tokens.
        """
        with self._open():
            if cache_config is None:
                cache_config = self._cache_config.default(self.config.max_position_embeddings)
            layout = self._layout(cache_config)
            if layout != self._cache:
                self._allocate(layout)
            self._cache_config = cache_config

    def copy_blocks(self, blocks: Sequence[int], copies: Sequence[int], num_tokens: int) -> None:
        """Let blocks of the cache become copies of others, with the state of the sequence if the model keeps one.

        In a static cache a row is a block. The bytes go through the memory of the host.

        Parameters
        ----------
        blocks, copies : sequence of int
            As many of both.
        num_tokens : int
            Tokens of the sequence that the blocks hold.

        Raises
        ------
        RequestError
            There is no such block, or they are not as many.
        """
        with self._open():
            self._core.write_blocks(0, copies, self._core.read_blocks(0, blocks))
            if self.has_states:
                for block, other in zip(blocks, copies, strict=True):
                    self._core.write_state(other, num_tokens, self._core.read_state(block))

    def get_cache_config(self) -> CacheConfig:
        """The configuration in use."""
        return self._cache_config

    def get_dist_config(self) -> DistConfig:
        """The devices in use; a copy."""
        return copying.deepcopy(self._dist_config)

    def _layout(self, cache_config: CacheConfig) -> CacheLayout:
        if not isinstance(cache_config, (StaticKVCacheConfig, PagedKVCacheConfig)):
            raise TypeError(
                "cache_config: expected a StaticKVCacheConfig or a PagedKVCacheConfig, got "
                f"{type(cache_config).__name__}"
            )
        if isinstance(cache_config, PagedKVCacheConfig) and self._rank_spec.state_bytes():
            raise ConfigError(
                f"cache_config: {self.config.architecture} keeps a state of each sequence, which InferEngine has for "
                "the rows of a StaticKVCacheConfig alone; use that, or LLM"
            )
        dtype = resolve_cache_dtype(cache_config.dtype, self.dtype, computed=self.dtype, device=self.device)
        return cache_config.layout(
            max_position_embeddings=self.config.max_position_embeddings,
            kv_bytes_per_token=self._rank_spec.kv_bytes_per_token(dtype, device=self.device),
            dtype=dtype,
        )

    def _allocate(self, layout: CacheLayout) -> None:
        try:
            num_states = layout.num_blocks if self._rank_spec.state_bytes() else 0  # a row has one
            self._core.reset_cache(layout.num_blocks, layout.block_size, layout.dtype, num_states)
        except DeviceError as error:
            settings = (
                "max_batch_size or max_cache_len" if layout.kind == "static" else "max_kv_memory_bytes or num_blocks"
            )
            num_bytes = layout.num_slots * self._rank_spec.kv_bytes_per_token(layout.dtype, device=self.device)
            num_bytes += layout.num_blocks * self._rank_spec.state_bytes()
            raise CacheFullError(f"no room for a KV cache of {num_bytes} bytes: {error}; lower {settings}") from error
        self._cache = layout

    # ---- life ----

    def close(self) -> None:
        """Free the weights, the cache and the threads, after calls of other threads are done. Idempotent.

        Does nothing in a forked child, where the engine's threads do not exist.
        """
        if self._process != os.getpid():
            return  # the lock may be held by a thread of the parent
        self._hooks.refuse_calls()
        with self._lock:
            if not self._closed:
                self._closed = True
                self._hooks.use(None)
                self._core.close()

    def __enter__(self) -> InferEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "ready" if self._ready else "loading"
        return f"<InferEngine {self.config.model_type}, {self.dtype} on {self.device}, {state}>"

    @contextmanager
    def _open(self) -> Iterator[None]:
        """One caller at a time, while the engine is open."""
        if self._process != os.getpid():
            raise EngineDeadError(
                f"the engine was made in process {self._process}; after a fork make a new one, or use the 'spawn' "
                "start method"
            )
        self._hooks.refuse_calls()
        with self._lock:
            if self._closed:
                raise EngineDeadError("the engine is closed; make a new one")
            yield


def _read_config(config: ModelConfig | str | os.PathLike[str]) -> ModelConfig:
    if isinstance(config, ModelConfig):
        return copying.deepcopy(config)
    if not isinstance(config, (str, os.PathLike)):
        raise TypeError(f"config: expected a LlamaConfig or a folder with a config.json, got {type(config).__name__}")
    return AutoConfig.from_pretrained(resolve_model(Path(config) if isinstance(config, os.PathLike) else config))


def _device_kind(device_type: str | None) -> str:
    if device_type not in (None, "auto", "cpu", "cuda"):
        which = "; which CUDA device is said by DistConfig(tp_device_ids=[..])" if "cuda" in str(device_type) else ""
        raise ConfigError(f"device_type: expected 'cpu', 'cuda', 'auto' or None, got {device_type!r}{which}")
    return resolve_device("auto" if device_type is None else device_type)


def _copied(tensor: Any, dtype: str, name: str) -> _core.Tensor:
    """A contiguous copy of a tensor of the core or of a numpy array, as `dtype`."""
    stored = str(tensor.dtype)
    array = np.ascontiguousarray(tensor if isinstance(tensor, np.ndarray) else tensor.numpy())
    if stored == "bfloat16":
        stored = "float32"  # numpy() has widened it, which converting takes back exactly
    if stored == dtype:
        return _core.from_numpy(array.copy(), dtype)
    return _core.from_numpy(convert(array, stored, dtype, name=name), dtype)


name_keywords(InferEngine.__init__)
