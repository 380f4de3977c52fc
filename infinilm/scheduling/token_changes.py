"""`TokenChanges`: the logits that the bias and the penalties of one request change."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm.sampling_params import SamplingParams

__all__ = ["TokenChanges", "logit_changes"]

Int32Array = npt.NDArray[np.int32]


class TokenChanges:
    """What bias and penalties change, as `_core.Batch` takes it: a list of tokens that grows with the output.

    Attributes
    ----------
    penalties : float32 array, [3]
        repetition, presence, frequency
    counts_tokens : bool
        Whether generated tokens matter.
    """

    def __init__(self, params: SamplingParams, prompt_token_ids: Int32Array) -> None:
        most = float(np.finfo(np.float32).max)
        penalties = [params.repetition_penalty, params.presence_penalty, params.frequency_penalty]
        self.penalties = np.clip(penalties, [float(np.finfo(np.float32).tiny), -most, -most], most).astype(np.float32)
        self.counts_tokens = bool(self.penalties[0] != 1 or self.penalties[1:].any())
        bias = params.logit_bias or {}
        ids = np.array(list(bias), np.int32)
        if self.penalties[0] != 1:
            ids = np.union1d(ids, prompt_token_ids).astype(np.int32)
        self._place = {int(token_id): i for i, token_id in enumerate(ids)}
        self._tokens = np.empty((len(ids) + 16, 3), np.int32)  # see `tokens`; grows as tokens are generated
        self._tokens[: len(ids), 0] = ids
        self._tokens[: len(ids), 1] = np.where(np.isin(ids, prompt_token_ids), 0, -1)
        with np.errstate(over="ignore"):  # a bias that becomes infinite is refused when the token is sampled
            self._tokens[: len(ids), 2] = np.array([bias.get(int(i), 0.0) for i in ids], np.float32).view(np.int32)

    @staticmethod
    def are_wanted(params: SamplingParams) -> bool:
        """Whether the parameters change any logits, which most requests do not."""
        penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        return bool(params.logit_bias) or penalties != (1, 0, 0)

    def copy(self) -> TokenChanges:
        """Make another one in the same state, which changes apart from this one."""
        other = copy(self)
        other._place, other._tokens = self._place.copy(), self._tokens.copy()
        return other

    @property
    def tokens(self) -> Int32Array:
        """[num_changes, 3], valid until the next token: id, times generated (-1: nor in the prompt), bits of a bias."""
        return self._tokens[: len(self._place)]

    def accept(self, token_id: int) -> None:
        """Count a token that was generated."""
        if not self.counts_tokens:
            return
        place = self._place.get(token_id)
        if place is None:
            place = self._place[token_id] = len(self._place)
            if place == len(self._tokens):
                self._tokens = np.concatenate([self._tokens, np.empty_like(self._tokens)])
            self._tokens[place] = token_id, 0, 0
        self._tokens[place, 1] = max(int(self._tokens[place, 1]), 0) + 1


# A token that is counted once more where it is known, see LogitChanges in src/ops/backend.h.
_ONE_MORE = np.array([[-1, 0, 0]], np.int32)


def logit_changes(
    changes: Sequence[TokenChanges], rows: Sequence[int], is_ahead: Sequence[bool], num_rows: int
) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a batch that say what bias and penalties change.

    Parameters
    ----------
    changes, rows, is_ahead
        For each sequence whose logits are changed: its changes, its row, and whether a step in flight samples its
        newest token, which the device counts then.
    num_rows
        Rows of logits that the step computes.
    """
    spans = np.zeros((num_rows, 2), np.int32)
    penalties = np.tile(np.array([1, 0, 0], np.float32), (num_rows, 1))
    tokens: list[Int32Array] = []
    begin = 0
    for one, row, counts_newest in zip(changes, rows, is_ahead, strict=True):
        own = [one.tokens, _ONE_MORE] if one.counts_tokens and counts_newest else [one.tokens]
        tokens += own
        end = begin + sum(map(len, own))
        spans[row] = begin, end
        penalties[row] = one.penalties
        begin = end
    return {"change_rows": spans, "penalties": penalties, "change_tokens": np.concatenate(tokens)}
