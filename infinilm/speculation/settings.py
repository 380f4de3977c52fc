"""What a caller says of speculation: factories of drafters, and whether lengths are measured."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from infinilm.checks import short_repr
from infinilm.config.spec import QUANTIZATIONS
from infinilm.errors import ConfigError
from infinilm.speculation import MAX_DRAFT_TOKENS, Drafter, Drafters, DraftRequest
from infinilm.speculation.grammar import follow_grammar
from infinilm.speculation.lookup import LookupDrafter

__all__ = [
    "DraftModelSettings",
    "Eagle3Settings",
    "Lookup",
    "MtpSettings",
    "Speculation",
    "SpeculationSetting",
    "read_speculation",
]

_METHODS = ("off", "auto", "lookup", "mtp", "eagle3", "draft_model")
_OTHER_METHODS = MappingProxyType({"ngram": "lookup", "suffix": "lookup"})  # vLLM's
_OTHER_KEYS = MappingProxyType({"num_speculative_tokens": "num_tokens", "prompt_lookup_min": "min_match"})  # vLLM's

# What may be given besides the method and `adaptive`.
_KEYS = MappingProxyType(
    {
        "lookup": ("num_tokens", "min_match"),
        "mtp": ("num_tokens", "quantization", "vocab_size", "model"),
        "eagle3": ("model", "num_tokens", "quantization"),
        "draft_model": ("model", "num_tokens", "quantization"),
    }
)


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


@dataclass(frozen=True, slots=True)
class DraftModelSettings:
    """A smaller model that drafts.

    Attributes
    ----------
    model : str or path
        As `model` of `LLM`. It needs the vocabulary of the model.
    num_tokens : int
        Tokens of a draft at most, 1 to 15.
    quantization : str or None
        As `quantization` of `LLM`.
    """

    model: str | os.PathLike[str]
    num_tokens: int = 4
    quantization: str | None = None

    def __post_init__(self) -> None:
        _check_model(self.model)
        _count("num_tokens", self.num_tokens, MAX_DRAFT_TOKENS)


@dataclass(frozen=True, slots=True)
class MtpSettings:
    """The MTP head of the checkpoint drafts, or one that is a checkpoint of its own.

    Attributes
    ----------
    num_tokens : int
        Tokens of a draft at most, 1 to 15. A head of several modules, as Step 3.5 has it, drafts as many as it has of
        these at most.
    quantization : str or None
        How linears of the head are stored, an lm_head of its own among them: as `quantization` of `LLM`, where None is
        that of the model. "auto": "int4", since no answer depends on what a draft loses by it, and None on GPUs that
        compute in float32.
    vocab_size : int or None
        The head drafts the first so many ids of the vocabulary alone, which are the most frequent tokens in those of
        most tokenizers. None: all.
    model : str, path or None
        Folder or hub id of a drafter such as Gemma 4's, which was trained with the model. None: the head is in the
        checkpoint of the model.
    """

    num_tokens: int = 3
    quantization: str | None = "auto"
    vocab_size: int | None = None
    model: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.model is not None:
            _check_model(self.model)
        _count("num_tokens", self.num_tokens, MAX_DRAFT_TOKENS)
        _check_quantization("an MTP head", self.quantization)
        if self.vocab_size is not None:
            _count("vocab_size", self.vocab_size, 2**31 - 1)


@dataclass(frozen=True, slots=True)
class Eagle3Settings:
    """An EAGLE-3 head drafts.

    Attributes
    ----------
    model : str or path
        Folder or hub id of the head, which was trained with the model.
    num_tokens : int
        Tokens of a draft at most, 1 to 15.
    quantization : str or None
        As that of `MtpSettings`.
    """

    model: str | os.PathLike[str]
    num_tokens: int = 3
    quantization: str | None = "auto"

    def __post_init__(self) -> None:
        _check_model(self.model)
        _count("num_tokens", self.num_tokens, MAX_DRAFT_TOKENS)
        _check_quantization("an EAGLE-3 head", self.quantization)


@dataclass(frozen=True, slots=True)
class Speculation:
    """What is drafted.

    Attributes
    ----------
    drafters : tuple of callable
        Make the drafters of each sequence, the first to be asked first.
    model : DraftModelSettings, MtpSettings, Eagle3Settings or None
        What drafts behind them and has to be loaded with the model.
    is_optional : bool
        `model` is left out where the checkpoint does not have it, or where there is no memory for it.
    is_adaptive : bool
        How many tokens of a draft are verified follows from measured times and acceptance. Otherwise all are.
    """

    drafters: tuple[Drafters, ...] = ()
    model: DraftModelSettings | MtpSettings | Eagle3Settings | None = None
    is_optional: bool = False
    is_adaptive: bool = True

    def without_model(self) -> Speculation:
        """The same, if `model` is left out."""
        return replace(self, model=None, is_optional=False)


SpeculationSetting = str | Mapping[str, Any] | Drafters | Speculation | None


def read_speculation(given: SpeculationSetting) -> Speculation:
    """What a caller means.

    Parameters
    ----------
    given : str, mapping, callable, Speculation or None
        "off", "lookup", "mtp", or "auto", which is lookup and the MTP head of a checkpoint that has one; all but "off"
        draft what a grammar forces before anything else. Or a mapping with such a `method`, `adaptive` (bool), and
        parameters of `Lookup`, by the names here or by those of vLLM's `speculative_config`, whose methods "ngram" and
        "suffix" mean lookup; or with the method "draft_model", "mtp" or "eagle3" and the attributes of
        `DraftModelSettings`, `MtpSettings` or `Eagle3Settings`. Or a factory of the caller's own, whose drafts are
        verified as long as they are; as the `method` of a mapping it may be adaptive, too. None is "off". What this
        function has given is given back.

    Raises
    ------
    ConfigError
        An unknown method or key, a key that is there by both names, or a number out of range.
    TypeError
        Something else was given.
    """
    if given is None:
        return Speculation()
    if isinstance(given, Speculation):
        return given
    if isinstance(given, str):
        given = {"method": given}
    if not isinstance(given, Mapping):
        if callable(given):
            return Speculation((given,), is_adaptive=False)
        raise TypeError(
            f"speculation must be a str such as 'lookup', a dict or a factory of drafters, got {short_repr(given)}"
        )
    settings: dict[str, Any] = {}
    for key, value in given.items():
        name = _OTHER_KEYS.get(key, key)
        if name in settings:
            raise ConfigError(f"speculation: {name!r} is there by two names; give it once")
        settings[name] = value
    method = settings.pop("method", "draft_model" if "model" in settings else "auto")
    is_adaptive = settings.pop("adaptive", True)
    if not isinstance(is_adaptive, bool):
        raise ConfigError(f"speculation: adaptive must be True or False, got {short_repr(is_adaptive)}")
    if callable(method):
        if settings:
            raise ConfigError(f"speculation: {min(settings)!r} is no setting of a drafter of your own")
        return Speculation((method,), is_adaptive=is_adaptive)
    if not isinstance(method, str) or _OTHER_METHODS.get(method, method) not in _METHODS:
        known = ", ".join(map(repr, _METHODS))
        raise ConfigError(f"speculation: expected a method among {known}, got {short_repr(method)}")
    keys = _KEYS.get(method, _KEYS["lookup"])
    for name in settings:
        if name not in keys:
            raise ConfigError(
                f"speculation: {name!r} is not supported; with the method {method!r} expected 'adaptive', "
                + ", ".join(map(repr, keys))
                + " ('num_speculative_tokens' and 'prompt_lookup_min' of vLLM are 'num_tokens' and 'min_match')"
            )
    if method in ("draft_model", "eagle3"):
        if "model" not in settings:
            raise ConfigError(f"speculation: the method {method!r} needs a 'model', such as a folder or a hub id")
        made = DraftModelSettings(**settings) if method == "draft_model" else Eagle3Settings(**settings)
        return Speculation((follow_grammar,), made, is_adaptive=is_adaptive)
    if method == "mtp":
        return Speculation((follow_grammar,), MtpSettings(**settings), is_adaptive=is_adaptive)
    lookup = Lookup(**settings)
    if method == "off":
        return Speculation(is_adaptive=is_adaptive)
    if method != "auto":
        return Speculation((follow_grammar, lookup), is_adaptive=is_adaptive)
    # Lengths are what makes a head cost nothing where it gains nothing. So whole drafts are those that cost nothing.
    head = MtpSettings(min(MtpSettings().num_tokens, lookup.num_tokens)) if is_adaptive else None
    return Speculation((follow_grammar, lookup), head, is_optional=head is not None, is_adaptive=is_adaptive)


def _check_model(model: Any) -> None:
    if not isinstance(model, (str, os.PathLike)):
        raise ConfigError(f"speculation: model must be a folder, a file or a hub id, got {short_repr(model)}")


def _check_quantization(what: str, quantization: Any) -> None:
    if quantization not in (None, "auto", *QUANTIZATIONS):
        known = ", ".join(map(repr, ("auto", *QUANTIZATIONS)))
        raise ConfigError(
            f"speculation: quantization of {what} must be None or one of {known}, got {short_repr(quantization)}"
        )


def _count(name: str, value: Any, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ConfigError(f"speculation: {name} must be an int in 1..{most}, got {short_repr(value)}")
    return value
