"""Requests as the engine thread sees them: prompts that are checked, completions and their texts, limits."""

from infinilm.requests.limits import RequestLimits

__all__ = ["RequestLimits"]
