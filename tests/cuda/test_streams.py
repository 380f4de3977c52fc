"""mix_streams, match_rms, row_moment and sparsify on the emulator."""

from __future__ import annotations

from typing import Any

import pytest
from emulation import ROOT, SCHEDULES, Run
from hypothesis import given, settings, strategies as st
from orders import every_order
from test_rowwise import few, pads, rows, shapes, widths

SOURCES = [*(ROOT / f"cuda/rows/{name}.cu" for name in ("streams", "sparsify")), "streams_api.cu"]

CASES: dict[str, st.SearchStrategy[Any]] = {
    "mix_streams": shapes(rows=rows, width=widths, pad=pads, streams=st.sampled_from((2, 3, 4, 8))),
    "match_rms": shapes(rows=rows, width=widths, pad=pads),
    "sparsify": shapes(rows=rows, width=widths, pad=pads),
}


@every_order
@pytest.mark.parametrize("case", CASES)
@few
@given(data=st.data())
def test_streams(emulate: Run, case: str, schedule: str, asynchronous: str, data: st.DataObject) -> None:
    drawn = data.draw(CASES[case], label="shapes")
    environment = {"INFINILM_EMULATOR_ASYNC": asynchronous}
    outcome = emulate(SOURCES, f"streams_cases:{case}", schedule=schedule, settings=environment, shapes=drawn)
    assert outcome.ok, outcome.text


@pytest.mark.sanitizer
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("sanitize", ["address", "thread"])
@pytest.mark.parametrize("case", CASES)
@settings(few, max_examples=1)
@given(data=st.data())
def test_streams_sanitized(emulate: Run, case: str, sanitize: str, schedule: str, data: st.DataObject) -> None:
    drawn = data.draw(CASES[case], label="shapes")
    outcome = emulate(SOURCES, f"streams_cases:{case}", schedule=schedule, sanitize=sanitize, shapes=drawn)
    assert outcome.ok, outcome.text
