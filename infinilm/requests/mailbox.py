"""From the engine thread to coroutines: an event loop is woken once for all that has come, not once per token."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

__all__ = ["LoopMailbox", "current_mailbox"]


class LoopMailbox:
    """Calls functions in the thread of an event loop, in the order in which they were put.

    To wake a loop takes a system call and a turn of the loop, some 50 microseconds: too much for each token of many
    requests. What comes before the loop gets to look, usually the news of a whole step, shares one wake-up.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._is_called = False  # the loop will look

    def put(self, function: Callable[..., object], *args: Any) -> None:
        """Have `function(*args)` called by the loop; from any thread. RuntimeError: the loop is closed."""
        self._calls.append((function, args))
        if not self._is_called or self.loop.is_closed():
            self._is_called = True
            self.loop.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        self._is_called = False  # first: what comes from here on wakes the loop again
        while self._calls:
            function, args = self._calls.popleft()
            function(*args)


_local = threading.local()


def current_mailbox() -> LoopMailbox:
    """The mailbox of the loop that runs in this thread. RuntimeError: none does."""
    import asyncio  # it takes a while, and most programs do without

    loop = asyncio.get_running_loop()
    mailbox: LoopMailbox | None = getattr(_local, "mailbox", None)
    if mailbox is None or mailbox.loop is not loop:
        mailbox = _local.mailbox = LoopMailbox(loop)
    return mailbox
