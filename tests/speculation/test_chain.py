"""A chain asks its drafters in order, and goes on without those that fail."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from infinilm.speculation.chain import Draft, DrafterChain


class Given:
    def __init__(self, name: str, token_ids: Any) -> None:
        self.name, self.token_ids, self.seen = name, token_ids, list[int]()

    def update(self, token_ids: Any) -> None:
        self.seen += token_ids

    def draft(self, limit: int) -> Any:
        assert limit >= 1
        return self.token_ids


@given(st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=4), st.integers(-1, 4)), max_size=4))
def test_the_first_that_has_something_wins(given_: list[tuple[list[int], int]]) -> None:
    drafters = [Given(str(i), tokens) for i, (tokens, _) in enumerate(given_)]
    chain = DrafterChain(drafters)
    chain.update([1, 2])
    chain.update([3])
    assert all(drafter.seen == [1, 2, 3] for drafter in drafters)
    cut = [(tokens[: max(limit, 0)], str(i)) for i, (tokens, limit) in enumerate(given_)]
    drafts = list(chain.drafts(lambda source: given_[int(source)][1]))
    assert drafts == [Draft(tokens, (source, 0), len(tokens)) for tokens, source in cut if tokens]


@pytest.mark.parametrize("wrong", [None, ["x"], 3])
def test_a_drafter_that_fails_leaves_the_chain(wrong: Any) -> None:
    chain = DrafterChain([Given("wrong", wrong), Given("right", [7])])
    for _ in range(2):
        assert list(chain.drafts(lambda _: 3)) == [Draft([7], ("right", 0), 1)]
        assert len(chain) == 1
