"""Opens the weights of a model, whatever they are stored in."""

from __future__ import annotations

from pathlib import Path

from infinilm.checkpoint.folder import Checkpoint
from infinilm.checkpoint.gguf import GgufCheckpoint
from infinilm.checkpoint.quantised.checkpoint import QuantisedCheckpoint
from infinilm.checkpoint.quantised.config import read_config
from infinilm.gguf.file import is_gguf

__all__ = ["open_checkpoint"]


def open_checkpoint(model: Path) -> Checkpoint | GgufCheckpoint:
    """Open a folder with safetensors, quantised or not, or a GGUF file; raises what the classes raise."""
    if is_gguf(model):
        return GgufCheckpoint(model)
    linears = read_config(model)
    return Checkpoint(model) if linears is None else QuantisedCheckpoint(model, linears)
