"""`GrammarProcess`: a process in which llguidance works, and which may die of it.

Its program is grammar_worker.py. It is started by `exec`, never by a fork alone, and ends with this process.
"""

from __future__ import annotations

import json
import os
import resource
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from infinilm.errors import DeviceError, TimeLimitError

__all__ = ["GrammarProcess"]

_PROGRAM = Path(__file__).with_name("grammar_worker.py")


class GrammarProcess:
    """One process, which is started again after its death. One thread may use it at a time.

    Parameters
    ----------
    vocabulary : callable
        Gives what the process needs to know of the model: "tokenizer", "vocab_size", "ends", "limits".
    """

    def __init__(self, vocabulary: Callable[[], Mapping[str, Any]]) -> None:
        self._vocabulary = vocabulary
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: Callable[[], object] = lambda: None

    def start(self, end: float) -> subprocess.Popen[bytes]:
        """Start the process, if it does not run."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        order = {**self._vocabulary(), "stack_bytes": _stack_bytes()}
        command = [sys.executable, "-I", str(_PROGRAM), str(os.getpid()), json.dumps([p for p in sys.path if p])]
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
            )
        except OSError as error:
            raise DeviceError(f"the process that tries constraints cannot be started: {error}") from error
        self._process = process
        self._finalizer = weakref.finalize(self, _end, process, os.getpid())
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        failure = self.exchange(order, end)
        if failure is None:
            code = process.wait()
            raise DeviceError(f"the process that tries constraints ended as it started, with {code}")
        if failure:
            self.close()
            raise DeviceError(f"the process that tries constraints cannot be started: {failure}")
        return process

    def close(self) -> None:
        """End the process."""
        self._finalizer()
        self._process = None

    def exchange(self, order: object, end: float) -> Any:
        """Send a message and wait for the answer; None: the process died.

        If no answer comes by `end`, of `time.monotonic`, the process is ended, and TimeLimitError raised.
        """
        assert self._process is not None
        try:
            _send(self._process, order, end)
            head = _receive(self._process, 8, end)
            return json.loads(_receive(self._process, int.from_bytes(head, "little"), end))
        except (EOFError, BrokenPipeError):
            return None
        except BaseException:  # the time is over, or the caller was interrupted: an answer would be for another order
            self.close()
            raise


def _stack_bytes() -> int:
    """Half of the stack of a thread of this process."""
    limit = resource.getrlimit(resource.RLIMIT_STACK)[0]
    size = threading.stack_size() or (limit if limit != resource.RLIM_INFINITY else 2 << 20)
    return max(min(size, 8 << 20) // 2, 256 << 10) & -4096


def _send(process: subprocess.Popen[bytes], order: object, end: float) -> None:
    assert process.stdin is not None
    body = json.dumps(order).encode()
    rest = memoryview(len(body).to_bytes(8, "little") + body)
    while rest:
        _wait(process.stdin.fileno(), select.POLLOUT, end)
        rest = rest[os.write(process.stdin.fileno(), rest) :]


def _receive(process: subprocess.Popen[bytes], size: int, end: float) -> bytes:
    assert process.stdout is not None
    found = bytearray()
    while len(found) < size:
        _wait(process.stdout.fileno(), select.POLLIN, end)
        part = os.read(process.stdout.fileno(), size - len(found))
        if not part:
            raise EOFError
        found += part
    return bytes(found)


def _wait(descriptor: int, event: int, end: float) -> None:
    waiting = select.poll()
    waiting.register(descriptor, event)
    if not waiting.poll(max(end - time.monotonic(), 0) * 1000):
        raise TimeLimitError("the constraint was not compiled in time")


def _end(process: subprocess.Popen[bytes], parent: int) -> None:
    """Kill and reap a process; in a fork of its parent close the pipes alone."""
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    if os.getpid() == parent:
        process.kill()
        process.wait()
