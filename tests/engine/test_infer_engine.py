"""`InferEngine`: configuration, weights in and out, cache, devices, closing; every error leaves it usable."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from goldens import GOLDENS, expected_of, golden
from llm import tiny
from llm.support import PATIENCE
from reference.ops import store
from safetensors.numpy import load_file, save_file

import infinilm
from engine.support import Alone, Foreign, make_engine, run
from infinilm import (
    LLM,
    AutoConfig,
    CacheFullError,
    ConfigError,
    DeviceError,
    DistConfig,
    EngineDeadError,
    InferEngine,
    LlamaConfig,
    PagedKVCacheConfig,
    RankInfo,
    RequestError,
    StaticKVCacheConfig,
    WeightError,
    _core,
)
from infinilm.errors import InfinilmError

IDS = [5, 9, 2, 40, 7]
KV_BYTES = 2 * 2 * 2 * 8 * 4  # K and V, layers, kv heads, head_dim, float32: of one token of the tiny model


def weights(folder: Path) -> dict[str, Any]:
    return load_file(folder / "model.safetensors")


def empty(folder: Path, **settings: Any) -> InferEngine:
    return InferEngine(folder, device_type="cpu", **settings)


def logits(engine: InferEngine) -> Any:
    return run(engine, input_ids=[IDS])[1][0]


# ---- against the other ways to run a model ----


@pytest.mark.parametrize("name", GOLDENS)
def test_logits_are_those_of_llm(name: str) -> None:
    config = AutoConfig.from_pretrained(golden(name))
    ids = expected_of(name)["input_ids"][: config.max_position_embeddings]
    with (
        LLM(golden(name), dtype=config.dtype, max_model_len=config.max_position_embeddings, kv_cache="1GiB") as llm,
        make_engine(golden(name)) as engine,
    ):
        expected = llm.forward(ids.tolist())
        got = run(engine, input_ids=ids[None])[1]
        assert np.array_equal(got[0], expected[-1])
        if engine.has_states:
            with pytest.raises(ConfigError, match="keeps a state of each sequence, which InferEngine has for the rows"):
                engine.reset_cache(PagedKVCacheConfig(num_blocks=9))
            return
        engine.reset_cache(PagedKVCacheConfig(num_blocks=9, block_size=len(ids) // 8 + 1))
        paged = run(engine, input_ids=ids[None], block_tables=[[8, 1, 7, 2, 0, 3, 5, 4, 6]])[1]
    assert np.array_equal(paged[0], expected[-1])


# ---- construction ----


def test_what_an_engine_knows(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    with InferEngine(config, DistConfig(tp_size=1), "cpu", StaticKVCacheConfig(2, 32)) as engine:
        config.hidden_size = 1  # its own copy
        assert engine.config == AutoConfig.from_pretrained(folder)
        assert (engine.dtype, engine.device) == ("float32", "cpu")
        assert engine.ranks == (RankInfo(0, 1, "cpu"),)
        assert engine.get_cache_config() == StaticKVCacheConfig(2, 32)
        devices = engine.get_dist_config()
        assert devices == DistConfig()
        devices.tp_device_ids = [7]
        assert engine.get_dist_config() == DistConfig()
        assert engine.param_shapes()["model.norm.weight"] == (32,)
        assert "loading" in repr(engine)


def test_a_folder_a_string_and_the_demo(folder: Path) -> None:
    for config in (folder, str(folder), "demo"):
        with InferEngine(config) as engine:
            assert engine.get_cache_config() == StaticKVCacheConfig()
            engine.load_weights(config)
            assert len(run(engine, input_ids=[IDS], temperature=0)[0]) == 1


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"device_type": "tpu"}, ConfigError, "device_type"),
        ({"device_type": "cuda:1"}, ConfigError, r"DistConfig\(tp_device_ids"),
        ({"device_type": 3}, ConfigError, "device_type"),
        ({"distributed_config": DistConfig(3)}, ConfigError, "parallelism of 3.*4 attention heads.*: 1, 2, 4"),
        ({"distributed_config": [0]}, TypeError, "DistConfig"),
        ({"cache_config": 4}, TypeError, "cache_config"),
        ({"cache_config": PagedKVCacheConfig(10)}, CacheFullError, f"{16 * KV_BYTES} bytes"),
        ({"device": "cpu"}, TypeError, "device_type"),
        ({"cache_conf": None}, TypeError, "cache_config"),
    ],
    ids=str,
)
def test_bad_settings(folder: Path, settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        InferEngine(folder, **{"device_type": "cpu", **settings})


def test_bad_configurations(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        InferEngine(tmp_path)
    with pytest.raises(FileNotFoundError, match="absent"):
        InferEngine(str(tmp_path / "absent"))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 5}))
    with pytest.raises(ConfigError, match="model_type"):
        InferEngine(tmp_path)
    config = infinilm.LlamaConfig(num_attention_heads=3, num_key_value_heads=2)
    with pytest.raises(ConfigError, match="num_attention_heads"):
        InferEngine(config)
    with pytest.raises(TypeError, match="LlamaConfig"):
        InferEngine(17)  # type: ignore[arg-type]


def test_cuda_is_refused_with_the_reason(folder: Path) -> None:
    if infinilm.backends()["cuda"]["available"]:
        pytest.skip("this machine has a usable GPU")
    with pytest.raises(DeviceError, match=r"(?i)cuda"):
        InferEngine(folder, device_type="cuda")


# ---- weights ----


def test_parameters_one_by_one(folder: Path, alone: Alone) -> None:
    with empty(folder) as engine:
        params = weights(folder)
        name, tensor = params.popitem()
        engine.load_param(name, tensor)
        engine.load_params(iter(params.items()))
        for array in (tensor, *params.values()):
            array[:] = 0  # the caller's again
        assert np.array_equal(logits(engine), alone.logits(IDS))
    with empty(folder) as engine:
        engine.load_params(weights(folder))  # a mapping does too
        assert np.array_equal(logits(engine), alone.logits(IDS))


class Opaque:
    """Has DLPack and nothing else."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


@pytest.mark.parametrize(
    "wrap",
    [
        infinilm.from_dlpack,
        memoryview,
        Opaque,
        lambda a: a.astype(np.float64),
        np.asfortranarray,
        lambda a: np.repeat(a, 2, axis=0)[::2],
    ],
    ids=["Tensor", "buffer", "dlpack", "float64", "column-major", "strided"],
)
def test_parameters_of_any_kind(folder: Path, alone: Alone, wrap: Any) -> None:
    with empty(folder) as engine:
        engine.load_params((name, wrap(tensor)) for name, tensor in weights(folder).items())
        assert np.array_equal(logits(engine), alone.logits(IDS))


@pytest.mark.parametrize("computed", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_one_by_one_is_as_from_files(tmp_path: Path, stored: str, computed: str) -> None:
    """Conversions and all: the tensors and the logits are the same bits."""
    tiny.make_checkpoint(tmp_path, weights=False, torch_dtype="float32")
    as_stored = {name: store(tensor, stored) for name, tensor in tiny.make_weights(tiny.CONFIG).items()}
    save_bits(as_stored, {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}[stored], tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    config.dtype = computed
    with InferEngine(config) as one_by_one, InferEngine(config) as from_files:
        for name, array in as_stored.items():
            one_by_one.load_param(name, array, dtype=None if stored == "float32" else stored)
        from_files.load_weights(tmp_path, use_tqdm=False)
        for left, right in zip(one_by_one.state_dict(), from_files.state_dict(), strict=True):
            assert left.keys() == right.keys()
            for name, tensor in left.items():
                assert tensor.dtype == right[name].dtype, name
                assert np.array_equal(tensor.numpy(), right[name].numpy()), name
        assert np.array_equal(logits(one_by_one), logits(from_files))


def save_bits(arrays: dict[str, Any], dtype: str, folder: Path) -> None:
    """A safetensors file by hand: its numpy writer has no bfloat16."""
    header, end = {}, 0
    for name, array in arrays.items():
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    text = json.dumps(header).encode()
    data = b"".join(array.tobytes() for array in arrays.values())
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_state_dict(folder: Path, engine: InferEngine) -> None:
    state = engine.state_dict()
    assert len(state) == 1
    expected = weights(folder)
    assert state[0].keys() == expected.keys()
    for name, tensor in state[0].items():
        assert isinstance(tensor, infinilm.Tensor)
        assert np.array_equal(tensor.numpy(), expected[name])
        with pytest.raises(ValueError, match="read-only"):
            tensor.numpy()[:] = 0
    before = logits(engine)
    for tensor in engine.state_dict(copy=True)[0].values():
        tensor.numpy()[:] = 0
    assert np.array_equal(logits(engine), before)


def test_state_dict_saved_and_loaded_again(folder: Path, tmp_path: Path, engine: InferEngine) -> None:
    """Under the checkpoint's names, fused or not: the same bits come back."""
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file({k: v.numpy() for k, v in engine.state_dict(copy=True)[0].items()}, tmp_path / "model.safetensors")
    with InferEngine(tmp_path) as again:
        again.load_weights(tmp_path)
        assert np.array_equal(logits(again), logits(engine))
        for name, tensor in again.state_dict()[0].items():
            assert tensor.numpy().tobytes() == engine.state_dict()[0][name].numpy().tobytes()


def test_state_dict_of_bfloat16_copies_bits(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(tiny.make_checkpoint(tmp_path))
    config.dtype = "bfloat16"
    with InferEngine(config) as engine:
        engine.load_weights(tmp_path)
        shared, copied = engine.state_dict()[0], engine.state_dict(copy=True)[0]
    for name in shared:
        assert shared[name].dtype == copied[name].dtype == "bfloat16"
        assert np.array_equal(shared[name].numpy(), copied[name].numpy())


def test_tensors_outlive_the_engine(folder: Path) -> None:
    engine = make_engine(folder)
    output = engine.forward(InferEngine.Input([IDS]), return_logits=True)
    expected = output.logits.numpy().copy()  # type: ignore[union-attr]
    state = engine.state_dict()[0]
    engine.close()
    del engine
    gc.collect()
    assert np.array_equal(output.logits.numpy(), expected)  # type: ignore[union-attr]
    assert np.array_equal(state["model.norm.weight"].numpy(), weights(folder)["model.norm.weight"])


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("model.norn.weight", np.ones(32, np.float32)), WeightError, "unknown.*did you mean 'model.norm.weight'"),
        ((5, np.ones(32, np.float32)), WeightError, "unknown parameter 5"),
        ((NORM, np.ones(31, np.float32)), WeightError, r"model.norm.weight.*\[32\], got \[31\]"),
        ((NORM, np.ones((32, 1), np.float32)), WeightError, r"\[32\], got \[32, 1\]"),
        ((NORM, np.ones(32, np.int32)), WeightError, "model.norm.weight.*int32"),
        ((NORM, np.ones(32, np.complex64)), WeightError, "model.norm.weight.*complex64"),
        ((NORM, np.ones(32, np.uint16)), WeightError, "model.norm.weight.*dtype='bfloat16'"),
        ((NORM, np.ones(32, np.float32), "bfloat16"), WeightError, "bfloat16.*float32"),
        ((NORM, np.ones(32, np.float64), "bfloat16"), WeightError, "bfloat16.*float64"),
        ((NORM, np.full(32, 1e300)), WeightError, "model.norm.weight.*outside the range of float32"),
        ((NORM, [1.0] * 32), TypeError, "model.norm.weight.*list"),
        ((NORM, None), TypeError, "model.norm.weight.*None"),
        ((NORM, Foreign()), DeviceError, "model.norm.weight.*device type 2"),
    ],
    ids=lambda value: None if isinstance(value, type) else str(value)[:40],
)
def test_bad_parameters(
    folder: Path, alone: Alone, arguments: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    with empty(folder) as engine:
        with pytest.raises(error, match=message):
            engine.load_param(*arguments)
        engine.load_params(weights(folder))
        assert np.array_equal(logits(engine), alone.logits(IDS))


def test_repeated_and_late_parameters(folder: Path, alone: Alone) -> None:
    params = weights(folder)
    with empty(folder) as engine:
        engine.load_param(NORM, params[NORM])
        with pytest.raises(WeightError, match=r"model\.norm\.weight.*already loaded"):
            engine.load_param(NORM, params[NORM])
        with pytest.raises(WeightError, match=r"1 parameters are loaded already.*'model.norm.weight'"):
            engine.load_weights(folder)
        del params[NORM]
        engine.load_params(params)
        assert np.array_equal(logits(engine), alone.logits(IDS))
        with pytest.raises(WeightError, match="already loaded"):
            engine.load_param(NORM, np.ones(32, np.float32))
        with pytest.raises(WeightError, match="loaded already"):
            engine.load_weights(folder)
        assert np.array_equal(logits(engine), alone.logits(IDS))


def test_bad_pairs(folder: Path, alone: Alone) -> None:
    params = weights(folder)
    with empty(folder) as engine:
        for bad in ([NORM], [(NORM,)], [5]):
            with pytest.raises(TypeError, match="pairs"):
                engine.load_params(bad)  # type: ignore[arg-type]
        engine.load_params(params)
        assert np.array_equal(logits(engine), alone.logits(IDS))


def test_forward_before_all_weights_are_there(folder: Path, alone: Alone) -> None:
    params = weights(folder)
    norm = params.pop(NORM)
    with empty(folder) as engine:
        with pytest.raises(WeightError, match="not loaded"):
            logits(engine)
        engine.load_params(params)
        with pytest.raises(WeightError, match=r"1 of .* not loaded: model\.norm\.weight"):
            logits(engine)
        engine.load_param(NORM, norm)
        assert np.array_equal(logits(engine), alone.logits(IDS))


def test_files_that_do_not_fit(folder: Path, tmp_path: Path, alone: Alone) -> None:
    other = tiny.make_checkpoint(tmp_path / "other", hidden_size=64)
    no_weights = tiny.make_checkpoint(tmp_path / "no_weights", weights=False)
    with empty(folder) as engine:
        for bad in (other, no_weights):
            with pytest.raises(WeightError, match=bad.name):
                engine.load_weights(bad)
        with pytest.raises(FileNotFoundError, match="absent"):
            engine.load_weights(str(tmp_path / "absent"))
        engine.load_weights(folder)
        with pytest.raises(WeightError, match=r"\d+ parameters are loaded already"):
            engine.load_weights(folder)
        assert np.array_equal(logits(engine), alone.logits(IDS))


def test_a_value_that_does_not_fit_the_dtype_is_named(folder: Path, tmp_path: Path) -> None:
    params = weights(tiny.make_checkpoint(tmp_path))
    params[NORM][3] = 1e30
    save_file(params, tmp_path / "model.safetensors")
    config = AutoConfig.from_pretrained(tmp_path)
    config.dtype = "float16"
    with InferEngine(config) as engine:
        with pytest.raises(WeightError, match=r"model\.norm\.weight.*float16"):
            engine.load_weights(tmp_path)
        loaded = engine.state_dict()[0].keys()  # those before it; the others can still come
        engine.load_params((name, tensor) for name, tensor in weights(folder).items() if name not in loaded)
        assert logits(engine).shape == (tiny.VOCAB_SIZE,)


# ---- cache ----


def test_resetting_the_cache(folder: Path, alone: Alone) -> None:
    expected = alone.logits(IDS)
    with make_engine(folder, StaticKVCacheConfig(3, 20)) as engine:
        for config in (
            StaticKVCacheConfig(3, 5),
            StaticKVCacheConfig(3, 5),
            PagedKVCacheConfig(KV_BYTES * 16),
            PagedKVCacheConfig(num_blocks=3, block_size=5),
            StaticKVCacheConfig(),
        ):
            engine.reset_cache(config)
            assert engine.get_cache_config() == config
            if isinstance(config, StaticKVCacheConfig):  # every row has its length, and no more
                length, full = min(config.max_cache_len, 128), config.max_batch_size * [IDS]
                run(engine, input_ids=full, cache_lengths=config.max_batch_size * [length - 5])
                with pytest.raises(CacheFullError, match="max_cache_len"):
                    run(engine, input_ids=[IDS], cache_lengths=[length - 4])
            tables = None if isinstance(config, StaticKVCacheConfig) else [[0]]
            assert np.array_equal(run(engine, input_ids=[IDS], block_tables=tables)[1][0], expected)


def test_resetting_to_the_default_of_the_kind(folder: Path, alone: Alone) -> None:
    with make_engine(folder, StaticKVCacheConfig(3, 4)) as engine:
        engine.reset_cache()
        assert engine.get_cache_config() == StaticKVCacheConfig()
        assert np.array_equal(logits(engine), alone.logits(IDS))
        engine.reset_cache(PagedKVCacheConfig(num_blocks=1, block_size=3))
        engine.reset_cache()
        assert engine.get_cache_config() == PagedKVCacheConfig(num_blocks=43, block_size=3)  # 128 positions
        got = run(engine, input_ids=[IDS], block_tables=[[42, 0]])[1][0]
        assert np.array_equal(got, alone.logits(IDS))


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (PagedKVCacheConfig(16 * KV_BYTES - 1), CacheFullError, f"{16 * KV_BYTES} bytes"),
        (StaticKVCacheConfig(2**30, 2**25), CacheFullError, "max_batch_size"),
        (PagedKVCacheConfig(2**61), CacheFullError, "max_kv_memory_bytes"),
        ("paged", TypeError, "cache_config"),
    ],
    ids=str,
)
def test_a_cache_that_cannot_be_leaves_the_old_one(
    folder: Path, config: Any, error: type[Exception], message: str
) -> None:
    with make_engine(folder) as engine:
        whole = logits(engine)
        run(engine, input_ids=[IDS[:3]])
        with pytest.raises(error, match=message):
            engine.reset_cache(config)
        assert engine.get_cache_config() == StaticKVCacheConfig()
        _, rest = run(engine, input_ids=[IDS[3:]], cache_lengths=[3])  # what was in it still is
        assert np.array_equal(rest[0], whole)


# ---- life ----


def test_use_after_close(folder: Path) -> None:
    engine = make_engine(folder)
    engine.close()
    engine.close()
    for call in (
        lambda: engine.forward(InferEngine.Input([IDS])),
        lambda: engine.load_param(NORM, np.ones(32, np.float32)),
        lambda: engine.load_params([]),
        lambda: engine.load_weights(folder),
        lambda: engine.state_dict(),
        lambda: engine.reset_cache(),
        lambda: engine.set_hook_registry(None),
        lambda: engine.__enter__().forward(InferEngine.Input([IDS])),
    ):
        with pytest.raises(EngineDeadError, match="closed"):
            call()
    assert "closed" in repr(engine)
    assert engine.get_cache_config() == StaticKVCacheConfig()


def test_threads_share_an_engine(engine: InferEngine, alone: Alone) -> None:
    expected = {n: alone.logits(IDS[:n]) for n in range(1, 6)}
    wrong: list[int] = []

    def work(n: int) -> None:
        for _ in range(20):
            if not np.array_equal(run(engine, input_ids=[IDS[:n]])[1][0], expected[n]):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not wrong


def test_the_interpreter_runs_while_a_forward_does(tmp_path: Path) -> None:
    """The GIL is released: a thread that only counts gets on during one long forward."""
    config = infinilm.LlamaConfig(
        vocab_size=64, hidden_size=256, intermediate_size=512, num_layers=4, num_attention_heads=4
    )
    with InferEngine(config) as engine:
        rng = np.random.default_rng(0)
        engine.load_params((n, rng.normal(0, 0.05, s).astype(np.float32)) for n, s in engine.param_shapes().items())
        ids = rng.integers(0, 64, (1, 1024))
        run(engine, input_ids=ids)
        count, stop = [0], threading.Event()

        def work() -> None:
            while not stop.wait(0.001):
                count[0] += 1

        thread = threading.Thread(target=work)
        thread.start()
        steps: list[int] = []
        end = time.monotonic() + PATIENCE
        while max(steps, default=0) < 3 and time.monotonic() < end:  # on a busy machine one forward may not tell
            before = count[0]
            run(engine, input_ids=ids)
            steps.append(count[0] - before)
        stop.set()
        thread.join(PATIENCE)
    assert max(steps) >= 3


@pytest.mark.parametrize(
    "code", ["", "del engine", "engine.close()", "cycle = [engine]; cycle.append(cycle); del engine"]
)
def test_the_process_ends_well(folder: Path, code: str) -> None:
    setup = (
        "import sys, threading, time; from infinilm import InferEngine, HookRegistry\n"
        "engine = InferEngine(sys.argv[1]); engine.load_weights(sys.argv[1])\n"
        "registry = HookRegistry(); registry.register_hook('*', lambda *_: None)\n"
        "engine.set_hook_registry(registry)\n"
        "def run(engine=engine):\n"
        "    while True: engine.forward(engine.Input([[1, 2, 3]]))\n"
        "threading.excepthook = lambda _: None\n"
        "threading.Thread(target=run, daemon=True).start(); time.sleep(0.1); del run\n"
    )
    command = [sys.executable, "-c", setup + code, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd="/")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_logits_that_cannot_be_sampled_are_an_error(folder: Path) -> None:
    params = weights(folder)
    params["lm_head.weight"][7] = np.nan
    with empty(folder) as engine:
        engine.load_params(params)
        for _ in range(2):
            with pytest.raises(InfinilmError, match="NaN"):
                logits(engine)
        with pytest.raises(RequestError, match="input_ids"):
            engine.forward(InferEngine.Input())


def test_the_core_has_what_the_engine_needs() -> None:
    assert {"state_dict", "set_hooks"} <= set(dir(_core.InferEngine))


@pytest.mark.parametrize(
    "blocks", [(2**56, 1), (1, 2**56), (2**62, 2**62), (2**40, 2**40), (-1, 16), (16, -1), (0, 16), (2**63 - 1, 1)]
)
def test_caches_that_no_memory_holds(folder: Path, blocks: tuple[int, int]) -> None:
    """Sizes that overflow are refused by the core, and the cache in use stays."""
    with make_engine(folder) as engine:
        expected = logits(engine)
        with pytest.raises(InfinilmError, match=r"more bytes than there are addresses|at least one block|out of host"):
            engine._core.reset_cache(*blocks)
        assert np.array_equal(logits(engine), expected)


def test_an_unknown_activation_is_refused_by_name() -> None:
    mlp = _core.MlpSpec()
    assert mlp.activation == "silu"
    with pytest.raises(ConfigError, match=r"activation 'mish' is not one of silu, gelu_tanh"):
        mlp.activation = "mish"
    mlp.activation = "silu"


def test_a_router_that_sees_nan_is_told() -> None:
    """The weights of the experts are NaN, and so are the logits behind them; the engine stays usable."""
    config = LlamaConfig(
        model_type="mixtral",
        vocab_size=32,
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=3,
    )
    with InferEngine(config, device_type="cpu", cache_config=StaticKVCacheConfig(2, 8)) as engine:
        rng = np.random.default_rng(1)
        for name, shape in engine.param_shapes().items():
            values = rng.standard_normal(shape).astype(np.float32)
            if "embed_tokens" in name:
                values[7] = np.nan
            engine.load_param(name, values)
        with pytest.raises(InfinilmError, match="logits of row 0 hold NaN"):
            engine.forward(InferEngine.Input([[7], [5]], temperature=0))
        logits = engine.forward(InferEngine.Input([[5]], temperature=0), return_logits=True).logits
        assert logits is not None and np.isfinite(logits.numpy()).all()
