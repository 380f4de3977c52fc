"""`LoopMailbox`: carries updates from the engine thread to coroutines and wakes each event loop once per step."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

__all__ = ["LoopMailbox", "current_mailbox", "wake_loops"]


class LoopMailbox:
    """Calls functions in the thread of an event loop, in the order in which they were put.

    Waking a loop takes a system call and an iteration of the loop, which is too slow to do for each token of many
    requests. So `wake_loops` wakes a loop once for the updates of a whole step.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._ticks: dict[float, list[Callable[[], object]]] = {}  # by the time of the loop's clock

    def put(self, function: Callable[..., object], *args: Any) -> None:
        """Let the loop call `function(*args)`. The caller puts all its calls and then calls `wake_loops` once.

        RuntimeError: the loop is closed.
        """
        if self.loop.is_closed():
            raise RuntimeError("the event loop of this request is closed")
        self._calls.append((function, args))
        _local.__dict__.setdefault("touched", set()).add(self)

    def call_after(self, seconds: float, function: Callable[[], object]) -> None:
        """Let the loop call `function()` within so many seconds; in its thread.

        Calls come at multiples of `seconds` by the loop's clock, so that one timer and one wake do for many of them.
        """
        time = (self.loop.time() // seconds + 1) * seconds
        calls = self._ticks.get(time)
        if calls is None:
            calls = self._ticks[time] = []
            self.loop.call_at(time, self._tick, time)
        calls.append(function)

    def _tick(self, time: float) -> None:
        for function in self._ticks.pop(time):
            function()

    def look(self) -> None:
        """Make the calls, in the loop."""
        while self._calls:
            function, args = self._calls.popleft()
            function(*args)


_local = threading.local()  # .touched: mailboxes that this thread has put into; .mailbox: that of this thread's loop


def wake_loops() -> None:
    """Wake every loop whose mailbox this thread has put calls into."""
    touched: set[LoopMailbox] = _local.__dict__.get("touched") or set()
    while touched:
        mailbox = touched.pop()
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: the next `put` raises
            mailbox.loop.call_soon_threadsafe(mailbox.look)


def current_mailbox() -> LoopMailbox:
    """The mailbox of the loop that runs in this thread. RuntimeError: none does."""
    import asyncio  # it takes a while, and most programs do without

    loop = asyncio.get_running_loop()
    mailbox: LoopMailbox | None = getattr(_local, "mailbox", None)
    if mailbox is None or mailbox.loop is not loop:
        mailbox = _local.mailbox = LoopMailbox(loop)
    return mailbox
