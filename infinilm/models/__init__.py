"""Models with `generate`: `AutoLlamaModel` opens them, on the engine or as the numpy reference model."""

from infinilm.config import LlamaConfig
from infinilm.models.auto import AutoLlamaModel, AutoModelForCausalLM
from infinilm.models.dynamic_cache import DynamicCache
from infinilm.models.engine_model import EngineModel
from infinilm.models.reference import ReferenceModel

__all__ = ["AutoLlamaModel", "AutoModelForCausalLM", "DynamicCache", "EngineModel", "LlamaConfig", "ReferenceModel"]
