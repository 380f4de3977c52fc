"""The family table: biases, norms and windows of each family; what build_spec writes."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from infinilm._core import param_shapes
from infinilm.config.families import FAMILIES, family_of, family_of_model_type, head_of
from infinilm.config.json.model_config import LlamaConfig
from infinilm.config.spec import build_spec, decoder_spec, shapes_of
from infinilm.errors import ConfigError
from infinilm.unsupported import REFUSED, Refused, missing_math, unsupported

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
    return decoder_spec(config, 128)


def each(spec, field):
    """A field of attention, of each layer."""
    return tuple(getattr(layer.mixer, field) for layer in spec.layers)


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
    layer = got.layers[0]
    assert (layer.mixer.qkv_bias, layer.mixer.out_bias, layer.mlp.bias) == (qkv, out, mlp)


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
        ("cwm", {"num_layers": 6}, (0, 8192, 8192, 8192, 0, 8192)),
        ("cwm", {"sliding_window": 7, "layer_types": [S, F, F]}, (7, 0, 0)),
        ("cwm", {"sliding_window": None, "use_sliding_window": False}, (0, 0, 0)),
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
    assert each(facts(model_type, **values), "sliding_window") == windows


def test_some_families_normalise_q_and_k():
    normalising = {family.model_type for family in FAMILIES.values() if family.qk_norm == "head"}
    assert normalising == {
        *("qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe", "gemma3", "gemma3_text"),
        *("glm4_moe", "glm4v_moe", "dots1", "exaone4", "exaone_moe", "bailing_moe_v2", "mellum"),
        *("minimax_m3_vl_text", "step3p5", "laguna"),
        *("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
        *("gemma3n", "gemma3n_text", "gemma4", "gemma4_text", "gemma4_unified"),
        *("lfm2", "lfm2_moe", "afmoe", "apertus"),
    }
    assert facts("qwen3").layers[0].mixer.qk_norm == "head" and facts("qwen2").layers[0].mixer.qk_norm == "none"


@pytest.mark.parametrize(
    ("model_type", "values", "message"),
    [
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit must be 7.0 in GptOssForCausalLM"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act must be 'silu' in GptOssForCausalLM"),
        ("starcoder2", {"norm_type": "rms_norm"}, "norm_type must be 'layer_norm' in Starcoder2ForCausalLM"),
        ("starcoder2", {"use_bias": True, "mlp_bias": False}, "use_bias is True and mlp_bias is False"),
        ("cohere2", {"use_parallel_block": False}, "use_parallel_block must be True in Cohere2ForCausalLM"),
        ("cohere2", {"use_qk_norm": True}, "use_qk_norm is True, but only null or false is supported"),
        ("cohere", {"use_qk_norm": "yes"}, "use_qk_norm must be True or False; got 'yes'"),
        ("afmoe", {"mup_enabled": 1}, "mup_enabled must be True or False; got 1"),
        (
            "afmoe",
            {"mup_enabled": True, "embedding_multiplier": 2.0},
            "mup_enabled is .* and embedding_multiplier is 2.0",
        ),
        ("afmoe", {"score_func": "softmax"}, "score_func must be 'sigmoid' in AfmoeForCausalLM"),
        ("afmoe", {"attention_bias": True}, "attention_bias is True, but in AfmoeForCausalLM it is always False"),
        ("llama", {"mup_enabled": True}, "mup_enabled is True, but only null or false is supported"),
        ("mimo_v2_flash", {"hybrid_layer_pattern": [0, 1]}, r"hybrid_layer_pattern must have 0 or 1 .* 3 layers"),
        ("mimo_v2_flash", {"hybrid_layer_pattern": [0, 1, 2]}, r"must have 0 or 1 .* got \[0, 1, 2\]"),
        ("mimo_v2_flash", {"moe_layer_freq": 2}, "moe_layer_freq must have 0 or 1 for each of the 3 layers; got 2"),
        ("mimo_v2_flash", {"swa_head_dim": 40}, "swa_head_dim must be head_dim, 192; got 40"),
        ("mimo_v2_flash", {"v_head_dim": 200}, "v_head_dim must be at most head_dim, 192; got 200"),
        ("mimo_v2_flash", {"swa_num_key_value_heads": 3}, r"must be a multiple of swa_num_key_value_heads \(3\)"),
        (
            "mimo_v2_flash",
            {"add_full_attention_sink_bias": True},
            "add_full_attention_sink_bias must be False in MiMoV2",
        ),
        ("llama", {"swa_num_key_value_heads": 2}, "all layers of this family have as many kv heads"),
        ("deepseek_v32", {"index_topk": 0}, r"index_topk must be an integer in \[1, 2\*\*24\); got 0"),
        ("deepseek_v32", {"index_n_heads": "8"}, "index_n_heads must be an integer .*; got '8'"),
        (
            "deepseek_v32",
            {"indexer_types": ["full"] * 3},
            "indexer_types is .* tokens of this family read all keys that they see",
        ),
        ("glm_moe_dsa", {"indexer_types": ["full"]}, "indexer_types must say of each of the 3 layers"),
        ("glm_moe_dsa", {"index_topk_pattern": "FSX"}, "index_topk_pattern must say of each .*; got 'FSX'"),
        ("glm_moe_dsa", {"index_topk_freq": 0}, "index_topk_freq must be an integer .*; got 0"),
        ("cohere", {"logit_scale": 0}, "logit_scale must be a finite number > 0; got 0"),
        ("cohere", {"logit_scale": 0.5, "logits_scaling": 3}, "logit_scale is 2.0 and logits_scaling is 3"),
        ("llama", {"logit_scale": 0.5}, "logit_scale is 0.5, but only null or 1 is supported"),
        (
            "granitemoehybrid",
            {"position_embedding_type": "alibi"},
            "position_embedding_type must be 'rope', 'nope' or nu",
        ),
        ("granitemoehybrid", {"layer_types": ["attention", "conv", "attention"]}, r"layer_types\[1\] 'conv' is not"),
        ("granitemoehybrid", {"mamba_n_heads": 3}, r"mamba_n_heads \(3\) does not divide the 64 elements of Mamba lay"),
        (
            "granitemoehybrid",
            {"mamba_n_heads": 4, "mamba_n_groups": 3},
            r"\(4\) must be a multiple of mamba_n_groups \(3",
        ),
        (
            "granitemoehybrid",
            {"mamba_n_heads": 4, "mamba_d_state": 512},
            r"mamba_d_state must be .* \[1, 257\); got 512",
        ),
        (
            "granitemoehybrid",
            {"mamba_n_heads": 4, "time_step_limit": [2, 1]},
            "time_step_limit must be the least and the",
        ),
        ("nemotron_h", {"hybrid_override_pattern": "M*X"}, "hybrid_override_pattern must consist of M, .*; got 'M.X'"),
        ("nemotron_h", {"moe_latent_size": 0}, "moe_latent_size must be an integer in"),
        ("qwen3_moe", {"moe_latent_size": 8}, "the experts of this family read the token itself"),
        ("kimi_linear", {"linear_attn_config": 3}, "linear_attn_config must be an object; got 3"),
        ("kimi_linear", {"linear_attn_config": {"full_attn_layers": [0]}}, r"numbers of layers, from 1 on; got \[0\]"),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope must be True in KimiLinearForCausalLM"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx must be False or None"),
        ("llama", {"use_parallel_residual": True}, "attention and MLP run one after the other"),
        ("gpt_neox", {"num_ln_in_parallel_attn": 1}, "how many norms attention and MLP have is no choice"),
        ("falcon", {"num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn must be 1 or 2; got 3"),
        ("falcon", {"alibi": True}, "alibi is True, but only .* positions come from RoPE only"),
        ("falcon", {"multi_query": "yes"}, "multi_query must be True or False; got 'yes'"),
        ("opt", {"word_embed_proj_dim": 16}, "word_embed_proj_dim is 16 and hidden_size is 32; only embeddings as"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before must be True in OPTForCausalLM"),
        ("mpt", {"attn_config": 3}, "attn_config must be an object; got 3"),
        ("mpt", {"attn_config": {"clip_qkv": "6"}}, "clip_qkv must be a finite number > 0; got '6'"),
        ("olmo", {"clip_qkv": 0}, "clip_qkv must be a finite number > 0; got 0"),
        ("mpt", {"attn_config": {"alibi": False}}, "attn_config: alibi must be True in MptForCausalLM; got False"),
        ("llama", {"norm_head": True}, "the lm_head of this family counts as it is"),
        ("axk1", {"topk_method": "greedy"}, "topk_method must be 'noaux_tc' or None in AXK1ForCausalLM"),
        ("bloom", {"n_inner": 100}, "n_inner must be None in BloomForCausalLM"),
        (
            "bloom",
            {"apply_residual_connection_post_layernorm": True},
            "apply_residual_connection_post_layernorm must be False in BloomForCausalLM",
        ),
        (
            "falcon_h1",
            {"mamba_n_heads": 4, "mlp_multipliers": [1]},
            "mlp_multipliers must be a list of 2 finite numbers",
        ),
        (
            "falcon_h1",
            {"mamba_n_heads": 4, "key_multiplier": 0},
            "key_multiplier must be a finite number that is not 0",
        ),
        ("bamba", {"attn_layer_indices": [7]}, r"attn_layer_indices must be a list of numbers of layers; got \[7\]"),
        ("llama", {"mamba_d_state": 16}, "mamba_d_state is 16, but only .* this family has no Mamba layers"),
        ("bamba", {"num_mem_blocks": 2}, "num_mem_blocks is 2, but only .* layers of this family share no weights"),
        ("zamba2", {"num_mem_blocks": 0, "layers_block_type": ["hybrid"] * 3}, "num_mem_blocks must be"),
        ("zamba2", {"adapter_rank": -1, "layers_block_type": ["hybrid"] * 3}, "adapter_rank must be"),
        (
            "zamba2",
            {"use_shared_attention_adapter": 1, "layers_block_type": ["hybrid"] * 3},
            "use_shared_attention_adapter must be True or False; got 1",
        ),
        ("zamba2", {"use_mem_rope": "no"}, "use_mem_rope must be True or False; got 'no'"),
        ("zamba2", {"tie_word_embeddings": False}, "tie_word_embeddings must be True in Zamba2ForCausalLM"),
        ("zamba2", {"add_bias_linear": True}, "add_bias_linear must be False in Zamba2ForCausalLM"),
        ("zamba2", {"rms_norm_eps": 1e-6}, "rms_norm_eps must be 1e-05 in Zamba2ForCausalLM"),
        ("zamba2", {"layers_block_type": ["moe"] * 3}, "'moe' is not supported in Zamba2ForCausalLM"),
    ],
)
def test_what_the_math_of_a_family_does_not_cover_is_refused(model_type, values, message):
    with pytest.raises(ConfigError, match=message):
        facts(model_type, **values)


def test_names_of_a_family_for_fields():
    config = make("starcoder2", use_bias=False, norm_epsilon=1e-3)
    assert not config.attention_bias and not config.mlp_bias and config.rms_norm_eps == 1e-3
    config = make("cohere2", logit_scale=0.25, layer_norm_eps=1e-4, sliding_window_pattern=3)
    got = decoder_spec(config, 8)
    assert config.rms_norm_eps == 1e-4 and got.logit_multiplier == 0.25
    assert each(got, "rope") == (0, 0, -1) and got.parallel_blocks and got.norm == "layer"
    assert (
        each(facts("granitemoehybrid", layer_types=["attention"] * 3, shared_intermediate_size=40), "sliding_window")
        == (0,) * 3
    )


def test_mimo_in_the_form_of_its_files():
    own = {"head_dim": 24, "v_head_dim": 16, "num_attention_heads": 8}
    kinds = {"layer_types": [F, S, S], "mlp_layer_types": ["dense", "sparse", "dense"]}
    of_windows = {"sliding_window": 129, "swa_num_key_value_heads": 4, "rope_local_base_freq": 3e4}
    want = facts("mimo_v2_flash", **own, **kinds, **of_windows, rms_norm_eps=1e-4, attention_out_multiplier=0.5)
    files = {"hybrid_layer_pattern": [0, 1, 1], "moe_layer_freq": [0, 1, 0], "layernorm_epsilon": 1e-4}
    files |= {"swa_head_dim": 24, "swa_v_head_dim": 16, "swa_num_attention_heads": 8, "swa_rope_theta": 3e4}
    files |= {"sliding_window": 128, "sliding_window_size": 128, "attention_chunk_size": 128}
    got = facts("mimo_v2_flash", **own, **files, attention_value_scale=0.5, routed_scaling_factor=None)
    assert repr(got) == repr(want)
    assert each(got, "sinks") == (False, True, True) and each(got, "num_kv_heads") == (2, 4, 4)
    assert each(facts("mimo_v2_flash", num_layers=7), "sliding_window") == (0, 129, 129, 129, 129, 0, 129)


def test_kimi_counts_layers_from_one():
    own = {"full_attn_layers": [2], "num_heads": 4, "head_dim": 24, "short_conv_kernel_size": 3}
    got = facts("kimi_linear", linear_attn_config=own)
    first, second, third = (layer.mixer for layer in got.layers)
    assert (
        first.by_element and first.gate_rank == 24 and (first.num_k_heads, first.v_dim, first.conv_size) == (4, 24, 3)
    )
    assert repr(third) == repr(first) and second.kv_rank == 512
    assert got.ropes[second.rope].inv_freq == [0] * 32, "latent attention without RoPE turns by nothing"


def test_mlps_of_gpt2_are_four_times_as_wide():
    assert LlamaConfig(model_type="gpt2", n_embd=64).intermediate_size == 256
    assert LlamaConfig(model_type="gpt2", n_embd=64, n_inner=24).intermediate_size == 24


@pytest.mark.parametrize(
    ("values", "heads", "blocks"),
    [
        ({}, 1, (True, False)),
        ({"num_kv_heads": 4}, 1, (True, False)),  # as published files of 7B say
        ({"multi_query": False}, 4, (True, False)),
        ({"multi_query": False, "parallel_attn": False}, 4, (False, False)),
        ({"new_decoder_architecture": True, "n_head_kv": 2}, 2, (True, True)),
        ({"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}, 2, (True, False)),
    ],
)
def test_heads_and_norms_of_falcon(values, heads, blocks):
    config = LlamaConfig.from_dict({"model_type": "falcon", **SMALL, **values})
    got = decoder_spec(config, 8)
    assert got.layers[0].mixer.num_kv_heads == heads
    assert (got.parallel_blocks, got.parallel_norms) == blocks
    assert LlamaConfig.from_dict(config.to_dict()) == config


def test_positions_of_opt_begin_behind_two():
    got = decoder_spec(make("opt", num_key_value_heads=4, max_position_embeddings=64), 64)
    assert (got.embedding_sum.num_positions, got.embedding_sum.position_offset) == (66, 2)


def test_minicpm3_divides_its_width_among_values():
    config = LlamaConfig(model_type="minicpm3", hidden_size=96, num_attention_heads=4, scale_emb=3, num_layers=4)
    assert config.v_head_dim == 24 and config.embedding_multiplier == 3


@pytest.mark.parametrize(("parallel", "blocks"), [(True, (True, True)), (False, (False, False))])
def test_attention_beside_an_mlp_with_a_norm_of_its_own(parallel, blocks):
    got = decoder_spec(make("gpt_neox", num_key_value_heads=4, use_parallel_residual=parallel), 8)
    assert (got.parallel_blocks, got.parallel_norms) == blocks


def test_head_dim_defaults():
    assert make("llama").head_dim == make("mistral").head_dim == make("qwen2").head_dim == 8
    assert make("qwen3").head_dim == 128
    assert facts("qwen3").layers[0].mixer.softmax_scale == np.float32(128**-0.5)


def test_swish_is_silu():
    assert facts("llama", hidden_act="swish").layers[0].mlp.activation == "silu"


def test_lookups_name_what_is_unknown():
    assert family_of("LlamaForCausalLM") is family_of_model_type("llama")
    with pytest.raises(
        ConfigError, match=r"^architecture 'X' is not supported; docs/architectures.md lists those that"
    ):
        family_of("X")
    with pytest.raises(
        ConfigError, match=r"^model_type 'x' is not supported; docs/architectures.md lists those that are$"
    ):
        family_of_model_type("x")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("deberta-v2", "other encoders"),
        ("whisper", "an encoder beside the decoder"),
        ("t5", "an encoder beside the decoder"),
        ("mamba2", "models without attention"),
        ("falcon_mamba", "Mamba of the first kind"),
        ("biogpt", "sine positions"),
        ("refact", "slopes are rounded"),
    ],
)
def test_unsupported_models_are_told_why(name: str, reason: str) -> None:
    """In three lines: the name, the math that is missing, the nearest family that is computed."""
    with pytest.raises(ConfigError, match=reason) as told:
        family_of_model_type(name)
    first, missing, nearest = str(told.value).split("\n")
    assert name in first and missing.startswith("missing: ") and nearest.startswith("nearest that is computed: ")


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.classes.split()[0])
def test_each_refused_class_is_told(row: Refused) -> None:
    """Each class says its own reason and a family that is computed; no such class is one."""
    assert row.nearest in FAMILIES
    for name in row.classes.split():
        assert name not in FAMILIES
        with pytest.raises(ConfigError, match=re.escape(row.missing.replace("`", ""))):
            family_of(name)
    for name in row.also.split():
        assert missing_math(name) is row


ONE = {"in_multiplier": 1, "out_multiplier": 1, "gate_deviations": None, "limit": 0}


def test_near_names_are_told() -> None:
    with pytest.raises(ConfigError, match=r"'qwen4' is not supported; did you mean 'qwen[23]'[?] docs/"):
        family_of_model_type("qwen4")
    with pytest.raises(ConfigError, match=r"did you mean 'Qwen2ForCausalLM'[?]"):
        family_of("Qwen2ForTokenClassification")
    for family in FAMILIES.values():  # a reason is never that of a family that is supported
        assert "did you mean" in str(unsupported("model_type", f"{family.model_type}x", [family.model_type]))


def test_classes_with_the_layers_of_a_family() -> None:
    """The class of the layers alone, and that with scores of labels; the class with an lm_head is the row itself."""
    for name, row, head in (
        ("Qwen3Model", "Qwen3ForCausalLM", "none"),
        ("LlamaForSequenceClassification", "LlamaForCausalLM", "score"),
        ("Gemma3TextModel", "Gemma3ForCausalLM", "none"),
        ("Qwen3ForCausalLM", "Qwen3ForCausalLM", "lm_head"),
        ("BertModel", "BertModel", "none"),
        ("RobertaForMaskedLM", "RobertaModel", "none"),
        ("XLMRobertaForSequenceClassification", "XLMRobertaModel", "score"),
    ):
        config = LlamaConfig(architectures=[name])
        assert (config.architecture, config.head) == (row, head) == (family_of(name).architecture, head_of(name))
        assert config.to_dict()["architectures"] == [name] and LlamaConfig(**config.to_dict()) == config
        spec = build_spec(config, dtype="float32", max_model_len=8)
        assert spec.tie_word_embeddings is (head != "lm_head" or config.tie_word_embeddings)
    for name in (
        "DebertaV2Model",
        "LlamaForMaskedLM",
        "ForSequenceClassification",
        "Model",
        "XForSequenceClassification",
    ):
        with pytest.raises(ConfigError, match="is not supported"):
            family_of(name)


# ------------------------------------------------------------------------------------------------- build_spec


def flat(spec):
    """Every attribute of a struct of the core."""
    if isinstance(spec, list):
        return [flat(item) for item in spec]
    names = [name for name in dir(spec) if not name.startswith("_")] if "Spec" in type(spec).__name__ else []
    return {name: flat(getattr(spec, name)) for name in names if not callable(getattr(spec, name))} or spec


def test_build_spec_fills_every_field():
    config = make("qwen3", head_dim=20, attention_bias=True, tie_word_embeddings=True, rms_norm_eps=1e-5)
    config.use_sliding_window, config.sliding_window, config.max_window_layers = True, 9, 2
    spec = build_spec(config, dtype="bfloat16", max_model_len=77)
    written = flat(spec)
    inv_freq = written["ropes"][0].pop("inv_freq")
    np.testing.assert_allclose(inv_freq, 10000.0 ** (-np.arange(10) / 10), rtol=5e-7)
    assert written == {
        "dtype": "bfloat16",
        "quantization": "none",
        "fp8_inputs": False,
        "norm": "rms",
        "norm_weights": True,
        "stream_norms": "none",
        "parallel_blocks": False,
        "parallel_norms": False,
        "lm_head": True,
        "lm_head_bias": False,
        "vocab_size": 50,
        "hidden_size": 32,
        "num_layers": 3,
        "own_layers": (0, 3),
        "max_model_len": 77,
        "rms_norm_eps": float(np.float32(1e-5)),
        "pre_norms": True,
        "post_norms": False,
        "norm_offset": 0.0,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logit_multiplier": 1.0,
        "logit_cap": 0.0,
        "tie_word_embeddings": True,
        "ropes": [{"attention_factor": 1.0, "scale_beta": 0.0, "scale_positions": 1, "scale_offset": 0, "axes": []}],
        "given_levels": 0,
        "tower": None,
        "layers": [layer_with(window) for window in (0, 0, 9)],
        "mtp": None,
        "layer_scalars": False,
        "own_vectors": None,
        "altup": None,
        "embedding_sum": None,
        "position_bias": None,
        "clipped_linears": False,
        "embedding_norm": False,
    }


def layer_with(sliding_window):
    """All fields of a layer of the configuration above."""
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 20}
    reads = {"sliding_window": sliding_window, "chunked": False, "two_way": False}
    return {
        "mixer": {
            **heads,
            **reads,
            "v_head_dim": 0,
            "softmax_scale": float(np.float32(20**-0.5)),
            "score_cap": 0.0,
            "rope": 0,
            "q_rope": -1,
            "inputs": 1,
            "kv_owner": -1,
            "clip_qkv": 0.0,
            "qkv_bias": True,
            "out_bias": True,
            "qk_norm": "head",
            "sinks": False,
            "output_gate": False,
            "gate_by_head": False,
            "softplus_gate": False,
            "v_norm": False,
            "spans": True,
            "indexer": None,
            "out_multiplier": 1,
        },
        "mlp": {"intermediate_size": 40, "bias": False, "gated": True, "activation": "silu", "down_bias": False, **ONE},
        "experts": None,
        "mixer_beside": None,
        "laurel": None,
        "block": None,
        "norms_behind": False,
        "cache": {
            "kind": "paged",
            **heads,
            **reads,
            "value_dim": 20,
            "spans": True,
            "index_dim": 0,
            "top_k": 0,
            "run_keys": 1,
            "owner": -1,
            "states": [],
            "log_columns": 0,
        },
        "cost": {"of_pair": 4 * (20 + 20), "of_token": 0},
    }


def test_build_spec_of_experts():
    config = make("qwen2_moe", num_experts=6, num_experts_per_tok=2, mlp_only_layers=[1], norm_topk_prob=True)
    config.moe_intermediate_size, config.shared_expert_intermediate_size = 24, 20
    written = flat(build_spec(config, dtype="float32", max_model_len=9))
    mlp = {"bias": False, "gated": True, "activation": "silu", "down_bias": False, **ONE}
    assert written["layers"][0]["experts"] == {
        "count": 6,
        "top_k": 2,
        "expert": {"intermediate_size": 24, **mlp},
        "shared": {"intermediate_size": 20, **mlp},
        "shared_gate": True,
        "router_bias": False,
        "scoring": "softmax",
        "tolerance": 0.0,
        "correction_bias": False,
        "norm_topk_prob": True,
        "scale": 1.0,
        "num_groups": 1,
        "top_groups": 1,
        "group_best": 2,
        "latent_size": 0,
        "weigh_inputs": False,
        "post_norm": False,
        "on_host": False,
        "out_multiplier": 1.0,
    }
    assert [layer["experts"] is not None for layer in written["layers"]] == [True, False, True]


def test_build_spec_of_experts_like_those_of_deepseek():
    config = make("glm4_moe", n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2, n_shared_experts=2)
    config.moe_intermediate_size, config.routed_scaling_factor = 24, 2.5
    written = flat(build_spec(config, dtype="float32", max_model_len=9))
    mlp = {"bias": False, "gated": True, "activation": "silu", "down_bias": False, **ONE}
    assert written["layers"][1]["experts"] == {
        "count": 8,
        "top_k": 3,
        "expert": {"intermediate_size": 24, **mlp},
        "shared": {"intermediate_size": 48, **mlp},
        "shared_gate": False,
        "router_bias": False,
        "scoring": "sigmoid",
        "tolerance": 0.0,
        "correction_bias": True,
        "norm_topk_prob": True,
        "scale": 2.5,
        "num_groups": 4,
        "top_groups": 2,
        "group_best": 2,
        "latent_size": 0,
        "weigh_inputs": False,
        "post_norm": False,
        "on_host": False,
        "out_multiplier": 1.0,
    }
    assert [layer["experts"] is not None for layer in written["layers"]] == [False, True, True]
    assert [layer["mlp"] is None for layer in written["layers"]] == [False, True, True]
    assert written["layers"][0]["mixer"]["qk_norm"] == "none"
    config.use_qk_norm = True
    assert build_spec(config, dtype="float32", max_model_len=9).layers[0].mixer.qk_norm == "head"


@pytest.mark.parametrize(
    ("model_type", "values", "message"),
    [
        ("glm4_moe", {"n_group": 3}, "n_group must be a divisor of the number of experts, 8; got 3"),
        ("glm4_moe", {"n_group": 4, "topk_group": 5}, "topk_group must be at most 4"),
        ("glm4_moe", {"n_group": 4, "num_experts_per_tok": 3}, "num_experts_per_tok must be at most 2"),
        ("glm4_moe", {"routed_scaling_factor": 0}, "routed_scaling_factor must be a finite number > 0; got 0"),
        ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func must be 'sigmoid' or 'noaux_tc' in Glm4MoeForCausalLM"),
        ("glm4_moe", {"topk_method": "greedy"}, "topk_method must be 'noaux_tc' in Glm4MoeForCausalLM"),
        ("glm4_moe", {"first_k_dense_replace": -1}, "first_k_dense_replace"),
        ("glm4_moe", {"n_shared_experts": 2**30}, "n_shared_experts \\* moe_intermediate_size must be < 2"),
        ("minimax_m2", {"rotary_dim": "half"}, "rotary_dim must be an integer"),
        ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias must be True"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias must be False"),
        ("qwen3_moe", {"n_group": 2}, "n_group is 2, but only null or 1 is supported"),
    ],
)
def test_bad_values_of_experts_are_named(model_type, values, message):
    name = {"glm4_moe": "n_routed_experts"}.get(model_type, "num_experts")
    with pytest.raises(ConfigError, match=message):
        make(model_type, **{name: 8, "num_experts_per_tok": 2, **values}).validate()


def test_the_last_layers_may_be_dense():
    for end, dense in ((-1, []), (2, []), (1, [2])):
        config = make("ernie4_5_moe", num_experts=8, num_experts_per_tok=2, moe_layer_end_index=end)
        assert config.mlp_only_layers == dense
        assert tuple(layer.experts is not None for layer in decoder_spec(config, 128).layers) == (
            False,
            True,
            2 not in dense,
        )
    assert make("minimax_m2", head_dim=20, rotary_dim=10).partial_rotary_factor == 0.5


def test_build_spec_of_other_layers():
    spec = build_spec(
        make("granite", embedding_multiplier=12, residual_multiplier=0.5, logits_scaling=4, attention_multiplier=0.25),
        dtype="float32",
        max_model_len=9,
    )
    assert (spec.embedding_multiplier, spec.residual_multiplier, spec.logit_multiplier) == (12, 0.5, 0.25)
    assert spec.layers[0].mixer.softmax_scale == 0.25
    ropes = [
        layer.mixer.rope for layer in build_spec(make("smollm3", num_layers=8), dtype="float32", max_model_len=9).layers
    ]
    assert ropes == [0, 0, 0, -1, 0, 0, 0, -1]
    listed = make("smollm3", no_rope_layers=[0, 1, 1])
    assert [layer.mixer.rope for layer in build_spec(listed, dtype="float32", max_model_len=9).layers] == [-1, 0, 0]
    spec = build_spec(make("olmo2"), dtype="float32", max_model_len=9)
    assert (spec.pre_norms, spec.post_norms, spec.layers[0].mixer.qk_norm) == (False, True, "all")


SHAPED = {
    "head_dim": 8,
    "sliding_window": 9,
    "global_head_dim": 12,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": None,
}


def test_build_spec_of_layers_that_differ_in_shape():
    config = make(
        "gemma4_text",
        **{**SHAPED, "hidden_size_per_layer_input": 5, "vocab_size_per_layer_input": 60},
        layer_types=[S, S, F, S, F],
        num_layers=5,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
    )
    spec = build_spec(config, dtype="float32", max_model_len=9)
    caches = [
        (layer.cache.kind, layer.cache.num_kv_heads, layer.cache.head_dim, layer.cache.owner) for layer in spec.layers
    ]
    own, full = ("paged", 2, 8, -1), ("paged", 1, 12, -1)
    assert caches == [own, own, full, ("shared", 2, 8, 1), ("shared", 1, 12, 2)]
    assert [layer.mlp.intermediate_size for layer in spec.layers] == [40, 40, 40, 80, 80]
    assert [layer.mixer.rope for layer in spec.layers] == [1, 1, 0, 1, 0]
    assert [len(rope.inv_freq) for rope in spec.ropes] == [6, 4] and spec.ropes[0].inv_freq[1:] == [0.0] * 5
    assert spec.layers[0].mixer.softmax_scale == 1 and spec.layers[0].mixer.v_norm and spec.layer_scalars
    assert (spec.own_vectors.size, spec.own_vectors.vocab_size, spec.layers[0].experts) == (5, 60, None)
    assert spec.kv_bytes_per_token("float32") == 4 * 2 * (2 * 2 * 8 + 12)  # each cache once
    assert [shape.values_are_keys for shape in shapes_of(config)] == [False, False, True, False, False]
    names = set(param_shapes(spec))
    assert "model.layers.4.self_attn.q_norm.weight" in names
    assert not [name for name in names if name.startswith("model.layers.4.self_attn.k_")]


STREAMS = {"head_dim": 8, "sliding_window": 9, "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 40}


def test_build_spec_of_several_streams():
    config = make("gemma3n_text", **STREAMS, intermediate_size=[24] * 3, activation_sparsity_pattern=[0.95, 0.5, 0.0])
    spec = build_spec(config, dtype="float32", max_model_len=9)
    assert (spec.altup.num_streams, [layer.laurel.rank for layer in spec.layers]) == (4, [64] * 3)
    assert [layer.mlp.intermediate_size for layer in spec.layers] == [24] * 3
    deviations = [layer.mlp.gate_deviations for layer in spec.layers]
    assert deviations == [float(np.float32(1.6448535919189453)), 0.0, None]
    assert spec.own_vectors.vocab_size == 40 < spec.vocab_size  # those of ids beyond are those of the first
    one_stream = make("gemma3n_text", **STREAMS, altup_num_inputs=1, laurel_rank=0)
    assert (decoder_spec(one_stream, 9).altup, decoder_spec(one_stream, 9).layers[0].laurel) == (None, None)
    many = make("gemma3n_text", **STREAMS, num_layers=12)  # files say nothing: ten layers are sparse
    assert [layer.mlp.gate_deviations is None for layer in decoder_spec(many, 9).layers] == [False] * 10 + [True] * 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"altup_num_inputs": 9}, "altup_num_inputs must be 2 to 8, or 1 for one stream; got 9"),
        ({"altup_active_idx": 1}, "altup_active_idx must be None or 0 in Gemma3nForCausalLM"),
        ({"altup_correct_scale": False}, "altup_correct_scale must be None or True"),
        ({"laurel_rank": -1}, "laurel_rank must be .*; got -1"),
        ({"activation_sparsity_pattern": [0.5]}, r"for each of 3 layers; got \[0.5\]"),
        ({"activation_sparsity_pattern": [0.5, 1.0, 0.0]}, "from 0 to below 1 for each of 3 layers"),
        ({"activation_sparsity_pattern": "most"}, "activation_sparsity_pattern must be null, or a number"),
        ({"intermediate_size": [8, 8, 16]}, "intermediate_size must be the same in all layers of Gemma3nForCausalLM"),
        (
            {"hidden_size_per_layer_input": 0},
            "altup_num_inputs is 4 and hidden_size_per_layer_input 0; several streams need vectors",
        ),
    ],
)
def test_bad_values_of_several_streams(values, message):
    with pytest.raises(ConfigError, match=message):
        make("gemma3n_text", **{**STREAMS, **values}).validate()


def test_other_families_have_one_stream():
    for values, reason in (
        ({"altup_num_inputs": 4}, "one residual stream"),
        ({"laurel_rank": 8}, "no second way around attention"),
        ({"activation_sparsity_pattern": [0.5]}, "all activations of this family count"),
    ):
        with pytest.raises(ConfigError, match=reason):
            make("gemma4_text", **SHAPED, **values).validate()


def test_each_interval_th_layer_has_attention_and_the_others_a_state():
    config = LlamaConfig(model_type="qwen3_next", num_hidden_layers=7, full_attention_interval=3)
    kinds = [layer.cache.kind for layer in decoder_spec(config, 9).layers]
    assert kinds == ["none", "none", "paged", "none", "none", "paged", "none"]
    config.layer_types = ["full_attention", *["linear_attention"] * 6]
    assert [layer.cache.kind for layer in decoder_spec(config, 9).layers] == ["paged", *["none"] * 6]


def test_each_interval_th_layer_has_no_rope():
    config = LlamaConfig(model_type="smollm3", num_hidden_layers=7, no_rope_layer_interval=3)
    assert [layer.mixer.rope for layer in decoder_spec(config, 9).layers] == [0, 0, -1, 0, 0, -1, 0]
    config.no_rope_layers = [0, 1, 1, 1, 1, 1, 1]  # what is listed counts more
    assert [layer.mixer.rope for layer in decoder_spec(config, 9).layers] == [-1, *[0] * 6]


def test_what_differs_by_the_number_of_a_layer_is_read():
    own = {"head_dim": 12, "num_key_value_heads": 1}
    values = {key: value for key, value in SHAPED.items() if key != "global_head_dim"}
    values |= {"layer_types": [S, F, F], "attention_k_eq_v": True}
    for first, second in (("1", "2"), ("01", "02"), (1, 2)):  # transformers pads the numbers of ten layers or more
        config = make("gemma4_text", **values, per_layer_config={first: own, second: own})
        assert (config.global_head_dim, config.num_global_key_value_heads) == (12, 1)
    assert decoder_spec(make("gemma4_text", **{**values, "hidden_size_per_layer_input": None}), 9).own_vectors is None
    same = make("gemma4_text", **{**values, "attention_k_eq_v": False}, per_layer_config={})
    assert each(decoder_spec(same, 9), "head_dim") == (8, 8, 8)
    for wrong in (
        {"1": own},
        {"1": own, "x": own},
        {"1": own, "2": {"head_dim": 4}},
        {"1": own, "2": {**own, "hidden_size": 3}},
        [own],
    ):
        with pytest.raises(ConfigError, match="per_layer_config"):
            make("gemma4_text", **values, per_layer_config=wrong)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers must be less than num_hidden_layers, 3; got 3"),
        (
            {"num_kv_shared_layers": 1, "layer_types": [S, S, F]},
            "layer 2 has no sliding window, and none of the first 2",
        ),
        ({"attention_k_eq_v": True, "num_global_key_value_heads": 3}, "a multiple of num_global_key_value_heads"),
        ({"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 49}, "at least vocab_size, 50"),
        ({"enable_moe_block": True}, "enable_moe_block is true, but num_experts is 0"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention must be None or False or 'vision'"),
        ({"attention_k_eq_v": 1}, "attention_k_eq_v"),
    ],
)
def test_layers_that_cannot_be_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        make("gemma4_text", **{**SHAPED, **values}).validate()


def test_build_spec_of_gemma():
    spec = build_spec(make("gemma2", query_pre_attn_scalar=25, sliding_window=9), dtype="float32", max_model_len=9)
    assert spec.layers[0].mixer.softmax_scale == float(np.float32(0.2))
    assert (spec.layers[0].mixer.score_cap, spec.logit_cap, spec.norm_offset) == (50, 30, 1)
    assert spec.embedding_multiplier == float(np.float32(32**0.5)) and spec.layers[0].mlp.activation == "gelu_tanh"
    assert [layer.mixer.sliding_window for layer in spec.layers] == [9, 0, 9]
    config = make("gemma3_text", sliding_window=9, sliding_window_pattern=3, num_layers=7)
    spec = build_spec(config, dtype="float32", max_model_len=9)
    assert [(layer.mixer.sliding_window, layer.mixer.rope) for layer in spec.layers] == [(9, 1), (9, 1), (0, 0)] * 2 + [
        (9, 1)
    ]
    wide, local = (np.array(rope.inv_freq) for rope in spec.ropes)
    assert wide[-1] < local[-1] and wide[0] == local[0] == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"attn_logit_softcapping": -1}, "attn_logit_softcapping must be a finite number > 0"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern"),
        ({"rope_local_base_freq": "x"}, "rope_local_base_freq must be"),
        (
            {"rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_type": "linear", "factor": 2}}},
            "sliding_attention: expected rope_theta alone",
        ),
        (
            {
                "rope_local_base_freq": 5.0,
                "rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_theta": 6.0}},
            },
            "mean the same, keep one",
        ),
    ],
)
def test_bad_values_of_gemma(values, message):
    with pytest.raises(ConfigError, match=message):
        make("gemma3_text", **values).validate()


@pytest.mark.parametrize(
    ("model_type", "values", "named"),
    [
        ("llama", {"residual_multiplier": 0.5}, "residual_multiplier"),
        ("qwen3", {"no_rope_layers": [1, 1, 0]}, "no_rope_layers"),
        ("mistral", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "num_hidden_layers = 3 entries"),
        ("smollm3", {"no_rope_layers": [1, 2, 0]}, "1 for a layer with RoPE"),
        ("granite", {"logits_scaling": 0}, "logits_scaling must be a finite number > 0"),
        ("granite", {"embedding_multiplier": float("inf")}, "embedding_multiplier must be a finite number"),
    ],
)
def test_keys_of_some_families(model_type, values, named):
    with pytest.raises(ConfigError, match=named):
        make(model_type, **values).validate()
    config = make(model_type)
    for key, value in values.items():
        setattr(config, key, value)
    with pytest.raises(ConfigError, match=named):
        config.validate()


def test_build_spec_fixes_the_rope_by_max_model_len():
    config = make("llama", rope_scaling={"rope_type": "dynamic", "factor": 2.0}, max_position_embeddings=64)
    short = build_spec(config, dtype="float32", max_model_len=64).ropes[0].inv_freq
    assert build_spec(config, dtype="float32", max_model_len=10).ropes[0].inv_freq == short
    assert build_spec(config, dtype="float32", max_model_len=65).ropes[0].inv_freq != short


def test_build_spec_checks_its_own_arguments():
    config = make("llama")
    for dtype in ("float64", "auto", None, 3):
        with pytest.raises(ConfigError, match=f"dtype {dtype!r} is not supported; supported: float32, bfloat16"):
            build_spec(config, dtype=dtype, max_model_len=8)
    for length in (0, -1, 2**31, 8.0, True, None, "8"):
        with pytest.raises(ConfigError, match=r"max_model_len must be an integer in \[1, 2\*\*31\); got"):
            build_spec(config, dtype="float32", max_model_len=length)


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
@example("gemma", {"rope_scaling": {"type": "yarn"}}, 1)  # the key of 4.x, assigned to a field
@example("deepseek_v2", {"rope_scaling": {"type": "yarn"}}, 1)
@example("olmo2", {"lm_head_bias": None}, 1)
@example("falcon_h1", {"layer_types": None}, 1)  # which config.json has not, and reading it always gives
@example("minimax_m3_vl_text", {"router_jitter_noise": {}}, 1)  # of training alone, but for another family
@example("llama4_text", {"moe_intermediate_size": None}, 9)  # a file without it has another key for experts
@given(
    st.sampled_from([family.model_type for family in FAMILIES.values()]),
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


def test_a_field_that_only_a_neighbour_family_has_is_refused_by_validate_too():
    config = make("gemma4_text")
    config.attn_logit_softcapping = 50.0
    with pytest.raises(ConfigError, match=r"attn_logit_softcapping is 50\.0 in Gemma4ForCausalLM: this family"):
        config.validate()


def test_bases_of_rope_by_layer() -> None:
    """Granite with windows: a base for each kind of layers, and layers without RoPE."""
    config = LlamaConfig(model_type="granite_swa", num_hidden_layers=5)
    assert config.layer_types == ["full_attention", *["sliding_attention"] * 3, "full_attention"]
    assert (config.no_rope_layers, config.rope_local_base_freq, config.rope_theta) == (None, None, 10000.0)
    config = LlamaConfig(model_type="granite_swa", num_hidden_layers=5, layer_rope_theta=[0, 30, 0, 30, 700.0])
    assert (config.no_rope_layers, config.rope_local_base_freq, config.rope_theta) == ([0, 1, 0, 1, 1], 30, 700)
    alone = LlamaConfig(model_type="granitemoe_swa", num_hidden_layers=5, layer_rope_theta=[0, 30, 0, 30, 0])
    assert (alone.no_rope_layers, alone.rope_local_base_freq, alone.rope_theta) == ([0, 1, 0, 1, 0], None, 30)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"layer_rope_theta": [1.0] * 4}, r"a list of num_hidden_layers = 5 numbers >= 0.*; got \[1.0"),
        ({"layer_rope_theta": [1, 2, 3, -1, 5]}, "numbers >= 0"),
        (
            {"layer_rope_theta": [1, 2, 3, 2, 1]},
            r"layers of one kind must have the same number.*\[2, 3\] for sliding_att",
        ),
        (
            {"layer_rope_theta": [1, 2, 2, 2, 1], "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            r"supported with rope_type 'default' alone, and rope_\w+ has 'linear'",
        ),
    ],
)
def test_bases_of_rope_that_are_not_supported(more: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LlamaConfig(model_type="granite_swa", num_hidden_layers=5, **more)


def test_clipped_queries_keys_and_values() -> None:
    """MPT has the bound inside of `attn_config`, where 0 means that there is none."""
    for values, bound in (
        ({"model_type": "olmo", "clip_qkv": 8}, 8),
        ({"model_type": "olmo", "clip_qkv": None}, 0),
        ({"model_type": "mpt", "attn_config": {"clip_qkv": 6.0}}, 6),
        ({"model_type": "mpt", "attn_config": {"clip_qkv": 0}}, 0),
    ):
        spec = build_spec(LlamaConfig.from_dict(values), dtype="float32", max_model_len=8)
        assert {layer.mixer.clip_qkv for layer in spec.layers} == {bound}


def test_layers_of_cohere_with_experts() -> None:
    """Windows begin anew behind the layers without experts, which turn whether they have a window or not."""
    config = LlamaConfig.from_dict(
        {
            **{
                "model_type": "cohere2_moe",
                "num_hidden_layers": 6,
                "first_k_dense_replace": 2,
                "num_shared_experts": 1,
            },
            **{"sliding_window_pattern": 3, "intermediate_size": 24, "prefix_dense_intermediate_size": 40},
        }
    )
    full, slides = "full_attention", "sliding_attention"
    assert config.layer_types == [full, full, slides, slides, full, slides]
    assert config.no_rope_layers == [1, 1, 1, 1, 0, 1]
    spec = build_spec(config, dtype="float32", max_model_len=8)
    assert spec.norm == "layer" and [bool(layer.experts) for layer in spec.layers] == [False] * 2 + [True] * 4
    assert (spec.layers[0].mlp.intermediate_size, spec.layers[2].experts.shared.intermediate_size) == (40, 24)
    assert spec.layers[2].experts.out_multiplier == 0.5
    assert LlamaConfig.from_dict(config.to_dict()) == config
    for key in ("expert_selection_fn", "shared_expert_combination_strategy"):
        with pytest.raises(ConfigError, match=rf"{key} must be .* or .*; got 'product'"):
            LlamaConfig.from_dict({"model_type": "cohere2_moe", key: "product"})


def test_sizes_and_rope_of_olmo_hybrid() -> None:
    """Heads of states follow from those of attention; without a base there is no RoPE."""
    values = {"model_type": "olmo_hybrid", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 5}
    config = LlamaConfig.from_dict(values)
    assert config.layer_types == [*["linear_attention"] * 3, "full_attention", "linear_attention"]
    spec = build_spec(config, dtype="float32", max_model_len=8)
    state, attention = (spec.layers[layer] for layer in (0, 3))
    assert (state.mixer.num_k_heads, state.mixer.num_v_heads, state.mixer.k_dim, state.mixer.v_dim) == (4, 4, 12, 24)
    assert state.mixer.doubled_beta and state.mixer.norm_eps == np.float32(1e-5)
    assert (state.norms_behind, attention.norms_behind, attention.mixer.rope) == (False, True, 0)
    for more in ({"rope_theta": None}, {"rope_parameters": {"rope_theta": None, "rope_type": "default"}}):
        still = LlamaConfig.from_dict({**values, **more})
        assert build_spec(still, dtype="float32", max_model_len=8).layers[3].mixer.rope == -1
        assert LlamaConfig.from_dict(still.to_dict()) == still
    with pytest.raises(ConfigError, match="linear_allow_neg_eigval must be True or False; got 1"):
        LlamaConfig.from_dict({**values, "linear_allow_neg_eigval": 1})
    with pytest.raises(ConfigError, match="states of this family change by no more than a key has"):
        LlamaConfig.from_dict({"model_type": "qwen3_next", "linear_allow_neg_eigval": True})


def test_experts_of_phi_are_two() -> None:
    """SparseMixer is of two experts; the factor of cosines is one for each list of longrope."""
    factors = {
        f"{name}_{key}": value for name in ("short", "long") for key, value in (("factor", [1.0] * 4), ("mscale", 1.25))
    }
    rope = {"type": "longrope", "original_max_position_embeddings": 16, **factors, "long_mscale": 1.5}
    values = {"model_type": "phimoe", "hidden_size": 64, "num_attention_heads": 8, "rope_scaling": rope}
    config = LlamaConfig.from_dict(values)
    for length, factor in ((16, 1.25), (17, 1.5)):
        assert build_spec(config, dtype="float32", max_model_len=length).ropes[0].attention_factor == factor
    assert build_spec(config, dtype="float32", max_model_len=8).layers[0].experts.tolerance == np.float32(0.02)
    with pytest.raises(ConfigError, match="num_experts_per_tok must be 2 in PhimoeForCausalLM"):
        LlamaConfig.from_dict({**values, "num_experts_per_tok": 1})
    with pytest.raises(ConfigError, match="router_jitter_noise must be a number >= 0 and < 1; got -1"):
        LlamaConfig.from_dict({**values, "router_jitter_noise": -1})
    with pytest.raises(ConfigError, match="whether the lm_head has a bias is no choice"):
        LlamaConfig.from_dict({"model_type": "mixtral", "lm_head_bias": True})


STEP = {"model_type": "step3p5", "num_hidden_layers": 3, "num_attention_heads": 8, "num_attention_groups": 4}
KINDS_OF_STEP = ["full_attention", "sliding_attention", "full_attention"]


def test_lists_of_step_become_numbers_of_kinds_of_layers() -> None:
    """They go on behind the last layer, where later tokens are guessed at, as in the files of the hub."""
    values = {
        **{**STEP, "layer_types": [*KINDS_OF_STEP, "sliding_attention"], "sliding_window": 5, "head_dim": 16},
        **{"num_nextn_predict_layers": 1, "moe_layers_enum": "1, 2", "swiglu_limits": [0.0, 0.0, 7.0, 0.0]},
        "swiglu_limits_shared": [9.0, None, 0.0, 0.0],
        "rope_theta": [5e6, 1e4, 5e6, 1e4],
        "partial_rotary_factors": [0.5, 1.0, 0.5, 1.0],
        "attention_other_setting": {"num_attention_heads": 12, "num_attention_groups": 4, "head_dim": 16},
    }
    config = LlamaConfig.from_dict(values)
    spec = build_spec(config, dtype="float32", max_model_len=8)
    mixers = [layer.mixer for layer in spec.layers]
    assert [(own.num_heads, own.sliding_window, own.rope) for own in mixers] == [(8, 0, 0), (12, 5, 1), (8, 0, 0)]
    assert [len(rope.inv_freq) for rope in spec.ropes] == [4, 8] and all(own.gate_by_head for own in mixers)
    dense, plain, limited = spec.layers
    assert (dense.mlp.activation, dense.mlp.limit, dense.experts) == ("clamped_silu", 9, None)
    assert plain.experts.expert.activation == "silu"
    assert (limited.experts.expert.limit, limited.experts.shared.activation) == (7, "silu")
    assert LlamaConfig.from_dict(config.to_dict()) == config
    saved = {**values, "per_layer_config": {"01": {"num_attention_heads": 12}}, "attention_other_setting": None}
    assert LlamaConfig.from_dict(saved) == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rope_theta": [1e4, 1e4, 2e4]}, "rope_theta must have a number for each of the 3 layers, the same for all"),
        ({"moe_layers_enum": "one"}, "moe_layers_enum must be a list of numbers of layers"),
        ({"per_layer_config": {"0": {"num_attention_heads": 4}}}, "per_layer_config: only num_attention_heads can"),
        ({"attention_other_setting": {"head_dim": 64}}, "attention_other_setting: head_dim must be 128; got 64"),
        ({"swiglu_limits": [1.0]}, "swiglu_limits must be null or a list of num_hidden_layers = 3 numbers >= 0"),
        ({"swiglu_limits": [1.0] * 3, "hidden_act": "gelu"}, "swiglu_limits are limits of silu, and hidden_act"),
        ({"swa_num_attention_heads": 9}, r"swa_num_attention_heads \(9\) must be a multiple of"),
    ],
)  # fmt: skip
def test_bad_values_of_step(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LlamaConfig.from_dict({**STEP, "layer_types": KINDS_OF_STEP, "sliding_window": 5, **values})


def test_sizes_of_ling_3() -> None:
    """`head_dim` is of layers with a state; in files that were saved again it is a part of a head of the others."""
    values = {"model_type": "bailing_hybrid", "num_hidden_layers": 12, "num_attention_heads": 4, "head_dim": 32}
    values["num_key_value_heads"] = 4
    config = LlamaConfig.from_dict(values)
    again = LlamaConfig.from_dict({**values, "head_dim": 64, "linear_head_dim": 32})
    spec = build_spec(config, dtype="float32", max_model_len=8)
    state, latent = spec.layers[0].mixer, spec.layers[5].mixer
    assert (state.num_k_heads, state.k_dim, state.v_dim, state.gate_rank, state.lower_bound) == (4, 32, 32, 0, -5)
    assert latent.head_gate and latent.rope_dim == 64 and again == config
    assert LlamaConfig.from_dict(config.to_dict()) == config
    unbounded = LlamaConfig.from_dict({**values, "kda_safe_gate": False})
    assert build_spec(unbounded, dtype="float32", max_model_len=8).layers[0].mixer.lower_bound == 0
    with pytest.raises(ConfigError, match="kda_lower_bound must be a number <= 0; got 1"):
        LlamaConfig.from_dict({**values, "kda_lower_bound": 1})


def test_layers_of_minimax_m3_choose_blocks_of_keys() -> None:
    values = {"model_type": "minimax_m3_vl_text", "num_hidden_layers": 2, "intermediate_size": 24}
    chooses = {"sparse_block_size": 8, "sparse_topk_blocks": 4, "sparse_attention_freq": [0, 1]}
    config = LlamaConfig.from_dict({**values, "sparse_attention_config": chooses, "max_position_embeddings": 99})
    assert config.max_position_embeddings == 99 and config.indexer_types == ["none", "full"]
    first, second = (layer.mixer.indexer for layer in build_spec(config, dtype="float32", max_model_len=8).layers)
    assert first is None and (second.top_k, second.run_keys, second.last_runs) == (32, 8, 1)
    assert (config.moe_intermediate_size, config.intermediate_size) == (24, 12288)
    assert LlamaConfig.from_dict(config.to_dict()) == config
    assert LlamaConfig.from_dict(values).max_position_embeddings == 524288
    with pytest.raises(ConfigError, match="layer_types must be a list of 'full_attention' and 'minimax_m3_sparse'"):
        LlamaConfig.from_dict({**values, "layer_types": ["sliding_attention"] * 2})
    for changes, message in (
        ({"sparse_num_index_heads": 3}, "index_n_heads must be num_key_value_heads, 4: .*; got 3"),
        ({"sparse_local_block": 5}, "index_local_blocks must be at most index_topk_blocks, 4; got 5"),
        ({"sparse_init_block": 1}, "sparse_init_block of sparse_attention_config must be 0; got 1"),
        ({"sparse_score_type": "sum"}, "sparse_score_type of sparse_attention_config must be 'max'; got 'sum'"),
        ({"sparse_attention_freq": 1}, "sparse_attention_freq must be a list"),
    ):
        with pytest.raises(ConfigError, match=message):
            config = LlamaConfig.from_dict({**values, "sparse_attention_config": {**chooses, **changes}})
            build_spec(config, dtype="float32", max_model_len=8)


def test_heads_and_gates_of_laguna() -> None:
    values = {"model_type": "laguna", "num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]}
    config = LlamaConfig.from_dict({**values, "num_attention_heads_per_layer": [16, 24], "gating": "per-element"})
    mixers = [layer.mixer for layer in build_spec(config, dtype="float32", max_model_len=8).layers]
    assert [(own.num_heads, own.gate_by_head, own.softplus_gate) for own in mixers] == [
        (16, False, True),
        (24, False, True),
    ]
    assert build_spec(LlamaConfig.from_dict(values), dtype="float32", max_model_len=8).layers[0].mixer.gate_by_head
    for key, value in (("gating", "none"), ("num_attention_heads_per_layer", [16])):
        with pytest.raises(ConfigError, match=key):
            LlamaConfig.from_dict({**values, key: value})


def test_parameters_of_rope_of_the_one_kind_of_layers_that_there_is() -> None:
    """Laguna M has no layers with a window, and its config.json gives parameters of RoPE for the others alone."""
    full = {"rope_type": "default", "rope_theta": 70000.0, "partial_rotary_factor": 0.25}
    values = {"model_type": "laguna", "num_hidden_layers": 2, "rope_parameters": {"full_attention": full}}
    config = LlamaConfig.from_dict({**values, "layer_types": ["full_attention"] * 2})
    assert (config.rope_theta, config.partial_rotary_factor) == (70000.0, 0.25)
    with pytest.raises(ConfigError, match="has parameters of 'full_attention', which LagunaForCausalLM does not take"):
        LlamaConfig.from_dict({**values, "layer_types": ["full_attention", "sliding_attention"]})


def test_limits_of_activations_of_ling() -> None:
    """Also of layers behind the last, or not of all that there are."""
    values = {"model_type": "bailing_hybrid", "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 32}
    values["num_key_value_heads"] = 4
    limits = {"expert_swiglu_limit_list": [None, 0.5, 0.75, 9.0], "share_expert_swiglu_limit_list": [0.25]}
    config = LlamaConfig.from_dict(values | limits | {"first_k_dense_replace": 1})
    layers = build_spec(config, dtype="float32", max_model_len=8).layers
    assert (layers[0].mlp.activation, layers[0].mlp.limit) == ("clamped_silu", 0.25)
    assert [(own.experts.expert.limit, own.experts.shared.limit) for own in layers[1:]] == [(0.5, 0), (0.75, 0)]
    with pytest.raises(ConfigError, match="swiglu_limits must be null or a list of num_hidden_layers = 3 numbers >= 0"):
        LlamaConfig.from_dict({**values, "expert_swiglu_limit_list": [-1.0, 0.0, 0.0]})
