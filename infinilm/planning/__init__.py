"""The memory of a model before it is loaded: weights, workspace, and the blocks of its cache, for each stage."""

from infinilm.planning.cache_plan import MemoryPlan
from infinilm.planning.memory import plan_memory

__all__ = ["MemoryPlan", "plan_memory"]
