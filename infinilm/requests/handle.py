"""The handle that `LLM.submit` gives: wait for a request, follow its events, cancel it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import cast

from infinilm.errors import RequestError
from infinilm.outputs import RequestOutput, TokenEvent
from infinilm.requests.engine_thread import EngineThread
from infinilm.requests.request import Completion, GenerationRequest, News, Work

__all__ = ["Request"]


class _EventLog:
    """The events of a request, kept for any number of readers, who make them of the news."""

    def __init__(self, num_completions: int, cancel: Callable[[list[Work]], object]) -> None:
        self._cancel = cancel
        self._lock = threading.Condition()
        self._num_waiting = 0  # readers
        self._news: list[News] = []
        self._num_read = 0  # news that events were made of
        self._events: list[TokenEvent] = []
        self._num_open = num_completions
        self._done = threading.Event()

    def append(self, news: News) -> None:
        """Add news; called by the engine thread, which has no time: a lock is taken only where somebody waits."""
        self._news.append(news)
        if news.finish_reason is not None:
            self._num_open -= 1
            if self._num_open == 0:
                self._done.set()
        if self._num_waiting:
            with self._lock:
                self._lock.notify_all()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout: float | None) -> bool:
        """Wait for the end, with all events made; returns whether it came in time."""
        if not self._done.wait(timeout):
            return False
        with self._lock:
            self._make_events()
        return True

    def read(self) -> Iterator[TokenEvent]:
        position = 0
        while True:
            with self._lock:
                self._num_waiting += 1  # before the look at what there is: nothing comes unnoticed after it
                try:
                    while not (self._make_events() > position or self.done):
                        self._lock.wait()
                finally:
                    self._num_waiting -= 1
                if self._make_events() == position:
                    return
                event = self._events[position]
            position += 1
            yield event

    def _make_events(self) -> int:
        """Turn news into events, under the lock; returns the number of events."""
        while self._num_read < len(self._news):
            news = self._news[self._num_read]
            self._num_read += 1
            event = cast(Completion, news.work).event(news)
            if event is not None:
                self._events.append(event)
                if event.error is not None:
                    self._cancel([news.work])
        return len(self._events)


class Request:
    """A request that runs: wait for its result, follow its events, or cancel it. Made by `LLM.submit`.

    It may be used from several threads. Letting go of the last reference cancels it, since nobody could see its
    result.
    """

    def __init__(self, llm: object, thread: EngineThread, request: GenerationRequest) -> None:
        self._llm = llm  # kept alive: an LLM that nobody holds closes its thread
        self._thread = thread
        self._request = request
        self._log = _EventLog(len(request.completions), thread.cancel)
        request.listen(self._log.append)

    @property
    def request_id(self) -> str:
        """As in the events and the result."""
        return self._request.request_id

    @property
    def done(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self._log.done

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the end and return everything.

        Parameters
        ----------
        timeout
            Seconds; None: for as long as it takes.

        Raises
        ------
        TimeoutError
            Not done by then; the request goes on.
        Exception
            Whatever made the request fail.
        """
        if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or timeout < 0):
            raise RequestError(f"timeout must be a number of seconds >= 0, or None, got {timeout!r}")
        if not self._log.wait(timeout):
            raise TimeoutError(f"request {self.request_id} was not done after {timeout} s; it goes on")
        if (error := self._request.failure) is not None:
            raise error
        return self._request.output()

    def cancel(self) -> None:
        """End it as soon as the step that runs is done; what there is by then is the result, "abort" its reason."""
        self._thread.cancel(self._request.all_works)

    def __iter__(self) -> Iterator[TokenEvent]:
        """Every event from the first to the last, waiting for those to come; each iteration begins anew.

        Raises, after the last event, whatever made the request fail.
        """
        yield from self._log.read()
        if (error := self._request.failure) is not None:
            raise error

    def __repr__(self) -> str:
        return f"<Request {self.request_id}, {'done' if self.done else 'running'}>"

    def __del__(self) -> None:
        # Never waits: the garbage collector may call this anywhere.
        if "_log" in self.__dict__ and not self.done:
            self._thread.cancel(self._request.all_works)
