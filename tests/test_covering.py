"""Covering arrays hold what they promise."""

from __future__ import annotations

import itertools

import covering
import pytest
from hypothesis import given, strategies as st


@given(st.lists(st.integers(1, 4), min_size=2, max_size=5), st.integers(1, 3))
def test_all_values_of_some_axes_meet(sizes: list[int], strength: int) -> None:
    strength = min(strength, len(sizes))
    axes = [[f"{axis}{value}" for value in range(size)] for axis, size in enumerate(sizes)]
    rows = covering.covering_array(*axes, strength=strength)
    for chosen in itertools.combinations(range(len(axes)), strength):
        met = {tuple(row[axis] for axis in chosen) for row in rows}
        assert met == set(itertools.product(*(axes[axis] for axis in chosen)))
    assert len(rows) == len(set(rows)) <= len(list(itertools.product(*axes)))


@pytest.mark.skipif(covering.THOROUGH, reason="thorough takes all combinations")
def test_they_are_few() -> None:
    axes = [range(3), range(5), range(2), range(3), range(3)]
    assert len(covering.covering_array(*axes, strength=2)) < 25
    assert len(covering.covering_array(*axes, strength=3)) < 70
