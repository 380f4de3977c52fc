"""The list of planted faults fits the sources: each text is where the list says, and the named tests exist."""

from __future__ import annotations

from pathlib import Path

import pytest
from planted_faults import CLOSE, FAULTS, OPEN, Fault

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted(fault: Fault) -> None:
    assert fault.code.count(OPEN) == fault.code.count(CLOSE) == 1
    _, part, _ = fault.parts
    assert part.strip() and part != fault.wrong
    count = (ROOT / fault.file).read_text(encoding="utf-8").count(fault.text)
    assert count == 1, (
        f"{fault.file} has this {count} times; where the code has changed, change tests/planted_faults.py"
    )


@pytest.mark.parametrize("test", sorted({test for fault in FAULTS for test in fault.tests}))
def test_what_must_notice_it_exists(test: str) -> None:
    file, _, function = test.partition("[")[0].partition("::")
    assert f"def {function or 'test_'}" in (ROOT / file).read_text(encoding="utf-8")


def test_names_are_unique() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_every_part_of_the_engine_has_faults() -> None:
    folders = {"/".join(fault.file.split("/")[:2]) for fault in FAULTS}
    assert folders >= {"infinilm/config", "infinilm/scheduling", "src/model", "src/ops", "src/cpu", "src/numerics"}
