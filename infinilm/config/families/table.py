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
from infinilm.config.families.encoders import ENCODER_FAMILIES
from infinilm.config.families.experts import EXPERT_FAMILIES
from infinilm.config.families.family import Family, Head
from infinilm.config.families.latent import LATENT_FAMILIES
from infinilm.config.families.multimodal import MULTIMODAL_FAMILIES
from infinilm.config.families.norms import NORM_FAMILIES
from infinilm.config.families.shaped import SHAPED_FAMILIES
from infinilm.config.families.state import STATE_FAMILIES
from infinilm.unsupported import unsupported

__all__ = ["FAMILIES", "family_of", "family_of_model_type", "head_of"]

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
            *ENCODER_FAMILIES,
        )
    }
)
"""The supported families by the name in `architectures` of config.json."""


# Ends of the names of other classes with the layers of a row: `Qwen3Model` and `Qwen3ForSequenceClassification` have
# those of `Qwen3ForCausalLM`. Where a family also sees, the class of its text part may be called `Gemma3TextModel`.
# The rows of encoders have such names themselves: `BertForSequenceClassification` has the layers of `BertModel`.
_OTHER_HEADS: Mapping[str, Head] = {"Model": "none", "ForSequenceClassification": "score", "ForMaskedLM": "none"}


def head_of(architecture: str) -> Head:
    """What a class, of a row or another one with its layers, has behind the last norm."""
    if architecture in FAMILIES and not FAMILIES[architecture].two_way:
        return "lm_head"
    return next((head for end, head in _OTHER_HEADS.items() if architecture.endswith(end)), "lm_head")


def family_of(architecture: str) -> Family:
    """Return the row of a class. Raises ConfigError naming it, and why it is not supported."""
    if isinstance(architecture, str):
        names = [architecture]
        for end in _OTHER_HEADS:
            if architecture.endswith(end):
                stem = architecture.removesuffix(end)
                names.append(f"{stem}Model")
                if end != "ForMaskedLM":
                    names += [f"{stem}ForCausalLM", f"{stem.removesuffix('Text')}ForCausalLM"]
        for name in names:
            if name in FAMILIES:
                return FAMILIES[name]
    raise unsupported("architecture", architecture, FAMILIES)


def family_of_model_type(model_type: str) -> Family:
    """Return the row of `model_type`. Raises ConfigError naming it, and why it is not supported."""
    for family in FAMILIES.values():
        if model_type == family.model_type or model_type in family.other_model_types:
            return family
    raise unsupported("model_type", model_type, (family.model_type for family in FAMILIES.values()))
