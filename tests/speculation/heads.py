"""Golden checkpoints with an MTP head: its tensors are made as those of the others are, in the layout of the family."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from goldens import entry_of, expand, random_values, write_weights
from numpy.typing import NDArray
from quantised_files.writers import save

if TYPE_CHECKING:  # tools that make goldens have no engine
    from infinilm.config.json.model_config import ModelConfig

HEADS = (
    "qwen3-5-text",
    "qwen3-5-full",
    "qwen3-next",
    "deepseek-v3",
    "deepseek-v32",
    "glm4-moe",
    "mimo",
    "ernie4-5-moe",
    "step-3p7",
)

NUM_MODULES = {"step-3p7": 3}
"""Modules of heads that have several."""

DRAFTED = ("gemma4-text", "gemma4-a4b")
"""Golden Gemma 4 models that drafters are made for: one whose last layers have no keys of their own, and experts."""

_QWEN = {
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "eh_proj": "mtp.fc",
    "shared_head.norm": "mtp.norm",
}
_MIMO = {
    "enorm": "model.mtp_layers.0.token_layernorm",
    "hnorm": "model.mtp_layers.0.hidden_layernorm",
    "eh_proj": "model.mtp_layers.0.input_proj",
    "shared_head.norm": "model.mtp_layers.0.final_layernorm",
}
_ERNIE = {  # which has the norm of the model behind its head
    "enorm": "model.mtp_emb_norm.0",
    "hnorm": "model.mtp_hidden_norm.0",
    "eh_proj": "model.mtp_linear_proj.0",
}
_LAYOUTS = {
    "qwen": ("mtp.layers.0.", _QWEN),
    "mimo": ("model.mtp_layers.0.", _MIMO),
    "ernie": ("model.mtp_block.0.", _ERNIE),
}


def text_of(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config.json that is of text."""
    text: dict[str, Any] = config.get("text_config", config)
    return text


def entry_with_head(name: str) -> dict[str, Any]:
    """The entry of a golden checkpoint with a head, whose layer is as the last with attention."""
    is_full = name == "qwen3-5-full"
    entry = json.loads(json.dumps(entry_of("qwen3-5-text" if is_full else name)))
    config, given = text_of(entry["config"]), entry["tensors"]
    tensors = {tensor: made for pattern, made in given.items() for tensor in expand(pattern)}
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    last = max(i for i in range(layers) if any(f"model.layers.{i}.self_attn." in tensor for tensor in tensors))
    of_last = {t.removeprefix(f"model.layers.{last}."): made for t, made in tensors.items() if f".layers.{last}." in t}
    if is_full:  # attention in every layer
        config["full_attention_interval"] = 1
        tensors = {t: made for t, made in tensors.items() if ".layers." not in t}
        tensors |= {f"model.layers.{i}.{t}": made for i in range(layers) for t, made in of_last.items()}
    if name == "ernie4-5-moe":  # the last layer has experts, and the head has none
        del config["moe_layer_end_index"]
        tensors = {t: made for t, made in tensors.items() if ".layers.2." not in t}
        tensors |= {t.replace(".layers.1.", ".layers.2."): made for t, made in tensors.items() if ".layers.1." in t}
    if name in NUM_MODULES:
        return {**entry, "tensors": tensors | _modules_of_step(config, tensors, NUM_MODULES[name])}
    at, own = _LAYOUTS.get(re.split(r"\d", name.partition("-")[0])[0], (f"model.layers.{layers}.", {}))
    tensors |= {f"{at}{t}": made for t, made in of_last.items()}
    extra: dict[str, tuple[list[int], float, float]] = {
        "enorm": ([hidden], 1.0, 0.2),
        "hnorm": ([hidden], 1.0, 0.2),
        "eh_proj": ([hidden, 2 * hidden], 0.0, (2 * hidden) ** -0.5),
        "shared_head.norm": ([hidden], 1.0, 0.2),
    }
    if own is _ERNIE:
        del extra["shared_head.norm"]
    tensors |= {f"{own.get(t, at + t)}.weight": made for t, made in extra.items()}
    return {**entry, "tensors": tensors}


def _modules_of_step(config: dict[str, Any], tensors: dict[str, Any], count: int) -> dict[str, Any]:
    """Layers behind the last as Step 3.5 has them: with a window and an MLP, and names of their own for what is behind.

    The lists of config.json get an entry for each.
    """
    layers, hidden, vocab = config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]
    window = config["layer_types"].index("sliding_attention")
    for key in ("layer_types", "rope_theta", "partial_rotary_factors"):
        config[key] = [*config[key][:layers], *[config[key][window]] * count]
    for key in ("swiglu_limits", "swiglu_limits_shared"):
        config[key] = [*config[key][:layers], *[0.0] * count]
    config["num_nextn_predict_layers"] = count
    of_layer = {
        **{t.split(f".{window}.", 1)[1]: made for t, made in tensors.items() if f".layers.{window}." in t},
        **{t.split(".0.", 1)[1]: made for t, made in tensors.items() if ".layers.0.mlp." in t},
        "enorm.weight": ([hidden], 1.0, 0.2),
        "hnorm.weight": ([hidden], 1.0, 0.2),
        "eh_proj.weight": ([hidden, 2 * hidden], 0.0, (2 * hidden) ** -0.5),
        "transformer.shared_head.norm.weight": ([hidden], 1.0, 0.2),
        "transformer.shared_head.output.weight": ([vocab, hidden], 0.0, 0.1875),
    }
    return {
        f"model.layers.{layers + module}.{t}": made
        for module in range(count)
        for t, made in of_layer.items()
        if not t.startswith(("moe.", "share_expert."))
    }


def weights_with_head(name: str) -> dict[str, NDArray[np.float64]]:
    entry = entry_with_head(name)
    return {
        tensor: random_values(f"{name}/{tensor}", entry["seed"], shape, mean, spread)
        for tensor, (shape, mean, spread) in entry["tensors"].items()
    }


def make_with_head(folder: Path, name: str, **changes: NDArray[Any]) -> Path:
    """Write the checkpoint; `changes`: other values of tensors."""
    entry = entry_with_head(name)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(entry["config"]), encoding="utf-8")
    write_weights(folder, weights_with_head(name) | changes, entry["dtype"])
    return folder


def make_right_head(folder: Path, name: str = "qwen3-5-full") -> Path:
    """A model that says a function of its newest token alone, and a head that says the same: every draft is right.

    No layer adds anything to the embedding, and the head passes on that of the token behind its position.
    """
    weights = weights_with_head(name)
    norm = weights["model.norm.weight"]
    hidden = len(norm)
    changed = {
        ("o_proj.weight", "down_proj.weight"): None,
        ("mtp.fc.weight", "eh_proj.weight"): np.concatenate((np.eye(hidden), np.zeros((hidden, hidden))), axis=1),
        ("mtp.norm.weight", "shared_head.norm.weight"): norm,
        ("mtp.pre_fc_norm_embedding.weight", "enorm.weight"): np.zeros(hidden),  # norms are 1 + w
        ("shared_head.output.weight",): weights.get("lm_head.weight"),
    }
    changes: dict[str, NDArray[Any]] = {
        tensor: np.zeros_like(values) if made is None else made
        for ends, made in changed.items()
        for tensor, values in weights.items()
        if tensor.endswith(ends)
    }
    return make_with_head(folder / "right", name, **changes)


def make_eagle3(
    folder: Path,
    config: ModelConfig,
    num_ids: int,
    *,
    speculators: bool = False,
    without: tuple[str, ...] = (),
    seed: int = 7,
    **changes: Any,
) -> Path:
    """Write an EAGLE-3 head of a model: in its authors' form, or that of the library speculators.

    `num_ids`: that it drafts. `without`: tensors that are left out. `changes`: other values of config.json.
    """
    hidden, heads, kv_heads, head_dim, inner = config.hidden_size, 4, 2, 16, 40
    at = "layers.0." if speculators else "midlayer."
    shapes = {
        "fc.weight": (hidden, 3 * hidden),
        f"{at}input_layernorm.weight": (hidden,),
        f"{at}hidden_norm.weight": (hidden,),
        f"{at}self_attn.q_proj.weight": (heads * head_dim, 2 * hidden),
        f"{at}self_attn.k_proj.weight": (kv_heads * head_dim, 2 * hidden),
        f"{at}self_attn.v_proj.weight": (kv_heads * head_dim, 2 * hidden),
        f"{at}self_attn.o_proj.weight": (hidden, heads * head_dim),
        f"{at}post_attention_layernorm.weight": (hidden,),
        f"{at}mlp.gate_proj.weight": (inner, hidden),
        f"{at}mlp.up_proj.weight": (inner, hidden),
        f"{at}mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
        "lm_head.weight": (num_ids, hidden),
    }
    rng = np.random.default_rng(seed)
    weights: dict[str, tuple[str, NDArray[Any]]] = {}
    for name, shape in shapes.items():
        of_norm = len(shape) == 1
        values = rng.normal(of_norm, 0.2 if of_norm else shape[-1] ** -0.5, shape)
        weights[name] = "F32", values.astype(np.float32)
    token_ids = np.sort(rng.choice(config.vocab_size, num_ids, replace=False))
    weights["d2t"] = "I64", token_ids - np.arange(num_ids)
    weights["t2d"] = "BOOL", np.isin(np.arange(config.vocab_size), token_ids)
    weights["embed_tokens.weight"] = "F32", np.zeros((config.vocab_size, hidden), np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save(folder / "model.safetensors", {name: made for name, made in weights.items() if name not in without}, {})
    layer = {
        **{"model_type": "llama", "vocab_size": config.vocab_size, "hidden_size": hidden, "intermediate_size": inner},
        **{"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim, "num_hidden_layers": 1},
        **{"rms_norm_eps": config.rms_norm_eps, "rope_theta": 5000.0, "max_position_embeddings": 128},
    }
    said: dict[str, Any] = {"architectures": ["LlamaForCausalLMEagle3"], **layer}
    if speculators:
        said = {"speculators_model_type": "eagle3", "transformer_layer_config": layer}
    said |= {"draft_vocab_size": num_ids, **changes}
    (folder / "config.json").write_text(json.dumps(said), encoding="utf-8")
    return folder


def assistant_config(name: str) -> dict[str, Any]:
    """The config.json of a drafter of a golden Gemma 4, all of whose layers read keys and values of the model."""
    config = entry_of(name)["config"]
    text = config.get("text_config", config)
    same = ("vocab_size", "num_key_value_heads", "head_dim", "global_head_dim", "sliding_window", "rope_parameters")
    same += ("num_global_key_value_heads", "attention_k_eq_v", "hidden_activation", "max_position_embeddings")
    own = {
        **{"model_type": "gemma4_text", "hidden_size": 24, "intermediate_size": 20, "num_attention_heads": 4},
        **{"num_hidden_layers": 3, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
        **{"num_kv_shared_layers": 3, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0},
        **{"use_double_wide_mlp": False, "tie_word_embeddings": True},
    }
    return {
        **{"model_type": "gemma4_assistant", "architectures": ["Gemma4AssistantForCausalLM"]},
        **{"backbone_hidden_size": text["hidden_size"], "tie_word_embeddings": True},
        "text_config": {**own, **{key: text[key] for key in same if key in text}},
    }


def make_assistant(folder: Path, name: str, *, without: tuple[str, ...] = (), **changes: Any) -> Path:
    """Write a drafter of a golden Gemma 4. `without`: tensors that are left out. `changes`: of its text_config.

    Changed sizes are those of its tensors, too, but for `backbone_hidden_size`, which is beside text_config.
    """
    config = assistant_config(name)
    model_size = config["backbone_hidden_size"] = changes.pop("backbone_hidden_size", config["backbone_hidden_size"])
    own = config["text_config"]
    own |= changes
    size, inner = own["hidden_size"], own["intermediate_size"]
    shapes: dict[str, list[int]] = {
        "pre_projection.weight": [size, 2 * model_size],
        "post_projection.weight": [model_size, size],
        "model.embed_tokens.weight": [own["vocab_size"], size],
        "model.norm.weight": [size],
    }
    for layer, kind in enumerate(own["layer_types"]):
        head_dim = own["head_dim" if kind == "sliding_attention" else "global_head_dim"]
        norms = (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        )
        of_layer = {f"{norm}.weight": [size] for norm in norms} | {
            "layer_scalar": [1],
            "self_attn.q_proj.weight": [4 * head_dim, size],
            "self_attn.q_norm.weight": [head_dim],
            "self_attn.o_proj.weight": [size, 4 * head_dim],
            "mlp.gate_proj.weight": [inner, size],
            "mlp.up_proj.weight": [inner, size],
            "mlp.down_proj.weight": [size, inner],
        }
        shapes |= {f"model.layers.{layer}.{tensor}": shape for tensor, shape in of_layer.items()}
    weights = {}
    for tensor, shape in shapes.items():
        mean, spread = (0.9, 0.2) if len(shape) == 1 else (0.0, shape[-1] ** -0.5)
        weights[tensor] = random_values(f"{name}-assistant/{tensor}", 11, shape, mean, spread)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_weights(folder, {tensor: values for tensor, values in weights.items() if tensor not in without}, "float32")
    return folder
