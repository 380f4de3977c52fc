"""Encoders: families whose tokens see those behind them, too. They make vectors, scores of pairs, and labels.

EmbeddingGemma is no row of its own: it is the text part of Gemma 3 with `use_bidirectional_attention`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from infinilm.config.families.family import Family, LabelHead
from infinilm.config.families.names import (
    BERT,
    DISTILBERT,
    JINA_V2,
    JINA_V3,
    MODERN_BERT,
    MPNET,
    NOMIC_BERT,
    ROBERTA,
    TensorNames,
)
from infinilm.config.sublayers.position_bias import BUCKETS

__all__ = ["ENCODER_FAMILIES"]

_POOLED = LabelHead({"pooler.dense": "tanh", "classifier": "identity"})  # the pooler is of all tasks
_DENSE = LabelHead({"classifier.dense": "tanh", "classifier.out_proj": "identity"})

_BERT_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "rms_norm_eps": 1e-12,
    "attention_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": (),
    "eos_token_id": (),
}
_OF_ROBERTA: Mapping[str, Any] = {
    **_BERT_DEFAULTS,
    "vocab_size": 50265,
    "pad_token_id": 1,
    "bos_token_id": (0,),
    "eos_token_id": (2,),
}

# Learned positions, types of tokens, and LayerNorm of each sum.
_BERT = Family(
    architecture="BertModel",
    model_type="bert",
    defaults=_BERT_DEFAULTS,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    two_way=True,
    stream_norms="all",
    positions="learned",
    label_head=_POOLED,
    norm="layer_bias",
    gated_mlp=False,
    names=BERT,
    keys=frozenset({"type_vocab_size"}),
    other_keys={"layer_norm_eps": ("rms_norm_eps",)},
    fixed_keys={"position_embedding_type": ("absolute", None)},
    ignored_keys=frozenset({"hidden_dropout_prob", "attention_probs_dropout_prob"}),
)

_ROBERTA = replace(
    _BERT,
    architecture="RobertaModel",
    model_type="roberta",
    defaults=_OF_ROBERTA,
    positions="learned_behind_padding",
    label_head=_DENSE,
    names=ROBERTA,
)

# The same with RoPE, whose config.json on the hub is in the words of GPT-2.
_NOMIC = replace(
    _BERT,
    architecture="NomicBertModel",
    model_type="nomic_bert",
    defaults={
        **_BERT_DEFAULTS,
        "vocab_size": 30528,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": 1000.0,
    },
    qkv_bias=False,
    out_bias=False,
    mlp_bias=False,
    positions="rope",
    gated_mlp=True,
    names=NOMIC_BERT,
    other_keys={
        **_BERT.other_keys,
        "layer_norm_epsilon": ("rms_norm_eps",),
        "n_embd": ("hidden_size",),
        "n_head": ("num_attention_heads",),
        "n_inner": ("intermediate_size",),
        "n_layer": ("num_hidden_layers",),
        "n_positions": ("max_position_embeddings",),
        "rotary_emb_base": ("rope_theta",),
        "rotary_emb_fraction": ("partial_rotary_factor",),
        "qkv_proj_bias": ("attention_bias",),
        "mlp_fc1_bias": ("mlp_bias",),
    },
    fixed_keys={
        **_BERT.fixed_keys,
        "activation_function": ("swiglu", None),
        "causal": (False, None),
        "mlp_fc2_bias": (False, None),
        "moe_every_n_layers": (0, None),
        "num_experts": (0, None),
        "parallel_block": (False, None),
        "prenorm": (False, None),
        "rotary_emb_interleaved": (False, None),
        "rotary_emb_scale_base": (None,),
        "rotary_scaling_factor": (None,),
        "scale_attn_by_inverse_layer_idx": (False, None),
        "scale_attn_weights": (True, None),
        "use_rms_norm": (False, None),
    },
    ignored_keys=_BERT.ignored_keys
    | frozenset(
        """
        attn_pdrop dense_seq_output fused_bias_fc fused_dropout_add_ln last_layer_subset layer_norm_training
        max_trained_positions pad_vocab_size_multiple parallel_block_tied_norm reorder_and_upcast_attn
        summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj use_flash_attn
        use_xentropy
        """.split()  # noqa: SIM905 (as in keys.py)
    ),
)

ENCODER_FAMILIES: tuple[Family, ...] = (
    _BERT,
    _ROBERTA,
    replace(
        _ROBERTA,
        architecture="XLMRobertaModel",
        model_type="xlm-roberta",
        defaults={**_OF_ROBERTA, "vocab_size": _BERT_DEFAULTS["vocab_size"]},
    ),
    replace(  # XLM-RoBERTa with RoPE; adapters of tasks are merged, or requests have them
        _ROBERTA,
        architecture="JinaEmbeddingsV3Model",
        model_type="jina_embeddings_v3",
        defaults={
            **_OF_ROBERTA,
            "vocab_size": 250002,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "max_position_embeddings": 8194,
            "type_vocab_size": 1,
            "rms_norm_eps": 1e-5,
            "rope_theta": 20000.0,
        },
        positions="rope",
        label_head=_POOLED,
        names=JINA_V3,
    ),
    replace(
        _BERT,
        architecture="DistilBertModel",
        model_type="distilbert",
        defaults={**_BERT_DEFAULTS, "num_hidden_layers": 6, "type_vocab_size": 0},
        label_head=LabelHead({"pre_classifier": "relu", "classifier": "identity"}),
        names=DISTILBERT,
        keys=frozenset(),
        other_keys={
            "activation": ("hidden_act",),
            "dim": ("hidden_size",),
            "hidden_dim": ("intermediate_size",),
            "n_heads": ("num_attention_heads",),
            "n_layers": ("num_hidden_layers",),
        },
        ignored_keys=frozenset(
            {"dropout", "qa_dropout", "seq_classif_dropout", "sinusoidal_pos_embds", "tie_weights_"}
        ),
    ),
    replace(
        _ROBERTA,
        architecture="MPNetModel",
        model_type="mpnet",
        defaults={**_OF_ROBERTA, "vocab_size": 30527, "type_vocab_size": 0},
        position_bias="buckets",
        names=MPNET,
        keys=frozenset(),
        fixed_keys={**_BERT.fixed_keys, "relative_attention_num_buckets": (BUCKETS, None)},
    ),
    # Jina v2, whose code is not in transformers: BERT with ALiBi in both directions and a gated MLP.
    replace(
        _BERT,
        architecture="JinaBertModel",
        model_type="jina_bert_v2",
        other_model_types=("bert",),
        defaults={**_BERT_DEFAULTS, "vocab_size": 30528, "max_position_embeddings": 8192, "mlp_bias": False},
        mlp_bias=False,
        down_bias=True,
        positions="none",
        position_bias="alibi",
        gated_mlp=True,
        names=JINA_V2,
        fixed_keys={
            "position_embedding_type": ("alibi", None),
            "feed_forward_type": ("geglu", None),
            "emb_pooler": ("mean", None),
        },
        ignored_keys=_BERT.ignored_keys | frozenset({"attn_implementation"}),
    ),
    _NOMIC,
    # Norms before sublayers, but for the first, which reads the norm of the embedding.
    Family(
        architecture="ModernBertModel",
        model_type="modernbert",
        defaults={
            "vocab_size": 50368,
            "hidden_size": 768,
            "intermediate_size": 1152,
            "num_hidden_layers": 22,
            "num_attention_heads": 12,
            "hidden_act": "gelu",
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_theta": 160000.0,
            "rope_local_base_freq": 10000.0,
            "sliding_window": 128,
            "sliding_window_pattern": 3,
            "use_sliding_window": True,
            "tie_word_embeddings": True,
            "pad_token_id": 50283,
            "bos_token_id": (50281,),
            "eos_token_id": (50282,),
        },
        mlp_bias="mlp_bias",
        two_way=True,
        windows="first_full",
        stream_norms="embedding",
        norm="layer",
        label_head=LabelHead({"head.dense": "gelu", "head.norm": "norm", "classifier": "identity"}),
        names=MODERN_BERT,
        keys=frozenset({"rope_local_base_freq"}),
        other_keys={
            "norm_eps": ("rms_norm_eps",),
            "local_attention": ("sliding_window",),
            "global_attn_every_n_layers": ("sliding_window_pattern",),
            "global_rope_theta": ("rope_theta",),
            "local_rope_theta": ("rope_local_base_freq",),
        },
        fixed_keys={"norm_bias": (False, None), "classifier_activation": ("gelu", None)},
        ignored_keys=frozenset(
            """
            classifier_bias decoder_bias deterministic_flash_attn initializer_cutoff_factor layer_norm_eps mlp_dropout
            position_embedding_type reference_compile repad_logits_with_grad sparse_pred_ignore_index
            sparse_prediction
            """.split()  # noqa: SIM905 (as in keys.py)
        ),
    ),
    Family(  # Llama's math
        architecture="EuroBertModel",
        model_type="eurobert",
        defaults={
            "vocab_size": 128256,
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "pad_token_id": 128001,
            "bos_token_id": (128000,),
            "eos_token_id": (128001,),
        },
        mlp_bias="mlp_bias",
        two_way=True,
        label_head=LabelHead({"dense": "gelu", "classifier": "identity"}, "late"),
        names=TensorNames(heads=("dense.", "classifier.")),
    ),
)
