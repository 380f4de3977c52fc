"""The fields of a configuration that say how attention works: windows, RoPE, scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from infinilm.config.sublayers.sizes import Sizes

__all__ = ["AttentionConfig"]


@dataclass(init=False, repr=False, eq=False)
class AttentionConfig(Sizes):
    """Fields of `ModelConfig`."""

    __slots__ = ()

    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    attention_bias: bool = False
    use_parallel_residual: bool = False
    num_ln_in_parallel_attn: int = 2  # norms of attention and MLP, where they read the same residual stream
    sliding_window: int | None = None
    use_sliding_window: bool | None = None  # None: the family decides
    max_window_layers: int = 28
    partial_rotary_factor: float = 1.0
    no_rope_layers: list[int] | None = None  # None: as no_rope_layer_interval says
    no_rope_layer_interval: int | None = None  # None: every layer has RoPE
    attention_multiplier: float | None = None  # None: head_dim ** -0.5
    use_qk_norm: bool = False
    gating: bool | str = "per-head"  # a gate of each head, as True, or of each element, "per-element"
    clip_qkv: float | None = None  # elements of q, k and v are at most this far from 0
    query_pre_attn_scalar: float | None = None  # None: head_dim; scores are divided by its root
    attn_logit_softcapping: float | None = None
    use_bidirectional_attention: bool = False  # tokens see those behind them, too
    sliding_window_pattern: int | None = None  # every n-th layer sees everything; None: as max_window_layers says
    rope_local_base_freq: float | None = None  # rope_theta of layers with a window; None: that of the others
    swa_partial_rotary_factor: float | None = None  # of layers with a window; None: partial_rotary_factor
    attention_chunk_size: int | None = None
    attn_temperature_tuning: bool | int = False
    floor_scale: int = 8192
    attn_scale: float = 0.1
