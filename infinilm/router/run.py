"""The process of a router: it looks at the replicas, listens, drains at SIGTERM, and ends with 0."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp

from infinilm.errors import ConfigError
from infinilm.router.app import make_app
from infinilm.router.forward import Forwarder
from infinilm.router.metrics import RouterMetrics
from infinilm.router.replicas import Pool
from infinilm.router.settings import RouterSettings
from infinilm.server.keys import Keys
from infinilm.server.run import (
    QuietServer,
    all_taken,
    allow_connections,
    end_listening,
    listen,
    read_keys_at_sighup,
    shown_address,
    uvicorn_config,
    write_logs,
)
from infinilm.server.service import make_traces

__all__ = ["Launch", "serve_router"]

Launch = Callable[[Pool], AbstractAsyncContextManager[object]]
"""Starts replicas and adds them to the pool; leaving it ends them."""

_KEEP_ALIVE = 2.0  # seconds; a replica closes connections that were idle for 5


def serve_router(
    settings: RouterSettings,
    replicas: Sequence[tuple[str, str | None]],
    *,
    host: str,
    port: int,
    uds: str | None = None,
    ssl_keyfile: str | None = None,
    ssl_certfile: str | None = None,
    tell: Callable[[str], object] = print,
    launch: Launch | None = None,
) -> int:
    """Route requests until SIGTERM or SIGINT; returns the exit code of the process.

    Parameters
    ----------
    settings : RouterSettings
    replicas : sequence of (str, str or None)
        Address and key of each.
    host, port, uds, ssl_keyfile, ssl_certfile, tell
        As those of `infinilm.server.run.serve`.
    launch : callable, optional
        Starts more replicas, which end with the router.

    Raises
    ------
    ConfigError
        There are bad keys, the address cannot be had, or a replica is no server of this model and version.
    """
    front = settings.front
    write_logs(front)
    all_keys = (
        Keys(front.api_keys, front.api_key_file),
        Keys(settings.admin_keys, settings.admin_key_file, "--admin-key-file"),
    )
    listener = listen(host, port, uds)
    allow_connections()

    async def run() -> int:
        stop, num_signals = asyncio.Event(), 0

        def signalled() -> None:
            nonlocal num_signals
            num_signals += 1
            stop.set()
            if num_signals > 1:  # again: now
                now.set()

        now = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, signalled)
        read_keys_at_sighup(all_keys, signalled)
        url = shown_address(listener, host, ssl_certfile is not None)
        async with contextlib.AsyncExitStack() as stack:
            session = await stack.enter_async_context(open_session())
            pool, metrics = Pool(settings, session), RouterMetrics()
            for address, key in replicas:
                pool.add(address, key)
            if launch is not None:
                starting = asyncio.ensure_future(stack.enter_async_context(launch(pool)))
                if not await _first(starting, stop):
                    starting.cancel()
                    await asyncio.gather(starting, return_exceptions=True)
                    return 0
            await pool.look_at_all()
            for replica in pool.replicas:
                if replica.state == "refused" and replica.origin != "dns":
                    raise ConfigError(f"replica {replica.url}: {replica.why}")
            watching = asyncio.ensure_future(pool.watch())
            stack.callback(watching.cancel)
            traces = make_traces(front.traces_to, "infinilm-router", "")
            if traces is not None:
                stack.push_async_callback(asyncio.to_thread, traces.close)
            forwarder = Forwarder(settings, pool, session, metrics, traces)
            app = make_app(settings, pool, forwarder, session, metrics, *all_keys, traces)
            server = QuietServer(uvicorn_config(app, ssl_keyfile=ssl_keyfile, ssl_certfile=ssl_certfile))
            serving = asyncio.ensure_future(server.serve([listener]))
            tell(f"router of {len(pool.replicas)} replicas, {len(pool.up)} of them up, at {url}")
            await _first(serving, stop)
            if not serving.done():

                async def drain() -> None:
                    await forwarder.drain()
                    await all_taken(server)

                draining = asyncio.ensure_future(drain())
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(_first(draining, now), settings.front.drain_timeout)
                draining.cancel()
            server.should_exit = True
            server.force_exit = now.is_set()
            await asyncio.wait({serving}, timeout=5)
        return 0

    try:
        return asyncio.run(run())
    finally:
        end_listening(listener, uds)


def open_session() -> aiohttp.ClientSession:
    """What the router speaks to replicas with: it passes bytes on as they come."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
    )


async def _first(work: asyncio.Future[Any], stop: asyncio.Event) -> bool:
    """Wait for some work, or until the event; returns whether the work has ended, and raises what it raised."""
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
        return work.done()
    finally:
        stopping.cancel()
