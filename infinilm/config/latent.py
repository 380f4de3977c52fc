"""What a configuration says of latent attention (MLA): the sizes of its latents and heads.

Called by `families.model_facts`; the numpy reference model and the engine read the same facts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from infinilm.checks import INT_LIMIT, as_boolean, as_integer, short_repr
from infinilm.errors import ConfigError

__all__ = ["LATENT_DEFAULTS", "LATENT_KEYS", "LatentConfig", "LatentFacts", "latent_facts", "latent_scale"]

LATENT_DEFAULTS = {
    "kv_lora_rank": 0,  # 0: there is none
    "q_lora_rank": None,  # None: queries are made of the hidden state
    "qk_nope_head_dim": 0,
    "qk_rope_head_dim": 0,
    "v_head_dim": 0,
    "rope_interleave": True,
}
"""Of families without latents."""

LATENT_KEYS = frozenset(LATENT_DEFAULTS)

_NORM_EPS = 1e-6  # of the norms of latents, whatever rms_norm_eps says


class LatentConfig(Protocol):
    """What this module reads of a configuration; `LlamaConfig` is one, and documents the fields."""

    num_attention_heads: int
    kv_lora_rank: int
    q_lora_rank: int | None
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_interleave: bool

    @property
    def head_dim(self) -> int:
        """That of the part of a head that RoPE turns."""


@dataclass(frozen=True, slots=True)
class LatentFacts:
    """Latent attention of all layers; the numbers are 0 where there is none.

    The keys and values of all heads are made of one latent of a token and of one key that RoPE turns. The engine reads
    them as one row of the cache, [that key, latent], and brings queries to it.
    """

    q_rank: int = 0  # of the latent that queries are made of; 0: they are made of the hidden state
    kv_rank: int = 0
    rope_dim: int = 0  # of a query, what RoPE turns
    nope_dim: int = 0  # and what it does not
    v_dim: int = 0  # of a head
    norm_eps: float = 0.0

    @property
    def query_dim(self) -> int:
        """A head of a query."""
        return self.rope_dim + self.nope_dim

    @property
    def row_dim(self) -> int:
        """What the cache has of a token."""
        return self.rope_dim + self.kv_rank


def latent_facts(config: LatentConfig) -> LatentFacts:
    """Derive the facts of a configuration; ConfigError for a field that is wrong."""
    if config.kv_lora_rank == 0:
        return LatentFacts()
    limit = 2**16
    as_boolean("rope_interleave", config.rope_interleave, error=ConfigError)
    q_rank = config.q_lora_rank
    facts = LatentFacts(
        q_rank=0 if q_rank is None else as_integer("q_lora_rank", q_rank, below=limit),
        kv_rank=as_integer("kv_lora_rank", config.kv_lora_rank, below=limit),
        rope_dim=as_integer("qk_rope_head_dim", config.qk_rope_head_dim, below=limit),
        nope_dim=as_integer("qk_nope_head_dim", config.qk_nope_head_dim, below=limit),
        v_dim=as_integer("v_head_dim", config.v_head_dim, below=limit),
        norm_eps=_NORM_EPS,
    )
    if config.head_dim != facts.rope_dim:
        raise ConfigError(
            f"head_dim is {config.head_dim}, but in a family with latent attention it is qk_rope_head_dim "
            f"({facts.rope_dim}); leave it out"
        )
    largest = max(facts.row_dim, facts.query_dim, facts.nope_dim + facts.v_dim)
    if (config.num_attention_heads + 2) * largest >= INT_LIMIT:
        raise ConfigError("the heads of latent attention have more than 2**31 elements together")
    return facts


def latent_scale(facts: LatentFacts, rope: Mapping[str, Any]) -> float:
    """Return what scores are multiplied by; `rope` are the rope parameters of the configuration."""
    scale: float = facts.query_dim**-0.5
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
