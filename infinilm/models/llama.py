"""Llama-like models by the names of their design documents."""

from infinilm.config import LlamaConfig
from infinilm.models.auto import AutoLlamaModel, AutoModelForCausalLM
from infinilm.models.reference import ReferenceModel

__all__ = ["AutoLlamaModel", "AutoModelForCausalLM", "LlamaConfig", "ReferenceModel"]
