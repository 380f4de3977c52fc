"""Writes mmproj files of golden models that see, as llama.cpp's converter does (conversion/*.py), by gguf-py's map."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from vision import tokenizer_of

from gguf_files.conversion import interleave
from gguf_files.families import FAMILIES, Rules, convert_family
from gguf_files.writer import File, quantise
from infinilm.checkpoint import Checkpoint

Array = npt.NDArray[np.float32]

# The architecture of the text, the name of the projector, and the activation by the key that says it.
KINDS = {
    "gemma3": (FAMILIES["gemma3"], "gemma3", "gelu"),
    "idefics3": (FAMILIES["smolvlm"], "idefics3", "gelu"),
    "mistral3": (FAMILIES["mistral3"], "pixtral", "silu"),
    "qwen3-vl": (FAMILIES["qwen3-vl"], "qwen3vl_merger", "gelu"),
    "qwen2-vl": (FAMILIES["qwen2-vl"], "qwen2vl_merger", ""),
    "qwen2-5-vl": (FAMILIES["qwen2-vl"], "qwen2.5vl_merger", "silu"),
}
_QWEN_MODULES = {"linear_fc1": "mm.0", "linear_fc2": "mm.2", "norm": "v.post_ln"}
_LEVEL_MODULES = {"linear_fc1": "fc1", "linear_fc2": "fc2", "norm": "norm"}


def rules_of(name: str) -> Rules:
    return KINDS[name][0]


def write_text(folder: Path, name: str) -> File:
    """The model of texts, with the words of `tokenizer_of`."""
    file = convert_family(folder, rules_of(name))
    words = sorted(tokenizer_of(name).get_vocab().items(), key=lambda item: item[1])
    return File({**file.metadata, "tokenizer.ggml.tokens": [word for word, _ in words]}, file.tensors)


def write_projector(folder: Path, name: str) -> File:
    """The tower and what makes rows of its results."""
    import gguf

    config = json.loads((folder / "config.json").read_text())
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    vision, text, (_, kind, act) = config["vision_config"], config.get("text_config", config), KINDS[name]
    hidden_size, inner_size = vision["hidden_size"], vision.get("intermediate_size")
    if kind == "qwen2vl_merger":  # as the converter has it
        hidden_size, inner_size = vision["embed_dim"], vision["hidden_size"]
    num_layers = vision.get("num_hidden_layers", vision.get("depth"))
    metadata: dict[str, Any] = {
        "general.architecture": "clip",
        "general.type": "mmproj",
        "clip.has_vision_encoder": True,
        "clip.projector_type": kind,
        **({f"clip.use_{act}": True} if act else {}),
        gguf.Keys.ClipVision.PROJECTION_DIM: text["hidden_size"],
        gguf.Keys.ClipVision.PATCH_SIZE: vision["patch_size"],
        gguf.Keys.ClipVision.EMBEDDING_LENGTH: hidden_size,
        gguf.Keys.ClipVision.FEED_FORWARD_LENGTH: inner_size,
        gguf.Keys.ClipVision.BLOCK_COUNT: num_layers,
        gguf.Keys.ClipVision.Attention.HEAD_COUNT: vision.get("num_attention_heads", vision.get("num_heads")),
        gguf.Keys.ClipVision.Attention.LAYERNORM_EPS: 1e-5 if kind == "pixtral" else 1e-6,
        gguf.Keys.ClipVision.IMAGE_MEAN: settings["image_mean"],
        gguf.Keys.ClipVision.IMAGE_STD: settings["image_std"],
    }
    image_size = vision.get("image_size", int(vision.get("num_position_embeddings", 0) ** 0.5) * vision["patch_size"])
    metadata[gguf.Keys.ClipVision.IMAGE_SIZE] = settings["size"]["longest_edge"] if kind == "pixtral" else image_size
    if kind == "gemma3":
        per_side = int(config["mm_tokens_per_image"] ** 0.5)
        metadata["clip.vision.projector.scale_factor"] = image_size // vision["patch_size"] // per_side
    elif kind == "idefics3":
        metadata["clip.vision.projector.scale_factor"] = config["scale_factor"]
        metadata["clip.vision.preproc_image_size"] = settings["size"]["longest_edge"]
    else:
        metadata["clip.vision.spatial_merge_size"] = config.get("spatial_merge_size", vision.get("spatial_merge_size"))
    if kind in ("qwen2vl_merger", "qwen2.5vl_merger"):
        del metadata["clip.vision.spatial_merge_size"]
        metadata["clip.vision.image_min_pixels"] = settings["min_pixels"]
        metadata["clip.vision.image_max_pixels"] = settings["max_pixels"]
    if kind == "qwen2.5vl_merger":
        metadata[gguf.Keys.ClipVision.N_WA_PATTERN] = vision["fullatt_block_indexes"][0] + 1
        metadata["clip.vision.window_size"] = vision["window_size"]  # of published models it is 112, and not written
    if kind == "qwen3vl_merger":
        levels = vision["deepstack_visual_indexes"]
        metadata["clip.vision.is_deepstack_layers"] = [i in levels for i in range(num_layers)]
        metadata["clip.vision.image_min_pixels"] = settings["size"]["shortest_edge"]
        metadata["clip.vision.image_max_pixels"] = settings["size"]["longest_edge"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, num_layers)
    tensors = {}
    with Checkpoint(folder) as checkpoint:
        for stored in sorted(checkpoint.tensors):
            if not any(part in stored for part in ("vis", "connector", "projector")):
                continue
            array = (checkpoint.array(stored).astype(np.uint32) << 16).view(np.float32)
            for to, values in _named(stored, array, vision, names):
                is_plain = values.ndim == 1 or "embd" in to
                tensors[to] = quantise("F32" if is_plain else "BF16", np.ascontiguousarray(values))
    return File(metadata, tensors)


def _named(name: str, array: Array, vision: dict[str, Any], names: Any) -> Iterator[tuple[str, Array]]:
    """A tensor under its name in the file, or two."""
    name = name.removeprefix("model.")
    if name == "visual.patch_embed.proj.weight":
        yield "v.patch_embd.weight", array[:, :, 0]
        yield "v.patch_embd.weight.1", array[:, :, 1]
        return
    if ".attn.qkv." in name and "deepstack_visual_indexes" not in vision:
        for part, own in zip("qkv", np.split(array, 3), strict=True):
            yield f"v.blk.{name.split('.')[2]}.attn_{part}.{name.rpartition('.')[2]}", own
        return
    if name.startswith("visual.merger.") and "deepstack_visual_indexes" in vision:
        module, kind = name.removeprefix("visual.merger.").split(".")
        yield f"{_QWEN_MODULES[module]}.{kind}", array
        return
    if name.startswith("visual.deepstack_merger_list."):
        level, module, kind = name.removeprefix("visual.deepstack_merger_list.").split(".")
        yield f"v.deepstack.{vision['deepstack_visual_indexes'][int(level)]}.{_LEVEL_MODULES[module]}.{kind}", array
        return
    name = name.replace("mm_input_projection_weight", "mm_input_projection.weight")
    if name.endswith("mm_soft_emb_norm.weight"):
        array = array + np.float32(1)
    if vision.get("model_type") == "pixtral" and name.endswith(("q_proj.weight", "k_proj.weight")):
        array = interleave(array, vision["head_dim"])
    suffixes = (".weight", ".bias")
    published = name.replace("vision_tower.e", "vision_tower.vision_model.e")  # the names of published checkpoints
    published = published.replace("vision_tower.post", "vision_tower.vision_model.post")
    known = (names.get_name(own, suffixes) for own in (name, published, f"model.{name}"))
    to = next((own for own in known if own is not None), None)
    assert to is not None, name
    yield to, array
