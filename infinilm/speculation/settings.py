"""What a caller says of speculation: a factory of drafters, and whether lengths are measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from infinilm.checks import short_repr
from infinilm.errors import ConfigError
from infinilm.speculation import MAX_DRAFT_TOKENS, Drafter, Drafters, DraftRequest
from infinilm.speculation.lookup import LookupDrafter

__all__ = ["Lookup", "Speculation", "read_speculation"]

_METHODS = ("off", "auto", "lookup")
_OTHER_METHODS = MappingProxyType({"ngram": "lookup", "suffix": "lookup"})  # vLLM's
_OTHER_KEYS = MappingProxyType({"num_speculative_tokens": "num_tokens", "prompt_lookup_min": "min_match"})  # vLLM's


@dataclass(frozen=True, slots=True)
class Speculation:
    """What is drafted.

    Attributes
    ----------
    drafters : callable or None
        Makes the drafter of each sequence; None: nothing is drafted.
    is_adaptive : bool
        How many tokens of a draft are verified follows from measured times and acceptance. Otherwise all are.
    """

    drafters: Drafters | None
    is_adaptive: bool = True


class Lookup:
    """Makes a `LookupDrafter` for each sequence.

    Parameters
    ----------
    num_tokens : int
        Tokens of a draft at most, 1 to 15.
    min_match : int
        Tokens at the end of a text that must have occurred before, >= 1.

    Raises
    ------
    ConfigError
        A number is out of range.
    """

    def __init__(self, num_tokens: int = MAX_DRAFT_TOKENS, min_match: int = 2) -> None:
        self.num_tokens = _count("num_tokens", num_tokens, MAX_DRAFT_TOKENS)
        self.min_match = _count("min_match", min_match, 2**31 - 1)

    def __call__(self, sequence: DraftRequest) -> Drafter:
        """The drafter of a sequence."""
        return LookupDrafter(self.min_match, self.num_tokens)


def read_speculation(given: str | Mapping[str, Any] | Drafters | None) -> Speculation:
    """What a caller means.

    Parameters
    ----------
    given : str, mapping, callable or None
        "off", "lookup", or "auto" for the best there is, which is lookup today. Or a mapping with such a `method`,
        `adaptive` (bool), and parameters of `Lookup`, by the names here or by those of vLLM's `speculative_config`,
        whose methods "ngram" and "suffix" mean lookup. Or a factory of the caller's own, whose drafts are verified as
        long as they are; as the `method` of a mapping it may be adaptive, too. None is "off".

    Raises
    ------
    ConfigError
        An unknown method or key, a key that is there by both names, or a number out of range.
    TypeError
        Something else was given.
    """
    if given is None:
        return Speculation(None)
    if isinstance(given, str):
        given = {"method": given}
    if not isinstance(given, Mapping):
        if callable(given):
            return Speculation(given, is_adaptive=False)
        raise TypeError(
            f"speculation must be a str such as 'lookup', a dict or a factory of drafters, got {short_repr(given)}"
        )
    settings: dict[str, Any] = {}
    for key, value in given.items():
        name = _OTHER_KEYS.get(key, key)
        if name not in ("method", "adaptive", "num_tokens", "min_match"):
            raise ConfigError(
                f"speculation: {key!r} is not supported; expected 'method', 'adaptive', 'num_tokens' (in vLLM "
                "'num_speculative_tokens') or 'min_match' ('prompt_lookup_min')"
            )
        if name in settings:
            raise ConfigError(f"speculation: {name!r} is there by two names; give it once")
        settings[name] = value
    method, is_adaptive = settings.pop("method", "auto"), settings.pop("adaptive", True)
    if not isinstance(is_adaptive, bool):
        raise ConfigError(f"speculation: adaptive must be True or False, got {short_repr(is_adaptive)}")
    if callable(method):
        if settings:
            raise ConfigError(
                f"speculation: {min(settings)!r} is a setting of lookup, and not of a drafter of your own"
            )
        return Speculation(method, is_adaptive)
    if not isinstance(method, str) or _OTHER_METHODS.get(method, method) not in _METHODS:
        known = ", ".join(map(repr, _METHODS))
        raise ConfigError(f"speculation: expected a method among {known}, got {short_repr(method)}")
    lookup = Lookup(**settings)
    return Speculation(None if method == "off" else lookup, is_adaptive)


def _count(name: str, value: Any, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ConfigError(f"speculation: {name} must be an int in 1..{most}, got {short_repr(value)}")
    return value
