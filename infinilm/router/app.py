"""The routes of the router, as an ASGI application: its own few, and those of the replicas."""

from __future__ import annotations

import aiohttp
from starlette.responses import JSONResponse, Response

from infinilm.router.forward import Forwarder
from infinilm.router.metrics import RouterMetrics
from infinilm.router.replicas import Pool
from infinilm.router.settings import RouterSettings
from infinilm.server.answers import new_id
from infinilm.server.bodies import ApiError
from infinilm.server.guard import App, Guard, Message, Receive, Send

__all__ = ["make_app"]


def make_app(
    settings: RouterSettings, pool: Pool, forwarder: Forwarder, session: aiohttp.ClientSession, metrics: RouterMetrics
) -> App:
    """The application; it checks hosts, keys and sizes as a server does."""

    async def own(path: str) -> Response | None:
        if path in ("/health", "/ping"):
            num_up = len(pool.up)
            state = "draining" if forwarder.is_draining else "ok" if num_up else "no replica"
            values = {"status": state, "replicas": len(pool.replicas), "replicas_up": num_up}
            return JSONResponse(values, 200 if state == "ok" else 503)
        if path == "/metrics":
            text = await metrics.render(pool, session, settings.health_timeout)
            return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
        if path == "/replicas":
            names = ("url", "state", "why", "num_running", "num_sent")
            return JSONResponse([{name: getattr(replica, name) for name in names} for replica in pool.replicas])
        if path == "/replica":
            raise ApiError("this is a router; /replicas lists its servers", 404)
        return None

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        if scope["path"] in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            raise ApiError("this is a router, whose servers have the same adapters: ask each of them", 404)
        answer = await own(scope["path"]) if scope["method"] == "GET" else None
        await (answer or forwarder)(scope, receive, send)

    guard = Guard(app, settings.front)

    async def named(scope: Message, receive: Receive, send: Send) -> None:
        """Give every request its name here, so that the logs of router and replica have the same."""
        if scope["type"] == "http" and not any(name == b"x-request-id" for name, _ in scope["headers"]):
            scope = {**scope, "headers": [*scope["headers"], (b"x-request-id", new_id("req_").encode())]}
        await guard(scope, receive, send)

    return named
