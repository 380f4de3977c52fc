"""What a model loses where its weights are stored otherwise, over a text."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from infinilm.errors import RequestError
from infinilm.llm import LLM

__all__ = ["Loss", "measure_loss"]

_LONGEST = 512  # tokens that see each other


class Loss(NamedTuple):
    """Over the tokens of a text.

    Attributes
    ----------
    num_tokens : int
    perplexity, other_perplexity : float
        Perplexity of the model, and of the one whose weights are stored otherwise.
    kl : float
        Mean divergence of the other's next tokens from the model's, nats per token.
    other_best : float
        Share of tokens after which another one is the most likely.
    """

    num_tokens: int
    perplexity: float
    other_perplexity: float
    kl: float
    other_best: float


def _log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(-1, keepdims=True))
    return wide


def measure_loss(
    model: str | os.PathLike[str], other: str | os.PathLike[str], texts: Sequence[str], *, device: str = "auto"
) -> Loss:
    """Compare two models of one tokenizer over texts, in float32: of the weights alone, inputs are not rounded.

    A text of more than 512 tokens is cut into pieces, which do not see each other.

    Raises
    ------
    RequestError
        There are no two tokens in any text.
    """
    with (
        LLM(model, device=device, dtype="float32", max_num_seqs=1, use_tqdm=False) as first,
        LLM(other, device=device, dtype="float32", max_num_seqs=1, use_tqdm=False) as second,
    ):
        longest = min(_LONGEST, first.max_model_len - 1, second.max_model_len - 1)
        ids = [first.tokenize(text) for text in texts]
        pieces = [text[at : at + longest + 1] for text in ids for at in range(0, len(text) - 1, longest)]
        sums, count = np.zeros(4), 0
        for piece in pieces:
            p, q = (_log_softmax(np.array(llm.forward(piece[:-1]))) for llm in (first, second))
            rows = np.arange(len(piece) - 1)
            sums += (
                p[rows, piece[1:]].sum(),
                q[rows, piece[1:]].sum(),
                (np.exp(p) * (p - q)).sum(),
                (p.argmax(-1) != q.argmax(-1)).sum(),
            )
            count += len(rows)
    if count == 0:
        raise RequestError("text: expected at least two tokens to compare, got fewer")
    mean = sums / count
    return Loss(count, float(np.exp(-mean[0])), float(np.exp(-mean[1])), float(mean[2]), float(mean[3]))
