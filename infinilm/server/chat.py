"""/v1/chat/completions: a conversation in, an answer out, whole or as a stream."""

from __future__ import annotations

import codecs
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from infinilm.calls import AsyncRequests
from infinilm.outputs import AnswerPiece, Delta, RequestOutput
from infinilm.sampling_params import SamplingParams
from infinilm.server.answers import (
    ChoiceMaker,
    ChunkWriter,
    by_choice,
    chat_logprobs,
    finish_reason,
    new_id,
    timings,
    told_prompt_logprobs,
    usage,
)
from infinilm.server.bodies import (
    ApiError,
    Body,
    Kind,
    UnknownFields,
    boolean,
    described,
    integer,
    list_of,
    mapping,
    one_of,
    some_text,
    text,
)
from infinilm.server.sampling import (
    MAX_TOP_LOGPROBS,
    StreamOptions,
    make_params,
    take_prompt_logprobs,
    take_sampling,
    take_stream_options,
)
from infinilm.server.service import Service, bad_request
from infinilm.server.structured import (
    answer_constraint,
    as_prompted,
    take_constraint,
    take_tool_choice,
    take_tools,
)
from infinilm.server.thinking import take_thinking
from infinilm.text.answers import AnswerFormat
from infinilm.text.reasoning import num_reasoning
from infinilm.text.tokenizer import Tokenizer
from infinilm.text.tool_calls import PLAIN_CALLS

__all__ = ["ChatCall", "ChatStream", "chat_pieces", "read_chat", "take_ending", "whole_chat"]


MESSAGES = Kind(
    list_of(mapping).check,
    {"type": "array", "items": {"type": "object", "properties": {"role": text.schema}, "required": ["role"]}},
)
"""The messages of a conversation, whose other fields its template reads."""


@dataclass(slots=True)
class ChatCall:
    """A checked request for a chat completion."""

    prompt: str
    prompt_token_ids: list[int]
    params: SamplingParams
    tools: list[Mapping[str, Any]]
    answers: AnswerFormat  # as the template and the request have it
    hidden: frozenset[str]  # special tokens that are in the text and are not told
    is_named: bool  # the client named the function to call
    top_logprobs: int | None
    is_stream: bool
    stream_options: StreamOptions
    return_token_ids: bool
    prompt_logprobs: int | None
    tells_timings: bool
    model: str
    tokenizer: Tokenizer

    def makers(self) -> list[ChoiceMaker]:
        """One for each choice."""
        return [self.answers.maker(self.prompt, self.tools, self.hidden) for _ in range(self.params.n)]

    def usage(self, output: RequestOutput) -> dict[str, Any]:
        """Tokens of the prompt and of the answers, so far."""
        marks, count = self.answers.reasoning, 0
        if marks is not None:
            texts = [self._texts(choice.token_ids) for choice in output.outputs]
            count = sum(num_reasoning(self.prompt, marks, pieces) for pieces in texts)
        return usage([output], count)

    def timings(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The field of the answer, if it was asked for."""
        return {"timings": timings(outputs)} if self.tells_timings else {}

    def _texts(self, token_ids: Sequence[int]) -> Iterator[str]:
        """What each token adds to the text in which the reasoning is looked for."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token_id in token_ids:
            is_hidden = self.params.skip_special_tokens and self.tokenizer.is_special(token_id)
            yield "" if is_hidden else decoder.decode(self.tokenizer.token_bytes(token_id))


def read_chat(
    service: Service,
    values: Mapping[str, Any],
    unknown: UnknownFields | None = None,
    names: Mapping[str, str] | None = None,
) -> ChatCall:
    """Check a body and render its conversation; runs outside the event loop, as templates and tokenizers take time.

    `unknown`: what becomes of fields that are not known. `names`: what another API calls fields of this one, by regular
    expressions of their names here. Raises ApiError that names the field.
    """

    def named(ours: str) -> str:
        """The name of a field as the client knows it."""
        for pattern, theirs in (names or {}).items():
            if match := re.match(rf"{pattern}(?!\w)", ours):
                return match.expand(theirs) + ours[match.end() :]
        return ours

    unknown = unknown or UnknownFields()
    try:
        return _read_chat(service, Body(values, unknown=unknown), unknown, named)
    except ApiError as error:
        param, message = error.param or "", error.message
        name = named(param)
        if name == param:
            raise
        if message.startswith(param):
            message = name + message[len(param) :]
        raise error.about(message, name) from None


def _read_chat(service: Service, body: Body, unknown: UnknownFields, named: Callable[[str], str]) -> ChatCall:
    llm = service.llm
    model = service.check_model(body.take("model", text))
    messages = body.need("messages", MESSAGES)
    choice = take_tool_choice(body, take_tools(body))
    constraint = take_constraint(body, named("response_format"))
    parallel = body.take("parallel_tool_calls", boolean)
    thinking = take_thinking(body)
    kwargs = body.take("chat_template_kwargs", mapping) or {}
    ending = take_ending(body)
    is_stream = bool(body.take("stream", boolean))
    stream_options = take_stream_options(body, is_stream)
    wants_logprobs = bool(body.take("logprobs", boolean))
    top = body.take("top_logprobs", integer(0, MAX_TOP_LOGPROBS))
    if top is not None and not wants_logprobs:
        raise ApiError("top_logprobs needs logprobs: true", param="top_logprobs")
    return_token_ids = bool(body.take("return_token_ids", boolean))
    prompt_logprobs = take_prompt_logprobs(body, is_stream)
    tells_timings = bool(body.take("timings_per_token", boolean))
    body.refuse("audio", "this server makes text")
    body.refuse("modalities", "this server makes text", ["text"])
    body.refuse("web_search_options", "this server searches nothing")
    body.refuse("moderation", "this server judges nothing")
    body.refuse("functions", "it is the old name of tools; use tools", [])
    body.refuse("function_call", "it is the old name of tool_choice; use tool_choice", "none", "auto")
    body.refuse("include_reasoning", "the reasoning is always told", True)
    # SGLang's and llama.cpp's, which may leave an answer undivided.
    body.refuse("separate_reasoning", "the reasoning is always apart", True)
    body.refuse("stream_reasoning", "the reasoning comes as it is written", True)
    body.refuse("parse_tool_calls", "tool_choice: 'none' leaves calls in the text", True)
    prediction = take_prediction(body)
    sampling = take_sampling(body)
    body.finish()

    tools = as_prompted(choice.tools)
    with bad_request("messages"):
        if not llm.chat_template:
            llm.render_chat([])  # its error says whether a template is what is missing
        control = llm.chat_template.thinking(bool(tools))
    kwargs = thinking.variables(control, unknown, named) | kwargs
    prompt, ids = service.render(messages, tools or None, ending, kwargs)
    template = llm.chat_template.source_text(bool(tools))
    answers = AnswerFormat.of(template, has_tools=bool(choice.allowed))
    form = answers.calls
    if choice.allowed and form is None:
        if not choice.is_forced:
            raise ApiError(
                f"tools: the chat template of {model} (of the format {answers.chat.name}) teaches no way to call them "
                "that is known here; a call can be forced with tool_choice",
                param="tools",
            )
        form = PLAIN_CALLS
    is_single = parallel is False or choice.is_named or answers.is_single
    constraint = answer_constraint(
        service,
        constraint,
        choice,
        form,
        prompt,
        reasoning=answers.reasoning,
        several=not is_single,
        has_channels=answers.chat.has_channels,
    )
    if constraint is not None and ending["continue_final_message"]:
        raise ApiError(
            f"{constraint.name} cannot be combined with a last message that is continued: it holds for a whole answer",
            param=constraint.name,
        )
    if form is not None and constraint is not None:
        form = form.as_json()  # so that no call gets past the grammar
    answers = replace(answers, calls=form, is_single=is_single)
    room = service.room(len(ids), "messages")
    keywords = sampling.within(llm.default_sampling_params.max_tokens, room)
    keywords["lora"] = service.adapter_of(model)
    if wants_logprobs:
        keywords["logprobs"] = top or 0
    if prompt_logprobs is not None:
        keywords["prompt_logprobs"] = prompt_logprobs
    if constraint is not None:
        keywords["constraint"] = constraint
    if prediction is not None:
        keywords["prediction"] = prediction
    hidden: frozenset[str] = frozenset()
    if "skip_special_tokens" not in keywords and answers.needs_special_tokens(llm.tokenizer):
        keywords["skip_special_tokens"], hidden = False, answers.hidden(llm.tokenizer)
    return ChatCall(
        prompt=prompt,
        prompt_token_ids=ids,
        params=make_params(llm.default_sampling_params, keywords),
        tools=choice.used,
        answers=answers,
        hidden=hidden,
        is_named=choice.is_named,
        top_logprobs=(top or 0) if wants_logprobs else None,
        is_stream=is_stream,
        stream_options=stream_options,
        return_token_ids=return_token_ids,
        prompt_logprobs=prompt_logprobs,
        tells_timings=tells_timings,
        model=model,
        tokenizer=llm.tokenizer,
    )


def take_ending(body: Body) -> dict[str, bool]:
    """How the prompt of a conversation ends, in vLLM's words. ApiError: an answer is to begin and to go on."""
    begins = body.take("add_generation_prompt", boolean)
    goes_on = bool(body.take("continue_final_message", boolean))
    if begins and goes_on:
        raise ApiError(
            "continue_final_message cannot be combined with add_generation_prompt: true, which begins a new message",
            param="continue_final_message",
        )
    return {"add_generation_prompt": begins is not False, "continue_final_message": goes_on}


def take_prediction(body: Body) -> str | None:
    """The text that the answer will largely repeat, OpenAI's predicted outputs; None: there is none."""
    prediction = body.given("prediction")
    if prediction is None:
        return None
    prediction.need("type", one_of("content"))
    content = prediction.need("content", predicted_text)
    prediction.finish()
    return content


@described({"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "object"}}]})
def predicted_text(name: str, value: object) -> str:
    """A string, or the joined strings of a list of text parts; it is not empty."""
    if not isinstance(value, list):
        return some_text(name, value)
    parts = [Body(mapping(f"{name}[{i}]", part), f"{name}[{i}].") for i, part in enumerate(value)]
    texts = []
    for part in parts:
        part.need("type", one_of("text"))
        texts.append(part.need("text", text))
        part.finish()
    return some_text(name, "".join(texts))


def whole_chat(service: Service, call: ChatCall, running: AsyncRequests) -> dict[str, Any]:
    """The answer of a chat that has ended."""
    (output,) = running.outputs()
    choices = []
    for choice, maker in zip(output.outputs, call.makers(), strict=True):
        piece = maker.push(choice.text, final=True)
        message: dict[str, Any] = {"role": "assistant", "content": piece.content or None, "refusal": None}
        if call.answers.reasoning is not None:
            message |= {"reasoning_content": piece.reasoning, "reasoning": piece.reasoning}
        if calls := piece.tool_calls:
            message["tool_calls"] = [{key: value for key, value in call.items() if key != "index"} for call in calls]
        else:
            message["content"] = piece.content
        logprobs = None
        if call.top_logprobs is not None:
            tokens = [(t, tops[t], tops) for t, tops in zip(choice.token_ids, choice.logprobs or (), strict=True)]
            logprobs = chat_logprobs(tokens, call.top_logprobs, service.token_bytes)
        choices.append(
            {
                "index": choice.index,
                "message": message,
                "logprobs": logprobs,
                "finish_reason": finish_reason(choice.finish_reason, 0 if call.is_named else maker.num_calls),
                "stop_reason": choice.stop_reason,  # vLLM's
                **({"token_ids": list(choice.token_ids)} if call.return_token_ids else {}),
                **service.told_receipt(choice.receipt),
            }
        )
    return {
        "id": new_id("chatcmpl-"),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": call.model,
        "choices": choices,
        "usage": call.usage(output),
        "service_tier": None,
        "system_fingerprint": service.fingerprint,
        **({"prompt_token_ids": call.prompt_token_ids} if call.return_token_ids else {}),
        **told_prompt_logprobs(output, call.prompt_logprobs, service.token_bytes),
        **call.timings([output]),
    }


def chat_pieces(makers: Sequence[ChoiceMaker], deltas: Sequence[Delta]) -> Iterator[tuple[int, AnswerPiece, Delta]]:
    """The new text of the choices: index, piece, and its source. Raises the error that makes one fail."""
    for index, delta in by_choice(deltas, len(makers)):
        yield index, makers[index].push(delta.text, final=delta.finish_reason is not None), delta


class ChatStream:
    """The chunks of a stream, an `AnswerStream`."""

    def __init__(
        self, service: Service, call: ChatCall, running: AsyncRequests, head: Mapping[str, Any] | None = None
    ) -> None:
        """`head`: fields that all chunks share and that others have chosen, such as the id."""
        self._service, self._call, self._running = service, call, running
        self._makers = call.makers()
        shared = {
            "id": new_id("chatcmpl-"),
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": call.model,
            "system_fingerprint": service.fingerprint,
        }
        self._writer = ChunkWriter(shared | dict(head or {}), call.stream_options.include_usage)
        self._num_tokens = [0] * len(self._makers)  # of each choice, so far

    def _chunk(
        self,
        index: int,
        delta: Mapping[str, Any],
        *,
        reason: str | None = None,
        of_choice: Mapping[str, Any] | None = None,
        of_chunk: Mapping[str, Any] | None = None,
    ) -> str:
        """A piece of a choice; `of_choice` and `of_chunk`: more fields of either."""
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason, **(of_choice or {})}
        return self._writer.chunk(choice, of_chunk)

    def _count(self, index: int, num_new: int) -> None:
        if self._call.stream_options.continuous_usage_stats:
            self._num_tokens[index] += num_new
            self._writer.count(len(self._call.prompt_token_ids), self._num_tokens[index])

    def begin(self) -> Iterator[str]:
        """The role of each choice."""
        prompt = {"prompt_token_ids": self._call.prompt_token_ids} if self._call.return_token_ids else None
        for index in range(len(self._makers)):
            self._count(index, 0)
            yield self._chunk(index, {"role": "assistant", "content": ""}, of_chunk=None if index else prompt)

    def push(self, deltas: Sequence[Delta]) -> Iterator[str]:
        """A chunk for each choice that has something new, and one for its end."""
        call = self._call
        for index, piece, made_of in chat_pieces(self._makers, deltas):
            self._count(index, len(made_of.token_ids))
            more: dict[str, Any] = {}
            if call.top_logprobs is not None and made_of.token_ids:
                tokens = [(t, tops[t], tops) for t, tops in zip(made_of.token_ids, made_of.top_logprobs, strict=True)]
                more["logprobs"] = chat_logprobs(tokens, call.top_logprobs, self._service.token_bytes)
            if call.return_token_ids:
                more["token_ids"] = made_of.token_ids
            if len(piece.parts) == 1 and piece.parts[0].kind == "content" and not more:
                yield self._writer.text(index, '"delta":{"content":', piece.parts[0].text, "}")
            elif piece or more:
                delta: dict[str, Any] = {}
                if (content := piece.content) or not piece:
                    delta["content"] = content
                if reasoning := piece.reasoning:
                    delta |= {"reasoning_content": reasoning, "reasoning": reasoning}
                if calls := piece.tool_calls:
                    delta["tool_calls"] = calls
                yield self._chunk(index, delta, of_choice=more)
            if made_of.finish_reason is not None:
                # OpenAI ends an answer that is a call by name like a text.
                num_calls = 0 if call.is_named else self._makers[index].num_calls
                reason = finish_reason(made_of.finish_reason, num_calls)
                ended = {"stop_reason": made_of.stop_reason, **self._service.told_receipt(made_of.receipt)}
                yield self._chunk(index, {}, reason=reason, of_choice=ended)

    def end(self) -> Iterator[str]:
        """The usage, if it was asked for."""
        if self._call.stream_options.include_usage:
            output = self._running.outputs()[0]
            yield self._writer.usage(self._call.usage(output), self._call.timings([output]))
