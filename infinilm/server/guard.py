"""What stands before every route: whose request this is, how large it is, and that errors are of one form.

A plain ASGI layer: it sees messages as they come, so that a body is refused before it is all there, and a stream is
passed on as it is made.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
import time
import zlib
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect

from infinilm.server.answers import new_id
from infinilm.server.bodies import ApiError
from infinilm.server.keys import Keys
from infinilm.server.records import LEFT, Record, current
from infinilm.server.settings import ServerSettings

__all__ = [
    "IGNORED_FIELDS",
    "MAX_HEAD_BYTES",
    "REQUEST_ID",
    "Guard",
    "attended",
    "error_body",
    "error_event",
    "large_head",
]

T = TypeVar("T")
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

logger = logging.getLogger("infinilm.server")

MAX_HEAD_BYTES = 1 << 16  # of the request line and the headers
REQUEST_ID = "infinilm.request_id"  # in the scope of a request that the guard has let in
IGNORED_FIELDS = "x-infinilm-ignored-fields"  # a header of answers: fields of the request that were not known
_REQUEST_ID = re.compile(r"[!-~]{1,128}")

_GZIP = frozenset({"gzip", "x-gzip"})
_OF_ZIPPED = frozenset({b"content-encoding", b"content-length"})  # headers that do not hold for the body any more

_UNDER_V1 = frozenset(
    {
        *("chat/completions", "completions", "responses", "messages", "messages/count_tokens"),
        *("embeddings", "rerank", "score", "models"),
    }
)
_AT_THE_ROOT = frozenset(
    {
        *("health", "live", "ping", "tokenize", "detokenize", "tokenizer_info", "version", "metrics", "openapi.json"),
        *("pooling", "classify"),
    }
)

OPEN_PATHS = frozenset({"/", "/health", "/live", "/ping"})  # need no key


# Types of errors that Anthropic names otherwise.
_MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: ApiError, path: str = "", request_id: str | None = None) -> dict[str, Any]:
    """An error in the form that OpenAI's clients read, and on the paths of Anthropic's also in that of theirs.

    `request_id`: which Anthropic's tell in the body, too.
    """
    told = {"message": error.message, "type": error.type, "param": error.param, "code": error.code, **error.details}
    if path.startswith("/v1/messages"):
        otherwise = "api_error" if error.status >= 500 else error.type
        body = {"type": "error", "error": told | {"type": _MESSAGES_TYPES.get(error.status, otherwise)}}
        return body if request_id is None else body | {"request_id": request_id}
    return {"error": told}


def error_event(error: ApiError, path: str, request_id: str | None) -> dict[str, Any]:
    """An error as an event of a stream; `request_id`: as that of `error_body`."""
    body = error_body(error, path, request_id)
    if path.startswith("/v1/responses"):  # whose events have their fields at the top, as well as where clients look
        body |= {**body["error"], "type": "error"}
    return body


class Guard:
    """Checks host, origin, key and size; turns errors into answers; keeps a record of each request.

    Parameters
    ----------
    app : ASGI application
    settings : ServerSettings
    keys_of : callable
        Gives the keys that open a route, of its method and path.
    handler_of : callable
        Gives the name of the route of a path, see `Record.handler`.
    ended : callable
        Gets the record of each request that has ended.
    """

    def __init__(
        self,
        app: App,
        settings: ServerSettings,
        keys_of: Callable[[str, str], Keys],
        handler_of: Callable[[str], str],
        ended: Callable[[Record], object],
    ) -> None:
        self._app, self._settings, self._keys_of = app, settings, keys_of
        self._handler_of, self._ended = handler_of, ended

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """One request, by the rules of ASGI."""
        if scope["type"] != "http":
            await _no_request(scope, receive, send)
            return
        asked = scope["path"]
        scope = {**scope, "path": _known_path(_plain_path(asked), self._settings.root_path)}
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        origin = self._allowed_origin(headers.get("origin"))
        # The name of the request in logs: the client's own, or a new one.
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else new_id("req_")
        scope[REQUEST_ID] = request_id
        host, port = scope.get("client") or ("", 0)
        path = scope["path"]
        record = Record(request_id, scope["method"], path, f"{host}:{port}", self._handler_of(path), headers)
        current.set(record)
        started = complete = False

        async def sending(message: Message) -> None:
            nonlocal started, complete
            if message["type"] == "http.response.start":
                started = True
                record.status = message["status"]
                more = [(b"x-request-id", request_id.encode())]
                if scope["path"].startswith("/v1/messages"):
                    more.append((b"request-id", request_id.encode()))  # as Anthropic calls it
                if origin is not None:
                    more += [
                        (b"access-control-allow-origin", origin.encode("latin-1")),
                        (
                            b"access-control-expose-headers",
                            b"x-request-id, request-id, retry-after, " + IGNORED_FIELDS.encode(),
                        ),
                        (b"vary", b"Origin"),
                    ]
                message["headers"] = [*message.get("headers", []), *more]
            elif message["type"] == "http.response.body":
                complete = not message.get("more_body", False)
                if complete:  # before the client can ask for what was counted
                    self._end(record)
            await send(message)

        try:
            if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                await self._preflight(sending, origin, headers)
                return
            _check_head(scope)
            self._check_host(scope)
            self._check(scope["method"], scope["path"], headers)
            if asked == self._settings.root_path and scope["method"] == "GET":
                await _redirect(sending, f"{asked}/")  # the page's own addresses begin where it is
                return
            receive = self._bounded(receive, headers)
            if headers.get("content-encoding", "").strip().lower() in _GZIP:
                receive = _unzipped(receive, self._settings.max_body_bytes)
                scope["headers"] = [item for item in scope["headers"] if item[0] not in _OF_ZIPPED]
            await self._app(scope, receive, sending)
        except ApiError as error:
            if started:
                raise
            await send_error(sending, error, scope["path"], request_id)
        except ClientDisconnect:  # before its request or its answer was all there: what would be said is not read
            record.status = record.status if record.has_failed else LEFT
        except Exception:
            logger.exception("the request %s to %.200r failed", request_id, scope["path"])
            record.status = 500
            if not started:
                failure = ApiError("the server failed; its log says why", 500)
                await send_error(sending, failure, scope["path"], request_id)
            elif not complete:
                raise  # the connection is closed, so that half an answer is not taken for a whole one
        finally:
            self._end(record)

    def _end(self, record: Record) -> None:
        if not record.ended:
            record.ended = time.perf_counter()
            self._ended(record)

    def _allowed_origin(self, origin: str | None) -> str | None:
        allowed = self._settings.allowed_origins
        if origin is None or not allowed:
            return None
        return "*" if "*" in allowed else origin if origin in allowed else None

    def _check_host(self, scope: Message) -> None:
        hosts = self._settings.allowed_hosts
        given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(given) > 1 or (not given and scope["http_version"] != "1.0"):  # no browser speaks HTTP/1.0
            raise ApiError(f"expected one Host header, got {len(given)}", 400)
        for host in given:
            name = host[: host.rfind("]") + 1] if host.startswith("[") else host.split(":", 1)[0]
            if "*" not in hosts and name.lower() not in hosts:
                raise ApiError(f"host {name!r} is not served here; start the server with --allowed-hosts {name}", 403)

    def _check(self, method: str, path: str, headers: dict[str, str]) -> None:
        keys = self._keys_of(method, path)
        if keys and path not in OPEN_PATHS and not keys.are_in(headers):
            raise ApiError(
                # By OpenAI's words at the beginning LiteLLM knows what it is.
                "Incorrect API key provided, or none; send it as 'Authorization: Bearer KEY'",
                401,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if method == "POST":
            kind = headers.get("content-type", "").split(";", 1)[0].strip().lower()
            if kind != "application/json":  # other kinds can be sent by any web page without being asked
                raise ApiError(f"content-type must be application/json, got {kind or 'none'}", 415)
            coding = headers.get("content-encoding", "identity")
            if coding.strip().lower() not in {"identity", *_GZIP}:
                raise ApiError(f"content-encoding {coding!r} is not supported: send gzip, or the body as it is", 415)

    def _bounded(self, receive: Receive, headers: dict[str, str]) -> Receive:
        limit = self._settings.max_body_bytes
        error = _large_body(limit)
        declared = headers.get("content-length", "0")
        if not declared.isdecimal() or int(declared) > limit:
            raise error
        num_bytes = 0

        async def receiving() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > limit:
                raise error
            return message

        return receiving

    async def _preflight(self, send: Send, origin: str | None, asked: dict[str, str]) -> None:
        allowed = origin is not None
        wanted = asked.get("access-control-request-headers", "authorization, content-type, x-api-key")
        headers = [
            (b"access-control-allow-methods", b"GET, POST"),
            (b"access-control-allow-headers", wanted.encode("latin-1")),  # OpenAI's clients send a dozen of their own
            (b"access-control-max-age", b"600"),
        ]
        await send({"type": "http.response.start", "status": 204 if allowed else 403, "headers": headers * allowed})
        await send({"type": "http.response.body", "body": b""})


async def attended(receive: Receive, work: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
    """Run `work` to its end; it is cancelled when its client leaves, or when its time is over.

    Parameters
    ----------
    receive : callable
        ASGI's `receive` behind the body: it gives nothing more until the client leaves.
    work : coroutine
    seconds : float, optional
        That it may take; None: as long as it likes.

    Raises
    ------
    ClientDisconnect
        The client has left.
    asyncio.TimeoutError
        The time is over.
    """
    working, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert working is not None
    ended: list[type[Exception]] = []

    def end(why: type[Exception]) -> None:
        if not ended:
            ended.append(why)
            working.cancel()

    async def leave() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        end(ClientDisconnect)

    leaving = asyncio.ensure_future(leave())
    timer = None if seconds is None else loop.call_later(seconds, end, asyncio.TimeoutError)
    try:
        return await work
    except asyncio.CancelledError:
        if not ended:  # it was cancelled from outside
            raise
        if sys.version_info >= (3, 11):
            working.uncancel()
        raise ended[0] from None
    finally:
        leaving.cancel()
        if timer is not None:
            timer.cancel()


async def _no_request(scope: Message, receive: Receive, send: Send) -> None:
    """What ASGI has beside requests: a beginning and an end of the application, which Ray Serve tells; websockets."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close"})
        return
    kind = ""
    while scope["type"] == "lifespan" and kind != "lifespan.shutdown":
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})


def _plain_path(path: str) -> str:
    """Without a slash at the end, or two in a row, as clients make them of a base address that ends with one.

    A redirect would be wrong: some clients follow it without the body of their request.
    """
    return "/" + "/".join(name for name in path.split("/") if name)


def _known_path(path: str, root_path: str) -> str:
    """The path of the route that is meant, where clients and proxies write it otherwise.

    Proxies may leave the prefix that they serve this server under, or cut it. And peers have some routes with /v1 and
    without (llama.cpp all of them), so that clients are told either.
    """
    if root_path and f"{path}/".startswith(f"{root_path}/"):
        path = path.removeprefix(root_path) or "/"
    name = path.removeprefix("/v1").removeprefix("/")
    if name in _UNDER_V1 or name.startswith("models/"):
        return f"/v1/{name}"
    return f"/{name}" if name in _AT_THE_ROOT else path


async def _redirect(send: Send, location: str) -> None:
    headers = [(b"location", location.encode("latin-1")), (b"content-length", b"0")]
    await send({"type": "http.response.start", "status": 308, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def _large_body(limit: int) -> ApiError:
    return ApiError(f"the body is larger than {limit} bytes; --max-body-bytes sets the limit", 413)


def _unzipped(receive: Receive, limit: int) -> Receive:
    """Gives the parts of a gzipped body as they were before, so many bytes in all; ApiError: there are more of them."""
    unzip = zlib.decompressobj(wbits=zlib.MAX_WBITS + 16)  # with the head that gzip has
    num_bytes = 0

    async def receiving() -> Message:
        nonlocal num_bytes
        message = await receive()
        if message["type"] != "http.request":
            return message
        try:
            body = unzip.decompress(message.get("body", b""), limit + 1 - num_bytes)
        except zlib.error as error:
            raise ApiError(f"the body is not gzip, as its content-encoding says: {error}") from error
        num_bytes += len(body)
        if num_bytes > limit:  # the rest is not even unpacked
            raise _large_body(limit)
        more = message.get("more_body", False)
        if unzip.unused_data or (not more and not unzip.eof):
            raise ApiError("the body is not gzip, as its content-encoding says: it ends too early or too late")
        return {**message, "body": body}

    return receiving


def large_head() -> ApiError:
    """The head of a request is too large."""
    return ApiError(f"the head of the request is larger than {MAX_HEAD_BYTES} bytes", 431)


def _check_head(scope: Message) -> None:
    """A head that comes in one piece is read whole, however large; see `HttpProtocol` for one that comes in several."""
    size = len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
    if size + sum(len(name) + len(value) + 4 for name, value in scope["headers"]) > MAX_HEAD_BYTES:
        raise large_head()


async def send_error(send: Send, error: ApiError, path: str, request_id: str) -> None:
    """Answer with an error."""
    body = json.dumps(error_body(error, path, request_id)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    headers += [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
