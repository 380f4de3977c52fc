"""config.json of models whose text part is any family: a wrapper around it that sees or hears.

The text part is a model by itself, with a `model_type` of its own, and that is what is computed: its row of the table
says all of it. Rows of their own have the wrappers whose text part is one family alone (`families/multimodal.py`).
Called by `ModelConfig.from_dict`. Source: the configuration files of transformers 5.24, and of the hub for
`InternVLChatModel`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from infinilm.checks import short_repr
from infinilm.config.families import FAMILIES, family_of, family_of_model_type
from infinilm.config.json.text_part import text_part
from infinilm.errors import ConfigError

__all__ = ["WRAPPERS", "unwrapped"]

_TEXT = ("text_config",)
_LLM = ("text_config", "llm_config")

WRAPPERS: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "AudioFlamingo3ForConditionalGeneration": ("audioflamingo3", _TEXT),
        "AyaVisionForConditionalGeneration": ("aya_vision", _TEXT),
        "Cohere2VisionForConditionalGeneration": ("cohere2_vision", _TEXT),
        "DeepseekVLForConditionalGeneration": ("deepseek_vl", _TEXT),
        "DeepseekVLHybridForConditionalGeneration": ("deepseek_vl_hybrid", _TEXT),
        "Exaone4_5_ForConditionalGeneration": ("exaone4_5", _TEXT),
        "FastVlmForConditionalGeneration": ("fast_vlm", _TEXT),
        "FunAsrNanoForConditionalGeneration": ("fun_asr_nano", _TEXT),
        "Glm46VForConditionalGeneration": ("glm46v", _TEXT),
        "GlmAsrForConditionalGeneration": ("glmasr", _TEXT),
        "GotOcr2ForConditionalGeneration": ("got_ocr2", _TEXT),
        "GraniteSpeechForConditionalGeneration": ("granite_speech", _TEXT),
        "GraniteSpeechPlusForConditionalGeneration": ("granite_speech_plus", _TEXT),
        "HyperCLOVAXVisionV2ForConditionalGeneration": ("hyperclovax_vision_v2", _TEXT),
        "Idefics2ForConditionalGeneration": ("idefics2", _TEXT),
        "InternVLChatModel": ("internvl_chat", ("llm_config",)),
        "InternVLForConditionalGeneration": ("internvl", _TEXT),
        "JanusForConditionalGeneration": ("janus", _TEXT),
        "KimiVLForConditionalGeneration": ("kimi_vl", _TEXT),
        "Lfm2VlForConditionalGeneration": ("lfm2_vl", _TEXT),
        "LightOnOcrForConditionalGeneration": ("lighton_ocr", _TEXT),
        "LlavaForConditionalGeneration": ("llava", _TEXT),
        "LlavaNextForConditionalGeneration": ("llava_next", _TEXT),
        "LlavaNextVideoForConditionalGeneration": ("llava_next_video", _TEXT),
        "LlavaOnevisionForConditionalGeneration": ("llava_onevision", _TEXT),
        "MiniCPMOcrForConditionalGeneration": ("minicpm_ocr", _TEXT),
        "MiniCPMV4_6ForConditionalGeneration": ("minicpmv4_6", _TEXT),
        "MiniCPMV4_7ForConditionalGeneration": ("minicpmv4_7", _TEXT),
        "MiniMaxM3SparseForConditionalGeneration": ("minimax_m3_vl", _TEXT),
        "MossTranscribeDiarizeForConditionalGeneration": ("moss_transcribe_diarize", _TEXT),
        "MusicFlamingoForConditionalGeneration": ("musicflamingo", _TEXT),
        "NemotronH_Nano_VL_V2": ("NemotronH_Nano_VL_V2", _LLM),
        "NemotronH_Omni_Reasoning_V3": ("nemotron_h_omni", _LLM),
        "OmniASRForConditionalGeneration": ("omniasr", _TEXT),
        "Ovis2ForConditionalGeneration": ("ovis2", _TEXT),
        "PerceptionLMForConditionalGeneration": ("perception_lm", _TEXT),
        "QianfanOCRForConditionalGeneration": ("qianfan_ocr", _TEXT),
        "Qwen2AudioForConditionalGeneration": ("qwen2_audio", _TEXT),
        "Qwen3ASRForConditionalGeneration": ("qwen3_asr", _TEXT),
        "Step3p7ForConditionalGeneration": ("step3p7", _TEXT),
        "VibeVoiceAsrForConditionalGeneration": ("vibevoice_asr", _TEXT),
        "VideoLlama3ForConditionalGeneration": ("video_llama_3", _TEXT),
        "VideoLlavaForConditionalGeneration": ("video_llava", _TEXT),
        "VipLlavaForConditionalGeneration": ("vipllava", _TEXT),
        "VoxtralForConditionalGeneration": ("voxtral", _TEXT),
    }
)
"""By the name in `architectures`: the `model_type`, and the keys of which one has the text part's configuration."""

# Wrappers with a row of their own, which is of other text parts than these, by their model_type.
_OTHER_TEXT: Mapping[str, frozenset[str]] = {"Mistral3ForConditionalGeneration": frozenset({"mistral4"})}

_BY_MODEL_TYPE = {model_type: name for name, (model_type, _) in WRAPPERS.items()} | {
    "mistral3": "Mistral3ForConditionalGeneration"
}
# Keys beside the text part that count for it where it has none of its own.
_SHARED = ("dtype", "torch_dtype", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")


def _keys_of_text(name: str, values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys of which one has the text part of a wrapper; none: it is no wrapper of any family."""
    if name in WRAPPERS:
        return WRAPPERS[name][1]
    text = values.get("text_config")
    kind = text.get("model_type") if isinstance(text, Mapping) else None
    return _TEXT if isinstance(kind, str) and kind in _OTHER_TEXT.get(name, ()) else ()


def unwrapped(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config.json of the text part of a wrapper; of other models, the same.

    Raises
    ------
    ConfigError
        There is no text part, or its family is not supported.
    """
    names = values.get("architectures")
    name = names[0] if isinstance(names, list) and names else _BY_MODEL_TYPE.get(str(values.get("model_type")))
    if not isinstance(name, str) or not (keys := _keys_of_text(name, values)):
        return values
    key = next((key for key in keys if values.get(key) is not None), keys[0])
    part: Any = values.get(key)
    if not isinstance(part, Mapping):
        raise ConfigError(f"{key} of {name}, which is its text part, must be an object; got {short_repr(part)}")
    classes = part.get("architectures")
    own = classes[0] if isinstance(classes, list) and classes else None
    kind: Any = part.get("model_type")
    if kind is None and own is None:
        raise ConfigError(f"{key} of {name} has no model_type, which names the family of its text")
    family = family_of(own) if isinstance(own, str) and own in FAMILIES else family_of_model_type(kind)
    kinds: Mapping[str, Mapping[str, Any]] = {kind or family.model_type: {}}
    given = {key: values[key] for key in _SHARED if values.get(key) is not None} | {"text_config": part}
    text = text_part(given, replace(family, text_model_types=kinds))
    return {**text, "model_type": family.model_type, "architectures": [family.architecture]}
