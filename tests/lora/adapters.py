"""Random adapters in PEFT's form, made where a test wants them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(
    folder: Path,
    base: Path,
    *,
    rank: int = 4,
    targets: Sequence[str] = ALL,
    seed: int = 0,
    more: Mapping[str, np.ndarray[Any, Any]] | None = None,
    **settings: Any,
) -> Path:
    """Write an adapter of a checkpoint; `settings` go into adapter_config.json, `more` are other tensors."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, Any] = dict(more or {})
    for name, weight in sorted(load_file(base / "model.safetensors").items()):
        module = name.removesuffix(".weight")
        if module.endswith(tuple(targets)):
            down, up = rng.standard_normal((rank, weight.shape[1])), rng.standard_normal((weight.shape[0], rank))
            key = f"base_model.model.{module}"
            tensors[f"{key}.lora_A.weight"] = (down / weight.shape[1] ** 0.5).astype(np.float32)
            tensors[f"{key}.lora_B.weight"] = (0.5 * up / rank**0.5).astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
