"""Weights from files: checkpoint folders, their headers, and conversion between dtypes."""

from infinilm.checkpoint.folder import Checkpoint, resolve_model
from infinilm.checkpoint.loading import load_weights

__all__ = ["Checkpoint", "load_weights", "resolve_model"]
