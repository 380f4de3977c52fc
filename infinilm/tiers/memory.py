"""`MemoryTier`: segments in the memory of the host."""

from __future__ import annotations

import threading
from collections import OrderedDict

from infinilm.tiers.segment import Segment

__all__ = ["MemoryTier"]


class MemoryTier:
    """The segments that were used last, up to a number of bytes.

    Parameters
    ----------
    max_bytes : int
    """

    setting = "host_cache"

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._num_bytes = 0
        self._segments: OrderedDict[str, Segment] = OrderedDict()  # by key, the least recently used first
        self._lock = threading.Lock()

    def has(self, key: str) -> bool:
        """Whether the segment is here."""
        with self._lock:
            return key in self._segments

    def read(self, key: str) -> Segment | None:
        """The segment, if it is here."""
        with self._lock:
            if (found := self._segments.get(key)) is not None:
                self._segments.move_to_end(key)
            return found

    def write(self, key: str, segment: Segment) -> None:
        """Keep a segment, and let go of those that were not used for the longest time."""
        with self._lock:
            if key in self._segments or segment.num_bytes > self.max_bytes:
                return
            self._segments[key] = segment
            self._num_bytes += segment.num_bytes
            while self._num_bytes > self.max_bytes:
                _, lost = self._segments.popitem(last=False)
                self._num_bytes -= lost.num_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all segments."""
        return self._num_bytes
