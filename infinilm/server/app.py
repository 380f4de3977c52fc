"""The routes of the server, as an ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from functools import partial
from typing import Any, NoReturn, TypeVar

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from infinilm.calls import AsyncRequests
from infinilm.errors import EngineDeadError, did_you_mean
from infinilm.sampling_params import SamplingParams
from infinilm.server.adapters import load_adapter, unload_adapter
from infinilm.server.answers import AnswerStream, sent_event
from infinilm.server.blocks import BlockBuilder, BlockStream
from infinilm.server.bodies import ApiError, UnknownFields, text
from infinilm.server.chat import ChatCall, ChatStream, read_chat, whole_chat
from infinilm.server.completions import CompletionStream, read_completion, whole_completion
from infinilm.server.embeddings import EmbeddingCall, embeddings, pooled, read_embedding
from infinilm.server.guard import IGNORED_FIELDS, REQUEST_ID, App, Guard, Message, Receive, Send, error_event
from infinilm.server.host import HostedModel, ModelHost
from infinilm.server.messages import read_message
from infinilm.server.metrics import render
from infinilm.server.openapi import description
from infinilm.server.page import chat_page
from infinilm.server.prefixes import PREFILL, PREFIXES_AT, give_segment, kept, prefill_params, prefix_fields
from infinilm.server.rankings import (
    PairCall,
    classified,
    read_classify,
    read_rerank,
    read_score,
    reranked,
    scored,
)
from infinilm.server.records import NO_HANDLER
from infinilm.server.replica import Resumption, identity
from infinilm.server.responses import read_response
from infinilm.server.service import Service, bad_request
from infinilm.server.silence import ping, without_silence
from infinilm.server.structured import relaxed_header
from infinilm.server.tokens import detokenize, tokenize
from infinilm.tiers import PREFIXES

__all__ = ["handler_of", "make_app"]

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # as JSON writes them

# Bytes. Longer bodies are read in threads, beside the event loop. Short ones are not: where many requests come at once,
# threads that all want the interpreter take several times as long as the reading itself.
_SHORT_BODY = 2048
_LONG_BODY = 1 << 18  # longer ones are read one after the other, so that a few of them do not take all memory
_LAST_SECONDS = 10.0  # for the end of a stream that failed

T = TypeVar("T")
Handler = Callable[[Service, Request], Awaitable[Response]]  # of a request to one model
HostHandler = Callable[[ModelHost, Request], Awaitable[Response]]  # of one to the server
Reader = Callable[[Service, dict[str, Any], UnknownFields], T]  # of the JSON of a body


def make_app(host: ModelHost) -> App:
    """The application that serves the models of a host."""
    first = host.first

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        path, request = scope["path"], Request(scope, receive)
        _check_route(scope["method"], path, first.settings.page)
        if path not in _OF_MODELS:
            of_server = _OF_SERVER.get(path, _page if path == "/" else _model)
            if path.startswith(PREFIXES):
                of_server = give_segment
            answer = await of_server(host, request)
            await answer(scope, receive, send)
            return
        host.check_open()
        unknown = request.state.unknown = first.unknown_fields(path)
        await request.body()  # behind which `receive` tells that the client leaves, also while it waits for its model
        name = None if host.is_alone else await _asked_model(host, request)
        async with host.lease(name, receive) as service:
            answer_of = _prefill if PREFILL in request.headers and path in _PROMPTS_OF else _OF_MODELS[path]
            answer = await answer_of(service, request)
            if unknown.ignored:
                answer.headers[IGNORED_FIELDS] = first.tell_ignored(path, unknown.ignored)
            await answer(scope, receive, send)

    return Guard(app, first.settings, lambda *_: first.keys, handler_of, first.ended)


async def _asked_model(host: ModelHost, request: Request) -> str | None:
    """The name of the model that the body of a request asks for; None: it names none.

    A long body is parsed here and once more by who reads it: two parsed bodies would take much memory while one waits.
    """
    if request.method != "POST":
        return None

    def read() -> str | None:
        name = _parsed(data).get("model")
        return None if name is None else text("model", name)

    data = await request.body()
    if len(data) <= _SHORT_BODY:
        return read()
    return await asyncio.get_running_loop().run_in_executor(_reader_of(host.first, data), read)


def handler_of(path: str) -> str:
    """The name of the route that a path has, for metrics; `NO_HANDLER` if it has none."""
    for begin, name in ((_MODEL_PATH, "model"), (PREFIXES, "key")):
        if path.startswith(begin):
            return f"{begin}{{{name}}}"
    return path if path in _PATHS or path == "/" else NO_HANDLER


def _check_route(method: str, path: str, has_page: bool) -> None:
    """ApiError: nothing answers such a request."""
    taken = _PATHS.get(path)
    if path.startswith((_MODEL_PATH, PREFIXES)) or (path == "/" and has_page):
        taken = "GET"
    if taken is None:
        raise ApiError(f"there is no {path} here{_hint(path)}", 404)
    if method != taken and (method, taken) != ("HEAD", "GET"):
        allowed = "GET, HEAD" if taken == "GET" else taken
        raise ApiError(f"{path} does not take {method}", 405, headers={"Allow": allowed})


def _hint(path: str) -> str:
    """The end of a message, for who left out or doubled the /v1 of the address, or put it where there is none."""
    name = "/" + path.strip("/").removeprefix("v1/").removeprefix("v1/")
    near = [known for known in (f"/v1{name}", name) if known in _PATHS and known != path]
    return f"; did you mean {near[0]!r}?" if near else did_you_mean(path, _PATHS)


# ---- generation ----


async def _chat(service: Service, request: Request) -> Response:
    call, part = await _read(service, request, _resumable(request, "chatcmpl-", read_chat))
    prompts = [call.prompt_token_ids]
    part.check(prompts, call.params, call.is_stream)
    if call.is_stream:
        return _Stream(
            service, prompts, call.params, lambda running: ChatStream(service, call, running, part.head), part
        )
    return await _whole(service, request, prompts, call.params, lambda running: whole_chat(service, call, running))


async def _completion(service: Service, request: Request) -> Response:
    call, part = await _read(service, request, _resumable(request, "cmpl-", read_completion))
    part.check(call.prompts, call.params, call.is_stream)
    if call.is_stream:
        return _Stream(
            service,
            call.prompts,
            call.params,
            lambda running: CompletionStream(service, call, running, part.head),
            part,
        )
    return await _whole(
        service, request, call.prompts, call.params, lambda running: whole_completion(service, call, running)
    )


async def _response(service: Service, request: Request) -> Response:
    call, builder = await _read(service, request, read_response)
    return await _blocks(service, request, call, builder, Resumption({}, {}, ""))


async def _message(service: Service, request: Request) -> Response:
    # The id of a message is in its first event alone.
    (call, builder), part = await _read(service, request, _resumable(request, "", read_message))
    return await _blocks(service, request, call, builder, part)


async def _count_tokens(service: Service, request: Request) -> Response:
    call, _ = await _read(service, request, partial(read_message, counts_only=True))
    return JSONResponse({"input_tokens": len(call.prompt_token_ids)})


async def _embeddings(service: Service, request: Request) -> Response:
    return await _vectors(service, request, embeddings)


async def _pooling(service: Service, request: Request) -> Response:
    return await _vectors(service, request, pooled)


async def _vectors(
    service: Service, request: Request, answer: Callable[[EmbeddingCall, Any], dict[str, Any]]
) -> Response:
    call = await _read(service, request, read_embedding)
    llm, adapter = service.llm, service.adapter_of(call.model)
    work = partial(llm.aembed, call.given, **call.settings, lora=adapter)
    return await _at_once(service, request, call.num_tokens, "input", work, partial(answer, call))


async def _rerank(service: Service, request: Request) -> Response:
    return await _pairs(service, request, read_rerank, reranked)


async def _score(service: Service, request: Request) -> Response:
    return await _pairs(service, request, read_score, scored)


async def _pairs(
    service: Service,
    request: Request,
    read: Reader[PairCall],
    answer: Callable[[PairCall, list[float]], dict[str, Any]],
) -> Response:
    call = await _read(service, request, read)
    adapter = service.adapter_of(call.model)
    work = partial(service.llm.ascore_pairs, call.pairs, activation=call.activation, lora=adapter)
    return await _at_once(service, request, call.num_tokens, "documents", work, partial(answer, call))


async def _classify(service: Service, request: Request) -> Response:
    call = await _read(service, request, read_classify)
    adapter = service.adapter_of(call.model)
    work = partial(service.llm.aclassify, call.prompts, activation=call.activation, lora=adapter)
    return await _at_once(service, request, call.num_tokens, "input", work, partial(classified, call))


async def _at_once(
    service: Service,
    request: Request,
    num_tokens: int,
    param: str,
    work: Callable[[], Awaitable[T]],
    answer: Callable[[T], dict[str, Any]],
) -> Response:
    """Answer with what comes of `work`, about prompts of so many tokens in the field `param`."""

    async def response() -> Response:
        with bad_request(param):
            result = await work()
        service.metrics.count_prompts(num_tokens)
        return await asyncio.to_thread(lambda: _LongAnswer(answer(result)))  # many vectors take time

    with service.admitted(num_tokens):
        return await service.attended(request.receive, response())


class _LongAnswer(JSONResponse):
    """An object whose lists may be long, such as those of many vectors.

    Entries are written one by one, since `json` keeps all other threads from running until it is done, also the one
    that runs steps.
    """

    def render(self, content: dict[str, Any]) -> bytes:
        write = partial(json.dumps, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        parts = [
            f"{write(key)}:" + (f"[{','.join(map(write, value))}]" if isinstance(value, list) else write(value))
            for key, value in content.items()
        ]
        return f"{{{','.join(parts)}}}".encode()


async def _blocks(
    service: Service, request: Request, call: ChatCall, builder: BlockBuilder, part: Resumption
) -> Response:
    prompts = [call.prompt_token_ids]
    part.check(prompts, call.params, call.is_stream)
    if call.is_stream:
        path = request.scope["path"]
        return _Stream(service, prompts, call.params, lambda running: BlockStream(builder, call, running), part, path)
    return await _whole(
        service, request, prompts, call.params, lambda running: builder.whole(call, running.outputs()[0])
    )


async def _prefill(service: Service, request: Request) -> Response:
    """Compute the prompts of a request and keep them, for another server that is to answer it."""
    prompts, params = await _read(service, request, _PROMPTS_OF[request.scope["path"]])
    await _whole(service, request, prompts, prefill_params(params), lambda _: {})
    return await kept(service, prompts)


async def _whole(
    service: Service,
    request: Request,
    prompts: list[list[int]],
    params: SamplingParams,
    answer: Callable[[AsyncRequests], dict[str, Any]],
) -> Response:
    """Run to the end, and answer at once."""
    at = request.headers.get(PREFIXES_AT)
    async with service.running(prompts, params, ends_only=True, prefixes_at=at) as running:

        async def work() -> Response:
            for output in await running.wait():
                for choice in output.outputs:
                    if choice.error is not None:
                        raise choice.error
            return JSONResponse(answer(running), headers=relaxed_header(params.constraint))

        return await service.attended(request.receive, work())


class _Stream(Response):
    """Server-sent events, one response by the rules of ASGI. What is wrong with the request is said before they begin.

    Parameters
    ----------
    service : Service
    prompts : list of lists of int
    params : SamplingParams
    answer : callable
        Makes the `AnswerStream` of requests that run.
    part : Resumption
        Which part of the answer it is.
    path : str
        If the events have types, where they are sent: errors have the form of that API, and the last event ends the
        stream. Otherwise `[DONE]` does.
    """

    def __init__(
        self,
        service: Service,
        prompts: list[list[int]],
        params: SamplingParams,
        answer: Callable[[AsyncRequests], AnswerStream],
        part: Resumption,
        path: str = "",
    ) -> None:
        super().__init__(
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **relaxed_header(params.constraint)},
        )
        del self.headers["content-length"]
        self._service, self._prompts, self._params, self._answer = service, prompts, part.params(params), answer
        self._part, self._path = part, path

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Run the requests and send what they give."""
        given, at = self._part.token_ids, Headers(scope=scope).get(PREFIXES_AT)
        async with self._service.running(
            self._prompts, self._params, ends_only=False, given=given, prefixes_at=at
        ) as running:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                end = await self._service.attended(receive, self._send_all(running, send))
                await send({"type": "http.response.body", "body": end.encode()})
            except ApiError as error:
                end = sent_event(error_event(error, self._path, scope.get(REQUEST_ID)))
                if error.status != 503:  # it would fail anywhere: a router is told of an end
                    end = self._part.marked(end, running)
                try:
                    await asyncio.wait_for(send({"type": "http.response.body", "body": end.encode()}), _LAST_SECONDS)
                except asyncio.TimeoutError:  # such as the time of one that does not read
                    raise ClientDisconnect from None

    async def _send_all(self, running: AsyncRequests, send: Any) -> str:
        """Send all events but the last, which are returned: they go out with the end of the answer."""
        part = self._part

        async def put(text: str) -> None:
            body = part.marked(text, running).encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})

        stream = self._answer(running)
        begin, given = "".join(stream.begin()), running.given()
        last = ""
        async with without_silence(put, ping(self._path), self._service.settings.sse_ping_interval) as put_next:
            if begin and not part.continues:
                await put_next(begin)
            async for deltas in running.deltas(self._service.rest):
                if given:  # the client has this; it is not pushed before, as the prompt may have had to be scored
                    deque(stream.push(given), maxlen=0)
                    given = []
                text = "".join(stream.push(deltas))
                part.note(deltas)
                if running.has_ended:
                    last = text
                elif text:
                    await put_next(text)
        return part.marked("".join([last, *stream.end(), "" if self._path else "data: [DONE]\n\n"]), running)


async def _read(
    service: Service, request: Request, read: Reader[T], *, is_slow: bool = False, long_reader: Executor | None = None
) -> T:
    """What `read` makes of the JSON object that a request carries.

    Short bodies are read at once, others in a thread, since templates and tokenizers take time, and long ones after
    each other, in `long_reader` (default: that of the service). `is_slow`: short ones take time, too.
    """
    _ = service.llm  # an error, if nothing can be served
    data = await request.body()

    def work() -> T:
        return read(service, _parsed(data), request.state.unknown)

    if len(data) <= _SHORT_BODY and not is_slow:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_reader_of(service, data, long_reader), work)


def _reader_of(service: Service, data: bytes, long_reader: Executor | None = None) -> Executor | None:
    """Where a body is read that is not short; None: in any thread."""
    return (long_reader or service.long_reader) if len(data) > _LONG_BODY else None


def _resumable(request: Request, prefix: str, read: Reader[T]) -> Reader[tuple[T, Resumption]]:
    """A reader that also finds out which part of the answer is asked for; `prefix`: that of `Resumption`."""

    def read_both(service: Service, values: dict[str, Any], unknown: UnknownFields) -> tuple[T, Resumption]:
        part = Resumption(request.headers, values, prefix)
        return read(service, values, unknown), part

    return read_both


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        values = json.loads(data, parse_constant=_no_json, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON: {error}") from error
    if _SURROGATE.search(data):  # may be one half of a pair, which is no text
        try:
            json.dumps(values, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ApiError(f"the body holds a lone surrogate, which is no valid Unicode: {error.reason}") from error
    if not isinstance(values, dict):
        raise ApiError(f"the body must be a JSON object, got {type(values).__name__}")
    return values


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a body. One of two values of a field would be ignored, and clients do not agree which."""
    values = dict(pairs)
    if len(values) < len(pairs):
        most_common = Counter(name for name, _ in pairs).most_common(1)
        name = most_common[0][0][:100].encode(errors="backslashreplace").decode()  # halves of surrogates are no text
        raise ApiError(f"{name!r} is there more than once in one JSON object; send it once", param=name)
    return values


def _no_json(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


# ---- the rest of a model ----


async def _load_adapter(service: Service, request: Request) -> Response:
    return await _change_adapters(service, request, load_adapter)


async def _unload_adapter(service: Service, request: Request) -> Response:
    return await _change_adapters(service, request, unload_adapter)


async def _change_adapters(service: Service, request: Request, change: Reader[str]) -> Response:
    try:
        told = await _read(service, request, change, is_slow=True)
    except EngineDeadError as error:
        raise service.failed(error) from error
    service.identity = None  # the answers of an adapter are part of it
    return PlainTextResponse(told)


async def _tokenize(service: Service, request: Request) -> Response:
    return await _tokens(service, request, tokenize)


async def _detokenize(service: Service, request: Request) -> Response:
    return await _tokens(service, request, detokenize)


async def _tokens(service: Service, request: Request, convert: Reader[dict[str, Any]]) -> Response:
    """Answer what is about tokens alone, in a thread, and never before one who waits for an answer of the model."""
    return JSONResponse(await _read(service, request, convert, is_slow=True, long_reader=service.long_tokenizer))


async def _tokenizer_info(service: Service, _: Request) -> Response:
    """As vLLM's, which lm-eval's remote tokenizer asks for: special tokens and the chat template."""
    llm = service.llm
    return JSONResponse(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",  # of transformers, which reads the same files
            **llm.tokenizer.special_tokens,
            "chat_template": llm.chat_template.source_text(False) or None,
            "model_max_length": llm.max_model_len,
        }
    )


# ---- the server ----


def _model_entry(model: HostedModel, name: str) -> dict[str, Any]:
    service, base = model.service, model.name
    model.learn()
    return {
        "id": name,
        "object": "model",
        "type": "model",  # this and the next two are Anthropic's
        "display_name": name,
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(service.created)),
        "created": service.created,
        "owned_by": "infinilm",
        "root": base,
        **({"parent": base} if service.adapter_of(name) is not None else {}),
        "max_model_len": model.max_model_len,
        "task": model.task,
        "input_modalities": ["text", "image"] if model.reads_images else ["text"],  # by OpenRouter's name
        "status": model.status(),
    }


async def _models(host: ModelHost, _: Request) -> Response:
    host.check_open()
    names = host.model_names
    entries = [_model_entry(host.find(name), name) for name in names]
    return JSONResponse(
        {"object": "list", "data": entries, "has_more": False, "first_id": names[0], "last_id": names[-1]}
    )


async def _model(host: ModelHost, request: Request) -> Response:
    host.check_open()
    name = request.scope["path"].removeprefix(_MODEL_PATH)
    return JSONResponse(_model_entry(host.find(name), name))


async def _health(host: ModelHost, _: Request) -> Response:
    state = host.state()
    return JSONResponse({"status": state}, 200 if state == "ok" else 503)


async def _live(host: ModelHost, _: Request) -> Response:
    """Whether the process should be left alone, also while it loads or drains; /health tells if it is of use."""
    state = host.state()
    return JSONResponse({"status": state}, 503 if state == "dead" else 200)


async def _replica(host: ModelHost, _: Request) -> Response:
    """For routers."""
    if not host.is_alone:
        raise ApiError("this server has several models; a router is for servers of one", 404)
    service = host.first
    llm = service.llm  # an error, if nothing can be served
    if service.identity is None:
        work = asyncio.to_thread(identity, llm, service.model_names, service.version)
        service.identity = asyncio.ensure_future(work)
    try:
        found = await asyncio.shield(service.identity)  # once, however often it is asked meanwhile
    except EngineDeadError as error:
        raise service.failed(error) from error
    except Exception:
        service.identity = None  # the next request tries again
        raise
    return JSONResponse({"instance": service.instance, **found, **await asyncio.to_thread(prefix_fields, service)})


async def _openapi(host: ModelHost, _: Request) -> Response:
    """A description of all this for programs; it is made when it is asked for, since readers of bodies are asked."""
    taken = {**_PATHS, f"{_MODEL_PATH}{{model}}": "GET"}
    async with host.lease(None) if host.state() == "ok" else contextlib.nullcontext(host.first) as service:
        return JSONResponse(await asyncio.to_thread(description, service, taken))


async def _version(host: ModelHost, _: Request) -> Response:
    return JSONResponse({"version": host.first.version})


async def _metrics(host: ModelHost, _: Request) -> Response:
    each = [model.service.metrics.look(model.service.engine_metrics()) for model in host.models]
    body = render([*each, host.first.metrics.http, *host.collectors])
    return Response(body, media_type="text/plain; version=0.0.4; charset=utf-8")


async def _page(_: ModelHost, request: Request) -> Response:
    page = chat_page()
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers = {**page.headers, "Content-Encoding": "gzip"}
        return Response(page.gzipped, media_type="text/html; charset=utf-8", headers=headers)
    return Response(page.html, media_type="text/html; charset=utf-8", headers=page.headers)


def _of_chat(call: ChatCall) -> tuple[list[list[int]], SamplingParams]:
    return [call.prompt_token_ids], call.params


_MODEL_PATH = "/v1/models/"  # and a name
_OF_MODELS: Mapping[str, Handler] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/v1/responses": _response,
    "/v1/messages": _message,
    "/v1/messages/count_tokens": _count_tokens,
    "/v1/embeddings": _embeddings,
    "/pooling": _pooling,
    "/v1/rerank": _rerank,
    "/v2/rerank": _rerank,  # Cohere's
    "/v1/score": _score,
    "/classify": _classify,
    "/v1/load_lora_adapter": _load_adapter,
    "/v1/unload_lora_adapter": _unload_adapter,
    "/tokenize": _tokenize,
    "/detokenize": _detokenize,
    "/tokenizer_info": _tokenizer_info,
}
_PROMPTS_OF: Mapping[str, Reader[tuple[list[list[int]], SamplingParams]]] = {  # of those that a router divides
    "/v1/chat/completions": lambda *of: _of_chat(read_chat(*of)),
    "/v1/completions": lambda *of: ((call := read_completion(*of)).prompts, call.params),
    "/v1/responses": lambda *of: _of_chat(read_response(*of)[0]),
    "/v1/messages": lambda *of: _of_chat(read_message(*of)[0]),
}
_OF_SERVER: Mapping[str, HostHandler] = {
    "/v1/models": _models,
    "/health": _health,
    "/ping": _health,
    "/live": _live,
    "/replica": _replica,
    "/version": _version,
    "/openapi.json": _openapi,
    "/metrics": _metrics,
}
_PATHS: Mapping[str, str] = {  # and the method that each takes
    path: "GET" if path in (*_OF_SERVER, "/tokenizer_info") else "POST" for path in (*_OF_MODELS, *_OF_SERVER)
}
