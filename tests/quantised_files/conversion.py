"""Checkpoint folders with their linears quantised."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from infinilm import _core
from infinilm.checkpoint import Checkpoint
from infinilm.checkpoint.safetensors_header import DTYPE_CODES
from infinilm.checkpoint.sources import find_tensors
from infinilm.config import AutoConfig
from infinilm.config.spec import build_spec
from quantised_files.writers import Format, Tensors, ct_fp4, of_bf16, save

# The few rows that make gates of states (in_proj_b, in_proj_a) stay as they are.
LINEARS = ("_proj.weight", "_proj_with_mqa.weight", "in_proj_qkv.weight", "in_proj_z.weight")


def quantise(source: Path, folder: Path, form: Format, *, rounded: bool = False) -> dict[str, np.ndarray]:
    """Write a folder whose linears are drawn in a format; returns all weights as float32, under their plain names.

    rounded: they are those of the source, in bfloat16, to nearest.
    """
    folder.mkdir()
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": form.config}))
    tensors: Tensors = {}
    weights: dict[str, np.ndarray] = {}
    with Checkpoint(source) as checkpoint:
        for name, info in checkpoint.tensors.items():
            array = checkpoint.array(name)
            if name.endswith(LINEARS):
                rng = np.random.default_rng(zlib.crc32(name.encode()))
                parts, exact = form.write(rng, *info.shape, **({"weights": of_bf16(array)} if rounded else {}))
                tensors |= {name.removesuffix(".weight") + suffix: tensor for suffix, tensor in parts.items()}
                weights[name] = exact.astype(np.float32)
                continue
            tensors[name] = DTYPE_CODES[info.dtype], array
            is_bf16 = info.dtype == "bfloat16"
            weights[name] = (array.astype(np.uint32) << 16).view(np.float32) if is_bf16 else array.astype(np.float32)
    save(folder / "model.safetensors", tensors)
    return weights


def quantise_experts(source: Path, folder: Path) -> dict[str, np.ndarray]:
    """Write a gpt-oss with experts in MXFP4, whose outputs are rows there; all weights as `quantise` returns them."""
    tensors: Tensors = {}
    weights: dict[str, np.ndarray] = {}
    rng = np.random.default_rng(0)
    with Checkpoint(source) as checkpoint:
        for name in checkpoint.tensors:
            weights[name] = checkpoint.array(name)
            if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                tensors[name] = "F32", weights[name]
                continue
            experts, inputs, outputs = weights[name].shape
            parts, exact = ct_fp4("mxfp4").write(rng, experts * outputs, inputs)
            blocks, scales = parts[".weight_packed"][1], parts[".weight_scale"][1]
            tensors[f"{name}_blocks"] = "U8", blocks.reshape(experts, outputs, inputs // 32, 16)
            tensors[f"{name}_scales"] = "U8", scales.reshape(experts, outputs, inputs // 32)
            weights[name] = np.ascontiguousarray(exact.reshape(experts, outputs, inputs).swapaxes(1, 2), np.float32)
    folder.mkdir()
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    save(folder / "model.safetensors", tensors)
    return weights


def write_plain(source: Path, folder: Path, weights: dict[str, np.ndarray], **changed: Any) -> Path:
    """A folder with these weights in float32."""
    folder.mkdir()
    config = json.loads((source / "config.json").read_text()) | {"dtype": "float32", "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config | changed))
    save(folder / "model.safetensors", {name: ("F32", np.ascontiguousarray(w)) for name, w in weights.items()})
    return folder


def resized(source: Path, folder: Path, **sizes: Any) -> Path:
    """A folder with a family's configuration in other sizes, and random weights in float32 under its own names."""
    folder.mkdir()
    config = json.loads((source / "config.json").read_text())
    config.get("text_config", config).update({"dtype": "float32", "torch_dtype": "float32", **sizes})
    (folder / "config.json").write_text(json.dumps(config))
    spec = build_spec(AutoConfig.from_pretrained(folder), dtype="float32", max_model_len=32)
    with Checkpoint(source) as checkpoint:
        found = find_tensors(AutoConfig.from_pretrained(folder), _core.param_shapes(spec), list(checkpoint.tensors))
    rng = np.random.default_rng(0)
    random = {name: rng.normal(1 if len(shape) == 1 else 0, 0.05, shape) for name, shape in found.shapes.items()}
    tensors: Tensors = {name: ("F32", weights.astype(np.float32)) for name, weights in random.items()}
    save(folder / "model.safetensors", tensors)
    return folder
