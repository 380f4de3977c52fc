"""What a model gave, in the words of OpenAI's chat and text completions: whole, and in pieces of a stream."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from infinilm.outputs import Delta, RequestOutput
from infinilm.text.answers import CALL_PREFIX, ChoiceMaker, new_id
from infinilm.text.tokenizer import Tokenizer

__all__ = [
    "CALL_PREFIX",
    "AnswerStream",
    "ChoiceMaker",
    "ChunkWriter",
    "CompletionLogprobs",
    "TokenLogprob",
    "chat_logprobs",
    "finish_reason",
    "new_id",
    "sent_event",
    "timings",
    "told_prompt_logprobs",
    "usage",
]

TokenBytes = Callable[[int], bytes]
TokenLogprob = tuple[int, "float | None", "Mapping[int, float] | None"]
"""A token id, its log-probability, and those of the most probable tokens."""


def usage(outputs: Sequence[RequestOutput], num_reasoning: int | None = None) -> dict[str, Any]:
    """Tokens of prompts and answers, and how many of the prompts were found in the cache.

    `num_reasoning`: of the answers, where that is asked for. Tokens of predictions are told where there are some; those
    that were rejected are no part of the answers, and not counted with them.
    """
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    metrics = [output.metrics for output in outputs if output.metrics is not None]
    cached = sum(one.cached_tokens for one in metrics)
    details: dict[str, int] = {} if num_reasoning is None else {"reasoning_tokens": num_reasoning}
    for name in ("accepted_prediction_tokens", "rejected_prediction_tokens"):
        counts = [count for one in metrics if (count := getattr(one, name)) is not None]
        details |= {name: sum(counts)} if counts else {}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        **({"completion_tokens_details": details} if details else {}),
    }


def timings(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """How long prompts and answers took, by llama.cpp's names, of outputs that have ended; several are taken together.

    A prompt takes from the first step that works on it to the first token, and the answer from there to its last token.
    """
    counted = usage(outputs)
    found = [output.metrics for output in outputs if output.metrics is not None]
    begins = [m.queue_time for m in found if m.queue_time is not None]
    firsts = [m.token_times[0] for m in found if m.token_times]
    lasts = [m.token_times[-1] for m in found if m.token_times]
    cached = counted["prompt_tokens_details"]["cached_tokens"]
    prompt_n, predicted_n = counted["prompt_tokens"] - cached, counted["completion_tokens"]
    prompt = max(firsts, default=0.0) - min(begins, default=0.0)
    predicted = max(lasts, default=0.0) - min(firsts, default=0.0)

    def rates(name: str, count: int, seconds: float) -> dict[str, float]:
        return {
            f"{name}_n": count,
            f"{name}_ms": seconds * 1e3,
            f"{name}_per_token_ms": seconds * 1e3 / max(count, 1),
            f"{name}_per_second": count / seconds if seconds > 0 else 0.0,
        }

    return {"cache_n": cached, **rates("prompt", prompt_n, prompt), **rates("predicted", predicted_n, predicted)}


_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def sent_event(values: Mapping[str, Any]) -> str:
    """A server-sent event; what has a type carries it as the name of the event too."""
    name = f"event: {values['type']}\n" if "type" in values else ""
    return f"{name}data: {_to_json(values)}\n\n"


class AnswerStream(Protocol):
    """Makes server-sent events of what a model gives, step by step. It never waits; who calls it sends the events."""

    def begin(self) -> Iterable[str]:
        """Events before the first token."""

    def push(self, deltas: Sequence[Delta]) -> Iterable[str]:
        """Events of new tokens. Raises what made one of the sequences fail."""

    def end(self) -> Iterable[str]:
        """Events behind the last token."""


class ChunkWriter:
    """Writes the chunks of a stream of completions; what all of them share is made into JSON once.

    Parameters
    ----------
    head : mapping
        Fields before the choices.
    include_usage : bool
        Chunks with choices say that their usage is null, as the client wants one with it.
    """

    def __init__(self, head: Mapping[str, Any], include_usage: bool) -> None:
        self._begin = f"data: {_to_json(head)[:-1]},"
        self._end = ',"usage":null}\n\n' if include_usage else "}\n\n"

    def count(self, num_prompt: int, num_new: int) -> None:
        """Add `usage` to every later chunk, with so many tokens of the prompt and of the choice."""
        counted = {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}
        self._end = f',"usage":{_to_json(counted)}}}\n\n'

    def chunk(self, choice: Mapping[str, Any], beside: Mapping[str, Any] | None = None) -> str:
        """A piece of one choice; `beside`: more fields of the chunk."""
        more = f",{_to_json(beside)[1:-1]}" if beside else ""
        return f'{self._begin}"choices":[{_to_json(choice)}]{more}{self._end}'

    def text(self, index: int, begin: str, text: str, end: str = "") -> str:
        """A piece of one choice that is text and nothing else: `chunk`, at a fraction of the time.

        `begin`, `end`: JSON around the text, which tells where in the choice it stands.
        """
        choice = f'{{"index":{index},{begin}{_to_json(text)}{end},"logprobs":null,"finish_reason":null}}'
        return f'{self._begin}"choices":[{choice}]{self._end}'

    def usage(self, counted: Mapping[str, Any], beside: Mapping[str, Any]) -> str:
        """The chunk behind the choices; `beside`: more fields of it."""
        return f'{self._begin}"choices":[],{_to_json({"usage": counted, **beside})[1:]}\n\n'


def by_choice(deltas: Sequence[Delta], n: int) -> list[tuple[int, Delta]]:
    """With the number of the choice, where every prompt has `n`. Raises what made one of them fail."""
    for delta in deltas:
        if delta.error is not None:
            raise delta.error
    return [(delta.index * n + delta.completion, delta) for delta in deltas]


def chat_logprobs(
    events: Sequence[tuple[int, float, Mapping[int, float]]], top: int, token_bytes: TokenBytes
) -> dict[str, Any]:
    """`logprobs` of a chat choice: of (token id, its log-probability, those of the most probable tokens)."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = token_bytes(token_id)
        return {"token": _token_name(data), "logprob": _finite(logprob), "bytes": list(data)}

    return {
        "content": [
            {
                **entry(token_id, logprob),
                "top_logprobs": [entry(other, value) for other, value in list(tops.items())[:top]],
            }
            for token_id, logprob, tops in events
        ],
        "refusal": None,
    }


def told_prompt_logprobs(output: RequestOutput, top: int | None, token_bytes: TokenBytes) -> dict[str, Any]:
    """The field `prompt_logprobs` as vLLM has it; nothing if it was not asked for.

    It has an entry for each token of the prompt; the first is null, since nothing is before that token. The others map
    token ids, as text, to log-probabilities and ranks, from 1: those of the token itself, and of the `top` most
    probable ones. The rank of a token behind these is not known.
    """
    if top is None:
        return {}

    def told(token_id: int, tops: Mapping[int, float] | None) -> dict[str, Any] | None:
        if tops is None:
            return None
        ranks: dict[int, int | None] = {other: rank for rank, other in enumerate(list(tops)[:top], 1)}
        ranks.setdefault(token_id, None)
        return {
            str(other): {
                "logprob": _finite(tops[other]),
                "rank": rank,
                "decoded_token": token_bytes(other).decode("utf-8", "replace"),
            }
            for other, rank in ranks.items()
        }

    listed = zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True)
    return {"prompt_logprobs": [told(token_id, tops) for token_id, tops in listed]}


class CompletionLogprobs:
    """Makes `logprobs` of one choice of a text completion, in pieces or at once.

    Parameters
    ----------
    top : int
        How many of the most probable tokens are told; the token that was chosen always is.
    tokenizer : Tokenizer
    skips_special : bool
        Special tokens are not in the text.
    """

    def __init__(self, top: int, tokenizer: Tokenizer, skips_special: bool) -> None:
        self._top, self._tokenizer, self._skips_special = top, tokenizer, skips_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0  # characters of the text so far

    def add(self, tokens: Sequence[TokenLogprob]) -> dict[str, list[Any]]:
        """Return the log-probabilities of the next tokens, in the lists of OpenAI's completions."""
        result: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, logprob, tops in tokens:
            data = self._tokenizer.token_bytes(token_id)
            best = None if tops is None else dict(list(tops.items())[: self._top])
            if best is not None and logprob is not None:  # as OpenAI has it: the chosen token, however improbable
                best.setdefault(token_id, logprob)
            result["tokens"].append(_token_name(data))
            result["token_logprobs"].append(None if logprob is None else _finite(logprob))
            result["top_logprobs"].append(
                None
                if best is None
                else {_token_name(self._tokenizer.token_bytes(other)): _finite(value) for other, value in best.items()}
            )
            result["text_offset"].append(self._offset)
            if not (self._skips_special and self._tokenizer.is_special(token_id)):
                self._offset += len(self._decoder.decode(data))
        return result


def _token_name(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:  # a part of a character: as OpenAI shows it
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    """JSON has no infinity; the number is OpenAI's for what cannot be."""
    return max(logprob, -9999.0)


def finish_reason(reason: str | None, num_calls: int) -> str | None:
    """By OpenAI's names."""
    return "tool_calls" if reason == "stop" and num_calls else reason
