"""What a configuration says of experts: how many a layer has, which layers have them, and how a token's are weighed.

Called by `families.model_facts`; the numpy reference model and the engine read the same facts. A router's softmax is
over all experts of a layer, and the best `top_k` of them are a token's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from infinilm.checks import INT_LIMIT, as_boolean, as_integer, short_repr
from infinilm.errors import ConfigError

__all__ = ["EXPERT_DEFAULTS", "EXPERT_KEYS", "ExpertConfig", "ExpertFacts", "expert_facts"]

EXPERT_DEFAULTS = {
    "num_experts": 0,
    "num_experts_per_tok": 0,
    "moe_intermediate_size": None,  # None: intermediate_size
    "shared_expert_intermediate_size": 0,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": (),
}
"""Of families without experts."""

EXPERT_KEYS = frozenset(EXPERT_DEFAULTS)

_MAX_EXPERTS = 2**16


class ExpertConfig(Protocol):
    """What this module reads of a configuration; `LlamaConfig` is one, and documents the fields."""

    num_hidden_layers: int
    intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int | None
    shared_expert_intermediate_size: int
    norm_topk_prob: bool
    decoder_sparse_step: int
    mlp_only_layers: list[int]


@dataclass(frozen=True, slots=True)
class ExpertFacts:
    """The experts of a model; the numbers are 0 where no layer has any."""

    layers: tuple[bool, ...]  # [num_layers]: which have experts; others have an MLP
    count: int = 0
    top_k: int = 0  # of a token
    intermediate_size: int = 0  # of each
    shared_intermediate_size: int = 0  # of an expert of all tokens, which is gated; 0: there is none
    norm_topk_prob: bool = False  # the weights of a token's experts add up to 1
    bias: bool = False  # of the router and of each expert


def expert_facts(config: ExpertConfig, bias: bool) -> ExpertFacts:
    """Derive the facts of a configuration and its family; ConfigError for a field that is wrong."""
    as_integer("num_experts", config.num_experts, least=0, below=_MAX_EXPERTS)
    step = as_integer("decoder_sparse_step", config.decoder_sparse_step)
    dense = config.mlp_only_layers
    if not isinstance(dense, (list, tuple)) or any(type(layer) is not int for layer in dense):
        raise ConfigError(f"mlp_only_layers must be a list of numbers of layers; got {short_repr(dense)}")
    layers = tuple(
        config.num_experts > 0 and layer not in dense and (layer + 1) % step == 0
        for layer in range(config.num_hidden_layers)
    )
    if not any(layers):
        return ExpertFacts(layers)
    as_boolean("norm_topk_prob", config.norm_topk_prob, error=ConfigError)
    limit = INT_LIMIT // 2  # gate and up together
    shared = as_integer("shared_expert_intermediate_size", config.shared_expert_intermediate_size, least=0, below=limit)
    size = config.moe_intermediate_size
    return ExpertFacts(
        layers,
        count=config.num_experts,
        top_k=as_integer("num_experts_per_tok", config.num_experts_per_tok, below=config.num_experts + 1),
        intermediate_size=config.intermediate_size
        if size is None
        else as_integer("moe_intermediate_size", size, below=limit),
        shared_intermediate_size=shared,
        norm_topk_prob=config.norm_topk_prob,
        bias=bias,
    )
