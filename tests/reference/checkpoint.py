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

from infinilm.config.llama_config import LlamaConfig

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


_GRANITE_MOE = (
    ("shared_mlp.input_linear", "mlp.shared_expert.gate_up_proj"),
    ("shared_mlp.output_linear", "mlp.shared_expert.down_proj"),
    ("mlp.input_linear.weight", "mlp.experts.gate_up_proj"),
    ("mlp.output_linear.weight", "mlp.experts.down_proj"),
    ("mlp.gate.layer", "mlp.gate"),
)
_INTERNLM2 = (
    ("attention.wqkv", "self_attn.qkv_by_head"),
    ("attention.wo", "self_attn.o_proj"),
    ("feed_forward", "mlp"),
    ("attention_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("tok_embeddings", "embed_tokens"),
    ("output.", "lm_head."),
)
_EXAONE = (
    ("transformer.h.", "model.layers."),
    ("transformer.wte", "model.embed_tokens"),
    ("transformer.ln_f", "model.norm"),
    ("attn.attention.out_proj", "self_attn.o_proj"),
    ("attn.attention", "self_attn"),
    ("mlp.c_fc_0", "mlp.gate_proj"),
    ("mlp.c_fc_1", "mlp.up_proj"),
    ("ln_1", "input_layernorm"),
    ("ln_2", "post_attention_layernorm"),
)
_OWN_NAMES = (
    ("W_pack", "qkv_proj"),
    ("query_layernorm", "q_norm"),
    ("key_layernorm", "k_norm"),
    ("gate.wg", "gate"),
    ("shared_mlp.input_linear", "mlp.gate_up_proj"),
    ("shared_mlp.output_linear", "mlp.down_proj"),
    ("w1", "gate_proj"),
    ("w3", "up_proj"),
    ("w2", "down_proj"),
    ("c_fc", "up_proj"),
    ("c_proj", "down_proj"),
    ("shared_experts", "shared_expert"),
    ("shared_mlp", "shared_expert"),
)
_CORRECTION = "e_score_correction_bias"
_NOT_TEXT = (
    "mtp_layers.",
    *("mtp.", "visual.", "vision_tower.", "multi_modal_projector.", "vision_model.", "connector."),
    *("embed_vision.", "audio_tower.", "embed_audio.", "mm_projector."),
)


def as_llama(tensors: dict[str, NDArray[np.floating]], config: LlamaConfig) -> dict[str, NDArray[np.floating]]:
    """The tensors of the text part of any family under the names, and in the order of rows, that Llama has."""
    q, kv = config.num_attention_heads, config.num_key_value_heads
    sandwich = config.architecture in ("Glm4ForCausalLM", "Glm4vForConditionalGeneration")
    turned = ("Glm", "Cohere", "Ernie", "Helium", "Llama4")
    neighbours = config.architecture.startswith(turned) and "Glm4Moe" not in config.architecture
    found = {}
    for stored, values in tensors.items():
        name = stored
        if name.removeprefix("model.").startswith(_NOT_TEXT):
            continue
        name = (
            name.replace("language_model.", "")
            .replace("text_model.", "")
            .replace("block_sparse_moe", "mlp")
            .replace("feed_forward.", "mlp." if "Llama4" in config.architecture else "feed_forward.")
            .replace("mlp.router", "mlp.gate")
            .replace(".router.proj.", ".router.")  # of Gemma 4, whose routers and experts are beside an MLP
            .replace(".router.", ".mlp.gate.")
        )
        if "GraniteMoe" in config.architecture and "Hybrid" not in config.architecture:
            for own, llama in _GRANITE_MOE:
                name = name.replace(own, llama)
        if "InternLM2" in config.architecture:
            for own, llama in _INTERNLM2:
                name = name.replace(own, llama)
        if config.architecture == "ExaoneForCausalLM":
            for own, llama in _EXAONE:
                name = name.replace(own, llama)
        if config.architecture == "BaichuanForCausalLM" and name == "lm_head.weight":
            values = values / np.linalg.norm(values.astype(np.float64), axis=1, keepdims=True)
        if ".experts." in name and ".mlp.experts." not in name:
            name = name.replace(".experts.", ".mlp.experts.")
        if config.attention_k_eq_v and "k_proj" in name and stored.replace("k_proj", "v_proj") not in tensors:
            found[name.replace("k_proj", "v_proj")] = values
        for own, llama in _OWN_NAMES:
            name = name.replace(f".{own}.", f".{llama}.")
        if name.endswith(("experts.gate_up_proj", "experts.down_proj", "proj_bias")):
            # [num_experts, outputs of all parts, inputs]; some are transposed; in gpt-oss parts take turns
            stacked, _, parts = name.rpartition(".")
            kind = "bias" if parts.endswith("_bias") else "weight"
            own = [f"{part}_proj" for part in parts.removesuffix("_bias").removesuffix("_proj").split("_")]
            turns = "GptOss" in config.architecture
            for expert, matrix in enumerate(values):
                columns = turns or "Qwen3VLMoe" in config.architecture or "Llama4" in config.architecture
                matrix = matrix.T if columns else matrix
                for i, part in enumerate(own):
                    rows = matrix[i :: len(own)] if turns else np.split(matrix, len(own))[i]
                    found[f"{stacked}.{expert}.{part}.{kind}"] = rows
        elif config.kv_lora_rank and any(part in name for part in ("q_proj", "q_b_proj", "kv_a_proj", "kv_b_proj")):
            found |= _of_latents(name, values, config)
        elif "self_attn.q_proj" in name and config.linear_num_key_heads:  # of each head q, then its gate
            heads = values.reshape(q, 2, config.head_dim, -1)
            for part, rows in (("q_proj", heads[:, 0]), ("gate_proj", heads[:, 1])):
                found[name.replace("q_proj", part)] = rows.reshape(-1, values.shape[1])
        elif "in_proj_qkvz" in name or "in_proj_ba" in name:  # of each key head q, k, v, z; b, a
            heads = values.reshape(config.linear_num_key_heads, -1, values.shape[1])
            group = config.linear_num_value_heads // config.linear_num_key_heads
            key, value = config.linear_key_head_dim, group * config.linear_value_head_dim
            own = {"b": [slice(0, group)], "a": [slice(group, None)]}
            if "qkvz" in name:
                of_qkv = [slice(0, key), slice(key, 2 * key), slice(2 * key, 2 * key + value)]
                own = {"qkv": of_qkv, "z": [slice(2 * key + value, None)]}
            for part, pieces in own.items():
                rows = [heads[:, piece].reshape(-1, values.shape[1]) for piece in pieces]
                found[f"{name.rpartition('in_proj_')[0]}in_proj_{part}.weight"] = np.concatenate(rows)
        elif "in_proj_qkv" in name:
            found[name] = values
        elif name.endswith(_CORRECTION):
            found[f"{name.partition('.mlp.')[0]}.mlp.gate.{_CORRECTION}"] = values.reshape(-1)
        elif "qkv_by_head" in name:  # of each kv head its q heads, then k and v
            heads = values.reshape(kv, q // kv + 2, config.head_dim, -1)
            for part, rows in (("q", heads[:, :-2]), ("k", heads[:, -2]), ("v", heads[:, -1])):
                found[name.replace("qkv_by_head", f"{part}_proj")] = rows.reshape(-1, values.shape[1])
        elif "qkv_proj" in name:
            heads = values.reshape(q + 2 * kv, config.head_dim, -1)
            for part, own in zip("qkv", np.split(heads, [q, q + kv]), strict=True):
                found[name.replace("qkv_proj", f"{part}_proj")] = own.reshape(-1, values.shape[1])
        elif "gate_up_proj" in name:
            for part, own in zip(("gate", "up"), np.split(values, 2), strict=True):
                found[name.replace("gate_up", part)] = own
        elif neighbours and ("q_proj" in name or "k_proj" in name):
            heads = values.reshape(-1, config.head_dim, *values.shape[1:])
            turned = int(config.head_dim * config.partial_rotary_factor)  # 2i with 2i + 1
            halves = np.concatenate([heads[:, 0:turned:2], heads[:, 1:turned:2], heads[:, turned:]], axis=1)
            found[name] = halves.reshape(values.shape)
        elif sandwich and "post_attention" in name:
            found[name.replace("post_attention", "pre_feedforward")] = values
        else:
            found[name.replace("post_self_attn", "post_attention").replace("post_mlp", "post_feedforward")] = values
    return found


def _of_latents(name: str, values: NDArray[np.floating], config: LlamaConfig) -> dict[str, NDArray[np.floating]]:
    """What RoPE turns comes first, in halves; kv_b_proj as what makes keys, transposed, and what makes values."""
    nope = config.qk_nope_head_dim
    if "kv_b_proj" in name:
        heads = values.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
        keys = np.concatenate([head[:nope].T for head in heads])
        return {
            name.replace("kv_b", "k_b"): keys,
            name.replace("kv_b", "v_b"): heads[:, nope:].reshape(-1, config.kv_lora_rank),
        }
    is_row = "kv_a_proj" in name
    heads = values.reshape(1 if is_row else config.num_attention_heads, -1, *values.shape[1:])
    rest, turned = np.split(heads, [config.kv_lora_rank if is_row else nope], axis=1)
    if config.rope_interleave:
        turned = np.concatenate([turned[:, 0::2], turned[:, 1::2]], axis=1)
    rows = np.concatenate([turned, rest], axis=1).reshape(values.shape)
    return {name.replace("kv_a_proj_with_mqa", "kv_a_proj"): rows}
