"""/v1/embeddings: texts in, vectors of the model at hand out."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from infinilm.server.bodies import ApiError, Body, anything, one_of, text
from infinilm.server.sampling import HARMLESS
from infinilm.server.service import Service, bad_request

__all__ = ["embed"]

_MAX_INPUTS = 2048  # as OpenAI's


def embed(service: Service, values: Mapping[str, Any]) -> dict[str, Any]:
    """Check a body and answer it; runs outside the event loop. Raises ApiError that names the field."""
    body = Body(values)
    model = service.check_model(body.need("model", text))
    prompts = service.prompts("input", body.need("input", anything), _MAX_INPUTS)
    form = body.take("encoding_format", one_of("float", "base64"))
    pooling = body.take("pooling", one_of("mean", "last")) or "mean"
    body.refuse("dimensions", "the vectors are those of the model, whole")
    body.skip(*HARMLESS)
    body.finish()
    limit = service.llm.max_model_len
    for i, ids in enumerate(prompts):
        if len(ids) > limit:
            raise ApiError(
                f"input {i} has {len(ids)} tokens; the context of this server holds {limit}: shorten it",
                code="context_length_exceeded",
                param="input",
            )
    with bad_request("input"):
        vectors = service.llm.embed(prompts, pooling)
    num_tokens = sum(map(len, prompts))
    listed: list[Any] = vectors.tolist()
    if form == "base64":
        listed = [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(listed)],
        "model": model,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
