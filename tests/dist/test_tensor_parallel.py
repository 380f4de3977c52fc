"""The engine on several CPU ranks against the engine on one: logits within rounding, the same tokens."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from goldens import GOLDENS, expected_of, golden

import infinilm
from infinilm import (
    AutoConfig,
    CacheFullError,
    ConfigError,
    DistConfig,
    HookRegistry,
    InferEngine,
    PagedKVCacheConfig,
    StaticKVCacheConfig,
    _core,
)
from infinilm.config.spec import build_spec
from infinilm.engine.hooks import ModelSites

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

from tiny_models import MODELS, make_config, make_weights, open_engine, run_steps, tolerance  # noqa: E402

SITES_OF_QWEN3 = ModelSites(
    build_spec(AutoConfig.from_pretrained(golden("qwen3")), dtype="float32", max_model_len=8)
).sites
LOCAL_SITES = {
    "q_proj",
    "k_proj",
    "v_proj",
    "q_norm",
    "k_norm",
    "q_rope",
    "k_rope",
    "attention",
    "gate_proj",
    "up_proj",
}
LOCAL_SITES |= {"activation"}


def relative_error(got: Any, want: Any) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_tokens_are_those_of_one_rank(tmp_path: Path, name: str) -> None:
    changes, sizes = MODELS[name]
    config = make_config(tmp_path, **changes)
    sampling = {"temperature": [0.0, 0.8], "top_k": [0, 40], "top_p": 0.9, "random_val": [0.5, 0.7]}
    with open_engine(config, 1) as one:
        ids, logits = run_steps(one, **sampling)
    for tp_size in sizes:
        with open_engine(config, tp_size) as engine:
            got_ids, got_logits = run_steps(engine, **sampling)
            again_ids, again_logits = run_steps(engine, **sampling)
        assert relative_error(got_logits, logits) <= tolerance(config)
        assert np.array_equal(got_ids, ids)
        assert np.array_equal(again_ids, got_ids) and np.array_equal(again_logits, got_logits), "every run is the same"


@pytest.mark.parametrize("name", GOLDENS)
def test_golden(name: str) -> None:
    """From files, which every rank reads its part of. One rank is held against transformers by tests/model."""
    folder, expected = golden(name), expected_of(name)
    config = AutoConfig.from_pretrained(folder)
    config.dtype = "float32"
    prompt, num_tokens = expected["input_ids"].tolist(), len(expected["greedy_ids"])
    cache = StaticKVCacheConfig(1, int(expected["max_model_len"]))
    results = []
    divided = config.num_attention_heads, config.linear_num_key_heads, config.mamba_n_heads
    divided += (config.swa_num_attention_heads or config.num_attention_heads,)
    if config.mamba_n_groups > 1:
        divided += (config.mamba_n_groups,)
    for tp_size in [n for n in (1, 2, 3, 4, 8) if not any(count % n for count in divided)]:
        with InferEngine(config, DistConfig(tp_size), "cpu", cache) as engine:
            engine.load_weights(folder, use_tqdm=False)
            output = engine.forward(InferEngine.Input([prompt], temperature=0), return_logits=True)
            assert output.logits is not None
            logits, tokens = output.logits.numpy()[0], [int(output.output_ids.numpy()[0])]
            while len(tokens) < num_tokens:
                step = InferEngine.Input([tokens[-1:]], cache_lengths=[len(prompt) + len(tokens) - 1], temperature=0)
                tokens.append(int(engine.forward(step).output_ids.numpy()[0]))
            results.append((logits, tokens))
    for logits, tokens in results[1:]:
        assert relative_error(logits, results[0][0]) <= tolerance(config)
        assert tokens == results[0][1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(tmp_path: Path, dtype: str) -> None:
    """Inputs of linears round to the dtype or not, where sums of other rounding do: a few of their last bits."""
    config = make_config(tmp_path, torch_dtype=dtype)
    results = []
    for tp_size in (1, 4):
        with open_engine(config, tp_size) as engine:
            results.append(run_steps(engine, temperature=0)[1])
    epsilon = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    assert relative_error(results[1], results[0]) <= 4 * epsilon


@pytest.mark.parametrize("num_values", [131, 9, 1], ids=lambda n: f"{n} different logits")
@pytest.mark.parametrize("tp_size", [2, 4, 8])
def test_what_is_sampled_is_what_the_logits_say(tmp_path: Path, tp_size: int, num_values: int) -> None:
    """Whether they are gathered (`return_logits`) or only their best candidates are: bit for bit, equal ones by id."""
    rows = 24
    rng = np.random.default_rng(7)
    tokens = rng.integers(0, 131, (rows, 3)).tolist()
    top_k = rng.choice([1, 2, 3, 7, 40, 64], rows)
    sampling = {
        "temperature": rng.choice(np.array([0, 0.3, 1, 2.5], np.float32), rows),
        "top_p": rng.choice(np.array([0.3, 0.9, 1], np.float32), rows),
        "random_val": rng.random(rows),
    }
    unlimited = np.where(rng.random(rows) < 0.5, -1, top_k)
    config, backend = make_config(tmp_path), _core.Backend("cpu", num_threads=1)
    lm_head = rng.standard_normal((num_values, 48)).astype(np.float32)[rng.permutation(131) % num_values]
    with open_engine(config, tp_size, lm_head=lm_head) as engine:
        engine.reset_cache(StaticKVCacheConfig(rows, 8))
        for k in (top_k, np.minimum(top_k, 3), unlimited, np.where(sampling["temperature"] == 0, -1, 5)):
            step = InferEngine.Input(tokens, top_k=k, **sampling)
            output = engine.forward(step, return_logits=True)
            assert output.logits is not None
            ids = _core.from_numpy(np.zeros(rows, np.int32))
            arrays = {
                "temperature": sampling["temperature"],
                "top_k": k.astype(np.int32),
                "top_p": sampling["top_p"],
                "min_p": np.zeros(rows, np.float32),
                "random_val": sampling["random_val"].astype(np.float32),
            }
            backend.sample(output.logits, **{n: _core.from_numpy(a) for n, a in arrays.items()}, ids=ids)
            assert np.array_equal(output.output_ids.numpy(), ids.numpy())
            assert np.array_equal(engine.forward(step).output_ids.numpy(), ids.numpy())


def test_ties_go_to_the_smallest_id_of_all_ranks(tmp_path: Path) -> None:
    with open_engine(make_config(tmp_path), 4, lm_head=np.zeros((131, 48), np.float32)) as engine:
        for sampling, expected in (
            ({"temperature": 0}, 0),
            ({"top_k": 5, "random_val": 0.99}, 4),
            ({"top_k": 64, "random_val": 0.5}, 32),
            ({"top_k": -1, "random_val": 0.999}, 130),
        ):
            output = engine.forward(InferEngine.Input([[3]], **sampling))
            assert output.output_ids.numpy().tolist() == [expected]


# ---- caches ----


def test_bytes_of_a_cache_are_those_of_a_rank(tmp_path: Path) -> None:
    """Two ranks have half the kv heads each: twice the blocks for the same bytes of each rank."""
    config = make_config(tmp_path)
    block_bytes = 16 * 2 * 2 * config.kv_dim() * 4  # tokens, layers, K and V, bytes
    for tp_size, blocks in ((1, 1), (2, 2), (4, 4), (8, 4)):
        with InferEngine(config, DistConfig(tp_size), "cpu", PagedKVCacheConfig(block_bytes)) as engine:
            engine.load_params(make_weights(engine.param_shapes()))
            table = np.arange(blocks + 1)[None]
            engine.forward(InferEngine.Input([[1]], block_tables=table[:, :blocks], cache_lengths=[16 * blocks - 1]))
            with pytest.raises(Exception, match="block_tables"):
                engine.forward(InferEngine.Input([[1]], block_tables=table, cache_lengths=[16 * blocks]))


def test_reset_cache(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with open_engine(config, 2) as engine:
        before = run_steps(engine, temperature=0)[1]
        engine.reset_cache(StaticKVCacheConfig(5, 30))
        assert np.array_equal(run_steps(engine, temperature=0)[1], before)
        with pytest.raises(CacheFullError, match="no room"):
            engine.reset_cache(StaticKVCacheConfig(2**20, 2**25))
        assert engine.get_cache_config() == StaticKVCacheConfig(5, 30)
        assert np.array_equal(run_steps(engine, temperature=0)[1], before)


# ---- hooks ----


class Recorder:
    """What each rank saw."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.seen: dict[tuple[str, int], Any] = {}

    def __call__(self, name: str, tensor: _core.Tensor, layer_idx: int, rank: int) -> None:
        value = tensor.numpy().copy()
        with self._lock:
            assert (name, rank) not in self.seen
            self.seen[name, rank] = value


def run_with(engine: InferEngine, pattern: str, callback: Callable[..., Any], ranks: Any) -> Any:
    registry = HookRegistry()
    registry.register_hook(pattern, callback, ranks=ranks)
    engine.set_hook_registry(registry)
    output = engine.forward(InferEngine.Input([[5, 9, 2]], temperature=0), return_logits=True)
    engine.set_hook_registry(None)
    assert output.logits is not None
    return output.logits.numpy().copy()


def test_hooks_see_the_values_of_the_model(tmp_path: Path) -> None:
    """Local heads and columns side by side, and everything else the same on every rank, are those of one rank."""
    config = make_config(tmp_path, **MODELS["qk norm"][0], intermediate_size=80)
    whole = Recorder()
    with open_engine(config, 1) as engine:
        logits = run_with(engine, "*", whole, "all")
    local = Recorder()
    with open_engine(config, 4) as engine:
        without = engine.forward(InferEngine.Input([[5, 9, 2]], temperature=0), return_logits=True).logits
        assert without is not None
        got = run_with(engine, "*", local, "all")
    assert np.array_equal(got, without.numpy())
    assert relative_error(got, logits) <= tolerance(config)
    assert {name for name, _ in local.seen} == {name for name, _ in whole.seen}
    for site in SITES_OF_QWEN3:
        for layer in range(config.num_hidden_layers) if site.in_layer else (-1,):
            name = f"layer{layer}_{site.name}" if site.in_layer else site.name
            parts = [local.seen[name, rank] for rank in range(4)]
            if site.name not in LOCAL_SITES:
                assert all(np.array_equal(part, parts[0]) for part in parts), name
                parts = parts[:1]
            assert relative_error(np.concatenate(parts, axis=1), whole.seen[name, 0]) <= tolerance(config), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_hooks_change_nothing(tmp_path: Path, tp_size: int, dtype: str) -> None:
    """Layers run op by op with hooks, and fused without: the same bits, of every step and with any number of ranks."""
    config = make_config(tmp_path, **MODELS["qk norm"][0], torch_dtype=dtype)
    registry = HookRegistry()
    registry.register_hook("*", lambda _n, _t, _l: None)
    with open_engine(config, tp_size) as engine:
        ids, logits = run_steps(engine, temperature=0)
        engine.set_hook_registry(registry)
        hooked_ids, hooked_logits = run_steps(engine, temperature=0)
    assert np.array_equal(hooked_logits, logits) and np.array_equal(hooked_ids, ids)


def test_hooks_of_rank_0(tmp_path: Path) -> None:
    with open_engine(make_config(tmp_path), 2) as engine:
        recorder = Recorder()
        run_with(engine, "*", recorder, 0)
    assert {rank for _, rank in recorder.seen} == {0}


@pytest.mark.parametrize("site", SITES_OF_QWEN3, ids=lambda site: site.name)
def test_a_replacement_is_what_all_ranks_go_on_with(tmp_path: Path, site: Any) -> None:
    """A common value is rank 0's, even if other ranks make another one. A local value is each rank's own."""
    config = make_config(tmp_path, **MODELS["qk norm"][0])
    pattern = f"layer0_{site.name}" if site.in_layer else site.name
    local = site.name in LOCAL_SITES

    def negate(name: str, tensor: _core.Tensor, layer_idx: int, rank: int) -> Any:
        return tensor.numpy() * np.float32(-1 if local or rank == 0 else 7)

    with open_engine(config, 1) as engine:
        expected = run_with(engine, pattern, negate, "all")
    with open_engine(config, 2) as engine:
        assert relative_error(run_with(engine, pattern, negate, "all"), expected) <= tolerance(config)
        if not local:
            assert relative_error(run_with(engine, pattern, negate, 0), expected) <= tolerance(config)


def test_comparing_needs_one_rank(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with open_engine(config, 1) as one, open_engine(config, 2) as two, pytest.raises(ConfigError, match="2 ranks"):
        infinilm.compare(one, two)


# ---- ranks ----


def test_each_rank_is_a_thread_that_sleeps_when_idle(tmp_path: Path) -> None:
    with open_engine(make_config(tmp_path), 2) as engine:
        assert [rank.tp_rank for rank in engine.ranks] == [0, 1]
        assert {rank.device for rank in engine.ranks} == {"cpu"}
        run_steps(engine)
        names = {(Path("/proc/self/task") / task.name / "comm").read_text().strip() for task in _tasks()}
        assert {"infinilm-rank0", "infinilm-rank1"} <= names
        assert engine.get_dist_config() == DistConfig(2)


def _tasks() -> list[Path]:
    return list(Path("/proc/self/task").iterdir())
