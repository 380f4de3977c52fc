"""What the tests of the LLM layer share."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import infinilm
from infinilm import LLM


def tokens(outputs: list[infinilm.RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def texts(outputs: list[infinilm.RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.001)


def idle(llm: LLM) -> bool:
    return not llm._thread.scheduler.has_work


def one(llm: LLM, prompt: Any, **sampling: Any) -> infinilm.CompletionOutput:
    return llm.generate(prompt, use_tqdm=False, **sampling)[0].outputs[0]
