"""docs/architectures.md has the list of what is not supported that messages are made of."""

from __future__ import annotations

import importlib.util
from pathlib import Path

TOOL = Path(__file__).resolve().parents[2] / "tools/refused_page.py"


def test_the_page_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("refused_page", TOOL)
    assert spec and spec.loader
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    text = tool.PAGE.read_text(encoding="utf-8")
    assert text == tool.page(text), "python tools/refused_page.py"
    assert tool.page(text.replace("- `Gemma4Assistant", "- `Gemma9Assistant")) == text
