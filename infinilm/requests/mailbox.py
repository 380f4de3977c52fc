"""From the engine thread to coroutines: an event loop is woken once for all that has come, not once per token."""

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

    To wake a loop takes a system call and a turn of the loop: too much for each token of many requests. So a loop is
    woken by `wake_loops`, once for the news of a whole step.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()

    def put(self, function: Callable[..., object], *args: Any) -> None:
        """Have `function(*args)` called by the loop after `wake_loops`, which this thread calls when it has put all.

        RuntimeError: the loop is closed.
        """
        if self.loop.is_closed():
            raise RuntimeError("the event loop of this request is closed")
        self._calls.append((function, args))
        _local.__dict__.setdefault("touched", set()).add(self)

    def look(self) -> None:
        """Make the calls, in the loop."""
        while self._calls:
            function, args = self._calls.popleft()
            function(*args)


_local = threading.local()  # of a thread that puts: the mailboxes touched; of one with a loop: its mailbox


def wake_loops() -> None:
    """Wake every loop that this thread has put something for."""
    touched: set[LoopMailbox] = _local.__dict__.get("touched") or set()
    while touched:
        mailbox = touched.pop()
        with contextlib.suppress(RuntimeError):  # closed just now: the next `put` says so
            mailbox.loop.call_soon_threadsafe(mailbox.look)


def current_mailbox() -> LoopMailbox:
    """The mailbox of the loop that runs in this thread. RuntimeError: none does."""
    import asyncio  # it takes a while, and most programs do without

    loop = asyncio.get_running_loop()
    mailbox: LoopMailbox | None = getattr(_local, "mailbox", None)
    if mailbox is None or mailbox.loop is not loop:
        mailbox = _local.mailbox = LoopMailbox(loop)
    return mailbox
