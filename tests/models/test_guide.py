"""docs/guide-engine.md does what it says: its Python blocks run in order, in one namespace."""

from __future__ import annotations

import re
from pathlib import Path

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide-engine.md"


def test_the_guide_runs() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    assert len(blocks) > 10 and text.count("```python") == len(blocks)
    namespace: dict[str, object] = {"__name__": "guide"}
    for block in blocks:
        line = text.count("\n", 0, block.start(1))
        code = compile("\n" * line + block[1], str(GUIDE), "exec")  # so that a traceback names the guide's own line
        exec(code, namespace)
