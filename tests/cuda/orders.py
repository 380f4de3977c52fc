"""In what order the emulator runs threads, and when copies land: what most kernels are tested under.

A late copy shows who reads before it has waited, and an eager one who writes over what others still read; each of both
shows it in any schedule that lets the one that is too early go first. So the suite takes each schedule once, and
`--hypothesis-profile=thorough` takes each with late and with eager copies. On a GPU only ("fifo", "late") runs.
"""

from __future__ import annotations

import pytest
from covering import THOROUGH
from emulation import SCHEDULES

every_order = pytest.mark.parametrize(
    ("schedule", "asynchronous"),
    [(s, a) for s in SCHEDULES for a in ("late", "eager") if THOROUGH or (s == "lifo") == (a == "eager")],
)
