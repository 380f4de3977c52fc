"""What a router in front of several servers needs of each: who it is, and streams that another one can go on with.

A router that asks for it (`RESUMABLE`, a header) is told with every piece of a stream which tokens that piece is made
of, in comments, which clients of event streams pass over. If the server is lost, the router sends the request to
another one with the tokens that have arrived (`CONTINUE`, a field), and is sent the rest of the stream: what a token is
depends on the tokens before it and the seed alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from infinilm.calls import AsyncRequests
from infinilm.llm import LLM
from infinilm.outputs import Delta
from infinilm.sampling_params import SamplingParams
from infinilm.server.answers import new_id
from infinilm.server.bodies import ApiError, Body, integer, list_of, mapping, text

__all__ = ["CONTINUE", "RESUMABLE", "Resumption", "identity"]

RESUMABLE = "x-infinilm-resumable"
CONTINUE = "continue_from"

_NUM_PROBED = 16  # tokens


class Resumption:
    """How one stream can be gone on with, or begins in its middle.

    Parameters
    ----------
    headers : mapping of str to str
        Headers of the request.
    values : dict
        Its body, which loses the field `CONTINUE`.
    prefix : str
        The beginning of the ids of such answers; "": its events have no id, or the builder of the answer makes it.

    Attributes
    ----------
    head : dict
        Fields that all events of the stream share, where they are not left to who makes the events.
    continues : bool
        Another server has sent the beginning.
    token_ids : list of int
        What that was made of.
    """

    def __init__(self, headers: Mapping[str, str], values: dict[str, Any], prefix: str) -> None:
        self._is_told = RESUMABLE in headers
        self.head: dict[str, Any] = {}
        self.token_ids: list[int] = []
        self.continues = self._is_told and CONTINUE in values
        self._seed: int | None = None
        self._new: list[int] = []
        self._has_begun = False
        if self.continues:
            body = Body(mapping(CONTINUE, values.pop(CONTINUE)), f"{CONTINUE}.")
            self.token_ids = body.need("token_ids", list_of(integer(0)))
            self._seed = body.need("seed", integer(0, 2**64 - 1))
            self.head = {"id": body.take("id", text), "created": body.take("created", integer(0))}
            self.head = {name: value for name, value in self.head.items() if value is not None}
            body.finish()
        elif self._is_told and prefix:
            self.head = {"id": new_id(prefix), "created": int(time.time())}

    def check(self, prompts: Sequence[Sequence[int]], params: SamplingParams, is_stream: bool) -> None:
        """Tell nothing of answers that cannot be gone on with; ApiError if this is to go on with such."""
        if is_stream and len(prompts) == params.n == 1:
            return
        if self.continues:
            raise ApiError(f"{CONTINUE} needs a stream of one answer", param=CONTINUE)
        self._is_told = False

    def params(self, params: SamplingParams) -> SamplingParams:
        """With the seed of the server that began."""
        return params if self._seed is None else dataclasses.replace(params, seed=self._seed)

    def note(self, deltas: Sequence[Delta]) -> None:
        """Take in what the next piece is made of."""
        if self._is_told:
            self._new += [token_id for delta in deltas for token_id in delta.token_ids]

    def marked(self, piece: str, running: AsyncRequests) -> str:
        """A piece of the stream with what the router is told of it: a line before the first, and one behind each."""
        if not self._is_told:
            return piece
        line = "" if self._has_begun else f": {json.dumps(self.head | {'seed': running.seed})}\n\n"
        self._has_begun = True
        new, self._new = self._new, []
        return f"{line}{piece}:{' '.join(map(str, new))}\n\n"


def identity(llm: LLM, names: Sequence[str], version: str) -> dict[str, Any]:
    """Who a server is: two with the same `parts` give the same answers, bit for bit.

    Its `answers` are bits of logits. They depend on the weights, on how these are stored, and on the machine's kernels.
    """
    vocab_size = llm.config.vocab_size
    num_probed = min(_NUM_PROBED, llm.max_model_len)
    probe = np.arange(num_probed) * 7919 % vocab_size  # some of the whole vocabulary
    parts = {
        "version": version,
        "names": ", ".join(names),
        "max_model_len": str(llm.max_model_len),
        "tokenizer": _digest(llm.tokenizer.to_json() if llm.tokenizer.available else ""),
        "chat template": _digest(llm.chat_template.source_text(False) + llm.chat_template.source_text(True)),
        "defaults of sampling": repr(llm.default_sampling_params),
        "answers (weights, dtype or kind of machine)": _digest(
            b"".join(llm.forward(probe, lora=name).tobytes() for name in (None, *llm.loras))
        ),
    }
    return {"parts": parts, "cache_tokens": llm.memory.num_tokens, "max_num_seqs": llm.memory.max_num_seqs}


def _digest(of: str | bytes) -> str:
    return hashlib.sha256(of.encode() if isinstance(of, str) else of).hexdigest()[:16]
