"""Weights from files: checkpoint folders, their headers, and conversion between dtypes."""

from infinilm.checkpoint.folder import Checkpoint, resolve_model
from infinilm.checkpoint.loading import load_weights
from infinilm.checkpoint.opening import open_checkpoint

__all__ = ["Checkpoint", "load_weights", "open_checkpoint", "resolve_model"]
