"""`Feed`: submits the requests of a call as the engine has room for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic

from infinilm.errors import QueueFullError
from infinilm.requests.request import EngineRequest, RequestUpdate
from infinilm.requests.source import AnyRequest, RequestSource
from infinilm.serving.engine_thread import EngineThread

__all__ = ["Feed"]

_RETRY = 0.01  # seconds until a queue that other calls have filled is tried again


class Feed(Generic[AnyRequest]):
    """Submits the requests of a call and knows which are open, so that a call of any length takes bounded memory.

    Where the number of prompts is known, requests are submitted together, as many as there is room for, and again when
    half of the room is free. Otherwise they are made one by one, whenever all updates have been read, because making
    one may take long.

    Parameters
    ----------
    thread : EngineThread
    source : RequestSource
    deliver : callable
        Called in the engine thread with the updates of all requests.
    ends_only : bool
        Deliver only the last update of each.
    """

    def __init__(
        self,
        thread: EngineThread,
        source: RequestSource[AnyRequest],
        deliver: Callable[[RequestUpdate], object],
        *,
        ends_only: bool = False,
    ) -> None:
        self._thread, self._deliver, self._ends_only = thread, deliver, ends_only
        self._source: RequestSource[AnyRequest] = source
        self._pending: list[AnyRequest] = []  # made, and not submitted, because there was no room
        self._num_ends: dict[AnyRequest, int] = {}  # for each open request, how many ends are still to come
        self._request_of: dict[EngineRequest, AnyRequest] = {}  # for each end that is still to come
        self._num_open = 0  # sequences of the open requests
        self._has_more, self._has_begun = True, False

    def fill(self, is_quiet: Callable[[], bool]) -> bool:
        """Submit the requests that there is room for; returns whether there is something to wait for.

        `is_quiet`: whether all updates have been read.

        Raises
        ------
        RequestError
            A prompt that can never be served. Other exceptions of the source pass through.
        QueueFullError
            Other calls fill the queue. Once a request was submitted it is tried again instead, see `patience`.
        """
        room, is_sized = self._source.room, self._source.total is not None
        if is_sized and self._num_open > room // 2:
            return True
        while (self._has_more or self._pending) and self._num_open < room and (is_sized or is_quiet()):
            requests = self._next_requests(room - self._num_open, most=room if is_sized else 1)
            if not requests or not self._submit(requests):
                break
        return bool(self._num_ends or self._pending)

    @property
    def patience(self) -> float | None:
        """Seconds to wait for updates before the next `fill`; None: as long as it takes."""
        return _RETRY if self._pending and not self._num_ends else None

    def take_end(self, ended: EngineRequest) -> AnyRequest | None:
        """Note that a sequence has ended; returns its request if all of that has ended now."""
        request = self._request_of.pop(ended)
        self._num_ends[request] -= 1
        if self._num_ends[request]:
            return None
        del self._num_ends[request]
        self._num_open -= len(request.all_requests)
        return request

    def cancel(self) -> None:
        """End the open requests."""
        self._thread.cancel([part for request in self._num_ends for part in request.all_requests])

    def _next_requests(self, room: int, most: int) -> list[AnyRequest]:
        """The next requests, as many as there is room for, but at least one where nothing is open."""
        if self._pending and self._num_ends and sum(len(one.all_requests) for one in self._pending) > room:
            return []
        requests, self._pending = self._pending, []
        count = sum(len(request.all_requests) for request in requests)
        while self._has_more and len(requests) < most and count < room:
            request = next(self._source.requests, None)
            if request is None:
                self._has_more = False
                break
            size = len(request.all_requests)
            if count + size > room and (requests or self._num_ends):
                self._pending = [request]
                break
            requests.append(request)
            count += size
        return requests

    def _submit(self, requests: list[AnyRequest]) -> bool:
        """Submit requests; False: the queue is full of requests of other calls."""
        for request in requests:
            request.listen(self._deliver, ends_only=self._ends_only)
            self._num_ends[request] = len(request.reported)
            self._request_of.update((reported, request) for reported in request.reported)
        try:
            self._thread.submit([part for request in requests for part in request.to_submit])
        except QueueFullError:
            if not self._has_begun:
                raise
            for request in requests:
                del self._num_ends[request]
                for reported in request.reported:
                    del self._request_of[reported]
            self._pending = requests + self._pending
            return False
        self._num_open += sum(len(request.all_requests) for request in requests)
        self._has_begun = True
        return True
