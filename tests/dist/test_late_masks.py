"""Steps whose masks come while they run, on one rank and on several: what comes counts, and nothing waits for ever."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from infinilm import InfinilmError, _core
from infinilm.config.spec import build_spec

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from reference import ops as oracle  # noqa: E402
from tiny_models import make_config  # noqa: E402

VOCAB_SIZE, NUM_ROWS = 131, 6
MakeEngine = Callable[[int], _core.InferEngine]


@pytest.fixture
def make_engine(tmp_path: Path) -> Iterator[MakeEngine]:
    engines: list[_core.InferEngine] = []

    def make(num_ranks: int) -> _core.InferEngine:
        spec = build_spec(make_config(tmp_path), dtype="float32", max_model_len=64)
        engines.append(_core.InferEngine(spec, ["cpu"] * num_ranks, num_threads=num_ranks))
        engines[-1].load_dummy("float32", 3)
        engines[-1].finish_loading()
        engines[-1].reset_cache(NUM_ROWS, 16)
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


ROWS = np.arange(NUM_ROWS, dtype=np.int32)


def sampling(top_k: int) -> dict[str, NDArray[Any]]:
    """Every other row is greedy; top_k: of the others."""
    return {
        "temperature": (ROWS % 2).astype(np.float32),
        "top_k": np.full(NUM_ROWS, top_k, np.int32),
        "top_p": np.ones(NUM_ROWS, np.float32),
        "min_p": np.zeros(NUM_ROWS, np.float32),
        "random_val": np.linspace(0, 0.9, NUM_ROWS, dtype=np.float32),
    }


def make_batch(top_k: int = 0, mask: oracle.Mask | None = None, **changes: Any) -> _core.Batch:
    """A token of six sequences each."""
    fields: dict[str, Any] = {
        "input_ids": ROWS + 3,
        "positions": np.zeros(NUM_ROWS, np.int32),
        "slot_mapping": ROWS.astype(np.int64) * 16,
        "block_table": ROWS[:, None],
        "cu_seqlens_q": np.arange(NUM_ROWS + 1, dtype=np.int32),
        "context_lens": np.ones(NUM_ROWS, np.int32),
        "logits_rows": ROWS,
        **sampling(top_k),
    }
    if mask is not None:
        fields |= {"allowed": mask.allowed, "allowed_row": mask.allowed_row}
    return _core.Batch(**(fields | changes))


def make_mask(seed: int) -> oracle.Mask:
    return oracle.random_mask(np.random.default_rng(seed), NUM_ROWS, VOCAB_SIZE)


def sampled(output: _core.StepOutput) -> list[int]:
    assert output.ids is not None and not output.aborted
    ids: list[int] = output.ids.numpy().tolist()
    return ids


def want(engine: _core.InferEngine, mask: oracle.Mask, top_k: int) -> list[int]:
    """What is drawn from the engine's logits, masked here."""
    logits = engine.forward(make_batch(top_k, return_logits=True)).logits
    assert logits is not None
    ids = np.empty(NUM_ROWS, np.int32)
    arrays = [mask.apply(logits.numpy()), *sampling(top_k).values(), ids]
    _core.Backend("cpu", num_threads=1).sample(*[_core.from_numpy(array) for array in arrays])
    result: list[int] = ids.tolist()
    return result


each_size = pytest.mark.parametrize("num_ranks", [1, 2, 4])
each_top_k = pytest.mark.parametrize("top_k", [0, 5])  # the ranks bring together all logits, or the best of each


@each_size
@each_top_k
def test_masks_that_come_while_the_step_runs(make_engine: MakeEngine, num_ranks: int, top_k: int) -> None:
    """The step samples by what the array holds when they are given; meanwhile it is not done."""
    engine = make_engine(num_ranks)
    for seed in range(5):
        final, mask = make_mask(seed), make_mask(seed)
        expected = want(engine, final, top_k)
        assert sampled(engine.forward(make_batch(top_k, final))) == expected
        mask.allowed[:] = 0
        pending = engine.submit(make_batch(top_k, mask), late_masks=True)
        behind = engine.submit(make_batch(top_k, final))
        assert not pending.wait(0.02)
        mask.allowed[:] = final.allowed
        pending.give_masks()
        assert sampled(pending.result()) == sampled(behind.result()) == expected


@each_size
@each_top_k
def test_masks_that_never_come(make_engine: MakeEngine, num_ranks: int, top_k: int) -> None:
    """A step that is aborted, or let go of, waits no longer; steps behind it run. Its result is refused until then."""
    engine = make_engine(num_ranks)
    mask = make_mask(1)
    expected = want(engine, mask, top_k)
    for _ in range(3):
        aborted = engine.submit(make_batch(top_k, mask), late_masks=True)
        behind = engine.submit(make_batch(top_k, mask))
        with pytest.raises(InfinilmError, match="wait for its masks for ever; call give_masks or abort"):
            aborted.result()
        aborted.abort()
        assert aborted.result().aborted
        assert sampled(behind.result()) == expected
        forgotten = engine.submit(make_batch(top_k, mask), late_masks=True)
        behind = engine.submit(make_batch(top_k, mask))
        del forgotten
        assert sampled(behind.result()) == expected


@each_size
def test_an_engine_that_closes(make_engine: MakeEngine, num_ranks: int) -> None:
    """It does not wait for masks; steps behind one that does are done."""
    engine = make_engine(num_ranks)
    steps = [engine.submit(make_batch(0, make_mask(1)), late_masks=True) for _ in range(3)]
    behind = engine.submit(make_batch())
    engine.close()
    assert all(step.wait(0) for step in steps) and len(sampled(behind.result())) == NUM_ROWS
    for step in steps:
        step.abort()
        assert step.result().aborted


@each_size
def test_given_and_aborted_at_any_time(make_engine: MakeEngine, num_ranks: int) -> None:
    """Either the tokens or an aborted step, on all ranks; the engine goes on."""
    engine = make_engine(num_ranks)
    mask, rng = make_mask(2), np.random.default_rng(0)
    expected = want(engine, mask, 5)
    for _ in range(150):
        pending = engine.submit(make_batch(5, mask), late_masks=True)
        delays = rng.uniform(0, 1.5e-3, 2)

        def act(how: Callable[[], None], delay: float) -> None:
            time.sleep(delay)
            how()

        threads = [
            threading.Thread(target=act, args=(how, delay))
            for how, delay in zip((pending.give_masks, pending.abort), delays, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        output = pending.result()
        assert output.aborted or sampled(output) == expected
    assert sampled(engine.forward(make_batch(5, mask))) == expected


@each_size
def test_masks_that_do_not_fit(make_engine: MakeEngine, num_ranks: int) -> None:
    """An error that names what is wrong, before any rank waits; the engine goes on."""
    engine = make_engine(num_ranks)
    mask = make_mask(3)
    expected = want(engine, mask, 5)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"allowed": np.ascontiguousarray(mask.allowed[:, :-1])}, "at least 5 words"),
        ({"allowed_row": mask.allowed_row[:-1].copy()}, "allowed_row: num_rows is 6"),
        ({"allowed_row": mask.allowed_row + 5}, r"allowed_row\[\d\] is \d+, expected -1 to 4"),
        ({"allowed_row": None}, "allowed and allowed_row belong together"),
        ({"allowed": None}, "allowed and allowed_row belong together"),
    ]
    for changes, message in cases:
        with pytest.raises(InfinilmError, match=message):
            engine.forward(make_batch(5, mask, **changes))
    with pytest.raises(InfinilmError, match="late_masks of a batch without"):
        engine.submit(make_batch(5), late_masks=True)
    assert sampled(engine.forward(make_batch(5, mask))) == expected
