"""Folders with a config.json that tests write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write(folder: Path, content: str | dict[str, Any]) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "config.json").write_text(text, encoding="utf-8")
    return folder
