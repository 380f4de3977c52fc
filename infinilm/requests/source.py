"""`RequestSource`: the requests of a call, made one by one when there is room for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from infinilm.requests.request import GenerationRequest, PromptRequest

__all__ = ["AnyRequest", "RequestSource"]

AnyRequest = TypeVar("AnyRequest", GenerationRequest, PromptRequest)


@dataclass(slots=True)
class RequestSource(Generic[AnyRequest]):
    """The requests of a call.

    Attributes
    ----------
    requests : iterator of GenerationRequest or PromptRequest
        In the order of the prompts. Taking the next one reads its prompt, unless all prompts have been read before.
    total : int or None
        Number of all sequences; None: it is not known before the last request is made.
    room : int
        Sequences that may be open at the same time.
    """

    requests: Iterator[AnyRequest]
    total: int | None
    room: int
