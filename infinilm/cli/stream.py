"""Tokens as they come, on stdout, and what Ctrl-C means meanwhile."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Protocol, cast

from infinilm.cli.output import put

if TYPE_CHECKING:
    from infinilm.outputs import TokenEvent
    from infinilm.receipts import Receipt


class CtrlC:
    """While tokens stream, Ctrl-C is noted and acted on between tokens, not in the middle of the engine's work.

    Until the first token and on the second Ctrl-C it raises KeyboardInterrupt as ever: a long prompt takes a while.
    """

    def __init__(self) -> None:
        self.pressed = False
        self.streaming = False
        self._installed = False

    def __enter__(self) -> CtrlC:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            with contextlib.suppress(ValueError):  # not the main thread: no signals here
                signal.signal(signal.SIGINT, self._handle)
                self._installed = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.pressed or not self.streaming:
            raise KeyboardInterrupt
        self.pressed = True


@dataclass(slots=True)
class Reply:
    """What came out of a stream so far."""

    num_tokens: int = 0
    finish_reason: str | None = None
    interrupted: bool = False
    ttft: float = 0.0  # seconds from the request to the first token
    decode_seconds: float = 0.0  # from the first token to the last
    receipts: list[Receipt] = field(default_factory=list)  # of the texts that have ended, if they were asked for


class Printer(Protocol):
    """Prints a text that comes in pieces."""

    def push(self, text: str) -> None:
        """Take more text."""

    def finish(self) -> None:
        """End the last line."""


class PlainPrinter:
    """Prints a text as it is."""

    def push(self, text: str) -> None:
        """Take more text."""
        if text:
            put(text)

    def finish(self) -> None:
        """End the last line."""
        put("\n")


def print_stream(events: Iterator[TokenEvent], reply: Reply, printer: Printer, as_token_ids: bool = False) -> None:
    """Print a stream as it comes; `reply` is complete even when Ctrl-C cuts it short."""
    try:
        for event in read_stream(events, reply):
            printer.push(event_text(event, as_token_ids))
    except KeyboardInterrupt:
        reply.interrupted = True
    finally:
        printer.finish()


def event_text(event: TokenEvent, as_token_ids: bool) -> str:
    """What is printed of an event."""
    return f"{event.token_id} " if as_token_ids and event.token_id is not None else event.text


def read_stream(events: Iterator[TokenEvent], reply: Reply) -> Iterator[TokenEvent]:
    """Hand on events, noted in `reply`, until Ctrl-C or the end."""
    started = time.perf_counter()
    # Closing the generator frees the slot of what is unfinished.
    with CtrlC() as ctrl_c, contextlib.closing(cast("Generator[TokenEvent]", events)):
        try:
            for event in events:
                ctrl_c.streaming = True
                elapsed = time.perf_counter() - started
                reply.ttft = reply.ttft or elapsed
                reply.decode_seconds = elapsed - reply.ttft
                reply.num_tokens += event.token_id is not None
                reply.finish_reason = event.finish_reason
                if event.receipt is not None:
                    reply.receipts.append(event.receipt)
                yield event
                if ctrl_c.pressed and event.finish_reason is None:
                    reply.interrupted = True
                    return
        except KeyboardInterrupt:
            reply.interrupted = True
