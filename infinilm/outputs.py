"""What a request gives back: whole results, events of a stream, and timings.

Made by the `LLM` layer, read by users. Times are seconds; rates are tokens per second; what could not be
measured is None.
"""

from __future__ import annotations

import html
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Protocol

from infinilm.errors import RequestError
from infinilm.receipts import Receipt

__all__ = [
    "AnswerPart",
    "AnswerPiece",
    "Classification",
    "CompletionOutput",
    "Delta",
    "EngineMetrics",
    "Logprob",
    "RankedDocument",
    "RequestMetrics",
    "RequestOutput",
    "Score",
    "TokenEvent",
    "name_logprobs",
    "perplexity_of",
]


def _percentile(ordered: Sequence[float], percent: float) -> float:
    """Percentile of ascending values, linear between neighbours, as numpy's default."""
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _plain(value: Any) -> Any:
    """A value as JSON has it; numbers that it does not have (infinity) become None."""
    if is_dataclass(value):
        return {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if count > 0 and seconds > 0 else None


class TokenBytes(Protocol):
    """A tokenizer, as far as log-probabilities need it."""

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for."""


class Logprob(float):
    """The log-probability of a token: a float that also knows which token it is of.

    Attributes
    ----------
    token_id : int
    rank : int or None
        1 for the most probable token at its place, 2 for the next; None: it is beyond those that were asked for.
    """

    __slots__ = ("_text", "rank", "token_id")

    def __new__(
        cls, value: float, token_id: int, rank: int | None = None, text: TokenBytes | str | None = None
    ) -> Logprob:
        """`text`: that of the token, or a tokenizer that has it; None: there is none."""
        self = super().__new__(cls, value)
        self.token_id = token_id
        self.rank = rank
        self._text = text
        return self

    token_id: int
    rank: int | None
    _text: TokenBytes | str | None

    @property
    def logprob(self) -> float:
        """The number alone."""
        return float(self)

    @property
    def decoded_token(self) -> str | None:
        """Text of the token alone, decoded when it is asked for; None: the model has no tokenizer.

        A part of a character is shown as U+FFFD; `Tokenizer.token_bytes` gives its bytes.
        """
        if self._text is None or isinstance(self._text, str):
            return self._text
        return self._text.token_bytes(self.token_id).decode("utf-8", "replace")

    def __reduce__(self) -> tuple[Any, ...]:
        """Take the text along, not the tokenizer."""
        return Logprob, (float(self), self.token_id, self.rank, self.decoded_token)


def name_logprobs(logprobs: Mapping[int, float], count: int, tokenizer: TokenBytes | None) -> dict[int, Logprob]:
    """Log-probabilities of one place with their tokens and ranks.

    Parameters
    ----------
    logprobs : mapping of int to float
        By token id: of the most probable tokens, best first, and behind them of another one.
    count : int
        How many most probable tokens were asked for.
    tokenizer : TokenBytes or None
    """
    return {
        token_id: Logprob(value, token_id, rank if rank <= count and value == value else None, tokenizer)  # not NaN
        for rank, (token_id, value) in enumerate(logprobs.items(), 1)
    }


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Timings of one request.

    Attributes
    ----------
    queue_time : float or None
        Seconds from arrival to the first step that worked on the request; None: never scheduled.
    ttft : float or None
        Time to first token: seconds from arrival to the first new token, queueing included; None: no token
        came.
    itl : float or None
        Inter-token latency: mean seconds between one new token and the next; None: fewer than two tokens.
    itl_p50, itl_p99 : float or None
        Its median and 99th percentile, in seconds.
    prefill_tps : float or None
        Prompt tokens computed (not the cached ones) per second, from the first step to the first new token.
    decode_tps : float or None
        New tokens after the first one per second.
    cached_tokens : int
        Prompt tokens that the prefix cache already held.
    accepted_prediction_tokens, rejected_prediction_tokens : int or None
        Tokens of the request's prediction that the answer has at their places, so far, and the others; with `n`
        answers of all of them together. None: the request has no prediction.
    token_times : tuple of float
        Seconds from arrival to each new token, as the engine made them: what percentiles over many requests need.
    num_draft_tokens, num_accepted_tokens : int
        Drafted tokens that steps have verified, and those of them that were right, of all completions of the request.
    """

    queue_time: float | None
    ttft: float | None
    itl: float | None
    itl_p50: float | None
    itl_p99: float | None
    prefill_tps: float | None
    decode_tps: float | None
    cached_tokens: int = 0
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None
    token_times: tuple[float, ...] = field(default=(), repr=False)
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @classmethod
    def from_times(
        cls,
        arrival: float,
        first_scheduled: float | None,
        token_times: Sequence[float],
        num_prompt_tokens: int,
        cached_tokens: int = 0,
        num_draft_tokens: int = 0,
        num_accepted_tokens: int = 0,
    ) -> RequestMetrics:
        """Compute the metrics from points in time, all of one clock that never goes back, in seconds.

        Parameters
        ----------
        arrival : float
            When the request was submitted.
        first_scheduled : float or None
            When the first step with a part of it began; None: never.
        token_times : sequence of float
            When each new token was known, ascending.
        num_prompt_tokens : int
            Length of the prompt, cached tokens included.
        cached_tokens, num_draft_tokens, num_accepted_tokens : int
        """
        first = token_times[0] if len(token_times) else None
        gaps = sorted(map(operator.sub, token_times[1:], token_times))
        elapsed = token_times[-1] - token_times[0] if gaps else 0.0
        started = arrival if first_scheduled is None else first_scheduled
        return cls(
            queue_time=None if first_scheduled is None else first_scheduled - arrival,
            ttft=None if first is None else first - arrival,
            itl=elapsed / len(gaps) if gaps else None,
            itl_p50=_percentile(gaps, 50) if gaps else None,
            itl_p99=_percentile(gaps, 99) if gaps else None,
            prefill_tps=None if first is None else _rate(num_prompt_tokens - cached_tokens, first - started),
            decode_tps=_rate(len(gaps), elapsed),
            cached_tokens=cached_tokens,
            token_times=tuple([t - arrival for t in token_times]),
            num_draft_tokens=num_draft_tokens,
            num_accepted_tokens=num_accepted_tokens,
        )


def _excerpt(text: str, limit: int = 60) -> str:
    """A text in quotes, on one line, cut off after `limit` characters."""
    return repr(text if len(text) <= limit else text[: limit - 3] + "...")


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """Some reasoning, some content, or (a part of) a call, of an answer in a conversation.

    Attributes
    ----------
    kind : str
        "reasoning", "content" or "call".
    text : str
        What is new of a call: a part of its arguments, which are JSON text.
    call : dict or None
        The call, as in OpenAI's streams: ``{"index": 0, "id": ..., "type": "function", "function": {"name": ...,
        "arguments": ""}}`` begins the first, and ``{"index": 0, "function": {"arguments": ...}}`` goes on with it.
    """

    kind: str
    text: str
    call: Mapping[str, Any] | None = None


@dataclass(slots=True)
class AnswerPiece:
    """A piece of an answer in a conversation, or all of it.

    Attributes
    ----------
    parts : list of AnswerPart
        In the order in which the model wrote them, without empty ones.
    """

    parts: list[AnswerPart] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether there is anything in it."""
        return bool(self.parts)

    @property
    def reasoning(self) -> str:
        """What the model thought."""
        return "".join([part.text for part in self.parts if part.kind == "reasoning"])

    @property
    def content(self) -> str:
        """What the model said."""
        return "".join([part.text for part in self.parts if part.kind == "content"])

    @property
    def tool_calls(self) -> list[Mapping[str, Any]]:
        """The calls, or what is new of them: one piece of each, as some clients take a piece's place for its index."""
        first: dict[int, Mapping[str, Any]] = {}
        arguments: dict[int, list[str]] = {}
        for part in self.parts:
            if part.call is not None:
                first.setdefault(part.call["index"], part.call)
                arguments.setdefault(part.call["index"], []).append(part.text)
        return [
            {**call, "function": {**call["function"], "arguments": "".join(arguments[index])}}
            for index, call in first.items()
        ]


@dataclass(frozen=True, slots=True, repr=False)
class CompletionOutput:
    """One generated sequence.

    Attributes
    ----------
    index : int
        In 0..n-1, among the sequences of its request.
    text : str
        Generated text only; ends before the stop string, unless it was asked for.
    token_ids : sequence of int
        Generated tokens, the one that stopped the sequence included.
    logprobs : sequence of mappings of int to Logprob, optional
        Per generated token: log-probability by token id, of the most probable tokens in descending order and of the
        generated one; each is a float with `decoded_token` and `rank`. The distribution is the model's own: before
        penalties, bias, processor, temperature and truncation. None unless asked for.
    cumulative_logprob : float, optional
        Sum over the generated tokens; None unless asked for.
    finish_reason : str or None
        `"stop"` (eos, stop string or stop token), `"length"`, `"abort"`, `"error"`; None: not finished.
    stop_reason : str, int or None
        The stop string or stop token id that ended it; None for eos and all other reasons.
    error : BaseException or None
        What went wrong when `finish_reason` is `"error"`.
    reasoning, content : str or None
        The parts of `text` that are what the model thought (None: its template knows no reasoning), and what it said,
        without reasoning and calls. Only answers of `LLM.chat` have them; None in others.
    tool_calls : sequence of dict
        The calls in an answer of `LLM.chat`, as messages take them: ``{"id": ..., "type": "function", "function":
        {"name": ..., "arguments": JSON text}}``.
    receipt : Receipt or None
        What the answer is a function of, if it was asked for and the answer has ended by itself ("stop", "length").
    beam_score : float or None
        What a beam search compares outputs by: the sum of the log-probabilities over the number of tokens to the power
        of `length_penalty`.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[Mapping[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: BaseException | None = None
    reasoning: str | None = None
    content: str | None = None
    tool_calls: Sequence[Mapping[str, Any]] = ()
    receipt: Receipt | None = None
    beam_score: float | None = None

    def __repr__(self) -> str:
        """Show the beginning of the text, the number of tokens and why it ended."""
        reason = "unfinished" if self.finish_reason is None else self.finish_reason
        return f"<CompletionOutput {_excerpt(self.text)}, {len(self.token_ids)} tokens, {reason}>"


@dataclass(frozen=True, slots=True, repr=False)
class RequestOutput:
    """The result of one request.

    Attributes
    ----------
    request_id : str
    prompt : str or None
        What the chat template made, for a conversation; None for a prompt given as token ids alone.
    prompt_token_ids : sequence of int
    outputs : sequence of CompletionOutput
        `n` of them.
    finished : bool
    prompt_logprobs : sequence of mappings of int to Logprob, optional
        Per prompt token (None for the first): log-probability by token id; None unless asked for.
    metrics : RequestMetrics or None
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: Sequence[CompletionOutput]
    finished: bool
    prompt_logprobs: Sequence[Mapping[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = None

    @property
    def text(self) -> str:
        """The generated text, of requests for one: `outputs[0].text`.

        RequestError: there are several (n > 1).
        """
        if len(self.outputs) != 1:
            raise RequestError(
                f"RequestOutput.text is that of requests with n=1; this one has {len(self.outputs)} texts: "
                "[completion.text for completion in output.outputs]"
            )
        return self.outputs[0].text

    def __repr__(self) -> str:
        """Show the beginnings of the prompt and of the texts; metrics and token ids are attributes."""
        prompt = f"{len(self.prompt_token_ids)} tokens" if self.prompt is None else _excerpt(self.prompt)
        return f"<RequestOutput {self.request_id}: {prompt} -> {', '.join(map(repr, self.outputs))}>"

    def _repr_html_(self) -> str:
        """Show Jupyter the prompt and, set off from it, the texts."""
        prompt = html.escape(f"[{len(self.prompt_token_ids)} tokens]" if self.prompt is None else self.prompt)
        texts = "".join(
            f"<mark>{html.escape(one.text)}</mark> <small>{len(one.token_ids)} tokens, {one.finish_reason}</small>\n"
            for one in self.outputs
        )
        return f'<div style="white-space: pre-wrap">{prompt}{texts}</div>'

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache already held."""
        return 0 if self.metrics is None else self.metrics.cached_tokens

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain dicts, lists, numbers and texts, as JSON has them: an error is its text."""
        result: dict[str, Any] = _plain(self)
        return result


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One step of a stream.

    Attributes
    ----------
    request_id : str
    index : int
        Which prompt of the call this belongs to, from 0.
    token_id : int or None
        The new token; None in an event that only brings text held back or the end.
    text : str
        Text that is certain now, often empty: all events of a sequence, joined, are `CompletionOutput.text`.
    logprob : float or None
        Log-probability of the new token; None unless asked for.
    finish_reason : str or None
        In the last event of a sequence, see `CompletionOutput`.
    completion : int
        Which of the `n` sequences of the prompt this belongs to, in 0..n-1.
    error : BaseException or None
        What went wrong when `finish_reason` is `"error"`.
    top_logprobs : mapping of int to Logprob, optional
        As in `CompletionOutput.logprobs`: log-probability by token id, of as many most probable tokens as were asked
        for, in descending order, and of the new one; None unless asked for.
    piece : AnswerPiece or None
        What is certain now of the parts of an answer, in events of `LLM.stream_chat` and `LLM.astream_chat`.
    receipt : Receipt or None
        In the last event of a sequence, see `CompletionOutput`.
    """

    request_id: str
    index: int
    token_id: int | None
    text: str
    logprob: float | None = None
    finish_reason: str | None = None
    completion: int = 0
    error: BaseException | None = None
    top_logprobs: Mapping[int, Logprob] | None = None
    piece: AnswerPiece | None = None
    receipt: Receipt | None = None

    @property
    def reasoning(self) -> str:
        """What is new of `CompletionOutput.reasoning`, often empty. RequestError: the stream is not a chat's."""
        return self._piece("reasoning").reasoning

    @property
    def content(self) -> str:
        """What is new of `CompletionOutput.content`, often empty. RequestError: the stream is not a chat's."""
        return self._piece("content").content

    @property
    def tool_calls(self) -> list[Mapping[str, Any]]:
        """What is new of the calls, see `AnswerPart.call`. RequestError: the stream is not a chat's."""
        return self._piece("tool_calls").tool_calls

    def _piece(self, name: str) -> AnswerPiece:
        if self.piece is None:
            raise RequestError(
                f"TokenEvent.{name} is that of stream_chat() and astream_chat(); events of other streams have 'text'"
            )
        return self.piece


@dataclass(slots=True)
class Delta:
    """The part of a completion since its last `Delta`: any number of tokens, and perhaps the end."""

    index: int  # number of the prompt in its call
    completion: int  # number of the completion among the `n` of that prompt
    text: str  # that is certain now
    token_ids: list[int]
    top_logprobs: list[dict[int, float]]  # one for each of these tokens, itself included; empty unless asked for
    finish_reason: str | None
    error: BaseException | None
    stop_reason: str | int | None = None  # as in `CompletionOutput`
    receipt: Receipt | None = None  # of the answer that has ended with it, as in `CompletionOutput`


@dataclass(frozen=True, slots=True)
class Score:
    """How probable a given text is to the model.

    Attributes
    ----------
    prompt : str or None
        None for a prompt given as token ids.
    token_ids : sequence of int
    logprobs : sequence of float or None
        Per token: its log-probability after the tokens before it; None for the first, which follows nothing.
    top_logprobs : sequence of mappings of int to Logprob, optional
        Per token (None for the first): the most probable tokens at its place, in descending order; None unless asked
        for.
    start : int
        The first token that counts in `total` and `perplexity`: 1, or where a continuation begins.
    """

    prompt: str | None
    token_ids: Sequence[int]
    logprobs: Sequence[float | None]
    top_logprobs: Sequence[Mapping[int, Logprob] | None] | None = None
    start: int = 1

    @property
    def total(self) -> float:
        """Log-probability of the tokens from `start` on, given those before."""
        return math.fsum(value for value in self.logprobs[self.start :] if value is not None)

    @property
    def perplexity(self) -> float | None:
        """The exp of the mean of the negative log-probabilities that count; None where no token does."""
        count = len(self.logprobs) - self.start
        return perplexity_of(self.total, count) if count else None


def perplexity_of(total: float, count: int) -> float:
    """Perplexity of `count` tokens whose log-probabilities sum up to `total`; infinite beyond what a float holds."""
    mean = -total / count
    return math.exp(mean) if mean < 709 else math.inf


@dataclass(frozen=True, slots=True)
class Classification:
    """What a head of labels says of a text.

    Attributes
    ----------
    scores : tuple of float
        One for each label, in the order of `labels`.
    labels : tuple of str
        The names in `id2label` of config.json.
    num_tokens : int
        Tokens of the text.
    """

    scores: tuple[float, ...]
    labels: tuple[str, ...]
    num_tokens: int

    @property
    def label(self) -> str:
        """The label with the highest score, of equal ones the first."""
        return self.labels[self.scores.index(self.score)]

    @property
    def score(self) -> float:
        """The highest score."""
        return max(self.scores)


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """How well a document fits a query.

    Attributes
    ----------
    index : int
        Its number among the documents of the call.
    score : float
        The larger, the better; of most models in [0, 1].
    document : str
    num_tokens : int
        Tokens of query, document and what stands around them.
    """

    index: int
    score: float
    document: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """The state of an `LLM` at one moment, and what it has done so far.

    Attributes
    ----------
    num_running, num_waiting : int
        Sequences with a part in the KV cache; sequences not begun yet. A request with n > 1 has several.
    num_deferred : int
        The part of `num_waiting` that does not wait for room: these follow another sequence of their prompt, or the
        engine has not looked at them yet.
    num_finished : int
        Sequences that ended, for any reason.
    num_steps : int
        Forward passes.
    step_sizes : tuple of int
        How many steps computed and sampled so many tokens: entry 0 counts steps of one token at most, entry k those of
        more than 2^(k-1) and at most 2^k.
    num_prompt_tokens, num_output_tokens : int
        Tokens of prompts computed; tokens generated.
    num_preemptions : int
        Sequences that lost their part of the cache to others and were computed again.
    num_used_blocks, num_blocks : int
        Blocks of the KV cache that running sequences hold, of how many; of layers that keep all keys, where those with
        a window have blocks of their own.
    cache_usage : float
        Share of the blocks that running sequences hold, 0 to 1; of the layers where it is largest.
    prefix_hit_rate : float
        Share of the prompt tokens that the prefix cache already held, 0 to 1.
    prompt_tps, output_tps : float or None
        Tokens per second of the last steps, the time between steps left out; None: none yet.
    num_drafts, num_draft_tokens, num_accepted_tokens : int
        Drafts that steps have verified; their tokens; those of them that were right.
    accepted_at : tuple of int
        How often the token at each position of a draft was right, from the first.
    num_external_queried_tokens, num_external_hit_tokens : int
        Tokens of prompts that were looked for in `host_cache` and `disk_cache`, and those that came from there.
    """

    num_running: int
    num_waiting: int
    num_deferred: int
    num_finished: int
    num_steps: int
    step_sizes: tuple[int, ...]
    num_prompt_tokens: int
    num_output_tokens: int
    num_preemptions: int
    num_used_blocks: int
    num_blocks: int
    cache_usage: float
    prefix_hit_rate: float
    prompt_tps: float | None
    output_tps: float | None
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_at: tuple[int, ...] = ()
    num_external_queried_tokens: int = 0
    num_external_hit_tokens: int = 0
