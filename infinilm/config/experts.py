"""What a configuration says of experts: how many a layer has, which layers have them, and how a token's are weighed.

Called by `families.model_facts`; the numpy reference model and the engine read the same facts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

from infinilm.checks import INT_LIMIT, as_boolean, as_integer, short_repr
from infinilm.errors import ConfigError

__all__ = ["DEEPSEEK_KEYS", "EXPERT_DEFAULTS", "EXPERT_KEYS", "ExpertConfig", "ExpertFacts", "Routing", "expert_facts"]

EXPERT_DEFAULTS = {
    "num_experts": 0,
    "num_experts_per_tok": 0,
    "moe_intermediate_size": None,  # None: intermediate_size
    "shared_expert_intermediate_size": 0,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": (),
    "n_shared_experts": 0,
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "enable_moe_block": False,
}
"""Of families without experts."""

_DEEPSEEK = {"n_shared_experts", "first_k_dense_replace", "n_group", "topk_group", "routed_scaling_factor"}

EXPERT_KEYS = frozenset(EXPERT_DEFAULTS.keys() - _DEEPSEEK - {"enable_moe_block"})
"""Of families that are like Qwen's."""

DEEPSEEK_KEYS = frozenset(_DEEPSEEK | {"num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"})
"""Of families that are like DeepSeek V3."""

_MAX_EXPERTS = 2**16
_MAX_EXPERTS_OF_ALL_LAYERS = 2**17  # five times the most in use; the names of an expert's tensors take a kilobyte


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
    n_shared_experts: int
    first_k_dense_replace: int
    n_group: int
    topk_group: int
    routed_scaling_factor: float
    enable_moe_block: bool


@dataclass(frozen=True, slots=True)
class Routing:
    """How the routers of a family work: a column of its table."""

    bias: bool = False  # of the router and of each expert
    scoring: Literal["softmax", "sigmoid"] = "softmax"  # over all experts of a layer; of each
    correction_bias: bool = False  # each expert has a number that is added to its score for the choice alone
    # The layers have their MLP, too, and `enable_moe_block` tells whether they have experts. See `ExpertFacts`.
    beside_mlp: bool = False
    shared_gate: bool = True  # what the expert of all tokens gives is multiplied by the sigmoid of a logit
    group_best: int = 2  # a group is as good as so many of its best experts together
    weigh_inputs: bool = False  # an expert reads the token times its weight, and what it gives counts whole


@dataclass(frozen=True, slots=True)
class ExpertFacts:
    """The experts of a model; the numbers are 0 where no layer has any.

    A token's experts are the `top_k` of the best score + correction: of all, or of those in the `top_groups` best of
    `num_groups` equal groups, a group being as good as its `group_best` best experts together.
    """

    layers: tuple[bool, ...]  # [num_layers]: which have experts; others have an MLP
    count: int = 0
    top_k: int = 0  # of a token
    intermediate_size: int = 0  # of each
    shared_intermediate_size: int = 0  # of an expert of all tokens; 0: there is none
    shared_gate: bool = False  # its result is multiplied by the sigmoid of a logit of the token
    bias: bool = False  # of the router and of each expert
    scoring: str = "softmax"  # or "sigmoid"
    correction_bias: bool = False  # each expert has a number that is added to its score for the choice alone
    norm_topk_prob: bool = False  # the weights of a token's experts add up to 1, before they are scaled
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 2
    # The layer has its MLP, too. MLP, router and experts read the residual stream through norms of their own, that of
    # the router times hidden_size**-0.5; what MLP and experts give is normed before it is added up. Each expert has a
    # number that multiplies its weights.
    beside_mlp: bool = False
    weigh_inputs: bool = False  # an expert reads the token times its weight, and what it gives counts whole


def expert_facts(config: ExpertConfig, routing: Routing) -> ExpertFacts:
    """Derive the facts of a configuration and its family; ConfigError for a field that is wrong."""
    as_integer("num_experts", config.num_experts, least=0, below=_MAX_EXPERTS)
    if config.num_experts * config.num_hidden_layers > _MAX_EXPERTS_OF_ALL_LAYERS:
        raise ConfigError(
            f"num_experts {config.num_experts} in each of {config.num_hidden_layers} layers are more than the "
            f"{_MAX_EXPERTS_OF_ALL_LAYERS} that a model may have"
        )
    as_boolean("enable_moe_block", config.enable_moe_block, error=ConfigError)
    if routing.beside_mlp and config.enable_moe_block and config.num_experts == 0:
        raise ConfigError("enable_moe_block is true, but num_experts is 0; it must be the number of experts")
    enabled = config.num_experts > 0 and (config.enable_moe_block or not routing.beside_mlp)
    step = as_integer("decoder_sparse_step", config.decoder_sparse_step)
    dense = config.mlp_only_layers
    if not isinstance(dense, (list, tuple)) or any(type(layer) is not int for layer in dense):
        raise ConfigError(f"mlp_only_layers must be a list of numbers of layers; got {short_repr(dense)}")
    first = as_integer("first_k_dense_replace", config.first_k_dense_replace, least=0)
    layers = tuple(
        enabled and layer not in dense and (layer + 1) % step == 0 and layer >= first
        for layer in range(config.num_hidden_layers)
    )
    if not any(layers):
        return ExpertFacts(layers)
    as_boolean("norm_topk_prob", config.norm_topk_prob, error=ConfigError)
    limit = INT_LIMIT // 2  # gate and up together
    size = config.intermediate_size
    if config.moe_intermediate_size is not None:
        size = as_integer("moe_intermediate_size", config.moe_intermediate_size, below=limit)
    shared = as_integer("shared_expert_intermediate_size", config.shared_expert_intermediate_size, least=0, below=limit)
    shared += size * as_integer("n_shared_experts", config.n_shared_experts, least=0)
    if shared >= limit:
        raise ConfigError(f"n_shared_experts * moe_intermediate_size must be < 2**30; got {shared}")
    num_groups = as_integer("n_group", config.n_group)
    if config.num_experts % num_groups:
        raise ConfigError(f"n_group must be a divisor of the number of experts, {config.num_experts}; got {num_groups}")
    top_groups = _at_most("topk_group", config.topk_group, num_groups, "groups")
    scale = config.routed_scaling_factor
    if not isinstance(scale, (int, float)) or isinstance(scale, bool) or not math.isfinite(scale) or scale <= 0:
        raise ConfigError(f"routed_scaling_factor must be a finite number > 0; got {short_repr(scale)}")
    in_reach = config.num_experts // num_groups * top_groups
    return ExpertFacts(
        layers,
        count=config.num_experts,
        top_k=_at_most("num_experts_per_tok", config.num_experts_per_tok, in_reach, "experts"),
        intermediate_size=size,
        shared_intermediate_size=shared,
        shared_gate=routing.shared_gate and shared > 0,
        bias=routing.bias,
        scoring=routing.scoring,
        correction_bias=routing.correction_bias,
        norm_topk_prob=config.norm_topk_prob,
        scale=float(scale),
        num_groups=num_groups,
        top_groups=top_groups,
        group_best=routing.group_best,
        beside_mlp=routing.beside_mlp,
        weigh_inputs=routing.weigh_inputs,
    )


def _at_most(key: str, value: int, most: int, what: str) -> int:
    number = as_integer(key, value)
    if number > most:
        raise ConfigError(f"{key} must be at most {most}, as a token has so many {what} to choose from; got {number}")
    return number
