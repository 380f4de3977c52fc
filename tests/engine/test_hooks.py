"""Hooks: every point fires with the documented shape, patterns in both styles, replacement, errors."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from goldens import GOLDENS, golden
from llm import tiny
from llm.support import PATIENCE

from engine.support import Foreign, make_engine, run
from infinilm import AutoConfig, ConfigError, DeviceError, HookRegistry, InferEngine, InfinilmError, _core
from infinilm.checkpoint import resolve_model
from infinilm.config.spec import build_spec
from infinilm.engine.hooks import SITES, ModelSites, Site

pytestmark = pytest.mark.skipif(not hasattr(_core.InferEngine, "set_hooks"), reason="the core has no hooks yet")

IDS = [[5, 9, 2, 40]]
GREEDY: dict[str, Any] = {"input_ids": IDS, "temperature": 0}


@pytest.fixture
def registry(engine: InferEngine) -> Iterator[HookRegistry]:
    """In use by the engine."""
    made = HookRegistry()
    engine.set_hook_registry(made)
    yield made
    engine.set_hook_registry(None)


@pytest.fixture(scope="module", params=["qwen3", "olmo2", "glm4"])
def golden_engine(request: pytest.FixtureRequest) -> Iterator[InferEngine]:
    """Models that together have every site that a family has."""
    with make_engine(golden(request.param)) as made:
        yield made


def sites_of(engine: InferEngine) -> tuple[Site, ...]:
    return ModelSites(build_spec(engine.config, dtype="float32", max_model_len=8)).sites


class Recorder:
    """Remembers what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[int, ...], int]] = []

    def __call__(self, name: str, tensor: _core.Tensor, layer_idx: int) -> None:
        self.calls.append((name, tensor.shape, layer_idx))

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in self.calls]


def logits(engine: InferEngine) -> Any:
    return run(engine, **GREEDY)[1]


# ---- points ----


def test_every_point_fires_in_order_with_its_shape(golden_engine: InferEngine) -> None:
    config, registry, recorder = golden_engine.config, HookRegistry(), Recorder()
    registry.register_hook("*", recorder)
    without = logits(golden_engine)
    golden_engine.set_hook_registry(registry)
    assert np.array_equal(logits(golden_engine), without)
    golden_engine.set_hook_registry(None)
    sizes = {
        "num_tokens": 4,
        "num_rows": 1,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
    }
    sites = sites_of(golden_engine)
    shapes = {site.name: tuple(sizes[dim] for dim in site.shape.strip("[]").split(", ")) for site in sites}
    first = [site.name for site in sites[:1]]
    last = [site.name for site in sites if not site.in_layer][1:]
    layers = range(config.num_hidden_layers)
    expected = [
        *((name, shapes[name], -1) for name in first),
        *((f"layer{i}_{site.name}", shapes[site.name], i) for i in layers for site in sites if site.in_layer),
        *((name, shapes[name], -1) for name in last),
    ]
    assert sorted(recorder.calls) == sorted(expected)
    assert recorder.names[0] == "embedding"
    assert recorder.names[-2:] == ["final_norm", "logits"]


@pytest.mark.parametrize("site", SITES, ids=lambda site: site.name)
def test_every_point_can_be_replaced(golden_engine: InferEngine, site: Site) -> None:
    if site not in sites_of(golden_engine):
        pytest.skip("not in this model")
    registry = HookRegistry()
    golden_engine.set_hook_registry(registry)
    without = logits(golden_engine)
    pattern = f"layer0_{site.name}" if site.in_layer else site.name
    handle = registry.register_hook(pattern, lambda _name, t, _layer: t.numpy()[..., ::-1] * np.float32(0.5))
    assert not np.array_equal(logits(golden_engine), without)
    handle.remove()
    assert np.array_equal(logits(golden_engine), without)
    # The same values in place of themselves: the model goes on with the replacement.
    registry.register_hook(pattern, lambda _name, t, _layer: t.numpy().copy())
    assert np.array_equal(logits(golden_engine), without)
    golden_engine.set_hook_registry(None)


def test_replaced_logits_are_what_is_sampled(engine: InferEngine, registry: HookRegistry) -> None:
    def only(name: str, tensor: _core.Tensor, layer_idx: int) -> Any:
        changed = np.full(tensor.shape, -1, np.float16)
        changed[:, 77] = 3
        return changed

    registry.register_hook("lm_head", only)
    ids, values = run(engine, **GREEDY)
    assert ids.tolist() == [77]
    assert values[0, 77] == 3
    assert (np.delete(values[0], 77) == -1).all()


# ---- patterns ----


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("layer0_q_proj", ["layer0_q_proj"]),
        ("*_q_proj", ["layer0_q_proj", "layer1_q_proj"]),
        ("layers.*.attn.q", ["layer0_q_proj", "layer1_q_proj"]),
        ("layers.*.self_attn.q_proj", ["layer0_q_proj", "layer1_q_proj"]),
        ("model.layers.1.self_attn.q_proj", ["layer1_q_proj"]),
        ("layers.0.mlp.down_proj", ["layer0_down_proj"]),
        ("layers.1.mlp.down", ["layer1_down_proj"]),
        ("layer1_*_proj", [f"layer1_{p}_proj" for p in ("q", "k", "v", "o", "gate", "up", "down")]),
        ("model.norm", ["final_norm"]),
        ("lm_head", ["logits"]),
        ("model.embed_tokens", ["embedding"]),
        ("layer[01]_residual", ["layer0_residual", "layer1_residual"]),
        ("layer?_attention", ["layer0_attention", "layer1_attention"]),
    ],
)
def test_patterns(engine: InferEngine, registry: HookRegistry, pattern: str, expected: list[str]) -> None:
    recorder = Recorder()
    registry.register_hook(pattern, recorder, ranks="all")
    run(engine, **GREEDY)
    assert sorted(recorder.names) == sorted(expected)


def test_a_prefix_is_one_layer(engine: InferEngine, registry: HookRegistry) -> None:
    flat, dotted = Recorder(), Recorder()
    registry.register_hook("layer1_*", flat)
    registry.register_hook("layers.1.*", dotted)
    run(engine, **GREEDY)
    assert flat.calls == dotted.calls
    assert len(flat.calls) == sum(site.in_layer for site in sites_of(engine))


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("q_proj", r"\*_q_proj"),
        ("layer0_qproj", "layer0_q_proj"),
        ("layers.*.attn.w", "layers.*.attn"),
        ("", "SITES"),
        ("layer-1_q_proj", "q_proj"),
        ("layer01_q_proj", "q_proj"),
        ("model.norn", "model.norm"),
    ],
)
def test_a_pattern_that_fits_no_model(pattern: str, hint: str) -> None:
    registry = HookRegistry()
    with pytest.raises(ConfigError, match=f"(?s){pattern[:5]}.*{hint}"):
        registry.register_hook(pattern, Recorder())
    assert not registry.has_hooks()


@pytest.mark.parametrize("pattern", ["layer2_q_proj", "layer5000_q_proj", "*_q_norm", "layer1[0-9]_q_proj"])
def test_a_pattern_that_fits_another_model(engine: InferEngine, pattern: str) -> None:
    registry = HookRegistry()
    registry.register_hook("layer0_k_proj", recorder := Recorder())
    registry.register_hook(pattern, Recorder())
    with pytest.raises(ConfigError, match="no site of this model, which has 2 layers and no norm"):
        engine.set_hook_registry(registry)
    run(engine, **GREEDY)
    assert not recorder.calls, "a registry that was refused is not in use"

    fitting = HookRegistry()
    engine.set_hook_registry(fitting)
    with pytest.raises(ConfigError, match="no site of this model"):  # in use: at registration
        fitting.register_hook(pattern, Recorder())
    engine.set_hook_registry(None)
    fitting.register_hook(pattern, Recorder())  # no longer in use
    run(engine, **GREEDY)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((5, Recorder()), TypeError, "pattern"),
        (("*", None), TypeError, "callback"),
    ],
)
def test_bad_registrations(arguments: tuple[Any, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        HookRegistry().register_hook(*arguments)


@pytest.mark.parametrize("ranks", [1, -1, "none", True, None], ids=str)
def test_bad_ranks(ranks: Any) -> None:
    with pytest.raises(ConfigError, match="ranks"):
        HookRegistry().register_hook("*", Recorder(), ranks=ranks)


def test_not_a_registry(engine: InferEngine) -> None:
    with pytest.raises(TypeError, match="HookRegistry"):
        engine.set_hook_registry(Recorder())  # type: ignore[arg-type]


# ---- life ----


def test_registering_and_removing_take_effect_at_the_next_forward(engine: InferEngine, registry: HookRegistry) -> None:
    first, second = Recorder(), Recorder()
    assert not registry.has_hooks()
    handle = registry.register_hook("logits", first)
    assert registry.has_hooks()
    run(engine, **GREEDY)
    registry.register_hook("logits", second)
    run(engine, **GREEDY)
    handle.remove()
    handle.remove()
    run(engine, **GREEDY)
    assert (len(first.calls), len(second.calls)) == (2, 2)
    registry.clear()
    assert not registry.has_hooks()
    run(engine, **GREEDY)
    assert (len(first.calls), len(second.calls)) == (2, 2)


def test_a_hook_may_remove_itself(engine: InferEngine, registry: HookRegistry) -> None:
    names: list[str] = []

    def once(name: str, tensor: _core.Tensor, layer_idx: int) -> None:
        names.append(name)
        handle.remove()

    handle = registry.register_hook("embedding", once)
    run(engine, **GREEDY)
    run(engine, **GREEDY)
    assert names == ["embedding"]


def test_hooks_of_one_site_run_in_order_on_the_last_replacement(engine: InferEngine, registry: HookRegistry) -> None:
    seen: list[float] = []

    def add(amount: float) -> Any:
        def hook(name: str, tensor: _core.Tensor, layer_idx: int) -> Any:
            seen.append(float(tensor.numpy()[0, 0]))
            return tensor.numpy() + np.float32(amount)

        return hook

    registry.register_hook("logits", lambda _n, t, _l: np.zeros(t.shape, np.float32))
    registry.register_hook("log*", add(1))
    registry.register_hook("logits", Recorder())
    registry.register_hook("lm_head", add(2))
    assert (logits(engine) == 3).all()
    assert seen == [0, 1]


def test_writing_in_place(engine: InferEngine, registry: HookRegistry) -> None:
    def fill(name: str, tensor: _core.Tensor, layer_idx: int) -> None:
        tensor.numpy()[:] = 7

    def halve(name: str, tensor: _core.Tensor, layer_idx: int) -> Any:
        values = tensor.numpy()
        values /= 2
        return values  # a view of what is replaced

    registry.register_hook("logits", fill)
    registry.register_hook("logits", halve)
    registry.register_hook("logits", lambda _n, t, _l: t)
    assert (logits(engine) == 3.5).all()


def test_one_registry_serves_two_engines(engine: InferEngine, folder: Path, registry: HookRegistry) -> None:
    registry.register_hook("logits", recorder := Recorder())
    with make_engine(folder) as other:
        other.set_hook_registry(registry)
        run(engine, **GREEDY)
        run(other, **GREEDY)
        other.set_hook_registry(None)
        run(other, **GREEDY)
    run(engine, **GREEDY)
    assert len(recorder.calls) == 3


def test_an_engine_that_its_hooks_refer_to_can_be_collected(folder: Path) -> None:
    engine, registry = make_engine(folder), HookRegistry()
    registry.register_hook("logits", lambda *_, keep=engine: None)
    engine.set_hook_registry(registry)
    run(engine, **GREEDY)
    gone = weakref.ref(engine)
    del engine, registry
    gc.collect()
    assert gone() is None


# ---- errors ----


@pytest.mark.parametrize(
    ("replacement", "error", "message"),
    [
        (lambda t: t.numpy()[:, :-1], InfinilmError, r"shape \[4, 32\]"),
        (lambda t: t.numpy().astype(np.int32), InfinilmError, "int32"),
        (lambda t: t.numpy().astype(np.float64), InfinilmError, "float64"),
        (lambda t: t.numpy().tolist(), TypeError, "list"),
        (lambda t: 3, TypeError, "int"),
        (lambda t: Foreign(), DeviceError, "device type 2"),
    ],
    ids=["shape", "int32", "float64", "list", "number", "device"],
)
def test_bad_replacements(
    engine: InferEngine, registry: HookRegistry, replacement: Any, error: type[Exception], message: str
) -> None:
    expected = logits(engine)
    handle = registry.register_hook("layer0_o_proj", lambda _n, t, _l: replacement(t))
    next_one = Recorder()
    registry.register_hook("layer0_o_proj", next_one)
    with pytest.raises(error, match=f"layer0_o_proj.*{message}"):
        logits(engine)
    assert not next_one.calls
    handle.remove()
    assert np.array_equal(logits(engine), expected)


def test_an_exception_reaches_the_caller(engine: InferEngine, registry: HookRegistry) -> None:
    class OnPurpose(Exception):
        pass

    def fail(name: str, tensor: _core.Tensor, layer_idx: int) -> None:
        raise OnPurpose(name)

    expected = logits(engine)
    handle = registry.register_hook("layer1_up_proj", fail)
    for _ in range(2):
        with pytest.raises(OnPurpose, match="layer1_up_proj"):
            logits(engine)
    handle.remove()
    assert np.array_equal(logits(engine), expected)


def test_a_tensor_that_is_kept_is_refused(engine: InferEngine, registry: HookRegistry) -> None:
    expected, kept = logits(engine), []
    handle = registry.register_hook("embedding", lambda _n, t, _l: kept.append(t))
    with pytest.raises(InfinilmError, match=r"embedding.*copy"):
        logits(engine)
    handle.remove()
    assert np.array_equal(logits(engine), expected)


def test_a_hook_cannot_call_its_engine(engine: InferEngine, registry: HookRegistry) -> None:
    expected = logits(engine)
    calls = [
        lambda: engine.forward(InferEngine.Input(IDS)),
        lambda: engine.reset_cache(),
        lambda: engine.state_dict(),
        lambda: engine.set_hook_registry(None),
        lambda: engine.close(),
    ]
    for call in calls:
        handle = registry.register_hook("embedding", lambda *_, call=call: call())
        with pytest.raises(InfinilmError, match="hook cannot call"):
            logits(engine)
        handle.remove()
    assert np.array_equal(logits(engine), expected)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, ::-1],
        lambda x: x[::-1],
        lambda x: x[::-1, ::-1],
        lambda x: np.broadcast_to(x[:1], x.shape),
        lambda x: np.broadcast_to(x[:, -1:], x.shape),
        lambda x: np.lib.stride_tricks.as_strided(x, x.shape, (x.itemsize,) * x.ndim),
        lambda x: x,
    ],
)
@pytest.mark.parametrize("site", ["embedding", "layer1_residual", "layer0_q_rope", "logits"])
def test_a_view_of_the_tensor_replaces_it(engine: InferEngine, registry: HookRegistry, site: str, view: Any) -> None:
    """A hook that returns its own tensor in another order gets what its copy would give."""
    handle = registry.register_hook(site, lambda _n, t, _l: view(t.numpy()).copy())
    expected = logits(engine)
    handle.remove()
    registry.register_hook(site, lambda _n, t, _l: view(t.numpy()))
    assert np.array_equal(logits(engine), expected)


def test_registering_while_another_thread_runs(engine: InferEngine, registry: HookRegistry) -> None:
    inside, go_on = threading.Event(), threading.Event()
    later = Recorder()

    def wait(name: str, tensor: _core.Tensor, layer_idx: int) -> None:
        inside.set()
        assert go_on.wait(PATIENCE)

    handle = registry.register_hook("embedding", wait)
    thread = threading.Thread(target=lambda: run(engine, **GREEDY))
    thread.start()
    assert inside.wait(PATIENCE)
    registry.register_hook("logits", later)
    handle.remove()
    go_on.set()
    thread.join(PATIENCE)
    assert not later.calls
    run(engine, **GREEDY)
    assert later.names == ["logits"]


def test_hooks_work_in_half_precision(tmp_path: Path) -> None:
    folder = tiny.make_checkpoint(tmp_path, torch_dtype="float16")
    registry = HookRegistry()
    registry.register_hook("*_residual", lambda _n, t, _l: t.numpy().astype(np.float32))
    with make_engine(folder) as engine:
        expected = logits(engine)
        engine.set_hook_registry(registry)
        assert np.array_equal(logits(engine), expected)


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("model.layers.99.mlp", "did you mean 'model.layers.99.mlp.*'"),
        ("layers.3.self_attn", "did you mean 'layers.3.self_attn.*'"),
        ("layer7_q_prj", "did you mean 'layer7_q_proj'"),
    ],
)
def test_hints_keep_the_layer(pattern: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(hint)):
        HookRegistry().register_hook(pattern, print)


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("model.layers.99.mlp.*", "model.layers.4.mlp.*"),
        ("layer99_q_proj", "layer4_q_proj"),
        ("layers.7.self_attn.o_proj", "layers.4.self_attn.o_proj"),
    ],
)
def test_a_layer_beyond_the_last_is_told_by_the_same_site_of_the_last(pattern: str, near: str) -> None:
    HookRegistry().register_hook(pattern, print)  # which fits deeper models
    with pytest.raises(ConfigError, match=re.escape(f"has 5 layers and no norm of q and k; did you mean '{near}'?")):
        ModelSites(
            build_spec(AutoConfig.from_pretrained(resolve_model("demo")), dtype="float32", max_model_len=9)
        ).select(pattern)


@pytest.mark.parametrize("name", GOLDENS)
def test_every_site_of_the_core_has_names(name: str) -> None:
    """A kind of sublayer names its sites in C++; their other names and shapes are in `SITES`."""
    spec = build_spec(AutoConfig.from_pretrained(golden(name)), dtype="float32", max_model_len=8)
    sites = _core.sites(spec)
    assert len(sites) == len(set(sites))
    assert {name for name, _ in sites} <= {site.name for site in SITES}
    assert {name for name, layer in sites if layer < 0} == {site.name for site in SITES if not site.in_layer}
