"""`Orders`: what callers want of the engine thread: works to run, works to end, and the time that each may take.

Callers put works in and cancel them, from any thread. The engine thread takes both out and does them between two steps.
A work is open from then until the engine thread says that it has ended.
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
from infinilm.requests.request import Work

__all__ = ["Orders"]


class Orders:
    """The works of an engine thread that have not ended.

    Parameters
    ----------
    max_open : int
        Works that run or wait at the same time.
    max_seconds : float or None
        That a work may take, from `put` to its end; None: as long as it likes.

    Attributes
    ----------
    lock : threading.RLock
        Guards the count of what is in the inbox, and whatever the engine thread has that decides who may put works in:
        with two locks, a garbage collector that runs `close` where one is held could wait for who waits for that one.
    open_works : set of Work
        Of the engine thread: all that it has taken in and that have not ended, also those that follow others.
    """

    def __init__(self, max_open: int, max_seconds: float | None) -> None:
        self._max_open, self._max_seconds = max_open, max_seconds
        # Reentrant, and a queue that is, too: the garbage collector may run a caller's code in the middle of anything.
        self.lock = threading.RLock()
        self._inbox: queue.SimpleQueue[list[Work] | None] = queue.SimpleQueue()  # None: only to wake the thread
        self._num_queued = 0  # works in the inbox, and those that follow them
        self._unstarted: deque[Work] = deque()  # out of the inbox, not started yet
        self._cancelled: deque[Work] = deque()  # appended to without a lock, see `cancel`
        self.open_works: set[Work] = set()
        # perf_counter. No open work has an earlier one, but for those that are cancelled as late. It may be of a work
        # that has ended: then the next look finds nobody late.
        self._next_deadline = math.inf

    # ---- for callers ----

    def put(self, works: list[Work]) -> None:
        """Ask for works, all of them or none. Their time begins. QueueFullError: they would exceed `max_open`."""
        with self.lock:
            if (num_open := self.num_open) + _count(works) > self._max_open:
                raise QueueFullError(
                    f"the queue is full: {num_open} sequences run or wait, {_count(works)} more were asked for, and "
                    f"{self._max_open} is the limit (max_num_seqs + limits.max_queued_seqs); try again later"
                )
            if self._max_seconds is not None:
                deadline = time.perf_counter() + self._max_seconds
                for work in _with_followers(works):
                    work.deadline = deadline
            self._num_queued += _count(works)
            self._inbox.put(works)

    def cancel(self, works: Iterable[Work]) -> None:
        """End works at the next step. Takes no lock, because the garbage collector may call this inside any statement.

        The thread needs no wake-up: while there is something to cancel, it is running steps. `works` may include works
        that were never put in, because `put` refused them.
        """
        self._cancelled.extend(work for work in works if work.finish_reason is None)

    def wake(self) -> None:
        """End a `wait`."""
        self._inbox.put(None)

    @property
    def num_open(self) -> int:
        """Number of works that have not ended, including those that wait for other works."""
        with self.lock:  # a work that is taken in is not counted twice
            return len(self.open_works) + self._num_queued

    @property
    def num_cancelled(self) -> int:
        """How many were cancelled, and not yet taken out by `pop_cancelled`."""
        return len(self._cancelled)

    @property
    def are_all_cancelled(self) -> bool:
        """Whether every open work, if there is one, is cancelled."""
        return self.open_works.copy().issubset(self._cancelled.copy())

    @property
    def is_any_cancelled(self) -> bool:
        """Whether an open work is cancelled."""
        return not self.open_works.isdisjoint(self._cancelled.copy())

    # ---- for the engine thread ----

    def wait(self) -> None:
        """Sleep until there is news in the inbox."""
        self._take(self._inbox.get())

    def receive(self) -> None:
        """Take in all that was put in."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._take(self._inbox.get_nowait())
        with self.lock:
            if self._inbox.empty():  # corrects the count if a caller was interrupted while counting
                self._num_queued = 0

    def _take(self, works: list[Work] | None) -> None:
        with self.lock:
            for work in _with_followers(works or ()):
                self.open_works.add(work)
                self._next_deadline = min(self._next_deadline, work.deadline)
            self._unstarted.extend(works or ())
            self._num_queued -= _count(works or ())

    @property
    def num_unstarted(self) -> int:
        """How many works wait to be started."""
        return len(self._unstarted)

    def pop_unstarted(self, most: int) -> Iterator[Work]:
        """The next works to be started, out of so many; those that have ended before are left out."""
        for _ in range(min(len(self._unstarted), most)):
            work = self._unstarted.popleft()
            if work.finish_reason is None:
                yield work

    def cancel_late(self) -> int:
        """Cancel works whose time is over, with the error that tells it, in front of all others; returns how many."""
        now = time.perf_counter()
        if now < self._next_deadline:
            return 0
        cancelled = set(self._cancelled.copy())  # whose callers get what there is, as they asked
        late = [work for work in self.open_works - cancelled if work.deadline <= now and work.finish_reason is None]
        for work in late:
            work.cancelled_by = TimeLimitError(
                f"the request took longer than {self._max_seconds:g} s, its time limit, and was ended: try again "
                "later, ask for less at a time, or raise limits.max_seconds (`infinilm serve --request-timeout`)"
            )
        self._cancelled.extendleft(late)
        self._next_deadline = min((w.deadline for w in self.open_works if w.deadline > now), default=math.inf)
        return len(late)

    def are_unwanted(self, works: Iterable[Work]) -> bool:
        """Whether all of these works are cancelled, and still open."""
        if not self._cancelled:
            return False
        cancelled = set(self._cancelled.copy())
        return all(work in cancelled and work in self.open_works and work.finish_reason is None for work in works)

    def pop_cancelled(self, count: int, *, keep_unknown: bool = False) -> Iterator[Work]:
        """The open ones of the first `count` cancelled works, each of which must be ended before the next is taken.

        `keep_unknown`: keep those not taken in yet. Otherwise such works were never put in: drop them.
        """
        for _ in range(count):
            work = self._cancelled.popleft()
            if work.finish_reason is not None:
                continue
            if work in self.open_works:
                yield work
            elif keep_unknown:
                self._cancelled.append(work)

    def forget_cancelled(self) -> None:
        """All works end in another way."""
        self._cancelled.clear()


def _with_followers(works: Iterable[Work]) -> Iterator[Work]:
    for work in works:
        yield work
        yield from _with_followers(work.followers)


def _count(works: Iterable[Work]) -> int:
    """Number of works, including their followers."""
    return sum(1 + _count(work.followers) for work in works)
