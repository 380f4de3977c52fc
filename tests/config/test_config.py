"""LlamaConfig and AutoConfig: defaults, spellings, round trips, and the message of every refusal."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import fields

import numpy as np
import pytest
from config.folders import write
from goldens import KEPT
from hypothesis import given, settings, strategies as st

from infinilm.config.fields import COMMON_DEFAULTS
from infinilm.config.json.keys import UNSUPPORTED
from infinilm.config.json.model_config import AutoConfig, LlamaConfig, ModelConfig
from infinilm.config.spec import decoder_spec
from infinilm.errors import ConfigError, InfinilmError

DEFAULTS = json.loads((KEPT / "defaults.json").read_text())
MODEL_TYPES = tuple(DEFAULTS)


# ---------------------------------------------------------------------------------------- defaults and fields


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_defaults_are_those_of_transformers(model_type):
    config = LlamaConfig(model_type=model_type)
    config.validate()
    recorded = dict(DEFAULTS[model_type])
    recorded.pop("layer_types", None)  # transformers derives it; here it stays None
    for key in ("bos_token_id", "eos_token_id"):
        value = recorded.pop(key, None)
        assert getattr(config, key) == ([] if value is None else value if isinstance(value, list) else [value])
    rope = recorded.pop("rope_parameters")
    if model_type == "ministral3":
        assert rope.pop("type") == rope["rope_type"]
        assert rope.pop("max_position_embeddings") == recorded["max_position_embeddings"]
    if "full_attention" in rope:
        sliding = {"rope_type": "default", "rope_theta": config.rope_local_base_freq}
        if "partial_rotary_factor" in rope["sliding_attention"]:
            sliding["partial_rotary_factor"] = config.partial_rotary_factor
        assert rope["sliding_attention"] == sliding
        rope = rope["full_attention"]
    if rope["rope_type"] != "proportional":  # which has it among its own parameters
        assert rope.pop("partial_rotary_factor", 1.0) == config.partial_rotary_factor
    assert rope == config.rope_parameters
    for key in ("head_dim", "num_key_value_heads"):
        if recorded.get(key) is None:
            recorded.pop(key, None)  # it follows
    for key, value in recorded.items():
        if key == "intermediate_size" and isinstance(value, list):  # Gemma 3n: one for each layer
            assert set(value) == {config.intermediate_size}
            continue
        assert getattr(config, key) == value, key


def test_llama_defaults_of_the_contract():
    config = LlamaConfig()
    assert config.architecture == "LlamaForCausalLM"
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (32000, 4096, 11008)
    assert (config.num_layers, config.num_attention_heads, config.num_key_value_heads) == (32, 32, 32)
    assert (config.max_position_embeddings, config.rope_theta, config.rms_norm_eps) == (2048, 1e4, 1e-6)
    assert config.hidden_act == "silu" and not config.attention_bias and not config.mlp_bias
    assert (config.bos_token_id, config.eos_token_id) == ([1], [2])
    assert config.kv_dim() == 4096 and config.dtype == "float32"


def test_every_field_can_be_written_and_read():
    config = LlamaConfig()
    for key, value in config.to_dict().items():
        setattr(config, key, value)
        assert getattr(config, key) == value
    with pytest.raises(AttributeError):
        config.hiden_size = 3


def test_heads_follow_until_they_are_set():
    config = LlamaConfig(hidden_size=64, num_attention_heads=4)
    assert (config.num_key_value_heads, config.head_dim, config.kv_dim()) == (4, 16, 64)
    config.num_attention_heads = 8
    assert (config.num_key_value_heads, config.head_dim, config.kv_dim()) == (8, 8, 64)
    config.num_key_value_heads, config.head_dim = 2, 20
    assert config.kv_dim() == 40
    config.validate()
    config.num_key_value_heads = config.head_dim = None
    assert config.kv_dim() == 64


def test_num_layers_is_num_hidden_layers():
    config = LlamaConfig(num_layers=3)
    assert config.num_hidden_layers == 3
    config.num_layers = 5
    assert config.num_hidden_layers == config.num_layers == 5
    with pytest.raises(ConfigError, match="num_layers is 3 and num_hidden_layers is 4"):
        LlamaConfig(num_layers=3, num_hidden_layers=4)


@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id"])
def test_token_ids_are_an_int_or_a_list(key):
    for value, read in ((7, [7]), ([7, 8], [7, 8]), ((7,), [7]), ([], []), (np.int64(7), [7])):
        config = LlamaConfig(**{key: value})
        assert getattr(config, key) == read
        setattr(config, key, value)
        assert getattr(config, key) == read
    for value in ("7", 7.0, None, True, [7, "8"], {7}):
        with pytest.raises(TypeError, match=f"{key} must be an int or a list of ints"):
            LlamaConfig(**{key: value})
        with pytest.raises(TypeError, match=f"{key} must be an int or a list of ints"):
            setattr(config, key, value)
    assert getattr(config, key) == [7]


class FakeTorchDtype:
    def __str__(self):
        return "torch.bfloat16"


def test_dtype_is_read_in_every_spelling():
    for value in ("bfloat16", "torch.bfloat16", FakeTorchDtype()):
        assert LlamaConfig(dtype=value).dtype == LlamaConfig(torch_dtype=value).dtype == "bfloat16"
    assert LlamaConfig(dtype=np.float16).dtype == LlamaConfig(dtype=np.dtype("float16")).dtype == "float16"
    assert LlamaConfig(dtype=None).dtype == "float32"
    with pytest.raises(ConfigError, match="torch_dtype is 'float16' and dtype is 'float32'"):
        LlamaConfig(dtype="float32", torch_dtype="float16")


def test_copies_are_equal_and_independent():
    config = LlamaConfig(rope_scaling={"type": "linear", "factor": 2.0}, eos_token_id=[2, 3])
    for other in (copy.deepcopy(config), pickle.loads(pickle.dumps(config)), LlamaConfig(**config.to_dict())):
        assert other == config and repr(other) == repr(config)
        other.eos_token_id.append(4)
        other.rope_scaling["factor"] = 3.0
        assert other != config and config.eos_token_id == [2, 3]
    assert config != 3
    with pytest.raises(TypeError, match="unhashable"):
        hash(config)


def test_the_callers_containers_are_not_shared():
    layer_types, scaling = ["full_attention"], {"rope_type": "linear", "factor": 2.0}
    config = LlamaConfig(num_layers=1, layer_types=layer_types, rope_scaling=scaling)
    layer_types.append("?")
    scaling["factor"] = 0
    config.validate()


# --------------------------------------------------------------------------------------------- rope spellings


def test_rope_parameters_and_rope_scaling_are_one():
    new = LlamaConfig(rope_parameters={"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0})
    old = LlamaConfig(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0})
    mixed = LlamaConfig(rope_theta=5e5, rope_parameters={"rope_type": "linear", "factor": 2.0})
    both = LlamaConfig(**new.to_dict(), rope_scaling={"type": "linear", "factor": 2.0})
    assert new == old == mixed == both
    assert new.rope_theta == 5e5 and new.rope_scaling == {"rope_type": "linear", "factor": 2.0}
    assert new.rope_parameters == {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}


def test_rope_parameters_can_be_assigned_but_not_changed_in_place():
    config = LlamaConfig()
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e4} and config.rope_scaling is None
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 3e4, "factor": 2.0}
    assert config.rope_theta == 3e4 and config.rope_scaling == {"rope_type": "dynamic", "factor": 2.0}
    with pytest.raises(TypeError):
        config.rope_parameters["factor"] = 3.0
    config.rope_parameters = None
    assert config == LlamaConfig()


def test_the_original_length_may_stand_beside_the_rope_parameters():
    yarn = {"rope_type": "yarn", "factor": 4.0}
    inside = LlamaConfig(rope_scaling={**yarn, "original_max_position_embeddings": 512})
    assert LlamaConfig(rope_scaling=yarn, original_max_position_embeddings=512) == inside
    with pytest.raises(ConfigError, match=r"original_max_position_embeddings is 256, but among the rope .* 512"):
        LlamaConfig(rope_scaling=inside.rope_scaling, original_max_position_embeddings=256)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rope_scaling": "linear"}, "rope_scaling must be null or an object with 'rope_type'; got 'linear'"),
        ({"rope_parameters": 3}, "rope_parameters must be null or an object with 'rope_type'; got 3"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "parameters of 'full_attention', which LlamaForCausalLM does not take",
        ),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e5}},
            "rope_theta is 10000.0, but rope_parameters",
        ),
        (
            {
                "rope_scaling": {"rope_type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "default"},
            },
            "rope_scaling .* and rope_parameters .* differ",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "type": "yarn"}},
            "type is 'yarn' and rope_type is 'linear'",
        ),
    ],
)
def test_contradicting_rope_spellings_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        LlamaConfig(**values)


# --------------------------------------------------------------------------------------------------- refusals


def test_an_unknown_keyword_is_a_type_error_with_a_hint():
    with pytest.raises(TypeError, match="LlamaConfig has no field 'hiden_size'; did you mean 'hidden_size'"):
        LlamaConfig(hiden_size=64)
    with pytest.raises(TypeError, match=r"LlamaConfig has no field 'zzz'; fields: .*vocab_size"):
        LlamaConfig(zzz=64)


INVALID = [
    *[
        ({key: value}, rf"{key} must be an integer in \[1, 2\*\*31\); got {value!r}")
        for key in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
        )
        for value in (0, -1, 1.5, "8", True, 2**31)
    ],
    ({"num_hidden_layers": 2**12}, r"num_hidden_layers must be an integer in \[1, 2\*\*12\); got 4096"),
    ({"head_dim": 2**16}, r"head_dim must be an integer in \[1, 2\*\*16\); got 65536"),
    ({"max_position_embeddings": 0}, "max_position_embeddings must be an integer"),
    ({"num_key_value_heads": 0}, "num_key_value_heads must be an integer"),
    ({"head_dim": 0}, "head_dim must be an integer"),
    ({"head_dim": 7}, "head_dim must be even"),
    (
        {"hidden_size": 60, "num_attention_heads": 8},
        r"hidden_size \(60\) must be a multiple of num_attention_heads \(8\)",
    ),
    (
        {"num_key_value_heads": 5},
        r"num_attention_heads \(32\) must be a multiple of num_key_value_heads \(5\)",
    ),
    ({"num_key_value_heads": 64}, "must be a multiple of num_key_value_heads"),
    (
        {"hidden_size": 2**30, "num_attention_heads": 2**20, "head_dim": 2**12},
        r"num_attention_heads \* head_dim must be < 2\*\*31",
    ),
    ({"intermediate_size": 2**30}, r"2 \* intermediate_size must be < 2\*\*31; got 2147483648"),
    ({"hidden_act": "mish"}, "hidden_act 'mish' is not supported; supported: silu, swish"),
    ({"hidden_act": ["silu"]}, "hidden_act must be a string"),
    *[({"rms_norm_eps": eps}, "rms_norm_eps must be a finite number > 0") for eps in (0, -1e-6, "1e-6", True)],
    *[({"rms_norm_eps": eps}, "rms_norm_eps must be a finite number > 0") for eps in (float("nan"), float("inf"))],
    ({"rope_theta": 0}, "rope_theta must be a finite number > 0; got 0"),
    ({"rope_theta": 1.0}, "rope_theta must be a number > 1; got 1.0"),
    (
        {"rope_scaling": {"rope_type": "nope"}},
        "rope type 'nope' is not supported; supported: default, linear",
    ),
    ({"rope_scaling": {"rope_type": "linear"}}, "rope parameter 'factor' of rope type 'linear'"),
    *[
        ({key: 1}, f"{key} must be True or False; got 1")
        for key in ("attention_bias", "mlp_bias", "tie_word_embeddings")
    ],
    ({"use_sliding_window": 1}, "use_sliding_window must be True or False; got 1"),
    ({"dtype": "float64"}, "dtype 'float64' is not supported; supported: float32, bfloat16, float16"),
    ({"max_window_layers": -1}, "max_window_layers must be an integer"),
    ({"sliding_window": 0}, "sliding_window must be an integer"),
    ({"layer_types": "full_attention"}, "layer_types must be null or a list"),
    ({"num_layers": 2, "layer_types": ["full_attention"]}, "must have num_hidden_layers = 2 entries; got 1"),
    (
        {"num_layers": 2, "layer_types": ["full_attention", "chunked_attention"]},
        r"layer_types\[1\] 'chunked_attention' is not supported in LlamaForCausalLM; supported: full",
    ),
]


@pytest.mark.parametrize(("values", "message"), INVALID)
def test_validate_names_the_broken_rule(values, message, tmp_path):
    config = LlamaConfig(**values)  # the constructor takes it: fields can still be written
    with pytest.raises(ConfigError, match=message):
        config.validate()
    assert repr(config)
    with pytest.raises(ConfigError, match=message):
        AutoConfig.from_pretrained(write(tmp_path, {"model_type": "llama", **values}))


def test_config_errors_are_value_errors():
    with pytest.raises(ValueError, match="vocab_size") as caught:
        LlamaConfig(vocab_size=0).validate()
    assert isinstance(caught.value, InfinilmError)


@pytest.mark.parametrize("key", UNSUPPORTED)
def test_what_changes_the_math_is_refused(key, tmp_path):
    neutral, reason = UNSUPPORTED[key]
    for value in neutral:
        LlamaConfig(**{key: value}).validate()
    for value in (0.5, 8, {"quant_method": "gptq"}):
        with pytest.raises(ConfigError, match=f"^{key} is .*, but only .* supported: ") as caught:
            LlamaConfig(**{key: value})
        assert reason in str(caught.value)
    with pytest.raises(ConfigError, match=f"config.json: {key} is 8"):
        AutoConfig.from_pretrained(write(tmp_path, {"model_type": "qwen2", key: 8}))


def test_a_partial_rope_is_refused_where_the_family_has_none():
    scaling = {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}
    for key in ("rope_scaling", "rope_parameters"):
        with pytest.raises(ConfigError, match=r"partial_rotary_factor is 0.5, but only null or 1 is supported"):
            LlamaConfig(**{key: scaling})
        assert LlamaConfig(**{key: {**scaling, "partial_rotary_factor": 1.0}}).rope_scaling["factor"] == 2.0
    with pytest.raises(ConfigError, match=r"partial_rotary_factor is 1.0, but rope_scaling says 0.5; keep one"):
        LlamaConfig(partial_rotary_factor=1.0, rope_scaling=scaling)
    config = LlamaConfig()
    config.rope_parameters = scaling
    with pytest.raises(ConfigError, match="partial_rotary_factor"):
        config.validate()


@pytest.mark.parametrize("kind", ["su", "yarn", "longrope"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_phi3_calls_longrope_by_other_names(kind, key):
    factors = {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "partial_rotary_factor": 0.75}
    config = LlamaConfig(
        model_type="phi3",
        **sizes,
        rope_scaling={key: kind, **factors},
        original_max_position_embeddings=32,
    )
    config.validate()
    assert config.rope_scaling == {"rope_type": "longrope", **factors, "original_max_position_embeddings": 32}
    assert config.rope_parameters["rope_type"] == "longrope"
    again = LlamaConfig(model_type="phi3", **sizes)
    again.rope_parameters = {key: kind, **factors, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
    assert again == config


@pytest.mark.parametrize("factor", [0.1, 0.32, 0.19])
def test_a_partial_rope_turns_pairs(factor):
    config = LlamaConfig(model_type="phi3", hidden_size=64, num_attention_heads=4, partial_rotary_factor=factor)
    with pytest.raises(ConfigError, match=rf"head_dim \* partial_rotary_factor must be even .* got 16 \* {factor}"):
        config.validate()


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_queries_are_scaled_by_their_position(tmp_path, key):
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.1}

    def facts(model_type="ministral3", **changes):
        return decoder_spec(
            AutoConfig.from_pretrained(write(tmp_path, {"model_type": model_type, key: rope | changes})), 99
        )

    scaled = facts()
    assert {layer.mixer.q_rope for layer in scaled.layers} == {1}
    first, second = scaled.ropes
    assert (second.inv_freq, second.attention_factor) == (first.inv_freq, first.attention_factor)
    assert (first.scale_beta, second.scale_beta, second.scale_positions) == (0, np.float32(0.1), 32)
    for beta in (0, None):
        assert facts(llama_4_scaling_beta=beta).layers[0].mixer.q_rope == -1
    with pytest.raises(ConfigError, match="original_max_position_embeddings must be an integer"):
        facts(original_max_position_embeddings=None)
    with pytest.raises(ConfigError, match="llama_4_scaling_beta must be a number >= 0; got -1"):
        facts(llama_4_scaling_beta=-1)
    with pytest.raises(ConfigError, match=r"unknown rope parameters .*llama_4_scaling_beta"):
        facts("llama")


def test_null_is_the_default_rope_and_default_is_none():
    assert LlamaConfig(model_type="ministral3", rope_scaling=None).rope_scaling["rope_type"] == "yarn"
    plain = LlamaConfig(model_type="ministral3", rope_parameters={"rope_type": "default"})
    assert plain.rope_scaling is None and plain == LlamaConfig(**plain.to_dict())


def test_mlp_layer_types_must_be_dense():
    LlamaConfig(mlp_layer_types=["dense", "dense"])
    for value in (["dense", "sparse"], "dense"):
        with pytest.raises(ConfigError, match=r"mlp_layer_types is .*but only 'dense' layers"):
            LlamaConfig(mlp_layer_types=value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"model_type": "biogpt"},
            "model_type 'biogpt' is not supported\nmissing: other variants of GPT-2",
        ),
        ({"model_type": 3}, "model_type 3 is not supported"),
        (
            {"architectures": ["JambaForCausalLM"]},
            "architecture 'JambaForCausalLM' is not supported\nmissing: Mamba of the first kind",
        ),
        (
            {"architectures": ["LlamaForTokenClassification"], "model_type": "llama"},
            "'LlamaForTokenClass",
        ),
        ({"architectures": [["x"]]}, r"architecture \['x'\] is not supported"),
        ({"architectures": 3}, "architectures must be a list of names; got 3"),
        (
            {"architectures": ["LlamaForCausalLM"], "model_type": "mistral"},
            "name different families; the model_type of LlamaForCausalLM is 'llama'",
        ),
        ({"architectures": ["LlamaForCausalLM", "Qwen2ForCausalLM"]}, "name different families"),
    ],
)
def test_unknown_and_contradicting_families(values, message):
    with pytest.raises(ConfigError, match=message):
        LlamaConfig(**values)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_model_type_and_architecture_imply_each_other(model_type):
    by_type = LlamaConfig(model_type=model_type)
    assert by_type == LlamaConfig(architectures=by_type.architectures) == LlamaConfig(**by_type.to_dict())
    assert LlamaConfig(model_type=model_type, architectures=[]) == by_type
    assert LlamaConfig(architectures=by_type.architecture) == by_type


# ------------------------------------------------------------------------------------------------- properties

ropes = st.one_of(
    st.none(),
    st.fixed_dictionaries({"rope_type": st.sampled_from(["linear", "dynamic"]), "factor": st.floats(1, 64)}),
    st.fixed_dictionaries(
        {
            "rope_type": st.just("yarn"),
            "factor": st.floats(1, 64),
            "original_max_position_embeddings": st.integers(2, 4096),
        }
    ),
)


@st.composite
def valid_values(draw):
    """Keywords of a valid configuration, in canonical (4.x) spelling."""
    model_type = draw(st.sampled_from(("llama", "mistral", "qwen2", "qwen3")))
    kv_heads = draw(st.integers(1, 8))
    layers = draw(st.integers(1, 6))
    values = {
        "model_type": model_type,
        "vocab_size": draw(st.integers(1, 200_000)),
        "hidden_size": draw(st.integers(1, 10_000)),
        "intermediate_size": draw(st.integers(1, 30_000)),
        "num_hidden_layers": layers,
        "num_attention_heads": kv_heads * draw(st.integers(1, 8)),
        "num_key_value_heads": kv_heads,
        "head_dim": 2 * draw(st.integers(2, 128)),
        "max_position_embeddings": draw(st.integers(1, 2**31 - 1)),
        "rms_norm_eps": draw(st.floats(1e-12, 1.0)),
        "rope_theta": draw(st.floats(1.5, 1e9)),
        "rope_scaling": draw(ropes),
        "tie_word_embeddings": draw(st.booleans()),
        "eos_token_id": draw(st.lists(st.integers(0, 300), max_size=3)),
        "dtype": draw(st.sampled_from(["float32", "bfloat16", "float16"])),
    }
    if model_type in ("llama", "qwen3"):
        values["attention_bias"] = draw(st.booleans())
    if model_type == "llama":
        values["mlp_bias"] = draw(st.booleans())
    else:
        values["sliding_window"] = draw(st.one_of(st.none(), st.integers(1, 10_000)))
    if model_type.startswith("qwen"):
        values["use_sliding_window"] = draw(st.booleans())
        values["max_window_layers"] = draw(st.integers(0, 8))
    if model_type.startswith("qwen") and values["use_sliding_window"] and values["sliding_window"]:
        kinds = st.sampled_from(["full_attention", "sliding_attention"])
        values["layer_types"] = draw(st.one_of(st.none(), st.lists(kinds, min_size=layers, max_size=layers)))
    return values


def respell(values, rope_5x, dtype_5x, old_type_key):
    """The same configuration as a config.json of another transformers."""
    values = dict(values)
    scaling = values.pop("rope_scaling")
    if rope_5x:
        theta = values.pop("rope_theta")
        values["rope_parameters"] = {"rope_type": "default", **(scaling or {}), "rope_theta": theta}
    elif scaling and old_type_key:
        values["rope_scaling"] = {("type" if k == "rope_type" else k): v for k, v in scaling.items()}
    else:
        values["rope_scaling"] = scaling
    if not dtype_5x:
        values["torch_dtype"] = values.pop("dtype")
    return values


@settings(max_examples=60)
@given(valid_values(), st.booleans(), st.booleans(), st.booleans())
def test_every_spelling_reads_the_same_and_round_trips(values, rope_5x, dtype_5x, old_type_key):
    config = LlamaConfig(**values)
    config.validate()
    for key, value in values.items():
        assert getattr(config, key) == value
    through_json = json.loads(json.dumps(respell(values, rope_5x, dtype_5x, old_type_key)))
    assert LlamaConfig.from_dict(through_json) == config
    assert LlamaConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


junk = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-3, 2**40), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=5,
)


@settings(max_examples=200)
@given(valid_values(), st.data())
def test_any_json_is_a_config_or_a_config_error(values, data):
    keys = st.sampled_from(sorted({*LlamaConfig().to_dict(), "rope_scaling", "torch_dtype", *UNSUPPORTED, "new"}))
    values.update(data.draw(st.dictionaries(keys, junk, min_size=1, max_size=2)))
    try:
        config = LlamaConfig.from_dict(values)
    except ConfigError as error:
        assert str(error)
    else:
        config.validate()


@pytest.mark.parametrize(
    ("model_type", "values", "message"),
    [
        ("llama", {"num_experts": 8}, "num_experts is 8, but only null or 0 is supported: this family has no experts"),
        ("mixtral", {"norm_topk_prob": False}, "norm_topk_prob is False, but in MixtralForCausalLM it is always True"),
        ("mixtral", {"num_local_experts": 4, "num_experts": 5}, "num_local_experts is 4 and num_experts is 5"),
        ("mixtral", {"moe_intermediate_size": 8}, "moe_intermediate_size is 8, but only null or 0 is supported"),
        ("qwen3_moe", {"num_experts_per_tok": 129}, "num_experts_per_tok must be .* 129"),
        ("qwen3_moe", {"num_experts_per_tok": 0}, "num_experts_per_tok must be .* 0"),
        ("qwen3_moe", {"moe_intermediate_size": "768"}, "moe_intermediate_size must be an integer"),
        ("qwen3_moe", {"moe_intermediate_size": 2**31}, "moe_intermediate_size must be"),
        ("qwen3_moe", {"num_experts": -1}, "num_experts must be"),
        (
            "qwen3_moe",
            {"num_experts": 65535, "num_hidden_layers": 8},
            "num_experts 65535 in each of 8 layers are more than the 131072 that a model may have",
        ),
        ("qwen3_moe", {"norm_topk_prob": "yes"}, "norm_topk_prob"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step must be"),
        ("qwen3_moe", {"mlp_only_layers": [1.5]}, "mlp_only_layers must be a list of numbers of layers; got"),
        ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers must be a list of numbers of layers; got 3"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size is 8, but only"),
        ("qwen2_moe", {"qkv_bias": True, "attention_bias": False}, "qkv_bias is True and attention_bias is False"),
    ],
)
def test_experts_that_do_not_fit(model_type, values, message):
    with pytest.raises(ConfigError, match=message):
        LlamaConfig(model_type=model_type, **values).validate()


def test_layers_with_experts():
    def layers(**values):
        config = LlamaConfig(model_type="qwen3_moe", num_hidden_layers=6, **values)
        return tuple(layer.experts is not None for layer in decoder_spec(config, 8).layers)

    assert layers() == (True,) * 6
    assert layers(decoder_sparse_step=2, mlp_only_layers=[3]) == (False, True, False, False, False, True)
    assert layers(num_experts=0) == (False,) * 6
    config = LlamaConfig(model_type="mixtral", num_local_experts=4, intermediate_size=48)
    mixtral = decoder_spec(config, 8).layers[0].experts
    assert (mixtral.count, mixtral.expert.intermediate_size, mixtral.norm_topk_prob) == (4, 48, True)
    assert not decoder_spec(LlamaConfig(model_type="qwen2_moe", qkv_bias=False), 8).layers[0].mixer.qkv_bias


def test_each_field_is_declared_once() -> None:
    """A kind of sublayer declares its fields, with their defaults; no other class repeats one."""
    rooms = [room for room in ModelConfig.__mro__ if "__dataclass_fields__" in vars(room)]
    declared = [name for room in rooms for name in room.__annotations__]
    assert sorted(declared) == sorted(item.name for item in fields(ModelConfig))
    assert {name.lstrip("_") for name in declared} == COMMON_DEFAULTS.keys()


def test_a_name_that_is_no_field_cannot_be_written() -> None:
    config = LlamaConfig()
    with pytest.raises(AttributeError):
        config.hiden_size = 3  # type: ignore[attr-defined]
