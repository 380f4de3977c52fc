"""Sends a request to a replica and its answer back; what a replica could not end, another one does.

Answers do not depend on where they are made. So a request whose replica is lost before anything was sent is given to
another one, and a stream that has begun is gone on with from the tokens that have arrived: `infinilm.server.replica`.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import aiohttp
from yarl import URL

from infinilm.router.metrics import RouterMetrics
from infinilm.router.prefixes import prefix_hashes
from infinilm.router.replicas import Pool, Replica
from infinilm.router.settings import RouterSettings
from infinilm.server.answers import sent_event
from infinilm.server.bodies import ApiError
from infinilm.server.drain import Drainable
from infinilm.server.guard import REQUEST_ID, Message, Receive, Send, attended, error_event
from infinilm.server.prefixes import PREFILL, PREFIXES_AT
from infinilm.server.records import current, fail_current, name_of_current
from infinilm.server.replica import CONTINUE, RESUMABLE

if TYPE_CHECKING:
    from infinilm.server.traces import Traces

__all__ = ["Forwarder"]

logger = logging.getLogger("infinilm.router")

Headers = list[tuple[bytes, bytes]]

_GENERATING = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"}
_TYPED_EVENTS = ("/v1/responses", "/v1/messages")  # where errors have another form
_OF_A_CONNECTION = {
    b"connection",
    b"keep-alive",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
    b"content-length",
}
_NOT_FORWARDED = _OF_A_CONNECTION | {
    *(b"host", b"authorization", b"x-api-key", b"accept-encoding", b"expect", b"origin"),
    *(b"proxy-authorization", b"proxy-connection", b"x-request-id"),
}
_NOT_RETURNED = _OF_A_CONNECTION | {b"date", b"server", b"x-request-id", b"request-id"}
_MARK = re.compile(rb":([0-9 ]*)")  # the tokens of the events before it
_CONSTRAINTS = {"structured_outputs", "grammar", "json_schema"}
# A constraint is compiled before the first event. One server may be lost at that time by chance; what ended two of them
# would end the next.
_TRIES_OF_CONSTRAINED = 2
_LARGE_BODY = 1 << 18  # bytes that take longer to read than other requests should wait


class _Lost(Exception):
    """A replica could not end what it was given."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A request of a client."""

    method: str
    path: str
    target: str  # with the query
    headers: list[tuple[str, str]]
    body: bytes
    values: dict[str, Any] | None  # of the body, if it is a JSON object
    chain: list[int]  # of its prompt


@dataclass(frozen=True, slots=True)
class _Whole:
    """An answer that is no stream."""

    status: int
    headers: Headers
    body: bytes

    async def send(self, send: Send) -> None:
        headers = [*self.headers, (b"content-length", b"%d" % len(self.body))]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


class _EventStream:
    """The events that a client gets of one answer, of one replica or of several, one after the other.

    Attributes
    ----------
    has_begun : bool
        The client has been told that it is a stream.
    has_events : bool
        It has got some.
    head : dict or None
        What all events share, if another replica can go on.
    token_ids : list of int
        What the events that the client has were made of.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_begun = self.has_events = False
        self.head: dict[str, Any] | None = None
        self.token_ids: list[int] = []

    async def pass_on(self, headers: Headers, pieces: aiohttp.StreamReader) -> bytes:
        """Pass on what one replica sends; returns the last of it, for `end`. Raises _Lost if it is not all.

        Only whole events count, and with them the tokens that they are made of.
        """
        if not self.has_begun:
            self.has_begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        pending: list[bytes] = []
        rest, is_marked = b"", False
        async for data in pieces.iter_any():
            *blocks, rest = (rest + data).split(b"\n\n")
            ready: list[bytes] = []
            for block in blocks:
                if block.startswith(b": {"):
                    self.head, is_marked = json.loads(block[1:]), True
                elif is_marked and (mark := _MARK.fullmatch(block)):
                    self.token_ids += map(int, mark[1].split())
                    ready, pending = [*ready, *pending], []
                else:  # an event, or a comment that fills a silence
                    pending.append(block)
            if not is_marked:
                ready, pending = pending, []
            if ready:
                self.has_events = self.has_events or any(not block.startswith(b":") for block in ready)
                await self._send(_body(b"".join([block + b"\n\n" for block in ready]), more=True))
        if pending or (is_marked and rest):  # an end without the word of the replica: it told why it cannot go on
            raise _Lost("it ended in the middle of an answer")
        return rest

    async def end(self, rest: bytes) -> None:
        """End it as its replica did."""
        await self._send(_body(rest))

    async def fail(self, error: ApiError, path: str, request_id: str | None) -> None:
        """End it with an error; `request_id`: as that of `error_body`."""
        typed = path if path.startswith(_TYPED_EVENTS) else ""
        await self._send(_body(sent_event(error_event(error, typed, request_id)).encode()))


def _sent(body: bytes) -> io.BytesIO | bytes | None:
    """A body as the client of HTTP sends it: a large one piece by piece, between which other requests go on."""
    return io.BytesIO(body) if len(body) > _LARGE_BODY else body or None


def _body(data: bytes, *, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


class Forwarder(Drainable):
    """The routes of the replicas, as an ASGI application.

    Parameters
    ----------
    settings : RouterSettings
    pool : Pool
    session : aiohttp.ClientSession
    metrics : RouterMetrics
    traces : Traces, optional
    """

    def __init__(
        self,
        settings: RouterSettings,
        pool: Pool,
        session: aiohttp.ClientSession,
        metrics: RouterMetrics,
        traces: Traces | None = None,
    ) -> None:
        super().__init__()
        self._settings, self._pool, self._session, self._metrics = settings, pool, session, metrics
        self._traces = traces

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """One request, by the rules of ASGI."""
        if self.is_draining:
            raise ApiError("the server is draining", 503, code="draining", headers={"Retry-After": "5"})
        if self._num_admitted >= self._settings.max_requests:
            raise ApiError(
                f"{self._num_admitted} requests run already; try again later",
                429,
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        self._enter()
        try:
            call = await _read(scope, receive)
            if call is not None:
                await attended(receive, self._answer(call, scope[REQUEST_ID], send))
        finally:
            self._leave()

    async def _answer(self, call: _Call, request_id: str, send: Send) -> None:
        stream = _EventStream(send)
        try:
            await self._try_replicas(call, stream, send)
        except ApiError as error:
            if not stream.has_begun:
                raise
            fail_current(error.status)
            logger.warning("the stream %s could not be ended: %s", name_of_current(), error)
            await stream.fail(error, call.path, request_id)

    async def _try_replicas(self, call: _Call, stream: _EventStream, send: Send) -> None:
        """Give the request to one replica after the other, until it has its answer."""
        refusal: _Whole | None = None
        refused_by: list[Replica] = []
        num_lost = 0
        while num_lost < self._settings.max_attempts:
            replica = await self._next(call, refused_by, stream)
            if replica is None:
                break
            try:
                whole = await self._attempt(call, replica, stream, await self._prefixes_of(call, replica))
            except _Lost as error:
                num_lost += 1
                logger.warning("replica %d (%s) failed at %s: %s", replica.index, replica.url, name_of_current(), error)
                self._pool.doubt(replica, str(error))
                if num_lost == _TRIES_OF_CONSTRAINED and not stream.has_events and _is_constrained(call.values or {}):
                    raise ApiError(
                        "two servers were lost over this request, perhaps over its constraint", 502
                    ) from None
                if stream.has_events and stream.head is None:
                    raise ApiError("the server of this answer was lost; send the request again", 502) from None
                (self._metrics.resumed if stream.has_events else self._metrics.retried).inc()
                continue
            if whole is None:  # all of it has been sent
                return
            self._metrics.answered(replica, whole.status)
            if whole.status not in (429, 503):
                if stream.has_begun:
                    raise ApiError(f"the answer could not be gone on with: {whole.body[:500]!r}", 502)
                await whole.send(send)
                return
            if whole.status == 503:  # it drains, or has died
                self._pool.doubt(replica, "it answers 503")
            refusal = whole
            refused_by.append(replica)
        if num_lost >= self._settings.max_attempts:
            raise ApiError(f"{num_lost} servers were lost over this request", 502)
        if refusal is not None and not stream.has_begun:
            await refusal.send(send)
            return
        raise ApiError("no server is there now; try again", 503, code="no_replica", headers={"Retry-After": "5"})

    async def _next(self, call: _Call, refused_by: list[Replica], stream: _EventStream) -> Replica | None:
        """The next replica to try. A stream that has begun waits for one."""
        end = time.monotonic() + (self._settings.wait_timeout if stream.has_begun else 0)
        replica, matched = self._pool.choose(call.chain, refused_by)
        if replica is None:  # one may be back that was not looked at since
            await self._pool.look_at_all()
            replica, matched = self._pool.choose(call.chain, refused_by)
        while replica is None and (left := end - time.monotonic()) > 0:
            await self._pool.wait_for_change(left)
            refused_by.clear()
            replica, matched = self._pool.choose(call.chain, refused_by)
        if replica is not None:
            self._metrics.chosen(len(call.chain), matched)
        return replica

    async def _prefixes_of(self, call: _Call, replica: Replica) -> Replica | None:
        """Where a replica can fetch the beginning of a prompt from, which another one may compute now; None: nowhere.

        What goes wrong with that is no fault of the request: the replica computes what it does not find.
        """
        matched = replica.prefixes.match(call.chain)
        giver = self._pool.prefixes_for(call.chain, replica, matched)
        known = matched if giver is None else giver.prefixes.match(call.chain)
        prefilling = self._pool.choose_prefill(call.chain, replica, known)
        if prefilling is None:
            return giver
        try:
            answer = await self._attempt(call, prefilling, _EventStream(_no_client), giver, is_prefill=True)
        except _Lost as error:
            logger.warning("replica %d (%s) failed at a prefill: %s", prefilling.index, prefilling.url, error)
            self._pool.doubt(prefilling, str(error))
            return giver
        return prefilling if answer is not None and answer.status == 200 else giver

    async def _attempt(
        self,
        call: _Call,
        replica: Replica,
        stream: _EventStream,
        giver: Replica | None,
        *,
        is_prefill: bool = False,
    ) -> _Whole | None:
        """Give the request to a replica. Returns its answer; None: it was a stream, all of which has been sent.

        `giver`: where it can fetch a prefix from. `is_prefill`: it is to compute the prompt alone.
        """
        more = {} if giver is None else {PREFIXES_AT: giver.url}
        if is_prefill:
            more[PREFILL] = "1"
        if (record := current.get()) is not None:
            record.replica = replica.index
        with replica.running(call.chain):
            work = asyncio.ensure_future(self._exchange(call, replica, stream, more))
            lost = asyncio.ensure_future(replica.lost.wait())
            try:
                await asyncio.wait({work, lost}, return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    return work.result()
                raise _Lost("it is silent")
            finally:
                work.cancel()
                lost.cancel()
                await asyncio.gather(work, lost, return_exceptions=True)

    async def _exchange(
        self, call: _Call, replica: Replica, stream: _EventStream, more: Mapping[str, str]
    ) -> _Whole | None:
        body, headers = call.body, [*self._traced(call.headers), *replica.headers.items(), *more.items()]
        values = call.values or {}
        if PREFILL not in more and values.get("stream") is True and CONTINUE not in values:
            headers.append((RESUMABLE, "1"))
            if stream.has_events and stream.head is not None:
                values = values | {CONTINUE: stream.head | {"token_ids": stream.token_ids}}
                is_large = len(body) > _LARGE_BODY
                body = (await asyncio.to_thread(json.dumps, values) if is_large else json.dumps(values)).encode()
        url = URL(replica.url + call.target, encoded=True)
        try:
            async with self._session.request(
                call.method, url, data=_sent(body), headers=headers, allow_redirects=False
            ) as answer:
                returned = [item for item in answer.raw_headers if item[0].lower() not in _NOT_RETURNED]
                if answer.status == 200 and answer.content_type == "text/event-stream":
                    rest = await stream.pass_on(returned, answer.content)
                    self._metrics.answered(replica, 200)  # before the client can ask
                    await stream.end(rest)
                    return None
                return _Whole(answer.status, returned, await answer.read())
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            raise _Lost(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__) from error

    def _traced(self, headers: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """The headers of a request, in the trace as one that this router has sent; as they are without traces."""
        record = current.get()
        if self._traces is None or record is None:
            return headers
        own = self._traces.headers(record)
        return [(name, value) for name, value in headers if name not in own] + list(own.items())


async def _no_client(_: Message) -> None:
    """A prefill is no answer to anyone."""


async def _read(scope: Message, receive: Receive) -> _Call | None:
    """The whole request; None: the client left before."""
    parts: list[bytes] = []
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    body, method, path = b"".join(parts), scope["method"], scope["path"]
    values, chain = None, list[int]()
    if method == "POST":
        generates = path in _GENERATING
        is_large = len(body) > _LARGE_BODY
        values, chain = await asyncio.to_thread(_values, body, generates) if is_large else _values(body, generates)
    query = scope.get("query_string", b"")
    target = quote(path) + (f"?{query.decode('latin-1')}" if query else "")
    # The name that the guard has given to the request: so the logs of router and replica have the same.
    headers = [*_forwarded(scope["headers"]), ("x-request-id", scope[REQUEST_ID])]
    return _Call(method, path, target, headers, body, values, chain)


def _is_constrained(values: Mapping[str, Any]) -> bool:
    """Whether a body says what the answer must look like: by a constraint, a forced call, or a strict tool.

    It is not checked yet, so anything may be anywhere.
    """
    if any(value and (name in _CONSTRAINTS or name.startswith("guided_")) for name, value in values.items()):
        return True
    forms = [values.get("response_format"), *(_field(values.get(name), "format") for name in ("text", "output_config"))]
    if any(_field(form, "type") not in (None, "text") for form in forms):
        return True
    choice = values.get("tool_choice")
    if (_field(choice, "type") if isinstance(choice, dict) else choice) not in (None, "auto", "none"):
        return True
    tools = values.get("tools")
    return isinstance(tools, list) and any(
        _field(part, "strict") is True for tool in tools for part in (tool, _field(tool, "function"))
    )


def _field(value: object, name: str) -> object:
    """A field of what may be an object; None: it is none, or lacks the field."""
    return value.get(name) if isinstance(value, dict) else None


def _values(body: bytes, generates: bool) -> tuple[dict[str, Any] | None, list[int]]:
    """What a body holds if it is a JSON object, and the chain of its prompt. A replica says what is wrong with it."""
    try:
        values = json.loads(body)
    except (ValueError, RecursionError):
        return None, []
    if not isinstance(values, dict):
        return None, []
    with contextlib.suppress(RecursionError):
        return values, prefix_hashes(values) if generates else []
    return values, []  # too deep to be looked at


def _forwarded(headers: Iterable[tuple[bytes, bytes]]) -> Iterable[tuple[str, str]]:
    for name, value in headers:
        if name not in _NOT_FORWARDED and not name.startswith(b"x-infinilm-"):
            yield name.decode("latin-1"), value.decode("latin-1")
