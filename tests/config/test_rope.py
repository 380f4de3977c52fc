"""Rotary frequencies against those recorded from transformers; every bad rope parameter and its message."""

from __future__ import annotations

import json

import numpy as np
import pytest
from goldens import KEPT
from hypothesis import given, settings, strategies as st

from infinilm.config.sublayers.rope import ROPE_TYPES, inverse_frequencies, rope_type_of
from infinilm.errors import ConfigError

ROWS = json.loads((KEPT / "rope.json").read_text())

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": 64,
}
VALID = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "ntk_alpha": {"rope_type": "ntk_alpha", "alpha": 50.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "longrope": LONGROPE,
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
}


def frequencies(parameters, head_dim=8, theta=10000.0, positions=256, max_model_len=256):
    return inverse_frequencies(head_dim, theta, parameters, positions, max_model_len)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['parameters']['rope_type']}-{row['head_dim']}")
def test_frequencies_equal_those_of_transformers(row):
    expected = np.array(row["inv_freq"], np.float32)
    inv_freq, attention_factor = inverse_frequencies(
        row["head_dim"],
        row["rope_theta"],
        row["parameters"],
        row["max_position_embeddings"],
        row["max_model_len"],
    )
    assert inv_freq.dtype == np.float32 and inv_freq.shape == (row["head_dim"] // 2,)
    np.testing.assert_array_max_ulp(inv_freq, expected, maxulp=1)
    assert np.mean(inv_freq == expected) > 0.9
    assert attention_factor == pytest.approx(row["attention_factor"], rel=1e-15)


def test_every_rope_type_is_recorded():
    assert {row["parameters"]["rope_type"] for row in ROWS} == set(ROPE_TYPES) == set(VALID)


@pytest.mark.parametrize("parameters", [None, {}, {"rope_type": "default"}, {"type": "default", "factor": None}])
def test_default_is_the_textbook_formula(parameters):
    inv_freq, attention_factor = frequencies(parameters, head_dim=16)
    np.testing.assert_allclose(inv_freq, 10000.0 ** (-np.arange(8) / 8), rtol=2e-7)
    assert attention_factor == 1.0


@pytest.mark.parametrize("rope_type", ROPE_TYPES)
def test_both_spellings_of_the_type_are_read(rope_type):
    new = VALID[rope_type]
    old = {"type" if key == "rope_type" else key: value for key, value in new.items()}
    for parameters in (old, {**old, **new}):
        np.testing.assert_array_equal(frequencies(parameters)[0], frequencies(new)[0])


@pytest.mark.parametrize("rope_type", ["default", "linear", "llama3", "yarn"])
def test_frequencies_do_not_depend_on_max_model_len(rope_type):
    np.testing.assert_array_equal(
        frequencies(VALID[rope_type], max_model_len=1)[0],
        frequencies(VALID[rope_type], max_model_len=9999)[0],
    )


def test_dynamic_stretches_only_beyond_max_position_embeddings():
    plain = frequencies(None)[0]
    for max_model_len, same in ((1, True), (256, True), (257, False), (1000, False)):
        got = frequencies(VALID["dynamic"], max_model_len=max_model_len)[0]
        assert np.array_equal(got, plain) == same


def test_longrope_takes_the_long_factors_beyond_the_original_length():
    plain = frequencies(None)[0]
    for max_model_len, factors in ((64, "short_factor"), (65, "long_factor")):
        got = frequencies(LONGROPE, max_model_len=max_model_len)[0]
        np.testing.assert_allclose(got, plain / np.array(LONGROPE[factors]), rtol=2e-7)


def without(parameters, key):
    return {name: value for name, value in parameters.items() if name != key}


BAD = [
    (
        {"rope_type": "mrope"},
        r"rope type 'mrope' is not supported; supported: default, linear, dynamic, ntk_alpha, llama3, yarn",
    ),
    ({"type": 3}, "rope type 3 is not supported"),
    (
        {"rope_type": "linear", "type": "yarn", "factor": 2.0},
        "two types: 'rope_type' is 'linear' and 'type' is 'yarn'",
    ),
    ({"rope_type": "default", "mrope_section": [1, 2]}, r"unknown rope parameters \['mrope_section'\]"),
    (
        {"rope_type": "linear", "factr": 2.0},
        r"unknown rope parameters \['factr'\].*its parameters are: factor",
    ),
    ({"rope_type": "default", "rope_theta": 5.0}, "rope_theta is given twice: 10000.0"),
    ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1 .*; got 0.5"),
    ({"rope_type": "linear"}, "'factor' of rope type 'linear' must be a number in .*1e6.; got nothing"),
    ({"rope_type": "linear", "factor": 0.5}, "'factor' .* must be a number in .*1e6.; got 0.5"),
    ({"rope_type": "linear", "factor": "2"}, "'factor' .* must be a number in .*1e6.; got '2'"),
    ({"rope_type": "linear", "factor": True}, "'factor' .* got True"),
    ({"rope_type": "linear", "factor": 1e7}, "'factor' .* must be a number in .*1e6.; got 10000000.0"),
    ({"rope_type": "linear", "factor": float("nan")}, "'factor' .* got nan"),
    ({"rope_type": "linear", "factor": float("inf")}, "'factor' .* got inf"),
    ({"rope_type": "dynamic"}, "'factor' of rope type 'dynamic' must be a number in .*1e6.; got nothing"),
    *[(without(LLAMA3, key), f"'{key}' of rope type 'llama3' must be .*; got nothing") for key in list(LLAMA3)[1:]],
    ({**LLAMA3, "low_freq_factor": 0}, "'low_freq_factor' .* must be a number > 0; got 0"),
    (
        {**LLAMA3, "high_freq_factor": 0.9},
        r"'high_freq_factor' .* must be a number >= low_freq_factor \(1\); got 0.9",
    ),
    ({**LLAMA3, "original_max_position_embeddings": 64.5}, "must be an integer .*; got 64.5"),
    ({**YARN, "factor": 0.9}, "'factor' of rope type 'yarn'"),
    ({**YARN, "original_max_position_embeddings": 0}, "must be an integer in .*; got 0"),
    ({**YARN, "attention_factor": 0}, "'attention_factor' .* must be a number > 0; got 0"),
    ({**YARN, "beta_slow": 0}, "'beta_slow' .* must be a number > 0; got 0"),
    ({**YARN, "beta_fast": 0.5}, r"'beta_fast' .* must be a number >= beta_slow \(1\); got 0.5"),
    ({**YARN, "beta_slow": 5e-324}, "of type 'yarn' give frequencies that are not finite"),
    ({**YARN, "mscale": -1.0}, "'mscale' .* must be a number >= 0; got -1.0"),
    ({**YARN, "mscale_all_dim": "1"}, "'mscale_all_dim' .* got '1'"),
    ({**YARN, "truncate": 1}, "'truncate' .* must be true or false; got 1"),
    (
        without(LONGROPE, "short_factor"),
        "'short_factor' .* a list of head_dim / 2 = 4 numbers > 0; got nothing",
    ),
    (without(LONGROPE, "long_factor"), "'long_factor' .* got nothing"),
    ({**LONGROPE, "long_factor": [1.0, 2.0]}, "'long_factor' .* = 4 numbers > 0; got 2 numbers"),
    ({**LONGROPE, "short_factor": [1.0, 1.0, 0.0, 1.0]}, r"'short_factor' .* got \[1.0, 1.0, 0.0, 1.0\]"),
    ({**LONGROPE, "factor": 0.1}, "'factor' of rope type 'longrope' must be a number in .*1e6.; got 0.1"),
    ({**LONGROPE, "attention_factor": -1}, "'attention_factor' .* got -1"),
    ({**LONGROPE, "original_max_position_embeddings": 1}, "must be an integer in .*; got 1"),
]


@pytest.mark.parametrize(("parameters", "message"), BAD)
def test_a_bad_parameter_is_named(parameters, message):
    for max_model_len in (1, 10_000):  # what is valid does not depend on the length
        with pytest.raises(ConfigError, match=message):
            frequencies(parameters, max_model_len=max_model_len)


@pytest.mark.parametrize("head_dim", [0, 1, 7, -2])
def test_head_dim_must_be_even(head_dim):
    with pytest.raises(ConfigError, match=f"head_dim must be even and >= 2, .*got {head_dim}"):
        frequencies(None, head_dim=head_dim)


def test_dynamic_needs_more_than_one_pair():
    with pytest.raises(ConfigError, match="'dynamic' needs head_dim > 2"):
        frequencies(VALID["dynamic"], head_dim=2)


@pytest.mark.parametrize("theta", [1.0, 0, -5.0, float("nan"), float("inf"), "1e4", True])
def test_theta_must_be_a_number_above_one(theta):
    with pytest.raises(ConfigError, match="rope_theta must be a number > 1; got"):
        frequencies(None, theta=theta)


def test_type_of_nothing_is_default():
    assert rope_type_of(None) == rope_type_of({}) == "default"


@settings(max_examples=100)
@given(
    rope_type=st.sampled_from(sorted(VALID)),
    changes=st.dictionaries(
        st.sampled_from(
            sorted(
                set().union(*VALID.values(), {"beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"})
            )
        ),
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(-2, 2**33),
            st.floats(),
            st.text(max_size=3),
            st.just([1.0] * 4),
        ),
        max_size=3,
    ),
    theta=st.floats(1.0, 1e38, exclude_min=True),
    positions=st.integers(2, 2**31 - 1),
    max_model_len=st.integers(1, 2**31 - 1),
)
def test_any_parameters_give_finite_frequencies_or_a_config_error(rope_type, changes, theta, positions, max_model_len):
    parameters = {**VALID[rope_type], **without(changes, "rope_type")}
    try:
        inv_freq, attention_factor = frequencies(parameters, 8, theta, positions, max_model_len)
    except ConfigError:
        with pytest.raises(ConfigError):
            frequencies(parameters, 8, theta, positions, 1)
        return
    frequencies(parameters, 8, theta, positions, 1)
    assert np.isfinite(inv_freq).all() and (inv_freq >= 0).all() and 0 < attention_factor < 3.5e38
