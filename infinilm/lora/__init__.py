"""LoRA adapters as PEFT saves them: read, checked against the model, and merged into weights."""

from infinilm.lora.merge import Merge
from infinilm.lora.peft import LoraWeight, PeftAdapter, read_adapter

__all__ = ["LoraWeight", "Merge", "PeftAdapter", "read_adapter"]
