"""Keys and values of prefixes outside of the cache: in host memory and on disk."""

from infinilm.tiers.disk import DiskTier
from infinilm.tiers.memory import MemoryTier
from infinilm.tiers.segment import Segment
from infinilm.tiers.store import PrefixStore, Tier, open_tiers

__all__ = ["DiskTier", "MemoryTier", "PrefixStore", "Segment", "Tier", "open_tiers"]
