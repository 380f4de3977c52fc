"""Calls that wait for their requests: streams of events, for threads and for asyncio, and prompts without output."""

from __future__ import annotations

import queue
from collections.abc import AsyncIterator, Callable, Iterator
from typing import cast

from infinilm.outputs import RequestOutput, TokenEvent
from infinilm.progress import can_show, progress_bar
from infinilm.requests.engine_thread import EngineThread
from infinilm.requests.mailbox import current_mailbox
from infinilm.requests.request import Completion, GenerationRequest, LogitsWork, News, Work, own_copy

__all__ = ["AsyncRequests", "arun_prompts", "astream", "finish", "run_prompts", "stream"]


def stream(thread: EngineThread, requests: list[GenerationRequest], *, ends_only: bool = False) -> Iterator[TokenEvent]:
    """Run requests and yield their events, or only the last event of each sequence. Leaving the loop cancels them.

    If no request succeeded, raises the first exception after the last event.
    """
    inbox: queue.SimpleQueue[News] = queue.SimpleQueue()
    num_open = _listen(requests, inbox.put, ends_only)
    try:
        thread.submit([work for request in requests for work in request.works])
        while num_open:
            thread.check_caller()
            event = _event(thread, inbox.get())
            if event is not None:
                num_open -= event.finish_reason is not None
                yield event
    finally:
        thread.cancel(_all_works(requests))
    _raise_failure(requests)


def finish(thread: EngineThread, requests: list[GenerationRequest], *, use_tqdm: bool) -> None:
    """Run requests to their ends, with a progress bar if `use_tqdm` is true and there is a terminal or notebook."""
    completions = [completion for request in requests for completion in request.completions]
    # The bar counts the tokens of a single sequence, after a delay, or the finished ones of several sequences.
    is_alone = len(completions) == 1 and use_tqdm and can_show()
    total, unit = (completions[0].max_new_tokens, "token") if is_alone else (len(completions), "prompt")
    wanted = use_tqdm and bool(completions)
    with progress_bar(total, "generating", unit, wanted=wanted, delay=1.0 if is_alone else 0.0) as advance:
        for _ in stream(thread, requests, ends_only=not is_alone):
            advance()


class AsyncRequests:
    """Requests that run, followed from asyncio. Made by `LLM.asubmit`, in the thread of the event loop.

    Leaving it as an async context manager cancels what is unfinished.
    """

    def __init__(
        self, llm: object, thread: EngineThread, requests: list[GenerationRequest], *, ends_only: bool = False
    ) -> None:
        import asyncio  # it takes a while, and most programs do without

        self._llm = llm  # kept alive: an LLM that nobody holds closes its thread
        self._thread = thread
        self._requests = requests
        self._news: list[News] = []
        self._changed = asyncio.Event()
        self._rests_until = 0.0  # by the clock of the loop, see `steps`
        mailbox = current_mailbox()
        self._time = mailbox.loop.time
        self._num_open = _listen(requests, lambda news: mailbox.put(self._take, news), ends_only)
        thread.submit([work for request in requests for work in request.works])

    def _take(self, news: News) -> None:
        self._news.append(news)
        if news.finish_reason is not None or self._time() >= self._rests_until:
            self._changed.set()

    async def steps(self, rest: Callable[[], float] | None = None) -> AsyncIterator[list[TokenEvent]]:
        """The events, those that came at the same time together.

        Raises, after the last, what made the requests fail, if none of them succeeded.

        Parameters
        ----------
        rest : callable, optional
            Gives seconds. Tokens that come sooner after those before wait, without a timer, for the first token that
            comes later, or the first end. So a fast model does not wake its reader for every token, and every token of
            a slow one is there at once.
        """
        while self._num_open:
            self._thread.check_caller()
            await self._changed.wait()
            self._changed.clear()
            self._rests_until = self._time() + rest() if rest is not None else 0.0
            news, self._news = self._news, []
            events = [event for event in (_event(self._thread, item) for item in news) if event is not None]
            self._num_open -= sum(event.finish_reason is not None for event in events)
            if events:
                yield events
        _raise_failure(self._requests)

    async def wait(self) -> list[RequestOutput]:
        """Wait for the ends; returns what `outputs` does. Raises what made the requests fail, if all of them did."""
        async for _ in self.steps():
            pass
        return self.outputs()

    def outputs(self) -> list[RequestOutput]:
        """Everything so far, one for each prompt."""
        return [request.output() for request in self._requests]

    @property
    def has_begun(self) -> bool:
        """Whether every prompt has been computed: each has its first token, or has ended."""
        return all(request.has_begun for request in self._requests)

    def cancel(self) -> None:
        """End what is unfinished as soon as the step that runs is done."""
        self._thread.cancel(_all_works(self._requests))

    async def __aenter__(self) -> AsyncRequests:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()


async def astream(
    thread: EngineThread, requests: list[GenerationRequest], *, ends_only: bool = False
) -> AsyncIterator[TokenEvent]:
    """`stream` for asyncio."""
    async with AsyncRequests(None, thread, requests, ends_only=ends_only) as running:
        async for events in running.steps():
            for event in events:
                yield event


def run_prompts(thread: EngineThread, works: list[LogitsWork]) -> None:
    """Run prompts to their ends; raises the first failure."""
    ends: queue.SimpleQueue[News] = queue.SimpleQueue()
    for work in works:
        work.deliver = ends.put
    try:
        thread.submit(works)
        for _ in works:
            if (error := ends.get().error) is not None:
                raise own_copy(error)
    finally:
        thread.cancel(works)


async def arun_prompts(thread: EngineThread, works: list[LogitsWork]) -> None:
    """`run_prompts` for asyncio."""
    import asyncio  # it takes a while, and most programs do without

    mailbox = current_mailbox()
    ends: asyncio.Queue[News] = asyncio.Queue()
    for work in works:
        work.deliver = lambda news: mailbox.put(ends.put_nowait, news)
    try:
        thread.submit(works)
        for _ in works:
            if (error := (await ends.get()).error) is not None:
                raise own_copy(error)
    finally:
        thread.cancel(works)


def _all_works(requests: list[GenerationRequest]) -> list[Work]:
    return [work for request in requests for work in request.all_works]


def _listen(requests: list[GenerationRequest], deliver: Callable[[News], object], ends_only: bool) -> int:
    """Deliver the news of requests to `deliver`; returns the number of sequences."""
    for request in requests:
        request.listen(deliver, ends_only=ends_only)
    return sum(len(request.completions) for request in requests)


def _event(thread: EngineThread, news: News) -> TokenEvent | None:
    """The event of a completion's news. A completion whose text cannot be decoded is cancelled."""
    event = cast(Completion, news.work).reader.event(news)
    if event is not None and event.error is not None:
        thread.cancel([news.work])
    return event


def _raise_failure(requests: list[GenerationRequest]) -> None:
    """Raise the first failure if no request succeeded. Otherwise the results of the others would be lost."""
    failures = [request.failure for request in requests]
    if failures and failures[0] is not None and all(failure is not None for failure in failures):
        raise failures[0]
