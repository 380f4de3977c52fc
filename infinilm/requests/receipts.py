"""Receipts of completions, and the requests that compute an answer once more."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping, Sequence as SequenceOf
from types import MappingProxyType
from typing import Any

import numpy as np

from infinilm.checkpoint.fingerprint import adapter_fingerprint, fingerprint_of
from infinilm.checks import short_repr
from infinilm.constraint import Constraint
from infinilm.errors import InfinilmError, ReceiptError, RequestError
from infinilm.lora.adapters import Adapter, Adapters
from infinilm.receipts import Receipt, Verdict
from infinilm.requests.request import Completion, RequestUpdate
from infinilm.sampling_params import SamplingParams
from infinilm.text.tokenizer import Tokenizer

__all__ = ["ReceiptMaker", "Replay", "replayed_params", "verdict_of"]

# What no answer depends on, or what a receipt has elsewhere.
_NOT_RECORDED = {
    "n", "prompt_logprobs", "logits_processor", "lora", "prediction", "speculation", "return_receipt",
    "beam_width", "length_penalty", "early_stopping",
}  # fmt: skip
_RECORDED = tuple(item.name for item in dataclasses.fields(SamplingParams) if item.name not in _NOT_RECORDED)
_DIGESTS = MappingProxyType(
    {
        "weights": "the weights are",
        "computation": "the configuration and the dtypes of the model are",
        "adapter": "the adapters that requests can name are",
        "tokenizer": "the tokenizer and its vocabulary are",
        "tower": "the tower and the way in which it is shown pictures are",
    }
)


class ReceiptMaker:
    """Makes the receipts of an `LLM`.

    Parameters
    ----------
    model : Mapping
        `Receipt.model` but for what is read of files.
    engine : Mapping
        `Receipt.engine`.
    weights : callable
        Returns the fingerprint of the weights; called once, when a receipt is first asked for.
    adapters : Adapters
        Those that requests can name.
    tokenizer : Tokenizer
    has_hooks : callable
        Returns whether hooks may change what is computed.
    tower : callable
        Returns the fingerprint of the tower; None: there is none. Called once, for the first receipt with pictures.
    """

    def __init__(
        self,
        model: Mapping[str, Any],
        engine: Mapping[str, Any],
        weights: Callable[[], str],
        adapters: Adapters,
        tokenizer: Tokenizer,
        has_hooks: Callable[[], bool],
        tower: Callable[[], str | None],
    ) -> None:
        self._model, self._engine = dict(model), dict(engine)
        self._weights, self._adapters, self._tokenizer = weights, adapters, tokenizer
        self._has_hooks, self._make_tower = has_hooks, tower
        self._of_adapters: dict[int, str] = {}  # by their ids, which are never used again
        self._lock = threading.Lock()

    @property
    def has_hooks(self) -> bool:
        """Whether hooks may change what is computed."""
        return self._has_hooks()

    def check(self, params: SamplingParams) -> None:
        """RequestError: nothing can name what the answer will be a function of."""
        if params.logits_processor is not None:
            raise RequestError("return_receipt: no receipt can say what a logits_processor does: leave one of them out")
        self.check_hooks("return_receipt")

    def check_hooks(self, name: str) -> None:
        """RequestError: there are hooks, which may change answers. `name`: what was asked for."""
        if self._has_hooks():
            raise RequestError(
                f"{name}: no receipt or file can say what hooks do, or which weights were put into llm.engine: remove "
                "hooks first, and change weights by update_weights"
            )

    @functools.cached_property
    def _of_files(self) -> dict[str, str | None]:
        tokenizer = fingerprint_of([self._tokenizer.to_json()]) if self._tokenizer.available else None
        return {"weights": self._weights(), "tokenizer": tokenizer}

    @functools.cached_property
    def _tower(self) -> str | None:
        return self._make_tower()

    def prepare(self, lora: str | None = None, *, sees: bool = False) -> dict[str, Any]:
        """`Receipt.model` of requests with this adapter, and of prompts with pictures, or without.

        It reads all weights when it is first called.
        """
        model = self._prepare(self._adapters.get(lora))
        return {**model, "tower": self._tower} if sees else model

    def origin(self, adapter: Adapter | None, weights: str, layout: str) -> dict[str, Any]:
        """What keys and values are a function of beside the tokens, by name.

        `weights`: their fingerprint; `layout`: what else decides how they lie in the cache.
        """
        with self._lock:
            own = {"computation": self._model["computation"], "weights": weights, "layout": layout}
            return {**own, "adapter": self._fingerprint(adapter), **self._engine}

    def forget_weights(self) -> None:
        """Find the fingerprint of the weights anew, which have changed."""
        with self._lock:
            self.__dict__.pop("_of_files", None)

    def _prepare(self, adapter: Adapter | None) -> dict[str, Any]:
        with self._lock:
            return {**self._model, **self._of_files, "adapter": self._fingerprint(adapter)}

    def _fingerprint(self, adapter: Adapter | None) -> str | None:
        """The fingerprint of an adapter; None: there is none."""
        if adapter is None:
            return None
        if adapter.id not in self._of_adapters:
            self._of_adapters[adapter.id] = adapter_fingerprint(adapter.folder)
        return self._of_adapters[adapter.id]

    def adapter_of(self, receipt: Receipt) -> str | None:
        """The name of the adapter of a receipt; None: it has none, or it is not here."""
        with self._lock:
            claimed = receipt.model.get("adapter")
            names = self._adapters.folders if claimed is not None else ()
            return next((name for name in names if self._fingerprint(self._adapters.get(name)) == claimed), None)

    def receipt(self, completion: Completion, model: Mapping[str, Any]) -> Receipt | None:
        """The receipt of a completion that has ended by itself; None of another. `model`: what `prepare` gave."""
        sequence, params = completion.sequence, completion.sequence.params
        ids = sequence.output_token_ids
        if completion.finish_reason not in ("stop", "length") or len(ids) == completion.num_given or self._has_hooks():
            return None
        request: dict[str, Any] = {name: getattr(params, name) for name in _RECORDED}
        for name in ("stop", "stop_token_ids", "allowed_token_ids"):
            request[name] = None if request[name] is None else list(request[name])
        if params.logit_bias is not None:
            request["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias.items()}
        if params.constraint is not None:
            request["constraint"] = {"kind": params.constraint.kind, "text": params.constraint.text}
        request |= {"seed": sequence.seed, "max_tokens": completion.max_new_tokens}
        own = [top[token_id] for token_id, top in zip(ids, completion.logprobs, strict=True)]
        return Receipt(
            model=model,
            engine=self._engine,
            request=request,
            images=() if sequence.given is None else sequence.given.shown,
            prompt_token_ids=tuple(sequence.prompt_token_ids.tolist()),
            token_ids=tuple(ids),
            num_given=completion.num_given,
            logprobs=np.array(own[completion.num_given :], np.float32),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
        )

    def differences(self, receipt: Receipt) -> list[str]:
        """The ways in which the weights and kernels of this engine differ from those of a receipt, in sentences."""
        model = self.prepare(self.adapter_of(receipt), sees=bool(receipt.images))
        differing = []
        for claimed, own in ((receipt.model, model), (receipt.engine, self._engine)):
            for key in sorted({*claimed, *own}):
                theirs, ours = claimed.get(key), own.get(key)
                if theirs != ours and key in _DIGESTS:
                    differing.append(f"{_DIGESTS[key]} not those of the receipt")
                elif theirs != ours:
                    differing.append(f"{key} is {short_repr(theirs)} in the receipt, {short_repr(ours)} here")
        return differing


def replayed_params(receipt: Receipt, lora: str | None) -> SamplingParams:
    """The parameters of the request that a receipt names. ReceiptError: they cannot have been those of a request.

    `lora`: what its adapter is called here.
    """
    fields = dict(receipt.request)
    if set(fields) != set(_RECORDED):
        odd = sorted(set(fields) ^ set(_RECORDED))
        raise ReceiptError(
            f"request: expected the keys prompt_token_ids, {', '.join(_RECORDED)}; {odd[0]!r:.40} differs"
        )
    try:
        if (bias := fields["logit_bias"]) is not None:
            fields["logit_bias"] = {int(token_id): value for token_id, value in bias.items()}
        if (constraint := fields["constraint"]) is not None:
            fields["constraint"] = Constraint(kind=constraint["kind"], text=constraint["text"])
        return SamplingParams(**fields, lora=lora, return_receipt=True)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ReceiptError(f"request: {error}") from None


class Replay(Completion):
    """A completion that draws an answer once more, and ends at the first token that differs.

    Parameters
    ----------
    expected : sequence of int
        The answer.
    args, kwargs
        As for `Completion`.
    """

    def __init__(self, expected: SequenceOf[int], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sequence.replay = expected

    def _add_token(self, token_id: int) -> RequestUpdate | None:
        update = super()._add_token(token_id)
        expected, place = self.sequence.replay or (), len(self.sequence.output_token_ids) - 1
        if self.finish_reason is None and (place >= len(expected) or token_id != expected[place]):
            self.finish_reason = "stop"
            return RequestUpdate(self, token_id, num_tokens=place + 1, finish_reason="stop", text="")
        return update


def verdict_of(receipt: Receipt, completion: Completion) -> Verdict:
    """Compare the answer of a receipt with the one that was drawn."""
    if completion.error is not None:
        known = isinstance(completion.error, InfinilmError)
        return Verdict("incomparable", f"the request failed: {completion.error if known else repr(completion.error)}")
    drawn, claimed = completion.sequence.output_token_ids, receipt.token_ids
    begin = receipt.num_given
    for place, (ours, theirs) in enumerate(zip(drawn, claimed, strict=False)):
        if ours != theirs:
            return Verdict("different", f"token {theirs} is claimed at place {place}, {ours} is drawn", place)
        if place >= begin:
            own = np.float32(completion.logprobs[place][ours])
            if own.tobytes() != receipt.logprobs[place - begin].tobytes():
                told = (
                    f"a log-probability of {receipt.logprobs[place - begin]} is claimed at place {place}, it is {own}"
                )
                return Verdict("different", told, place)
    if len(drawn) != len(claimed):
        place = min(len(drawn), len(claimed))
        return Verdict("different", f"{len(claimed)} tokens are claimed, the answer has {len(drawn)}", place)
    ends = (completion.finish_reason, completion.stop_reason), (receipt.finish_reason, receipt.stop_reason)
    if ends[0] != ends[1]:
        return Verdict("different", f"the end {ends[1]} is claimed, it is {ends[0]}")
    return Verdict("equal")
