"""Keywords of JSON schemas that were misspelt: the nearest known one."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["misspelt"]


def misspelt(key: str, keywords: Iterable[str], annotations: Iterable[str]) -> str | None:
    """The keyword that a name was probably meant to be: one or two letters away.

    Names of annotations matter less: a short one, or another case, as that of `readonly`, does no harm.
    """
    for known in keywords:
        if min(len(key), len(known)) > 3 and _distance(key, known) <= (1 if len(known) < 8 else 2):
            return known
    for known in annotations:
        if len(known) > 7 and key.lower() != known.lower() and _distance(key, known) == 1:
            return known
    return None


def _distance(a: str, b: str) -> int:
    """How many letters must be put in, taken out or exchanged (Levenshtein); 3: more than 2."""
    if abs(len(a) - len(b)) > 2:
        return 3
    row = list(range(len(b) + 1))
    for i, letter in enumerate(a, 1):
        last, row[0] = row[0], i
        for j, other in enumerate(b, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (letter != other))
    return min(row[-1], 3)
