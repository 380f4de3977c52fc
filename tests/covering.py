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

    Each value of the last axis then meets each one of another axis, if a third axis is as long as the last. Of two
    axes, each value meets some of the other one.
    """
    if THOROUGH:
        return list(itertools.product(*axes))
    *others, last = axes
    places = itertools.product(*(range(len(axis)) for axis in others))
    return [
        (*(axis[i] for axis, i in zip(others, place, strict=True)), last[sum(place) % len(last)]) for place in places
    ]
