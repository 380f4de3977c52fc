"""Many requests at once: the engine thread, scheduler and cache blocks, results, and the memory plan."""

from infinilm.requests.cache_plan import MemoryPlan
from infinilm.requests.handle import Request
from infinilm.requests.limits import RequestLimits
from infinilm.requests.memory import plan_memory

__all__ = ["MemoryPlan", "Request", "RequestLimits", "plan_memory"]
