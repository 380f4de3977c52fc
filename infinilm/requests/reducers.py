"""What takes in the logits or the hidden states of a prompt, in chunks as they are computed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from infinilm.errors import RequestError
from infinilm.outputs import Logprob, TokenBytes, name_logprobs
from infinilm.requests import logits as lg

__all__ = ["HiddenPool", "PromptLogprobs"]

Float32Array = npt.NDArray[np.float32]


class HiddenPool:
    """One vector of the hidden states of a prompt, which come in chunks; it does not depend on where these end.

    Parameters
    ----------
    pooling : str
        "mean" of all tokens, or "last" token. RequestError: neither.
    """

    def __init__(self, pooling: str) -> None:
        if pooling not in ("mean", "last"):
            raise RequestError(f"pooling must be 'mean' or 'last', got {pooling!r}")
        self._takes_mean = pooling == "mean"
        self._sum: npt.NDArray[np.float64] | None = None

    def take(self, first: int, rows: Float32Array) -> None:
        """Read the states of positions `first`..., [num_rows, hidden_size]."""
        if not self._takes_mean:
            self._sum = rows[-1].astype(np.float64)
            return
        for row in rows:  # one after another: the order of the sum is that of the tokens
            self._sum = row.astype(np.float64) if self._sum is None else self._sum + row

    def vector(self) -> Float32Array:
        """The pooled vector, scaled to length 1, [hidden_size]."""
        assert self._sum is not None
        return (self._sum / max(float(np.linalg.norm(self._sum)), 1e-300)).astype(np.float32)


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
