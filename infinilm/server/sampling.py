"""Fields of a body that say how to sample, in the words of OpenAI and, where it has none, of vLLM."""

from __future__ import annotations

import dataclasses
from typing import Any

from infinilm.sampling_params import MAX_DRAFT_TOKENS, SamplingParams
from infinilm.server.bodies import ApiError, Body, boolean, described, integer, list_of, mapping, number, some_text
from infinilm.server.service import bad_request

__all__ = [
    "HARMLESS",
    "MAX_CHOICES",
    "MAX_TOP_LOGPROBS",
    "Sampling",
    "StreamOptions",
    "make_params",
    "take_prompt_logprobs",
    "take_sampling",
    "take_stream_options",
]

MAX_CHOICES = 128  # n, as OpenAI's
MAX_TOP_LOGPROBS = 20
_MAX_STOP_STRINGS = 16
_MAX_ALLOWED_IDS = 1 << 19  # twice the largest vocabularies
_INT64 = 2**63
_STREAM_OPTIONS = ("include_usage", "continuous_usage_stats")  # the second is vLLM's


@described(list_of(some_text, _MAX_STOP_STRINGS).schema)
def _stops(name: str, value: object) -> list[str]:
    """Texts that end an answer; one that is empty alone is what some clients send where there is none."""
    return [] if value == "" else list_of(some_text, _MAX_STOP_STRINGS)(name, value)


@described({"anyOf": [{"enum": ["auto", "off"]}, integer(1, MAX_DRAFT_TOKENS).schema]})
def _speculation(name: str, value: object) -> str | int:
    """Whether tokens are drafted, and how many in a step at most."""
    if isinstance(value, str):
        if value not in ("auto", "off"):
            raise ApiError(
                f"{name}: expected 'auto', 'off' or an integer from 1 to {MAX_DRAFT_TOKENS}, got {value!r:.40}",
                param=name,
            )
        return value
    return integer(1, MAX_DRAFT_TOKENS)(name, value)


@described({"anyOf": [{"type": "boolean"}, {"enum": ["never"]}]})
def _early_stopping(name: str, value: object) -> bool | str:
    """When a beam search ends, as `SamplingParams` has it."""
    return "never" if value == "never" else boolean(name, value)


_FIELDS = {
    "temperature": number(0, 2),
    "frequency_penalty": number(-2, 2),
    "presence_penalty": number(-2, 2),
    "n": integer(1, MAX_CHOICES),
    "min_p": number(0, 1),
    "repetition_penalty": number(1e-3, 1e3),
    "min_tokens": integer(0),
    "stop": _stops,
    "stop_token_ids": list_of(integer(0)),
    "allowed_token_ids": list_of(integer(0), _MAX_ALLOWED_IDS),
    "ignore_eos": boolean,
    "include_stop_str_in_output": boolean,
    "skip_special_tokens": boolean,
    "speculation": _speculation,
    "return_receipt": boolean,
    "beam_width": integer(1, MAX_CHOICES),
    "length_penalty": number(-10, 10),
    "early_stopping": _early_stopping,
}

# No effect here, and none on what an answer says elsewhere: they are about accounts, logs, caches, queues and memory.
HARMLESS = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "verbosity"),  # OpenAI's
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
    *("priority", "request_id"),  # vLLM's
    *("cache_prompt", "id_slot"),  # llama.cpp's
    *("keep_alive", "num_ctx"),  # Ollama's
    *("provider", "usage"),  # OpenRouter's
)


@dataclasses.dataclass(frozen=True, slots=True)
class Sampling:
    """What a body says of sampling.

    Attributes
    ----------
    keywords : dict
        For `SamplingParams`, as changes to the model's defaults, without a limit of tokens.
    limit : int or None
        Tokens of the answer that it asks for at most.
    """

    keywords: dict[str, Any]
    limit: int | None

    def within(self, default_length: int | None, room: int) -> dict[str, Any]:
        """The keywords with a limit of tokens. ApiError: there is no room for as many as there must be.

        Parameters
        ----------
        default_length : int or None
            Tokens of an answer where the body does not limit it, unless it asks for more by `min_tokens`; None: what
            there is room for.
        room : int
            Tokens that the context has left beside the prompt; more than that is never asked for.
        """
        least, limit = self.keywords.get("min_tokens", 0), self.limit
        if least > room:
            raise ApiError(
                f"min_tokens: expected at most {room}, for which the context has room behind the prompt, got {least}",
                param="min_tokens",
            )
        if limit is None and default_length is not None:
            limit = max(default_length, least)
        return {**self.keywords, "max_tokens": room if limit is None else min(limit, room)}


def take_sampling(body: Body) -> Sampling:
    """Read the fields that say how to sample."""
    keywords: dict[str, Any] = {}
    for name, kind in _FIELDS.items():
        value = body.take(name, kind)
        if value is not None:
            keywords[name] = value
    searches = body.take("use_beam_search", boolean)  # vLLM's, where n alone may say how wide
    if searches:
        keywords.setdefault("beam_width", keywords.get("n", 1))
    elif searches is not None and "beam_width" in keywords:
        raise ApiError("beam_width needs use_beam_search: true, or leave that out", param="beam_width")
    top_p = body.take("top_p", number(0, 1))
    top_k = body.take("top_k", integer(-1))
    if top_p == 0:
        top_k, top_p = 1, None  # the most probable token alone
    if top_p is not None:
        keywords["top_p"] = top_p
    if top_k is not None:
        keywords["top_k"] = top_k if top_k > 0 else -1
    seed = body.take("seed", integer(-_INT64, _INT64 - 1))
    if seed is not None:
        keywords["seed"] = seed % _INT64
    bias = body.take("logit_bias", mapping)
    if bias:
        keywords["logit_bias"] = {_token_id(key): number(-100, 100)(f"logit_bias.{key}", v) for key, v in bias.items()}
    limits = [body.take("max_completion_tokens", integer(1)), body.take("max_tokens", integer(0))]
    said = [limit for limit in limits if limit is not None]
    body.refuse("truncate_prompt_tokens", "a prompt is never cut")
    body.refuse("spaces_between_special_tokens", "texts are told as they are", True)
    body.skip(*HARMLESS)
    return Sampling(keywords, min(said) if said else None)


@dataclasses.dataclass(frozen=True, slots=True)
class StreamOptions:
    """What a stream tells beside the answer: its usage at the end, and in every chunk that so far."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


def take_stream_options(body: Body, is_stream: bool) -> StreamOptions:
    """Read the field. ApiError: there are options, but no stream."""
    options = body.inner("stream_options")
    if options and not is_stream:
        raise ApiError("stream_options needs stream: true", param="stream_options")
    options.skip("include_obfuscation")
    told = StreamOptions(**{name: bool(options.take(name, boolean)) for name in _STREAM_OPTIONS})
    options.finish()
    if told.continuous_usage_stats and not told.include_usage:
        name = "stream_options.continuous_usage_stats"
        raise ApiError(f"{name} needs include_usage: true beside it", param=name)
    return told


def take_prompt_logprobs(body: Body, is_stream: bool) -> int | None:
    """How many log-probabilities the answer tells of each token of the prompt, vLLM's field; None: it tells nothing."""
    count = body.take("prompt_logprobs", integer(0, MAX_TOP_LOGPROBS))
    if count is not None and is_stream:
        raise ApiError("prompt_logprobs is not supported in streams; leave out stream", param="prompt_logprobs")
    return count


def make_params(defaults: SamplingParams, keywords: dict[str, Any]) -> SamplingParams:
    """The parameters of a request. Raises ApiError that names the field."""
    with bad_request():
        return dataclasses.replace(defaults, **keywords)


def _token_id(key: str) -> int:
    if not key.isascii() or not key.isdecimal() or len(key) > 10:
        raise ApiError(f"logit_bias: expected token ids as keys, got {key!r:.40}", param="logit_bias")
    return int(key)
