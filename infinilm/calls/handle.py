"""The handle that `LLM.submit` gives: wait for a request, follow its events, cancel it."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

from infinilm.checks import OfThisProcess, as_integer
from infinilm.errors import RequestError
from infinilm.outputs import RequestOutput, TokenEvent
from infinilm.requests.prompts import RequestMaker
from infinilm.requests.request import CompletionReader, EngineRequest, GenerationRequest, RequestUpdate, failure_of
from infinilm.sampling_params import SAMPLING, SamplingKeywords
from infinilm.serving.engine_thread import EngineThread
from infinilm.serving.mailbox import current_mailbox
from infinilm.signatures import name_keywords

if TYPE_CHECKING:
    import asyncio

    from typing_extensions import Unpack

__all__ = ["Request"]

_LONGEST_WAIT = 86400.0  # seconds at a time: the system has a limit

Wakers = list[Callable[[], object]]
Readers = dict[EngineRequest, CompletionReader]


class _UpdateLog:
    """The updates of a request, kept for any number of readers.

    There are no locks. The engine thread only appends, and every reader has its own position. So an exception that
    interrupts one reader, such as KeyboardInterrupt, does not affect the others.
    """

    def __init__(self, num_completions: int, check_caller: Callable[[], object]) -> None:
        self._check_caller = check_caller
        self._updates: list[RequestUpdate] = []
        self._num_open = num_completions
        self._update_wakers: Wakers = []  # of readers that wait for the next update
        self._end_wakers: Wakers = []  # of readers that wait for the end

    def append(self, update: RequestUpdate) -> None:
        """Add an update; called by the engine thread, so it must be fast."""
        self._updates.append(update)
        if update.finish_reason is not None:
            self._num_open -= 1
            if self._num_open == 0:
                self._wake(self._end_wakers)
        if self._update_wakers:
            self._wake(self._update_wakers)

    def _wake(self, wakers: Wakers) -> None:
        for wake in tuple(wakers):
            with contextlib.suppress(RuntimeError):  # the event loop is closed, and its readers are gone
                wake()

    @property
    def done(self) -> bool:
        return self._num_open == 0

    @property
    def so_far(self) -> list[RequestUpdate]:
        return self._updates.copy()

    def wait(self, timeout: float | None) -> bool:
        """Wait for the end; returns whether it came in time."""
        return self._wait_until(lambda: self.done, self._end_wakers, timeout)

    async def await_end(self) -> None:
        """`wait` for asyncio."""
        with self._awakened(self._end_wakers) as changed:
            while not self.done:
                self._check_caller()
                await changed.wait()

    def read(self) -> Iterator[RequestUpdate]:
        """All updates, from the first to the last."""
        position = 0

        def is_there() -> bool:
            return len(self._updates) > position or self.done

        while True:
            is_last = self.done  # read before the updates, so that none is missed
            while position < len(self._updates):
                yield self._updates[position]
                position += 1
            if is_last:
                return
            self._wait_until(is_there, self._update_wakers, None)

    async def aread(self) -> AsyncIterator[RequestUpdate]:
        """`read` for asyncio."""
        position = 0
        with self._awakened(self._update_wakers) as changed:
            while True:
                changed.clear()
                is_last = self.done
                while position < len(self._updates):
                    yield self._updates[position]
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
        with _added(wakers, lambda: bell.put(None)):  # before the condition is checked, so that no change is missed
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
    """Add a waker for the duration of the block."""
    try:
        wakers.append(wake)
        yield
    finally:
        with contextlib.suppress(ValueError):
            wakers.remove(wake)


class Request(OfThisProcess):
    """A running request: wait for its result, follow its events, or cancel it. Made by `LLM.submit`.

    In asyncio, ``await request`` gives the result, and ``async for event in request`` follows the events. A task that
    is cancelled while it waits leaves the request running, as a timeout does.

    It may be used from several threads. When no reference to it is left, the request is cancelled, because its
    result can no longer be read.
    """

    def __init__(self, llm: object, thread: EngineThread, request: GenerationRequest, maker: RequestMaker) -> None:
        self._maker = maker
        self._llm = llm  # kept alive, because an LLM without references closes its thread
        self._thread = thread
        self._request = request
        self._log = _UpdateLog(len(request.completions), thread.check_caller)
        self._is_read = False  # a reader has come to the end, so the completions have their whole text
        request.listen(self._log.append)

    @property
    def request_id(self) -> str:
        """The id of the request, as in its events and its result."""
        return self._request.request_id

    @property
    def done(self) -> bool:
        """Whether the request has ended, for any reason."""
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
            The request is not done in time. It continues.
        InfinilmError
            The request is not done, and this is a hook or a logits_processor of its LLM, which waits for them.
        EngineDeadError
            The request is not done, and this is a forked child of the process that runs it.
        Exception
            The exception that made the request fail.
        """
        if timeout is not None and (
            isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout >= 0
        ):
            raise RequestError(f"timeout must be a number of seconds >= 0, or None, got {timeout!r}")
        if not self._log.wait(timeout):
            raise TimeoutError(f"request {self.request_id} was not done after {timeout} s; it goes on")
        return self._finished()

    def output(self) -> RequestOutput:
        """The result so far. Never waits, and never raises a failure: see `CompletionOutput.error`."""
        if self._is_read:
            return self._request.output()
        readers = self._new_readers()
        for update in self._log.so_far:
            readers[update.request].event(update)
        return self._request.output(readers)

    def cancel(self) -> None:
        """End the request after the current step. Its result is what it has by then, with finish reason "abort"."""
        self._thread.cancel(self._request.all_requests)

    def fork(
        self, num_tokens: int | None = None, *, completion: int = 0, **sampling: Unpack[SamplingKeywords]
    ) -> Request:
        """Start another request whose output begins as this one's does, and goes on by itself.

        It shares the blocks of the prompt and of these tokens, so that only the last few are computed again; in models
        with states those since the last snapshot. Its result holds the whole output, its events the rest. Forks of
        forks make a tree, such as of a search over thoughts.

        Parameters
        ----------
        num_tokens
            Tokens of the output to begin with; None: all so far. The request may be running, or have ended.
        completion
            Which of its `n` outputs.
        **sampling
            Changes to its parameters. It draws with another seed, unless one is given. `max_tokens` counts the whole
            output.

        Raises
        ------
        RequestError
            There are not so many tokens, or they end the output, such as with a stop token.
        QueueFullError
            Other calls have filled the queue.

        Examples
        --------
        >>> draft = llm.submit("The proof: ", temperature=0.8)  # doctest: +SKIP
        >>> others = [draft.fork(20) for _ in range(4)] if len(draft.result().token_ids) > 20 else []  # doctest: +SKIP
        """
        completions = self._request.completions
        if not 0 <= as_integer("completion", completion, least=0) < len(completions):
            raise RequestError(f"completion: expected 0 to {len(completions) - 1}, got {completion}")
        forked = self._maker.fork(completions[completion], self._request.prompt, num_tokens, sampling)
        handle = Request(self._llm, self._thread, forked, self._maker)
        self._thread.submit(forked.to_submit)
        return handle

    def __iter__(self) -> Iterator[TokenEvent]:
        """Every event from the first to the last, waiting for those to come. Each iteration starts at the first event.

        After the last event, raises the exception that made the request fail, if it failed.
        """
        readers = self._new_readers()
        for update in self._log.read():
            yield from self._events(readers, update)
        self._end(readers)

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        """`result` for asyncio."""
        return self._wait().__await__()

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        """Iterate as `__iter__` does, for asyncio."""
        readers = self._new_readers()
        async for update in self._log.aread():
            for event in self._events(readers, update):
                yield event
        self._end(readers)

    async def _wait(self) -> RequestOutput:
        await self._log.await_end()
        return self._finished()

    def _finished(self) -> RequestOutput:
        if not self._is_read:  # make the whole text at once, from the last update of each completion
            readers = self._new_readers()
            for update in self._log.so_far:
                if update.finish_reason is not None:
                    readers[update.request].event(update)
            self._keep(readers)
        if (error := self._request.failure) is not None:
            raise error
        return self._request.output()

    def _new_readers(self) -> Readers:
        return {completion: CompletionReader(completion) for completion in self._request.completions}

    def _events(self, readers: Readers, update: RequestUpdate) -> Iterator[TokenEvent]:
        """The event of an update, if there is one. A completion whose text cannot be decoded is cancelled."""
        event = readers[update.request].event(update)
        if event is not None:
            if event.error is not None:
                self._thread.cancel([update.request])
            yield event

    def _end(self, readers: Readers) -> None:
        """Keep the readers, which have seen all events; raise the exception that made the request fail."""
        self._keep(readers)
        if (error := failure_of(readers.values())) is not None:
            raise error

    def _keep(self, readers: Readers) -> None:
        """Use these readers, which have come to the end, for the text of the result."""
        if not self._is_read:
            for completion in self._request.completions:
                completion.reader = readers[completion]
            self._is_read = True

    def __repr__(self) -> str:
        return f"<Request {self.request_id}, {'done' if self.done else 'running'}>"

    def __del__(self) -> None:
        # Must not wait: the garbage collector may call this inside any statement.
        if "_log" in self.__dict__ and not self.done:
            self._thread.cancel(self._request.all_requests)


name_keywords(Request.fork, SAMPLING)
