"""Keys and values of prefixes outside of the cache: in host memory and on disk."""

from infinilm.tiers.disk import DiskTier
from infinilm.tiers.memory import MemoryTier
from infinilm.tiers.prefix_file import PrefixFile
from infinilm.tiers.segment import Segment, identity_of
from infinilm.tiers.store import PrefixStore, Tier, open_tiers

__all__ = ["DiskTier", "MemoryTier", "PrefixFile", "PrefixStore", "Segment", "Tier", "identity_of", "open_tiers"]
