"""What is left of an LLM in a forked process, which has none of its threads: clear errors, and nothing hangs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llm.support import PATIENCE, run_program

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")

# The child ends by sys.exit, with everything still there.
PROGRAM = """
import gc, os, signal, sys, threading, time
import infinilm

llm = infinilm.LLM({folder!r}, seed=0)
settings = dict(temperature=0, max_tokens=30, ignore_eos=True)
expected = llm.generate("the", use_tqdm=False, **settings)[0].outputs
stream = llm.stream("the", **settings)
next(stream)
unused = infinilm.LLM({folder!r})
done = llm.submit("the", **settings)
done.result({limit})
child_ended = threading.Event()
running = llm.submit("the", logits_processor=lambda ids, logits: child_ended.wait() and logits, **settings)

pid = os.fork()
if pid == 0:
    try:
        {lines}
    except infinilm.EngineDeadError as error:
        words = f"made in process {{os.getppid()}}", "fork", "'spawn' start method"
        sys.exit(3 if all(word in str(error) for word in words) else 4)
    sys.exit(0)
end = time.monotonic() + {limit}
ended = 0
while not ended and time.monotonic() < end:
    ended, status = os.waitpid(pid, os.WNOHANG)
    time.sleep(0.01)
if not ended:
    os.kill(pid, signal.SIGKILL)
    print("hangs")
else:
    print(os.waitstatus_to_exitcode(status))
child_ended.set()
assert running.result({limit}).outputs == expected
assert llm.generate("the", use_tqdm=False, **settings)[0].outputs == expected
"""


def in_child(folder: Path, lines: str) -> str:
    """How a child ends that runs these lines: its exit code, 3 for an EngineDeadError that explains, or "hangs"."""
    return run_program(PROGRAM.format(folder=str(folder), lines=lines, limit=PATIENCE)).strip()


@pytest.mark.parametrize(
    "call",
    [
        "llm.generate('the')",
        "llm.chat([{{'role': 'user', 'content': 'the'}}])",
        "next(llm.stream('the'))",
        "list(stream)",
        "llm.submit('the')",
        "llm.score('the')",
        "llm.forward([1, 2])",
        "llm.reset_cache()",
        "llm.reset_cache('1MiB')",
        "running.result()",
        "list(running)",
        "import asyncio; asyncio.run(llm.agenerate('the'))",
    ],
)
def test_calls_in_a_forked_process(folder: Path, call: str) -> None:
    assert in_child(folder, call.format()) == "3"


@pytest.mark.parametrize(
    "lines",
    [
        "pass",
        "llm.close()",
        "llm.__exit__()",
        "running.cancel(); del running; gc.collect()",
        "del llm, stream, done, running; gc.collect()",
        "del unused; gc.collect()",
        "assert done.result().outputs == list(expected) and len(list(done)) == 30",
        "with infinilm.LLM({folder!r}) as new: assert new.generate('the', **settings)[0].outputs == expected",
    ],
)
def test_the_end_of_a_forked_process(folder: Path, lines: str) -> None:
    assert in_child(folder, lines.format(folder=str(folder))) == "0"
