"""Blocks of attention and an MLP that several layers share, in a configuration.

Which layers use one says `layer_types`. Called by `spec.decoder_spec`.
"""

from __future__ import annotations

from dataclasses import dataclass

from infinilm._core import AttentionSpec, MlpSpec, SharedBlockSpec
from infinilm.checks import as_boolean, as_integer
from infinilm.config.sublayers.sizes import Sizes, defaults_of
from infinilm.errors import ConfigError

__all__ = ["HYBRID_LAYER", "SHARED_BLOCK_KEYS", "SharedBlockConfig", "shared_block"]


@dataclass(init=False, repr=False, eq=False)
class SharedBlockConfig(Sizes):
    """Fields of `ModelConfig`."""

    __slots__ = ()

    num_mem_blocks: int = 0  # the blocks that there are; layers take turns with them
    use_shared_attention_adapter: bool = False
    adapter_rank: int = 0


SHARED_BLOCK_KEYS = frozenset(defaults_of(SharedBlockConfig))

HYBRID_LAYER = "hybrid"
"""In `layer_types`: a layer with a state that uses a block."""


def shared_block(config: SharedBlockConfig, layer: int, attention: AttentionSpec, mlp: MlpSpec) -> SharedBlockSpec:
    """Return the block that a hybrid layer uses; ConfigError for a field that is wrong."""
    blocks = as_integer("num_mem_blocks", config.num_mem_blocks)
    rank = as_integer("adapter_rank", config.adapter_rank, below=2**16)
    as_boolean("use_shared_attention_adapter", config.use_shared_attention_adapter, error=ConfigError)
    kinds = config.layer_types or []
    hybrid = [number for number, kind in enumerate(kinds) if kind == HYBRID_LAYER]
    use = hybrid.index(layer)
    attention.inputs = 2
    return SharedBlockSpec(attention, mlp, hybrid[use % blocks], use, rank, config.use_shared_attention_adapter)
