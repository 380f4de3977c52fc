"""generation_config.json: what is read, what is refused, what is told; nothing is loaded for it."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from infinilm import ConfigError, RequestError, SamplingParams
from infinilm.text.generation_config import GenerationConfig


def write(folder: Path, values: Any, name: str = "generation_config.json") -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    (folder / name).write_text(values if isinstance(values, str) else json.dumps(values))
    return folder


def test_what_the_file_says_are_the_defaults(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "do_sample": True,
            "temperature": 0.6,
            "top_k": 20,
            "top_p": 0.95,
            "min_p": 0.05,
            "repetition_penalty": 1.05,
            "max_new_tokens": 99,
            "min_new_tokens": 2,
            "stop_strings": ["END"],
            "eos_token_id": [7, 8],
            "bos_token_id": 3,
            "pad_token_id": 9,
            "transformers_version": "5.0",
        },
    )
    config = GenerationConfig.from_folder(tmp_path)
    assert config.sampling_params == SamplingParams(
        temperature=0.6,
        top_k=20,
        top_p=0.95,
        min_p=0.05,
        repetition_penalty=1.05,
        max_tokens=99,
        min_tokens=2,
        stop=["END"],
    )
    assert (config.eos_token_ids, config.bos_token_id, config.pad_token_id) == ((7, 8), 3, 9)
    assert config.not_honoured == () and config.source == str(tmp_path / "generation_config.json")


def test_no_file_and_null_are_as_if_nothing_was_said(tmp_path: Path) -> None:
    plain = GenerationConfig.from_folder(tmp_path)
    assert plain.sampling_params == SamplingParams() and plain.said == frozenset() and plain.eos_token_ids == ()
    write(tmp_path, {"temperature": None, "top_k": None, "max_new_tokens": None, "do_sample": None, "num_beams": None})
    assert GenerationConfig.from_folder(tmp_path).sampling_params == SamplingParams()


def test_do_sample_false_is_greedy_and_the_rest_of_drawing_does_not_count(tmp_path: Path) -> None:
    write(tmp_path, {"do_sample": False, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.2})
    assert GenerationConfig.from_folder(tmp_path).sampling_params == SamplingParams(
        temperature=0, repetition_penalty=1.2
    )


def test_special_tokens_come_from_the_first_file_that_has_them(tmp_path: Path) -> None:
    write(tmp_path, {"eos_token_id": 1, "bos_token_id": 2, "text_config": {"pad_token_id": 3}}, "config.json")
    write(tmp_path, {"eos_token_id": [], "temperature": 0.5})
    config = GenerationConfig.from_folder(tmp_path)
    assert (config.eos_token_ids, config.bos_token_id, config.pad_token_id) == ((1,), 2, 3)
    none = GenerationConfig.from_folder(tmp_path, "none")
    assert none.eos_token_ids == (1,) and none.sampling_params == SamplingParams()
    other = write(tmp_path / "other", {"temperature": 0.1, "bos_token_id": 5})
    for path in (other, other / "generation_config.json", str(other)):
        config = GenerationConfig.from_folder(tmp_path, path)
        assert config.sampling_params.temperature == 0.1 and config.bos_token_id == 5 and config.eos_token_ids == (1,)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": "hot"}, "temperature is 'hot'.*must be a number"),
        ({"temperature": -1}, "temperature is -1"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_k": 2.5}, "top_k is 2.5"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_length": "long"}, "max_length is 'long'"),
        ({"min_new_tokens": 9, "max_new_tokens": 3}, "min_tokens must be at most"),
        ({"do_sample": "yes"}, "do_sample must be true or false"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id"),
        ({"eos_token_id": [1, True]}, "eos_token_id must be a token id"),
        ("[1]", "must hold a JSON object"),
        ("{", "not valid JSON at line 1"),
        ('{"temperature": NaN}', "temperature is nan"),
        ('{"top_k": ' + "9" * 5000 + "}", "not valid JSON"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_values_name_the_file_and_the_key(tmp_path: Path, values: Any, message: str) -> None:
    write(tmp_path, values)
    with pytest.raises(ConfigError, match=message) as caught:
        GenerationConfig.from_folder(tmp_path)
    assert str(tmp_path / "generation_config.json") in str(caught.value)


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "generation_config.json")  # reading it would wait for ever
    with pytest.raises(ConfigError, match="regular file"):
        GenerationConfig.from_folder(tmp_path)


def test_a_path_that_leads_nowhere(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'auto', 'none', or the path"):
        GenerationConfig.from_folder(tmp_path, tmp_path / "nothing")
    with pytest.raises(TypeError, match="generation_config: expected"):
        GenerationConfig.from_folder(tmp_path, None)  # type: ignore[arg-type]


def test_what_is_not_honoured_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, {"num_beams": 4, "no_repeat_ngram_size": 3, "typical_p": 1.0, "suppress_tokens": [], "x": 1})
    config = GenerationConfig.from_folder(tmp_path)
    assert config.not_honoured == ("num_beams", "no_repeat_ngram_size")
    with caplog.at_level(logging.WARNING, "infinilm"):
        config.warn()
    assert "num_beams, no_repeat_ngram_size" in caplog.text and "typical_p" not in caplog.text


def test_max_length_counts_prompt_and_output() -> None:
    config = GenerationConfig.from_dict({"max_length": 20})
    assert config.new_token_limit(15, "prompt 0") == 5
    with pytest.raises(RequestError, match="prompt 0 has 20 tokens, and max_length"):
        config.new_token_limit(20, "prompt 0")
    assert GenerationConfig.from_dict({"max_length": 20, "max_new_tokens": 50}).new_token_limit(30, "") == 50
    assert GenerationConfig().new_token_limit(10**6, "") is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KEYS = ["temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens", "max_length", "do_sample"]


@given(
    st.dictionaries(
        st.sampled_from([*KEYS, "eos_token_id", "num_beams", "stop_strings", "min_new_tokens"]), json_values
    )
)
def test_any_content_is_taken_or_refused(values: Any) -> None:
    try:
        config = GenerationConfig.from_dict(values, "file")
    except ConfigError as error:
        assert str(error).startswith("file: ")
        return
    assert isinstance(config.sampling_params, SamplingParams)
    assert all(isinstance(i, int) for i in config.eos_token_ids)
