"""What a checkpoint is made for, by its class and its files."""

from __future__ import annotations

from infinilm.pooling.labels import LabelRecipe
from infinilm.pooling.recipe import VectorRecipe

__all__ = ["task_of"]


def task_of(head: str, labels: LabelRecipe | None, vectors: VectorRecipe, *, is_encoder: bool) -> str:
    """Return "generate", "embed", "classify" or "rerank"; `head`: that of the model's configuration."""
    if labels is not None:
        return "rerank" if len(labels.names) == 1 else "classify"
    if vectors.yes_no is not None:
        return "rerank"
    return "embed" if vectors.source or head == "none" or is_encoder else "generate"
