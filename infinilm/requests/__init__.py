"""Many requests at once: the engine thread, scheduler and cache blocks, what becomes of results, and what fits."""

from infinilm.requests.handle import Request
from infinilm.requests.limits import RequestLimits
from infinilm.requests.memory import MemoryPlan, plan_memory

__all__ = ["MemoryPlan", "Request", "RequestLimits", "plan_memory"]
