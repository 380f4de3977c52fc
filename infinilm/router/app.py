"""The routes of the router, as an ASGI application: its own few, and those of the replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import aiohttp
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from infinilm.errors import ConfigError
from infinilm.router.forward import Forwarder
from infinilm.router.metrics import RouterMetrics
from infinilm.router.replicas import Pool, Replica
from infinilm.router.settings import RouterSettings
from infinilm.server.app import handler_of
from infinilm.server.bodies import ApiError, Body, mapping, text
from infinilm.server.guard import App, Guard, Message, Receive, Send
from infinilm.server.keys import Keys
from infinilm.server.records import Record, log_request
from infinilm.tiers import PREFIXES

if TYPE_CHECKING:
    from infinilm.server.traces import Traces

__all__ = ["make_app"]

_REPLICAS = "/replicas"
_REPLICA_PATH = f"{_REPLICAS}/"  # and an index


def make_app(
    settings: RouterSettings,
    pool: Pool,
    forwarder: Forwarder,
    session: aiohttp.ClientSession,
    metrics: RouterMetrics,
    keys: Keys,
    admin_keys: Keys,
    traces: Traces | None = None,
) -> App:
    """The application; it checks hosts, keys and sizes as a server does.

    Parameters
    ----------
    settings : RouterSettings
    pool : Pool
    forwarder : Forwarder
    session : aiohttp.ClientSession
        For the metrics of the replicas.
    metrics : RouterMetrics
    keys : Keys
        Keys of clients.
    admin_keys : Keys
        Keys of operators, who may add and remove replicas. Without such keys no request may.
    traces : Traces, optional
    """
    changes = _Changes(settings, pool)

    async def own(scope: Message, receive: Receive) -> Response | None:
        """The answer to a request that is for the router itself; None: it is for a replica."""
        method, path = scope["method"], scope["path"]
        if _is_change(method, path):
            if not admin_keys:
                raise ApiError("no request may change the replicas of a router without --admin-key-file", 403)
            if method == "DELETE":
                return changes.remove(path)
            return await changes.add(Request(scope, receive))
        if method != "GET":
            return None
        if path in ("/health", "/ping", "/live"):
            num_up = len(pool.up)
            state = "draining" if forwarder.is_draining else "ok" if num_up else "no replica"
            values = {"status": state, "replicas": len(pool.replicas), "replicas_up": num_up}
            return JSONResponse(values, 200 if state == "ok" or path == "/live" else 503)
        if path == "/metrics":
            body = await metrics.render(pool, session, settings.health_timeout)
            return Response(body, media_type="text/plain; version=0.0.4; charset=utf-8")
        if path == _REPLICAS:
            return JSONResponse([_entry(replica) for replica in pool.replicas])
        if path == "/replica":
            raise ApiError("this is a router; /replicas lists its servers", 404)
        return None

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        if scope["path"] in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            raise ApiError("this is a router, whose servers have the same adapters: ask each of them", 404)
        if scope["path"].startswith(PREFIXES):
            raise ApiError("this is a router, and its servers have the prefixes", 404)
        answer = await own(scope, receive)
        await (answer or forwarder)(scope, receive, send)

    def ended(record: Record) -> None:
        metrics.http.add(record)
        if traces is not None:
            traces.end(record)
        if settings.front.log_requests:
            log_request(record)

    def keys_of(method: str, path: str) -> Keys:
        return admin_keys if _is_change(method, path) and admin_keys else keys

    return Guard(app, settings.front, keys_of, _handler_of, ended)


def _is_change(method: str, path: str) -> bool:
    """Whether a request is to change which replicas there are."""
    return (method == "POST" and path == _REPLICAS) or (method == "DELETE" and path.startswith(_REPLICA_PATH))


def _handler_of(path: str) -> str:
    """Name the route that a path has, for metrics; a server names the others."""
    if path.startswith(_REPLICA_PATH):
        return f"{_REPLICA_PATH}{{index}}"
    return path if path == _REPLICAS else handler_of(path)


def _entry(replica: Replica) -> dict[str, Any]:
    names = ("index", "url", "origin", "role", "state", "why", "num_running", "num_sent")
    return {name: getattr(replica, name) for name in names}


class _Changes:
    """Adds and removes replicas while the router runs."""

    def __init__(self, settings: RouterSettings, pool: Pool) -> None:
        self._settings, self._pool = settings, pool

    async def add(self, request: Request) -> Response:
        """Add a replica, if it serves the model of the others."""
        try:
            body = Body(mapping("body", await request.json()))
        except (ValueError, RecursionError) as error:
            raise ApiError(f"the body is not JSON: {error}") from error
        url, key = body.need("url", text), body.take("api_key", text)
        body.finish()
        try:
            replica = self._pool.add(url, key or self._settings.replica_key, origin="added")
        except ConfigError as error:
            raise ApiError(str(error), param="url") from error
        await self._pool.look_at(replica)
        if replica.state == "refused":
            refusal = ApiError(f"replica {replica.url}: {replica.why}", 409, param="url")
            self._pool.remove(replica)
            raise refusal
        return JSONResponse(_entry(replica), 201)

    def remove(self, path: str) -> Response:
        """Send a replica nothing more, and forget it once it is idle."""
        index = path.removeprefix(_REPLICA_PATH)
        found = [replica for replica in self._pool.replicas if str(replica.index) == index]
        if not found:
            raise ApiError(f"there is no replica {index!r}; GET {_REPLICAS} lists them with their indexes", 404)
        replica = found[0]
        if replica.origin in ("started", "dns"):
            keeper = "this process keeps it running" if replica.origin == "started" else "its name in DNS does"
            raise ApiError(f"replica {index} would come back: {keeper}", 409)
        self._pool.retire(replica, "an operator has removed it")
        return JSONResponse(_entry(replica), 202)
