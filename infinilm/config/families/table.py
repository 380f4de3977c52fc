"""The table of model families: how their configurations and checkpoints differ from Llama's, as data.

`FAMILIES` has one row per Hugging Face architecture. `ModelConfig` takes its defaults from it, `config/spec.py` reads
the math of a model from it, and `infinilm.checkpoint.sources` the names of its tensors. To add a family, add a row to
the file of its kind; only math that no row can say needs a new column in `family.py` and a branch in the decoder.

Source of the facts: the configuration and modelling files of transformers 5.x; `tests/golden` proves them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from infinilm.config.families.dense import DENSE_FAMILIES
from infinilm.config.families.experts import EXPERT_FAMILIES
from infinilm.config.families.family import Family
from infinilm.config.families.latent import LATENT_FAMILIES
from infinilm.config.families.multimodal import MULTIMODAL_FAMILIES
from infinilm.config.families.norms import NORM_FAMILIES
from infinilm.config.families.shaped import SHAPED_FAMILIES
from infinilm.config.families.state import STATE_FAMILIES
from infinilm.unsupported import unsupported

__all__ = ["FAMILIES", "family_of", "family_of_model_type"]

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.architecture: family
        for family in (
            *DENSE_FAMILIES,
            *NORM_FAMILIES,
            *EXPERT_FAMILIES,
            *STATE_FAMILIES,
            *LATENT_FAMILIES,
            *SHAPED_FAMILIES,
            *MULTIMODAL_FAMILIES,
        )
    }
)
"""The supported families by the name in `architectures` of config.json."""


def family_of(architecture: str) -> Family:
    """Return the row of `architecture`. Raises ConfigError naming it, and why it is not supported."""
    try:
        return FAMILIES[architecture]
    except (KeyError, TypeError):
        raise unsupported("architecture", architecture, FAMILIES) from None


def family_of_model_type(model_type: str) -> Family:
    """Return the row of `model_type`. Raises ConfigError naming it, and why it is not supported."""
    for family in FAMILIES.values():
        if model_type == family.model_type or model_type in family.other_model_types:
            return family
    raise unsupported("model_type", model_type, (family.model_type for family in FAMILIES.values()))
