"""Random checkpoints of any shape and dtype, and engines that have loaded them, for tests of packed weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from infinilm import InferEngine, LlamaConfig, StaticKVCacheConfig, _core
from infinilm.checkpoint.safetensors_header import DTYPE_CODES
from infinilm.config.spec import build_spec

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 131,  # no multiple of anything
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eos_token_id": [],
}


def bits(values: np.ndarray, dtype: str) -> bytes:
    """Float32 values as the bytes of a dtype; bfloat16 is cut off."""
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    return values.astype({"float32": "<f4", "float16": "<f2"}[dtype]).tobytes()


def write_safetensors(path: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    header: dict[str, Any] = {}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": DTYPE_CODES[dtype], "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + b"".join(data for _, _, data in tensors.values()))


def make_checkpoint(folder: Path, dtype: str = "float32", float32: tuple[str, ...] = (), **changes: Any) -> Path:
    """`float32`: ends of the names of tensors that are stored in float32 whatever the dtype of the others is."""
    folder.mkdir(parents=True)
    config = CONFIG | changes | {"dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config))
    known = LlamaConfig.from_dict(config)
    rng = np.random.default_rng(5)
    tensors = {}
    for name, shape in _core.param_shapes(build_spec(known, dtype=dtype, max_model_len=32)).items():
        values = rng.standard_normal(shape).astype(np.float32)
        values = 1 + 0.1 * values if name.endswith("norm.weight") else values * np.float32(2 / shape[-1] ** 0.5)
        stored = "float32" if float32 and name.endswith(float32) else dtype
        tensors[name] = (stored, shape, bits(values, stored))
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def open_engine(folder: Path, dtype: str | None = None, **settings: Any) -> InferEngine:
    config = LlamaConfig.from_dict(json.loads((folder / "config.json").read_text()))
    config.dtype = dtype or config.dtype
    return InferEngine(config, device_type="cpu", cache_config=StaticKVCacheConfig(2, 32), **settings)


def load_engine(folder: Path, dtype: str | None = None, **settings: Any) -> InferEngine:
    engine = open_engine(folder, dtype, **settings)
    engine.load_weights(folder, use_tqdm=False)
    return engine


def logits(engine: InferEngine) -> np.ndarray:
    """[2, vocab_size] after two prompts."""
    output = engine.forward(InferEngine.Input([[1, 5, 9, 8, 6], [3, 4, 7, 11, 2]]), return_logits=True)
    assert output.logits is not None
    return output.logits.numpy().copy()


def contents(engine: InferEngine) -> list[dict[str, tuple[str, tuple[int, ...], bytes]]]:
    """What state_dict gives, as bytes."""
    return [
        {name: (tensor.dtype, tensor.shape, tensor.numpy().tobytes()) for name, tensor in rank.items()}
        for rank in engine.state_dict()
    ]
