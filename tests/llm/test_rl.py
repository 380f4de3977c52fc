"""The loop of docs/rl.md learns, and its rollouts have the log-probabilities of their scores."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "rl.md"


def test_the_bandit_learns() -> None:
    (block,) = re.findall(r"^```python\n(import.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    block = block.replace('LLM("demo",', 'LLM("demo", tensor_parallel_size=1,')  # its weights are those of one rank
    names: dict[str, Any] = {}
    exec(compile(block, str(PAGE), "exec"), names)
    assert names["shares"][0] < 0.25 and names["shares"][-1] > 0.75
    assert names["mismatch"] == 0.0
