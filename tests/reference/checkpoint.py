"""Reads a Hugging Face checkpoint folder into numpy arrays, with nothing but the safetensors library.

Called by the tests that compare with golden checkpoints; independent of the engine's loader. bfloat16, which
numpy has not, is widened to float32 (exact); every other dtype stays as stored.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import safetensors
from numpy.typing import NDArray

_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


def read_checkpoint(folder: Path) -> dict[str, NDArray[np.floating]]:
    """Every tensor of the checkpoint in `folder`, one file or shards, by its Hugging Face name."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = json.loads(index.read_text())["weight_map"]
        files = sorted(set(weight_map.values()))
    else:
        weight_map, files = None, ["model.safetensors"]

    tensors = {}
    for file in files:
        for name, tensor in safetensors.deserialize((folder / file).read_bytes()):
            if weight_map is not None and weight_map.get(name) != file:
                raise ValueError(f"{folder / file}: holds {name}, which the index puts into {weight_map.get(name)}")
            values = np.frombuffer(tensor["data"], _DTYPES[tensor["dtype"]]).reshape(tensor["shape"])
            if tensor["dtype"] == "BF16":
                values = (values.astype(np.uint32) << 16).view(np.float32)
            tensors[name] = values
    if weight_map is not None and tensors.keys() != weight_map.keys():
        raise ValueError(f"{index}: {sorted(weight_map.keys() - tensors.keys())} are in no file")
    return tensors
