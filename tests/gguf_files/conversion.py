"""Hugging Face checkpoints as GGUF files, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf_files.writer import File, Stored, quantise
from infinilm.checkpoint import Checkpoint
from infinilm.config import AutoConfig, LlamaConfig

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
MODEL_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
Types = Callable[[str], str]  # of a tensor, by its name in the file


OLMO2_NAMES = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
INTERLEAVED = ("llama", "granite")  # architectures
# What else llama.cpp writes of a family: key to field.
MORE_KEYS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


def gguf_name(name: str, arch: str = "llama") -> str:
    base, _, kind = name.rpartition(".")
    if base in MODEL_NAMES:
        return f"{MODEL_NAMES[base]}.{kind}"
    _, _, layer, rest = base.split(".", 3)
    names = NAMES | OLMO2_NAMES if arch == "olmo2" else NAMES
    return f"blk.{layer}.{names[rest]}.{kind}"


def interleave(weights: npt.NDArray[Any], head_dim: int) -> npt.NDArray[Any]:
    """Rows of heads whose halves follow each other, as rows whose halves take turns."""
    pairs = weights.reshape(-1, 2, head_dim // 2, *weights.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weights.shape)


def rope_metadata(config: LlamaConfig, arch: str) -> tuple[dict[str, Any], dict[str, Stored]]:
    scaling = dict(config.rope_scaling or {})
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    factor = scaling.get("factor")
    half = config.head_dim // 2
    if kind == "llama3":
        factors = []
        for i in range(half):
            wavelength = 2 * math.pi * config.rope_theta ** (2 * i / config.head_dim)
            turns = scaling["original_max_position_embeddings"] / wavelength
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            smooth = float(turns >= low) if low == high else min(max((turns - low) / (high - low), 0.0), 1.0)
            factors.append(1 / ((1 - smooth) / factor + smooth))
        return {}, {"rope_freqs.weight": quantise("F32", np.array(factors, np.float32))}
    prefix = f"{arch}.rope.scaling."
    if kind == "linear":
        return {f"{prefix}type": "linear", f"{prefix}factor": float(factor)}, {}
    if kind == "yarn":
        original = scaling["original_max_position_embeddings"]
        more = {f"{prefix}yarn_{k}": float(scaling[k]) for k in ("beta_fast", "beta_slow") if k in scaling}
        factor = float(factor or config.max_position_embeddings / original)
        return {
            f"{prefix}type": "yarn",
            f"{prefix}factor": factor,
            f"{prefix}original_context_length": original,
        } | more, {}
    if kind == "longrope":
        original = scaling["original_max_position_embeddings"]
        scale = factor or config.max_position_embeddings / original
        attention = scaling.get("attention_factor", math.sqrt(1 + math.log(scale) / math.log(original)))
        tensors = {
            f"rope_factors_{n}.weight": quantise("F32", np.array(scaling[f"{n}_factor"], np.float32))
            for n in ("long", "short")
        }
        return {
            f"{prefix}attn_factor": float(attention),
            f"{prefix}original_context_length": original,
        }, tensors
    assert kind == "default"
    return {}, {}


def metadata_of(config: LlamaConfig) -> dict[str, Any]:
    arch = {"mistral": "llama"}.get(config.model_type, config.model_type)
    values = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": float(config.rope_theta),
        "vocab_size": config.vocab_size,
    }
    if arch == "granite":
        values |= {key: float(getattr(config, name)) for key, name in MORE_KEYS.items()}
    out: dict[str, Any] = {"general.architecture": arch, "general.name": "golden", "general.file_type": 1}
    out |= {f"{arch}.{key}": value for key, value in values.items()}
    for name, ids in (("bos", config.bos_token_id), ("eos", config.eos_token_id)):
        if ids:
            out[f"tokenizer.ggml.{name}_token_id"] = ids[0]
    return out


def plain(name: str) -> str:
    return "F32"


def quantised(type_name: str, otherwise: str = "F32") -> Types:
    """The type for the matrices of layers."""
    return lambda name: (
        type_name if name.startswith("blk.") and "norm" not in name and "bias" not in name else otherwise
    )


def convert(folder: Path, types: Types = plain) -> File:
    """A checkpoint folder as a GGUF file; every vector is F32."""
    config = AutoConfig.from_pretrained(folder)
    metadata = metadata_of(config)
    rope, tensors = rope_metadata(config, metadata["general.architecture"])
    with Checkpoint(folder) as checkpoint:
        for name, info in checkpoint.tensors.items():
            array = checkpoint.array(name)
            if info.dtype == "bfloat16":
                array = (array.astype(np.uint32) << 16).view(np.float32)
            array = np.ascontiguousarray(array, np.float32)
            arch = metadata["general.architecture"]
            to = gguf_name(name, arch)
            if arch in INTERLEAVED and (".attn_q." in to or ".attn_k." in to):
                array = interleave(array, config.head_dim)
            tensors[to] = quantise("F32" if array.ndim == 1 else types(to), array)
    return File(metadata | rope, tensors)


def write_folder(folder: Path, source: Path, weights: dict[str, npt.NDArray[np.float32]]) -> Path:
    """A checkpoint folder with the configuration of another one and these weights in float32."""
    from safetensors.numpy import save_file

    folder.mkdir()
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    save_file(weights, folder / "model.safetensors")
    return folder
