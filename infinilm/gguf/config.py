"""The metadata of a GGUF file as the content of a config.json and of a generation_config.json."""

from __future__ import annotations

import math
from typing import Any

from infinilm.checks import as_integer
from infinilm.errors import ConfigError, WeightError
from infinilm.gguf.architectures import ARCHITECTURES, INERT_KEYS, KEYS, Architecture
from infinilm.gguf.file import GgufFile
from infinilm.gguf.vocabulary import end_ids, special_id

__all__ = ["architecture_of", "config_json", "generation_config_json", "stored_dtype"]

_DTYPES = {"F32": "float32", "BF16": "bfloat16"}  # of others float16, which quantised weights become


def architecture_of(gguf: GgufFile) -> Architecture:
    """The row of a file's architecture. ConfigError: it is not supported, or the file says none."""
    name = gguf.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ConfigError(
            f"{gguf.path}: architecture {name!r} (general.architecture) is not supported; supported: "
            f"{', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def stored_dtype(gguf: GgufFile) -> str:
    """The dtype that most of the weights have, once they are plain numbers."""
    totals: dict[str, int] = {}
    for tensor in gguf.tensors.values():
        dtype = _DTYPES.get(tensor.type, "float16")
        totals[dtype] = totals.get(dtype, 0) + math.prod(tensor.shape)
    return max(totals, key=lambda dtype: totals[dtype], default="float32")


def config_json(gguf: GgufFile) -> dict[str, Any]:
    """What the config.json of the model would say.

    Raises
    ------
    ConfigError
        An architecture that is not supported, metadata that are missing, or layers that differ from each other.
    """
    row = architecture_of(gguf)
    prefix = f"{gguf.metadata['general.architecture']}."
    said = {key.removeprefix(prefix): value for key, value in gguf.metadata.items() if key.startswith(prefix)}
    values: dict[str, Any] = {"model_type": row.model_type, "dtype": stored_dtype(gguf), **row.defaults}
    for key, value in said.items():
        if key in KEYS:
            values[KEYS[key]] = _same_of_all_layers(gguf, prefix + key, value)
        elif key not in INERT_KEYS:
            values[prefix + key] = value  # which no configuration knows: it is told as such
    for key in ("block_count", "embedding_length", "attention.head_count", "feed_forward_length", "context_length"):
        as_integer(f"{gguf.path}: {prefix + key}", values.get(KEYS[key]))
    if "token_embd.weight" not in gguf.tensors:
        raise WeightError(f"{gguf.path}: has no tensor 'token_embd.weight': it is no language model, or a part of one")
    values["vocab_size"] = gguf.tensors["token_embd.weight"].shape[0]
    values["tie_word_embeddings"] = "output.weight" not in gguf.tensors
    values.update({key: True for key, tensor in row.biases.items() if f"blk.0.{tensor}" in gguf.tensors})
    head_dim = values.setdefault("head_dim", values["hidden_size"] // values["num_attention_heads"])
    as_integer(f"{gguf.path}: {prefix}attention.key_length", head_dim, below=2**16)
    if said.get("attention.value_length", head_dim) != head_dim:
        raise ConfigError(
            f"{gguf.path}: heads of k have {head_dim} elements and those of v {said['attention.value_length']}; only "
            "equal sizes are supported"
        )
    if not row.scales_attention and values.get("attention_multiplier") in (0.0, head_dim**-0.5):
        del values["attention_multiplier"]  # as without it
    rotary = as_integer(f"{gguf.path}: {prefix}rope.dimension_count", said.get("rope.dimension_count", head_dim))
    if rotary != head_dim:
        values["partial_rotary_factor"] = rotary / head_dim
    if scaling := _rope_scaling(gguf, said, prefix):
        values["rope_scaling"] = scaling
    for key in ("bos_token_id", "pad_token_id"):
        if (token_id := special_id(gguf, key)) is not None:
            values[key] = token_id
    values.setdefault("bos_token_id", [])
    values["eos_token_id"] = end_ids(gguf)
    return values


def generation_config_json(gguf: GgufFile) -> dict[str, Any]:
    """What the generation_config.json would say: defaults of sampling that newer files carry."""
    keys = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
    keys["penalty_repeat"] = "repetition_penalty"
    found = {name: gguf.metadata.get(f"general.sampling.{key}") for key, name in keys.items()}
    # Stored as float32: 0.8 is read as 0.800000011920929.
    return {k: round(v, 6) if isinstance(v, float) else v for k, v in found.items() if v is not None}


def _same_of_all_layers(gguf: GgufFile, key: str, value: Any) -> Any:
    if not isinstance(value, list):
        return value
    if len(set(map(repr, value))) != 1:
        raise ConfigError(f"{gguf.path}: {key} differs between layers ({value[:4]!r:.80} ..), which is not supported")
    return value[0]


def _rope_scaling(gguf: GgufFile, said: dict[str, Any], prefix: str) -> dict[str, Any] | None:
    """The rope_scaling of config.json.

    Factors that are stored as tensors divide the frequencies, which is what the type longrope does: Llama 3's are the
    same for all lengths.
    """
    kind = said.get("rope.scaling.type", "none")
    factor = said.get("rope.scaling.factor", said.get("rope.scale_linear"))
    original = said.get("rope.scaling.original_context_length")
    attention_factor = said.get("rope.scaling.attn_factor")
    context = said.get("context_length")
    if "rope_factors_long.weight" in gguf.tensors:
        lists = {f"{n}_factor": gguf.floats(f"rope_factors_{n}.weight").tolist() for n in ("short", "long")}
        return {
            "rope_type": "longrope",
            **lists,
            "original_max_position_embeddings": original or context,
            "attention_factor": attention_factor or 1.0,
        }
    if "rope_freqs.weight" in gguf.tensors:
        if kind not in ("none", "linear") or factor not in (None, 0.0, 1.0):
            raise ConfigError(f"{gguf.path}: both rope_freqs.weight and {prefix}rope.scaling.type {kind!r} scale RoPE")
        factors = gguf.floats("rope_freqs.weight").tolist()
        positions = {"original_max_position_embeddings": context, "attention_factor": 1.0}
        return {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, **positions}
    if kind == "none" or (kind == "linear" and factor in (None, 0.0, 1.0)):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise ConfigError(f"{gguf.path}: {prefix}rope.scaling.type {kind!r} is not supported: none, linear or yarn are")
    if said.get("rope.scaling.yarn_ext_factor", 1.0) not in (1.0, -1.0):
        raise ConfigError(f"{gguf.path}: {prefix}rope.scaling.yarn_ext_factor other than 1 is not supported")
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original or context}
    for key in ("beta_fast", "beta_slow"):
        if f"rope.scaling.yarn_{key}" in said:
            scaling[key] = said[f"rope.scaling.yarn_{key}"]
    if attention_factor is not None and isinstance(factor, float):  # llama.cpp multiplies it with that of YaRN
        scaling["attention_factor"] = attention_factor * (0.1 * math.log(factor) + 1.0)
    return scaling
