"""The engine layer, for programs that schedule by themselves: `InferEngine`, its inputs, and hooks."""

from infinilm.distributed import DistConfig
from infinilm.engine.control_vector import ControlVector
from infinilm.engine.hooks import HookRegistry
from infinilm.engine.infer_engine import InferEngine

__all__ = ["ControlVector", "DistConfig", "HookRegistry", "InferEngine"]
