"""Rotary position frequencies: one pure numpy function per rope type of Hugging Face checkpoints.

Called by `spec.decoder_spec`, once per engine; the kernels only see `inv_freq` and `attention_factor`.

Design decision: **frequencies are fixed per engine**. Two types depend on the sequence length in transformers
("dynamic" stretches the base as the sequence grows, "longrope" switches its factor list), which makes a key
that is already cached disagree with a query that comes later, and makes results depend on how a prompt is
chunked. Here they are chosen once, as those transformers uses for a sequence of `max_model_len` tokens:
dynamic takes seq_len = max(max_model_len, max_position_embeddings), longrope takes the long factors if and
only if max_model_len > original_max_position_embeddings. So answers never depend on chunking, batching or a
prefix hit; they may depend on `max_model_len`, whose default is max_position_embeddings.

Rounding: transformers computes in float32, and at position p an error of one unit in the last place of a
frequency is an error of about p * 6e-8 radians. So each step is rounded to float32 where transformers rounds
(`reciprocal * x` for `x / tensor`); only the power itself is taken in float64. The frequencies are then equal
bit for bit, or one unit apart where torch's vectorised float32 power is not correctly rounded
(tests/golden/rope.json).

Sources: the RoPE paper (arXiv 2104.09864), YaRN (2309.00071), LongRoPE (2402.13753), Llama 3.1 (2407.21783).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infinilm.errors import ConfigError

__all__ = ["ROPE_TYPES", "inverse_frequencies", "rope_type_of"]

Frequencies = NDArray[np.float32]  # [head_dim / 2], radians per position

_FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class _Rope:
    """The input of every rope type; `parameters` are already stripped of nulls, type and theta."""

    rope_type: str
    head_dim: int
    theta: float
    parameters: Mapping[str, Any]
    max_position_embeddings: int  # tokens
    max_model_len: int  # tokens

    def fail(self, key: str, expected: str) -> ConfigError:
        if key in self.parameters:
            got = repr(self.parameters[key])
        else:
            got = f"nothing (the keys given are {sorted(self.parameters) or 'none'})"
        return ConfigError(f"rope parameter '{key}' of rope type '{self.rope_type}' must be {expected}; got {got}")

    def number(
        self,
        key: str,
        expected: str,
        default: float | None = None,
        at_least: float = -math.inf,
        above: float = -math.inf,
        at_most: float = math.inf,
    ) -> float:
        """Read the number under `key`, in its range; `default` None means that the key is required."""
        value = self.parameters.get(key, default)
        if not _is_number(value) or value < at_least or value <= above or value > at_most:
            raise self.fail(key, expected)
        return float(value)

    def factor(self, default: float | None = None) -> float:
        return self.number("factor", "a number in [1, 1e6]", default, at_least=1, at_most=1e6)

    def original_positions(self, default: int | None) -> int:
        value = self.parameters.get("original_max_position_embeddings", default)
        if isinstance(value, bool) or not isinstance(value, int) or not 2 <= value < 2**31:
            raise self.fail("original_max_position_embeddings", "an integer in [2, 2**31)")
        return value

    def factor_list(self, key: str) -> Frequencies:
        """Read a longrope list: one factor per frequency."""
        length = self.head_dim // 2
        values = self.parameters.get(key)
        expected = f"a list of head_dim / 2 = {length} numbers > 0"
        if not isinstance(values, (list, tuple)) or not all(_is_number(v) and v > 0 for v in values):
            raise self.fail(key, expected)
        if len(values) != length:
            raise ConfigError(
                f"rope parameter '{key}' of rope type '{self.rope_type}' must be {expected}; got {len(values)} numbers"
            )
        return np.array(values, np.float32)


def _is_number(value: Any) -> bool:
    """Tell whether `value` is a finite number that float32 can hold; booleans are not numbers."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _FLOAT32_MAX


def _periods(head_dim: int, theta: float) -> Frequencies:
    """Compute theta ** (2i / head_dim), [head_dim / 2]: positions per radian."""
    exponents = (np.arange(0, head_dim, 2) / head_dim).astype(np.float32)
    base = np.float64(np.float32(theta))
    periods: Frequencies = np.power(base, exponents.astype(np.float64)).astype(np.float32)
    return periods


def _reciprocal(x: Frequencies) -> Frequencies:
    result: Frequencies = np.float32(1) / x
    return result


def _default(rope: _Rope) -> tuple[Frequencies, float]:
    return _reciprocal(_periods(rope.head_dim, rope.theta)), 1.0


def _linear(rope: _Rope) -> tuple[Frequencies, float]:
    """Divide positions by `factor`."""
    return _reciprocal(_periods(rope.head_dim, rope.theta)) / np.float32(rope.factor()), 1.0


def _dynamic(rope: _Rope) -> tuple[Frequencies, float]:
    """Enlarge the base by how far the engine goes beyond max_position_embeddings (NTK-aware)."""
    factor, dim, positions = rope.factor(), rope.head_dim, rope.max_position_embeddings
    if dim <= 2:
        raise ConfigError(f"rope type 'dynamic' needs head_dim > 2 (it divides by head_dim - 2); got head_dim {dim}")
    seq_len = max(rope.max_model_len, positions)
    theta = rope.theta * ((factor * seq_len / positions) - (factor - 1)) ** (dim / (dim - 2))
    return _reciprocal(_periods(dim, theta)), 1.0


def _ntk_alpha(rope: _Rope) -> tuple[Frequencies, float]:
    """Enlarge the base by a given number (NTK-aware)."""
    alpha, dim = rope.number("alpha", "a number > 0", above=0), rope.head_dim
    if dim <= 2:
        raise ConfigError(f"rope type 'ntk_alpha' needs head_dim > 2 (it divides by head_dim - 2); got head_dim {dim}")
    return _reciprocal(_periods(dim, rope.theta * alpha ** (dim / (dim - 2)))), 1.0


def _llama3(rope: _Rope) -> tuple[Frequencies, float]:
    """Divide low frequencies by `factor`, keep high ones, blend linearly between."""
    factor = np.float32(rope.factor())
    low = rope.number("low_freq_factor", "a number > 0", above=0)
    high = rope.number("high_freq_factor", f"a number >= low_freq_factor ({low:g})", at_least=low)
    positions = rope.original_positions(default=None)

    inv_freq = _reciprocal(_periods(rope.head_dim, rope.theta))
    wavelength = _reciprocal(inv_freq) * np.float32(2 * math.pi)  # positions per turn
    blend = _reciprocal(wavelength) * np.float32(positions) - np.float32(low)
    blend = blend / np.float32(high - low or 1)  # Llama 4: they are equal, and nothing is between
    blended = (np.float32(1) - blend) * inv_freq / factor + blend * inv_freq
    return np.where(
        wavelength > np.float32(positions / low),
        inv_freq / factor,
        np.where(wavelength < np.float32(positions / high), inv_freq, blended),
    ), 1.0


def _yarn(rope: _Rope) -> tuple[Frequencies, float]:
    """Divide by `factor` the frequencies with few turns over the original length, keep those with many."""
    dim, positions = rope.head_dim, rope.original_positions(default=rope.max_position_embeddings)
    factor = rope.factor(default=rope.max_position_embeddings / positions)
    beta_slow = rope.number("beta_slow", "a number > 0", 1, above=0)
    beta_fast = rope.number("beta_fast", f"a number >= beta_slow ({beta_slow:g})", 32, at_least=beta_slow)
    mscale = rope.number("mscale", "a number >= 0", 0, at_least=0)
    mscale_all_dim = rope.number("mscale_all_dim", "a number >= 0", 0, at_least=0)
    truncate = rope.parameters.get("truncate", True)
    if not isinstance(truncate, bool):
        raise rope.fail("truncate", "true or false")

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0

    attention_factor = magnitude(mscale) / magnitude(mscale_all_dim) if mscale and mscale_all_dim else magnitude(1.0)
    attention_factor = rope.number("attention_factor", "a number > 0", attention_factor, above=0)

    def dimension_of(turns: float) -> float:
        """Find the dimension whose frequency makes `turns` turns over the original length."""
        return dim * math.log(positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(beta_fast), dimension_of(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001

    ramp = (np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    keep = np.float32(1) - np.clip(ramp, np.float32(0), np.float32(1))
    periods = _periods(dim, rope.theta)
    interpolated = _reciprocal(np.float32(factor) * periods)
    return interpolated * (np.float32(1) - keep) + _reciprocal(periods) * keep, attention_factor


def _proportional(rope: _Rope) -> tuple[Frequencies, float]:
    """Keep the first frequencies of a whole head, a part of all; others are 0, and turn nothing."""
    part = rope.number("partial_rotary_factor", "a number in (0, 1]", 1.0, above=0, at_most=1)
    turned = int(part * rope.head_dim // 2)
    frequencies = _reciprocal(_periods(rope.head_dim, rope.theta))
    frequencies[turned:] = 0
    return frequencies / np.float32(rope.factor(default=1.0)), 1.0


def _longrope(rope: _Rope) -> tuple[Frequencies, float]:
    """Divide each frequency by a searched factor: one list up to the original length, another beyond it."""
    positions = rope.original_positions(default=rope.max_position_embeddings)
    short, long = rope.factor_list("short_factor"), rope.factor_list("long_factor")
    factor = rope.factor() if "factor" in rope.parameters else rope.max_position_embeddings / positions
    attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(positions))
    attention_factor = rope.number("attention_factor", "a number > 0", attention_factor, above=0)
    is_long = rope.max_model_len > positions
    # Phi-3.5-MoE says the factor itself, one for each list.
    attention_factor = rope.number(
        "long_mscale" if is_long else "short_mscale", "a number > 0", attention_factor, above=0
    )
    factors = long if is_long else short
    return _reciprocal(factors * _periods(rope.head_dim, rope.theta)), attention_factor


@dataclass(frozen=True, slots=True)
class _RopeType:
    compute: Callable[[_Rope], tuple[Frequencies, float]]
    keys: frozenset[str]


_POSITIONS = "original_max_position_embeddings"

ROPE_TYPES: Mapping[str, _RopeType] = {
    name: _RopeType(compute, frozenset(keys))
    for name, compute, keys in (
        ("default", _default, ()),
        ("linear", _linear, ("factor",)),
        ("dynamic", _dynamic, ("factor",)),
        ("ntk_alpha", _ntk_alpha, ("alpha",)),
        ("llama3", _llama3, ("factor", "low_freq_factor", "high_freq_factor", _POSITIONS)),
        (
            "yarn",
            _yarn,
            (
                "factor",
                "attention_factor",
                "beta_fast",
                "beta_slow",
                "mscale",
                "mscale_all_dim",
                "truncate",
                _POSITIONS,
            ),
        ),
        ("proportional", _proportional, ("factor", "partial_rotary_factor")),
        (
            "longrope",
            _longrope,
            (
                *("factor", "attention_factor", "short_factor", "long_factor", "short_mscale", "long_mscale"),
                _POSITIONS,
            ),
        ),
    )
}
"""The supported rope types and the keys each may carry."""

# Keys of one type left beside another are common after an edit and inert in transformers; others are not.
_KNOWN_KEYS = frozenset[str]().union(*(rope_type.keys for rope_type in ROPE_TYPES.values()))


def rope_type_of(parameters: Mapping[str, Any] | None) -> str:
    """Return the rope type that `parameters` name, under the 5.x key `rope_type` or the 4.x key `type`.

    Raises
    ------
    ConfigError
        The type is not supported, or the two keys disagree.
    """
    named = {key: parameters[key] for key in ("rope_type", "type") if key in parameters} if parameters else {}
    supported = ", ".join(ROPE_TYPES)
    if len(set(map(repr, named.values()))) > 1:
        raise ConfigError(
            f"rope parameters name two types: 'rope_type' is {named['rope_type']!r} and 'type' is "
            f"{named['type']!r}; keep one of them (supported: {supported})"
        )
    name = next(iter(named.values()), "default")
    if not isinstance(name, str) or name not in ROPE_TYPES:
        raise ConfigError(f"rope type {name!r} is not supported; supported: {supported}")
    return name


def inverse_frequencies(
    head_dim: int,
    rope_theta: float,
    parameters: Mapping[str, Any] | None,
    max_position_embeddings: int,
    max_model_len: int,
) -> tuple[Frequencies, float]:
    """Compute the frequencies of rotary embeddings for an engine of `max_model_len` tokens.

    Parameters
    ----------
    head_dim
        Size of one attention head; even, all of it is rotated.
    rope_theta
        Base of the frequencies, > 1.
    parameters
        The `rope_scaling` (4.x) or `rope_parameters` (5.x) of config.json; None means type "default".
        Keys whose value is None count as absent; a `rope_theta` inside must equal the argument.
    max_position_embeddings, max_model_len
        Tokens: what the checkpoint declares, and what the engine will hold. See the module's design decision.

    Returns
    -------
    inv_freq
        float32 [head_dim / 2], radians per position.
    attention_factor
        cos and sin are multiplied by it.

    Raises
    ------
    ConfigError
        An unsupported rope type; a missing, unknown or invalid parameter: the message names it, what was
        expected and what came.
    """
    if head_dim < 2 or head_dim % 2:
        raise ConfigError(f"head_dim must be even and >= 2, because RoPE rotates pairs; got {head_dim}")
    if not _is_number(rope_theta) or rope_theta <= 1:
        raise ConfigError(f"rope_theta must be a number > 1; got {rope_theta!r}")
    given = {key: value for key, value in (parameters or {}).items() if value is not None}
    rope_type = rope_type_of(given)
    if given.pop("rope_theta", rope_theta) != rope_theta:
        raise ConfigError(
            f"rope_theta is given twice: {rope_theta!r} in the configuration and {parameters!r} as rope "
            "parameters; keep one"
        )
    given.pop("rope_type", None)
    given.pop("type", None)
    takes_part = "partial_rotary_factor" in ROPE_TYPES[rope_type].keys
    if not takes_part and given.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(
            "partial_rotary_factor must be 1 (the whole head is rotated; partial rotation is not supported); "
            f"got {parameters['partial_rotary_factor'] if parameters else None!r}"
        )
    unknown = sorted(str(key) for key in given if key not in _KNOWN_KEYS)
    if unknown:
        keys = ", ".join(sorted(ROPE_TYPES[rope_type].keys)) or "none"
        raise ConfigError(f"unknown rope parameters {unknown} for rope type '{rope_type}'; its parameters are: {keys}")

    rope = _Rope(rope_type, head_dim, float(rope_theta), given, max_position_embeddings, max_model_len)
    try:
        with np.errstate(all="ignore"):  # an absurd base ends as frequency 0, as in transformers
            inv_freq, attention_factor = ROPE_TYPES[rope_type].compute(rope)
        finite = bool(np.isfinite(inv_freq).all()) and 0 < attention_factor <= _FLOAT32_MAX
    except ArithmeticError:
        finite = False
    if not finite:
        raise ConfigError(f"rope parameters {given} of type '{rope_type}' give frequencies that are not finite")
    return inv_freq, attention_factor
