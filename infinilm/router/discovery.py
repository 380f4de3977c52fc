"""Replicas from DNS: every address that a name has is one, as those of a headless service of Kubernetes are."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

from infinilm.errors import ConfigError
from infinilm.router.replicas import Pool
from infinilm.router.run import Launch

__all__ = ["dns_replicas", "look_up"]

logger = logging.getLogger("infinilm.router")

_LOOKUP_SECONDS = 5.0  # between two look-ups

LookUp = Callable[[str, int], Awaitable[set[str]]]


async def look_up(name: str, port: int) -> set[str]:
    """The addresses that a name has now, as those of servers. OSError, UnicodeError: it cannot be told."""
    found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    hosts = {str(address[0]) for *_, address in found}
    return {f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}" for host in hosts}


def dns_replicas(
    name: str, port: int, key: str | None, *, interval: float = _LOOKUP_SECONDS, find: LookUp = look_up
) -> Launch:
    """A `Launch` of the servers that a name in DNS stands for, now and later.

    A server whose address goes ends what it has begun. Where nothing can be looked up, those that are known stay:
    a name server that is down for a moment takes nothing away.

    Parameters
    ----------
    name : str
    port : int
    key : str or None
        That the servers ask for.
    interval : float
        Seconds between two look-ups.
    find : callable
        Looks up.
    """

    async def follow(pool: Pool) -> None:
        said = ""
        while True:
            problem = ""
            try:
                _change(pool, await find(name, port), key)
            except (OSError, UnicodeError) as error:  # the latter of a name that DNS cannot have
                reason = getattr(error, "strerror", None) or error
                problem = f"{name} cannot be looked up: {reason}; its replicas stay"
            except ConfigError as error:
                problem = f"{name} has an address that cannot be used: {error}"
            if problem and problem != said:
                logger.warning("%s", problem)
            said = problem
            began.set()
            await asyncio.sleep(interval)

    began = asyncio.Event()

    @contextlib.asynccontextmanager
    async def launch(pool: Pool) -> AsyncIterator[None]:
        following = asyncio.ensure_future(follow(pool))
        try:
            await began.wait()
            yield
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    return launch


def _change(pool: Pool, wanted: set[str], key: str | None) -> None:
    """Have the replicas of these addresses, beside those that are not from DNS."""
    known = {replica.url: replica for replica in pool.replicas}
    for url in sorted(wanted - known.keys()):
        pool.add(url, key, origin="dns")
    for url, replica in known.items():
        if replica.origin == "dns" and url not in wanted and replica.state != "leaving":
            pool.retire(replica, "its name in DNS has this address no more")
