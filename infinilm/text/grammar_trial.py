"""Tries grammars in processes of their own, so that a grammar that ends a process does not end that of the LLM.

The program of such a process is grammar_worker.py. It is started by `exec`, never by a fork alone, when the first
grammar comes or `start` is called, and ends with this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from infinilm.errors import DeviceError, RequestError, TimeLimitError

__all__ = ["GrammarTrial"]

_PROGRAM = Path(__file__).with_name("grammar_worker.py")
_NUM_WORKERS = 2  # the second starts when the first is busy: one slow grammar leaves room for others
_CPU_SECONDS = 3
# Where the system is too busy to give a process its seconds, or the process was stopped.
_WALL_SECONDS = 60.0
_NUM_TRIES = 2  # a process may die of what it did before, or be killed from outside
_MAX_REMEMBERED = 4096


class GrammarTrial:
    """Says of grammars whether they can be compiled. May be used by several threads.

    Parameters
    ----------
    vocabulary : callable
        Gives what the process needs to know of the model: "tokenizer", "vocab_size", "ends", "limits".
    """

    def __init__(self, vocabulary: Callable[[], Mapping[str, Any]]) -> None:
        self._vocabulary = vocabulary
        self._results: OrderedDict[bytes, str] = OrderedDict()  # by the hash of a grammar; the oldest first
        self._open()

    def _open(self) -> None:
        self._process = os.getpid()
        self._is_closed = False  # since a worker was taken last
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        for _ in range(_NUM_WORKERS):
            self._idle.put(_Worker(self._vocabulary))

    def start(self) -> None:
        """Start a process, so that the first grammar need not wait for it."""
        with self._worker(time.monotonic() + _WALL_SECONDS) as worker:
            worker.start(time.monotonic() + _WALL_SECONDS)

    def error(self, grammar: str, end: float) -> str:
        """What is wrong with a grammar, in llguidance's words, or "". No grammar is tried twice.

        Parameters
        ----------
        grammar : str
            In llguidance's own form.
        end : float
            When to give up, of `time.monotonic`.

        Raises
        ------
        RequestError
            The process did not survive it.
        TimeLimitError
            The time is over, or the system gives the process none.
        DeviceError
            No process can be started.
        """
        key = sha256(grammar.encode()).digest()
        result = self._results.get(key)
        if result is None:
            with self._worker(end) as worker:
                result = worker.ask(grammar, end)
            self._results[key] = result
            while len(self._results) > _MAX_REMEMBERED:
                self._results.popitem(last=False)
        if result.startswith(_DIED):
            raise RequestError(result.removeprefix(_DIED))
        return result

    @contextlib.contextmanager
    def _worker(self, end: float) -> Any:
        if self._process != os.getpid():  # after a fork: the processes talk to the parent
            self._open()
        try:
            worker = self._idle.get(timeout=min(max(end - time.monotonic(), 0), threading.TIMEOUT_MAX))
        except queue.Empty:
            raise TimeLimitError("the constraint was not compiled in time: others were compiled first") from None
        self._is_closed = False
        try:
            yield worker
        finally:
            self._idle.put(worker)
            if self._is_closed:
                self._close_idle()

    def close(self) -> None:
        """End the processes, those that try a grammar when they are done; the next grammar starts one again."""
        if self._process == os.getpid():
            self._is_closed = True
            self._close_idle()

    def _close_idle(self) -> None:
        taken: list[_Worker] = []  # by this thread, so that no other one uses them while they end
        with contextlib.suppress(queue.Empty):
            while True:
                taken.append(self._idle.get_nowait())
        for worker in reversed(taken):
            worker.close()
            self._idle.put(worker)


_DIED = "\0"  # begins a result that is no message of llguidance


class _Worker:
    """One process, which is started again after its death."""

    def __init__(self, vocabulary: Callable[[], Mapping[str, Any]]) -> None:
        self._vocabulary = vocabulary
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: Callable[[], object] = lambda: None

    def start(self, end: float) -> subprocess.Popen[bytes]:
        """Start the process, if it does not run."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        order = {**self._vocabulary(), "cpu_seconds": _CPU_SECONDS, "stack_bytes": _stack_bytes()}
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
        failure = self._exchange(process, order, end)
        if failure is None:
            code = process.wait()
            raise DeviceError(f"the process that tries constraints ended as it started, with {code}")
        if failure:
            self.close()
            raise DeviceError(f"the process that tries constraints cannot be started: {failure}")
        return process

    def ask(self, grammar: str, end: float) -> str:
        """Try a grammar; returns llguidance's error, or how the process died of it."""
        wall = time.monotonic() + _WALL_SECONDS
        try:
            return self._ask(grammar, min(end, wall))
        except TimeLimitError:
            if end <= wall:
                raise
            raise TimeLimitError(
                f"the constraint was not compiled within {_WALL_SECONDS:g} s, the limit of every constraint: the "
                "system is too busy"
            ) from None

    def _ask(self, grammar: str, end: float) -> str:
        for _ in range(_NUM_TRIES):
            process = self.start(end)
            error = self._exchange(process, grammar, end)
            if error is not None:
                return error
            code = process.wait()
            if code == -signal.SIGXCPU:
                return f"{_DIED}cannot be enforced: it takes more than {_CPU_SECONDS} s to compile"
        if code == -signal.SIGKILL:  # perhaps for lack of memory in the system: another time it may go well
            raise RequestError("cannot be enforced now: the process that tried it was killed")
        return f"{_DIED}cannot be enforced: llguidance does not survive it"

    def close(self) -> None:
        """End the process."""
        self._finalizer()
        self._process = None

    def _exchange(self, process: subprocess.Popen[bytes], order: object, end: float) -> str | None:
        """Send a message and wait for the answer; None: the process died. It is ended if the answer does not come."""
        try:
            _send(process, order, end)
            head = _receive(process, 8, end)
            return str(json.loads(_receive(process, int.from_bytes(head, "little"), end)))
        except (EOFError, BrokenPipeError):
            return None
        except BaseException:  # the time is over, or the caller was interrupted: an answer would be for another grammar
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
