"""Drafts from a prediction: a text that the answer will largely repeat, such as the file that it edits.

OpenAI calls this predicted outputs. The prediction is followed token by token. Where the answer differs, its last two
tokens are looked for in the prediction, first from the place of the difference on: an answer that replaces, inserts or
leaves out something goes on there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence

from infinilm.speculation import Drafter, DraftRequest

__all__ = ["Follower", "Prediction", "PredictionDrafter", "follow_prediction"]


class Prediction:
    """A predicted answer, and where each pair of its tokens is. It does not change, so sequences share it.

    Parameters
    ----------
    token_ids : iterable of int
        Any number.
    """

    def __init__(self, token_ids: Iterable[int]) -> None:
        self.token_ids: list[int] = list(token_ids)
        self._behind: dict[tuple[int, int], list[int]] = defaultdict(list)  # places behind a pair, ascending
        for place, pair in enumerate(zip(self.token_ids, self.token_ids[1:], strict=False), 2):
            self._behind[pair].append(place)

    def __len__(self) -> int:
        return len(self.token_ids)

    def place_behind(self, pair: tuple[int, int], near: int) -> int | None:
        """The first place, from `near` on, behind such a pair of tokens, else the last one before it; None: no such."""
        places = self._behind.get(pair)
        if places is None:
            return None
        i = bisect_left(places, near)
        return places[i] if i < len(places) else places[-1]

    def count_accepted(self, token_ids: Iterable[int]) -> int:
        """How many of its tokens an answer has at their places, given the tokens of the answer."""
        follower = Follower(self)
        for token_id in token_ids:
            follower.advance(token_id)
        return follower.num_accepted


class Follower:
    """The place that an answer has reached in a prediction.

    Parameters
    ----------
    prediction : Prediction
    """

    def __init__(self, prediction: Prediction) -> None:
        self._prediction = prediction
        self._place = 0  # of the token that is expected next, or was when the answer left the prediction
        self._is_lost = False
        self._last = -1  # the newest token of the answer
        self._accepted = bytearray(len(prediction))
        self._num_tokens = 0  # of the answer

    @property
    def num_accepted(self) -> int:
        """How many tokens of the prediction the answer has had so far, each counted once.

        An answer that goes on at another place has the token before it at two places, so the tokens that it has are the
        bound.
        """
        return min(sum(self._accepted), self._num_tokens)

    def advance(self, token_id: int) -> None:
        """Take in the next token of the answer."""
        self._num_tokens += 1
        expected, place = self._prediction.token_ids, self._place
        if not self._is_lost and place < len(expected) and expected[place] == token_id:
            self._accepted[place] = 1
            self._place = place + 1
        else:
            found = self._prediction.place_behind((self._last, token_id), place)
            self._is_lost = found is None
            if found is not None:
                self._accepted[found - 2 : found] = b"\1\1"
                self._place = found
        self._last = token_id

    def following(self, limit: int) -> list[int]:
        """The tokens that the prediction goes on with, `limit` at most; none where the answer has left it."""
        return [] if self._is_lost else self._prediction.token_ids[self._place : self._place + limit]


class PredictionDrafter:
    """Drafts what a prediction goes on with.

    Parameters
    ----------
    prediction : Prediction
    num_prompt_tokens : int
        Tokens before the answer.
    """

    name = "prediction"

    def __init__(self, prediction: Prediction, num_prompt_tokens: int) -> None:
        self._follower = Follower(prediction)
        self._num_before = num_prompt_tokens  # tokens of the prompt that are still to come

    def update(self, token_ids: Sequence[int]) -> None:
        """Take in the prompt, which the prediction has nothing to do with, and then the answer."""
        skipped = min(self._num_before, len(token_ids))
        self._num_before -= skipped
        for token_id in token_ids[skipped:]:
            self._follower.advance(token_id)

    def draft(self, limit: int) -> list[int]:
        """The next tokens of the prediction, `limit` at most."""
        return self._follower.following(limit)


def follow_prediction(request: DraftRequest) -> Drafter | None:
    """The drafter of a sequence whose request came with a prediction."""
    if request.prediction is None:
        return None
    return PredictionDrafter(request.prediction, len(request.prompt_token_ids))
