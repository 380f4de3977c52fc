"""Layers with the state space of Mamba-2 in a configuration: its sizes, its norm and its multipliers.

Which layers these are says `layer_types`, as of others with a state (`delta.state_layers`). Called by
`spec.decoder_spec`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infinilm._core import DELTA_MOST_K_DIM, DELTA_MOST_TAPS, MambaSpec
from infinilm.checks import INT_LIMIT, as_boolean, as_integer, short_repr
from infinilm.config.sublayers.sizes import Sizes, defaults_of
from infinilm.errors import ConfigError

__all__ = ["MAMBA_KEYS", "MambaConfig", "MultiplierConfig", "mamba_spec", "multipliers"]


@dataclass(init=False, repr=False, eq=False)
class MambaConfig(Sizes):
    """Fields of `ModelConfig`."""

    __slots__ = ()

    mamba_n_heads: int = 0
    mamba_d_head: int | None = None  # None: mamba_d_ssm // mamba_n_heads
    mamba_d_ssm: int | None = None  # None: mamba_expand * hidden_size
    mamba_expand: int = 2
    mamba_n_groups: int = 1
    mamba_d_state: int = 0
    mamba_d_conv: int = 4
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    mamba_rms_norm: bool = True
    mamba_norm_before_gate: bool = False
    time_step_limit: list[float] | None = None  # None: none
    ssm_multipliers: list[float] | None = None  # None: all are 1
    ssm_in_multiplier: float = 1.0
    ssm_out_multiplier: float = 1.0


@dataclass(init=False, repr=False, eq=False)
class MultiplierConfig(Sizes):
    """Fields of `ModelConfig`: multipliers of what attention, its keys and MLPs read and add (Falcon H1)."""

    __slots__ = ()

    attention_in_multiplier: float = 1.0
    attention_out_multiplier: float = 1.0
    key_multiplier: float = 1.0
    mlp_multipliers: list[float] | None = None  # of the gate, and of what the MLP adds; None: both are 1


_MULTIPLIERS = {"ssm_multipliers", "ssm_in_multiplier", "ssm_out_multiplier"}
_SWITCHES = {"mamba_rms_norm", "mamba_norm_before_gate"}

MAMBA_KEYS = frozenset(defaults_of(MambaConfig)) - _MULTIPLIERS - _SWITCHES - {"mamba_d_ssm"}
"""The keys that all families with Mamba layers have."""

_LIMIT = 2**16
_NO_LIMIT = MambaSpec().dt_max  # of a step: the largest float32


def mamba_spec(config: MambaConfig) -> MambaSpec:
    """Return the state space of the layers that have one; ConfigError for a field that is wrong."""
    heads = as_integer("mamba_n_heads", config.mamba_n_heads, below=_LIMIT)
    groups = as_integer("mamba_n_groups", config.mamba_n_groups, below=_LIMIT)
    if heads % groups:
        raise ConfigError(f"mamba_n_heads ({heads}) must be a multiple of mamba_n_groups ({groups})")
    for key in ("mamba_conv_bias", "mamba_proj_bias", "mamba_rms_norm", "mamba_norm_before_gate"):
        as_boolean(key, getattr(config, key), error=ConfigError)
    low, high = _step_limits(config.time_step_limit)
    inner = multipliers("ssm_multipliers", config.ssm_multipliers, 5)
    (before,), (behind,) = (
        multipliers(key, [getattr(config, key)], 1) for key in ("ssm_in_multiplier", "ssm_out_multiplier")
    )
    if config.mamba_proj_bias and before != 1:
        raise ConfigError(f"ssm_in_multiplier is {before}: with mamba_proj_bias it must be 1")
    gate, x, b, c, step = (before * own for own in inner)
    head_dim = _head_dim(config, heads)
    spec = MambaSpec(
        num_heads=heads,
        head_dim=head_dim,
        num_groups=groups,
        state_dim=as_integer("mamba_d_state", config.mamba_d_state, below=DELTA_MOST_K_DIM + 1),
        conv_size=as_integer("mamba_d_conv", config.mamba_d_conv, below=DELTA_MOST_TAPS + 1),
        conv_bias=config.mamba_conv_bias,
        proj_bias=config.mamba_proj_bias,
        norm=("before_gate" if config.mamba_norm_before_gate else "behind_gate") if config.mamba_rms_norm else "none",
        dt_min=low,
        dt_max=high,
        gate_multiplier=gate,
        x_multiplier=x,
        b_multiplier=b,
        c_multiplier=c,
        dt_multiplier=step,
        out_multiplier=behind,
    )
    if 2 * (spec.size + spec.group_size) + heads >= INT_LIMIT:
        raise ConfigError("the heads and groups of Mamba layers have more than 2**31 elements together")
    return spec


def _head_dim(config: MambaConfig, heads: int) -> int:
    if config.mamba_d_head is not None:
        return as_integer("mamba_d_head", config.mamba_d_head, below=_LIMIT)
    if config.mamba_d_ssm is not None:
        size = as_integer("mamba_d_ssm", config.mamba_d_ssm, below=INT_LIMIT)
    else:
        size = as_integer("mamba_expand", config.mamba_expand, below=_LIMIT) * config.hidden_size
    if size % heads or size // heads >= _LIMIT:
        raise ConfigError(
            f"mamba_d_head is not given, and mamba_n_heads ({heads}) does not divide the {size} elements of Mamba "
            "layers, mamba_d_ssm or mamba_expand * hidden_size"
        )
    return size // heads


def _step_limits(limits: Sequence[float] | None) -> tuple[float, float]:
    if limits is None:
        return 0.0, _NO_LIMIT
    is_pair = isinstance(limits, (list, tuple)) and len(limits) == 2
    numbers = is_pair and all(isinstance(limit, (int, float)) and not isinstance(limit, bool) for limit in limits)
    if not numbers or not 0 <= limits[0] <= limits[1]:
        raise ConfigError(f"time_step_limit must be the least and the largest step, >= 0; got {short_repr(limits)}")
    return float(limits[0]), min(float(limits[1]), _NO_LIMIT)


def multipliers(key: str, given: Sequence[float] | None, count: int) -> tuple[float, ...]:
    """Check `count` multipliers, all 1 where none are given; ConfigError where one is no finite number but 0."""
    if given is None:
        return (1.0,) * count
    numbers = isinstance(given, (list, tuple)) and len(given) == count
    if not numbers or not all(
        isinstance(one, (int, float)) and not isinstance(one, bool) and 1e-9 < abs(one) < 1e9 for one in given
    ):
        what = "a finite number that is not 0" if count == 1 else f"a list of {count} finite numbers that are not 0"
        raise ConfigError(f"{key} must be {what}; got {short_repr(given[0] if numbers and count == 1 else given)}")
    return tuple(map(float, given))
