"""The handle that `LLM.submit` gives: wait for a request, follow its events, cancel it."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

from infinilm.checks import OfThisProcess
from infinilm.errors import RequestError
from infinilm.outputs import RequestOutput, TokenEvent
from infinilm.requests.engine_thread import EngineThread
from infinilm.requests.mailbox import current_mailbox
from infinilm.requests.request import CompletionReader, GenerationRequest, News, Work, failure_of

if TYPE_CHECKING:
    import asyncio

__all__ = ["Request"]

_LONGEST_WAIT = 86400.0  # seconds at a time: the system has a limit

Wakers = list[Callable[[], object]]
Readers = dict[Work, CompletionReader]


class _NewsLog:
    """The news of a request, kept for any number of readers.

    The engine thread takes no lock here, and no reader has a part in the state: whatever interrupts one of them, such
    as an exception from a signal handler, harms nobody else.
    """

    def __init__(self, num_completions: int, check_caller: Callable[[], object]) -> None:
        self._check_caller = check_caller
        self._news: list[News] = []
        self._num_open = num_completions
        self._news_wakers: Wakers = []  # of those that wait now for any news
        self._end_wakers: Wakers = []  # and of those that wait for the end

    def append(self, news: News) -> None:
        """Add news; called by the engine thread, which has no time."""
        self._news.append(news)
        if news.finish_reason is not None:
            self._num_open -= 1
            if self._num_open == 0:
                self._wake(self._end_wakers)
        if self._news_wakers:
            self._wake(self._news_wakers)

    def _wake(self, wakers: Wakers) -> None:
        for wake in tuple(wakers):
            with contextlib.suppress(RuntimeError):  # an event loop that is closed: nobody reads there any more
                wake()

    @property
    def done(self) -> bool:
        return self._num_open == 0

    @property
    def so_far(self) -> list[News]:
        return self._news.copy()

    def wait(self, timeout: float | None) -> bool:
        """Wait for the end; returns whether it came in time."""
        return self._wait_until(lambda: self.done, self._end_wakers, timeout)

    async def await_end(self) -> None:
        """`wait` for asyncio."""
        with self._awakened(self._end_wakers) as changed:
            while not self.done:
                self._check_caller()
                await changed.wait()

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
            self._wait_until(is_there, self._news_wakers, None)

    async def aread(self) -> AsyncIterator[News]:
        """`read` for asyncio."""
        position = 0
        with self._awakened(self._news_wakers) as changed:
            while True:
                changed.clear()
                is_last = self.done
                while position < len(self._news):
                    yield self._news[position]
                    position += 1
                if is_last:
                    return
                self._check_caller()
                await changed.wait()

    def _wait_until(self, condition: Callable[[], bool], wakers: Wakers, timeout: float | None) -> bool:
        if condition():
            return True
        self._check_caller()
        deadline = None if timeout is None else time.monotonic() + timeout
        bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        with _added(wakers, lambda: bell.put(None)):  # before the look at the condition: nothing comes unnoticed
            while not condition():
                rest = None if deadline is None else min(deadline - time.monotonic(), _LONGEST_WAIT)
                if rest is not None and rest <= 0:
                    return False
                with contextlib.suppress(queue.Empty):
                    bell.get(timeout=rest)
            return True

    @contextlib.contextmanager
    def _awakened(self, wakers: Wakers) -> Iterator[asyncio.Event]:
        """An event of the running loop that is set whenever the wakers are called."""
        import asyncio  # it takes a while, and most programs do without

        mailbox = current_mailbox()
        changed = asyncio.Event()
        with _added(wakers, lambda: mailbox.put(changed.set)):
            yield changed


@contextlib.contextmanager
def _added(wakers: Wakers, wake: Callable[[], object]) -> Iterator[None]:
    """Among the wakers meanwhile."""
    try:
        wakers.append(wake)
        yield
    finally:
        with contextlib.suppress(ValueError):
            wakers.remove(wake)


class Request(OfThisProcess):
    """A request that runs: wait for its result, follow its events, or cancel it. Made by `LLM.submit`.

    In asyncio ``await request`` is its result, and ``async for event in request`` follows it; a task that is cancelled
    while it waits leaves the request running, as a timeout does.

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
        return self._finished()

    def output(self) -> RequestOutput:
        """Everything so far; never waits, and raises nothing that went wrong: that is in the completions."""
        if self._is_read:
            return self._request.output()
        readers = self._new_readers()
        for news in self._log.so_far:
            readers[news.work].event(news)
        return self._request.output(readers)

    def cancel(self) -> None:
        """End it as soon as the step that runs is done; what there is by then is the result, "abort" its reason."""
        self._thread.cancel(self._request.all_works)

    def __iter__(self) -> Iterator[TokenEvent]:
        """Every event from the first to the last, waiting for those to come; each iteration begins anew.

        Raises, after the last event, whatever made the request fail.
        """
        readers = self._new_readers()
        for news in self._log.read():
            yield from self._events(readers, news)
        self._end(readers)

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        """`result` for asyncio."""
        return self._wait().__await__()

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        """Iterate as `__iter__` does, for asyncio."""
        readers = self._new_readers()
        async for news in self._log.aread():
            for event in self._events(readers, news):
                yield event
        self._end(readers)

    async def _wait(self) -> RequestOutput:
        await self._log.await_end()
        return self._finished()

    def _finished(self) -> RequestOutput:
        if not self._is_read:  # the text in one go, from the last news of each completion
            readers = self._new_readers()
            for news in self._log.so_far:
                if news.finish_reason is not None:
                    readers[news.work].event(news)
            self._keep(readers)
        if (error := self._request.failure) is not None:
            raise error
        return self._request.output()

    def _new_readers(self) -> Readers:
        return {completion: CompletionReader(completion) for completion in self._request.completions}

    def _events(self, readers: Readers, news: News) -> Iterator[TokenEvent]:
        """The event of news, if there is one; a completion whose text cannot be made is cancelled."""
        event = readers[news.work].event(news)
        if event is not None:
            if event.error is not None:
                self._thread.cancel([news.work])
            yield event

    def _end(self, readers: Readers) -> None:
        """Those who have made all events; raises what made the request fail."""
        self._keep(readers)
        if (error := failure_of(readers.values())) is not None:
            raise error

    def _keep(self, readers: Readers) -> None:
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
