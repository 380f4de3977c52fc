"""Every kernel on devices of every compute capability: none asks for more shared memory than a block may have there."""

from __future__ import annotations

import pytest
from emulation import BACKEND, ROOT, Run
from test_attention import SOURCES

LAUNCHES = [
    *(path for path in BACKEND if path.suffix == ".cu"),
    ROOT / "src/ops/attention_work.cpp",
    "launches_api.cpp",
]


def test_every_launch_fits(emulate: Run) -> None:
    """It fails where this was planted: attention_wide with all its stages on every device."""
    settings = {"INFINILM_EMULATOR_RUN": "0"}
    outcome = emulate(LAUNCHES, "shared_memory_cases:every_launch_fits", settings=settings)
    assert outcome.ok, outcome.text


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "kind"), [(576, 512, "bf16"), (512, 0, "f16"), (576, 0, "f16"), (408, 264, "bf16")]
)
def test_wide_heads_have_the_same_bits_everywhere(emulate: Run, head_dim: int, value_dim: int, kind: str) -> None:
    parameters = {"head_dim": head_dim, "value_dim": value_dim, "kind": kind}
    outcome = emulate(SOURCES, "shared_memory_cases:same_bits_everywhere", **parameters)
    assert outcome.ok, outcome.text
