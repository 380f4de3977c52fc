"""HTTP/1 as uvicorn speaks it, with bounds: a request has so much time to be there, and its head so many bytes."""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from infinilm.server.bodies import ApiError
from infinilm.server.guard import error_body

__all__ = ["HttpProtocol"]


class HttpProtocol(HttpToolsProtocol):
    """One connection. What is wrong before a request reaches the application is told in the form of all errors.

    Attributes
    ----------
    arrival_seconds : float
        From the connection, or from its next request's first byte, to that request's last.
    max_head_bytes : int
        Of the request line and the headers; a little more may come in one piece with them.
    """

    arrival_seconds = 60.0
    max_head_bytes = 1 << 16

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._arrival: asyncio.TimerHandle | None = None
        self._in_head, self._num_head_bytes = True, 0
        self._has_ended = False  # a request, within the bytes that are being read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there."""
        super().connection_made(transport)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has left, or was sent away."""
        self._end_arrival()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Some bytes of a request."""
        self._has_ended = False
        super().data_received(data)
        if self._in_head and not self._has_ended:  # all of it
            self._num_head_bytes += len(data)
            if self._num_head_bytes > self.max_head_bytes:
                self._refuse(ApiError(f"the head of the request is larger than {self.max_head_bytes} bytes", 431))

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        if self._arrival is None:
            self._expect()

    def on_headers_complete(self) -> None:
        """The body follows."""
        self._in_head, self._num_head_bytes = False, 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The last byte of a request."""
        self._in_head = self._has_ended = True  # the next head follows
        self._end_arrival()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP."""
        self._refuse(ApiError(msg))

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
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        if not self.transport.is_closing():
            self.transport.write(head.encode() + body)
            self.transport.close()
