"""The metadata of a GGUF file as the content of a config.json and of a generation_config.json."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm.checks import as_integer
from infinilm.errors import ConfigError, WeightError
from infinilm.gguf.architectures import ARCHITECTURES, INERT_KEYS, KEYS, NEUTRAL_KEYS, UNCLEAR, Architecture
from infinilm.gguf.file import GgufFile
from infinilm.gguf.mixing_layers import conv_layers, latent_and_state_layers, latent_layers, mamba_layers, state_layers
from infinilm.gguf.shaped_layers import (
    alike_layers,
    heads_and_gates,
    heads_of_windows,
    layers_of_blocks,
    layers_of_streams,
)
from infinilm.gguf.vocabulary import end_ids, special_id
from infinilm.unsupported import unsupported

__all__ = ["architecture_of", "config_json", "generation_config_json", "gguf_layers", "layer_numbers", "stored_dtype"]

_DENSE = re.compile(r"blk\.(\d{1,9})\.ffn_up\.weight")  # a layer with an MLP
_ABSENT_AS_ZERO = frozenset({"expert_weights_scale", "expert_group_count", "expert_group_used_count"})
_DTYPES = {"F32": "float32", "BF16": "bfloat16"}  # others, which quantised weights are, become float16


# By general.type, or by general.architecture.
_NO_MODELS = {
    "adapter": "a LoRA adapter, not a model: pass its base model, and the folder of PEFT as lora={'name': folder}",
    "mmproj": "the part of a model that sees or hears: pass the GGUF file of its language model, and this as mmproj",
    "clip": "the part of a model that sees or hears: pass the GGUF file of its language model, and this as mmproj",
    "imatrix": "an importance matrix, which a model was quantised by: pass the GGUF file of the model",
    "controlvector": "a control vector, not a model: pass the GGUF file of its model, and this one as --control-vector",
}


def architecture_of(gguf: GgufFile) -> Architecture:
    """The row of a file's architecture. ConfigError: it is not supported, or the file says none, or is no model."""
    name = gguf.metadata.get("general.architecture")
    for kind in (gguf.metadata.get("general.type"), name):
        if isinstance(kind, str) and kind in _NO_MODELS:
            raise ConfigError(f"{gguf.path}: {_NO_MODELS[kind]}")
    if not isinstance(name, str):
        raise ConfigError(f"{gguf.path}: general.architecture, which names the kind of model, is missing or no text")
    if name in UNCLEAR:
        raise ConfigError(
            f"{gguf.path}: general.architecture {name!r} is not supported\nmissing: {UNCLEAR[name]}\n"
            "pass the safetensors of the model, which are read"
        )
    if name not in ARCHITECTURES:
        where = "docs/formats.md lists those that are"
        raise unsupported(f"{gguf.path}: general.architecture", name, ARCHITECTURES, where)
    return ARCHITECTURES[name]


def stored_dtype(gguf: GgufFile) -> str:
    """The dtype that most of the weights have, once they are plain numbers."""
    totals: dict[str, int] = {}
    for tensor in gguf.tensors.values():
        dtype = _DTYPES.get(tensor.type, "float16")
        totals[dtype] = totals.get(dtype, 0) + math.prod(tensor.shape)
    return max(totals, key=lambda dtype: totals[dtype], default="float32")


def gguf_layers(gguf: GgufFile) -> int:
    """How many layers the file has, also those that guess at later tokens and are not read."""
    count = gguf.metadata.get(f"{gguf.metadata.get('general.architecture')}.block_count")
    return count if isinstance(count, int) else 0


def config_json(gguf: GgufFile) -> dict[str, Any]:
    """Return the content of a config.json for the model.

    Raises
    ------
    ConfigError
        An architecture that is not supported, metadata that are missing, or layers that differ from each other.
    """
    row = architecture_of(gguf)
    prefix = f"{gguf.metadata['general.architecture']}."
    said = {key.removeprefix(prefix): value for key, value in gguf.metadata.items() if key.startswith(prefix)}
    if not said.get("expert_count"):  # the converter tells sizes of experts even where there are none
        said = {key: value for key, value in said.items() if not key.startswith("expert_")}
    values = {"model_type": row.model_type, "dtype": stored_dtype(gguf), **row.defaults}
    model = _Model(gguf, row, prefix, said, values)
    for read in _READERS:
        read(model)
    return model.values


def layer_numbers(gguf: GgufFile, row: Architecture, num_layers: int) -> dict[str, npt.NDArray[np.float32]]:
    """Return parameters of one number each, which the metadata have as a list of all layers."""
    found: dict[str, npt.NDArray[np.float32]] = {}
    for key, module in row.layer_numbers.items():
        numbers = gguf.metadata.get(key)
        numbers = [numbers] * num_layers if isinstance(numbers, float) else numbers
        if not isinstance(numbers, list) or len(numbers) != num_layers or not all(map(_is_finite, numbers)):
            raise ConfigError(
                f"{gguf.path}: {key} must have a number for each of {num_layers} layers; got {numbers!r:.80}"
            )
        if isinstance(module, float):
            if any(not math.isclose(number, module, rel_tol=2**-8) for number in numbers):  # bfloat16 has so many bits
                raise ConfigError(f"{gguf.path}: {key} is {numbers!r:.80}; only {module} is supported")
            continue
        for layer, number in enumerate(numbers):
            found[f"model.layers.{layer}.{module}"] = np.array([number], np.float32)
    return found


def _is_finite(number: object) -> bool:
    return isinstance(number, float) and math.isfinite(number)


def generation_config_json(gguf: GgufFile) -> dict[str, Any]:
    """Return the content of a generation_config.json: defaults of sampling that newer files carry."""
    keys = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
    keys["penalty_repeat"] = "repetition_penalty"
    found = {name: gguf.metadata.get(f"general.sampling.{key}") for key, name in keys.items()}
    # Stored as float32: 0.8 is read as 0.800000011920929.
    return {k: round(v, 6) if isinstance(v, float) else v for k, v in found.items() if v is not None}


@dataclass(slots=True)
class _Model:
    """A model whose metadata are read: the contents of the file, and the values of config.json found so far."""

    gguf: GgufFile
    row: Architecture
    prefix: str  # stands before the keys of its architecture
    said: dict[str, Any]  # by these keys, without the prefix
    values: dict[str, Any]  # the content of config.json

    def key(self, name: str) -> str:
        """The name of a key, as messages have it."""
        return f"{self.gguf.path}: {self.prefix}{name}"


def _conditional_values(m: _Model) -> None:
    for condition, known in m.row.where.items():
        if _applies(condition, m.said, m.gguf):
            m.values |= known


def _kinds_of_layers(m: _Model) -> None:
    """Bring what only some kinds of layers have to keys of config.json; the other readers see alike layers."""
    for kind, read in _KINDS_OF_LAYERS.items():
        if kind == m.row.layers or (kind == "shaped" and m.row.shaped_layers):
            m.said, known = read(m.gguf, m.prefix, m.said)
            m.values |= known


def _known_keys(m: _Model) -> None:
    """Rename the keys that stand for fields; refuse those that ask for other math, and leave out those without any."""
    keys, neutral = {**KEYS, **m.row.keys}, {**NEUTRAL_KEYS, **m.row.neutral}
    for key, value in m.said.items():
        if key in keys:
            if keys[key] and not (key in _ABSENT_AS_ZERO and value == 0):
                m.values[keys[key]] = _same_of_all_layers(m, key, value)
        elif key in neutral:
            if value not in neutral[key]:
                allowed = " or ".join(map(repr, neutral[key]))
                raise ConfigError(f"{m.key(key)} is {value!r:.80}; only {allowed} is supported")
        elif key not in INERT_KEYS:
            m.values[m.prefix + key] = value  # no configuration knows it, and so it is told as unknown
    if "intermediate_size" not in m.values and "moe_intermediate_size" in m.values:
        m.values["intermediate_size"] = m.values["moe_intermediate_size"]  # no layer has an MLP
    for key in ("block_count", "embedding_length", "attention.head_count", "feed_forward_length", "context_length"):
        as_integer(m.key(key), m.values.get(keys[key]))


def _later_layers(m: _Model) -> None:
    """Do not count layers that guess at later tokens."""
    if later := m.said.get("nextn_predict_layers", 0):
        as_integer(m.key("nextn_predict_layers"), later, below=m.values["num_hidden_layers"])
        m.values["num_hidden_layers"] -= later


def _what_tensors_tell(m: _Model) -> None:
    """The vocabulary, whether the embedding is also the lm_head, and which biases there are."""
    tensors = m.gguf.tensors
    if "token_embd.weight" not in tensors:
        raise WeightError(
            f"{m.gguf.path}: has no tensor 'token_embd.weight': it is no language model, or a part of one"
        )
    m.values["vocab_size"] = tensors["token_embd.weight"].shape[0]
    m.values["tie_word_embeddings"] = "output.weight" not in tensors
    if "token_types.weight" in tensors:
        m.values["type_vocab_size"] = tensors["token_types.weight"].shape[0]
    for key, names in m.row.biases.items():
        m.values[key] = any(f"blk.0.{name}" in tensors for name in names)


def _heads(m: _Model) -> None:
    """The size of heads, and what their scores are multiplied by."""
    values = m.values
    head_dim = values.setdefault("head_dim", values["hidden_size"] // values["num_attention_heads"])
    as_integer(m.key("attention.key_length"), head_dim, below=2**16)
    if m.said.get("attention.value_length", head_dim) != head_dim:
        raise ConfigError(
            f"{m.gguf.path}: heads of k have {head_dim} elements and those of v {m.said['attention.value_length']}; "
            "only equal sizes are supported"
        )
    if not m.row.scales_attention and values.get("attention_multiplier") in (0.0, head_dim**-0.5):
        del values["attention_multiplier"]  # as without it
    if m.row.divides_by_head_dim:
        is_wide = values["num_hidden_layers"] == m.row.width_scaled_layers
        size = values["hidden_size"] // values["num_attention_heads"] if is_wide else head_dim
        values["query_pre_attn_scalar"] = size


def _experts(m: _Model) -> None:
    """Find the layers that have experts, and how those of a token are chosen."""
    values, counts_dense = m.values, m.row.keys.get("leading_dense_block_count")
    if counts_dense and not m.said.get("expert_count"):
        values.pop("first_k_dense_replace", None)  # all layers, where none has experts
    if values["model_type"] == "deepseek_v2":
        values["topk_method"] = "group_limited_greedy" if values["n_group"] != 1 else "greedy"
    if m.said.get("expert_count") and not m.row.shaped_layers and not counts_dense:
        layers = {int(match[1]) for name in m.gguf.tensors if (match := _DENSE.fullmatch(name))}
        if dense := sorted(layer for layer in layers if layer < values["num_hidden_layers"]):
            values["mlp_only_layers"] = dense


def _rope(m: _Model) -> None:
    """The part of a head that RoPE turns, and how its frequencies are scaled."""
    head_dim = m.values["head_dim"]
    rotary = as_integer(m.key("rope.dimension_count"), m.said.get("rope.dimension_count", head_dim))
    if rotary != head_dim:
        m.values["partial_rotary_factor"] = rotary / head_dim
    scaling = _rope_scaling(m)
    if scaling and scaling["rope_type"] == "yarn":
        scaling = {**m.row.yarn, **scaling}
        spread = m.said.get("rope.scaling.yarn_log_multiplier")
        if m.row.layers == "latent" and isinstance(spread, float) and spread:
            # The file has a tenth of it, and nothing of mscale, which llama.cpp takes to be the same.
            scaling |= dict.fromkeys(("mscale", "mscale_all_dim"), round(spread / 0.1, 6))
    if scaling:
        m.values["rope_scaling"] = scaling


def _windows(m: _Model) -> None:
    """Find the layers that have a window, and their RoPE."""
    said, values = m.said, m.values
    if values.get("sliding_window") == 0:
        values["sliding_window"] = None
    pattern = said.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if len(pattern) != (layers := values["num_hidden_layers"]):
            raise ConfigError(
                f"{m.key('attention.sliding_window_pattern')} has {len(pattern)} entries; expected one for each of "
                f"the {layers} layers"
            )
        values["layer_types"] = ["sliding_attention" if windowed else "full_attention" for windowed in pattern]
    elif pattern is not None:
        values["sliding_window_pattern"] = pattern
    if m.row.local_rope and values.get("sliding_window"):
        values["rope_local_base_freq"] = said.get(
            "rope.freq_base_swa", values.get("rope_local_base_freq", values.get("rope_theta"))
        )
    elif "rope.freq_base_swa" in said and said["rope.freq_base_swa"] != values.get("rope_theta"):
        values["rope_local_base_freq"] = said["rope.freq_base_swa"]  # which most families refuse


def _special_tokens(m: _Model) -> None:
    for key in ("bos_token_id", "pad_token_id"):
        if (token_id := special_id(m.gguf, key)) is not None:
            m.values[key] = token_id
    m.values.setdefault("bos_token_id", [])
    m.values["eos_token_id"] = end_ids(m.gguf)


_KINDS_OF_LAYERS = {
    "shaped": alike_layers,
    "latent": latent_layers,
    "state": state_layers,
    "latent and state": latent_and_state_layers,
    "conv": conv_layers,
    "mamba": mamba_layers,
    "heads": heads_of_windows,
    "heads and gates": heads_and_gates,
    "blocks": layers_of_blocks,
    "streams": layers_of_streams,
}

# In this order: some read the values that others before them have set.
_READERS = (
    _conditional_values,
    _kinds_of_layers,
    _known_keys,
    _later_layers,
    _what_tensors_tell,
    _heads,
    _experts,
    _rope,
    _windows,
    _special_tokens,
)


def _applies(condition: str, said: dict[str, Any], gguf: GgufFile) -> bool:
    """True if a condition of `Architecture.where` holds."""
    if condition.startswith("tensor "):
        return any(name.endswith(f".{condition.removeprefix('tensor ')}") for name in gguf.tensors)
    if condition.startswith("!"):
        return condition[1:] not in said
    key, _, value = condition.partition("=")
    return str(said.get(key)) == value if value else bool(said.get(key))


def _same_of_all_layers(m: _Model, key: str, value: Any) -> Any:
    if not isinstance(value, list):
        return value
    if len(set(map(repr, value))) != 1:
        raise ConfigError(f"{m.key(key)} differs between layers ({value[:4]!r:.80} ..), which is not supported")
    return value[0]


def _rope_scaling(m: _Model) -> dict[str, Any] | None:
    """The rope_scaling of config.json.

    Factors that are stored as tensors divide the frequencies, which is what the type longrope does: Llama 3's are the
    same for all lengths.
    """
    gguf, said, prefix = m.gguf, m.said, m.prefix
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
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    scaling["original_max_position_embeddings"] = original or context
    if (beta := said.get("attention.temperature_scale")) is not None:
        scaling |= {"llama_4_scaling_beta": beta, "mscale": 1.0}
        scaling["mscale_all_dim"] = said.get("rope.scaling.yarn_log_multiplier", 1.0)
    if "rope.scaling.yarn_attn_factor" in said:
        scaling["attention_factor"] = said["rope.scaling.yarn_attn_factor"]
    for key in ("beta_fast", "beta_slow"):
        if f"rope.scaling.yarn_{key}" in said:
            scaling[key] = said[f"rope.scaling.yarn_{key}"]
    if attention_factor is not None and isinstance(factor, float):  # llama.cpp multiplies it with that of YaRN
        scaling["attention_factor"] = attention_factor * (0.1 * math.log(factor) + 1.0)
    return scaling
