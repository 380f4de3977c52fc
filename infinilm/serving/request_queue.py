"""`RequestQueue`: the requests that callers have given to the engine thread and that have not ended.

Callers queue and cancel requests, from any thread. The engine thread applies both between two steps. A request is open
from the call of `put` until the engine thread removes it, because it has ended.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator

from infinilm.errors import QueueFullError, TimeLimitError
from infinilm.requests.request import EngineRequest

__all__ = ["RequestQueue"]

_Requests = Iterable[EngineRequest]


class RequestQueue:
    """The open requests of an engine thread.

    Parameters
    ----------
    max_open : int
        Requests that run or wait at the same time.
    max_seconds : float or None
        The time limit of a request, from `put` to its end; None: there is none.

    Attributes
    ----------
    lock : threading.RLock
        Guards the count of requests in the inbox, and the flags of the engine thread that decide whether a caller may
        put requests in. It must be one lock for both: a garbage collector that runs `close` while its thread holds one
        of two locks could wait for a thread that holds the other one.
    open_requests : set of EngineRequest
        All requests that the engine thread has taken in and that have not ended, including dependents. Only the engine
        thread changes it.
    """

    def __init__(self, max_open: int, max_seconds: float | None) -> None:
        self._max_open, self._max_seconds = max_open, max_seconds
        # The lock and the inbox are reentrant, because the garbage collector may run a caller's code inside any
        # statement of this class.
        self.lock = threading.RLock()
        self._inbox: queue.SimpleQueue[list[EngineRequest] | None] = queue.SimpleQueue()  # None: only wakes the thread
        self._num_queued = 0  # requests in the inbox, and their dependents
        self._unstarted: deque[EngineRequest] = deque()  # out of the inbox, and not in the scheduler yet
        self._cancelled: deque[EngineRequest] = deque()  # appended to without a lock, see `cancel`
        self.open_requests: set[EngineRequest] = set()
        # Seconds, perf_counter. No open request has an earlier deadline, except those that were cancelled for it. The
        # request that had this deadline may have ended; `cancel_late` finds nothing then, and computes the next one.
        self._next_deadline = math.inf

    # ---- for callers ----

    def put(self, requests: list[EngineRequest]) -> None:
        """Queue all of these requests, or none, and start their time. QueueFullError: they would exceed `max_open`."""
        with self.lock:
            if (num_open := self.num_open) + _count(requests) > self._max_open:
                raise QueueFullError(
                    f"the queue is full: {num_open} sequences run or wait, {_count(requests)} more were asked for, and "
                    f"{self._max_open} is the limit (max_num_seqs + limits.max_queued_seqs); try again later"
                )
            if self._max_seconds is not None:
                deadline = time.perf_counter() + self._max_seconds
                for request in _with_dependents(requests):
                    request.deadline = deadline
            self._num_queued += _count(requests)
            self._inbox.put(requests)

    def cancel(self, requests: _Requests) -> None:
        """End requests at the next step, also requests that `put` has refused.

        This takes no lock, because the garbage collector may call it inside any statement. It need not wake the engine
        thread, which runs steps as long as a request is open.
        """
        self._cancelled.extend(request for request in requests if request.finish_reason is None)

    def wake(self) -> None:
        """End a `wait`."""
        self._inbox.put(None)

    @property
    def num_open(self) -> int:
        """Number of open requests, including dependents."""
        with self.lock:  # so that a request that moves from the inbox to the open ones is counted once
            return len(self.open_requests) + self._num_queued

    @property
    def may_be_passed(self) -> bool:
        """Whether a request may be computed without being put in here: none is open, and none has a time limit."""
        return self._max_seconds is None and not self.num_open

    @property
    def num_cancelled(self) -> int:
        """How many requests were cancelled and not yet taken out by `pop_cancelled`."""
        return len(self._cancelled)

    @property
    def are_all_cancelled(self) -> bool:
        """Whether every request that was taken in is cancelled; true if there is none."""
        return self.open_requests.copy().issubset(self._cancelled.copy())

    @property
    def is_any_cancelled(self) -> bool:
        """Whether a request that was taken in is cancelled."""
        return not self.open_requests.isdisjoint(self._cancelled.copy())

    # ---- for the engine thread ----

    def wait(self, seconds: float | None = None) -> None:
        """Sleep until a caller puts requests in or calls `wake`, or for so long."""
        with contextlib.suppress(queue.Empty):
            self._take(self._inbox.get(timeout=seconds))

    def receive(self) -> None:
        """Take in all requests in the inbox."""
        while not self._inbox.empty():  # this thread alone takes from it
            self._take(self._inbox.get_nowait())
        with self.lock:
            if self._inbox.empty():  # corrects the count if a caller was interrupted while counting
                self._num_queued = 0

    def _take(self, requests: list[EngineRequest] | None) -> None:
        with self.lock:
            for request in _with_dependents(requests or ()):
                self.open_requests.add(request)
                self._next_deadline = min(self._next_deadline, request.deadline)
            self._unstarted.extend(requests or ())
            self._num_queued -= _count(requests or ())

    @property
    def num_unstarted(self) -> int:
        """How many requests wait to be given to the scheduler."""
        return len(self._unstarted)

    def pop_unstarted(self, most: int) -> Iterator[EngineRequest]:
        """Take out up to `most` requests for the scheduler; those that have ended meanwhile are dropped."""
        for _ in range(min(len(self._unstarted), most)):
            request = self._unstarted.popleft()
            if request.finish_reason is None:
                yield request

    def cancel_late(self) -> int:
        """Cancel requests whose time is over, in front of all others; returns how many. Each gets a TimeLimitError."""
        now = time.perf_counter()
        if now < self._next_deadline:
            return 0
        cancelled = set(self._cancelled.copy())  # by their callers, who get what there is and no error
        late = [one for one in self.open_requests - cancelled if one.deadline <= now and one.finish_reason is None]
        for request in late:
            request.cancelled_by = TimeLimitError(
                f"the request took longer than {self._max_seconds:g} s, its time limit, and was ended: try again "
                "later, ask for less at a time, or raise limits.max_seconds (`infinilm serve --request-timeout`)"
            )
        self._cancelled.extendleft(late)
        self._next_deadline = min((one.deadline for one in self.open_requests if one.deadline > now), default=math.inf)
        return len(late)

    def are_cancelled(self, requests: _Requests) -> bool:
        """Whether all of these requests are cancelled, and still open."""
        if not self._cancelled:
            return False
        cancelled = set(self._cancelled.copy()) & self.open_requests
        return all(request in cancelled and request.finish_reason is None for request in requests)

    def pop_cancelled(self, count: int, *, keep_unknown: bool = False) -> Iterator[EngineRequest]:
        """Take out the first `count` cancelled requests, and give the open ones.

        The caller must end each request before it takes the next one.

        Parameters
        ----------
        count : int
        keep_unknown : bool
            Keep requests that were not taken in yet. Otherwise these were never put in, and are dropped.
        """
        for _ in range(count):
            request = self._cancelled.popleft()
            if request.finish_reason is not None:
                continue
            if request in self.open_requests:
                yield request
            elif keep_unknown:
                self._cancelled.append(request)

    def forget_cancelled(self) -> None:
        """Drop all cancellations, because the engine thread ends all requests for another reason."""
        self._cancelled.clear()


def _with_dependents(requests: _Requests) -> Iterator[EngineRequest]:
    for request in requests:
        yield request
        yield from _with_dependents(request.dependents)


def _count(requests: _Requests) -> int:
    """Number of requests, including their dependents."""
    return sum(1 + _count(request.dependents) for request in requests)
