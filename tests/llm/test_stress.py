"""Two hundred requests at once in a cache far too small for them, from several threads, some cancelled: every answer is
bit for bit the one of its request alone, every cut one begins like it, and nothing stays behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import infinilm
from infinilm import LLM, SamplingParams
from llm.support import PATIENCE, wait_for

NUM_REQUESTS = 200
NUM_THREADS = 8
MAX_MODEL_LEN = 320
NUM_BLOCKS = 26  # the longest sequence has 20; the requests together want some 1,500

STORY = (
    "Once upon a time there was a little girl named Lily who lived near a big forest. Every morning she took her red "
    "hat and went to see the old owl, and every morning the owl told her a new story about the moon and the sea. "
)


@dataclass(frozen=True)
class Job:
    """A request, and when it is cancelled: after that many of its events, or that many seconds, or never."""

    prompt: str | list[int]
    params: SamplingParams
    cancel_after_events: int | None = None
    cancel_after_seconds: float | None = None


def forbid_multiples_of_seven(token_ids: npt.NDArray[np.int32], logits: npt.NDArray[np.float32]) -> Any:
    logits[token_ids[-1] % 7 :: 7] = -np.inf
    return logits


# One is chosen for each request; together they reach every way in which tokens are drawn, read and stopped.
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "logprobs": 3},
    {"temperature": 0, "stop": [" the", ". "]},
    {"temperature": 0, "prompt_logprobs": 2},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "stop": "and", "include_stop_str_in_output": True},
    {"temperature": 1.3, "top_k": 20, "logprobs": 0},
    {"temperature": 0.9, "n": 2},
    {"temperature": 1.0, "n": 2, "logprobs": 2, "prompt_logprobs": 0},
    {"temperature": 0.7, "repetition_penalty": 1.3, "min_p": 0.02},
    {"temperature": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    {"temperature": 1.0, "logit_bias": {30: 4.0, 40: -5.0}, "logprobs": 1},
    {"temperature": 1.0, "allowed_token_ids": list(range(1, 400)), "ignore_eos": True},
    {"temperature": 1.0, "stop_token_ids": list(range(20, 60)), "min_tokens": 1},
    {"temperature": 1.0, "logits_processor": forbid_multiples_of_seven},
]


def make_jobs(llm: LLM) -> list[Job]:
    rng = np.random.default_rng(20)
    story = llm.tokenize(STORY * 4)[:150]
    jobs = []
    for i in range(NUM_REQUESTS):
        if i % 5 == 0:  # a few share long prefixes, up to the edge of a block or not, or blocks behind other ones
            begin, end = 16 * rng.integers(0, 3), rng.choice([63, 79, 111, rng.integers(60, 150)])
            own = rng.integers(2, 1500, rng.integers(1, 40)).tolist()
            prompt: str | list[int] = story[begin:end] + own
        elif i % 5 == 1:
            prompt = STORY[: rng.integers(1, len(STORY))]
        else:
            prompt = rng.integers(2, 1500, rng.integers(1, 200)).tolist()
        kind = dict(KINDS[i % len(KINDS)])
        max_tokens = int(rng.integers(1, 60))
        if i % 11 == 0:
            kind["min_tokens"] = max_tokens // 2
        seed = int(rng.integers(0, 2**63)) if kind["temperature"] else None
        cancel: dict[str, Any] = {}
        if i % 4 == 2:
            cancel = {"cancel_after_events": int(rng.integers(0, 40))}
        elif i % 8 == 5:
            cancel = {"cancel_after_seconds": float(rng.uniform(0, 2))}
        jobs.append(Job(prompt, SamplingParams(seed=seed, max_tokens=max_tokens, **kind), **cancel))
    return jobs


@pytest.fixture(scope="module")
def alone() -> Iterator[LLM]:
    """Where every request runs by itself: no other one, no reused prefix, room enough."""
    with LLM("demo", max_num_seqs=1, max_model_len=MAX_MODEL_LEN, enable_prefix_caching=False, use_tqdm=False) as llm:
        yield llm


def run(llm: LLM, jobs: list[Job]) -> list[tuple[infinilm.RequestOutput, list[infinilm.TokenEvent]]]:
    """Submit every job from one of several threads; gives result and events of each.

    No step begins before all are there, and those of no events cancelled.
    """
    are_there = threading.Barrier(NUM_THREADS + 1)
    results: list[Any] = [None] * len(jobs)
    failures: list[BaseException] = []

    def work(first: int) -> None:
        mine = range(first, len(jobs), NUM_THREADS)
        requests = {i: llm.submit(jobs[i].prompt, jobs[i].params) for i in mine}
        for i, request in requests.items():
            if jobs[i].cancel_after_events == 0:
                request.cancel()
        are_there.wait(PATIENCE)
        timers = []
        for i, request in requests.items():
            if (seconds := jobs[i].cancel_after_seconds) is not None:
                timers.append(threading.Timer(seconds, request.cancel))
                timers[-1].start()
        for i, request in requests.items():
            if (count := jobs[i].cancel_after_events) is not None:
                for _ in zip(range(count), request, strict=False):
                    pass
                request.cancel()
        for i, request in requests.items():
            results[i] = request.result(PATIENCE), list(request)
        for timer in timers:
            timer.join()

    def guarded(first: int) -> None:
        try:
            work(first)
        except BaseException as error:
            failures.append(error)
            are_there.abort()

    threads = [threading.Thread(target=guarded, args=(first,)) for first in range(NUM_THREADS)]
    with llm._thread._stepping:
        for thread in threads:
            thread.start()
        with suppress(threading.BrokenBarrierError):
            are_there.wait(PATIENCE)
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results


def check_cut(llm: LLM, got: infinilm.CompletionOutput, whole: infinilm.CompletionOutput) -> None:
    """A cancelled sequence: the beginning of the whole one, in tokens, log-probabilities and text."""
    count = len(got.token_ids)
    assert list(got.token_ids) == list(whole.token_ids)[:count]
    if whole.logprobs is not None:
        assert got.logprobs is not None
        assert list(got.logprobs) == list(whole.logprobs)[:count]
    # Text that a stop string could still have cut is given out by a cancellation: what follows is not in whole.text.
    # A character of which a part is missing ends in U+FFFD.
    assert llm.detokenize(list(whole.token_ids)).startswith(got.text.rstrip("\ufffd"))


def test_two_hundred_at_once(alone: LLM) -> None:
    jobs = make_jobs(alone)
    expected = [alone.generate(job.prompt, job.params, use_tqdm=False)[0] for job in jobs]
    block_bytes = alone.memory.kv_bytes_per_token * alone.memory.block_size
    num_cut = 0
    with LLM(
        "demo",
        max_num_seqs=32,
        max_num_batched_tokens=256,
        max_model_len=MAX_MODEL_LEN,
        kv_cache=NUM_BLOCKS * block_bytes,
        use_tqdm=False,
    ) as llm:
        assert llm.memory.num_blocks == NUM_BLOCKS
        for job, (output, events), whole in zip(jobs, run(llm, jobs), expected, strict=True):
            assert output.finished
            assert output.prompt_token_ids == whole.prompt_token_ids
            is_cut = any(c.finish_reason == "abort" for c in output.outputs)
            assert not is_cut or job.cancel_after_events is not None or job.cancel_after_seconds is not None
            num_cut += is_cut
            assert output.prompt_logprobs == whole.prompt_logprobs or (is_cut and output.prompt_logprobs is None)
            for got, answer in zip(output.outputs, whole.outputs, strict=True):
                mine = [event for event in events if event.completion == got.index]
                assert [e.token_id for e in mine if e.token_id is not None] == list(got.token_ids)
                assert "".join(e.text for e in mine) == got.text
                assert [e.finish_reason for e in mine if e.finish_reason is not None] == [got.finish_reason]
                if got.finish_reason == "abort":
                    check_cut(llm, got, answer)
                else:
                    assert got == answer
        # Results are told before the engine thread has let go of all they used.
        wait_for(lambda: llm.metrics().num_used_blocks == llm.metrics().num_running == 0)
        metrics = llm.metrics()
        assert (metrics.num_waiting, metrics.num_used_blocks, metrics.num_running) == (0, 0, 0)
        assert metrics.num_preemptions > 5
        assert num_cut >= sum(job.cancel_after_events == 0 for job in jobs) > 0
        assert metrics.prefix_hit_rate > 0
