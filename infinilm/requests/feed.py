"""`Feed`: the works of a call, drawn and started as the engine has room for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from infinilm.errors import QueueFullError
from infinilm.requests.engine_thread import EngineThread
from infinilm.requests.request import GenerationRequest, LogitsWork, News, Work

__all__ = ["Drawn", "Feed"]

Unit = TypeVar("Unit", GenerationRequest, LogitsWork)
_RETRY = 0.01  # seconds until a full queue of others is tried again


@dataclass(slots=True)
class Drawn(Generic[Unit]):
    """What a call asks for, made as it is drawn.

    Attributes
    ----------
    units : iterator of GenerationRequest or LogitsWork
        In the order of the prompts. Drawing the next one reads a prompt, where the prompts were not read before.
    total : int or None
        Sequences of all of them; None: it shows when the last one is drawn.
    room : int
        Works that may be open at the same time.
    """

    units: Iterator[Unit]
    total: int | None
    room: int


class Feed(Generic[Unit]):
    """Starts the works of a call and knows which are open, so that a call of any length takes bounded memory.

    Where the number of prompts is known, they are started together, as many as there is room for, and again when half
    of the room is free. Else they are drawn one by one, whenever nothing waits to be read: drawing may take long.

    Parameters
    ----------
    thread : EngineThread
    drawn : Drawn
    deliver : callable
        Gets the news of all works, in the engine thread.
    ends_only : bool
        News of the ends alone.
    """

    def __init__(
        self,
        thread: EngineThread,
        drawn: Drawn[Unit],
        deliver: Callable[[News], object],
        *,
        ends_only: bool = False,
    ) -> None:
        self._thread, self._deliver, self._ends_only = thread, deliver, ends_only
        self._drawn: Drawn[Unit] = drawn
        self._pending: list[Unit] = []  # drawn, and not started: there was no room
        self._left: dict[Unit, int] = {}  # per started unit: ends still to come
        self._units: dict[Work, Unit] = {}  # of works whose ends have not been heard
        self._num_open = 0  # works of such units
        self._has_more, self._has_begun = True, False

    def fill(self, is_quiet: Callable[[], bool]) -> bool:
        """Start what there is room for; returns whether there is something to wait for.

        `is_quiet`: whether all news have been read.

        Raises
        ------
        RequestError
            A prompt that can never be served, and what else drawing raises.
        QueueFullError
            Others fill the queue. Once something was started it is tried again, see `patience`.
        """
        room, is_sized = self._drawn.room, self._drawn.total is not None
        if is_sized and self._num_open > room // 2:
            return True
        while (self._has_more or self._pending) and self._num_open < room and (is_sized or is_quiet()):
            units = self._draw(room - self._num_open, most=room if is_sized else 1)
            if not units or not self._start(units):
                break
        return bool(self._left or self._pending)

    @property
    def patience(self) -> float | None:
        """How long to wait for news before the next `fill`, in seconds; None: as long as it takes."""
        return _RETRY if self._pending and not self._left else None

    def hear(self, work: Work) -> Unit | None:
        """Take in that the end of a work was heard; returns its unit if it was the last end of it."""
        unit = self._units.pop(work)
        self._left[unit] -= 1
        if self._left[unit]:
            return None
        del self._left[unit]
        self._num_open -= len(unit.all_works)
        return unit

    def cancel(self) -> None:
        """End what is open."""
        self._thread.cancel([work for unit in self._left for work in unit.all_works])

    def _draw(self, room: int, most: int) -> list[Unit]:
        """The next units, as many as there is room for, but one in any case where nothing is open."""
        if self._pending and self._left and sum(len(unit.all_works) for unit in self._pending) > room:
            return []
        units, self._pending = self._pending, []
        count = sum(len(unit.all_works) for unit in units)
        while self._has_more and len(units) < most and count < room:
            unit = next(self._drawn.units, None)
            if unit is None:
                self._has_more = False
                break
            size = len(unit.all_works)
            if count + size > room and (units or self._left):
                self._pending = [unit]
                break
            units.append(unit)
            count += size
        return units

    def _start(self, units: list[Unit]) -> bool:
        """Start units; False: the queue is full of the works of others."""
        for unit in units:
            unit.listen(self._deliver, ends_only=self._ends_only)
            self._left[unit] = len(unit.ends)
            self._units.update((work, unit) for work in unit.ends)
        try:
            self._thread.submit([work for unit in units for work in unit.works])
        except QueueFullError:
            if not self._has_begun:
                raise
            for unit in units:
                del self._left[unit]
                for work in unit.ends:
                    del self._units[work]
            self._pending = units + self._pending
            return False
        self._num_open += sum(len(unit.all_works) for unit in units)
        self._has_begun = True
        return True
