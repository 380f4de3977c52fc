"""/openapi.json: what the server takes and gives, in OpenAPI 3.1.

Fields of bodies are those that the readers of bodies ask for, with the schema of the `Kind` by which each is checked:
every reader is run on a small example, and tells its fields as it reads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from infinilm.server.adapters import load_adapter, unload_adapter
from infinilm.server.bodies import ApiError, UnknownFields
from infinilm.server.chat import read_chat
from infinilm.server.completions import read_completion
from infinilm.server.embeddings import read_embedding
from infinilm.server.guard import OPEN_PATHS, error_body
from infinilm.server.messages import read_message
from infinilm.server.rankings import read_classify, read_rerank, read_score
from infinilm.server.responses import read_response
from infinilm.server.service import Service
from infinilm.server.tokens import detokenize, tokenize

__all__ = ["description"]

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Route:
    """What is told of a route.

    Attributes
    ----------
    summary : str
    answer : mapping of str to JSON schema
        Fields of its answer, all of which are there; none: a text.
    reader : callable, optional
        Reads its body; None: it has none.
    examples : tuple of mapping
        Bodies that the reader reads all its fields of.
    is_stream : bool
        A body with `stream: true` is answered by server-sent events.
    """

    summary: str
    answer: Mapping[str, Json]
    reader: Callable[..., Any] | None = None
    examples: tuple[Mapping[str, Any], ...] = ()
    is_stream: bool = False


_TEXT, _NUMBER, _LIST, _OBJECT = ({"type": kind} for kind in ("string", "integer", "array", "object"))
_OF_CHOICES = {"id": _TEXT, "object": _TEXT, "created": _NUMBER, "model": _TEXT, "choices": _LIST, "usage": _OBJECT}
_OF_LISTS = {"id": _TEXT, "object": _TEXT, "created": _NUMBER, "model": _TEXT, "data": _LIST, "usage": _OBJECT}
_STATUS = {"status": {"enum": ["ok", "loading", "draining", "dead"]}}
_HI = {"messages": [{"role": "user", "content": "Hi"}]}
_ADAPTER = {"lora_name": "\n", "lora_path": "none"}  # a name that no adapter has or gets
_THINKING = {"reasoning": {"effort": "low"}, "thinking": {"type": "enabled"}}

_RERANK = _Route(
    "Order documents by how well they answer a query",
    {"id": _TEXT, "model": _TEXT, "usage": _OBJECT, "results": _LIST},
    read_rerank,
    ({"query": "q", "documents": ["d"]},),
)
_ROUTES: Mapping[str, _Route] = {
    "/v1/chat/completions": _Route(
        "Answer a conversation", _OF_CHOICES, read_chat, ({**_HI, **_THINKING, "stream_options": {}},), True
    ),
    "/v1/completions": _Route("Continue texts", _OF_CHOICES, read_completion, ({"prompt": [0]},), True),
    "/v1/responses": _Route(
        "Answer a conversation, in OpenAI's newer form",
        {"id": _TEXT, "object": _TEXT, "created_at": _NUMBER, "status": _TEXT, "output": _LIST, "usage": _OBJECT},
        read_response,
        ({"input": "Hi"},),
        True,
    ),
    "/v1/messages": _Route(
        "Answer a conversation, in Anthropic's form",
        {"id": _TEXT, "type": _TEXT, "role": _TEXT, "model": _TEXT, "content": _LIST, "usage": _OBJECT},
        read_message,
        ({**_HI, "max_tokens": 1},),
        True,
    ),
    "/v1/messages/count_tokens": _Route(
        "Count the tokens of a conversation", {"input_tokens": _NUMBER}, partial(read_message, counts_only=True), (_HI,)
    ),
    "/v1/embeddings": _Route(
        "Make vectors of texts",
        {"object": _TEXT, "data": _LIST, "model": _TEXT, "usage": _OBJECT},
        read_embedding,
        ({"input": [0]},),
    ),
    "/pooling": _Route("Make vectors of texts, in vLLM's form", _OF_LISTS, read_embedding, ({"input": [0]},)),
    "/v1/rerank": _RERANK,
    "/v2/rerank": _RERANK,
    "/v1/score": _Route("Score pairs of texts", _OF_LISTS, read_score, ({"text_1": "q", "text_2": "d"},)),
    "/classify": _Route("Score the labels of texts", _OF_LISTS, read_classify, ({"input": [0]},)),
    "/v1/models": _Route("List the model and its adapters", {"object": _TEXT, "data": _LIST}),
    "/v1/models/{model}": _Route("Describe one of them", {"id": _TEXT, "object": _TEXT, "max_model_len": _NUMBER}),
    "/v1/load_lora_adapter": _Route("Load an adapter, where --lora-folder allows it", {}, load_adapter, (_ADAPTER,)),
    "/v1/unload_lora_adapter": _Route("Unload an adapter", {}, unload_adapter, (_ADAPTER,)),
    "/tokenize": _Route(
        "Turn a prompt, or messages, into token ids",
        {"count": _NUMBER, "max_model_len": _NUMBER, "tokens": _LIST},
        tokenize,
        ({"prompt": "Hi"}, _HI),
    ),
    "/detokenize": _Route("Turn token ids into a text", {"prompt": _TEXT}, detokenize, ({"tokens": [0]},)),
    "/tokenizer_info": _Route(
        "Special tokens and chat template", {"tokenizer_class": _TEXT, "model_max_length": _NUMBER}
    ),
    "/health": _Route("Whether requests are served", _STATUS),
    "/ping": _Route("The same", _STATUS),
    "/live": _Route("Whether the process should be left alone", _STATUS),
    "/replica": _Route("Who this server is, for routers", {"instance": _TEXT, "parts": _OBJECT}),
    "/version": _Route("The version of infinilm", {"version": _TEXT}),
    "/openapi.json": _Route("This description", {"openapi": _TEXT, "info": _OBJECT, "paths": _OBJECT}),
    "/metrics": _Route("Metrics for Prometheus", {}),
}

_OF_EVERY_ROUTE = {
    401: "the key is missing or wrong",
    403: "the Host, or what is asked for, is not allowed",
    408: "the request did not arrive in time",
    431: "the headers are too large",
    500: "the request failed",
    503: "the server loads, drains or is dead: see Retry-After",
}
_OF_BODIES = {
    400: "the body, or a field of it, is wrong: see `param`",
    404: "there is no such model",
    413: "the body is too large",
    415: "the content type is not application/json, or the content encoding is not known",
    429: "the queue is full: see Retry-After",
    504: "the time limit is over",
}


class _Reading(UnknownFields):
    """Keeps what readers of a body ask for.

    Attributes
    ----------
    fields : dict of str to JSON schema
        By names such as "thinking.type".
    needed : set of str
    """

    def __init__(self) -> None:
        super().__init__()
        self.fields: dict[str, Json] = {}
        self.needed: set[str] = set()

    def read(self, name: str, schema: Mapping[str, Any], *, is_needed: bool = False) -> None:
        """Keep a field; what asks first speaks for the route, what asks later for a route that it is like."""
        if name not in self.fields:
            self.fields[name] = dict(schema)
            if is_needed:
                self.needed.add(name)


def description(service: Service, taken: Mapping[str, str]) -> Json:
    """The document; `taken`: the paths that there are, with the method that each takes."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "infinilm", "version": service.version, "summary": "The API of OpenAI, and more"},
        "paths": {path: {method.lower(): _operation(service, path)} for path, method in taken.items()},
        "components": {
            "schemas": {"Error": _error_schema("/v1/models"), "MessagesError": _error_schema("/v1/messages")},
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(service: Service, path: str) -> Json:
    route = _ROUTES[path]
    schema: Json = {"type": "object", "properties": dict(route.answer), "required": list(route.answer)}
    content: Json = {"application/json": {"schema": schema}} if route.answer else {"text/plain": {"schema": _TEXT}}
    if route.is_stream:
        content["text/event-stream"] = {"schema": _TEXT}
    told: Json = {"summary": route.summary, "responses": {"200": {"description": "the answer", "content": content}}}
    if "{model}" in path:
        told["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": _TEXT}]
    if route.reader is not None:
        body = {"schema": _body_schema(service, path, route)}
        told["requestBody"] = {"required": True, "content": {"application/json": body}}
    if service.keys and path not in OPEN_PATHS:
        told["security"] = [{"key": []}, {"x-api-key": []}]
    name = "MessagesError" if path.startswith("/v1/messages") else "Error"
    failed = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    statuses = _OF_EVERY_ROUTE | (_OF_BODIES if route.reader is not None else {404: "there is no such model"})
    for status, meaning in sorted(statuses.items()):
        told["responses"][str(status)] = {"description": meaning, "content": failed}
    return told


def _body_schema(service: Service, path: str, route: _Route) -> Json:
    fields: dict[str, Json] = {}
    always: set[str] | None = None
    for example in route.examples:
        assert route.reader is not None
        reading = _Reading()
        with contextlib.suppress(ApiError):  # such as that of a model without a chat template: the fields were read
            route.reader(service, example, reading)
        fields = reading.fields | fields
        always = reading.needed if always is None else always & reading.needed
    is_lenient = service.unknown_fields(path).is_lenient
    whole: Json = {"type": "object", "properties": {}, "additionalProperties": is_lenient}
    for name, schema in fields.items():
        *outer, last = name.split(".")
        place = whole
        for part in outer:
            place = place["properties"].setdefault(part, {"type": "object"})
            place.setdefault("properties", {})
        is_needed = name in (always or ())
        place["properties"][last] = schema if is_needed or not schema.keys() - {"description"} else _or_null(schema)
        if is_needed:
            place.setdefault("required", []).append(last)
    return whole


def _or_null(schema: Json) -> Json:
    """A field that need not be said; null is not said."""
    null: Json = {"type": "null"}
    return {**schema, "anyOf": [*schema["anyOf"], null]} if "anyOf" in schema else {"anyOf": [schema, null]}


def _error_schema(path: str) -> Json:
    """The schema of the errors of a route, by the form that one has."""
    details = {
        "message": _TEXT,
        "type": _TEXT,
        "param": {"type": ["string", "null"]},
        "code": {"type": ["string", "null"]},
    }
    inner = {"type": "object", "properties": details, "required": list(details)}
    body = error_body(ApiError(""), path, "id")
    return {
        "type": "object",
        "properties": {name: inner if name == "error" else _TEXT for name in body},
        "required": [name for name in body if name != "request_id"],
    }
