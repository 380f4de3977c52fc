"""`PrefixStore`: the tiers below the cache, as one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

from infinilm.planning.sizes import parse_size
from infinilm.tiers.disk import DiskTier
from infinilm.tiers.memory import MemoryTier
from infinilm.tiers.segment import Segment

__all__ = ["PrefixStore", "Tier", "open_tiers"]


class Tier(Protocol):
    """Keeps segments by key. Its methods may be called from any thread."""

    setting: str  # that makes it
    max_bytes: int

    def has(self, key: str) -> bool:
        """Whether the segment seems to be here."""

    def read(self, key: str) -> Segment | None:
        """The segment, if it is here and whole."""

    def write(self, key: str, segment: Segment) -> None:
        """Keep a segment as long as there is room; it never fails."""


def open_tiers(
    host_cache: int | str | None, disk_cache: str | os.PathLike[str] | None, disk_cache_size: int | str
) -> list[Tier]:
    """The tiers that settings of an `LLM` name. ConfigError: a size or a folder that cannot be."""
    tiers: list[Tier] = []
    if host_cache is not None:
        tiers.append(MemoryTier(parse_size("host_cache", host_cache)))
    if disk_cache is not None:
        tiers.append(DiskTier(disk_cache, parse_size("disk_cache_size", disk_cache_size)))
    return tiers


class PrefixStore:
    """Tiers, the fastest first. What is written is written to all, what is read comes from the first that has it.

    Parameters
    ----------
    tiers : sequence of Tier
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self.tiers = tuple(tiers)

    @property
    def max_bytes(self) -> int:
        """What the largest tier has room for, which has all that others have."""
        return max((tier.max_bytes for tier in self.tiers), default=0)

    @property
    def name(self) -> str | None:
        """What a tier is called that outlives the process, the same for all that share it; None: there is none."""
        return next((tier.name for tier in self.tiers if isinstance(tier, DiskTier)), None)

    def has(self, key: str) -> bool:
        """Whether a tier has the segment."""
        return any(tier.has(key) for tier in self.tiers)

    def lacks(self, key: str) -> bool:
        """Whether a tier does not have the segment."""
        return not all(tier.has(key) for tier in self.tiers)

    def read(self, key: str) -> Segment | None:
        """The segment; faster tiers have it from then on."""
        for place, tier in enumerate(self.tiers):
            if (segment := tier.read(key)) is not None:
                for faster in self.tiers[:place]:
                    faster.write(key, segment)
                return segment
        return None

    def write(self, key: str, segment: Segment) -> None:
        """Keep a segment in all tiers."""
        for tier in self.tiers:
            tier.write(key, segment)
