"""One record for each request of HTTP: what the log, the metrics and the traces tell of it once it has ended.

The guard begins and ends it. Whatever learns more on the way (which failure a stream ended with, which sequences the
engine ran) adds that to the record of its own task, `current`, so that nothing has to be handed through the routes.
"""

from __future__ import annotations

import logging
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from infinilm.requests.streams import AsyncRequests

__all__ = ["LEFT", "NO_HANDLER", "Record", "current", "fail_current", "log_request", "name_of_current"]

_requests = logging.getLogger("infinilm.requests")

LEFT = 499
"""The status of a request whose client left before its answer was all there; nginx has this number for it."""

NO_HANDLER = "none"
"""Stands for all paths that no route has: whoever asks for made-up paths makes no new time series."""


_LONGEST_PATH = 200  # characters of the log


@dataclass(slots=True)
class Record:
    """A request of HTTP.

    Attributes
    ----------
    request_id, method, path, client : str
        `path` has no query, in which clients of other servers send keys.
    handler : str
        The route: the path if there is such a route, or else `NO_HANDLER`.
    headers : mapping of str to str
        Of the request.
    began, ended : float
        Seconds, perf_counter.
    status : int
        What the client was told in the end: of a stream that ended with an error event, the status of that error.
    has_failed : bool
        Whether it was such a stream.
    running : AsyncRequests or None
        What the engine runs or has run for it.
    replica : int or None
        The index of the replica that has answered last, where this is a router.
    span : object or None
        Of the trace, if there is one.
    """

    request_id: str
    method: str
    path: str
    client: str
    handler: str
    headers: dict[str, str]
    began: float = field(default_factory=time.perf_counter)
    ended: float = 0.0
    status: int = 0
    running: AsyncRequests | None = None
    replica: int | None = None
    span: Any = None
    has_failed: bool = False

    def fail(self, status: int) -> None:
        """Note that the answer has ended with an error of this status, whatever the client was told before."""
        self.status, self.has_failed = status, True

    def details(self) -> dict[str, Any]:
        """What a line of the log tells, by name."""
        told: dict[str, Any] = {
            "request_id": self.request_id,
            "client": self.client,
            "method": self.method,
            "path": self.path[:_LONGEST_PATH],
            "status": self.status,
            "seconds": round(self.ended - self.began, 6),
        }
        if self.replica is not None:
            told["replica"] = self.replica
        if self.running is not None:
            requests = self.running.requests
            completions = [completion for request in requests for completion in request.completions]
            told["prompt_tokens"] = sum(len(request.leader.prompt_token_ids) for request in requests)
            told["cached_tokens"] = sum(request.leader.cached_tokens for request in requests)
            told["generated_tokens"] = sum(len(completion.sequence.token_times) for completion in completions)
            told["finish_reason"] = ",".join(sorted({c.finish_reason or "abort" for c in completions}))
        return told


current: ContextVar[Record | None] = ContextVar("infinilm_record", default=None)
"""The record of the request that this task answers."""


def name_of_current() -> str:
    """The id of the request that this task answers, for the log."""
    record = current.get()
    return "?" if record is None else record.request_id


def fail_current(status: int) -> None:
    """Note that the answer which this task makes has ended with an error of this status."""
    if (record := current.get()) is not None:
        record.fail(status)


def log_request(record: Record) -> None:
    """Write the line of a request that has ended."""
    _requests.info("request", extra={"fields": record.details()})
