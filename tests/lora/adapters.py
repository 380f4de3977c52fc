"""Random adapters in PEFT's form, made where a test wants them, and models whose weights have them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from reference.checkpoint import read_checkpoint
from safetensors.numpy import load_file, save_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# The linears of a checkpoint that requests can have adapters of.
ONLY_MERGED = r"mlp\.gate|mlp\.shared_expert_gate|mlp\.experts\..*|block_sparse_moe\..*"
OF_REQUESTS = rf"(?!.*\.(?:{ONLY_MERGED})$)(?!.*(?:embed_|lm_head)).*"
NOT_OF_TEXT = re.compile(r"visual|vision|multi_modal")


def make_adapter(
    folder: Path,
    base: Path,
    *,
    rank: int = 4,
    targets: Sequence[str] | str = ALL,
    seed: int = 0,
    more: Mapping[str, np.ndarray[Any, Any]] | None = None,
    **settings: Any,
) -> Path:
    """Write an adapter of a checkpoint; `settings` go into adapter_config.json, `more` are other tensors.

    targets: ends of the names of modules, or a regular expression of whole ones.
    """
    rng = np.random.default_rng(seed)
    tensors: dict[str, Any] = dict(more or {})
    for name, weight in sorted(load_file(base / "model.safetensors").items()):
        module = name.removesuffix(".weight")
        is_target = re.fullmatch(targets, module) if isinstance(targets, str) else module.endswith(tuple(targets))
        if is_target and weight.ndim == 2:
            down, up = rng.standard_normal((rank, weight.shape[1])), rng.standard_normal((weight.shape[0], rank))
            key = f"base_model.model.{module}"
            tensors[f"{key}.lora_A.weight"] = (down / weight.shape[1] ** 0.5).astype(np.float32)
            tensors[f"{key}.lora_B.weight"] = (0.5 * up / rank**0.5).astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    target_modules = targets if isinstance(targets, str) else list(targets)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": target_modules, **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def text_model(folder: Path, base: Path) -> Path:
    """Copy a golden checkpoint, its weights in float32 and without those of a vision tower."""
    weights = {
        name: np.ascontiguousarray(w) for name, w in read_checkpoint(base).items() if not NOT_OF_TEXT.search(name)
    }
    folder.mkdir(parents=True)
    shutil.copy(base / "config.json", folder)
    save_file(weights, folder / "model.safetensors")
    return folder


def changed_model(folder: Path, base: Path, adapter: Path) -> Path:
    """Write the model in which an adapter of `make_adapter` is part of the weights, by nothing but their names."""
    weights, tensors = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name, a in tensors.items():
        if name.endswith(".lora_A.weight"):
            module, b = name.removesuffix(".lora_A.weight"), tensors[name.replace("lora_A", "lora_B")]
            weights[module.removeprefix("base_model.model.") + ".weight"] += 2 * (b @ a)  # alpha is twice the rank
    folder.mkdir(parents=True)
    shutil.copy(base / "config.json", folder)
    save_file(weights, folder / "model.safetensors")
    return folder
