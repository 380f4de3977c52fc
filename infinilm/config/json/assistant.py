"""Gemma 4's drafters: what the config.json of such a checkpoint says. It drafts for the model that it was trained with.

Source of the facts: configuration_gemma4_assistant.py and modeling_gemma4_assistant.py of transformers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from infinilm.checks import INT_LIMIT, as_integer, short_repr
from infinilm.config.json.model_config import ModelConfig
from infinilm.config.spec import AssistantConfig
from infinilm.errors import ConfigError
from infinilm.files import read_json

__all__ = ["assistant_config", "read_assistant"]

# By model_type: that of the models that they draft for, and an architecture of these.
_MODELS = MappingProxyType(
    {
        "gemma4_assistant": ("gemma4", "Gemma4ForConditionalGeneration"),
        "gemma4_unified_assistant": ("gemma4_unified", "Gemma4UnifiedForConditionalGeneration"),
    }
)


def read_assistant(folder: str | os.PathLike[str]) -> AssistantConfig:
    """Read the config.json of a drafter.

    Raises
    ------
    FileNotFoundError
        There is no such file.
    ConfigError
        It is of no such drafter, or of one that is not supported.
    """
    path = Path(folder) / "config.json"
    try:
        return assistant_config(read_json(path, error=ConfigError))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def assistant_config(values: Mapping[str, Any]) -> AssistantConfig:
    """Read the content of a config.json; ConfigError: as for `read_assistant`."""
    model_type, text = values.get("model_type"), values.get("text_config")
    if not isinstance(model_type, str) or model_type not in _MODELS:
        raise ConfigError(
            f"this is no MTP head of its own: expected the model_type {' or '.join(map(repr, _MODELS))}, got "
            f"{short_repr(model_type)}; a smaller model drafts with the method 'draft_model'"
        )
    if not isinstance(text, Mapping):
        raise ConfigError(f"text_config: expected a mapping with the sizes of its layers, got {short_repr(text)}")
    # All of its layers read keys and values of the model, which no model of these layers alone could be.
    own = {"hidden_size_per_layer_input": 0, **text, "num_kv_shared_layers": 0}
    own.pop("vocab_size_per_layer_input", None)  # 0: there are none
    of_model, architecture = _MODELS[model_type]
    layers = ModelConfig.from_dict({"model_type": of_model, "architectures": [architecture], "text_config": own})
    layers.validate()
    for key in ("hidden_size_per_layer_input", "num_experts"):
        if getattr(layers, key):
            raise ConfigError(f"{key} is {short_repr(getattr(layers, key))}; layers of such a drafter have none")
    size = as_integer("backbone_hidden_size", values.get("backbone_hidden_size", 1536), below=INT_LIMIT)
    return AssistantConfig(layers, size)
