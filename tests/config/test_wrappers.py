"""Wrappers around text parts of any family: their config.json is read as that of the text part."""

from __future__ import annotations

import re
from typing import Any

import pytest
from goldens import GOLDENS, config_of

from infinilm.config.families import FAMILIES
from infinilm.config.json.model_config import LlamaConfig
from infinilm.config.json.wrappers import WRAPPERS
from infinilm.errors import ConfigError

TEXTS = [name for name in GOLDENS if "text_config" not in config_of(name)][::7]


def wrapper(name: str, text: dict[str, Any], **more: Any) -> dict[str, Any]:
    model_type, keys = WRAPPERS[name]
    others = {"model_type": model_type, "architectures": [name], "vision_config": {"hidden_size": 9}}
    return {**others, **more, keys[-1]: text}


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_text_part_is_the_model(name: str) -> None:
    """A wrapper of several families gives their configurations, also without the name of its class."""
    assert name not in FAMILIES
    for golden in TEXTS:
        text = config_of(golden)
        expected = LlamaConfig.from_dict(text)
        assert LlamaConfig.from_dict(wrapper(name, text)) == expected
        nameless = wrapper(name, text)
        del nameless["architectures"]
        assert LlamaConfig.from_dict(nameless) == expected


def test_what_stands_beside_the_text_part() -> None:
    text = {**config_of("qwen2"), "tie_word_embeddings": None}
    for key in ("dtype", "torch_dtype", "eos_token_id"):
        text.pop(key, None)
    name = "LlavaForConditionalGeneration"
    config = LlamaConfig.from_dict(
        wrapper(name, text, dtype="float16", eos_token_id=7, tie_word_embeddings=True, hidden_size=1)
    )
    assert (config.dtype, config.eos_token_id, config.tie_word_embeddings) == ("float16", [7], True)
    assert config.hidden_size == text["hidden_size"] and config.architecture == "Qwen2ForCausalLM"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("LlavaForConditionalGeneration", None, "text_config of LlavaForConditionalGeneration, which is its text part"),
        ("InternVLChatModel", 3, "llm_config of InternVLChatModel, which is its text part, must be an object; got 3"),
        ("LlavaForConditionalGeneration", {}, "has no model_type, which names the family of its text"),
        ("LlavaForConditionalGeneration", {"model_type": "jamba"}, "model_type 'jamba' is not supported\nmissing: Mam"),
    ],
)  # fmt: skip
def test_what_is_refused(name: str, text: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        LlamaConfig.from_dict(wrapper(name, text))


def test_the_text_part_of_mistral_small_4_is_a_family_of_its_own() -> None:
    """Its wrapper has a row, which is of other text parts."""
    text = {"model_type": "mistral4", "hidden_size": 64, "num_hidden_layers": 2}
    expected = LlamaConfig.from_dict({"architectures": ["Mistral4ForCausalLM"], **text})
    for named in ({}, {"architectures": ["Mistral3ForConditionalGeneration"]}):
        assert LlamaConfig.from_dict({"model_type": "mistral3", **named, "text_config": text}) == expected
