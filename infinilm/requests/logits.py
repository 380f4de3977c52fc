"""What changes logits before a token is drawn, and log-probabilities.

Masks, penalties and biases are applied where the model runs, which is told about a request's tokens (`TokenChanges`),
and log-probabilities are computed there. Only rows of requests with a `logits_processor` come to the host, or with the
log-probabilities of more than `_core.MAX_LOGPROBS` tokens, and those of prompts. Both ways do the same with the same
random numbers, so a row that nothing changes gives the same token.

The order is fixed: the constraint of the request and `allowed_token_ids`, `min_tokens`, `logit_bias`,
`repetition_penalty`, `presence_penalty`, `frequency_penalty`, `logits_processor`; then, in the draw, `temperature`,
`top_k`, `top_p`, `min_p`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from infinilm import _core
from infinilm.errors import InfinilmError, RequestError
from infinilm.scheduling.matcher import TokenRules, allowed_tokens, packed_mask
from infinilm.scheduling.token_changes import TokenChanges

if TYPE_CHECKING:
    from infinilm.sampling_params import SamplingParams
    from infinilm.scheduling.matcher import Matcher

__all__ = ["HostSampler", "LogitsPipeline", "best_logprobs", "sampling_error"]

Float32Array = npt.NDArray[np.float32]
Int32Array = npt.NDArray[np.int32]

# In the words of `_core.sample_fault`.
_ALL_FORBIDDEN, _NAN = "are all -inf", "hold NaN"


class LogitsPipeline:
    """Changes the logits of one sequence before the draw: penalties, masks and processor.

    Masks alone are applied where the model runs, see `matcher`.

    Parameters
    ----------
    params : SamplingParams
    prompt_token_ids : int32 array, [num_prompt_tokens]
    eos_token_ids : collection of int
        The end-of-sequence tokens of the model.
    vocab_size : int
    """

    def __init__(
        self, params: SamplingParams, prompt_token_ids: Int32Array, eos_token_ids: Collection[int], vocab_size: int
    ) -> None:
        self.vocab_size = vocab_size
        self.changes = TokenChanges(params, prompt_token_ids) if TokenChanges.are_wanted(params) else None
        self._params = params
        self._prompt = prompt_token_ids
        self._forbidden: npt.NDArray[np.bool_] | None = None  # [vocab_size]
        if params.allowed_token_ids is not None:
            self._forbidden = np.ones(vocab_size, np.bool_)
            self._forbidden[list(params.allowed_token_ids)] = False
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
        self._ends = np.array(sorted(i for i in ends if i < vocab_size), np.int64)

    @property
    def samples_on_host(self) -> bool:
        """Whether logits must come to the host before a token is drawn."""
        return self._params.logits_processor is not None

    def matcher(self, constraint: Matcher | None) -> Matcher | None:
        """What the next token may be by a constraint, `allowed_token_ids` and `min_tokens`; None: any."""
        rules = self._forbidden is not None or (self._params.min_tokens > 0 and self._ends.size > 0)
        if not rules:
            return constraint
        allowed = None if self._forbidden is None else packed_mask(~self._forbidden)
        ends = np.zeros(self.vocab_size, np.bool_)
        ends[self._ends] = True
        return TokenRules(allowed, packed_mask(ends), self._params.min_tokens, constraint)

    def accept(self, token_id: int) -> None:
        """Count a token that was generated."""
        if self.changes is not None:
            self.changes.accept(token_id)

    def apply(
        self, logits: Float32Array, output_token_ids: Sequence[int], constraint: Matcher | None = None
    ) -> Float32Array:
        """Return the changed logits, [vocab_size] float32; `logits` stays as it is.

        `constraint`: what `matcher` gave, which has the tokens so far; what it raises is raised.

        Raises
        ------
        RequestError
            No token can be drawn: all are forbidden, the parameters together exceed the range of float32, or the
            processor returned something other than logits.
        InfinilmError
            The model's own logits cannot be sampled (NaN or infinity).
        """
        out: Float32Array = logits.copy()
        if constraint is not None:
            out[~allowed_tokens(constraint, len(out))] = -np.inf
        if self.changes is not None:
            _core.change_logits(out, self.changes.penalties, self.changes.tokens)
        if self._params.logits_processor is not None:
            out = self._process(out, output_token_ids)
        # The draw is one call for the rows of all requests, and refuses them all for one that is not fit for it.
        if not np.isfinite(out.max()):
            self._refuse(logits, out)
        return out

    def _refuse(self, logits: Float32Array, changed: Float32Array) -> NoReturn:
        """Raise an error about the model's logits, or about the changed ones; both [vocab_size]."""
        if (fault := _fault(logits)) is not None:
            raise _fault_of_model(fault)
        if np.isneginf(changed.max()):
            raise RequestError(
                "no token is left to choose: the constraint, allowed_token_ids, min_tokens, logit_bias and "
                "logits_processor together forbid all of them"
            )
        raise RequestError(
            f"logit_bias, the penalties or logits_processor left logits that {_fault(changed)}: they must stay numbers "
            "that float32 can hold, or -inf to forbid a token"
        )

    def _process(self, logits: Float32Array, output_token_ids: Sequence[int]) -> Float32Array:
        token_ids = np.concatenate([self._prompt, np.asarray(output_token_ids, np.int32)])
        assert self._params.logits_processor is not None
        result: Any = self._params.logits_processor(token_ids, logits)
        if result is None:
            raise RequestError("logits_processor returned None: it must return the logits, changed in place or not")
        array: Float32Array = np.ascontiguousarray(result, np.float32)
        if array.shape != logits.shape:
            raise RequestError(f"logits_processor: expected logits of shape {logits.shape}, got {array.shape}")
        return array


def _fault(logits: Float32Array) -> str | None:
    """Why no token can be drawn from logits, [vocab_size], in the words of `_core.sample_fault`; None: one can."""
    largest = logits.max()
    if np.isnan(largest):
        return _NAN
    if np.isposinf(largest):
        return "hold +inf"
    return _ALL_FORBIDDEN if np.isneginf(largest) else None


def sampling_error(fault: int, is_constrained: bool, is_changed: bool = False) -> InfinilmError:
    """Why the engine drew no token, from the negative id in its place and whether the row had a mask, or changes."""
    what = _core.sample_fault(fault)
    if is_constrained and what == _ALL_FORBIDDEN:
        return RequestError(
            "no token is left to choose: the constraint, allowed_token_ids and min_tokens together allow none that the "
            "model could say"
        )
    if is_changed and what != _NAN:  # what a request asks for is finite, so NaN is of the model
        return RequestError(
            f"the model's logits with logit_bias and the penalties {what}: they must stay numbers that float32 can hold"
        )
    return _fault_of_model(what)


def _fault_of_model(what: str) -> InfinilmError:
    return InfinilmError(
        f"the model gave logits that cannot be sampled: they {what}. A weight may be damaged, or a number too large "
        "for the dtype: try dtype='float32'; hooks with infinilm.tensor_stats find the first layer that has it"
    )


class HostSampler:
    """Draws tokens from logits on the host, and tells log-probabilities, as the engine does from its own."""

    def __init__(self) -> None:
        self._backend = _core.Backend("cpu", num_threads=1)

    def sample(
        self, logits: Float32Array, params: Sequence[SamplingParams], seeds: Sequence[int], positions: Sequence[int]
    ) -> list[int]:
        """One token per row.

        Parameters
        ----------
        logits : float32 array, [num_rows, vocab_size]
        params, seeds : one per row
        positions : one per row
            Number of tokens before the one to draw; with the seed it determines the random number.
        """
        random_val = np.empty(len(params), np.float32)
        _core.fill_uniform(np.array(seeds, np.uint64), np.array(positions, np.uint64), random_val)
        columns = (
            np.array([p.temperature for p in params], np.float32),
            np.array([p.top_k for p in params], np.int32),
            np.array([p.top_p for p in params], np.float32),
            np.array([p.min_p for p in params], np.float32),
            random_val,
        )
        ids = np.empty(len(params), np.int32)
        arrays = [logits, *columns, ids]
        self._backend.sample(*[_core.from_numpy(array) for array in arrays])
        result: list[int] = ids.tolist()
        return result

    def log_probs(
        self, logits: Float32Array, token_ids: npt.NDArray[np.integer[Any]], count: int
    ) -> tuple[Int32Array, Float32Array]:
        """Log-probabilities of one token per row and of the `count` most probable ones, at most the vocabulary.

        Parameters
        ----------
        logits : float32 array, [num_rows, vocab_size]
        token_ids : integer array, [num_rows]
        count : int

        Returns
        -------
        ids : int32 array, [num_rows, 1 + count]
            The token, then the most probable ones, best first, equal ones by id; -1: the logits hold NaN or +inf.
        logprobs : float32 array, [num_rows, 1 + count]
        """
        num_rows, count = len(logits), min(count, logits.shape[1])
        counts = np.full(num_rows, count, np.int32)
        ids, logprobs = np.empty((num_rows, 1 + count), np.int32), np.empty((num_rows, 1 + count), np.float32)
        arrays = [logits, token_ids.astype(np.int32), counts, ids, logprobs]
        self._backend.log_probs(*[_core.from_numpy(array) for array in arrays])
        return ids, logprobs


def best_logprobs(ids: Int32Array, logprobs: Float32Array) -> dict[int, float]:
    """The most probable tokens of a row, best first, from what is behind its own token; both [count]."""
    return {i: logprob for i, logprob in zip(ids.tolist(), logprobs.tolist(), strict=True) if i >= 0}
