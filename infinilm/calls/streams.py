"""Calls that wait for their requests: streams of events, for threads and for asyncio, and prompts without output.

Each way exists for threads and for asyncio, because the two wait on different queues; `Feed` and `_Results` are shared.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import cast

from infinilm.calls.feed import Feed
from infinilm.errors import own_copy
from infinilm.outputs import Delta, RequestOutput, TokenEvent
from infinilm.progress import can_show, progress_bar
from infinilm.requests.request import Completion, EngineRequest, GenerationRequest, PromptRequest, RequestUpdate
from infinilm.requests.source import RequestSource
from infinilm.serving.engine_thread import EngineThread
from infinilm.serving.mailbox import current_mailbox

__all__ = ["AsyncRequests", "afinish", "arun_prompts", "astream", "finish", "run_prompts", "stream"]


def stream(
    llm: object,
    thread: EngineThread,
    source: RequestSource[GenerationRequest],
    *,
    ends_only: bool = False,
    take: Callable[[GenerationRequest], object] | None = None,
) -> Iterator[TokenEvent]:
    """Run requests and yield their events, or only the last event of each sequence. Leaving the loop cancels them.

    `take` gets each request when it has ended. `llm` is kept alive until then: an LLM that nothing refers to closes
    its thread. If no request succeeded, raises the first exception after the last event.
    """
    inbox: queue.SimpleQueue[RequestUpdate] = queue.SimpleQueue()
    feed = Feed(thread, source, inbox.put, ends_only=ends_only)
    results = _Results(take)
    try:
        while feed.fill(inbox.empty):
            thread.check_caller()
            with contextlib.suppress(queue.Empty):
                event = results.event(thread, feed, inbox.get(timeout=feed.patience))
                if event is not None:
                    yield event
    finally:
        feed.cancel()
    results.raise_failure()


def finish(
    llm: object, thread: EngineThread, source: RequestSource[GenerationRequest], *, use_tqdm: bool
) -> list[RequestOutput]:
    """Run requests to their ends, with a progress bar if `use_tqdm` is true and there is a terminal or notebook."""
    outputs: dict[int, RequestOutput] = {}

    def take(request: GenerationRequest) -> None:
        outputs[request.completions[0].prompt_index] = request.output()
        rates.add(len(request.completions[0].sequence.prompt_token_ids), sum(map(_num_tokens, request.completions)))

    # The bar counts the tokens of a single sequence, after a delay, or the finished ones of several sequences.
    total, unit, delay = source.total, "prompt", 0.0
    is_alone = total == 1 and use_tqdm and can_show()
    if is_alone:
        (request,) = source.requests
        total, unit, delay = request.completions[0].max_new_tokens, "token", 1.0
        source = RequestSource(iter((request,)), 1, source.room)
    with progress_bar(total, "generating", unit, wanted=use_tqdm and total != 0, delay=delay) as advance:
        rates = _Rates()
        for _ in stream(llm, thread, source, ends_only=not is_alone, take=take):
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
    """Which requests of a call have succeeded and failed so far.

    Parameters
    ----------
    take : callable, optional
        Gets each request when it has ended.
    """

    def __init__(self, take: Callable[[GenerationRequest], object] | None) -> None:
        self._take = take
        self._has_success = False
        self._failures: dict[int, BaseException] = {}  # of the first prompt that failed, while none has succeeded

    def event(self, thread: EngineThread, feed: Feed[GenerationRequest], update: RequestUpdate) -> TokenEvent | None:
        """The event of an update. A completion whose text cannot be decoded is cancelled."""
        event = _event(thread, update)
        if event is not None and event.finish_reason is not None:
            request = feed.take_end(update.request)
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
        self._updates: deque[RequestUpdate] = deque()
        self._final: list[RequestOutput] | None = None
        self._changed = asyncio.Event()
        self._is_paused = False  # tokens wait for each other, see `deltas`
        self._mailbox = current_mailbox()
        self._num_open = _listen(requests, self._receive, ends_only)
        thread.submit([part for request in requests for part in request.to_submit])

    def _receive(self, update: RequestUpdate) -> None:
        """Take in an update, in the engine thread."""
        self._updates.append(update)
        if update.finish_reason is not None or not self._is_paused or self._mailbox.loop.is_closed():
            self._mailbox.put(self._changed.set)

    def _pause(self, is_paused: bool) -> None:
        """Let the tokens of plain sequences wait, or not; meanwhile the engine thread makes no updates of them."""
        self._is_paused = is_paused
        for completion in self._completions:
            completion.polled_in = self._mailbox.loop if is_paused else None

    def _end_pause(self) -> None:
        # The engine thread learns it first, so that every token that comes after this look has an update.
        self._pause(False)
        plain = [c for c in self._completions if c.sequence.is_plain]
        # The update of an end, which may be there already, stays the last.
        self._updates.extendleft([RequestUpdate(c, is_next=True) for c in plain if c.reader.has_more])
        if self._updates:
            self._changed.set()

    async def _batches(self, pause: Callable[[], float] | None = None) -> AsyncIterator[list[RequestUpdate]]:
        """The updates, those that came at the same time together. Raises as `steps` does."""
        self._thread.check_caller()
        while self._num_open:
            await self._changed.wait()
            self._changed.clear()
            count = len(self._updates)  # the engine thread may add some meanwhile
            if count:
                updates = [self._updates.popleft() for _ in range(count)]
                if pause is not None and not self._is_paused and (seconds := pause()) > 0:
                    self._pause(True)
                    self._mailbox.call_after(seconds, self._end_pause)
                yield updates
        _raise_failure(self._requests)

    async def steps(self) -> AsyncIterator[list[TokenEvent]]:
        """The events, those that came at the same time together; in place of `deltas`, never beside it.

        After the last event, raises the exception of the first request if none of the requests succeeded.
        """
        async for updates in self._batches():
            events = [event for event in (_event(self._thread, update) for update in updates) if event is not None]
            self._num_open -= sum(event.finish_reason is not None for event in events)
            if events:
                yield events

    async def deltas(self, rest: Callable[[], float]) -> AsyncIterator[list[Delta]]:
        """One `Delta` for each completion that has new tokens or has ended. Raises as `steps` does.

        Requests are read by this or by `steps`, from the first token to the last: tokens that have waited have no
        events, so `steps` would leave them out.

        Parameters
        ----------
        rest : callable
            Returns seconds. A token that comes sooner than that after the tokens before it waits for the next ones, but
            first tokens and ends never wait. So a fast model does not wake its reader for every token. The engine
            thread makes no updates of plain sequences that wait; the reader looks for their tokens itself.
        """
        async for updates in self._batches(rest):
            deltas: list[Delta] = []
            for completion, own in self._by_completion(updates):
                delta = completion.reader.delta(own)
                if delta is None:
                    continue
                if delta.error is not None:
                    self._thread.cancel([completion])
                self._num_open -= delta.finish_reason is not None
                deltas.append(delta)
            if deltas:
                yield deltas

    def _by_completion(self, updates: list[RequestUpdate]) -> Iterable[tuple[Completion, list[RequestUpdate]]]:
        """The updates of each completion."""
        if len(self._completions) == 1:
            return [(self._completions[0], updates)]
        by_completion: dict[Completion, list[RequestUpdate]] = {}
        for update in updates:
            by_completion.setdefault(cast(Completion, update.request), []).append(update)
        return by_completion.items()

    def given(self) -> list[Delta]:
        """The tokens that came with the prompts as `output_token_ids`, and their text, which `deltas` leaves out."""
        return [completion.reader.given() for completion in self._completions if completion.num_given]

    @property
    def requests(self) -> Sequence[GenerationRequest]:
        """The requests, one for each prompt, in their present state."""
        return self._requests

    @property
    def seed(self) -> int:
        """The seed of the first completion, which the request named or which was chosen for it."""
        return self._requests[0].completions[0].sequence.seed

    async def wait(self) -> list[RequestOutput]:
        """Wait for all ends and return `outputs`. Raises as `steps` does."""
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
    source: RequestSource[GenerationRequest],
    *,
    ends_only: bool = False,
    take: Callable[[GenerationRequest], object] | None = None,
) -> AsyncIterator[TokenEvent]:
    """`stream` for asyncio."""
    import asyncio  # it takes a while, and most programs do without

    mailbox = current_mailbox()
    inbox: asyncio.Queue[RequestUpdate] = asyncio.Queue()
    feed = Feed(thread, source, lambda update: mailbox.put(inbox.put_nowait, update), ends_only=ends_only)
    results = _Results(take)
    try:
        while feed.fill(inbox.empty):
            thread.check_caller()
            with contextlib.suppress(asyncio.TimeoutError):
                event = results.event(thread, feed, await asyncio.wait_for(inbox.get(), feed.patience))
                if event is not None:
                    yield event
    finally:
        feed.cancel()
    results.raise_failure()


async def afinish(llm: object, thread: EngineThread, source: RequestSource[GenerationRequest]) -> list[RequestOutput]:
    """`finish` for asyncio, without a bar."""
    outputs: dict[int, RequestOutput] = {}

    def take(request: GenerationRequest) -> None:
        outputs[request.completions[0].prompt_index] = request.output()

    async for _ in astream(llm, thread, source, ends_only=True, take=take):
        pass
    return [outputs[index] for index in sorted(outputs)]


def run_prompts(
    thread: EngineThread, source: RequestSource[PromptRequest], advance: Callable[..., None] = lambda count, note: None
) -> None:
    """Run prompts to their ends; raises the first failure. `advance` moves a progress bar."""
    if source.total == 1:
        (request,) = source.requests
        if thread.compute_at_once(request):
            return advance(1, "")
        source = RequestSource(iter((request,)), 1, source.room)
    ends: queue.SimpleQueue[RequestUpdate] = queue.SimpleQueue()
    feed, rates = Feed(thread, source, ends.put), _Rates()
    try:
        while feed.fill(ends.empty):
            thread.check_caller()
            with contextlib.suppress(queue.Empty):
                _record_prompt(feed, ends.get(timeout=feed.patience), rates)
                advance(1, rates)
    finally:
        feed.cancel()


async def arun_prompts(thread: EngineThread, source: RequestSource[PromptRequest]) -> None:
    """`run_prompts` for asyncio."""
    import asyncio  # it takes a while, and most programs do without

    mailbox = current_mailbox()
    ends: asyncio.Queue[RequestUpdate] = asyncio.Queue()
    feed, rates = Feed(thread, source, lambda update: mailbox.put(ends.put_nowait, update)), _Rates()
    try:
        while feed.fill(ends.empty):
            with contextlib.suppress(asyncio.TimeoutError):
                _record_prompt(feed, await asyncio.wait_for(ends.get(), feed.patience), rates)
    finally:
        feed.cancel()


def _record_prompt(feed: Feed[PromptRequest], end: RequestUpdate, rates: _Rates) -> None:
    feed.take_end(end.request)
    rates.add(len(end.request.sequence.prompt_token_ids))
    if end.error is not None:
        raise own_copy(end.error)


def _all_works(requests: list[GenerationRequest]) -> list[EngineRequest]:
    return [part for request in requests for part in request.all_requests]


def _listen(requests: list[GenerationRequest], deliver: Callable[[RequestUpdate], object], ends_only: bool) -> int:
    """Let the engine thread call `deliver` with the updates of requests; returns the number of completions."""
    for request in requests:
        request.listen(deliver, ends_only=ends_only)
    return sum(len(request.completions) for request in requests)


def _event(thread: EngineThread, update: RequestUpdate) -> TokenEvent | None:
    """The event of an update of a completion. A completion whose text cannot be decoded is cancelled."""
    event = cast(Completion, update.request).reader.event(update)
    if event is not None and event.error is not None:
        thread.cancel([update.request])
    return event


def _raise_failure(requests: list[GenerationRequest]) -> None:
    """Raise the first failure if no request succeeded. Otherwise the results of the others would be lost."""
    failures = [request.failure for request in requests]
    if failures and failures[0] is not None and all(failure is not None for failure in failures):
        raise failures[0]
