"""An answer as a row of blocks - reasoning, text, calls of tools -, as the newer APIs have it.

A `BlockBuilder` is fed with pieces of one choice and gives the events of a stream; what it holds at the end is the
whole answer. So streamed answers and whole ones have one form.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from infinilm.calls import AsyncRequests
from infinilm.outputs import AnswerPiece, Delta, RequestOutput
from infinilm.server.answers import sent_event
from infinilm.server.chat import ChatCall, chat_pieces

__all__ = ["BlockBuilder", "BlockStream", "Event"]

Event = dict[str, Any]


class BlockBuilder(ABC):
    """Makes blocks of pieces; a subclass says in which words."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._kind: str | None = None  # of the block that is open

    def push(self, piece: AnswerPiece) -> Iterator[Event]:
        """Take a piece; gives its events."""
        for part in piece.parts:
            if part.kind != self._kind or (part.call is not None and "id" in part.call):
                yield from self.end_block()
                self._kind = part.kind
                yield from self._open(part.kind, part.call or {})
            if part.text:
                yield from self._add(part.kind, part.text)

    def end_block(self, is_cut: bool = False) -> Iterator[Event]:
        """Close the block that is open; gives its events. `is_cut`: there was no room for more of it."""
        if self._kind is not None:
            yield from self._close(self._kind, is_cut)
            self._kind = None

    def whole(self, call: ChatCall, output: RequestOutput) -> dict[str, Any]:
        """The answer of a request that has ended."""
        for _ in self.push(call.makers()[0].push(output.outputs[0].text, final=True)):
            pass
        for _ in self.end_block(_is_cut(output)):
            pass
        return self.answer(output)

    @abstractmethod
    def answer(self, output: RequestOutput) -> dict[str, Any]:
        """The answer so far."""

    @abstractmethod
    def begin(self, output: RequestOutput) -> Iterator[Event]:
        """Events before the first block."""

    @abstractmethod
    def end(self, output: RequestOutput) -> Iterator[Event]:
        """Events behind the last block."""

    @abstractmethod
    def _open(self, kind: str, call: Mapping[str, Any]) -> Iterator[Event]: ...

    @abstractmethod
    def _add(self, kind: str, text: str) -> Iterator[Event]: ...

    @abstractmethod
    def _close(self, kind: str, is_cut: bool) -> Iterator[Event]: ...


def _is_cut(output: RequestOutput) -> bool:
    return output.outputs[0].finish_reason == "length"


class BlockStream:
    """The events of a builder, an `AnswerStream`."""

    def __init__(self, builder: BlockBuilder, call: ChatCall, running: AsyncRequests) -> None:
        self._builder, self._running = builder, running
        self._makers = call.makers()

    def begin(self) -> Iterator[str]:
        """The empty answer."""
        return map(sent_event, self._builder.begin(self._running.outputs()[0]))

    def push(self, deltas: Sequence[Delta]) -> Iterator[str]:
        """What is new in the blocks."""
        for _, piece, _ in chat_pieces(self._makers, deltas):
            yield from map(sent_event, self._builder.push(piece))

    def end(self) -> Iterator[str]:
        """The end of the last block, and the whole answer."""
        output = self._running.outputs()[0]
        yield from map(sent_event, self._builder.end_block(_is_cut(output)))
        yield from map(sent_event, self._builder.end(output))
