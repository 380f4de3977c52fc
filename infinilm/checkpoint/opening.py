"""Opens the weights of a model, whatever they are stored in."""

from __future__ import annotations

from pathlib import Path

from infinilm.checkpoint.folder import Checkpoint
from infinilm.checkpoint.gguf import GgufCheckpoint
from infinilm.gguf.file import is_gguf

__all__ = ["open_checkpoint"]


def open_checkpoint(model: Path) -> Checkpoint | GgufCheckpoint:
    """Open a folder with safetensors, or a GGUF file; raises what the classes raise."""
    return GgufCheckpoint(model) if is_gguf(model) else Checkpoint(model)
