"""Experts in a configuration: how many a layer has, which layers have them, and how those of a token are weighed.

Called by `spec.decoder_spec`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from infinilm._core import ExpertsSpec, MlpSpec
from infinilm.checks import INT_LIMIT, as_boolean, as_integer, short_repr
from infinilm.config.sublayers.sizes import Sizes, defaults_of
from infinilm.errors import ConfigError

__all__ = [
    "COMBINATION_KEYS",
    "DEEPSEEK_KEYS",
    "EXPERT_KEYS",
    "LIMIT_KEYS",
    "ExpertConfig",
    "Routing",
    "activation_limits",
    "experts_spec",
]


@dataclass(init=False, repr=False, eq=False)
class ExpertConfig(Sizes):
    """Fields of `ModelConfig`."""

    __slots__ = ()

    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int | None = None  # None: intermediate_size
    shared_expert_intermediate_size: int = 0
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] = field(default_factory=list)
    n_shared_experts: int = 0
    first_k_dense_replace: int = 0
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    enable_moe_block: bool = False
    moe_latent_size: int | None = None  # None: experts read the token itself
    router_jitter_noise: float = 0.0  # half the tolerance of "sparse_mixer"
    expert_selection_fn: str = "softmax"  # or "sigmoid"
    shared_expert_combination_strategy: str = "sum"  # or "average": of a token's experts and those of all tokens
    # Of each layer, what silu of a gate is at most, and up in both directions: of experts, and of MLPs and the expert
    # of all tokens. None, and 0 or None in them: no limit.
    swiglu_limits: list[float | None] | None = None
    swiglu_limits_shared: list[float | None] | None = None


_DEEPSEEK = {"n_shared_experts", "first_k_dense_replace", "n_group", "topk_group", "routed_scaling_factor"}

COMBINATION_KEYS = frozenset({"expert_selection_fn", "shared_expert_combination_strategy"})
"""How experts are scored and joined, where that is a choice of a checkpoint, as in Cohere 2."""

LIMIT_KEYS = frozenset({"swiglu_limits", "swiglu_limits_shared"})
"""Limits of layers, as in Step 3.5 and 3.7."""

EXPERT_KEYS = frozenset(
    defaults_of(ExpertConfig).keys()
    - _DEEPSEEK
    - COMBINATION_KEYS
    - LIMIT_KEYS
    - {"enable_moe_block", "moe_latent_size", "router_jitter_noise"}
)
"""The keys of families that are like Qwen's."""

DEEPSEEK_KEYS = frozenset(_DEEPSEEK | {"num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"})
"""The keys of families that are like DeepSeek V3."""

_MAX_EXPERTS = 2**16
_MAX_EXPERTS_OF_ALL_LAYERS = 2**17  # five times the most in use; the names of an expert's tensors take a kilobyte


@dataclass(frozen=True, slots=True)
class Routing:
    """How the routers of a family work: a column of its table."""

    bias: bool = False  # the router and each expert have biases
    # Softmax over all experts of a layer, sigmoid of each, or the key `expert_selection_fn` says which; "sparse_mixer":
    # softmax over those near the best that is left, one after the other.
    scoring: Literal["softmax", "sigmoid", "sparse_mixer", "expert_selection_fn"] = "softmax"
    correction_bias: bool = False  # each expert has a number that is added to its score for the choice alone
    # The layers have their MLP, too, and `enable_moe_block` tells whether they have experts. See `ExpertsSpec`.
    beside_mlp: bool = False
    shared_gate: bool = True  # what the expert of all tokens gives is multiplied by the sigmoid of a logit
    group_best: int = 2  # the score of a group is the sum of this many best experts in it
    dense_head: bool = False  # the MTP head has an MLP, though the last layer has experts
    weigh_inputs: bool = False  # an expert reads the token times its weight, and what it gives counts whole
    post_norm: bool = False  # what experts give is normed before it joins the residual stream


def activation_limits(config: ExpertConfig, activation: str) -> tuple[tuple[float, float], ...]:
    """Return the limits of each layer: of its experts, and of its MLP or the expert of all tokens; 0: none.

    `activation`: that of the model. ConfigError: a key is wrong, or limits are of another activation than silu.
    """
    of_keys = []
    for key in sorted(LIMIT_KEYS):
        limits = getattr(config, key)
        if limits is None:
            limits = [0] * config.num_hidden_layers
        if (
            not isinstance(limits, (list, tuple))
            or len(limits) != config.num_hidden_layers
            or not all(map(_is_limit, limits))
        ):
            raise ConfigError(
                f"{key} must be null or a list of num_hidden_layers = {config.num_hidden_layers} numbers >= 0, 0 or "
                f"null for a layer without a limit; got {short_repr(limits)}"
            )
        if any(limits) and activation != "silu":
            raise ConfigError(f"{key} are limits of silu, and hidden_act is {activation!r}")
        of_keys.append([float(limit or 0) for limit in limits])
    return tuple(zip(*of_keys, strict=True))


def _is_limit(value: object) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e9)


def experts_spec(
    config: ExpertConfig, routing: Routing, mlp: Callable[..., MlpSpec], shared_mlp: Callable[..., MlpSpec]
) -> tuple[tuple[bool, ...], ExpertsSpec | None]:
    """Return which layers have experts, and what these are; None: no layer has any.

    Parameters
    ----------
    config, routing
        The model's fields, and what its family says of routers.
    mlp, shared_mlp
        Make an expert of a token, and that of all tokens, by its size and `bias`.

    Raises
    ------
    ConfigError
        A field is wrong.
    """
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
        return layers, None
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
    scoring: str = routing.scoring
    if scoring == "expert_selection_fn":
        scoring = _one_of(scoring, config.expert_selection_fn, ("softmax", "sigmoid"))
    combination = "shared_expert_combination_strategy"
    averages = _one_of(combination, getattr(config, combination), ("sum", "average")) == "average" and shared > 0
    latent = config.moe_latent_size
    in_reach = config.num_experts // num_groups * top_groups
    return layers, ExpertsSpec(
        count=config.num_experts,
        top_k=_at_most("num_experts_per_tok", config.num_experts_per_tok, in_reach, "experts"),
        expert=mlp(size, bias=routing.bias),
        latent_size=0 if latent is None else as_integer("moe_latent_size", latent, below=limit),
        shared=shared_mlp(shared, bias=False) if shared else None,
        shared_gate=routing.shared_gate and shared > 0,
        router_bias=routing.bias,
        scoring=scoring,
        tolerance=2 * _noise(config.router_jitter_noise) if scoring == "sparse_mixer" else 0,
        correction_bias=routing.correction_bias,
        # A softmax over a token's experts alone is that over all of them, made to add up to 1.
        norm_topk_prob=config.norm_topk_prob or (routing.scoring == "expert_selection_fn" and scoring == "softmax"),
        scale=float(scale),
        num_groups=num_groups,
        top_groups=top_groups,
        group_best=routing.group_best,
        weigh_inputs=routing.weigh_inputs,
        post_norm=routing.post_norm,
        out_multiplier=0.5 if averages else 1,
    )


def _noise(value: object) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1:
        raise ConfigError(f"router_jitter_noise must be a number >= 0 and < 1; got {short_repr(value)}")
    return float(value)


def _one_of(key: str, value: object, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ConfigError(f"{key} must be {' or '.join(map(repr, choices))}; got {short_repr(value)}")
    return str(value)


def _at_most(key: str, value: int, most: int, what: str) -> int:
    number = as_integer(key, value)
    if number > most:
        raise ConfigError(f"{key} must be at most {most}, as a token has so many {what} to choose from; got {number}")
    return number
