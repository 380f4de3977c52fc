"""Latent attention (MLA) in a configuration: the sizes of its latents and heads.

Called by `spec.decoder_spec`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infinilm._core import LatentSpec
from infinilm.checks import INT_LIMIT, as_boolean, as_integer, short_repr
from infinilm.config.sublayers.sizes import Sizes, defaults_of
from infinilm.errors import ConfigError

__all__ = ["LATENT_KEYS", "LatentConfig", "latent_spec", "query_dim"]


@dataclass(init=False, repr=False, eq=False)
class LatentConfig(Sizes):
    """Fields of `ModelConfig`."""

    __slots__ = ()

    kv_lora_rank: int = 0  # 0: there is none
    q_lora_rank: int | None = None  # None: queries are made of the hidden state
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    rope_interleave: bool = True

    def implied_head_dim(self) -> int:
        """With latents, the part of a head that RoPE turns."""
        return self.qk_rope_head_dim if self.kv_lora_rank else super().implied_head_dim()


LATENT_KEYS = frozenset(defaults_of(LatentConfig))

_NORM_EPS = 1e-6  # used by the norms of latents; rms_norm_eps does not count there


def latent_spec(config: LatentConfig, rope: Mapping[str, Any]) -> LatentSpec | None:
    """Return latent attention of all layers, without RoPE and biases; None: there is none.

    `rope` are the rope parameters of the configuration.

    Raises
    ------
    ConfigError
        A field is wrong.
    """
    if config.kv_lora_rank == 0:
        return None
    limit = 2**16
    as_boolean("rope_interleave", config.rope_interleave, error=ConfigError)
    q_rank = config.q_lora_rank
    spec = LatentSpec(
        num_heads=config.num_attention_heads,
        q_rank=0 if q_rank is None else as_integer("q_lora_rank", q_rank, below=limit),
        kv_rank=as_integer("kv_lora_rank", config.kv_lora_rank, below=limit),
        rope_dim=as_integer("qk_rope_head_dim", config.qk_rope_head_dim, below=limit),
        nope_dim=as_integer("qk_nope_head_dim", config.qk_nope_head_dim, below=limit),
        v_dim=as_integer("v_head_dim", config.v_head_dim, below=limit),
        norm_eps=_NORM_EPS,
    )
    if config.head_dim != spec.rope_dim:
        raise ConfigError(
            f"head_dim is {config.head_dim}, but in a family with latent attention it is qk_rope_head_dim "
            f"({spec.rope_dim}); leave it out"
        )
    largest = max(spec.row_dim, spec.query_dim, spec.nope_dim + spec.v_dim)
    if (config.num_attention_heads + 2) * largest >= INT_LIMIT:
        raise ConfigError("the heads of latent attention have more than 2**31 elements together")
    spec.softmax_scale = _latent_scale(spec.query_dim, rope)
    return spec


def query_dim(config: LatentConfig) -> int:
    """Return the elements of a query of latent attention, once `latent_spec` has checked them."""
    return config.qk_rope_head_dim + config.qk_nope_head_dim


def _latent_scale(query_dim: int, rope: Mapping[str, Any]) -> float:
    """Return what scores are multiplied by; `rope` are the rope parameters of the configuration."""
    scale: float = query_dim**-0.5
    spread = rope.get("mscale_all_dim")
    if rope["rope_type"] == "default" or not spread:
        return scale
    factor = rope.get("factor")
    for name, value in (("factor", factor), ("mscale_all_dim", spread)):
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e6:
            raise ConfigError(f"rope parameter '{name}' must be a number > 0; got {short_repr(value)}")
    assert factor is not None
    # YaRN (arXiv 2309.00071) makes attention sharper; the square, since both q and k are meant.
    return scale * (0.1 * spread * math.log(factor) + 1) ** 2 if factor > 1 else scale
