"""/rerank, /score and /classify: documents in the order of a query, pairs of texts, labels of texts.

The forms are vLLM's; that of /rerank is also Cohere's and Jina's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infinilm.calls.rerank import ranked
from infinilm.outputs import Classification
from infinilm.pooling.labels import SCORE_ACTIVATIONS
from infinilm.pooling.recipe import text_rules
from infinilm.requests.prompts import PromptDict
from infinilm.server.answers import new_id
from infinilm.server.bodies import (
    ApiError,
    Body,
    Kind,
    UnknownFields,
    anything,
    boolean,
    integer,
    list_of,
    one_of,
    some_text,
    text,
)
from infinilm.server.embeddings import list_answer, take_truncation, usage_of
from infinilm.server.sampling import HARMLESS
from infinilm.server.service import PROMPTS, Service, bad_request

__all__ = [
    "ClassifyCall",
    "PairCall",
    "classified",
    "read_classify",
    "read_rerank",
    "read_score",
    "reranked",
    "scored",
]

_MAX_INPUTS = 2048
_DOCUMENT = {
    "anyOf": [
        text.schema,
        {"type": "object", "properties": {"text": text.schema}, "required": ["text"], "additionalProperties": False},
    ]
}
_DOCUMENTS: Kind[object] = Kind(anything.check, {"type": "array", "items": _DOCUMENT, "maxItems": _MAX_INPUTS})
_TEXTS = list_of(some_text, _MAX_INPUTS)


@dataclass(slots=True)
class PairCall:
    """A checked request for scores of pairs of texts."""

    pairs: list[PromptDict]
    model: str
    activation: str | None = None
    top_n: int | None = None
    returns_documents: bool = True

    @property
    def num_tokens(self) -> int:
        """Tokens of all pairs."""
        return sum(len(_ids(pair)) for pair in self.pairs)


@dataclass(slots=True)
class ClassifyCall:
    """A checked request for labels of some texts."""

    prompts: list[list[int]]
    activation: str | None
    model: str

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts."""
        return sum(map(len, self.prompts))


def _take_activation(body: Body) -> str | None:
    """What scores go through; None: what the model says. vLLM's `use_activation` says whether they do at all."""
    activation = body.take("activation", one_of(*SCORE_ACTIVATIONS))
    is_used = body.take("use_activation", boolean)
    if activation is not None and is_used is not None:
        raise ApiError("use_activation: leave it out where activation is given", param="use_activation")
    return "identity" if is_used is False else activation


def _ids(pair: PromptDict) -> Sequence[int]:
    ids: Any = pair["prompt_token_ids"]
    return ids  # type: ignore[no-any-return]


def read_rerank(service: Service, values: Mapping[str, Any], unknown: UnknownFields | None = None) -> PairCall:
    """Check a body and tokenise its texts; runs outside the event loop. Raises ApiError that names the field."""
    body = Body(values, unknown=unknown)
    model = service.check_model(body.take("model", text))
    query = body.need("query", some_text)
    given = body.need("documents", _DOCUMENTS)
    top_n = body.take("top_n", integer(0)) or None  # 0 means all, as in vLLM
    returns_documents = body.take("return_documents", boolean)
    instruction = body.take("instruction", some_text)
    activation = _take_activation(body)
    truncate = take_truncation(body)
    body.skip(*HARMLESS)
    body.finish()
    documents = _texts_of(given)
    with bad_request("documents"):
        pairs = service.llm.read_pairs(query, documents, instruction=instruction, truncate=truncate)
    return PairCall(pairs, model, activation, top_n, returns_documents is not False)


def _texts_of(given: object) -> list[str]:
    if not isinstance(given, list) or not 1 <= len(given) <= _MAX_INPUTS:
        raise ApiError(f"documents: expected a list of 1 to {_MAX_INPUTS} texts", param="documents")
    texts: list[str] = []
    for i, item in enumerate(given):
        if isinstance(item, dict):
            inner = Body(item, f"documents[{i}].")
            texts.append(inner.need("text", some_text))
            inner.finish()
        else:
            texts.append(some_text(f"documents[{i}]", item))
    return texts


def read_score(service: Service, values: Mapping[str, Any], unknown: UnknownFields | None = None) -> PairCall:
    """As `read_rerank`: each text of `text_1` with the one of `text_2` at its place, or one of them with all."""
    body = Body(values, unknown=unknown)
    model = service.check_model(body.take("model", text))
    queries, documents = body.need("text_1", _TEXTS), body.need("text_2", _TEXTS)
    instruction = body.take("instruction", some_text)
    activation = _take_activation(body)
    truncate = take_truncation(body)
    body.skip(*HARMLESS)
    body.finish()
    count = len(documents)
    if not queries or not count or len(queries) not in (1, count):
        raise ApiError(
            f"text_1: expected one text, or one for each of text_2 ({count}), got {len(queries)}", param="text_1"
        )
    read = service.llm.read_pairs
    with bad_request("text_2"):
        if len(queries) == 1:
            pairs = read(queries[0], documents, instruction=instruction, truncate=truncate)
            return PairCall(pairs, model, activation)
        pairs = []
        for query, document in zip(queries, documents, strict=True):
            pairs += read(query, [document], instruction=instruction, truncate=truncate)
    return PairCall(pairs, model, activation)


def read_classify(service: Service, values: Mapping[str, Any], unknown: UnknownFields | None = None) -> ClassifyCall:
    """Check a body and tokenise its texts; runs outside the event loop. Raises ApiError that names the field."""
    body = Body(values, unknown=unknown)
    model = service.check_model(body.take("model", text))
    given = body.need("input", PROMPTS)
    activation = _take_activation(body)
    truncate = take_truncation(body)
    body.skip(*HARMLESS)
    body.finish()
    with bad_request("model"):
        service.llm.check_labels(activation)
    prompts = service.prompts("input", given, _MAX_INPUTS, rules=text_rules(truncate))
    return ClassifyCall(prompts, activation, model)


def reranked(call: PairCall, scores: Sequence[float]) -> dict[str, Any]:
    """The answer of /rerank."""
    documents = ranked(scores, call.pairs, call.top_n)
    return {
        "id": new_id("rerank-"),
        "model": call.model,
        "usage": usage_of(call.num_tokens),
        "results": [
            {
                "index": one.index,
                **({"document": {"text": one.document}} if call.returns_documents else {}),
                "relevance_score": one.score,
            }
            for one in documents
        ],
    }


def scored(call: PairCall, scores: Sequence[float]) -> dict[str, Any]:
    """The answer of /score."""
    data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
    return list_answer("score-", call.model, call.num_tokens, data)


def classified(call: ClassifyCall, results: Sequence[Classification]) -> dict[str, Any]:
    """The answer of /classify."""
    data = [
        {"index": i, "label": result.label, "probs": list(result.scores), "num_classes": len(result.labels)}
        for i, result in enumerate(results)
    ]
    return list_answer("classify-", call.model, call.num_tokens, data)
