"""`HiddenPool` and `PromptLogprobs` take in the states or the logits of a prompt, in chunks as they are computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm.outputs import Logprob, TokenBytes, name_logprobs
from infinilm.requests import logits as lg

__all__ = ["HiddenPool", "PromptLogprobs"]

Float32Array = npt.NDArray[np.float32]


class HiddenPool:
    """One vector of the hidden states of a prompt, which come in chunks; it does not depend on where these end.

    Sums are made in float64, from the first token to the last.

    Parameters
    ----------
    pooling : str
        "mean" of all tokens; "cls", the first token; "last" token; "max" of each element; "weightedmean", in which
        token i, from 1 on, counts i times; "mean_sqrt_len", the sum divided by the root of the number of tokens.
        Several with "+" between them, such as "cls+mean", stand one behind the other in the vector.
    num_skipped : int
        Tokens at the beginning that are left out, as if the text began behind them; "weightedmean" counts them.
    """

    def __init__(self, pooling: str, num_skipped: int = 0) -> None:
        self._pools = [_OnePool(one, num_skipped) for one in pooling.split("+")]
        self._num_skipped = num_skipped

    def take(self, first: int, rows: Float32Array) -> None:
        """Read the states of positions `first`..., [num_rows, hidden_size]."""
        left_out = min(max(self._num_skipped - first, 0), len(rows))
        if left_out == len(rows):
            return
        for pool in self._pools:
            pool.take(first + left_out, rows[left_out:])

    def vector(self) -> Float32Array:
        """The pooled vector, [hidden_size], or as many of these as there are poolings."""
        return np.concatenate([pool.vector() for pool in self._pools])


class _OnePool:
    def __init__(self, pooling: str, num_skipped: int) -> None:
        self._pooling = pooling
        self._num_skipped = num_skipped
        self._kept: npt.NDArray[Any] | None = None  # the sum, or the row that counts
        self._end = 0

    def take(self, first: int, rows: Float32Array) -> None:
        self._end = first + len(rows)
        kept = self._kept
        if self._pooling == "last" or (self._pooling == "cls" and kept is None):
            self._kept = rows[-1 if self._pooling == "last" else 0].copy()
        elif self._pooling == "max":
            best = rows.max(0)
            self._kept = best if kept is None else np.maximum(kept, best)
        elif self._pooling != "cls":
            begin = np.zeros((1, rows.shape[1])) if kept is None else kept[None]
            weighed: npt.NDArray[Any] = rows
            if self._pooling == "weightedmean":
                weighed = rows * np.arange(first + 1, self._end + 1, dtype=np.float64)[:, None]
            # Along the first axis numpy adds row after row, so what was kept goes in front of them.
            self._kept = np.add.reduce(np.concatenate((begin, weighed)), 0)

    def vector(self) -> Float32Array:
        assert self._kept is not None
        end, skipped = self._end, self._num_skipped
        count, weights = end - skipped, (end * (end + 1) - skipped * (skipped + 1)) / 2
        divisor = {"mean": count, "weightedmean": weights, "mean_sqrt_len": count**0.5}
        vector: Float32Array = (self._kept / divisor.get(self._pooling, 1)).astype(np.float32)
        return vector


class PromptLogprobs:
    """Log-probabilities of the tokens of a prompt, from logits that come in chunks.

    Parameters
    ----------
    token_ids : int32 array, [num_tokens]
    top : int
        How many of the most probable tokens to give at each place.
    """

    def __init__(self, token_ids: npt.NDArray[np.int32], top: int) -> None:
        self._token_ids = token_ids
        self._top = top
        self._host = lg.HostSampler()
        self.logprobs: list[float | None] = [None]
        self.top_logprobs: list[dict[int, float] | None] = [None]

    def take(self, first: int, logits: Float32Array) -> None:
        """Take in logits [num_rows, vocab_size] of the positions from `first` on; each row predicts the next token."""
        ids = self._token_ids[first + 1 : first + 1 + len(logits)]
        logits = logits[: len(ids)]  # nothing follows the last token
        best, logprobs = self._host.log_probs(logits, ids, self._top)
        self.logprobs += logprobs[:, 0].tolist()
        self.top_logprobs += [lg.best_logprobs(i[1:], x[1:]) for i, x in zip(best, logprobs, strict=True)]

    @property
    def is_complete(self) -> bool:
        """Whether every token has its log-probability. False if the work failed or was cancelled."""
        return len(self.logprobs) == len(self._token_ids)

    def top(self, tokenizer: TokenBytes | None) -> list[dict[int, Logprob] | None]:
        """Per token, log-probabilities of the most probable tokens; None for the first."""
        return [None if top is None else name_logprobs(top, self._top, tokenizer) for top in self.top_logprobs]

    def merged(self, tokenizer: TokenBytes | None) -> list[dict[int, Logprob] | None]:
        """Per token, log-probabilities of the most probable tokens and of the token itself; None for the first."""
        return [
            None if logprob is None or top is None else name_logprobs(top | {int(i): logprob}, self._top, tokenizer)
            for i, logprob, top in zip(self._token_ids, self.logprobs, self.top_logprobs, strict=True)
        ]
