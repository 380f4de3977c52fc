"""From what a caller gives (texts, token ids, sampling parameters) to checked requests."""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm.config.llama_config import LlamaConfig
from infinilm.errors import RequestError
from infinilm.requests import steps
from infinilm.requests.logits import LogitsPipeline
from infinilm.requests.request import Completion, GenerationRequest
from infinilm.sampling_params import SamplingParams, make_sampling_params
from infinilm.text.detokenize import OutputText
from infinilm.text.tokenizer import Tokenizer

__all__ = ["Prompt", "Prompts", "RequestMaker"]

Prompt = str | Sequence[int]
Prompts = Prompt | Sequence[Prompt]
Params = SamplingParams | Sequence[SamplingParams] | None


class RequestMaker:
    """Checks everything about a request that can be known before it runs.

    Parameters
    ----------
    config : LlamaConfig
    tokenizer : Tokenizer
    max_model_len : int
        Tokens of a sequence, prompt and output together.
    seed : int or None
        Makes requests without a seed of their own repeatable.
    """

    def __init__(self, config: LlamaConfig, tokenizer: Tokenizer, max_model_len: int, seed: int | None) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._seeds = np.random.default_rng(seed) if seed is not None else None
        self._lock = threading.Lock()  # numpy's generators are not made for several threads
        self._request_ids = itertools.count()

    def make(self, prompts: Prompts, params: Params, overrides: Mapping[str, Any]) -> list[GenerationRequest]:
        """Requests of a call, one per prompt. RequestError: one of them can never be served."""
        listed = as_prompt_list(prompts)
        if params is None or isinstance(params, SamplingParams):
            each = [make_sampling_params(params, overrides)] * len(listed)
        elif not isinstance(params, (list, tuple)):
            raise TypeError(
                f"sampling_params: expected SamplingParams, a list of them, or None, got {type(params).__name__}; pass "
                "single settings as keywords, for example temperature=0"
            )
        elif len(params) == len(listed):
            each = [make_sampling_params(p, overrides) for p in params]
        else:
            raise RequestError(f"expected one SamplingParams, or one per prompt ({len(listed)}), got {len(params)}")
        return [self._make_one(i, prompt, p) for i, (prompt, p) in enumerate(zip(listed, each, strict=True))]

    def encode(self, prompt: Prompt, name: str, room: int) -> npt.NDArray[np.int32]:
        """Token ids of a prompt, [num_tokens]; `room` tokens must be left for the output. RequestError: see there."""
        ids = self._tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt
        return self.check_ids(ids, name, room)

    def check_ids(self, ids: Sequence[int], name: str, room: int) -> npt.NDArray[np.int32]:
        """Token ids as an array, or a RequestError; `room` tokens must be left for the output."""
        try:
            array = np.asarray(ids)
            if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
                raise ValueError
        except ValueError:
            raise RequestError(f"{name}: expected a text or a flat list of token ids, got {ids!r:.80}") from None
        if not array.size:
            raise RequestError(f"{name} is empty: it needs at least one token to start from, such as the BOS token")
        vocab_size = self._config.vocab_size
        bad = np.flatnonzero((array < 0) | (array >= vocab_size))
        if bad.size:
            raise RequestError(
                f"{name}: token id {array[bad[0]]} at position {bad[0]} is out of range; "
                f"the vocabulary has ids 0..{vocab_size - 1}"
            )
        if array.size + room > self._max_model_len:
            raise RequestError(
                f"{name} has {array.size} tokens; the context holds {self._max_model_len}"
                f"{' and one must be left for the answer' if room else ''}: shorten it, or raise max_model_len "
                f"(the model was made for {self._config.max_position_embeddings} positions)"
            )
        return array.astype(np.int32)

    def _make_one(self, prompt_index: int, prompt: Prompt, params: SamplingParams) -> GenerationRequest:
        ids = self.encode(prompt, f"prompt {prompt_index}", room=1)
        self._check_params(params)
        room = self._max_model_len - len(ids)
        eos_token_ids = self._tokenizer.eos_token_ids
        seed = params.seed if params.seed is not None else self._new_seed()
        request_id = str(next(self._request_ids))
        completions = [
            Completion(
                request_id,
                prompt_index,
                index,
                steps.Sequence(ids, params, seed=(seed + index) % 2**64),
                OutputText(self._tokenizer, params) if self._tokenizer.available else None,
                LogitsPipeline(params, ids, eos_token_ids, self._config.vocab_size),
                eos_token_ids,
                room if params.max_tokens is None else min(params.max_tokens, room),
            )
            for index in range(params.n)
        ]
        return GenerationRequest(request_id, prompt if isinstance(prompt, str) else None, completions)

    def _check_params(self, params: SamplingParams) -> None:
        """What `SamplingParams` cannot check itself: it needs the model."""
        if params.stop and not self._tokenizer.available:
            raise RequestError("stop strings need a tokenizer, and this model folder has none; use stop_token_ids")
        vocab_size = self._config.vocab_size
        for name in ("allowed_token_ids", "logit_bias", "stop_token_ids"):
            for token_id in getattr(params, name) or ():
                if token_id >= vocab_size:
                    raise RequestError(
                        f"{name}: token id {token_id} is out of range; the vocabulary has ids 0..{vocab_size - 1}"
                    )
        for name in ("logprobs", "prompt_logprobs"):
            check_top(name, getattr(params, name) or 0, vocab_size)

    def _new_seed(self) -> int:
        if self._seeds is None:
            return secrets.randbits(64)
        with self._lock:
            return int(self._seeds.integers(2**63))


def check_top(name: str, count: object, vocab_size: int) -> None:
    """RequestError unless `count` most probable tokens can be given."""
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= vocab_size:
        raise RequestError(f"{name} must be an int in 0..{vocab_size}, the size of the vocabulary; got {count!r}")


def as_prompt_list(prompts: Prompts) -> list[Prompt]:
    """One prompt or several as a list. TypeError: neither."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, (bytes, bytearray, Mapping)) or not isinstance(prompts, Iterable):
        raise TypeError(f"prompts: expected a text, token ids, or a list of either, got {type(prompts).__name__}")
    listed: list[Any] = list(prompts)
    if not listed:
        return []
    if all(isinstance(p, (int, np.integer)) for p in listed):
        return [listed]
    return listed
