"""A router in a thread of this process, whose pool a test can reach."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from server.support import SECONDS, wait_for

from infinilm.router.app import make_app
from infinilm.router.forward import Forwarder
from infinilm.router.metrics import RouterMetrics
from infinilm.router.replicas import Pool
from infinilm.router.run import open_session
from infinilm.router.settings import RouterSettings
from infinilm.server.keys import Keys
from infinilm.server.run import QuietServer, uvicorn_config
from infinilm.server.settings import ServerSettings
from infinilm.server.traces import Traces

CLIENT_KEY = "a key of clients"


class HostedRouter:
    """Listens at `url`."""

    def __init__(
        self, settings: RouterSettings, replicas: Sequence[tuple[str, str | None]], traces: Traces | None = None
    ) -> None:
        self._traces = traces
        self.url = ""
        self.pool: Pool
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(settings, replicas)))
        self._thread.start()
        assert self._ready.wait(SECONDS)

    async def _run(self, settings: RouterSettings, replicas: Sequence[tuple[str, str | None]]) -> None:
        async with open_session() as session:
            self.pool, metrics = Pool(settings, session), RouterMetrics()
            for url, key in replicas:
                self.pool.add(url, key)
            await self.pool.look_at_all()
            watching = asyncio.ensure_future(self.pool.watch())
            keys = Keys(settings.front.api_keys), Keys(settings.admin_keys)
            forwarder = Forwarder(settings, self.pool, session, metrics, self._traces)
            app = make_app(settings, self.pool, forwarder, session, metrics, *keys, self._traces)
            with socket.create_server(("127.0.0.1", 0)) as listener:
                self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
                self._server = QuietServer(uvicorn_config(app, log_level="warning"))
                self._loop = asyncio.get_running_loop()
                self._ready.set()
                await self._server.serve([listener])
            watching.cancel()

    def call(self, function: Callable[[], object]) -> None:
        """Call a function in the thread of the router's event loop."""
        self._loop.call_soon_threadsafe(function)

    def wait_for_up(self, count: int) -> None:
        wait_for(lambda: len(self.pool.up) == count)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()


@contextmanager
def routed(*replicas: tuple[str, str | None], traces: Traces | None = None, **settings: Any) -> Iterator[HostedRouter]:
    front = ServerSettings(model_names=(), api_keys=(CLIENT_KEY,))
    running = HostedRouter(RouterSettings(front, **{"health_interval": 0.1, **settings}), replicas, traces)
    try:
        yield running
    finally:
        running.stop()
