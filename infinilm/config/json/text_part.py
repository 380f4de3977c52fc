"""config.json of a model that also sees or hears: the configuration of its text part, which is what infinilm computes.

Such a file has the text part under `text_config`, or, in older ones, among its own keys. Called by
`ModelConfig.from_dict`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infinilm.checks import short_repr
from infinilm.config.families import Family
from infinilm.errors import ConfigError

__all__ = ["text_part"]

# Keys that describe the other parts, and how their output is put among the tokens.
_OTHER_PARTS = frozenset(
    """
    vision_config audio_config image_token_id image_token_index video_token_id vision_start_token_id
    vision_end_token_id vision_token_id projector_hidden_act multimodal_projector_bias vision_feature_layer
    image_start_token_id image_end_token_id video_start_token_id video_end_token_id scale_factor image_seq_len
    spatial_merge_size boi_token_index eoi_token_index mm_tokens_per_image
    audio_token_id boi_token_id eoi_token_id boa_token_id eoa_token_id eoa_token_index
    vision_soft_tokens_per_image audio_soft_tokens_per_image language_model_only
    projection_hidden_size projection_layer_norm_eps ignore_index media_placeholder_token_id use_unified_vision_chunk
    video_placeholder
    """.split()  # noqa: SIM905 (as in keys.py)
)
_DTYPE_KEYS = ("dtype", "torch_dtype")


def text_part(values: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the keys of the text part, without what describes the others.

    A key of `text_config` counts before the same one outside, except that embeddings are tied where either says so. A
    `text_config` of transformers has all keys, so there the default of its class says nothing.

    Raises
    ------
    ConfigError
        `text_config` is no object, or of a model that has other math than the family.
    """
    outer = {key: value for key, value in values.items() if key not in _OTHER_PARTS}
    text = outer.pop("text_config", None)
    if text is None:
        return outer
    if not isinstance(text, Mapping):
        raise ConfigError(f"text_config must be an object; got {short_repr(text)}")
    inner = {key: value for key, value in text.items() if value is not None or outer.get(key) is None}
    kind = inner.pop("model_type", None) or next(iter(family.text_model_types))
    inner.pop("architectures", None)
    if not isinstance(kind, str) or kind not in family.text_model_types:
        raise ConfigError(
            f"text_config: model_type {short_repr(kind)} is not supported in {family.architecture}; supported: "
            f"{', '.join(family.text_model_types)}"
        )
    if any(key in inner for key in _DTYPE_KEYS):
        outer = {key: value for key, value in outer.items() if key not in _DTYPE_KEYS}
    said = [part["tie_word_embeddings"] for part in (outer, inner) if part.get("tie_word_embeddings") is not None]
    is_default = len(said) > 1 and said[1] == family.defaults.get("tie_word_embeddings")
    if tied := said[:1] if is_default else said:
        inner["tie_word_embeddings"] = True if True in tied else tied[0]
    given = {**outer, **inner}
    defaults = dict(family.text_model_types[kind])
    for rope in (given.get("rope_scaling"), given.get("rope_parameters")):
        if isinstance(rope, Mapping):
            defaults.pop("rope_scaling", None)
            if rope.get("rope_theta") is not None:
                defaults.pop("rope_theta", None)
    return {**defaults, **given}
