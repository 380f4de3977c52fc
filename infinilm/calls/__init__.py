"""Calls of an `LLM`: they submit requests to the engine thread and wait for their results."""

from infinilm.calls.handle import Request
from infinilm.calls.streams import AsyncRequests

__all__ = ["AsyncRequests", "Request"]
