"""Many requests at once: the engine thread, scheduler and cache blocks, what becomes of results, and what fits."""

from infinilm.requests.handle import Request
from infinilm.requests.memory import MemoryPlan, plan_memory

__all__ = ["MemoryPlan", "Request", "plan_memory"]
