"""Hooks: read or replace activations inside a forward pass.

`SITES` is the table of all sites and their names. Users fill a `HookRegistry`. `ModelSites` says which sites a model
has. `HookDispatch` is the single callback that the core gets, with the sites at which to call it. An engine without
hooks runs a forward pass that was compiled without them.
"""

from __future__ import annotations

import contextlib
import fnmatch
import inspect
import itertools
import re
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from infinilm import _core
from infinilm.devices.arrays import as_tensor
from infinilm.errors import ConfigError, EngineDeadError, InfinilmError, did_you_mean

__all__ = ["SITES", "HookHandle", "HookRegistry", "Site"]

HookCallback = Callable[..., Any]
"""callback(name, tensor, layer_idx) -> None or a replacement; one with a parameter `rank` gets that too."""


@dataclass(frozen=True, slots=True)
class Site:
    """One place in the forward pass; in a layer, names continue `layer{i}_` and `model.layers.{i}.`."""

    name: str
    dotted: tuple[str, ...]
    shape: str
    in_layer: bool = True

    def aliases(self, layer: int | str) -> tuple[str, ...]:
        """All names of the site in a layer, the core's first; a leading "model." may be left out."""
        flat = f"layer{layer}_{self.name}" if self.in_layer else self.name
        dotted = [f"model.layers.{layer}.{name}" for name in self.dotted] if self.in_layer else list(self.dotted)
        return (flat, *dotted, *(name.removeprefix("model.") for name in dotted if name.startswith("model.")))


_HIDDEN, _Q, _KV = (
    "[num_tokens, hidden_size]",
    "[num_tokens, num_heads, head_dim]",
    "[num_tokens, num_kv_heads, head_dim]",
)
_INNER = "[num_tokens, intermediate_size]"

SITES: tuple[Site, ...] = (
    Site("embedding", ("model.embed_tokens",), _HIDDEN, in_layer=False),
    # In models with several residual streams: what is predicted of the one that sublayers read and add to.
    Site("altup_prediction", ("altup.prediction",), _HIDDEN),
    Site("input_layernorm", ("input_layernorm",), _HIDDEN),
    # In layers that use a shared block: the norm of the residual stream and the embedding beside it, the norm before
    # the block's MLP, and the residual stream with what the block adds to it for the mixer, whose norm is that above.
    Site("block_norm", ("shared_block.input_layernorm",), "[num_tokens, 2 * hidden_size]"),
    Site("block_mlp_norm", ("shared_block.post_attention_layernorm",), _HIDDEN),
    Site("block_sum", ("block_sum",), _HIDDEN),
    # After the projection, with its bias.
    Site("q_proj", ("self_attn.q_proj", "attn.q"), _Q),
    Site("k_proj", ("self_attn.k_proj", "attn.k"), _KV),
    Site("v_proj", ("self_attn.v_proj", "attn.v"), _KV),
    Site("q_norm", ("self_attn.q_norm", "attn.q_norm"), _Q),
    Site("k_norm", ("self_attn.k_norm", "attn.k_norm"), _KV),
    Site("v_norm", ("self_attn.v_norm", "attn.v_norm"), _KV),
    Site("q_rope", ("self_attn.q_rope", "attn.q_rope"), _Q),
    Site("k_rope", ("self_attn.k_rope", "attn.k_rope"), _KV),
    # An indexer chooses the keys that attention reads: its queries and keys behind RoPE, and the weights with
    # which the scores of its heads are added up.
    Site("index_q", ("self_attn.index_q", "attn.index_q"), "[num_tokens, index_n_heads, index_head_dim]"),
    Site("index_k", ("self_attn.index_k", "attn.index_k"), "[num_tokens, 1, index_head_dim]"),
    Site("index_weights", ("self_attn.index_weights", "attn.index_weights"), "[num_tokens, index_n_heads]"),
    # Behind the convolution of a layer that has one: q, k and v of the delta rule, x, B and C of Mamba, or what the
    # last linear reads.
    Site("conv", ("linear_attn.conv", "conv.conv", "mamba.conv"), "[num_tokens, channels]"),
    # What attention or the delta rule gives, gated where it has a gate, before o_proj.
    Site("attention", ("self_attn.attention", "attn.attention"), _Q),
    Site("o_proj", ("self_attn.o_proj", "attn.o"), _HIDDEN),
    # The same two of Mamba, which may stand beside attention.
    Site("scan", ("mamba.scan",), _Q),
    Site("out_proj", ("mamba.out_proj",), _HIDDEN),
    Site("attention_residual", ("attention_residual",), _HIDDEN),
    # Behind the second of two mixers side by side.
    Site("mixers_residual", ("mixers_residual",), _HIDDEN),
    # A second way around attention: its last linear, its norm, and the stream that both have joined.
    Site("laurel", ("laurel.linear_right",), _HIDDEN),
    Site("post_laurel_norm", ("laurel.post_laurel_norm",), _HIDDEN),
    Site("laurel_residual", ("laurel_residual",), _HIDDEN),
    # Before the MLP; in models with post_norms of what o_proj gives, and the norm before the MLP is the next.
    Site("post_attention_layernorm", ("post_attention_layernorm",), _HIDDEN),
    Site("pre_feedforward_layernorm", ("pre_feedforward_layernorm",), _HIDDEN),
    Site("gate_proj", ("mlp.gate_proj", "mlp.gate"), _INNER),
    Site("up_proj", ("mlp.up_proj", "mlp.up"), _INNER),
    # activation(gate) * up, or of up where there is no gate.
    Site("activation", ("mlp.activation",), _INNER),
    Site("down_proj", ("mlp.down_proj", "mlp.down"), _HIDDEN),
    # In layers with experts beside their MLP: norms of the MLP's output, the experts' input, and the experts' output.
    Site("post_feedforward_layernorm_1", ("post_feedforward_layernorm_1",), _HIDDEN),
    Site("pre_feedforward_layernorm_2", ("pre_feedforward_layernorm_2",), _HIDDEN),
    Site("post_feedforward_layernorm_2", ("post_feedforward_layernorm_2",), _HIDDEN),
    Site("router_logits", ("mlp.router_logits",), "[num_tokens, num_experts]"),
    # The sum over a token's experts.
    Site("experts", ("mlp.experts",), _HIDDEN),
    Site("post_feedforward_layernorm", ("post_feedforward_layernorm",), _HIDDEN),
    # In models with vectors of each layer: the residual stream before they join it; activation(gate) * the token's own;
    # that in hidden_size; and normed.
    Site("mlp_residual", ("mlp_residual",), _HIDDEN),
    Site("per_layer_input", ("per_layer_input",), "[num_tokens, per_layer_size]"),
    Site("per_layer_projection", ("per_layer_projection",), _HIDDEN),
    Site("post_per_layer_input_norm", ("post_per_layer_input_norm",), _HIDDEN),
    # The residual stream at the end of the layer.
    Site("residual", ("residual",), _HIDDEN),
    # One row per logits row.
    Site("final_norm", ("model.norm",), "[num_rows, hidden_size]", in_layer=False),
    Site("logits", ("lm_head",), "[num_rows, vocab_size]", in_layer=False),
)
"""Every site, in the order of the forward pass."""

_MAX_LAYERS = 1000  # layers looked at to find out whether a pattern fits any model; numbers in it may be larger


class HookHandle:
    """What `HookRegistry.register_hook` returns."""

    __slots__ = ("_registry", "callback", "pattern", "ranks", "takes_rank")

    def __init__(
        self, registry: HookRegistry, pattern: str, callback: HookCallback, ranks: Literal["all"] | int
    ) -> None:
        self._registry = registry
        self.pattern = pattern
        self.callback = callback
        self.ranks = ranks
        self.takes_rank = _takes_rank(callback)

    def remove(self) -> None:
        """Remove the hook, from the next forward on. Idempotent."""
        self._registry._remove(self)

    def __repr__(self) -> str:
        return f"<HookHandle {self.pattern!r}>"


class HookRegistry:
    """Hooks by pattern; give it to an engine with `InferEngine.set_hook_registry`.

    Hooks can be added and removed at any time, from any thread; a change takes effect at the next forward. One registry
    may serve several engines.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._hooks: tuple[HookHandle, ...] = ()
        # The models that use it, each with the hooks as they were at its last forward.
        self._models: weakref.WeakKeyDictionary[ModelSites, HookDispatch | None] = weakref.WeakKeyDictionary()

    def register_hook(self, pattern: str, callback: HookCallback, *, ranks: Literal["all"] | int = 0) -> HookHandle:
        """Call `callback` at every site whose name fits `pattern`.

        Parameters
        ----------
        pattern
            A name in any style of `SITES`, or a glob of it in which ``*`` stands for anything: ``layer0_q_proj``,
            ``layer0_*``, ``*_q_proj``, ``layers.*.attn.q``, ``model.layers.0.mlp.down_proj``, ``model.norm``.
        callback
            ``callback(name, tensor, layer_idx)`` with the site's first name and -1 outside layers, called on the
            rank's thread; a parameter named `rank` gets the rank. The tensor is valid during the call only; it may be
            written in place. A return value other than None replaces it: anything with DLPack or the buffer protocol,
            of the same shape, in float32, bfloat16 or float16. Hooks of one site run in the order they were registered,
            each on what the previous one left. An exception reaches the caller of forward, and the engine stays usable;
            with several ranks the step goes on to its end first, without further hooks.
        ranks
            Rank 0, or "all". q, k and v, their norms and RoPE, attention, gate, up and activation are each rank's own
            heads or columns. All other values are the same on every rank, and after the hooks all ranks continue with
            rank 0's. Hooks of different ranks may run at the same time.

        Raises
        ------
        TypeError
            A pattern that is no text, or a callback that cannot be called.
        ConfigError
            No site of any model fits the pattern, or none of an engine that uses the registry; or `ranks` is neither 0
            nor "all".
        """
        if not isinstance(pattern, str):
            raise TypeError(f"pattern: expected the name of a site or a glob, got {pattern!r}")
        if not callable(callback):
            raise TypeError(f"callback: expected callback(name, tensor, layer_idx), got {callback!r}")
        if isinstance(ranks, bool) or ranks not in (0, "all"):
            raise ConfigError(f"ranks: expected 0 or 'all', got {ranks!r}")
        _check_fits_any_model(pattern)
        handle = HookHandle(self, pattern, callback, ranks)
        with self._lock:
            for model in self._models:
                model.select(pattern)
            self._hooks = (*self._hooks, handle)
        return handle

    def clear(self) -> None:
        """Remove all hooks."""
        with self._lock:
            self._hooks = ()

    def has_hooks(self) -> bool:
        """Whether there are any."""
        return bool(self._hooks)

    def _remove(self, handle: HookHandle) -> None:
        with self._lock:
            self._hooks = tuple(hook for hook in self._hooks if hook is not handle)

    def attach(self, model: ModelSites) -> None:
        """Check every hook, now and in the future, against a model."""
        with self._lock:
            for hook in self._hooks:
                model.select(hook.pattern)
            self._models[model] = None

    def detach(self, model: ModelSites) -> None:
        """Check hooks against a model no more."""
        with self._lock:
            self._models.pop(model, None)

    def dispatch(self, model: ModelSites, threads: set[int]) -> HookDispatch | None:
        """The callback for the core, or None without hooks; made again when the hooks have changed."""
        with self._lock:
            if not self._hooks:
                return None
            dispatch = self._models.get(model)
            if dispatch is None or dispatch.hooks is not self._hooks:
                dispatch = self._models[model] = HookDispatch(self._hooks, model, threads)
            return dispatch


class ModelSites:
    """The sites of one model, by all their names. The core says which it has; `SITES` has the names."""

    def __init__(self, spec: _core.ModelSpec) -> None:
        found = set(_core.sites(spec))
        norm = "a" if any(name == "q_norm" for name, _ in found) else "no"
        self._description = f"{spec.num_layers} layers and {norm} norm of q and k"
        self._last_layer = spec.num_layers - 1
        places = [
            (site, layer)
            for site in SITES
            for layer in (range(spec.num_layers) if site.in_layer else (-1,))
            if (site.name, layer) in found
        ]
        self.sites = tuple(dict.fromkeys(site for site, _ in places))
        self._aliases: list[tuple[str, ...]] = [site.aliases(layer) for site, layer in places]

    def select(self, pattern: str) -> list[str]:
        """The core's names of the sites that fit; ConfigError if there are none."""
        names = self._fitting(pattern)
        if not names:
            in_last_layer = re.sub(r"(?<=layer)\d+|(?<=layers\.)\d+", str(self._last_layer), pattern)
            near = [in_last_layer] if self._fitting(in_last_layer) else itertools.chain.from_iterable(self._aliases)
            hint = did_you_mean(pattern, near, count=2)
            raise ConfigError(
                f"hook pattern {pattern!r} fits no site of this model, which has {self._description}{hint}"
            )
        return names

    def _fitting(self, pattern: str) -> list[str]:
        fits = _matcher(pattern)
        return [aliases[0] for aliases in self._aliases if any(map(fits, aliases))]


_serials = itertools.count(1)


class HookDispatch:
    """The callback the core calls: runs the hooks of a site one after another.

    Parameters
    ----------
    hooks
        In the order they were registered.
    model
        The model whose sites the patterns are resolved on.
    threads
        Ids of the threads that are running a callback; written by this class.
    """

    def __init__(self, hooks: tuple[HookHandle, ...], model: ModelSites, threads: set[int]) -> None:
        self.hooks = hooks
        self.serial = next(_serials)
        self._threads = threads
        self._by_site: dict[str, list[HookHandle]] = {}
        for hook in hooks:
            for name in model.select(hook.pattern):
                self._by_site.setdefault(name, []).append(hook)

    @property
    def names(self) -> list[str]:
        """The sites with hooks on rank 0."""
        return list(self._by_site)

    @property
    def names_of_all_ranks(self) -> list[str]:
        """The sites with hooks on every rank."""
        return [name for name, hooks in self._by_site.items() if any(hook.ranks == "all" for hook in hooks)]

    def __call__(self, name: str, layer: int, tensor: _core.Tensor, rank: int = 0) -> _core.Tensor | None:
        thread = threading.get_ident()
        self._threads.add(thread)
        try:
            current = tensor
            for hook in self._by_site[name]:
                if rank != 0 and hook.ranks != "all":
                    continue
                result = hook.callback(name, current, layer, **({"rank": rank} if hook.takes_rank else {}))
                if result is not None:
                    current = _replacement(result, current, f"hook {hook.pattern!r} at {name}")
            return None if current is tensor else current
        finally:
            self._threads.discard(thread)


class _LateFailure:
    """A callback that raises nothing: what a hook raises is kept, and no hook is called after that.

    Where a step is in several ranks or stages, an exception in one would leave the others waiting for what it was to
    send, and so end the engine. The step goes on instead, and `EngineHooks.raise_failure` fails it at its end.
    """

    def __init__(self, dispatch: HookDispatch) -> None:
        self._dispatch = dispatch
        self._lock = threading.Lock()
        self.failure: BaseException | None = None

    def __call__(self, name: str, layer: int, tensor: _core.Tensor, rank: int = 0) -> _core.Tensor | None:
        if self.failure is not None:
            return None
        try:
            return self._dispatch(name, layer, tensor, rank)
        except BaseException as error:
            # Its frames, and this one behind them, keep what the hook was given, which nothing may keep after the call.
            traceback.clear_frames(error.__traceback__)
            del tensor
            with self._lock:
                self.failure = self.failure or error  # the first one, where hooks of several ranks raise
            return None


class EngineHooks:
    """The hooks of one engine: `give` them to the core before a forward, `take_back` after it.

    Callbacks may refer to the engine. To avoid a cycle of references, neither this object nor the core refers to a
    callback between forwards. The owner of the engine keeps the registry alive.

    Parameters
    ----------
    core : _core.InferEngine
    sites : ModelSites
    num_workers : int
        Ranks of all stages. With more than one, what a hook raises comes out of `raise_failure`, not of the step: see
        `_LateFailure`.
    """

    def __init__(self, core: _core.InferEngine, sites: ModelSites, num_workers: int) -> None:
        self._core = core
        self._fails_late = num_workers > 1
        self._late: _LateFailure | None = None
        self._sites = sites
        self._registry: weakref.ref[HookRegistry] | None = None
        self._threads: set[int] = set()  # those that run a callback
        self._given = False
        self._last = 0  # serial number of what was given last; 0: no hooks
        self._current: tuple[HookHandle, ...] = ()  # what was given last

    @property
    def registry(self) -> HookRegistry | None:
        """The one in use."""
        return None if self._registry is None else self._registry()

    @property
    def in_use(self) -> bool:
        """Whether the core has hooks now or will have them in the next forward."""
        return self._given or ((registry := self.registry) is not None and registry.has_hooks())

    def use(self, registry: HookRegistry | None) -> None:
        """Use a registry, or none, from the next forward on. ConfigError, without a change: a pattern fits no site."""
        if registry is not None and not isinstance(registry, HookRegistry):
            raise TypeError(f"hooks: expected a HookRegistry or None, got {type(registry).__name__}")
        if registry is not None:
            registry.attach(self._sites)
        before = self.registry
        if before is not None and before is not registry:
            before.detach(self._sites)
        self._registry = None if registry is None else weakref.ref(registry)

    def give(self) -> bool:
        """Give the present hooks to the core; returns whether they differ from those of the last forward."""
        registry = self.registry
        dispatch = None if registry is None else registry.dispatch(self._sites, self._threads)
        if dispatch is not None:
            self._set(dispatch)
        self._current = () if dispatch is None else dispatch.hooks
        before, self._last = self._last, 0 if dispatch is None else dispatch.serial
        return before != self._last

    def watch(self, site: str, look: HookCallback) -> None:
        """After `give`: show `look` a site in the next forward, as the hooks leave it, until `take_back`."""
        watcher = HookHandle(HookRegistry(), site, look, 0)
        self._set(HookDispatch((*self._current, watcher), self._sites, self._threads))

    def _set(self, dispatch: HookDispatch) -> None:
        self._late = _LateFailure(dispatch) if self._fails_late else None
        self._core.set_hooks(self._late or dispatch, dispatch.names, dispatch.names_of_all_ranks)
        self._given = True

    def raise_failure(self) -> None:
        """Raise what a hook has raised in the step that has ended, if it did not come out of the step itself."""
        late, self._late = self._late, None
        if late is not None and late.failure is not None:
            raise late.failure

    def take_back(self) -> None:
        """Have the core drop its hooks, and keep none: a hook may refer to the LLM and keep it from being collected."""
        self._current, self._late = (), None
        if self._given:
            self._given = False
            with contextlib.suppress(EngineDeadError):  # a dead engine has dropped them already
                self._core.set_hooks(None, [])

    @property
    def is_calling(self) -> bool:
        """Whether this is a rank's thread, and a hook runs on it."""
        return threading.get_ident() in self._threads

    def refuse_calls(self) -> None:
        """Raise InfinilmError in a hook: it runs on a rank's thread, so a call to the engine would never return."""
        if self.is_calling:
            raise InfinilmError("a hook cannot call the engine that is running it; do it after forward")


def _takes_rank(callback: HookCallback) -> bool:
    try:
        return "rank" in inspect.signature(callback).parameters
    except (TypeError, ValueError):  # some callables written in C do not tell
        return False


def _replacement(result: Any, current: _core.Tensor, where: str) -> _core.Tensor:
    try:
        tensor = as_tensor(result, where)
    except TypeError:
        raise TypeError(
            f"{where} returned a {type(result).__name__}; expected an array to replace it, or None"
        ) from None
    if tensor.shape != current.shape or tensor.dtype not in ("float32", "bfloat16", "float16"):
        raise InfinilmError(
            f"{where}: expected a replacement of shape {list(current.shape)} and dtype {current.dtype} (or another "
            f"floating dtype), got {list(tensor.shape)} {tensor.dtype}"
        )
    return tensor


def _matcher(pattern: str) -> Callable[[str], Any]:
    return re.compile(fnmatch.translate(pattern)).match


def _check_fits_any_model(pattern: str) -> None:
    """Refuse a pattern that no site of a model of any depth fits."""
    fits = _matcher(pattern)
    if not any(fits(alias) for aliases in _all_aliases(pattern) for alias in aliases):
        mentioned = re.search(r"\d+", pattern)
        layers = ("0" if mentioned is None else mentioned[0], "*")
        examples = [alias for site in SITES for layer in layers for alias in site.aliases(layer)]
        examples += [f"*_{site.name}" for site in SITES if site.in_layer]
        below = f"{pattern}.*"  # a module of transformers, such as model.layers.0.mlp, has sites inside
        inside = _matcher(below)
        hint = did_you_mean(pattern, [below] if any(map(inside, examples)) else examples, count=2)
        raise ConfigError(
            f"hook pattern {pattern!r} fits no site of any model; names are like 'layer0_q_proj' or "
            f"'layers.0.self_attn.q_proj', infinilm.engine.hooks.SITES lists them{hint}"
        )


def _all_aliases(pattern: str) -> Iterator[tuple[str, ...]]:
    """Names of all sites in the layers the pattern mentions, then in all others."""
    mentioned = re.findall(r"[0-9]+", pattern)
    for layer in itertools.chain((n for n in mentioned if n == "0" or n[0] != "0"), range(_MAX_LAYERS)):
        for site in SITES:
            yield site.aliases(layer)
