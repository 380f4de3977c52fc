"""A rank that fails stops them all: everybody learns why, and the engine closes. Hooks of users fail their step alone.

Other failures are made with what users have: tensors and steps that do not fit, caches without room.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llm.support import PATIENCE, wait_for

from infinilm import (
    CacheFullError,
    DeviceError,
    EngineDeadError,
    HookRegistry,
    InferEngine,
    InfinilmError,
    LlamaConfig,
    StaticKVCacheConfig,
    WeightError,
    _core,
)
from infinilm.config.spec import build_spec

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

from tiny_models import make_config, make_weights, open_engine, run_steps  # noqa: E402

STEP = InferEngine.Input([[1, 2, 3]], temperature=0)


@pytest.fixture
def config(tmp_path: Path) -> LlamaConfig:
    return make_config(tmp_path)


class OnPurpose(Exception):
    pass


def fail_on(rank_that_fails: int, *, after: float = 0) -> Callable[..., None]:
    def hook(name: str, tensor: _core.Tensor, layer_idx: int, rank: int) -> None:
        if rank == rank_that_fails:
            time.sleep(after)
            raise OnPurpose(f"{name} on rank {rank}")

    return hook


def hooked(engine: InferEngine, pattern: str, hook: Callable[..., Any]) -> HookRegistry:
    registry = HookRegistry()
    registry.register_hook(pattern, hook, ranks="all")
    engine.set_hook_registry(registry)
    return registry


def fails_inside(engine: InferEngine, site: str, hook: Callable[..., Any]) -> None:
    """A failure of one rank within the core, for which a hook stands that the engine in Python knows nothing of."""

    def call(name: str, layer: int, tensor: _core.Tensor, rank: int) -> Any:
        return hook(name, tensor, layer, rank)

    engine._core.set_hooks(call, [], [site])


# ---- hooks of users ----


@pytest.mark.parametrize("pattern", ["embedding", "layer0_q_proj", "layer1_down_proj", "final_norm", "logits"])
@pytest.mark.parametrize(("tp_size", "rank"), [(1, 0), (2, 0), (2, 1), (4, 2)])
def test_a_hook_that_raises(config: LlamaConfig, pattern: str, tp_size: int, rank: int) -> None:
    """Its exception comes out of forward, no hook is called after it, and the engine goes on."""
    with open_engine(config, tp_size) as engine:
        expected = run_steps(engine)[1]
        registry = hooked(engine, pattern, fail_on(rank, after=0.02))
        for _ in range(2):
            with pytest.raises(OnPurpose, match=f"^{pattern} on rank {rank}$"):
                engine.forward(STEP)
        registry.clear()
        assert np.array_equal(run_steps(engine)[1], expected)


@pytest.mark.parametrize("tp_size", [2, 4])
def test_hooks_that_raise_on_all_ranks(config: LlamaConfig, tp_size: int) -> None:
    """One exception is told, of whichever rank was first; a replacement that does not fit is one, too."""
    with open_engine(config, tp_size) as engine:
        expected = run_steps(engine)[1]

        def fail(name: str, tensor: _core.Tensor, layer_idx: int, rank: int) -> None:
            raise OnPurpose(f"rank {rank}")

        for hook, kind in ((fail, OnPurpose), (lambda _name, tensor, _layer: tensor.numpy()[:, :1], InfinilmError)):
            registry = hooked(engine, "layer0_*", hook)
            with pytest.raises(kind) as failed:
                engine.forward(STEP)
            assert not isinstance(failed.value, EngineDeadError)
            registry.clear()
        assert np.array_equal(run_steps(engine)[1], expected)


# ---- a rank that fails alone ----


@pytest.mark.parametrize("pattern", ["embedding", "layer0_q_proj", "layer1_down_proj", "final_norm", "logits"])
@pytest.mark.parametrize(("tp_size", "rank"), [(2, 0), (2, 1), (4, 2)])
def test_a_rank_that_fails(config: LlamaConfig, pattern: str, tp_size: int, rank: int) -> None:
    """In the middle of a step, where the others wait for the rank in a collective."""
    with open_engine(config, tp_size) as engine:
        run_steps(engine)
        fails_inside(engine, pattern, fail_on(rank, after=0.02))
        with pytest.raises(EngineDeadError, match=rf"^the ranks have stopped: \S*OnPurpose: {pattern} on") as dead:
            engine.forward(STEP)
        assert isinstance(dead.value.__cause__, OnPurpose)
        assert str(dead.value.__cause__) == f"{pattern} on rank {rank}"
        for call in (
            lambda: engine.forward(STEP),
            lambda: engine.reset_cache(StaticKVCacheConfig(3, 40)),
            lambda: engine.state_dict(),
        ):
            with pytest.raises(EngineDeadError, match="on rank") as again:
                call()
            assert isinstance(again.value.__cause__, OnPurpose)
        engine.close()
        with pytest.raises(EngineDeadError, match="closed"):
            engine.forward(STEP)


def test_the_first_cause_counts(config: LlamaConfig) -> None:
    steps: list[Any] = []  # kept: a step that no variable holds is waited for, here by a rank that has a part in it

    def is_dead() -> bool:
        try:
            steps.append(engine._core.submit(make_batch()))
        except EngineDeadError:
            return True
        return False

    def fail(name: str, tensor: _core.Tensor, layer_idx: int, rank: int) -> None:
        if rank > 0:
            wait_for(is_dead)  # the engine has heard of rank 0
        raise OnPurpose(str(rank))

    with open_engine(config, 4) as engine:
        fails_inside(engine, "layer0_q_proj", fail)
        with pytest.raises(EngineDeadError) as dead:
            engine.forward(STEP)
        assert str(dead.value.__cause__) == "0"


def test_errors_without_an_exception_of_python(config: LlamaConfig) -> None:
    """What the core itself refuses, on one rank: a replacement that does not fit."""

    def wrong(name: str, tensor: _core.Tensor, layer_idx: int, rank: int) -> Any:
        return _core.from_numpy(tensor.numpy()[:, :1].copy()) if rank == 1 else None

    with open_engine(config, 2) as engine:
        fails_inside(engine, "layer0_q_proj", wrong)
        with pytest.raises(EngineDeadError, match="layer0_q_proj") as dead:
            engine.forward(STEP)
        assert type(dead.value.__cause__) is InfinilmError


def test_everybody_who_waits_is_told(config: LlamaConfig) -> None:
    """Steps that were submitted behind the one that fails, and threads that wait for their turn."""
    with open_engine(config, 2) as engine:
        engine.forward(STEP)
        core = engine._core
        all_wait = threading.Event()

        def hook(name: str, layer: int, tensor: _core.Tensor, rank: int) -> None:
            assert all_wait.wait(PATIENCE)
            fail_on(1)(name, tensor, layer, rank)

        core.set_hooks(hook, [], ["logits"])
        batch = make_batch()
        steps = [core.submit(batch) for _ in range(5)]
        told: list[BaseException] = []

        def call() -> None:
            try:
                core.state_dict()
            except EngineDeadError as error:
                told.append(error)

        threads = [threading.Thread(target=call) for _ in range(3)]
        for thread in threads:
            thread.start()
        all_wait.set()
        for step in steps:
            with pytest.raises(EngineDeadError, match="on rank 1") as dead:
                step.result()
            assert isinstance(dead.value.__cause__, OnPurpose)
        for thread in threads:
            thread.join()
        assert len(told) == 3
        with pytest.raises(EngineDeadError, match="on rank 1"):
            core.submit(batch)


def test_steps_that_build_on_each_other(config: LlamaConfig) -> None:
    """A step names the token that the one before samples; the ranks put in the same one."""
    results = []
    for tp_size in (1, 2, 4):
        with open_engine(config, tp_size) as engine:
            engine.forward(STEP)
            steps = [engine._core.submit(make_batch())]
            for position in range(3, 9):
                batch = make_batch(
                    input_ids=np.zeros(1, np.int32),
                    previous_rows=np.zeros(1, np.int32),
                    positions=np.array([position], np.int32),
                    slot_mapping=np.array([position], np.int64),
                    cu_seqlens_q=np.array([0, 1], np.int32),
                    context_lens=np.array([position + 1], np.int32),
                    logits_rows=np.zeros(1, np.int32),
                )
                steps.append(engine._core.submit(batch))
            results.append([step.result().ids.numpy().tolist() for step in steps])  # type: ignore[union-attr]
    assert results[0] == results[1] == results[2]


def test_closing_while_steps_run(config: LlamaConfig) -> None:
    with open_engine(config, 2) as engine:
        engine.forward(STEP)
        steps = [engine._core.submit(make_batch()) for _ in range(20)]
        engine.close()
        for step in steps:  # what was submitted is finished
            assert step.result().ids is not None


def test_a_device_that_only_one_rank_lacks(config: LlamaConfig) -> None:
    spec = build_spec(config, dtype="float32", max_model_len=32)
    before = tasks()
    with pytest.raises(DeviceError, match=r"(?i)cuda"):
        _core.InferEngine(spec, ["cpu", "cuda:63"])
    wait_for(lambda: tasks() <= before)  # the system lists a thread a little longer than it lives


def make_batch(**changes: Any) -> _core.Batch:
    good: dict[str, Any] = {
        "input_ids": np.array([1, 2, 3], np.int32),
        "positions": np.arange(3, dtype=np.int32),
        "slot_mapping": np.arange(3, dtype=np.int64),
        "block_table": np.array([[0]], np.int32),
        "cu_seqlens_q": np.array([0, 3], np.int32),
        "context_lens": np.array([3], np.int32),
        "logits_rows": np.array([2], np.int32),
        "temperature": np.zeros(1, np.float32),
        "top_k": np.zeros(1, np.int32),
        "top_p": np.ones(1, np.float32),
        "min_p": np.zeros(1, np.float32),
        "random_val": np.zeros(1, np.float32),
    }
    return _core.Batch(**{**good, **changes})


def listed(rows: list[list[int]], token_ids: list[int]) -> dict[str, Any]:
    """What a batch changes in logits, and as many rows of logits."""
    kinds = {"temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "min_p": np.float32}
    return {
        "logits_rows": np.full(len(rows), 2, np.int32),
        **{name: np.ones(len(rows), kind) for name, kind in kinds.items()},
        "random_val": np.zeros(len(rows), np.float32),
        "change_rows": np.array(rows, np.int32),
        "penalties": np.ones((len(rows), 3), np.float32),
        "change_tokens": np.array([[i, 0, 0] for i in token_ids], np.int32),
    }


# ---- what all ranks refuse alike ----


@pytest.mark.parametrize(
    ("expected", "changes"),
    [
        ("input_ids[1] is 131", {"input_ids": np.array([1, 131, 3], np.int32)}),
        ("slot_mapping[2] is 128", {"slot_mapping": np.array([0, 1, 128], np.int64)}),
        ("block_table[0][0] is 2", {"block_table": np.array([[2]], np.int32)}),
        ("context_lens[0] is 65", {"context_lens": np.array([65], np.int32)}),
        ("cu_seqlens_q[1] is 2", {"cu_seqlens_q": np.array([0, 2], np.int32)}),
        ("logits_rows[0] is 3", {"logits_rows": np.array([3], np.int32)}),
        ("positions", {"positions": np.arange(2, dtype=np.int32)}),
        ("random_val", {"random_val": np.array([2], np.float32)}),
        ("previous_rows[1] is 7", {"previous_rows": np.array([-1, 7, -1], np.int32)}),
        ("num_logprobs[0]: expected -1 to 64, got 65", {"num_logprobs": np.array([65], np.int32)}),
        ("change_tokens[1]: expected a token id of 0 to 130, or -1", listed([[0, 2]], [5, 131])),
        (
            "change_tokens[0]: expected a token id of 0 to 130, or -1 at the end of a row; got -1",
            listed([[0, 2]], [-1, 5]),
        ),
        ("change_rows[1]: expected a part behind those of the rows before", listed([[0, 2], [1, 3]], [5, 6, 7])),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_step_that_is_refused_changes_nothing(config: LlamaConfig, expected: str, changes: dict[str, Any]) -> None:
    with open_engine(config, 2) as engine:
        before = run_steps(engine)[1]
        engine._core.forward(make_batch())  # so that there are previous rows
        with pytest.raises(InfinilmError) as refused:
            engine._core.forward(make_batch(**changes))
        assert expected in str(refused.value) and not isinstance(refused.value, EngineDeadError)
        assert np.array_equal(run_steps(engine)[1], before)


def test_logits_that_cannot_be_sampled(config: LlamaConfig) -> None:
    """All ranks find NaN alike, wherever it is: the step fails, the engine goes on."""
    with open_engine(config, 4) as engine:
        before = run_steps(engine)[1]
        for where in (0, 100, 130):  # rows of different ranks' parts of the vocabulary

            def spoil(name: str, tensor: _core.Tensor, layer_idx: int, where: int = where) -> None:
                tensor.numpy()[:, where] = np.nan

            hooked(engine, "logits", spoil)
            for sampling in ({"temperature": 0}, {"top_k": 5}, {"top_k": -1}):
                with pytest.raises(InfinilmError, match="NaN") as failed:
                    engine.forward(InferEngine.Input([[1, 2, 3]], **sampling))
                assert not isinstance(failed.value, EngineDeadError)
        engine.set_hook_registry(None)
        assert np.array_equal(run_steps(engine)[1], before)


@pytest.mark.parametrize("where", [0, 100, 130])
@pytest.mark.parametrize(("value", "message"), [(np.nan, "NaN"), (np.inf, "NaN|inf")])
def test_weights_that_give_no_logits(config: LlamaConfig, where: int, value: float, message: str) -> None:
    """The same where ranks exchange only the best of their logits."""
    lm_head = np.ones((131, 48), np.float32)
    lm_head[where] = value
    with open_engine(config, 4, lm_head=lm_head) as engine:
        for sampling in ({"temperature": 0}, {"top_k": 5}, {"top_k": -1}):
            with pytest.raises(InfinilmError, match=message) as failed:
                engine.forward(InferEngine.Input([[1, 2, 3]], **sampling))
            assert not isinstance(failed.value, EngineDeadError)


def test_bad_parameters_are_refused_at_load(config: LlamaConfig) -> None:
    with open_engine(config, 2, load=False) as engine:
        weights = make_weights(engine.param_shapes())
        with pytest.raises(WeightError, match="are not loaded"):
            engine.forward(STEP)
        name = "model.layers.0.self_attn.o_proj.weight"
        with pytest.raises(WeightError, match="expected shape"):
            engine._core.load_param(name, _core.from_numpy(weights[name][:, ::2].copy()))
        engine.load_params(weights)
        with pytest.raises(WeightError, match="already loaded"):
            engine._core.load_param(name, _core.from_numpy(weights[name]))
        run_steps(engine)


def test_a_cache_without_room_leaves_the_old_one(config: LlamaConfig) -> None:
    with open_engine(config, 2) as engine:
        before = run_steps(engine)[1]
        with pytest.raises(CacheFullError):
            engine.reset_cache(StaticKVCacheConfig(2**20, 2**25))
        assert np.array_equal(run_steps(engine)[1], before)


# ---- nothing is left ----


def tasks() -> int:
    return len(os.listdir("/proc/self/task"))


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_rounds_of_failing_and_closing_leave_nothing(config: LlamaConfig) -> None:
    """Threads end and memory comes back, however the engine ended."""
    arrays = make_weights(_core.param_shapes(build_spec(config, dtype="float32", max_model_len=64)))
    weights = {name: _core.from_numpy(array) for name, array in arrays.items()}

    def one_round(i: int) -> None:
        engine = open_engine(config, 2 + 2 * (i % 2), load=False)
        for name, tensor in weights.items():
            engine._core.load_param(name, tensor)
        match i % 5:
            case 0:
                with pytest.raises(CacheFullError):
                    engine.reset_cache(StaticKVCacheConfig(2**20, 2**25))
            case 1:
                with pytest.raises(WeightError):
                    engine._core.load_param("lm_head.weight", weights["lm_head.weight"])
            case 2 | 3:
                fails_inside(engine, "layer0_o_proj", fail_on(i % 2))
                with pytest.raises(EngineDeadError):
                    engine.forward(STEP)
            case _:
                engine.forward(STEP)
        if i % 3:  # else it is collected
            engine.close()

    for i in range(30):
        one_round(i)
    gc.collect()
    threads, memory = tasks(), resident_bytes()
    for i in range(200):
        one_round(i)
    gc.collect()
    wait_for(lambda: tasks() <= threads)
    assert resident_bytes() - memory < 8 << 20


def test_a_dead_engine_can_be_collected(config: LlamaConfig) -> None:
    """Though its hooks refer to it, and the exception that ended it to the frames they ran in."""
    engine = open_engine(config, 2)

    def fail(name: str, tensor: _core.Tensor, layer_idx: int, rank: int, keep: Any = engine) -> None:
        raise OnPurpose(name)

    fails_inside(engine, "logits", fail)
    with pytest.raises(EngineDeadError):
        engine.forward(STEP)
    engine.close()
    gone = weakref.ref(engine)
    del engine, fail
    gc.collect()
    assert gone() is None
