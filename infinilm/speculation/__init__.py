"""Drafts: tokens that probably come next, which one step verifies together.

A step computes the newest token of a sequence and its draft as so many rows. Each row draws exactly what decoding one
token at a time would draw there, since neither logits nor random numbers depend on what else a step computes. A drafted
token is right when it equals what the row before it drew; the rows behind the first wrong one are dropped. So a draft
changes how fast an answer comes, and no bit of it, whatever a drafter proposes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from infinilm.sampling_params import MAX_DRAFT_TOKENS, SamplingParams

__all__ = ["MAX_DRAFT_TOKENS", "BatchDrafter", "BatchDrafters", "DraftRequest", "Drafter", "Drafters", "Round"]


class Drafter(Protocol):
    """Drafts the tokens of one sequence. It is called in the engine's thread, between steps, so it must be quick.

    It may have `evidence` (int), how much speaks for the newest draft, on a scale of its own. How often drafts are
    right is averaged by name and evidence.

    Attributes
    ----------
    name : str
        Where its drafts come from, such as "lookup".
    """

    @property
    def name(self) -> str:
        """Where its drafts come from."""

    def update(self, token_ids: Sequence[int]) -> None:
        """Take in tokens that are known now: first the prompt, then what the sequence generates, in order, each once.

        They come just before a draft is asked for, so several at once; a drafter never sees a token that is taken
        back.
        """

    def draft(self, limit: int) -> list[int]:
        """The tokens that may come next, `limit` at most (>= 1), in order; none if it has nothing to offer.

        A draft ends before the first token that is not in the vocabulary or that ends the sequence. After an exception,
        which is logged, the sequence gets no more drafts.
        """


class DraftRequest(Protocol):
    """What a factory of drafters may read of a sequence (`infinilm.scheduling.sequence.Sequence`), and not change."""

    @property
    def prompt_token_ids(self) -> npt.NDArray[np.int32]:
        """[num_prompt_tokens]: the prompt, which `Drafter.update` gets, too."""

    @property
    def params(self) -> SamplingParams:
        """How its tokens are chosen, and when it ends."""

    @property
    def prediction(self) -> Any:
        """The predicted answer (`infinilm.speculation.prediction.Prediction`) or None."""

    @property
    def replay(self) -> Sequence[int] | None:
        """The answer that is computed once more, to see whether it comes again."""

    @property
    def constraint(self) -> Any:
        """The grammar (`infinilm.scheduling.matcher.Matcher`) or None.

        It has taken in the tokens so far whenever a drafter is called, and becomes None when it allows every token from
        then on.
        """


Drafters = Callable[[DraftRequest], "Drafter | None"]
"""Makes a drafter of a new sequence, each sequence of a request its own; None: the sequence gets none of this kind."""


@runtime_checkable
class BatchDrafter(Drafter, Protocol):
    """A drafter whose drafts cost time, as those of a model do. How long they are is chosen before they are made.

    Attributes
    ----------
    num_offered : int
        Tokens that it could draft now, once its maker is told to; 0: none.
    num_at_once : int
        Tokens at the beginning of a draft that are made together with what is done for other reasons.
    batch : BatchDrafters
        Makes its drafts, and those of others with them.
    """

    @property
    def num_offered(self) -> int:
        """Tokens that it could draft now."""

    @property
    def num_at_once(self) -> int:
        """Tokens at the beginning of a draft that need no time of their own."""

    @property
    def batch(self) -> BatchDrafters:
        """What makes its drafts."""


Round = tuple[int, float]
"""Sequences for which one more token each was drafted together, and the seconds that this took."""


class BatchDrafters(Protocol):
    """Makes drafters whose drafts are computed together, as those of a model are."""

    def __call__(self, sequence: DraftRequest) -> BatchDrafter | None:
        """The drafter of a new sequence, as `Drafters` make it."""

    def prepare(self, wanted: Sequence[tuple[Any, int]], /) -> list[Round] | None:
        """Make drafts of these drafters of its own, of so many tokens (>= 1) at most; `Drafter.draft` then gives them.

        Called once for each step that has drafts of this kind, behind the updates. It raises nothing.

        Returns
        -------
        list of (int, float) or None
            Each round, `Round`, but for the tokens `BatchDrafter.num_at_once`. None: other work was done besides, such
            as following a prompt, so that times of this step tell nothing.
        """
