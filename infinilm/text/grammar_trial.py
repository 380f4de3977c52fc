"""Tries grammars in processes of their own, so that a grammar that ends a process does not end that of the LLM."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from typing import Any

from infinilm.errors import RequestError, TimeLimitError
from infinilm.text.grammar_process import GrammarProcess

__all__ = ["GrammarTrial"]

_NUM_WORKERS = 2  # the second starts when the first is busy: one slow grammar leaves room for others
_CPU_SECONDS = 3
# Where the system is too busy to give a process its seconds, or the process was stopped.
_WALL_SECONDS = 60.0
_NUM_TRIES = 2  # a process may die of what it did before, or be killed from outside
_MAX_REMEMBERED = 4096
_DIED = "\0"  # begins a result that is no message of llguidance


class GrammarTrial:
    """Says of grammars whether they can be compiled. May be used by several threads.

    Parameters
    ----------
    vocabulary : callable
        As `GrammarProcess` takes it.
    """

    def __init__(self, vocabulary: Callable[[], Mapping[str, Any]]) -> None:
        self._vocabulary = vocabulary
        self._results: OrderedDict[bytes, str] = OrderedDict()  # by the hash of a grammar; the oldest first
        self._open()

    def _open(self) -> None:
        self._process = os.getpid()
        self._is_closed = False  # since a worker was taken last
        self._idle: queue.LifoQueue[GrammarProcess] = queue.LifoQueue()
        for _ in range(_NUM_WORKERS):
            self._idle.put(GrammarProcess(self._vocabulary))

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
                result = _tried(worker, grammar, end)
            self._results[key] = result
            while len(self._results) > _MAX_REMEMBERED:
                self._results.popitem(last=False)
        if result.startswith(_DIED):
            raise RequestError(result.removeprefix(_DIED))
        return result

    @contextlib.contextmanager
    def _worker(self, end: float) -> Iterator[GrammarProcess]:
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
        taken: list[GrammarProcess] = []  # by this thread, so that no other one uses them while they end
        with contextlib.suppress(queue.Empty):
            while True:
                taken.append(self._idle.get_nowait())
        for worker in reversed(taken):
            worker.close()
            self._idle.put(worker)


def _tried(worker: GrammarProcess, grammar: str, end: float) -> str:
    """Try a grammar; returns llguidance's error, or how the process died of it."""
    wall = time.monotonic() + _WALL_SECONDS
    try:
        for _ in range(_NUM_TRIES):
            process = worker.start(min(end, wall))
            reply = worker.exchange({"try": grammar, "seconds": _CPU_SECONDS}, min(end, wall))
            if reply is not None:
                return str(reply)
            code = process.wait()
            if code == -signal.SIGPROF:
                return f"{_DIED}cannot be enforced: it takes more than {_CPU_SECONDS} s to compile"
    except TimeLimitError:
        if end <= wall:
            raise
        raise TimeLimitError(
            f"the constraint was not compiled within {_WALL_SECONDS:g} s, the limit of every constraint: the "
            "system is too busy"
        ) from None
    if code == -signal.SIGKILL:  # perhaps for lack of memory in the system: another time it may go well
        raise RequestError("cannot be enforced now: the process that tried it was killed")
    return f"{_DIED}cannot be enforced: llguidance does not survive it"
