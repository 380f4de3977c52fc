"""What the tests of the LLM layer share."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import infinilm
from infinilm import LLM


def tokens(outputs: list[infinilm.RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def texts(outputs: list[infinilm.RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


PATIENCE = 300  # seconds, for what takes far less than one; also where a machine has much else to do


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.001)


def engine_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "infinilm-engine"]


def idle(llm: LLM) -> bool:
    return not llm._thread.scheduler.has_work


def one(llm: LLM, prompt: Any, **sampling: Any) -> infinilm.CompletionOutput:
    return llm.generate(prompt, use_tqdm=False, **sampling)[0].outputs[0]


def sharpen(token_ids: Any, logits: Any) -> Any:
    """A `logits_processor` that changes what is drawn."""
    return 2 * logits


def run_program(text: str) -> str:
    """What a Python program prints, whose end is that it ends by itself, well and in time."""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout
