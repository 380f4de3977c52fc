"""An `LLM` of several ranks under random schedules of submitting, cancelling, failing and closing, all from one seed.

Whatever happens, in whatever order: everybody who waits is told the answer or the first cause; close()
returns, and no thread of the engine is left.
"""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from covering import THOROUGH
from llm import tiny
from llm.support import PATIENCE

from infinilm import LLM, EngineDeadError, HookRegistry, Request

NUM_SCHEDULES, NUM_GROUPS = (1000, 20) if THOROUGH else (400, 8)
SITES = ("embedding", "layer0_q_proj", "layer1_attention", "layer1_down_proj", "final_norm", "logits")


class OnPurposeError(Exception):
    pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_checkpoint(tmp_path_factory.mktemp("schedules") / "tiny")


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[tuple[int, int], list[int]]:
    """Tokens of each prompt, by what `submit` draws, of an undisturbed engine of as many ranks."""
    out = {}
    for size in (2, 4):
        with LLM(folder, tensor_parallel_size=size) as model:
            for length in range(1, 13):
                got = model.generate(prompt(length), temperature=0, max_tokens=20, ignore_eos=True, use_tqdm=False)
                out[size, length] = list(got[0].outputs[0].token_ids)
    return out


def prompt(length: int) -> list[int]:
    return [1, *range(5, 4 + length)]


def engine_threads() -> list[str]:
    """Names of the engine threads of Python and of the core."""
    names = [t.name for t in threading.enumerate()]
    names += [comm.read_text() for comm in Path("/proc/self/task").glob("*/comm")]
    return sorted(name for name in names if name.startswith("infinilm"))


def fail_at(model: LLM, registry: HookRegistry, rng: random.Random, size: int, *, is_fatal: bool) -> None:
    """Have a hook raise on a rank, at some call of some site from now on; fatal: one that the LLM knows nothing of."""
    bad_rank, calls = rng.randrange(size), [rng.randrange(12)]

    def fail(name: str, tensor: Any, layer_idx: int, rank: int) -> None:
        if rank == bad_rank:
            calls[0] -= 1
            if calls[0] < 0:
                raise OnPurposeError(name)

    site = rng.choice(SITES)
    if is_fatal:
        model._engine.set_hooks(lambda name, layer, tensor, rank: fail(name, tensor, layer, rank), [], [site])
    else:
        registry.register_hook(site, fail, ranks="all")


def run_schedule(folder: Path, seed: int, answers: dict[tuple[int, int], list[int]]) -> None:
    rng = random.Random(seed)
    size = rng.choice((2, 2, 4))
    registry = HookRegistry()
    model = LLM(folder, tensor_parallel_size=size, hooks=registry, max_num_seqs=3, num_threads=size, use_tqdm=False)
    submitted: list[tuple[Request, int, int]] = []  # with the length of the prompt, and tokens wanted
    cancelled: set[str] = set()
    fails = closes = False
    is_fatal = rng.random() < 0.5
    for _ in range(rng.randrange(1, 12)):
        what = rng.choice(("submit", "submit", "submit", "cancel", "pause", "fail"))
        if what == "submit":
            length, wanted = rng.randrange(1, 13), rng.randrange(1, 21)
            try:
                request = model.submit(prompt(length), temperature=0, max_tokens=wanted, ignore_eos=True)
            except EngineDeadError:
                assert fails and is_fatal
                break
            submitted.append((request, length, wanted))
        elif what == "cancel" and submitted:
            request = rng.choice(submitted)[0]
            request.cancel()
            cancelled.add(request.request_id)
        elif what == "pause":
            time.sleep(rng.random() * 0.003)
        elif what == "fail" and not fails and rng.random() < 0.5:
            fail_at(model, registry, rng, size, is_fatal=is_fatal)
            fails = True
    if rng.random() < 0.3:
        model.close()
        closes = True
    for request, length, wanted in submitted:
        expected = answers[size, length][:wanted]
        try:
            got = request.result(PATIENCE).outputs[0]
        except EngineDeadError as error:
            assert closes or (fails and is_fatal and isinstance(error.__cause__, OnPurposeError)), error
            continue
        except OnPurposeError:
            assert fails and not is_fatal
            continue
        if got.finish_reason == "abort":
            assert request.request_id in cancelled
            expected = expected[: len(got.token_ids)]
        assert list(got.token_ids) == expected
    model.close()
    with pytest.raises(EngineDeadError):
        model.submit([1])


@pytest.mark.parametrize("group", range(NUM_GROUPS))
def test_random_schedules(folder: Path, answers: dict[tuple[int, int], list[int]], group: int) -> None:
    threads = engine_threads()
    for seed in range(group, NUM_SCHEDULES, NUM_GROUPS):
        try:
            run_schedule(folder, seed, answers)
        except BaseException as error:
            error.add_note(f"seed {seed}") if hasattr(error, "add_note") else print("seed", seed)
            raise
    assert engine_threads() == threads
