"""HTTP/1 as uvicorn speaks it, with bounds, and for clients that end their sending before they have read.

A request has so much time to be there, and its head so many bytes.

A client that sends no more (`shutdown(SHUT_WR)`, as `nc -N` calls it) still gets its answer. One that is gone looks the
same, as both send FIN. They differ in what they do with bytes that reach them: the system of the one that is gone
refuses them. So such a client is sent the next byte of its answer early, where that is known whatever the answer will
be: an answer begins with "HTTP/1.1 ", and the length of a chunk may begin with zeros.
"""

from __future__ import annotations

import asyncio
import json
import select
from functools import partial
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.utils import is_ssl

from infinilm.server.answers import new_id
from infinilm.server.bodies import ApiError
from infinilm.server.guard import MAX_HEAD_BYTES, Message, error_body, large_head

__all__ = ["HttpProtocol"]

_BEGIN = b"HTTP/1.1 "  # of every answer


class _BegunTransport:
    """A transport whose client may have the first bytes of what is written next."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.num_sent = 0

    def write(self, data: bytes) -> None:
        """Send what the client does not have."""
        self._transport.write(data[self.num_sent :])
        self.num_sent = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class HttpProtocol(HttpToolsProtocol):
    """One connection. What is wrong before a request reaches the application is told in the form of all errors.

    Attributes
    ----------
    arrival_seconds : float
        From the connection, or from its next request's first byte, to that request's last.
    probe_seconds : float
        From the first early byte for a client that sends no more to the next; these times double.
    """

    arrival_seconds = 60.0
    probe_seconds = 1.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._arrival: asyncio.TimerHandle | None = None
        self._in_head, self._num_head_bytes = True, 0
        self._has_ended = False  # a request, within the bytes that are being read
        self._refusal: select.epoll | None = None  # of bytes, by the system of a client that sends no more
        self._probe: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there."""
        super().connection_made(transport)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has left, or was sent away."""
        self._end_arrival()
        self._end_watch()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Close an idle connection, and one that is busy once its answer is out; uvicorn calls this at its end.

        The close of a TLS connection waits until the client has closed its half. One that is idle may never do so, and
        has nothing to lose.
        """
        super().shutdown()
        if self.transport.is_closing() and is_ssl(self.transport):
            self.loop.call_soon(self.transport.abort)  # behind the word that this half is closed

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more; returns whether it may still get an answer."""
        cycle = self.cycle
        if cycle is None or cycle.more_body or cycle.response_complete or self.pipeline or is_ssl(self.transport):
            return False  # nothing is left to be answered. TLS cannot be closed by half
        cycle.keep_alive = False
        begun = cycle.transport = _BegunTransport(self.transport)  # type: ignore[assignment]
        self._refusal = select.epoll()
        self._refusal.register(self.transport.get_extra_info("socket").fileno(), 0)  # errors are told in any case
        self.loop.add_reader(self._refusal.fileno(), self.transport.abort)
        self._send_early(begun, 0)
        return True

    def _send_early(self, begun: _BegunTransport, count: int) -> None:
        """Send a byte of the answer before the rest, if any is known; `count`: how many were sent so."""
        if count == len(_BEGIN) or self.transport.is_closing():
            return
        if not self.cycle.response_started:
            self.transport.write(_BEGIN[begun.num_sent : begun.num_sent + 1])
            begun.num_sent += 1
        elif self.cycle.chunked_encoding:
            self.transport.write(b"0")
        self._probe = self.loop.call_later(self.probe_seconds * 2**count, self._send_early, begun, count + 1)

    def _end_watch(self) -> None:
        if self._probe is not None:
            self._probe.cancel()
        if self._refusal is not None:
            self.loop.remove_reader(self._refusal.fileno())
            self._refusal.close()
            self._refusal = None

    def data_received(self, data: bytes) -> None:
        """Some bytes of a request."""
        self._has_ended = False
        super().data_received(data)
        if self._in_head and not self._has_ended:  # all of it
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._refuse(large_head())

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        if self._arrival is None:
            self._expect()

    def on_headers_complete(self) -> None:
        """The body follows."""
        self._in_head, self._num_head_bytes = False, 0
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":
            cycle = self.cycle
            cycle.send = partial(_send_without_chunks, cycle, cycle.send)  # type: ignore[method-assign]

    def on_message_complete(self) -> None:
        """The last byte of a request."""
        self._in_head = self._has_ended = True  # the next head follows
        self._end_arrival()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP."""
        self._refuse(ApiError(msg))

    def _unsupported_upgrade_warning(self) -> None:
        """Answer a client that would rather speak another protocol as any other, and without a word in the log."""

    def _expect(self) -> None:
        self._arrival = self.loop.call_later(self.arrival_seconds, self._too_late)

    def _end_arrival(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None

    def _too_late(self) -> None:
        self._arrival = None
        cycle = self.cycle
        if cycle is None or not cycle.response_started or (cycle.response_complete and self._in_head):
            self._refuse(ApiError(f"the request was not there within {self.arrival_seconds:g} s", 408))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        body = json.dumps(error_body(error)).encode()
        head = (
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nx-request-id: {new_id('req_')}\r\nconnection: close\r\n\r\n"
        )
        if not self.transport.is_closing():
            self.transport.write(head.encode() + body)
            self.transport.close()


async def _send_without_chunks(cycle: RequestResponseCycle, send: Any, message: Message) -> None:
    """Send a part of an answer to a client of HTTP/1.0, such as nginx unless it is told otherwise.

    That version has no chunks, in which uvicorn sends what has no length. A stream goes out as it comes, and the end of
    the connection, which uvicorn closes behind every answer of this version, is its end.
    """
    if message["type"] == "http.response.start":
        if not any(name.lower() == b"content-length" for name, _ in message.get("headers", ())):
            cycle.chunked_encoding = False
    elif not cycle.expected_content_length:
        cycle.expected_content_length = len(message.get("body", b""))
    await send(message)
