"""Keys that families have of their own: sizes and multipliers in other words, and what they refuse."""

from __future__ import annotations

import pytest
from config.test_families import SMALL, each, facts, make

from infinilm.config.json.model_config import LlamaConfig
from infinilm.config.spec import decoder_spec
from infinilm.errors import ConfigError


@pytest.mark.parametrize("name", ["internlm3", "iquestcoder"])
def test_the_class_that_transformers_saves(name):
    """It computes these as Llamas, whose class it names; the keys are those of the family."""
    said = {**SMALL, "model_type": name, "num_key_value_heads": 2}
    config = LlamaConfig.from_dict({**said, "architectures": ["LlamaForCausalLM"]})
    assert config == LlamaConfig.from_dict(said) and config.model_type == name
    with pytest.raises(ConfigError, match=rf"model_type '{name}' and architectures .*name different families"):
        LlamaConfig.from_dict({**said, "architectures": ["Qwen3ForCausalLM"]})


def test_a_window_of_no_tokens_is_none_where_it_is_not_used():
    assert each(facts("qwen2_moe", use_sliding_window=False, sliding_window=0), "sliding_window") == (0, 0, 0)
    for values in ({"use_sliding_window": True}, {}):
        with pytest.raises(ConfigError, match=r"sliding_window must be an integer in \[1, 2\*\*31\); got 0"):
            facts("qwen2_moe", **values, sliding_window=0)


def test_the_mlp_of_granite_4_is_the_shared_one():
    said = {"intermediate_size": 24, "shared_intermediate_size": 40, "mamba_n_heads": 4, "mamba_d_head": "auto"}
    dense, moe = (make("granitemoehybrid", **said, num_local_experts=experts) for experts in (0, 6))
    assert (dense.intermediate_size, dense.shared_expert_intermediate_size) == (40, 0)
    assert (moe.intermediate_size, moe.shared_expert_intermediate_size) == (24, 40)
    for config in (dense, moe):
        assert LlamaConfig.from_dict(config.to_dict()) == config and config.no_rope_layers == [0, 0, 0]
        assert [layer.mixer.head_dim for layer in decoder_spec(config, 9).layers] == [16, 16, 16]
    turned = make(
        "granitemoehybrid", **said, layer_types=["mamba", "attention", "mamba"], position_embedding_type="rope"
    )
    assert LlamaConfig.from_dict(turned.to_dict()) == turned and decoder_spec(turned, 9).layers[1].mixer.rope == 0


def test_rope_of_all_layers_beside_that_of_each_kind():
    """As transformers saves a configuration that had one set of parameters."""
    kinds = {"full_attention": {"rope_type": "default", "rope_theta": 500000.0}}
    kinds["sliding_attention"] = {"rope_type": "default", "rope_theta": 500000.0}
    config = make("olmo3", rope_parameters={**kinds, "rope_type": "default", "rope_theta": 500000.0})
    assert config == make("olmo3", rope_parameters=kinds) and config.rope_local_base_freq == 500000.0
    with pytest.raises(ConfigError, match=r"rope_parameters has parameters of 'factor', 'full_attention', 'rope_type'"):
        make("olmo3", rope_parameters={**kinds, "rope_type": "yarn", "factor": 8.0, "rope_theta": 500000.0})


def test_baichuan_of_13b_is_refused():
    baichuan = {**SMALL, "model_type": "baichuan", "architectures": ["BaichuanForCausalLM"]}
    for said in ({"model_max_length": 128}, {"max_position_embeddings": 128, "hidden_size": 5120}):
        with pytest.raises(ConfigError, match=r"13B model, whose positions come from ALiBi, .*; 7B models"):
            LlamaConfig.from_dict({**baichuan, **said})
    with pytest.raises(ConfigError, match="alibi is True"):
        LlamaConfig.from_dict({**baichuan, "max_position_embeddings": 128, "alibi": True})


def test_multipliers_of_minicpm():
    got = facts("minicpm", scale_emb=12, scale_depth=1.4, dim_model_base=8)
    assert got.embedding_multiplier == 12 and got.logit_multiplier == 8 / 32
    assert got.residual_multiplier == pytest.approx(1.4 / 3**0.5)
    with pytest.raises(ConfigError, match="scale_depth must be a finite number > 0; got -1"):
        facts("minicpm", scale_depth=-1)
    with pytest.raises(ConfigError, match="sparse_config must be None in MiniCPMForCausalLM"):
        facts("minicpm", sparse_config={"kernel_size": 32})


def test_sizes_and_layers_of_llama_4():
    of_file = {"intermediate_size": 24, "intermediate_size_mlp": 40, "num_local_experts": 4}
    config = make("llama4_text", **of_file, attention_chunk_size=10, no_rope_layers=[1, 0, 1], moe_layers=[2])
    assert (config.intermediate_size, config.moe_intermediate_size) == (40, 24)
    got = decoder_spec(config, 128)
    *dense, sparse = [layer.experts for layer in got.layers]
    assert dense == [None, None] and sparse.shared.intermediate_size == 24
    assert [each(got, name) for name in ("sliding_window", "rope", "q_rope")] == [(10, 0, 10), (0, -1, 0), (-1, 1, -1)]
    for values, message in (
        ({"moe_layers": [3]}, r"moe_layers must be a list of numbers of layers; got \[3\]"),
        ({"layer_types": ["sliding_attention"] * 3}, "'sliding_attention' is not supported in Llama4ForCausalLM"),
        ({"attn_scale": 0}, "attn_scale must be a finite number > 0; got 0"),
        ({"attention_chunk_size": -1}, "attention_chunk_size"),
    ):
        with pytest.raises(ConfigError, match=message):
            make("llama4_text", **of_file, **values).validate()
    for tuning, scaled in ((4, (-1, 1, -1)), (0, (-1, -1, -1))):  # older configs have a number
        config = make("llama4_text", **of_file, no_rope_layers=[1, 0, 1], attn_temperature_tuning=tuning)
        config.validate()
        assert each(decoder_spec(config, 128), "q_rope") == scaled
    with pytest.raises(ConfigError, match="attn_temperature_tuning must be True or False; got 'yes'"):
        make("llama4_text", **of_file, attn_temperature_tuning="yes").validate()
    with pytest.raises(ConfigError, match=r"attention_chunk_size is 8192.*more than their own chunk"):
        make("llama", attention_chunk_size=8192)
