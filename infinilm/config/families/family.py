"""`Family`: what a row of the table of model families may say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from infinilm.config.families.names import LLAMA, TensorNames
from infinilm.config.sublayers.delta import Decay
from infinilm.config.sublayers.experts import Routing
from infinilm.config.sublayers.windows import WindowRule

__all__ = ["MULTIMODAL_ROPE_INERT", "MULTIMODAL_ROPE_TYPES", "SCORE", "Family", "Head", "LabelHead"]

Head = Literal["lm_head", "score", "none"]
"""What a class has behind the last norm: logits of the vocabulary, scores of labels, or nothing."""


@dataclass(frozen=True, slots=True)
class LabelHead:
    """The head of labels of a class `...ForSequenceClassification`.

    Attributes
    ----------
    steps : Mapping of str to str
        Its modules in the files, in order, and what each is: the activation behind a linear, or "norm". The last one
        has a row for each label, the others are [hidden_size, hidden_size].
    pooling : str
        What it reads of a text, where config.json has no `classifier_pooling`: a pooling, or one that is refused.
    """

    steps: Mapping[str, str]
    pooling: str = "cls"


SCORE = LabelHead({"score": "identity"}, "last")
"""The head of decoders: a linear of the last token."""


@dataclass(frozen=True, slots=True)
class Family:
    """One row of the table; a column of type `str | bool` is the config field that decides, or a fact."""

    architecture: str
    model_type: str
    other_model_types: tuple[str, ...] = field(default=(), kw_only=True)  # under which it is found, too
    # A name in `architectures` that means this family, too, beside its model_type: that of the class with the same
    # math, where transformers has none of the family's own.
    saved_architecture: str | None = field(default=None, kw_only=True)
    # Defaults of keys that config.json leaves out, where they differ from `COMMON_DEFAULTS` in defaults.py.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: str | bool = "attention_bias"
    out_bias: str | bool = "attention_bias"
    mlp_bias: str | bool = False
    down_bias: bool = False  # of the last linear of an MLP alone
    # RMSNorm of q and k: of each head by itself, before RoPE or behind it, or of all heads of a token together, before
    # it; "turned_heads": of each head behind RoPE, without weight, in the layers that have RoPE; "layer_of_heads":
    # LayerNorm of each head before RoPE, with weights of its own. With the key `use_qk_norm` that decides whether there
    # is one.
    qk_norm: Literal["none", "head", "all", "head_behind_rope", "turned_heads", "layer_of_heads"] = "none"
    # The layers with a sliding window, see `WindowRule`.
    windows: WindowRule = "none"
    # A sublayer norms its input (pre) and its output (post) before that is added to the residual stream.
    pre_norms: bool = True
    post_norms: bool = False
    attention_norms_behind: bool = False  # layers with attention have norms behind sublayers, those with a state before
    # LayerNorm takes off the mean first; q_norm and k_norm are rms. With "use_rms_norm" that key decides, and LayerNorm
    # has no bias.
    norm: Literal["rms", "layer", "layer_bias", "use_rms_norm"] = "rms"
    # Tokens see those behind them, too, so a text is computed whole: an encoder, which has no lm_head. A window of
    # `sliding_window` tokens then reaches half as far to each side.
    two_way: str | bool = False
    # Where tokens of a picture see each other both ways, they do so in layers with a window alone.
    spans_in_windows: bool = False
    # Which norms of what sublayers read take the place of the residual stream: none; that of the first, which is a norm
    # of the embedding; or all, so that sums are normed.
    stream_norms: Literal["none", "embedding", "all"] = "none"
    # Positions are those of RoPE, none, or learned: a row for each, those of a text from the first on, or behind that
    # of the token that pads.
    positions: Literal["rope", "none", "learned", "learned_behind_padding"] = "rope"
    embedding_norm: bool = False  # a norm of the embedding, beside that which the first sublayer reads
    unused_positions: int = 0  # learned ones before that of a text's first token, beyond max_position_embeddings
    # What is added to scores by the distance of a key: a learned bias by buckets of distances, or ALiBi.
    position_bias: Literal["none", "buckets", "alibi"] = "none"
    label_head: LabelHead = SCORE  # of its class `...ForSequenceClassification`
    # Attention and MLP read the same residual stream, through one norm or through a norm of their own each; or the key
    # `use_parallel_residual` says whether they do, and `num_ln_in_parallel_attn` through how many norms.
    parallel_blocks: Literal["no", "one_norm", "own_norms", "use_parallel_residual"] = "no"
    lm_head_bias: bool | Literal["lm_head_bias"] = False  # or the key of this name says it
    lone_sublayers: bool = False  # a layer is a mixer, an MLP or experts alone, as layer_types says
    decay: Decay = "of_head"  # of the delta rule, in layers with a state
    delta: Mapping[str, Any] = field(default_factory=dict)  # fields of DeltaSpec that the family decides
    latent: Mapping[str, Any] = field(default_factory=dict)  # and of LatentSpec
    attention_beside: bool = False  # layers with a state have attention, too, which reads the same norm
    gated_mlp: bool = True  # down(activation(gate) * up); else down(activation(up))
    activation: str | None = None  # the engine's activation; None: hidden_act says it
    softmax_scale: float | None = None  # the factor of attention scores; None: it follows from head_dim
    layer_scalars: bool = False  # each layer has a number that multiplies the residual stream it leaves
    # An MTP head is like the last layer with a window, else like the last one with attention; and reads hidden states
    # that the last norm has not changed.
    windowed_head: bool = False
    head_before_norm: bool = False
    # Fields of AttentionSpec (`src/model/sublayers/attention_spec.h`) that the family decides, in all its layers, and
    # in those with a window alone.
    attention: Mapping[str, Any] = field(default_factory=dict)
    window_attention: Mapping[str, Any] = field(default_factory=dict)
    routing: Routing = field(default_factory=Routing)  # how tokens choose experts, in families that have them
    # The weights of a token's experts are scaled to add up to 1.
    norm_topk_prob: str | bool = "norm_topk_prob"
    norm_offset: float = 0  # added to the weights of norms
    norm_weights: bool = True  # else norms have neither weights nor biases
    scaled_embedding: bool = False  # by the root of hidden_size
    # The elements of a head that RoPE turns together in the checkpoint: i and i + rotary_dim / 2, or 2i and 2i + 1. The
    # engine has halves: rows of q_proj and k_proj change places when they are read.
    rope_pairs: Literal["halves", "neighbours"] = "halves"
    rope_backwards: bool = False  # RoPE turns by the negative of a position
    indexer_turns_neighbours: bool = True  # RoPE of an indexer turns what that of its layer does; else halves
    # Layers without a window have no RoPE: always, or where sliding_window is set.
    rope_needs_window: bool | Literal["where set"] = False
    names: TensorNames = LLAMA
    # Keys in `UNSUPPORTED` (`json/keys.py`) that this family has after all.
    keys: frozenset[str] = frozenset()
    # Fields of ModelConfig that its config.json calls otherwise.
    other_keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Keys of its config.json that are no fields, since all but one value of each, or a tuple of them, is of another
    # math.
    fixed_keys: Mapping[str, Any] = field(default_factory=dict)
    # Keys that its config.json has from relatives and that its math does not read, whatever they say.
    ignored_keys: frozenset[str] = frozenset()
    # Other names of rope types in its config.json, and rope parameters that do not count in a text.
    rope_types: Mapping[str, str] = field(default_factory=dict)
    rope_inert: frozenset[str] = frozenset()
    # Where config.json has a `text_config`: the model_type in it, and the defaults of its keys that come with that.
    text_model_types: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


# RoPE of pictures divides a head among the coordinates of a place. In a text all of them are the position.
MULTIMODAL_ROPE_TYPES = {"mrope": "default"}
MULTIMODAL_ROPE_INERT = frozenset({"mrope_section", "mrope_interleaved"})
