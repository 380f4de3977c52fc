"""AutoConfig: folders that are read, files that are damaged, and what is logged of keys."""

from __future__ import annotations

import json
import logging

import pytest
from config.folders import write
from goldens import GOLDENS, golden

from infinilm.config.families import family_of_model_type
from infinilm.config.json.model_config import AutoConfig, LlamaConfig
from infinilm.config.json.wrappers import WRAPPERS
from infinilm.errors import ConfigError


@pytest.mark.parametrize("name", GOLDENS)
def test_every_golden_configuration_is_read(name, caplog):
    folder = golden(name)
    with caplog.at_level(logging.WARNING, logger="infinilm"):
        config = AutoConfig.from_pretrained(folder)
    assert not caplog.records
    raw = json.loads((folder / "config.json").read_text())
    text = raw | raw.get("text_config", {})
    if raw["architectures"][0] in WRAPPERS:  # the model is its text part
        raw = {
            "architectures": [family_of_model_type(text["model_type"]).architecture],
            "model_type": text["model_type"],
        }
    assert config.dtype == text.get("dtype", text.get("torch_dtype"))
    for key in ("vocab_size", "hidden_size", "num_hidden_layers"):
        others = {
            "hidden_size": ("n_embd", "d_model", "n_embed"),
            "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
        }
        said = next(text[other] for other in (key, *others.get(key, ())) if other in text)
        assert getattr(config, key) == said
    assert config.architectures == raw["architectures"]
    assert config.model_type == family_of_model_type(raw["model_type"]).model_type
    assert config == AutoConfig.from_pretrained(str(folder)) == LlamaConfig.from_dict(config.to_dict())


def test_no_config_json_says_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json: the folder has no config\.json\. Give the folder of"):
        AutoConfig.from_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"nowhere.*there is no such folder"):
        AutoConfig.from_pretrained(tmp_path / "nowhere")
    (tmp_path / "model.bin").touch()
    with pytest.raises(FileNotFoundError, match="there is no such folder"):
        AutoConfig.from_pretrained(tmp_path / "model.bin")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_type": "llama",\n "vocab_size": }', "not valid JSON at line 2, column 16: Expecting value"),
        ("", "not valid JSON at line 1, column 1"),
        ("[1]", "must hold a JSON object; got a list"),
        (
            "{}",
            "model_type is missing; it must name the model's family, such as 'llama'",
        ),
        ('{"architectures": ["LlamaForCausalLM"]}', "model_type is missing"),
        ('{"model_type": null}', "model_type is missing"),
        ('{"model_type": "t5"}', "model_type 't5' is not supported"),
        ('{"model_type": "llama", "eos_token_id": "</s>"}', "eos_token_id must be an int or a list of ints"),
    ],
)
def test_bad_files_are_named_with_the_position(text, message, tmp_path):
    with pytest.raises(ConfigError, match=message) as caught:
        AutoConfig.from_pretrained(write(tmp_path, text))
    assert str(tmp_path / "config.json") in str(caught.value)


def test_bad_utf8_is_a_config_error_and_a_byte_order_mark_is_not(tmp_path):
    file = tmp_path / "config.json"
    file.write_bytes(b'{"model_type": "llama", "x": "\xff"}')
    with pytest.raises(ConfigError, match="not UTF-8 at byte 30"):
        AutoConfig.from_pretrained(tmp_path)
    file.write_bytes(b'\xef\xbb\xbf{"model_type": "llama"}')
    assert AutoConfig.from_pretrained(tmp_path) == LlamaConfig()


def test_messages_and_warnings_are_bounded(tmp_path, caplog):
    values = {"model_type": "llama", **{f"key{i}": i for i in range(10**5)}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    AutoConfig.from_pretrained(tmp_path)
    assert 100 < len(caplog.text) < 1000
    for bad in ({"model_type": "x" * 10**6}, {"rope_scaling": {"rope_type": "x" * 10**6}}, {"hidden_size": 10**4000}):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | bad))
        with pytest.raises(ConfigError, match=r"config\.json: ") as caught:
            AutoConfig.from_pretrained(tmp_path)
        assert len(str(caught.value)) < 2000


CHUNKS = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}


def test_dual_chunk_attention_limits_the_context(caplog):
    values = {"model_type": "qwen2", "max_position_embeddings": 1010000, "dual_chunk_attention_config": CHUNKS}
    assert LlamaConfig.from_dict(values).max_position_embeddings == 262144 - 8192
    assert "dual chunk attention" in caplog.text
    caplog.clear()
    short = LlamaConfig.from_dict(values | {"max_position_embeddings": 1000})
    assert (short.max_position_embeddings, caplog.text) == (1000, "")
    assert LlamaConfig.from_dict(values | {"dual_chunk_attention_config": None}).max_position_embeddings == 1010000
    for bad in (3, {}, {"chunk_size": 8, "local_size": 8}, {"chunk_size": "x"}):
        with pytest.raises(ConfigError, match="dual_chunk_attention_config"):
            LlamaConfig.from_dict(values | {"dual_chunk_attention_config": bad})


def test_unknown_keys_are_logged_and_bookkeeping_is_not(tmp_path, caplog):
    values = {"model_type": "llama", "transformers_version": "4.1", "pretraining_tp": 2, "temperature": 0.6}
    with caplog.at_level(logging.DEBUG, logger="infinilm"):
        assert AutoConfig.from_pretrained(write(tmp_path, values)).pretraining_tp == 2
        assert not caplog.records
        AutoConfig.from_pretrained(write(tmp_path, {**values, "brand_new_key": 1}))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "brand_new_key" in caplog.text


def test_null_means_absent_but_for_the_keys_where_it_says_something(tmp_path):
    nothing = dict.fromkeys(("vocab_size", "head_dim", "hidden_act", "rope_scaling", "tie_word_embeddings", "dtype"))
    assert AutoConfig.from_pretrained(write(tmp_path, {"model_type": "qwen3", **nothing})) == LlamaConfig(
        model_type="qwen3"
    )
    mistral = AutoConfig.from_pretrained(
        write(tmp_path, {"model_type": "mistral", "num_key_value_heads": None, "sliding_window": None})
    )
    assert mistral.num_key_value_heads == 32 and mistral.sliding_window is None
    llama = AutoConfig.from_pretrained(write(tmp_path, {"model_type": "llama", "bos_token_id": None}))
    assert llama.bos_token_id == []
