"""Weights from files: checkpoint folders, their headers, and conversion between dtypes."""

from infinilm.checkpoint.folder import Checkpoint, load_weights, resolve_model

__all__ = ["Checkpoint", "load_weights", "resolve_model"]
