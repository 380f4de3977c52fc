"""How llama.cpp's converter writes latents, the gated delta rule, Mamba, and layers that guess at later tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def latent_metadata(text: dict[str, Any], scaling: dict[str, Any], *, split: bool) -> dict[str, Any]:
    """`split`: newer files, which have kv_b in two and describe attention as if it had one head of keys."""
    rank, rope = text["kv_lora_rank"], text["qk_rope_head_dim"]
    key, value = text["qk_nope_head_dim"] + rope, text["v_head_dim"]
    said = {
        "attention.q_lora_rank": text["q_lora_rank"],
        "attention.kv_lora_rank": rank,
        "rope.dimension_count": rope,
        "attention.head_count_kv": 1 if split else text["num_attention_heads"],
        "attention.key_length": rank + rope if split else key,
        "attention.value_length": rank if split else value,
    }
    if split:
        said |= {"attention.key_length_mla": key, "attention.value_length_mla": value}
    if "mscale_all_dim" in scaling:
        said["rope.scaling.yarn_log_multiplier"] = 0.1 * scaling["mscale_all_dim"]
    return said


def latent_tensors(name: str, array: Array, text: dict[str, Any], *, split: bool) -> Iterator[tuple[str, Array]]:
    if not split or not name.endswith("kv_b_proj.weight"):
        yield name, array
        return
    nope, heads = text["qk_nope_head_dim"], text["num_attention_heads"]
    of_heads = array.reshape(heads, nope + text["v_head_dim"], -1)
    yield name.replace("kv_b_proj", "k_b_proj"), np.ascontiguousarray(of_heads[:, :nope].swapaxes(1, 2))
    yield name.replace("kv_b_proj", "v_b_proj"), np.ascontiguousarray(of_heads[:, nope:])


def kimi_tensor(name: str, array: Array) -> tuple[str, Array]:
    """A tensor of attention of Kimi Linear, which may be of the delta rule."""
    if name.endswith("A_log"):
        return name, -np.exp(array)
    if name.endswith("conv1d.weight"):
        return name, array.reshape(1, len(array), 1, -1)
    return name.replace("dt_bias", "dt_proj.bias"), array


def ling_tensors(
    name: str, array: Array, text: dict[str, Any], experts: dict[str, list[Array]]
) -> Iterator[tuple[str, Array]]:
    """A tensor of Ling 3, whose linears of decays and gates have the names of the first of two; see `experts` there."""
    before, is_expert, after = name.partition(".experts.")
    if is_expert:
        experts.setdefault(f"{before}.experts.{after.partition('.')[2]}", []).append(array)
        return
    module = name.rpartition("attention.")[2]
    has_state = name.startswith("model.layers.") and (int(name.split(".")[2]) + 1) % text["layer_group_size"] != 0
    renamed = {"f_proj.weight": "f_a_proj.weight", "dense.weight": "o_proj.weight", "dt_bias": "dt_proj.bias"}
    if has_state:
        renamed["g_proj.weight"] = "g_a_proj.weight"
    if module == "A_log":
        array = np.exp(array).reshape(-1, 1)
    elif module.endswith("conv1d.weight"):
        array = array.reshape(1, len(array), 1, -1)
    if module.endswith("kv_b_proj.weight"):
        yield from latent_tensors(name.replace("attention.", "self_attn."), array, text, split=True)
        return
    name = name.replace("attention." + module, "self_attn." + renamed.get(module, module))
    name = name.replace("word_embeddings", "embed_tokens").replace(".expert_bias", ".e_score_correction.bias")
    yield name, array


def mamba_tensors(name: str, array: Array, num_groups: int) -> tuple[str, Array]:
    module = name.rpartition(".")[2] if name.endswith(("A_log", ".D", "dt_bias")) else name.rpartition(".")[0]
    if module == "A_log":
        return name, -np.exp(array).reshape(-1, 1)
    if module == "D":
        return name, array.reshape(-1, 1)
    if module == "dt_bias":
        return name.replace("dt_bias", "dt_proj.bias"), array
    if module.endswith("conv1d") and array.ndim == 3:
        return name, array.reshape(len(array), -1)
    return name, array.reshape(num_groups, -1) if module.endswith(".norm") else array


def state_tensors(
    name: str, array: Array, text: dict[str, Any], *, tiled: bool, split: bool
) -> Iterator[tuple[str, Array]]:
    """`tiled`: heads of values stand as if those of keys came again and again (Qwen 3.5, not Qwen 3 Next)."""
    keys, values = text["linear_num_key_heads"], text["linear_num_value_heads"]
    k_dim, v_dim, each = text["linear_key_head_dim"], text["linear_value_head_dim"], values // keys

    def tile(rows: Array, size: int) -> Array:
        """[values * size, ..]"""
        if not tiled:
            return rows
        of_heads = rows.reshape(keys, each, size, *rows.shape[1:])
        return np.ascontiguousarray(of_heads.swapaxes(0, 1)).reshape(rows.shape)

    module = name.rpartition("linear_attn.")[2]
    qk = 2 * keys * k_dim
    if module == "in_proj_qkvz.weight" and split:
        sizes = np.cumsum([k_dim, k_dim, each * v_dim])
        q, k, v, z = (
            part.reshape(-1, array.shape[1]) for part in np.split(array.reshape(keys, -1, array.shape[1]), sizes, 1)
        )
        yield name.replace("in_proj_qkvz", "in_proj_qkv"), np.concatenate([q, k, v])
        yield name.replace("in_proj_qkvz", "in_proj_z"), np.ascontiguousarray(z)
    elif module == "A_log":
        yield name, tile(-np.exp(array), 1)
    elif module == "dt_bias":
        yield name.replace("dt_bias", "dt_proj.bias"), tile(array, 1)
    elif module == "conv1d.weight":
        array = array.reshape(len(array), -1)
        yield name, np.concatenate([array[:qk], tile(array[qk:], v_dim)])
    elif module == "in_proj_qkv.weight":
        yield name, np.concatenate([array[:qk], tile(array[qk:], v_dim)])
    elif module in ("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight"):
        yield name, tile(array, v_dim if "_z" in module else 1)
    elif module == "out_proj.weight":
        yield name, np.ascontiguousarray(tile(np.ascontiguousarray(array.T), v_dim).T)
    else:
        yield name, array


_MTP = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head.norm"}


def name_in_later_layer(name: str, text: dict[str, Any]) -> str:
    """The name that a tensor of Qwen's MTP head has as one of the layer behind the last; others keep theirs."""
    if not name.startswith("mtp."):
        return name
    module, kind = name.removeprefix("mtp.").removeprefix("layers.0.").rsplit(".", 1)
    return f"model.layers.{text['num_hidden_layers']}.{_MTP.get(module, module)}.{kind}"


def later_layer(layer: int, hidden_size: int) -> dict[str, Array]:
    """Some tensors of a layer behind the last."""
    square = np.ones((hidden_size, 2 * hidden_size), np.float32)
    return {f"blk.{layer}.nextn.eh_proj.weight": square, f"blk.{layer}.attn_norm.weight": square[0, :hidden_size]}
