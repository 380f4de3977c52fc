"""Checkpoint folders with their linears quantised."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from infinilm.checkpoint import Checkpoint
from infinilm.checkpoint.safetensors_header import DTYPE_CODES
from quantised_files.writers import Format, Tensors, save


def quantise(source: Path, folder: Path, form: Format) -> dict[str, np.ndarray]:
    """Write a folder whose linears are drawn in a format; returns all weights as float32, under their plain names."""
    folder.mkdir()
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": form.config}))
    tensors: Tensors = {}
    weights: dict[str, np.ndarray] = {}
    with Checkpoint(source) as checkpoint:
        for name, info in checkpoint.tensors.items():
            array = checkpoint.array(name)
            if name.endswith("_proj.weight"):
                rng = np.random.default_rng(zlib.crc32(name.encode()))
                parts, exact = form.write(rng, *info.shape)
                tensors |= {name.removesuffix(".weight") + suffix: tensor for suffix, tensor in parts.items()}
                weights[name] = exact.astype(np.float32)
                continue
            tensors[name] = DTYPE_CODES[info.dtype], array
            is_bf16 = info.dtype == "bfloat16"
            weights[name] = (array.astype(np.uint32) << 16).view(np.float32) if is_bf16 else array.astype(np.float32)
    save(folder / "model.safetensors", tensors)
    return weights


def write_plain(source: Path, folder: Path, weights: dict[str, np.ndarray], **changed: Any) -> Path:
    """A folder with these weights in float32."""
    folder.mkdir()
    config = json.loads((source / "config.json").read_text()) | {"dtype": "float32", "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config | changed))
    save(folder / "model.safetensors", {name: ("F32", np.ascontiguousarray(w)) for name, w in weights.items()})
    return folder
