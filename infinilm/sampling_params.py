"""How to choose tokens and when to stop: `SamplingParams`, checked when it is made.

Called by users and by `LLM.generate`. Invariant: a `SamplingParams` that exists is valid, and every field of
it has an effect.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypedDict

from infinilm.checks import as_boolean
from infinilm.constraint import Constraint
from infinilm.errors import RequestError
from infinilm.keywords import unknown_parameter
from infinilm.signatures import keyword_parameters, name_keywords

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "MAX_DRAFT_TOKENS",
    "SAMPLING",
    "SamplingKeywords",
    "SamplingParams",
    "check_keywords",
    "make_sampling_params",
]


MAX_DRAFT_TOKENS = 15
"""Tokens of a draft at most: with the newest token of the sequence they fill one tile of the matrix kernels."""


def check_keywords(names: Iterable[str], owner: str = "SamplingParams", others: Iterable[str] = ()) -> None:
    """TypeError for a keyword that no field has; `others`: keywords that `owner` has besides."""
    for name in names:
        if name not in _CHECKS:
            known = [*others, *_CHECKS]
            raise unknown_parameter(owner, name, known, f"; it has {', '.join(known)}")


def _type_error(name: str, expected: str, value: object) -> TypeError:
    return TypeError(f"{name} must be {expected}, got {value!r} of type {type(value).__name__}")


def _number(name: str, value: object, valid: Callable[[float], bool], expected: str) -> float:
    """Return a real number as float; it and the float32 next to it must be valid. NaN and infinity never are."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _type_error(name, "a number", value)
    try:
        number = float(value)
    except OverflowError:  # an int beyond float's range
        number = math.inf
    if not math.isfinite(number) or not valid(number):
        raise RequestError(f"{name} must be {expected}, got {value!r}")
    try:
        (rounded,) = struct.unpack("<f", struct.pack("<f", number))
    except OverflowError:
        raise RequestError(f"{name} must be {expected}, and at most 3.4e38 (it is a float32), got {value!r}") from None
    if not valid(rounded):
        raise RequestError(f"{name} must be {expected}, got {value!r}, which as float32 is {rounded!r}")
    return number


def _integer(name: str, value: object, valid: Callable[[int], bool], expected: str) -> int:
    """Return an integer (numpy's too) as int."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise _type_error(name, "an int", value)
    number = operator.index(value)
    if not valid(number):
        raise RequestError(f"{name} must be {expected}, got {value!r}")
    return number


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    """Return an iterable of token ids as a tuple."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise _type_error(name, "a sequence of token ids, such as [2]", value)
    return tuple(_integer(f"{name}[{i}]", item, lambda n: n >= 0, "a token id >= 0") for i, item in enumerate(value))


def _stop_strings(value: object) -> tuple[str, ...]:
    """Return one stop string or a sequence of them as a tuple."""
    items: Sequence[Any]
    if isinstance(value, str):
        items = (value,)
    elif isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        items = value
    elif value is None:
        items = ()
    else:
        raise _type_error("stop", "a str or a sequence of str", value)
    for i, item in enumerate(items):
        if not isinstance(item, str):
            raise _type_error(f"stop[{i}]", "a str", item)
        if not item:
            raise RequestError(f"stop[{i}] must not be the empty string, which would stop every text at once")
    return tuple(items)


def _logit_bias(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise _type_error("logit_bias", "a dict of token id to number", value)
    return {
        _integer("a key of logit_bias", key, lambda n: n >= 0, "a token id >= 0"): _number(
            f"logit_bias[{key}]", bias, lambda b: True, "finite"
        )
        for key, bias in value.items()
    }


def _logits_processor(value: object) -> Callable[..., Any]:
    if not callable(value):
        raise _type_error("logits_processor", "a callable", value)
    return value


def _constraint(value: object) -> Constraint:
    if not isinstance(value, Constraint):
        raise _type_error("constraint", "a Constraint, such as Constraint.json_schema({...})", value)
    return value


def _adapter_name(value: object) -> str:
    if not isinstance(value, str):
        raise _type_error("lora", "the name of an adapter, or None", value)
    return value


def _prediction(value: object) -> str | tuple[int, ...]:
    if not isinstance(value, str) and (isinstance(value, (bytes, Mapping)) or not isinstance(value, Iterable)):
        raise _type_error("prediction", "a text, a sequence of token ids, or None", value)
    checked = value if isinstance(value, str) else _token_ids("prediction", value)
    if not checked:
        raise RequestError("prediction must not be empty: leave it out, or pass None")
    return checked


def _speculation(value: object) -> str | int | None:
    if value == "off" or value == "auto":
        return None if value == "auto" else "off"
    if isinstance(value, str):
        raise RequestError(f"speculation must be 'auto', 'off' or an int in 1..{MAX_DRAFT_TOKENS}, got {value!r}")
    return _integer("speculation", value, lambda x: 1 <= x <= MAX_DRAFT_TOKENS, f"'off' or in 1..{MAX_DRAFT_TOKENS}")


def _early_stopping(value: object) -> bool | str:
    if value == "never":
        return "never"
    if isinstance(value, str):
        raise RequestError(f"early_stopping must be True, False or 'never', got {value!r}")
    return as_boolean("early_stopping", value)


_MAX_INT = 2**31 - 1
# Field -> function that checks a value and returns it normalised, in the order of the fields. Defaults are not checked.
_CHECKS: Mapping[str, Callable[[Any], Any]] = {
    "n": lambda v: _integer("n", v, lambda x: x >= 1, ">= 1"),
    "temperature": lambda v: _number("temperature", v, lambda x: x >= 0, "finite and >= 0 (0 is greedy)"),
    "top_k": lambda v: _integer(
        "top_k", v, lambda x: x in (-1, 0) or 1 <= x <= _MAX_INT, f"-1 or 0 (off) or in 1..{_MAX_INT}"
    ),
    "top_p": lambda v: _number("top_p", v, lambda x: 0 < x <= 1, "above 0 and at most 1 (1 is off)"),
    "min_p": lambda v: _number("min_p", v, lambda x: 0 <= x <= 1, "in 0..1 (0 is off)"),
    "repetition_penalty": lambda v: _number("repetition_penalty", v, lambda x: x > 0, "finite and above 0 (1 is off)"),
    "presence_penalty": lambda v: _number("presence_penalty", v, lambda x: -2 <= x <= 2, "in -2..2 (0 is off)"),
    "frequency_penalty": lambda v: _number("frequency_penalty", v, lambda x: -2 <= x <= 2, "in -2..2 (0 is off)"),
    "logit_bias": _logit_bias,
    "allowed_token_ids": lambda v: _token_ids("allowed_token_ids", v),
    "seed": lambda v: _integer("seed", v, lambda x: 0 <= x < 2**64, "in 0..2**64-1, or None"),
    "max_tokens": lambda v: _integer("max_tokens", v, lambda x: x >= 1, ">= 1, or None (to the end of the context)"),
    "min_tokens": lambda v: _integer("min_tokens", v, lambda x: x >= 0, ">= 0"),
    "stop": _stop_strings,
    "stop_token_ids": lambda v: _token_ids("stop_token_ids", v),
    "include_stop_str_in_output": lambda v: as_boolean("include_stop_str_in_output", v),
    "ignore_eos": lambda v: as_boolean("ignore_eos", v),
    "logprobs": lambda v: _integer("logprobs", v, lambda x: x >= 0, ">= 0, or None"),
    "prompt_logprobs": lambda v: _integer("prompt_logprobs", v, lambda x: x >= 0, ">= 0, or None"),
    "logits_processor": _logits_processor,
    "constraint": _constraint,
    "skip_special_tokens": lambda v: as_boolean("skip_special_tokens", v),
    "lora": _adapter_name,
    "prediction": _prediction,
    "speculation": _speculation,
    "return_receipt": lambda v: as_boolean("return_receipt", v),
    "beam_width": lambda v: _integer("beam_width", v, lambda x: x >= 1, ">= 1, or None (no beam search)"),
    "length_penalty": lambda v: _number("length_penalty", v, lambda x: -10 <= x <= 10, "in -10..10"),
    "early_stopping": _early_stopping,
}


class SamplingKeywords(TypedDict, total=False):
    """Fields of `SamplingParams` as they may be given, to it or to `LLM.generate` and others: for type checkers."""

    n: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None
    seed: int | None
    max_tokens: int | None
    min_tokens: int
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    logits_processor: Callable[..., Any] | None
    constraint: Constraint | None
    skip_special_tokens: bool
    lora: str | None
    prediction: str | Sequence[int] | None
    speculation: str | int | None
    return_receipt: bool
    beam_width: int | None
    length_penalty: float
    early_stopping: bool | str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    Attributes
    ----------
    n : int
        Sequences per prompt, >= 1. With a seed, sequence i has the seed `seed + i`.
    temperature : float
        >= 0; 0 is greedy: the most probable token, always.
    top_k : int
        Choose among the k most probable tokens; -1 or 0: all.
    top_p : float
        Choose among the most probable tokens that together reach this probability; in (0, 1], 1: all (Holtzman et
        al., https://arxiv.org/abs/1904.09751).
    min_p : float
        Drop tokens less probable than min_p times the most probable one; in [0, 1] (Nguyen et al.,
        https://arxiv.org/abs/2407.01082).
    repetition_penalty : float
        Above 0; positive logits of tokens of the prompt and the output are divided by it, negative ones multiplied.
        Off at 1 (Keskar et al., https://arxiv.org/abs/1909.05858, section 4.1; the signs as in transformers).
    presence_penalty, frequency_penalty : float
        In -2..2; subtracted from the logits of tokens of the output: once, and once for each time, as OpenAI's API
        defines them. Off at 0.
    logit_bias : dict of int to float, optional
        Added to the logits of these token ids.
    allowed_token_ids : sequence of int, optional
        Read back as a tuple; no other token is ever chosen.
    seed : int, optional
        In 0..2**64-1: the same request with the same seed gives the same tokens, in any batch.
    max_tokens : int, optional
        New tokens, >= 1; None: to the end of the context.
    min_tokens : int
        So many tokens come before eos or a stop token can; stop strings are looked for in the text after them.
    stop : str or sequence of str
        The text ends before the first of these strings; read back as a tuple.
    stop_token_ids : sequence of int
        Token ids that end the sequence, besides the model's eos; read back as a tuple.
    include_stop_str_in_output : bool
        Leave the stop string in the text.
    ignore_eos : bool
        Go on after the model's eos token.
    logprobs, prompt_logprobs : int, optional
        Give log-probabilities of the chosen (prompt) tokens and of this many most probable ones, as the model has them:
        before everything above. `prompt_logprobs` computes the prompt twice where the prefix cache does not help.
    logits_processor : callable, optional
        Called as `logits_processor(token_ids, logits)` before each token is drawn, with the prompt and output so far
        (int32 array) and the logits (float32 array, [vocab_size]); returns the logits to draw from, -inf for tokens
        that must not come. It runs on the engine's thread, so a slow one slows all requests, and it cannot call the
        `LLM` that runs it. What it raises, even SystemExit, ends its request alone, and comes out of `result`.
    constraint : Constraint, optional
        What the text must be, such as `Constraint.json_schema(schema)`. It ends where the constraint does, also before
        `min_tokens`; where a limit or a stop string ends it, it is cut.
    skip_special_tokens : bool
        Leave special tokens out of the text.
    lora : str, optional
        The adapter that the request runs through, by its name in `LLM.loras`. None: the model as it is.
    prediction : str or sequence of int, optional
        What the answer will largely repeat, such as the file that it edits, as text or token ids (read back as a
        tuple). Steps verify its tokens, several at once: the answer comes faster, and no bit of it changes.
    speculation : str or int, optional
        "off": nothing is drafted for the request; 1..15: at most so many tokens in a step; None or "auto": as the `LLM`
        was told. It changes no token, but how fast they come.
    return_receipt : bool
        Give each answer a `Receipt`, by which `LLM.verify` can check that the model gave it. The first one reads the
        files of the weights once more.
    beam_width : int, optional
        Follow so many beams at once, and answer with the `n` best outputs found, the best first (beam search). They
        come at the end of the search, all at once. Nothing is drawn: `temperature`, `top_k`, `top_p`, `min_p` and
        `seed` do not matter. Goes with `max_tokens`, `min_tokens`, stop tokens and strings, log-probabilities and
        `lora`.
    length_penalty : float
        A beam search compares outputs by the sum of their log-probabilities over their number of tokens to the
        power of this. Above 0 longer ones gain. In -10..10.
    early_stopping : bool or str
        When a beam search ends, once it has `beam_width` outputs: True, then; False, when the best beam, if it ended
        now, would be no better than the worst of these; "never", when it could not become better at any length. As in
        transformers, like the scores.

    Raises
    ------
    TypeError
        Unknown keyword (with the nearest name), or a value of the wrong type.
    RequestError
        A value out of range (a ValueError): names the range.

    Examples
    --------
    >>> from dataclasses import replace
    >>> from infinilm import SamplingParams
    >>> params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=100, stop="END")
    >>> replace(params, seed=1).seed
    1
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: tuple[int, ...] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logits_processor: Callable[..., Any] | None = None
    constraint: Constraint | None = None
    skip_special_tokens: bool = True
    lora: str | None = None
    prediction: str | tuple[int, ...] | None = None
    speculation: str | int | None = None
    return_receipt: bool = False
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    if TYPE_CHECKING:  # callers may pass more types than fields hold

        def __init__(self, **fields: Unpack[SamplingKeywords]) -> None: ...

    def __new__(cls, *args: Any, **kwargs: Any) -> SamplingParams:
        """Refuse unknown keywords with a hint, before `__init__` refuses them without."""
        check_keywords(kwargs)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        """Check and normalise every field."""
        for name, default in _DEFAULTS.items():
            value = getattr(self, name)
            if value is not default:  # which is valid, and most fields have
                object.__setattr__(self, name, _CHECKS[name](value))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens must be at most max_tokens={self.max_tokens}, got {self.min_tokens}")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids must name at least one token, got none; None allows all")
        if self.constraint is not None and self.ignore_eos:
            raise RequestError("ignore_eos cannot be combined with constraint, which says where the text ends")
        self._check_beams()

    def _check_beams(self) -> None:
        if self.beam_width is None:
            for name in ("length_penalty", "early_stopping"):
                if getattr(self, name) != _DEFAULTS[name]:
                    raise RequestError(f"{name} is of a beam search: set beam_width, or leave it out")
            return
        if self.n > self.beam_width:
            raise RequestError(f"n must be at most beam_width={self.beam_width}, got {self.n}: raise beam_width")
        for name in _NOT_WITH_BEAMS:
            if (value := getattr(self, name)) != _DEFAULTS[name]:
                raise RequestError(
                    f"{name} cannot be combined with beam_width={self.beam_width}: beams are compared by the model's "
                    f"own probabilities; got {name}={value!r:.40}, set it to {_DEFAULTS[name]!r}"
                )

    @property
    def kept_logprobs(self) -> int | None:
        """`logprobs`, but 0 where a receipt alone needs the log-probability of each token."""
        return 0 if self.logprobs is None and self.return_receipt else self.logprobs

    @property
    def max_draft_tokens(self) -> int:
        """Tokens of a draft at most, 0 to 15."""
        if isinstance(self.speculation, int):
            return self.speculation
        return 0 if self.speculation == "off" else MAX_DRAFT_TOKENS


# What changes probabilities, or names an output that is drawn.
_NOT_WITH_BEAMS = (
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids"),
    *("logits_processor", "constraint", "prediction", "return_receipt"),
)

_DEFAULTS: Mapping[str, Any] = {item.name: item.default for item in fields(SamplingParams)}

SAMPLING = keyword_parameters(SamplingKeywords.__annotations__)
"""The fields as parameters of functions that take them as keywords; ``...``: what `SamplingParams` or the model say."""

name_keywords(SamplingParams, [item.replace(default=_DEFAULTS[item.name]) for item in SAMPLING])


def make_sampling_params(params: SamplingParams | None, overrides: Mapping[str, Any]) -> SamplingParams:
    """Return `params` with some fields replaced, as in `llm.generate(prompt, params, max_tokens=5)`.

    Parameters
    ----------
    params : SamplingParams, optional
        None: the defaults.
    overrides : mapping of str to object

    Raises
    ------
    TypeError
        `params` is something else, or a keyword is unknown (with the nearest name).
    RequestError
        See `SamplingParams`.
    """
    if params is not None and not isinstance(params, SamplingParams):
        raise TypeError(
            f"sampling_params must be SamplingParams or None, got {type(params).__name__}; pass single "
            "settings as keywords, for example temperature=0"
        )
    check_keywords(overrides)
    if params is None:
        return SamplingParams(**overrides)
    return replace(params, **overrides) if overrides else params
