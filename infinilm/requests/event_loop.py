"""News of requests for asyncio: an event loop is woken once for all that a step tells its requests."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import ClassVar

from infinilm.outputs import RequestOutput, TokenEvent
from infinilm.requests.engine_thread import EngineThread, completion_event
from infinilm.requests.request import GenerationRequest, News, raise_failure

__all__ = ["AsyncRequests"]


class LoopInbox:
    """News of some requests, for a coroutine that waits for them. Made and read in the thread of the event loop.

    A token's way into an event loop costs a system call, if it goes alone. So the engine thread only puts news here,
    and calls what `deliver` returned once it has told all requests: one wake-up for the loop, however many inboxes it
    has.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._mail = _Mail.of(self._loop)
        self._news: list[News] = []
        self._waiter: asyncio.Future[None] | None = None

    def deliver(self, news: News) -> Callable[[], object]:
        """Take news from the engine thread; returns what it is to call when all are told."""
        if self._loop.is_closed():
            raise RuntimeError("the event loop that waits for it is closed")
        self._mail.letters.append((self, news))
        return self._mail.send

    async def get(self) -> list[News]:
        """All news there are, at least one, in order. One coroutine at a time."""
        while not self._news:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        news, self._news = self._news, []
        return news

    def _take(self, news: News) -> None:
        self._news.append(news)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class AsyncRequests:
    """Requests that run, followed from asyncio. Made by `LLM.asubmit`, in the thread of the event loop.

    Leaving it as an async context manager cancels what is unfinished.
    """

    def __init__(
        self, llm: object, thread: EngineThread, requests: list[GenerationRequest], *, ends_only: bool = False
    ) -> None:
        self._llm = llm  # kept alive: an LLM that nobody holds closes its thread
        self._thread = thread
        self._requests = requests
        self._inbox = LoopInbox()
        self._num_open = sum(len(request.completions) for request in requests)
        for request in requests:
            request.listen(self._inbox.deliver, ends_only=ends_only)
        thread.submit([work for request in requests for work in request.works])

    async def steps(self) -> AsyncIterator[list[TokenEvent]]:
        """The events, those that came at the same time together.

        Raises, after the last, what made the requests fail, if none of them succeeded.
        """
        while self._num_open:
            events: list[TokenEvent] = []
            for news in await self._inbox.get():
                event = completion_event(news, self._thread)
                if event is not None:
                    self._num_open -= event.finish_reason is not None
                    events.append(event)
            if events:
                yield events
        raise_failure(self._requests)

    async def wait(self) -> list[RequestOutput]:
        """Wait for the ends; returns what `outputs` does. Raises what made the requests fail, if all of them did."""
        async for _ in self.steps():
            pass
        return self.outputs()

    def outputs(self) -> list[RequestOutput]:
        """Everything so far, one for each prompt."""
        return [request.output() for request in self._requests]

    def cancel(self) -> None:
        """End what is unfinished as soon as the step that runs is done."""
        self._thread.cancel([work for request in self._requests for work in request.all_works])

    async def __aenter__(self) -> AsyncRequests:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()


class _Mail:
    """What is on its way into one event loop."""

    _of_loop: ClassVar[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Mail]] = weakref.WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.letters: deque[tuple[LoopInbox, News]] = deque()
        self._loop = weakref.ref(loop)

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> _Mail:
        """The one of a loop; called in its thread."""
        mail = cls._of_loop.get(loop)
        if mail is None:
            mail = cls._of_loop[loop] = cls(loop)
        return mail

    def send(self) -> None:
        """Wake the loop; called by engine threads."""
        loop = self._loop()
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._hand_out)

    def _hand_out(self) -> None:
        while self.letters:
            inbox, news = self.letters.popleft()
            inbox._take(news)
