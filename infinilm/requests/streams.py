"""Calls that wait for their requests: streams of events, for threads and for asyncio, and prompts without output."""

from __future__ import annotations

import contextlib
import queue
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import cast

from infinilm.errors import own_copy
from infinilm.outputs import RequestOutput, TokenEvent
from infinilm.progress import can_show, progress_bar
from infinilm.requests.engine_thread import EngineThread
from infinilm.requests.feed import Drawn, Feed
from infinilm.requests.mailbox import current_mailbox
from infinilm.requests.request import Completion, Delta, GenerationRequest, LogitsWork, News, Work

__all__ = ["AsyncRequests", "afinish", "arun_prompts", "astream", "finish", "run_prompts", "stream"]


def stream(
    llm: object,
    thread: EngineThread,
    drawn: Drawn[GenerationRequest],
    *,
    ends_only: bool = False,
    take: Callable[[GenerationRequest], object] | None = None,
) -> Iterator[TokenEvent]:
    """Run requests and yield their events, or only the last event of each sequence. Leaving the loop cancels them.

    `take` gets each request when it has ended. `llm` is kept alive until then: an LLM that nothing refers to closes
    its thread. If no request succeeded, raises the first exception after the last event.
    """
    inbox: queue.SimpleQueue[News] = queue.SimpleQueue()
    feed = Feed(thread, drawn, inbox.put, ends_only=ends_only)
    results = _Results(take)
    try:
        while feed.fill(inbox.empty):
            thread.check_caller()
            with contextlib.suppress(queue.Empty):
                event = results.hear(thread, feed, inbox.get(timeout=feed.patience))
                if event is not None:
                    yield event
    finally:
        feed.cancel()
    results.raise_failure()


def finish(
    llm: object, thread: EngineThread, drawn: Drawn[GenerationRequest], *, use_tqdm: bool
) -> list[RequestOutput]:
    """Run requests to their ends, with a progress bar if `use_tqdm` is true and there is a terminal or notebook."""
    outputs: dict[int, RequestOutput] = {}

    def take(request: GenerationRequest) -> None:
        outputs[request.completions[0].prompt_index] = request.output()
        rates.add(len(request.completions[0].sequence.prompt_token_ids), sum(map(_num_tokens, request.completions)))

    # The bar counts the tokens of a single sequence, after a delay, or the finished ones of several sequences.
    total, unit, delay = drawn.total, "prompt", 0.0
    is_alone = total == 1 and use_tqdm and can_show()
    if is_alone:
        (request,) = drawn.units
        total, unit, delay = request.completions[0].max_new_tokens, "token", 1.0
        drawn = Drawn(iter((request,)), 1, drawn.room)
    with progress_bar(total, "generating", unit, wanted=use_tqdm and total != 0, delay=delay) as advance:
        rates = _Rates()
        for _ in stream(llm, thread, drawn, ends_only=not is_alone, take=take):
            advance(1, "" if is_alone else rates)
    return [outputs[index] for index in sorted(outputs)]


def _num_tokens(completion: Completion) -> int:
    return len(completion.sequence.output_token_ids)


class _Rates:
    """Tokens per second of a call so far: as text, what a progress bar shows behind the number of prompts."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self._num_in = self._num_out = 0

    def add(self, num_in: int, num_out: int = 0) -> None:
        self._num_in += num_in
        self._num_out += num_out

    def __str__(self) -> str:
        seconds = max(time.perf_counter() - self._begin, 1e-9)
        generated = f", out {self._num_out / seconds:.0f}" if self._num_out else ""
        return f"in {self._num_in / seconds:.0f}{generated} tokens/s"


class _Results:
    """What has come of the requests of a call.

    Parameters
    ----------
    take : callable, optional
        Gets each request when it has ended.
    """

    def __init__(self, take: Callable[[GenerationRequest], object] | None) -> None:
        self._take = take
        self._has_success = False
        self._failures: dict[int, BaseException] = {}  # of the first failed prompts; while there is no success

    def hear(self, thread: EngineThread, feed: Feed[GenerationRequest], news: News) -> TokenEvent | None:
        """The event of news. A completion whose text cannot be decoded is cancelled."""
        event = _event(thread, news)
        if event is not None and event.finish_reason is not None:
            request = feed.hear(news.work)
            if request is not None:
                self._end(request)
        return event

    def _end(self, request: GenerationRequest) -> None:
        if not self._has_success:
            failure = request.failure
            if failure is None:
                self._has_success = True
                self._failures.clear()
            else:
                index = request.completions[0].prompt_index
                if index < min(self._failures, default=index + 1):
                    self._failures = {index: failure}
        if self._take is not None:
            self._take(request)

    def raise_failure(self) -> None:
        """Raise the first failure if no request succeeded. Otherwise the results of the others would be lost."""
        for failure in self._failures.values():
            raise failure


class AsyncRequests:
    """Requests that run, followed from asyncio. Made by `LLM.asubmit`, in the thread of the event loop.

    Leaving it as an async context manager cancels what is unfinished.
    """

    def __init__(
        self, llm: object, thread: EngineThread, requests: list[GenerationRequest], *, ends_only: bool = False
    ) -> None:
        import asyncio  # it takes a while, and most programs do without

        self._llm = llm  # kept alive, as by `stream`
        self._thread = thread
        self._requests = requests
        self._completions = [completion for request in requests for completion in request.completions]
        self._news: deque[News] = deque()
        self._final: list[RequestOutput] | None = None
        self._changed = asyncio.Event()
        self._rests = False  # tokens wait, see `deltas`
        self._mailbox = current_mailbox()
        self._num_open = _listen(requests, self._hear, ends_only)
        thread.submit([work for request in requests for work in request.works])

    def _hear(self, news: News) -> None:
        """Take in news, in the engine thread."""
        self._news.append(news)
        if news.finish_reason is not None or not self._rests or self._mailbox.loop.is_closed():
            self._mailbox.put(self._changed.set)

    def _rest(self, rests: bool) -> None:
        self._rests = rests
        for completion in self._completions:
            completion.rests_in = self._mailbox.loop if rests else None

    def _end_rest(self) -> None:
        # First the engine thread is told: of a token that comes after this look there is news.
        self._rest(False)
        plain = [c for c in self._completions if c.sequence.owner_sees_end_only]
        # The news of an end, which may be there already, stays the last.
        self._news.extendleft([News(c, is_next=True) for c in plain if c.reader.has_more])
        if self._news:
            self._changed.set()

    async def _groups(self, rest: Callable[[], float] | None = None) -> AsyncIterator[list[News]]:
        """The news, those that came at the same time together. Raises as `steps` does."""
        self._thread.check_caller()
        while self._num_open:
            await self._changed.wait()
            self._changed.clear()
            news = [self._news.popleft() for _ in range(len(self._news))]  # the engine thread adds to it meanwhile
            if news:
                if rest is not None and not self._rests and (seconds := rest()) > 0:
                    self._rest(True)
                    self._mailbox.call_after(seconds, self._end_rest)
                yield news
        _raise_failure(self._requests)

    async def steps(self) -> AsyncIterator[list[TokenEvent]]:
        """The events, those that came at the same time together; in place of `deltas`, never beside it.

        Raises, after the last, what made the requests fail, if none of them succeeded.
        """
        async for news in self._groups():
            events = [event for event in (_event(self._thread, item) for item in news) if event is not None]
            self._num_open -= sum(event.finish_reason is not None for event in events)
            if events:
                yield events

    async def deltas(self, rest: Callable[[], float]) -> AsyncIterator[list[Delta]]:
        """What the completions have gained, one `Delta` for each that has news. Raises as `steps` does.

        Requests are read by this or by `steps`, from the first token to the last: tokens that rest have no events, so
        that `steps` behind it would leave them out.

        Parameters
        ----------
        rest : callable
            Gives seconds. Tokens that come sooner than that after those before wait for each other, but first tokens
            and ends wait for nothing. So a fast model does not wake its reader for every token, and of tokens of plain
            sequences that wait so the engine thread tells nothing: the reader looks for them.
        """
        async for news in self._groups(rest):
            deltas: list[Delta] = []
            for work, items in self._of_works(news):
                delta = cast(Completion, work).reader.delta(items)
                if delta is None:
                    continue
                if delta.error is not None:
                    self._thread.cancel([work])
                self._num_open -= delta.finish_reason is not None
                deltas.append(delta)
            if deltas:
                yield deltas

    def _of_works(self, news: list[News]) -> Iterable[tuple[Work, list[News]]]:
        """The news of each completion."""
        if len(self._completions) == 1:
            return [(news[0].work, news)]
        of_work: dict[Work, list[News]] = {}
        for item in news:
            of_work.setdefault(item.work, []).append(item)
        return of_work.items()

    def given(self) -> list[Delta]:
        """The tokens that came with the prompts as `output_token_ids`, and their text, which `deltas` leaves out."""
        return [completion.reader.given() for completion in self._completions if completion.num_given]

    @property
    def requests(self) -> Sequence[GenerationRequest]:
        """One for each prompt, with all that the engine knows of it now."""
        return self._requests

    @property
    def seed(self) -> int:
        """Of the first completion: the one that it was given, or that was drawn for it."""
        return self._requests[0].completions[0].sequence.seed

    async def wait(self) -> list[RequestOutput]:
        """Wait for the ends; returns what `outputs` does. Raises what made the requests fail, if all of them did."""
        async for _ in self.steps():
            pass
        return self.outputs()

    def outputs(self) -> list[RequestOutput]:
        """Everything so far, one for each prompt."""
        if self._final is not None:
            return self._final
        outputs = [request.output() for request in self._requests]
        if not self._num_open:
            self._final = outputs
        return outputs

    @property
    def has_ended(self) -> bool:
        """Whether the last event of every completion was given."""
        return not self._num_open

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
    llm: object,
    thread: EngineThread,
    drawn: Drawn[GenerationRequest],
    *,
    ends_only: bool = False,
    take: Callable[[GenerationRequest], object] | None = None,
) -> AsyncIterator[TokenEvent]:
    """`stream` for asyncio."""
    import asyncio  # it takes a while, and most programs do without

    mailbox = current_mailbox()
    inbox: asyncio.Queue[News] = asyncio.Queue()
    feed = Feed(thread, drawn, lambda news: mailbox.put(inbox.put_nowait, news), ends_only=ends_only)
    results = _Results(take)
    try:
        while feed.fill(inbox.empty):
            thread.check_caller()
            with contextlib.suppress(asyncio.TimeoutError):
                event = results.hear(thread, feed, await asyncio.wait_for(inbox.get(), feed.patience))
                if event is not None:
                    yield event
    finally:
        feed.cancel()
    results.raise_failure()


async def afinish(llm: object, thread: EngineThread, drawn: Drawn[GenerationRequest]) -> list[RequestOutput]:
    """`finish` for asyncio, without a bar."""
    outputs: dict[int, RequestOutput] = {}

    def take(request: GenerationRequest) -> None:
        outputs[request.completions[0].prompt_index] = request.output()

    async for _ in astream(llm, thread, drawn, ends_only=True, take=take):
        pass
    return [outputs[index] for index in sorted(outputs)]


def run_prompts(
    thread: EngineThread, drawn: Drawn[LogitsWork], advance: Callable[..., None] = lambda count, note: None
) -> None:
    """Run prompts to their ends; raises the first failure. `advance` moves a progress bar."""
    ends: queue.SimpleQueue[News] = queue.SimpleQueue()
    feed, rates = Feed(thread, drawn, ends.put), _Rates()
    try:
        while feed.fill(ends.empty):
            thread.check_caller()
            with contextlib.suppress(queue.Empty):
                _hear_prompt(feed, ends.get(timeout=feed.patience), rates)
                advance(1, rates)
    finally:
        feed.cancel()


async def arun_prompts(thread: EngineThread, drawn: Drawn[LogitsWork]) -> None:
    """`run_prompts` for asyncio."""
    import asyncio  # it takes a while, and most programs do without

    mailbox = current_mailbox()
    ends: asyncio.Queue[News] = asyncio.Queue()
    feed, rates = Feed(thread, drawn, lambda news: mailbox.put(ends.put_nowait, news)), _Rates()
    try:
        while feed.fill(ends.empty):
            with contextlib.suppress(asyncio.TimeoutError):
                _hear_prompt(feed, await asyncio.wait_for(ends.get(), feed.patience), rates)
    finally:
        feed.cancel()


def _hear_prompt(feed: Feed[LogitsWork], end: News, rates: _Rates) -> None:
    feed.hear(end.work)
    rates.add(len(end.work.sequence.prompt_token_ids))
    if end.error is not None:
        raise own_copy(end.error)


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
