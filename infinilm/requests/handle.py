"""The handle that `LLM.submit` gives: wait for a request, follow its events, cancel it."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Generator, Iterator, Mapping

from infinilm.errors import RequestError
from infinilm.outputs import RequestOutput, TokenEvent
from infinilm.requests.engine_thread import EngineThread
from infinilm.requests.request import CompletionReader, GenerationRequest, News, Work, failure_of

__all__ = ["Request"]

_LONGEST_WAIT = 86400.0  # seconds at a time: the system has a limit


class _NewsLog:
    """The news of a request, kept for any number of readers.

    The engine thread takes no lock here, and no reader has a part in the state: whatever interrupts one of them, such
    as an exception from a signal handler, harms nobody else.
    """

    def __init__(self, num_completions: int, check_caller: Callable[[], object]) -> None:
        self._check_caller = check_caller
        self._news: list[News] = []
        self._num_open = num_completions
        # Of those that wait now, for any news and for the end: each is put something in.
        self._readers: list[queue.SimpleQueue[None]] = []
        self._waiters: list[queue.SimpleQueue[None]] = []

    def append(self, news: News) -> None:
        """Add news; called by the engine thread, which has no time."""
        self._news.append(news)
        if news.finish_reason is not None:
            self._num_open -= 1
            if self._num_open == 0:
                for waiter in tuple(self._waiters):
                    waiter.put(None)
        for reader in tuple(self._readers):
            reader.put(None)

    @property
    def done(self) -> bool:
        return self._num_open == 0

    def wait(self, timeout: float | None) -> bool:
        """Wait for the end; returns whether it came in time."""
        return self._wait_until(lambda: self.done, self._waiters, timeout)

    def read(self) -> Iterator[News]:
        """All news, from the first to the last."""
        position = 0

        def is_there() -> bool:
            return len(self._news) > position or self.done

        while True:
            is_last = self.done  # looked at before the news: nothing comes after it
            while position < len(self._news):
                yield self._news[position]
                position += 1
            if is_last:
                return
            self._wait_until(is_there, self._readers, None)

    def _wait_until(
        self, condition: Callable[[], bool], bells: list[queue.SimpleQueue[None]], timeout: float | None
    ) -> bool:
        if condition():
            return True
        self._check_caller()
        deadline = None if timeout is None else time.monotonic() + timeout
        bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        try:
            bells.append(bell)  # before the look at the condition: nothing comes unnoticed after it
            while not condition():
                rest = None if deadline is None else min(deadline - time.monotonic(), _LONGEST_WAIT)
                if rest is not None and rest <= 0:
                    return False
                with contextlib.suppress(queue.Empty):
                    bell.get(timeout=rest)
            return True
        finally:
            with contextlib.suppress(ValueError):
                bells.remove(bell)


class Request:
    """A request that runs: wait for its result, follow its events, or cancel it. Made by `LLM.submit`.

    It may be used from several threads. Letting go of the last reference cancels it, since nobody could see its
    result.
    """

    def __init__(self, llm: object, thread: EngineThread, request: GenerationRequest) -> None:
        self._llm = llm  # kept alive: an LLM that nobody holds closes its thread
        self._thread = thread
        self._request = request
        self._log = _NewsLog(len(request.completions), thread.check_caller)
        self._is_read = False  # somebody has read to the end, so that there is text for a result
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
        InfinilmError
            It is not done, and this is a hook or a logits_processor of its LLM, which waits for it; or this process was
            forked from the one that runs it (EngineDeadError).
        Exception
            Whatever made the request fail.
        """
        if timeout is not None and (
            isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout >= 0
        ):
            raise RequestError(f"timeout must be a number of seconds >= 0, or None, got {timeout!r}")
        if not self._log.wait(timeout):
            raise TimeoutError(f"request {self.request_id} was not done after {timeout} s; it goes on")
        if not self._is_read:  # the text in one go, from the last news of each completion
            readers = self._new_readers()
            for news in self._log.read():
                if news.finish_reason is not None:
                    readers[news.work].event(news)
            self._keep(readers)
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
        readers = yield from self._read()
        if (error := failure_of(readers)) is not None:
            raise error

    def _read(self) -> Generator[TokenEvent, None, list[CompletionReader]]:
        """Every event; returns those who made them, one for each completion."""
        readers = self._new_readers()
        for news in self._log.read():
            event = readers[news.work].event(news)
            if event is not None:
                if event.error is not None:
                    self._thread.cancel([news.work])
                yield event
        self._keep(readers)
        return list(readers.values())

    def _new_readers(self) -> dict[Work, CompletionReader]:
        return {completion: CompletionReader(completion) for completion in self._request.completions}

    def _keep(self, readers: Mapping[Work, CompletionReader]) -> None:
        """Let the result have the text of readers who have come to the end."""
        if not self._is_read:
            for completion in self._request.completions:
                completion.reader = readers[completion]
            self._is_read = True

    def __repr__(self) -> str:
        return f"<Request {self.request_id}, {'done' if self.done else 'running'}>"

    def __del__(self) -> None:
        # Never waits: the garbage collector may call this anywhere.
        if "_log" in self.__dict__ and not self.done:
            self._thread.cancel(self._request.all_works)
