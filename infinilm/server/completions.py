"""/v1/completions: texts or token ids in, their continuation out; also log-probabilities of given texts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infinilm.calls import AsyncRequests
from infinilm.outputs import CompletionOutput, Delta, RequestOutput
from infinilm.sampling_params import SamplingParams
from infinilm.server.answers import (
    ChunkWriter,
    CompletionLogprobs,
    TokenLogprob,
    by_choice,
    new_id,
    timings,
    told_prompt_logprobs,
    usage,
)
from infinilm.server.bodies import ApiError, Body, UnknownFields, boolean, integer, text
from infinilm.server.sampling import (
    MAX_TOP_LOGPROBS,
    StreamOptions,
    make_params,
    take_prompt_logprobs,
    take_sampling,
    take_stream_options,
)
from infinilm.server.service import PROMPTS, Service
from infinilm.server.structured import take_constraint

__all__ = ["CompletionCall", "CompletionStream", "read_completion", "whole_completion"]

_DEFAULT_LENGTH = 16  # tokens, as OpenAI's, whatever a model's generation_config.json says
_MAX_PROMPTS = 1024
_MAX_CHOICES = 4096  # of all prompts together


@dataclass(slots=True)
class CompletionCall:
    """A checked request for completions of some prompts."""

    prompts: list[list[int]]
    params: SamplingParams
    echo: bool
    scores_only: bool  # max_tokens 0: the prompt itself is all that is wanted
    logprobs: int | None
    is_stream: bool
    stream_options: StreamOptions
    return_token_ids: bool
    prompt_logprobs: int | None
    tells_timings: bool
    model: str

    def timings(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The field of the answer, if it was asked for."""
        return {"timings": timings(outputs)} if self.tells_timings else {}

    def logprobs_maker(self, service: Service) -> CompletionLogprobs:
        """One for each choice."""
        return CompletionLogprobs(self.logprobs or 0, service.tokenizer, self.params.skip_special_tokens)


def read_completion(
    service: Service, values: Mapping[str, Any], unknown: UnknownFields | None = None
) -> CompletionCall:
    """Check a body and tokenise its prompts; runs outside the event loop. Raises ApiError that names the field."""
    llm, body = service.llm, Body(values, unknown=unknown)
    model = service.check_model(body.take("model", text))
    special = body.take("add_special_tokens", boolean)
    given = body.need("prompt", PROMPTS)
    echo = bool(body.take("echo", boolean))
    top = body.take("logprobs", integer(0, MAX_TOP_LOGPROBS))
    is_stream = bool(body.take("stream", boolean))
    stream_options = take_stream_options(body, is_stream)
    return_token_ids = bool(body.take("return_token_ids", boolean))
    prompt_logprobs = take_prompt_logprobs(body, is_stream)
    tells_timings = bool(body.take("timings_per_token", boolean))
    body.refuse("suffix", "no model that is known here fills in a middle", "")
    best_of = body.take("best_of", integer(1))
    scores_only = values.get("max_tokens") == 0
    if scores_only and not echo:
        raise ApiError("max_tokens: 0 needs echo: true; there is nothing to answer with", param="max_tokens")
    sampling, constraint = take_sampling(body), take_constraint(body)
    body.finish()
    if scores_only and sampling.keywords.get("return_receipt"):
        told = "return_receipt: receipts are of answers, and max_tokens: 0 asks for none"
        raise ApiError(told, param="return_receipt")
    prompts = service.prompts("prompt", given, _MAX_PROMPTS, special is not False)
    room = service.room(max(map(len, prompts)) - (1 if scores_only else 0), "prompt")
    keywords = sampling.within(_DEFAULT_LENGTH, room)
    n = keywords.get("n", llm.default_sampling_params.n)
    if best_of not in (None, n):
        raise ApiError("best_of is not supported: it must be n, or left out", param="best_of")
    if len(prompts) * n > _MAX_CHOICES:
        raise ApiError(f"n: expected at most {_MAX_CHOICES} answers to all prompts together", param="n")
    if scores_only:
        keywords["max_tokens"] = 1  # not told: a request has at least one token
    if constraint is not None and not scores_only:
        keywords["constraint"] = constraint
    keywords["lora"] = service.adapter_of(model)
    if top is not None:
        keywords["logprobs"] = top
    of_prompt = [count for count in (prompt_logprobs, top if echo else None) if count is not None]
    if of_prompt:
        keywords["prompt_logprobs"] = max(of_prompt)
    return CompletionCall(
        prompts,
        make_params(llm.default_sampling_params, keywords),
        echo,
        scores_only,
        top,
        is_stream,
        stream_options,
        return_token_ids,
        prompt_logprobs,
        tells_timings,
        model,
    )


def whole_completion(service: Service, call: CompletionCall, running: AsyncRequests) -> dict[str, Any]:
    """The answer of completions that have ended."""
    outputs = running.outputs()
    choices = [_choice(service, call, i, o, c) for i, o in enumerate(outputs) for c in o.outputs]
    return {**_head(service, call), "choices": choices, "usage": _usage(call, outputs), **call.timings(outputs)}


def _head(service: Service, call: CompletionCall) -> dict[str, Any]:
    return {
        "id": new_id("cmpl-"),
        "object": "text_completion",
        "created": int(time.time()),
        "model": call.model,
        "system_fingerprint": service.fingerprint,
    }


def _choice(
    service: Service, call: CompletionCall, index: int, output: RequestOutput, choice: CompletionOutput
) -> dict[str, Any]:
    answer = "" if call.scores_only else choice.text
    ids = [] if call.scores_only else list(choice.token_ids)
    before = _echoed(service, call, output)
    logprobs = None
    if call.logprobs is not None:
        tokens = _prompt_tokens(call, output)
        tokens += [(t, tops[t], tops) for t, tops in zip(ids, choice.logprobs or (), strict=False)]
        logprobs = call.logprobs_maker(service).add(tokens)
    return {
        "index": index * call.params.n + choice.index,
        "text": before + answer,
        "logprobs": logprobs,
        "finish_reason": "length" if call.scores_only else choice.finish_reason,
        "stop_reason": None if call.scores_only else choice.stop_reason,  # vLLM's
        **({"token_ids": ids, "prompt_token_ids": list(output.prompt_token_ids)} if call.return_token_ids else {}),
        **told_prompt_logprobs(output, call.prompt_logprobs, service.token_bytes),
        **service.told_receipt(choice.receipt),
    }


def _echoed(service: Service, call: CompletionCall, output: RequestOutput) -> str:
    """The text before an answer."""
    if not call.echo:
        return ""
    skips_special = call.params.skip_special_tokens
    return service.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=skips_special)


def _prompt_tokens(call: CompletionCall, output: RequestOutput) -> list[TokenLogprob]:
    """Log-probabilities of the text before an answer."""
    if not call.echo:
        return []
    listed = zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True)
    return [(token_id, None if tops is None else tops[token_id], tops) for token_id, tops in listed]


class CompletionStream:
    """The chunks of a stream, an `AnswerStream`."""

    def __init__(
        self, service: Service, call: CompletionCall, running: AsyncRequests, head: Mapping[str, Any] | None = None
    ) -> None:
        """`head`: fields that all chunks share and that others have chosen, such as the id."""
        self._service, self._call, self._running = service, call, running
        self._writer = ChunkWriter(_head(service, call) | dict(head or {}), call.stream_options.include_usage)
        self._num_tokens: dict[int, int] = {}  # of each choice, so far
        self._makers: dict[int, CompletionLogprobs | None] = {}  # of choices that have begun
        self._is_plain = call.logprobs is None and not (call.return_token_ids or call.scores_only)

    def begin(self) -> Iterator[str]:
        """Nothing: a choice begins with its first text."""
        return iter(())

    def push(self, deltas: Sequence[Delta]) -> Iterator[str]:
        """A chunk for each choice that has something new."""
        call = self._call
        for index, delta in by_choice(deltas, call.params.n):
            if call.stream_options.continuous_usage_stats:
                num_new = 0 if call.scores_only else len(delta.token_ids)
                self._num_tokens[index] = self._num_tokens.get(index, 0) + num_new
                self._writer.count(len(call.prompts[delta.index]), self._num_tokens[index])
            if self._is_plain and delta.finish_reason is None and index in self._makers:
                if delta.text:
                    yield self._writer.text(index, '"text":', delta.text)
                continue
            reason = delta.finish_reason
            piece = "" if call.scores_only else delta.text
            tokens: list[TokenLogprob] = []
            given: dict[str, Any] = {}
            if call.logprobs is not None and not call.scores_only:
                tokens = [(t, tops[t], tops) for t, tops in zip(delta.token_ids, delta.top_logprobs, strict=True)]
            if call.return_token_ids:
                given["token_ids"] = [] if call.scores_only else delta.token_ids
            begins = index not in self._makers
            if begins:
                self._makers[index] = call.logprobs_maker(self._service) if call.logprobs is not None else None
            if begins and (call.echo or call.return_token_ids):
                output = self._running.outputs()[delta.index]
                piece = _echoed(self._service, call, output) + piece
                if call.logprobs is not None:
                    tokens = _prompt_tokens(call, output) + tokens
                if call.return_token_ids:
                    given["prompt_token_ids"] = list(output.prompt_token_ids)
            maker = self._makers[index]
            logprobs = maker.add(tokens) if maker is not None and tokens else None
            if not (piece or reason or logprobs or given):
                continue
            if reason:
                given["stop_reason"] = None if call.scores_only else delta.stop_reason
                given |= self._service.told_receipt(delta.receipt)
            reason = "length" if call.scores_only and reason else reason
            choice = {"index": index, "text": piece, "logprobs": logprobs, "finish_reason": reason, **given}
            yield self._writer.chunk(choice)

    def end(self) -> Iterator[str]:
        """The usage, if it was asked for."""
        if self._call.stream_options.include_usage:
            outputs = self._running.outputs()
            yield self._writer.usage(_usage(self._call, outputs), self._call.timings(outputs))


def _usage(call: CompletionCall, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    counted = usage(outputs)
    if call.scores_only:  # the token behind the prompt is not told
        counted |= {"completion_tokens": 0, "total_tokens": counted["prompt_tokens"]}
    return counted
