"""The families of models: a row of a table for each, the names of its tensors, and the defaults of its config.json."""

from infinilm.config.families.family import Family, Head
from infinilm.config.families.table import FAMILIES, family_of, family_of_model_type, head_of

__all__ = ["FAMILIES", "Family", "Head", "family_of", "family_of_model_type", "head_of"]
