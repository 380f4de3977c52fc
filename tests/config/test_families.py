"""The family table: biases, norms and windows of each family; build_spec with a stand-in for the core."""

from __future__ import annotations

import struct
import sys
import types

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from infinilm.config.families import FAMILIES, build_spec, family_of, family_of_model_type, model_facts
from infinilm.config.llama_config import LlamaConfig
from infinilm.errors import ConfigError

SMALL = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_layers": 3,
    "num_attention_heads": 4,
}


F, S = "full_attention", "sliding_attention"


def make(model_type, **values):
    return LlamaConfig(model_type=model_type, **{**SMALL, "num_key_value_heads": 2, **values})


def facts(model_type, **values):
    config = make(model_type, **values)
    config.validate()
    return model_facts(config, 128)


# ------------------------------------------------------------------------------------------------------ facts


@pytest.mark.parametrize(
    ("model_type", "values", "qkv", "out", "mlp"),
    [
        ("llama", {}, False, False, False),
        ("llama", {"attention_bias": True}, True, True, False),
        ("llama", {"mlp_bias": True}, False, False, True),
        ("mistral", {}, False, False, False),
        ("qwen2", {}, True, False, False),
        ("qwen2", {"attention_bias": True}, True, False, False),
        ("qwen3", {}, False, False, False),
        ("qwen3", {"attention_bias": True}, True, True, False),
    ],
)
def test_biases(model_type, values, qkv, out, mlp):
    got = facts(model_type, **values)
    assert (got.qkv_bias, got.out_bias, got.mlp_bias) == (qkv, out, mlp)


@pytest.mark.parametrize(
    ("model_type", "values", "message"),
    [
        (
            "mistral",
            {"attention_bias": True},
            "attention_bias is True, but in MistralForCausalLM it is always False",
        ),
        (
            "qwen2",
            {"attention_bias": False},
            "attention_bias is False, but in Qwen2ForCausalLM it is always True",
        ),
        ("mistral", {"mlp_bias": True}, "mlp_bias is True, but in MistralForCausalLM it is always False"),
        ("qwen2", {"mlp_bias": True}, "mlp_bias is True, but in Qwen2ForCausalLM"),
        ("qwen3", {"mlp_bias": True}, "mlp_bias is True, but in Qwen3ForCausalLM"),
        ("llama", {"sliding_window": 4}, "sliding_window is 4 .*LlamaForCausalLM has no sliding window"),
        ("llama", {"use_sliding_window": True}, "LlamaForCausalLM has no sliding window"),
        ("mistral", {"use_sliding_window": False}, "sliding_window is 4096 and use_sliding_window is False"),
        ("mistral", {"use_sliding_window": True, "sliding_window": None}, "uses its window in every layer"),
        (
            "llama",
            {"layer_types": [S] * 3},
            "every layer of LlamaForCausalLM is 'full_attention'",
        ),
        (
            "mistral",
            {"layer_types": [F] * 3},
            "every layer of MistralForCausalLM is 'sliding_attention'",
        ),
        ("qwen2", {"layer_types": [S] * 3}, "use_sliding_window is False; set both"),
        (
            "qwen3",
            {"layer_types": [S] * 3, "use_sliding_window": True, "sliding_window": None},
            "asks for 'sliding_attention', but sliding_window is None",
        ),
    ],
)
def test_what_a_family_has_not_is_refused(model_type, values, message):
    with pytest.raises(ConfigError, match=message):
        make(model_type, **values).validate()


@pytest.mark.parametrize(
    ("model_type", "values", "windows"),
    [
        ("llama", {}, (0, 0, 0)),
        ("llama", {"sliding_window": 4, "use_sliding_window": False}, (0, 0, 0)),
        ("llama", {"layer_types": [F, F, F]}, (0, 0, 0)),
        ("mistral", {}, (4096, 4096, 4096)),
        ("mistral", {"sliding_window": 7, "layer_types": [S, S, S]}, (7, 7, 7)),
        ("mistral", {"sliding_window": None}, (0, 0, 0)),
        ("mistral", {"sliding_window": None, "use_sliding_window": False}, (0, 0, 0)),
        *[
            row
            for qwen in ("qwen2", "qwen3")
            for row in [
                (qwen, {"sliding_window": 7}, (0, 0, 0)),
                (
                    qwen,
                    {"sliding_window": 7, "use_sliding_window": True},
                    (0, 0, 0),
                ),  # max_window_layers is 28
                (qwen, {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1}, (0, 7, 7)),
                (qwen, {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 0}, (7, 7, 7)),
                (
                    qwen,
                    {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0},
                    (0, 0, 0),
                ),
                (
                    qwen,
                    {"sliding_window": 7, "use_sliding_window": True, "layer_types": [S, F, S]},
                    (7, 0, 7),
                ),
                (qwen, {"layer_types": [F, F, F]}, (0, 0, 0)),
            ]
        ],
    ],
)
def test_windows(model_type, values, windows):
    assert facts(model_type, **values).sliding_window == windows


def test_only_qwen3_normalises_q_and_k():
    assert {family.model_type for family in FAMILIES.values() if family.qk_norm == "head"} == {"qwen3"}
    assert facts("qwen3").qk_norm == "head" and facts("qwen2").qk_norm == "none"


def test_head_dim_defaults():
    assert make("llama").head_dim == make("mistral").head_dim == make("qwen2").head_dim == 8
    assert make("qwen3").head_dim == 128
    assert facts("qwen3").softmax_scale == 128**-0.5


def test_swish_is_silu():
    assert facts("llama", hidden_act="swish").activation == "silu"


def test_lookups_name_what_is_unknown():
    assert family_of("LlamaForCausalLM") is family_of_model_type("llama")
    with pytest.raises(ConfigError, match="architecture 'X' is not supported; supported: LlamaForCausalLM"):
        family_of("X")
    with pytest.raises(ConfigError, match="model_type 'x' is not supported; supported: llama"):
        family_of_model_type("x")


# ------------------------------------------------------------------------------------------------- build_spec


def typed(**fields):
    """A struct as nanobind makes one: a no-argument constructor, only these fields, checked on assignment."""

    def assign(self, name, value):
        if name not in fields:
            raise AttributeError(name)
        check = fields[name]
        if check is float:
            struct.pack("f", value)  # what fits float32
        elif check is int:
            struct.pack("i", value)
        elif isinstance(check, list):
            assert all(type(item) is check[0] for item in value) and isinstance(value, list)
        else:
            assert isinstance(value, check) and type(value) is not type, (name, value)
        object.__setattr__(self, name, value)

    def build(self):
        for name, check in fields.items():
            if hasattr(check, "is_struct"):
                object.__setattr__(self, name, check())

    return type("Struct", (), {"__init__": build, "__setattr__": assign, "is_struct": True})


ATTENTION = typed(
    num_heads=int,
    num_kv_heads=int,
    head_dim=int,
    softmax_scale=float,
    qkv_bias=bool,
    out_bias=bool,
    qk_norm=bool,
    sliding_window=[int],
)
SPEC = typed(
    dtype=str,
    quantization=str,
    vocab_size=int,
    hidden_size=int,
    num_layers=int,
    max_model_len=int,
    rms_norm_eps=float,
    tie_word_embeddings=bool,
    attention=ATTENTION,
    mlp=typed(intermediate_size=int, bias=bool, activation=str),
    rope=typed(inv_freq=[float], attention_factor=float),
)


@pytest.fixture(scope="module", autouse=True)
def core():
    """A stand-in for the compiled module, so that these tests need no build."""
    with pytest.MonkeyPatch.context() as patch:
        stand_in = types.ModuleType("infinilm._core")
        stand_in.ModelSpec = SPEC
        patch.setitem(sys.modules, "infinilm._core", stand_in)
        yield


def test_build_spec_fills_every_field():
    config = make("qwen3", head_dim=20, attention_bias=True, tie_word_embeddings=True, rms_norm_eps=1e-5)
    config.use_sliding_window, config.sliding_window, config.max_window_layers = True, 9, 2
    spec = build_spec(config, dtype="bfloat16", max_model_len=77)
    assert vars(spec) == {
        "dtype": "bfloat16",
        "quantization": "none",
        "vocab_size": 50,
        "hidden_size": 32,
        "num_layers": 3,
        "max_model_len": 77,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "attention": spec.attention,
        "mlp": spec.mlp,
        "rope": spec.rope,
    }
    assert vars(spec.attention) == {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 20,
        "softmax_scale": 20**-0.5,
        "qkv_bias": True,
        "out_bias": True,
        "qk_norm": True,
        "sliding_window": [0, 0, 9],
    }
    assert vars(spec.mlp) == {"intermediate_size": 40, "bias": False, "activation": "silu"}
    assert spec.rope.attention_factor == 1.0
    np.testing.assert_allclose(spec.rope.inv_freq, 10000.0 ** (-np.arange(10) / 10), rtol=5e-7)
    assert [float(np.float32(value)) for value in spec.rope.inv_freq] == spec.rope.inv_freq


def test_build_spec_fixes_the_rope_by_max_model_len():
    config = make("llama", rope_scaling={"rope_type": "dynamic", "factor": 2.0}, max_position_embeddings=64)
    short = build_spec(config, dtype="float32", max_model_len=64).rope.inv_freq
    assert build_spec(config, dtype="float32", max_model_len=10).rope.inv_freq == short
    assert build_spec(config, dtype="float32", max_model_len=65).rope.inv_freq != short


def test_build_spec_checks_its_own_arguments():
    config = make("llama")
    for dtype in ("float64", "auto", None, 3):
        with pytest.raises(ConfigError, match=f"dtype {dtype!r} is not supported; supported: float32, bfloat16"):
            build_spec(config, dtype=dtype, max_model_len=8)
    for length in (0, -1, 2**31, 8.0, True, None, "8"):
        with pytest.raises(ConfigError, match=r"max_model_len must be an integer in \[1, 2\*\*31\); got"):
            build_spec(config, dtype="float32", max_model_len=length)


def flat(spec):
    return {key: flat(value) if hasattr(value, "is_struct") else value for key, value in vars(spec).items()}


anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 40),
    st.sampled_from([2**31 - 1, 2**31, 2**70]),
    st.floats(),
    st.sampled_from(["silu", "gelu", "llama", "qwen2", "float16", "", ["LlamaForCausalLM"], ["Qwen2ForCausalLM"]]),
    st.lists(st.sampled_from([F, S, "other", 1, None]), max_size=4),
    st.dictionaries(
        st.sampled_from(["rope_type", "type", "factor", "rope_theta", "original_max_position_embeddings"]),
        st.one_of(
            st.sampled_from(["linear", "yarn", "dynamic", "default", "x"]),
            st.integers(0, 9),
            st.floats(),
            st.none(),
        ),
        max_size=3,
    ),
)
FIELDS = sorted({*LlamaConfig().to_dict(), "rope_theta", "rope_scaling"} - {"bos_token_id", "eos_token_id"})


@settings(max_examples=400)
@given(
    st.sampled_from(["llama", "mistral", "qwen2", "qwen3"]),
    st.dictionaries(st.sampled_from(FIELDS), anything, min_size=1, max_size=3),
    st.integers(1, 2**31 - 1),
)
def test_validate_accepts_exactly_what_build_spec_accepts(model_type, changes, max_model_len):
    def outcome(call):
        try:
            call()
        except ConfigError as error:
            return str(error)

    config = make(model_type)
    for key, value in changes.items():
        try:
            setattr(config, key, value)
        except ConfigError:
            assert key == "rope_parameters"
    valid = outcome(config.validate)
    assert outcome(lambda: build_spec(config, dtype="float32", max_model_len=max_model_len)) == valid
    if valid is None:
        again = LlamaConfig.from_dict(config.to_dict())
        assert flat(build_spec(again, dtype="float32", max_model_len=9)) == flat(
            build_spec(config, dtype="float32", max_model_len=9)
        )
