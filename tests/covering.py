"""Which combinations of parameters a test runs with, where all of them would say the same again.

An instruction set, a dtype and a number of threads rarely fail together in a way that no two of them show. So the suite
takes enough combinations that every two meet, as covering arrays of strength two do (Kuhn, Wallace and Gallo, "Software
Fault Interactions and Implications for Software Testing", 2004); `--hypothesis-profile=thorough` takes all.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import profiles  # noqa: F401  # registers them, where no conftest.py has
from hypothesis import settings

THOROUGH = settings.default == settings.get_profile("thorough")


def covering(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Every combination of all axes but the last, whose values take turns.

    Each value of the last axis then meets each one of another axis, if a third axis is as long as the last. With two
    axes, each value meets some of the other one.
    """
    if THOROUGH:
        return list(itertools.product(*axes))
    *others, last = axes
    places = itertools.product(*(range(len(axis)) for axis in others))
    return [
        (*(axis[i] for axis, i in zip(others, place, strict=True)), last[sum(place) % len(last)]) for place in places
    ]


def covering_array(*axes: Sequence[Any], strength: int) -> list[tuple[Any, ...]]:
    """Few combinations in which any values of any `strength` axes meet: a mixed covering array.

    Row by row, each value is the one that adds the most combinations that have not met yet, as in AETG (Cohen, Dalal,
    Fredman and Patton, "The AETG System", 1997), without its random choices: a row begins with one that is missing.
    """
    if THOROUGH:
        return list(itertools.product(*axes))
    missing = {
        tuple(zip(chosen, values, strict=True))
        for chosen in itertools.combinations(range(len(axes)), strength)
        for values in itertools.product(*(range(len(axes[axis])) for axis in chosen))
    }
    rows = []
    while missing:
        row = dict(min(missing))
        for axis in range(len(axes)):
            if axis not in row:
                row[axis] = max(
                    range(len(axes[axis])),
                    key=lambda value: len(missing & _meetings({**row, axis: value}, strength)),
                )
        missing -= _meetings(row, strength)
        rows.append(tuple(axes[axis][row[axis]] for axis in range(len(axes))))
    return rows


def _meetings(row: dict[int, int], strength: int) -> set[tuple[tuple[int, int], ...]]:
    return set(itertools.combinations(sorted(row.items()), strength))
