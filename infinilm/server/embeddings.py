"""/v1/embeddings: texts in, vectors of the model at hand out."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm.server.bodies import ApiError, Body, UnknownFields, one_of, text
from infinilm.server.sampling import HARMLESS
from infinilm.server.service import PROMPTS, Service

__all__ = ["EmbeddingCall", "embeddings", "read_embedding"]

_MAX_INPUTS = 2048  # as OpenAI's


@dataclass(slots=True)
class EmbeddingCall:
    """A checked request for vectors of some texts."""

    prompts: list[list[int]]
    pooling: str
    is_base64: bool
    model: str

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts."""
        return sum(map(len, self.prompts))


def read_embedding(service: Service, values: Mapping[str, Any], unknown: UnknownFields | None = None) -> EmbeddingCall:
    """Check a body and tokenise its texts; runs outside the event loop. Raises ApiError that names the field."""
    body = Body(values, unknown=unknown)
    model = service.check_model(body.take("model", text))
    given = body.need("input", PROMPTS)
    form = body.take("encoding_format", one_of("float", "base64"))
    pooling = body.take("pooling", one_of("mean", "last")) or "mean"
    body.refuse("dimensions", "the vectors are those of the model, whole")
    body.skip(*HARMLESS)
    body.finish()
    prompts = service.prompts("input", given, _MAX_INPUTS)
    limit = service.llm.max_model_len
    for i, ids in enumerate(prompts):
        if len(ids) > limit:
            raise ApiError(
                f"input {i} has {len(ids)} tokens; the context of this server holds {limit}: shorten it",
                code="context_length_exceeded",
                param="input",
                details={"n_prompt_tokens": len(ids), "n_ctx": limit},
            )
    return EmbeddingCall(prompts, pooling, form == "base64", model)


def embeddings(call: EmbeddingCall, vectors: npt.NDArray[np.float32]) -> dict[str, Any]:
    """The answer; takes time for many vectors, [num_prompts, hidden_size]."""
    listed: list[Any] = vectors.tolist()
    if call.is_base64:
        listed = [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(listed)],
        "model": call.model,
        "usage": {"prompt_tokens": call.num_tokens, "total_tokens": call.num_tokens},
    }
