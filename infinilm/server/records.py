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

from infinilm.calls import AsyncRequests
from infinilm.requests.request import GenerationRequest

__all__ = [
    "LEFT",
    "NO_HANDLER",
    "Phases",
    "Record",
    "current",
    "fail_current",
    "log_request",
    "name_of_current",
    "phases",
]

_requests = logging.getLogger("infinilm.requests")

LEFT = 499
"""The status of a request whose client left before its answer was all there; nginx has this number for it."""

NO_HANDLER = "none"
"""Stands for all paths that no route has, so that requests for made-up paths make no new time series."""

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
        Headers of the request.
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
        The span of the trace, if there is one.
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


@dataclass(frozen=True, slots=True)
class Phases:
    """What a sequence spent its time with, in seconds; `has_tokens`: all but `queue` count only if it has some."""

    has_tokens: bool
    queue: float  # from arrival to the first step
    ttft: float  # from arrival to the first token
    prefill: float  # from the first step to the first token
    decode: float  # from the first token to the last

    @property
    def inference(self) -> float:
        """From the first step to the last token."""
        return self.prefill + self.decode

    @property
    def e2e(self) -> float:
        """From arrival to the last token."""
        return self.ttft + self.decode


def phases(request: GenerationRequest, number: int) -> Phases | None:
    """The phases of one of the sequences of a prompt; None: it was never scheduled."""
    sequence = request.completions[number].sequence
    start = (sequence if number else request.leader).first_scheduled
    if not start:
        return None
    times = sequence.token_times
    first, last = (times[0], times[-1]) if times else (start, start)
    return Phases(bool(times), start - request.arrival, first - request.arrival, first - start, last - first)


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
