"""Keys of config.json that are not fields of `ModelConfig`: those that would change the math, and those that cannot."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from infinilm.config.sublayers.indexer import IndexerConfig
from infinilm.config.sublayers.mamba import MambaConfig, MultiplierConfig
from infinilm.config.sublayers.shared_block import SharedBlockConfig
from infinilm.config.sublayers.sizes import defaults_of

__all__ = ["INERT", "UNSUPPORTED"]

_NEVER: tuple[Any, ...] = (None, False)  # the neutral values of a switch that must be off
_NONE_OF: tuple[Any, ...] = (None, 0)  # the neutral values of a number that must not count
_ONE: tuple[Any, ...] = (None, 1)  # the neutral values of a multiplier

_NO_SUCH = "this family has no such multipliers"

UNSUPPORTED: Mapping[str, tuple[tuple[Any, ...], str]] = MappingProxyType(
    {
        "num_experts": (_NONE_OF, "this family has no experts"),
        "num_local_experts": (_NONE_OF, "this family has no experts"),
        "n_routed_experts": (_NONE_OF, "this family has no experts"),
        "n_shared_experts": (_NONE_OF, "this family has no experts that all tokens go to"),
        "first_k_dense_replace": (_NONE_OF, "this family has no such experts"),
        "n_group": (_ONE, "the experts of this family are in no groups"),
        "topk_group": (_ONE, "the experts of this family are in no groups"),
        "routed_scaling_factor": (_ONE, "the experts of this family are not scaled"),
        "num_experts_per_tok": (_NONE_OF, "this family has no experts"),
        "moe_intermediate_size": (_NONE_OF, "this family has no experts"),
        "shared_expert_intermediate_size": (_NONE_OF, "this family has no experts"),
        "norm_topk_prob": (_NEVER, "this family has no experts"),
        "decoder_sparse_step": (_ONE, "this family has no experts"),
        "mlp_only_layers": ((None, [], ()), "this family has no experts"),
        "enable_moe_block": (_NEVER, "this family has no experts beside its MLPs"),
        "moe_latent_size": (_NONE_OF, "the experts of this family read the token itself"),
        "expert_selection_fn": ((None, "softmax"), "how experts are scored is no choice in this family"),
        "shared_expert_combination_strategy": ((None, "sum"), "what experts of this family give is added up"),
        "swiglu_limits": ((None,), "activations of this family have no limits of their layers"),
        "swiglu_limits_shared": ((None,), "activations of this family have no limits of their layers"),
        "use_rms_norm": (_NEVER, "which norms this family has is no choice"),
        "top_k_experts": (_NONE_OF, "this family has no experts"),
        "global_head_dim": ((None,), "all layers of this family have heads of one size"),
        "num_global_key_value_heads": ((None,), "all layers of this family have as many kv heads"),
        "swa_num_key_value_heads": ((None,), "all layers of this family have as many kv heads"),
        "swa_num_attention_heads": ((None,), "all layers of this family have as many heads"),
        "attention_k_eq_v": (_NEVER, "this family has a v_proj in each layer"),
        "num_kv_shared_layers": (_NONE_OF, "each layer of this family has keys and values of its own"),
        "use_double_wide_mlp": (_NEVER, "all MLPs of this family are as wide"),
        "hidden_size_per_layer_input": (_NONE_OF, "this family has no embeddings of each layer"),
        "vocab_size_per_layer_input": ((None,), "this family has no embeddings of each layer"),
        "altup_num_inputs": (_ONE, "this family has one residual stream"),
        "laurel_rank": (_NONE_OF, "this family has no second way around attention"),
        "activation_sparsity_pattern": ((None,), "all activations of this family count"),
        "linear_num_key_heads": (_NONE_OF, "this family has no linear attention"),
        "linear_num_value_heads": (_NONE_OF, "this family has no linear attention"),
        "linear_key_head_dim": (_NONE_OF, "this family has no linear attention"),
        "linear_value_head_dim": (_NONE_OF, "this family has no linear attention"),
        "linear_conv_kernel_dim": (_NONE_OF, "this family has no linear attention"),
        "linear_allow_neg_eigval": (_NEVER, "states of this family change by no more than a key has"),
        "kda_lower_bound": (_NONE_OF, "decays of this family have no lower bound"),
        "full_attention_interval": ((None, 1), "this family has no linear attention"),
        **{
            key: ((None, default), "this family has no Mamba layers")
            for key, default in defaults_of(MambaConfig).items()
        },
        **{
            key: ((None, default), "layers of this family share no weights")
            for key, default in defaults_of(SharedBlockConfig).items()
        },
        **{key: ((None, default), _NO_SUCH) for key, default in defaults_of(MultiplierConfig).items()},
        "lm_head_multiplier": (_ONE, _NO_SUCH),
        "conv_L_cache": (_NONE_OF, "this family has no short convolutions"),
        "block_auto_adjust_ff_dim": (_NEVER, "intermediate_size is the size that MLPs have"),
        "gating": ((None, True, "per-head"), "how many gates attention of this family has is no choice"),
        "attn_output_gate": (_NEVER, "attention of this family has no gate"),
        "qkv_bias": (_NEVER, "whether q, k and v have biases is said by attention_bias"),
        "kv_lora_rank": (_NONE_OF, "this family has no latent attention (MLA)"),
        "q_lora_rank": (_NONE_OF, "this family has no latent attention (MLA)"),
        "qk_nope_head_dim": (_NONE_OF, "this family has no latent attention (MLA)"),
        "qk_rope_head_dim": (_NONE_OF, "this family has no latent attention (MLA)"),
        "v_head_dim": (_NONE_OF, "this family has no latent attention (MLA)"),
        **{
            key: ((None, default), "tokens of this family read all keys that they see")
            for key, default in defaults_of(IndexerConfig).items()
        },
        "rope_interleave": ((None, True), "which elements RoPE turns together is no choice in this family"),
        "partial_rotary_factor": (_ONE, "RoPE rotates the whole head in this family"),
        "swa_partial_rotary_factor": ((None,), "all layers of this family turn alike"),
        "use_mrope": (_NEVER, "multimodal RoPE is not supported"),
        "rope_interleaved": (_NEVER, "RoPE pairs element i with i + head_dim / 2"),
        "no_rope_layers": ((None, []), "every layer of this family uses RoPE"),
        "no_rope_layer_interval": (_NONE_OF, "every layer of this family uses RoPE"),
        "attention_chunk_size": (_NONE_OF, "tokens of this family see more than their own chunk"),
        "attn_temperature_tuning": (_NEVER, "queries of this family are not scaled by their position"),
        "floor_scale": ((None, 8192), "queries of this family are not scaled by their position"),
        "attn_scale": ((None, 0.1), "queries of this family are not scaled by their position"),
        "alibi": (_NEVER, "positions come from RoPE only"),
        "use_qk_norm": (_NEVER, "norms of q and k are not computed in this family"),
        "qk_layernorm": (_NEVER, "normalised q and k exist in Qwen3ForCausalLM, always"),
        "clip_qkv": ((None,), "q, k and v are not clipped in this family"),
        "query_pre_attn_scalar": ((None,), "attention scores are scaled by head_dim ** -0.5 in this family"),
        "attn_logit_softcapping": ((None,), "this family has no soft caps"),
        "final_logit_softcapping": ((None,), "this family has no soft caps"),
        "rope_local_base_freq": ((None,), "all layers of this family turn alike"),
        "layer_rope_theta": ((None,), "all layers of this family turn alike"),
        "use_bidirectional_attention": (_NEVER, "a token sees no later ones"),
        "attention_multiplier": ((None,), "this family has no multipliers"),
        "embedding_multiplier": (_ONE, "this family has no multipliers"),
        "residual_multiplier": (_ONE, "this family has no multipliers"),
        "mup_enabled": (_NEVER, "this family has no multipliers"),
        "logits_scaling": (_ONE, "this family has no multipliers"),
        "logit_scale": (_ONE, "multipliers are not supported"),
        "scale_emb": (_ONE, "multipliers are not supported"),
        "scale_depth": (_ONE, "multipliers are not supported"),
        "dim_model_base": ((None,), "multipliers are not supported"),
        "lm_head_bias": (_NEVER, "whether the lm_head has a bias is no choice in this family"),
        "norm_head": (_NEVER, "the lm_head of this family counts as it is"),
        "activation": ((None, "swiglu"), "the activation of the MLP is said by hidden_act"),
        "type_vocab_size": (_NONE_OF, "tokens of this family have no types"),
        "parallel_attn": (_NEVER, "attention and MLP run one after the other"),
        "use_parallel_residual": (_NEVER, "attention and MLP run one after the other"),
        "num_ln_in_parallel_attn": ((None, 2), "how many norms attention and MLP have is no choice in this family"),
        "is_encoder_decoder": (_NEVER, "only decoders are supported"),
        "add_cross_attention": (_NEVER, "only decoders are supported"),
        "cross_attention_hidden_size": ((None,), "only decoders are supported"),
        "pruned_heads": ((None, {}), "all heads must be there"),
        "per_layer_config": ((None, {}), "all layers have the same sizes"),
        "text_config": ((None,), "only text models are supported"),
        "vision_config": ((None,), "only text models are supported"),
        "audio_config": ((None,), "only text models are supported"),
    }
)
"""Keys that would change the math: the values that do not, and why the engine refuses others."""

INERT = frozenset(
    """
    auto_map _attn_implementation _attn_implementation_autoset _name_or_path attn_implementation
    bad_words_ids begin_suppress_tokens cache_implementation chunk_size_feed_forward classifier_dropout
    classifier_pooling cls_token_id compression_config quantization_config
    num_nextn_predict_layers num_mtp_layers num_mtp_modules mtp_transformer_layers use_mtp ep_size moe_capacity
    moe_use_aux_free aux_loss_alpha seq_aux
    decoder_start_token_id diversity_penalty do_sample early_stopping embd_pdrop
    encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id gradient_checkpointing hidden_dropout id2label
    embed_dropout embedding_dropout residual_dropout initial_context_length
    mamba_ssm_dtype mtp_num_hidden_layers mtp_use_dedicated_embeddings
    is_decoder is_matryoshka keys_to_ignore_at_inference label2id length_penalty mask_token_id matryoshka_dimensions
    max_length
    min_length no_repeat_ngram_size num_beam_groups num_beams num_labels num_logits_to_keep
    qk_head_dim
    num_return_sequences output_attentions output_hidden_states output_router_logits output_scores prefix problem_type
    remove_invalid_values repetition_penalty resid_pdrop return_dict return_dict_in_generate
    router_aux_loss_coef
    sbert_ce_default_activation_function sentence_transformers
    sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder
    tokenizer_class top_k top_p torchscript transformers_version typical_p unk_token_id
    unsloth_fixed unsloth_version use_bfloat16 use_return_dict
    """.split()  # noqa: SIM905 (a list of 70 quoted names is no easier to read)
)
"""Keys that cannot change a forward pass: training, bookkeeping, sampling (generation_config.json has it), and how the
weights are stored, which is read with them."""
