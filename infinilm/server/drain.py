"""What runs may end, and nothing new begins: how a server and a router end."""

from __future__ import annotations

import asyncio

__all__ = ["Drainable"]


class Drainable:
    """Counts the calls it has let in, so that it can wait for their end.

    Attributes
    ----------
    is_draining : bool
        What runs may end, nothing new begins.
    """

    def __init__(self) -> None:
        self.is_draining = False
        self._num_admitted = 0  # calls between admission and their last byte
        self._idle = asyncio.Event()
        self._idle.set()

    def _enter(self) -> None:
        """Count a call that is let in."""
        self._num_admitted += 1
        self._idle.clear()

    def _leave(self) -> None:
        """Count no more a call that has ended."""
        self._num_admitted -= 1
        if self._num_admitted == 0:
            self._idle.set()

    async def drain(self) -> None:
        """Let nothing new in, and wait until what runs has ended."""
        self.is_draining = True
        await self._idle.wait()
