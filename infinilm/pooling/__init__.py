"""How the hidden states of a text become its vector: what a checkpoint says, and the steps."""

from infinilm.pooling.recipe import VectorRecipe

__all__ = ["VectorRecipe"]
