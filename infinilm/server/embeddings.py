"""/v1/embeddings and /pooling: texts in, vectors of the model at hand out."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm.pooling.recipe import POOLINGS
from infinilm.requests.prompts import PromptDict
from infinilm.server.answers import new_id
from infinilm.server.bodies import ApiError, Body, UnknownFields, boolean, integer, one_of, some_text, text
from infinilm.server.sampling import HARMLESS
from infinilm.server.service import PROMPTS, Service, bad_request

__all__ = ["EmbeddingCall", "embeddings", "list_answer", "pooled", "read_embedding", "take_truncation", "usage_of"]

_MAX_INPUTS = 2048  # as OpenAI's


@dataclass(slots=True)
class EmbeddingCall:
    """A checked request for vectors of some texts.

    Attributes
    ----------
    prompts : list of lists of int
    num_unpooled : list of int
        How many of the first tokens of each are left out of the pooling.
    settings : mapping
        Keywords of `LLM.aembed`.
    is_base64 : bool
    model : str
    """

    prompts: list[list[int]]
    num_unpooled: list[int]
    settings: Mapping[str, Any]
    is_base64: bool
    model: str

    @property
    def given(self) -> list[PromptDict]:
        """What `LLM.aembed` takes."""
        return [
            {"prompt_token_ids": ids, "num_unpooled_tokens": count}
            for ids, count in zip(self.prompts, self.num_unpooled, strict=True)
        ]

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts."""
        return sum(map(len, self.prompts))


def take_truncation(body: Body) -> bool | int:
    """What `truncate_prompt_tokens` asks for, as vLLM has it: -1 for as many as the model takes."""
    most = body.take("truncate_prompt_tokens", integer(-1))
    if most == 0:
        raise ApiError("truncate_prompt_tokens: expected -1 or at least 1, got 0", param="truncate_prompt_tokens")
    return False if most is None else True if most == -1 else most


def read_embedding(service: Service, values: Mapping[str, Any], unknown: UnknownFields | None = None) -> EmbeddingCall:
    """Check a body and tokenise its texts; runs outside the event loop. Raises ApiError that names the field."""
    body = Body(values, unknown=unknown)
    model = service.check_model(body.take("model", text))
    given = body.need("input", PROMPTS)
    form = body.take("encoding_format", one_of("float", "base64"))
    settings: dict[str, Any] = {
        "pooling": body.take("pooling", one_of(*POOLINGS)),
        "normalize": body.take("normalize", boolean),
        "dimensions": body.take("dimensions", integer(1)),
    }
    is_used = body.take("use_activation", boolean)  # vLLM's word for the scaling of vectors
    if is_used is not None:
        if settings["normalize"] is not None:
            raise ApiError("use_activation: leave it out where normalize is given", param="use_activation")
        settings["normalize"] = is_used
    prompt_name = body.take("prompt_name", some_text)
    truncate = take_truncation(body)
    body.skip(*HARMLESS)
    body.finish()
    with bad_request("model" if settings["dimensions"] is None else "dimensions"):
        service.llm.check_vectors(**settings)
    with bad_request("prompt_name"):
        rules = service.llm.vectors.recipe.rules(prompt_name, truncate)
    prompts = service.prompts("input", given, _MAX_INPUTS, rules=rules)
    limit = min(rules.max_tokens or service.llm.max_model_len, service.llm.max_model_len)
    for i, ids in enumerate(prompts):
        if len(ids) > limit:
            raise ApiError(
                f"input {i} has {len(ids)} tokens; the context of this server holds {limit}: shorten it",
                code="context_length_exceeded",
                param="input",
                details={"n_prompt_tokens": len(ids), "n_ctx": limit},
            )
    items = given if isinstance(given, list) and len(given) == len(prompts) else [given]
    of_prefix = 0 if rules.pools_prefix else service.tokenizer.num_prefix_tokens(rules.prefix)
    num_unpooled = [of_prefix if isinstance(item, str) else 0 for item in items]
    return EmbeddingCall(prompts, num_unpooled, settings, form == "base64", model)


def _encoded(call: EmbeddingCall, vectors: npt.NDArray[np.float32]) -> list[Any]:
    if not call.is_base64:
        listed: list[Any] = vectors.tolist()
        return listed
    return [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]


def list_answer(prefix: str, model: str, num_tokens: int, data: list[dict[str, Any]]) -> dict[str, Any]:
    """An answer in vLLM's form; `prefix`: of its id."""
    return {
        "id": new_id(prefix),
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": data,
        "usage": usage_of(num_tokens),
    }


def usage_of(num_tokens: int) -> dict[str, int]:
    """The usage of a call that writes nothing."""
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def embeddings(call: EmbeddingCall, vectors: npt.NDArray[np.float32]) -> dict[str, Any]:
    """The answer; takes time for many vectors, [num_prompts, size]."""
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(_encoded(call, vectors))
        ],
        "model": call.model,
        "usage": usage_of(call.num_tokens),
    }


def pooled(call: EmbeddingCall, vectors: npt.NDArray[np.float32]) -> dict[str, Any]:
    """The answer of /pooling, in vLLM's form."""
    data = [{"object": "pooling", "index": i, "data": vector} for i, vector in enumerate(_encoded(call, vectors))]
    return list_answer("pool-", call.model, call.num_tokens, data)
