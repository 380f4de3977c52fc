"""EAGLE-3 heads: what the config.json of such a head says. It drafts for the model that it was trained with.

Two forms are read: that of the authors, SpecForge and SGLang, where the keys of the head's layer stand beside those of
the head, and that of the library speculators, which has the layer in `transformer_layer_config`. Sources of the facts:
vLLM's llama_eagle3.py and its `eagle3` of speculators, SGLang's llama_eagle3.py and model_runner.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infinilm.checks import INT_LIMIT, as_boolean, as_integer, short_repr
from infinilm.config.json.model_config import ModelConfig
from infinilm.config.spec import Eagle3Config
from infinilm.errors import ConfigError
from infinilm.files import read_json

__all__ = ["eagle3_config", "read_eagle3"]

# Keys of the head that no layer has.
_OF_HEAD = frozenset(
    {
        *("architectures", "draft_vocab_size", "target_hidden_size", "target_model_type", "norm_before_residual"),
        *("eagle_config", "eagle_aux_hidden_state_layer_ids", "num_hidden_layers", "layer_types", "auto_map"),
        *("speculators_config", "speculators_model_type", "speculators_version", "transformer_layer_config"),
        *("embed_requires_grad", "has_no_defaults_at_init", "parallel_drafting", "max_window_layers"),
    }
)


def read_eagle3(folder: str | os.PathLike[str]) -> Eagle3Config:
    """Read the config.json of a head.

    Raises
    ------
    FileNotFoundError
        There is no such file.
    ConfigError
        It is of no EAGLE-3 head, or of one that is not supported.
    """
    path = Path(folder) / "config.json"
    try:
        return eagle3_config(read_json(path, error=ConfigError))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def eagle3_config(values: Mapping[str, Any]) -> Eagle3Config:
    """Read the content of a config.json; ConfigError: as for `read_eagle3`."""
    nested = values.get("transformer_layer_config")
    names = values.get("architectures") or []
    is_named = isinstance(names, list) and any("eagle3" in str(name).lower() for name in names)
    if not is_named and values.get("speculators_model_type") != "eagle3":
        raise ConfigError(
            "this is no EAGLE-3 head: expected 'architectures' such as ['LlamaForCausalLMEagle3'], or "
            f"'speculators_model_type' 'eagle3'; got architectures {short_repr(names)}"
        )
    of_layer = {**values, **nested} if isinstance(nested, Mapping) else values
    num_layers = as_integer("num_hidden_layers", of_layer.get("num_hidden_layers", 1))
    if num_layers != 1:
        raise ConfigError(f"num_hidden_layers is {num_layers}; heads of one layer are supported")
    known = {key: value for key, value in of_layer.items() if key not in _OF_HEAD}
    layer = ModelConfig.from_dict({**known, "num_hidden_layers": 1})
    target = values.get("target_hidden_size")
    if target is not None and target != layer.hidden_size:
        raise ConfigError(
            f"target_hidden_size is {short_repr(target)} and hidden_size {layer.hidden_size}; a head is supported "
            "that is as wide as its model"
        )
    size = values.get("draft_vocab_size")
    vocab_size = layer.vocab_size if size is None else as_integer("draft_vocab_size", size, below=INT_LIMIT)
    norm = values.get("norm_before_residual", False)
    as_boolean("norm_before_residual", norm, error=ConfigError)
    return Eagle3Config(layer, vocab_size, norm, _taps(values))


def _taps(values: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The layers that a config.json names.

    vLLM takes numbers that stand beside the other keys as they are, layers before which a head reads. SGLang adds one
    to those in `eagle_config`, behind which it reads.
    """
    key, after = "eagle_aux_hidden_state_layer_ids", 0
    found = values.get(key)
    nested = values.get("eagle_config")
    if not found and isinstance(nested, Mapping):
        found, after = nested.get(key), 1
    if not found:
        return None
    if not isinstance(found, list):
        raise ConfigError(f"{key} must be a list of numbers of layers, got {short_repr(found)}")
    return tuple(as_integer(key, layer, least=0) + after for layer in found)
