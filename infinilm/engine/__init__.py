"""The engine layer, for those who schedule themselves: `InferEngine`, what it takes, and hooks."""

from infinilm.engine.hooks import HookRegistry
from infinilm.engine.infer_engine import InferEngine

__all__ = ["HookRegistry", "InferEngine"]
