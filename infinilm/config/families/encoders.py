"""Encoders: families whose tokens see those behind them, too. They make vectors, scores of pairs, and labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infinilm.config.families.family import Family, LabelHead
from infinilm.config.families.names import BERT, ROBERTA, TensorNames

__all__ = ["ENCODER_FAMILIES"]


def _like_bert(
    architecture: str,
    model_type: str,
    names: TensorNames,
    positions: Any,
    label_head: LabelHead,
    **defaults: Any,
) -> Family:
    """A row of BERT's math: learned positions, types of tokens, and LayerNorm of each sum."""
    bert: Mapping[str, Any] = {
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
    return Family(
        architecture=architecture,
        model_type=model_type,
        defaults={**bert, **defaults},
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        two_way=True,
        stream_norms="all",
        positions=positions,
        label_head=label_head,
        norm="layer_bias",
        gated_mlp=False,
        names=names,
        keys=frozenset({"type_vocab_size"}),
        other_keys={"layer_norm_eps": ("rms_norm_eps",)},
        fixed_keys={"position_embedding_type": ("absolute", None)},
        ignored_keys=frozenset({"hidden_dropout_prob", "attention_probs_dropout_prob"}),
    )


ENCODER_FAMILIES: tuple[Family, ...] = (
    _like_bert("BertModel", "bert", BERT, "learned", "pooled"),
    _like_bert(
        "RobertaModel",
        "roberta",
        ROBERTA,
        "learned_behind_padding",
        "dense",
        vocab_size=50265,
        pad_token_id=1,
        bos_token_id=(0,),
        eos_token_id=(2,),
    ),
    _like_bert(
        "XLMRobertaModel",
        "xlm-roberta",
        ROBERTA,
        "learned_behind_padding",
        "dense",
        pad_token_id=1,
        bos_token_id=(0,),
        eos_token_id=(2,),
    ),
)
