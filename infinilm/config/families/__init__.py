"""The families of models: a row of a table for each, the names of its tensors, and the defaults of its config.json."""

from infinilm.config.families.family import Family
from infinilm.config.families.table import FAMILIES, family_of, family_of_model_type

__all__ = ["FAMILIES", "Family", "family_of", "family_of_model_type"]
