"""Forks take no threads along, and programs end while others make engines: nothing hangs or aborts."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

# Seconds after which a child or a program counts as hanging, which is the failure these tests look for. What does not
# hang takes a few, and on a machine with much else to do many times as long: the limits are far beyond that.
CHILD_LIMIT = 1500
LIMIT = 2 * CHILD_LIMIT

FORK = """
import gc, os, signal, sys, threading, time
import numpy as np
from infinilm import EngineDeadError, InferEngine, _core

engine = InferEngine({folder!r}, device_type="cpu")
engine.load_weights({folder!r}, use_tqdm=False)
step = lambda: engine.forward(InferEngine.Input([[5, 9, 2]], temperature=0)).output_ids.numpy().tolist()
expected = step()
backend = _core.Backend("cpu", num_threads=3)
many = _core.from_numpy(np.zeros((64, 4096), np.float32))
gather = lambda: backend.act_mul(many, _core.from_numpy(np.zeros((64, 2048), np.float32)))
gather()
core = _core.InferEngine(engine._core.spec, num_threads=2)

def dead(call):
    try:
        call()
    except EngineDeadError as error:
        assert f"made in process {{os.getppid()}}; after a fork make a new one" in str(error), error
    else:
        raise AssertionError("no error")

{setup}
pid = os.fork()
if pid == 0:
{child}
    sys.exit(7)
{parent}
end = time.monotonic() + {limit}
while True:
    done, status = os.waitpid(pid, os.WNOHANG)
    if done:
        break
    if time.monotonic() > end:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise SystemExit("the child hangs")
    time.sleep(0.01)
assert os.waitstatus_to_exitcode(status) == 7, status
assert step() == expected  # the parent's is as it was
"""

CHILDREN = {
    "exits": "pass",
    "forwards": "dead(step)",
    "closes": "engine.close(); dead(step)",
    "resets": "dead(engine.reset_cache)",
    "reads": "dead(engine.state_dict)",
    "drops": "del engine, step; gc.collect()",
    "uses the core": "dead(core.finish_loading); dead(core.state_dict); core.close(); del core",
    "uses a backend": "dead(gather); del backend, gather; gc.collect()",
    "makes a new one": "engine = InferEngine({folder!r}, device_type='cpu'); "
    "engine.load_weights({folder!r}, use_tqdm=False); assert step() == expected",
    "makes a new one with the parent's weights": "other = InferEngine(engine.config, device_type='cpu'); "
    "other.load_params(weights); engine = other; assert step() == expected",
}


def python(script: str, **settings: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT,
        **settings,  # type: ignore[call-overload]
    )


@pytest.mark.parametrize("what", CHILDREN)
def test_a_forked_child(folder: Path, what: str) -> None:
    child = CHILDREN[what].format(folder=str(folder))
    setup = "weights = engine.state_dict()[0]"
    script = FORK.format(folder=str(folder), limit=CHILD_LIMIT, setup=setup, child=f"    {child}", parent="")
    done = python(script)
    assert done.returncode == 0, done.stdout + done.stderr


# While the fork happens another thread is in the middle of a step, and holds whatever locks there are.
BUSY = """
inside, go_on = threading.Event(), threading.Event()
from infinilm import HookRegistry
registry = HookRegistry()
registry.register_hook("logits", lambda *_: (inside.set(), go_on.wait({limit})) and None)
engine.set_hook_registry(registry)
thread = threading.Thread(target=step)
thread.start()
assert inside.wait({limit})
"""
BUSY_PARENT = """
go_on.set()
thread.join()
engine.set_hook_registry(None)
"""


@pytest.mark.parametrize("what", ["exits", "forwards", "closes", "drops"])
def test_a_child_forked_during_a_step(folder: Path, what: str) -> None:
    setup, child = BUSY.format(limit=CHILD_LIMIT), f"    {CHILDREN[what]}"
    done = python(FORK.format(folder=str(folder), limit=CHILD_LIMIT, setup=setup, child=child, parent=BUSY_PARENT))
    assert done.returncode == 0, done.stdout + done.stderr


PENDING = """
import os, sys
import numpy as np
from infinilm import EngineDeadError, InferEngine
from infinilm.engine import batch
engine = InferEngine({folder!r}, device_type="cpu")
engine.load_weights({folder!r}, use_tqdm=False)
engine.forward(InferEngine.Input([[1]], temperature=0))
pending = engine._core.submit(batch.make_batch(
    InferEngine.Input([list(range(1, 60))], temperature=0), engine._cache, vocab_size=engine.config.vocab_size,
    sliding_window=0, return_logits=False))
pid = os.fork()
if pid == 0:
    try:
        pending.result()
    except EngineDeadError:
        del pending
        sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
pending.result()
"""


def test_a_step_on_its_way_in_a_forked_child(folder: Path) -> None:
    done = python(PENDING.format(folder=str(folder)))
    assert done.returncode == 0, done.stdout + done.stderr


# ---- the end of the program ----

LOADING = """
import sys, threading, time
from infinilm import EngineDeadError, InferEngine

def load():
    while True:
        try:
            engine = InferEngine({folder!r}, device_type="cpu")
            engine.load_weights({folder!r}, use_tqdm=False)
        except EngineDeadError:
            time.sleep(0.001)

for _ in range(2):
    threading.Thread(target=load, daemon=True).start()
time.sleep(float(sys.argv[1]))
"""


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.1, 0.13, 0.16])
def test_a_program_ends_while_threads_make_engines(folder: Path, seconds: float) -> None:
    script = LOADING.format(folder=str(folder)).replace("sys.argv[1]", repr(seconds))
    for _ in range(2):
        done = python(script)
        assert (done.returncode, done.stderr) == (0, "")


CORE_AT_EXIT = """
import threading, time
import numpy as np
from infinilm import AutoConfig, _core
from infinilm.config import spec as specs

weights = {{}}
spec = specs.build_spec(AutoConfig.from_pretrained({folder!r}), dtype="float32", max_model_len=64)

def make():  # engines that are not closed at the end, whose weights are arrays of Python
    shapes = _core.param_shapes(spec)
    while True:
        engine = _core.InferEngine(spec, num_threads=2)
        for name, shape in shapes.items():
            engine.load_param(name, _core.from_numpy(np.zeros(shape, np.float32)))
        engine.finish_loading()
        engine.reset_cache(4, 16)
        engine.close()

for _ in range(3):
    threading.Thread(target=make, daemon=True).start()
time.sleep({seconds})
"""


@pytest.mark.parametrize("seconds", [0.02, 0.05, 0.11])
def test_the_core_outlives_the_interpreter(folder: Path, seconds: float) -> None:
    for _ in range(3):
        done = python(CORE_AT_EXIT.format(folder=str(folder), seconds=seconds))
        assert (done.returncode, done.stderr) == (0, "")


CLOSED_IN_A_PROCESSOR = """
import infinilm
llm = infinilm.LLM({folder!r}, device="cpu", use_tqdm=False)
def closer(ids, logits):
    llm.close()
    return logits
try:
    llm.generate([[5, 9]], max_tokens=3, logits_processor=closer)
except infinilm.InfinilmError as error:
    print(type(error).__name__)
"""


def test_a_program_ends_after_close_in_a_logits_processor(folder: Path) -> None:
    for _ in range(3):
        done = python(CLOSED_IN_A_PROCESSOR.format(folder=str(folder)))
        assert done.returncode == 0 and "terminate" not in done.stderr, done.stderr


# ---- no more threads ----

THREADS = """
import resource
from infinilm import DeviceError, _core
_core.Backend("cpu", num_threads=2)
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (200 << 20)  # room for some stacks of 8 MiB
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    _core.Backend("cpu", num_threads=500)
except DeviceError as error:
    print(error)
_core.Backend("cpu", num_threads=2)  # those that started have ended
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the size of a process from /proc")
def test_threads_that_cannot_start(folder: Path) -> None:
    stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
    if stack == resource.RLIM_INFINITY or stack < 1 << 20:
        pytest.skip("the stacks of threads are not of a known size")
    done = python(THREADS, env={**os.environ, "MALLOC_ARENA_MAX": "1"})
    assert done.returncode == 0, done.stderr
    assert "cannot start 499 threads beside the caller's, only " in done.stdout
    assert "lower num_threads (or tensor_parallel_size)" in done.stdout
