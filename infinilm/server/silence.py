"""Streams that are never silent for long: proxies and clients cut a connection on which nothing comes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

__all__ = ["ping", "without_silence"]

Put = Callable[[str], Awaitable[None]]


def ping(path: str) -> str:
    """What fills a silence in the stream of a route: an event of Anthropic's API there, a comment elsewhere.

    Both say nothing, and clients of event streams pass over both.
    """
    return 'event: ping\ndata: {"type":"ping"}\n\n' if path.startswith("/v1/messages") else ": ping\n\n"


@contextlib.asynccontextmanager
async def without_silence(put: Put, filler: str, seconds: float) -> AsyncIterator[Put]:
    """Send a filler whenever nothing else was sent for so long; gives what is to send everything else.

    A prompt may wait in the queue and be computed for minutes before its first token. nginx, load balancers and HTTP
    clients cut a stream after 60 to 100 seconds of silence, and the work is lost.

    Parameters
    ----------
    put : callable
        Sends a text.
    filler : str
    seconds : float
        0: no fillers.
    """
    if not seconds:
        yield put
        return
    loop = asyncio.get_running_loop()
    last = loop.time()

    async def put_and_note(text: str) -> None:
        nonlocal last
        await put(text)
        last = loop.time()

    async def fill() -> None:
        while True:
            left = last + seconds - loop.time()
            if left > 0:
                await asyncio.sleep(left)
            else:
                await put_and_note(filler)

    filling = asyncio.ensure_future(fill())
    try:
        yield put_and_note
    finally:
        filling.cancel()
        await asyncio.gather(filling, return_exceptions=True)  # what fails it meets the other sender, too
