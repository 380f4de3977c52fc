"""Some of the mixtures that `tools/fuzz_drafts.py` runs for long: no bit of any answer depends on drafts."""

from __future__ import annotations

from pathlib import Path

import pytest

from speculation.mixtures import FAMILIES, FORMATS, Mixture, Tally


@pytest.mark.one_rank
@pytest.mark.parametrize("number", range(len(FAMILIES)), ids=FAMILIES)
def test_answers_are_those_without_drafts(number: int, tmp_path: Path) -> None:
    tally = Tally()
    form = list(FORMATS)[number % len(FORMATS)]
    with Mixture(tmp_path, FAMILIES[number], form) as mixture:
        for seed in range(2):
            assert mixture.compare(seed, 15, tally) == []
    assert all(tally.num_tokens.values())
    assert 0 < tally.num_accepted < tally.num_drafted
