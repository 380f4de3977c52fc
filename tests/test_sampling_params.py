"""SamplingParams: every value is checked, nothing is ignored."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest

from infinilm.errors import RequestError
from infinilm.sampling_params import _CHECKS, SamplingParams, make_sampling_params

NAMES = [f.name for f in dataclasses.fields(SamplingParams)]


def test_defaults_are_those_of_the_contract():
    expected = {
        "n": 1, "temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "logit_bias": None, "allowed_token_ids": None, "seed": None, "max_tokens": None, "min_tokens": 0,
        "stop": (), "stop_token_ids": (), "include_stop_str_in_output": False, "ignore_eos": False,
        "logprobs": None, "prompt_logprobs": None, "logits_processor": None, "constraint": None,
        "skip_special_tokens": True, "lora": None, "prediction": None, "speculation": None,
        "return_receipt": False, "beam_width": None, "length_penalty": 1.0, "early_stopping": False,
    }  # fmt: skip
    assert dataclasses.asdict(SamplingParams()) == expected
    assert NAMES == list(expected) == list(_CHECKS)


def test_frozen_slotted_and_copied():
    params = SamplingParams(temperature=0, stop="x", seed=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 1.0
    assert not hasattr(params, "__dict__")
    for twin in (
        copy.deepcopy(params),
        copy.copy(params),
        pickle.loads(pickle.dumps(params)),
        dataclasses.replace(params),
    ):
        assert twin == params
        assert hash(twin) == hash(params)
    assert params.temperature == 0


@pytest.mark.parametrize(
    ("field", "value", "stored"),
    [
        ("temperature", 0, 0.0),
        ("temperature", np.float32(0.5), 0.5),
        ("temperature", 1000.0, 1000.0),
        ("top_p", 1, 1.0),
        ("top_p", 1e-9, 1e-9),
        ("min_p", 0, 0.0),
        ("min_p", 1, 1.0),
        ("top_k", -1, -1),
        ("top_k", 0, 0),
        ("top_k", np.int64(7), 7),
        ("top_k", 2**31 - 1, 2**31 - 1),
        ("seed", 0, 0),
        ("seed", 2**64 - 1, 2**64 - 1),
        ("max_tokens", 1, 1),
        ("max_tokens", None, None),
        ("stop", "abc", ("abc",)),
        ("stop", ["a", "b"], ("a", "b")),
        ("stop", [], ()),
        ("stop", None, ()),
        ("temperature", 3.4e38, 3.4e38),
        ("temperature", 1e-50, 1e-50),  # greedy, as 0 is
        ("repetition_penalty", 1e-38, 1e-38),
        ("presence_penalty", 1e-300, 1e-300),
        ("min_p", 1e-50, 1e-50),
        ("logit_bias", {1: -3.4e38}, {1: -3.4e38}),
        ("stop_token_ids", [2, np.int32(0)], (2, 0)),
        ("stop_token_ids", np.array([5]), (5,)),
        ("ignore_eos", np.True_, True),
        ("skip_special_tokens", False, False),
        ("include_stop_str_in_output", True, True),
    ],
)
def test_accepted(field, value, stored):
    result = getattr(SamplingParams(**{field: value}), field)
    assert result == stored
    assert type(result) is type(stored)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", -0.1, r"finite and >= 0 \(0 is greedy\), got -0.1"),
        ("temperature", float("nan"), "finite and >= 0"),
        ("temperature", float("inf"), "finite and >= 0"),
        ("temperature", 10**400, "finite and >= 0"),
        ("top_p", 0, "above 0 and at most 1"),
        ("top_p", 1.01, "above 0 and at most 1"),
        ("top_p", float("nan"), "above 0 and at most 1"),
        ("min_p", -0.01, r"in 0\.\.1"),
        ("min_p", 1.5, r"in 0\.\.1"),
        ("top_k", -2, "-1 or 0"),
        ("top_k", 2**31, r"1\.\.2147483647"),
        ("max_tokens", 0, ">= 1, or None"),
        ("max_tokens", -5, ">= 1, or None"),
        ("seed", -1, r"0\.\.2\*\*64-1"),
        ("seed", 2**64, r"0\.\.2\*\*64-1"),
        ("stop", "", r"stop\[0\] must not be the empty string"),
        ("stop", ["a", ""], r"stop\[1\] must not be the empty string"),
        ("stop_token_ids", [3, -1], r"stop_token_ids\[1\] must be a token id >= 0, got -1"),
        ("n", 0, "n must be >= 1"),
        ("repetition_penalty", 0, "above 0"),
        ("presence_penalty", 2.5, r"-2\.\.2"),
        ("frequency_penalty", -3, r"-2\.\.2"),
        ("min_tokens", -1, ">= 0"),
        ("logprobs", -1, ">= 0, or None"),
        ("prompt_logprobs", -1, ">= 0, or None"),
        ("temperature", 3.5e38, r"at most 3\.4e38 \(it is a float32\), got 3\.5e\+38"),
        ("temperature", 1e300, "float32"),
        ("logit_bias", {1: -1e39}, "float32"),
        ("repetition_penalty", 1e39, "float32"),
        ("repetition_penalty", 1e-50, r"above 0 \(1 is off\), got 1e-50, which as float32 is 0\.0"),
        ("top_p", 1e-50, "which as float32 is 0"),
        ("logit_bias", {-1: 1.0}, "token id >= 0"),
        ("logit_bias", {1: float("nan")}, r"logit_bias\[1\] must be finite"),
        ("allowed_token_ids", [-1], r"allowed_token_ids\[0\] must be a token id >= 0"),
    ],
)
def test_out_of_range(field, value, message):
    with pytest.raises(RequestError, match=message) as error:
        SamplingParams(**{field: value})
    assert field in str(error.value)
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "0"),
        ("temperature", None),
        ("temperature", True),
        ("temperature", 1j),
        ("top_p", [0.5]),
        ("top_k", 5.0),
        ("top_k", False),
        ("top_k", None),
        ("seed", 1.5),
        ("seed", "1"),
        ("max_tokens", 10.0),
        ("max_tokens", True),
        ("stop", 3),
        ("stop", b"x"),
        ("stop", {"a"}),
        ("stop", ["a", 3]),
        ("stop_token_ids", 3),
        ("stop_token_ids", "3"),
        ("stop_token_ids", [1.0]),
        ("stop_token_ids", None),
        ("ignore_eos", 1),
        ("skip_special_tokens", None),
        ("include_stop_str_in_output", "yes"),
        ("n", 1.0),
        ("logit_bias", [1]),
        ("logit_bias", {"1": 0.0}),
        ("logits_processor", 3),
        ("logprobs", True),
    ],
)
def test_wrong_type(field, value):
    with pytest.raises(TypeError, match=field):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("repetition_penalty", 1.1),
        ("presence_penalty", 0.5),
        ("frequency_penalty", 0.5),
        ("logit_bias", {1: 2.0}),
        ("logit_bias", {}),
        ("allowed_token_ids", [1]),
        ("min_tokens", 1),
        ("logprobs", 0),
        ("prompt_logprobs", 0),
        ("logits_processor", print),
    ],
)
def test_values_that_are_taken_as_they_are(field, value):
    assert getattr(SamplingParams(**{field: value}), field) in (value, (1,))


def test_defaults_given_explicitly_are_fine():
    """Which is why they are not checked each time."""
    for field in dataclasses.fields(SamplingParams):
        if field.default is not None:
            assert _CHECKS[field.name](field.default) == field.default


def test_nothing_allowed():
    with pytest.raises(RequestError, match="allowed_token_ids"):
        SamplingParams(allowed_token_ids=[])


def test_min_tokens_above_max_tokens():
    with pytest.raises(RequestError, match="min_tokens must be at most max_tokens=3, got 4"):
        SamplingParams(min_tokens=4, max_tokens=3)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("temprature", "did you mean 'temperature'"),
        ("Temperature", "did you mean 'temperature'"),
        ("topk", "did you mean 'top_k'"),
        ("top-p", "did you mean 'top_p'"),
        ("stop_tokens", "did you mean 'stop_token_ids'"),
        ("max_new_tokens", "it is called 'max_tokens' here"),
        ("num_beams", "it is called 'beam_width' here"),
        ("num_beam_groups", ": diverse beam search is not available in this version"),
        ("guided_json", "it is called 'constraint' here"),
        ("response_format", "it is called 'constraint' here"),
        ("truncate_prompt_tokens", ": cutting prompts to a length is not available in this version"),
        ("block_size", "; it has n, temperature, "),
        ("load_in_8bit", r": it is said when the model is loaded: LLM\(model, quantization='int8'\)"),
        ("continue_final_message", r": chat\(\) takes it"),
        ("dtype", r": it is said when the model is loaded: LLM\(model, dtype=...\)"),
        ("n_ctx", r": it is said when the model is loaded: LLM\(model, max_model_len=...\)"),
        ("best_of", ": n gives all of its texts"),
        ("output_kind", r": leave it out: generate\(\) gives whole results"),
        ("do_sample", r"it is called 'temperature' here \(0 is greedy\)"),
        ("zzz", "it has n, temperature, top_k"),
    ],
)
def test_unknown_keyword(name, hint):
    for make in (
        lambda: SamplingParams(**{name: 1}),
        lambda: make_sampling_params(None, {name: 1}),
        lambda: make_sampling_params(SamplingParams(), {name: 1}),
    ):
        with pytest.raises(TypeError, match=f"SamplingParams has no parameter '{name}'.*{hint}"):
            make()


def test_make_sampling_params():
    params = SamplingParams(temperature=0.5, seed=7, stop="x")
    assert make_sampling_params(params, {}) is params
    changed = make_sampling_params(params, {"seed": 8, "max_tokens": 3})
    assert changed == SamplingParams(temperature=0.5, seed=8, stop="x", max_tokens=3)
    assert params.seed == 7
    assert make_sampling_params(None, {}) == SamplingParams()
    assert make_sampling_params(None, {"top_k": 3}).top_k == 3
    with pytest.raises(RequestError):
        make_sampling_params(params, {"top_p": 2})
    with pytest.raises(TypeError, match="sampling_params must be SamplingParams or None, got dict"):
        make_sampling_params({"top_k": 3}, {})


def test_keywords_for_type_checkers_are_the_fields():
    from infinilm.sampling_params import SamplingKeywords

    assert list(SamplingKeywords.__annotations__) == [f.name for f in dataclasses.fields(SamplingParams)]
