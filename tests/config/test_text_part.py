"""config.json of models that also see: which of its keys are those of the text part."""

import json
import logging

import pytest

from infinilm.config.json.model_config import AutoConfig, LlamaConfig
from infinilm.errors import ConfigError

SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
MISTRAL3 = {
    "model_type": "mistral3",
    "architectures": ["Mistral3ForConditionalGeneration"],
    "vision_config": {"model_type": "pixtral", "hidden_size": 9},
    "image_token_index": 10,
}


def read(folder, values):
    (folder / "config.json").write_text(json.dumps(values))
    return AutoConfig.from_pretrained(folder)


def test_a_flat_file_and_one_with_a_text_config_give_the_same(tmp_path):
    rope = {"type": "mrope", "mrope_section": [2, 1, 1]}
    outer = {"model_type": "qwen2_5_vl", "vision_config": {"hidden_size": 9}, "vision_token_id": 5}
    flat = read(tmp_path, {**outer, **SIZES, "rope_scaling": rope, "tie_word_embeddings": True})
    nested = {"model_type": "qwen2_5_vl_text", **SIZES, "rope_parameters": {"rope_type": "default", **rope}}
    nested["rope_parameters"].pop("type")
    assert flat == read(tmp_path, {**outer, "tie_word_embeddings": True, "text_config": nested})
    assert flat.architecture == "Qwen2_5_VLForConditionalGeneration"
    assert (flat.hidden_size, flat.rope_scaling, flat.tie_word_embeddings) == (32, None, True)
    assert flat == LlamaConfig.from_dict(flat.to_dict())


def test_yarn_stays_beside_what_is_for_pictures(tmp_path):
    scaling = {"type": "yarn", "mrope_section": [2, 1, 1], "factor": 4.0, "original_max_position_embeddings": 64}
    config = read(tmp_path, {"model_type": "qwen2_5_vl", **SIZES, "rope_scaling": scaling})
    assert config.rope_scaling == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def test_the_inner_key_counts_and_null_is_nothing(tmp_path):
    text = {"model_type": "mistral", **SIZES, "torch_dtype": "float16", "eos_token_id": None, "sliding_window": None}
    values = {**MISTRAL3, "hidden_size": 7, "dtype": "bfloat16", "eos_token_id": 5, "text_config": text}
    config = read(tmp_path, values)
    assert (config.hidden_size, config.dtype, config.eos_token_id, config.sliding_window) == (32, "float16", [5], None)


@pytest.mark.parametrize(
    ("outer", "inner", "tied"),
    [
        (None, None, False),
        (True, None, True),
        (False, None, False),
        (None, True, True),
        (False, True, True),
        (True, False, True),
        (False, False, False),
    ],
)
def test_embeddings_are_tied_where_either_says_so(tmp_path, outer, inner, tied):
    text = {"model_type": "mistral", **SIZES, "tie_word_embeddings": inner}
    assert read(tmp_path, {**MISTRAL3, "tie_word_embeddings": outer, "text_config": text}).tie_word_embeddings is tied


def test_defaults_of_the_text_part_are_those_of_its_own_family(tmp_path):
    config = read(tmp_path, {**MISTRAL3, "text_config": {"model_type": "mistral"}})
    alone = LlamaConfig(model_type="mistral")
    for key in ("vocab_size", "hidden_size", "head_dim", "rope_theta", "sliding_window", "rms_norm_eps"):
        assert getattr(config, key) == getattr(alone, key)
    assert LlamaConfig(model_type="mistral3").head_dim == 128


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"text_config": 3}, "text_config must be an object; got 3"),
        ({"text_config": {"model_type": "llama"}}, "model_type 'llama' is not supported in Mistral3For.*: mistral"),
        ({"text_config": {"model_type": ["mistral"]}}, "text_config: model_type"),
        ({"text_config": {"model_type": "mistral", "num_experts": 8}}, "num_experts is 8"),
        ({"text_config": {"hidden_size": 0}}, "hidden_size must be"),
    ],
)
def test_what_is_not_supported_is_refused(tmp_path, values, message):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, {**MISTRAL3, **values})


def test_a_text_config_of_another_family_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"text_config is .*only text models are supported"):
        read(tmp_path, {"model_type": "llama", "text_config": {"model_type": "llama"}})
    with pytest.raises(ConfigError, match="rope type 'mrope' is not supported"):
        read(tmp_path, {"model_type": "qwen2", "rope_scaling": {"type": "mrope"}})


def test_unknown_keys_of_both_levels_are_told(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="infinilm"):
        read(tmp_path, {**MISTRAL3, "surprise": 1, "text_config": {"model_type": "mistral", **SIZES, "wonder": 2}})
    (record,) = caplog.records
    assert "surprise" in record.getMessage() and "wonder" in record.getMessage()
