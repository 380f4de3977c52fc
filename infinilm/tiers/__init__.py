"""Keys and values of prefixes outside of the cache: in host memory, on disk and on other servers."""

from infinilm.tiers.disk import DiskTier
from infinilm.tiers.memory import MemoryTier
from infinilm.tiers.peers import PREFIXES, Peer, PeerRules, is_key
from infinilm.tiers.prefix_file import PrefixFile
from infinilm.tiers.segment import Segment, identity_of
from infinilm.tiers.store import PrefixStore, Tier, open_tiers

__all__ = [
    "PREFIXES", "DiskTier", "MemoryTier", "Peer", "PeerRules", "PrefixFile", "PrefixStore", "Segment", "Tier",
    "identity_of", "is_key", "open_tiers",
]  # fmt: skip
