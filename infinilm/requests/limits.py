"""`RequestLimits`: upper limits that keep one request from taking the time and memory of all others."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from infinilm.errors import ConfigError, RequestError
from infinilm.sampling_params import SamplingParams

__all__ = ["RequestLimits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Upper limits for requests, such as ``LLM(model, limits=RequestLimits(max_n=4))``.

    The defaults are generous, and low enough to keep an `LLM` responsive. A server with unknown clients should lower
    them.

    Attributes
    ----------
    max_queued_seqs : int
        Sequences that may wait, beyond the `max_num_seqs` that run. A request with n > 1 counts as n, and one with
        `prompt_logprobs` as one more. Further requests are refused with `QueueFullError`; a call with many prompts
        draws them as there is room.
    max_seconds : float or None
        Time that a request may take, in the queue and while it runs: prompts that are scored or embedded, too. Then it
        ends after the current step, with what it has and a `TimeLimitError`. None: as long as it likes.
    max_n : int
        `n` and `beam_width` of `SamplingParams`.
    max_logprobs : int
        `logprobs` and `prompt_logprobs` of `SamplingParams`, and `top` of `LLM.score`.
    max_logit_bias : int
        Entries of `logit_bias`.
    max_stop_token_ids : int
        Ids in `stop_token_ids`.
    max_stop : int
        Strings in `stop`.
    max_stop_len : int
        Characters of each of them.

    Raises
    ------
    ConfigError
        A limit that is not an int >= 0 (>= 1 for `max_n`), or a `max_seconds` that is no number > 0.
    """

    max_queued_seqs: int = 100_000
    max_seconds: float | None = None
    max_n: int = 1024
    max_logprobs: int = 1024
    max_logit_bias: int = 4096
    max_stop_token_ids: int = 4096
    max_stop: int = 64
    max_stop_len: int = 1024

    def __post_init__(self) -> None:
        """Check every field."""
        seconds = self.max_seconds
        is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if seconds is not None and not (is_number and 0 < seconds < math.inf):
            raise ConfigError(f"max_seconds: expected a finite number > 0, or None for no limit, got {seconds!r}")
        for item in fields(self):
            if item.name == "max_seconds":
                continue
            value, least = getattr(self, item.name), 1 if item.name == "max_n" else 0
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{item.name}: expected an int >= {least}, got {value!r}")

    @staticmethod
    def of(limits: RequestLimits | None) -> RequestLimits:
        """The limits that a caller gave, or the defaults."""
        if limits is None:
            return RequestLimits()
        if not isinstance(limits, RequestLimits):
            raise TypeError(f"limits: expected RequestLimits or None, got {type(limits).__name__}")
        return limits

    def check(self, params: SamplingParams) -> None:
        """RequestError if the parameters exceed a limit; `check_top` checks log-probabilities."""
        _check("n", params.n, "max_n", self.max_n)
        _check("beam_width", params.beam_width or 0, "max_n", self.max_n)
        num_entries, lengths = len(params.logit_bias or ()), [len(text) for text in params.stop]
        _check("logit_bias: the number of entries", num_entries, "max_logit_bias", self.max_logit_bias)
        num_ids = len(params.stop_token_ids)
        _check("stop_token_ids: the number of ids", num_ids, "max_stop_token_ids", self.max_stop_token_ids)
        _check("stop: the number of strings", len(lengths), "max_stop", self.max_stop)
        _check("stop: the length of a string", max(lengths, default=0), "max_stop_len", self.max_stop_len)

    def check_top(self, name: str, count: int) -> None:
        """RequestError if `count` exceeds `max_logprobs`."""
        _check(name, count, "max_logprobs", self.max_logprobs)


def _check(what: str, value: int, name: str, limit: int) -> None:
    if value > limit:
        raise RequestError(f"{what} must be at most {limit}, got {value}; this LLM was made with limits.{name}={limit}")
