"""Golden encoders: tiny models of every family that sees both ways, with what transformers computes from them.

As in `goldens`, weights follow from names and a seed; see tools/make_encoder_golden.py.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
from goldens import write_checkpoint
from numpy.typing import NDArray

KEPT = Path(__file__).resolve().parent / "golden_encoders"
ENTRIES: dict[str, dict[str, Any]] = json.loads((KEPT / "encoders.json").read_text(encoding="utf-8"))


@functools.cache
def expected_of(name: str) -> dict[str, NDArray[Any]]:
    with np.load(KEPT / "encoders.npz") as file:
        return {key.partition("/")[2]: file[key] for key in file.files if key.startswith(f"{name}/")}


def prompts_of(name: str) -> list[dict[str, Any]]:
    """The texts, as token ids, and their types where the model has several."""
    expected = expected_of(name)
    ends = np.cumsum(expected["lengths"])[:-1]
    pairs = zip(np.split(expected["ids"], ends), np.split(expected["types"], ends), strict=True)
    several = ENTRIES[name]["config"].get("type_vocab_size", 0) > 1
    return [{"prompt_token_ids": ids} | ({"token_type_ids": types} if several else {}) for ids, types in pairs]


def make_encoder(folder: Path, name: str) -> Path:
    """Write the folder of a checkpoint: config.json and safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    write_checkpoint(folder, name, ENTRIES[name])
    return folder
