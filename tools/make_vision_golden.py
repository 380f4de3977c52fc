"""Make the kept files of tests/golden_vision: what transformers computes from tiny random models that see.

Needs torch and transformers 5.x (the tests need neither); from the repository root:

    python tools/make_vision_golden.py [NAME ...]

A model is one entry in tests/golden_vision/vision.json: its config.json, its preprocessor_config.json, the dtype of its
file and a seed; the tool adds `tensors`, from which tests make its weights (tests/goldens.py), and `digests`, of what
the processor that uses Pillow makes of each picture. Pictures and prompts are those of tests/vision.py. Results are in
vision.npz, computed in float32 with eager attention: of each picture `grid_i` and `rows_i`, what the tower makes of it,
[num_tokens, levels * hidden_size]; and of each prompt, alone, `ids_i`, its token ids with a placeholder for each row,
`logits_i`, [num_tokens, vocab_size], and `greedy_i`, the tokens that follow it.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4 import image_processing_pil_gemma4
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llama4.image_processing_llama4 import Llama4ImageProcessor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from goldens import make_weights, write_weights
from vision import ENTRIES, KEPT, pictures_of, prompts_of, text_of, tokenizer_of


class Llama4ImageProcessorPil(Llama4ImageProcessor):
    """The processor of Llama 4, which knows torchvision alone, with Pillow's filter in the place of torchvision's."""

    def resize(self, image: torch.Tensor, size: Any, resample: Any = None, **_: Any) -> torch.Tensor:
        resized = [
            np.asarray(Image.fromarray(one.permute(1, 2, 0).numpy()).resize((size.width, size.height), resample))
            for one in image
        ]
        return torch.from_numpy(np.stack(resized)).permute(0, 3, 1, 2)


PROCESSORS = {
    "Llama4ImageProcessorFast": Llama4ImageProcessorPil,
    "Qwen2VLImageProcessorFast": Qwen2VLImageProcessorPil,
    "Qwen2VLImageProcessor": Qwen2VLImageProcessorPil,
    "Glm4vImageProcessor": Glm4vImageProcessorPil,
    "Gemma4ImageProcessor": Gemma4ImageProcessorPil,
    "Gemma3ImageProcessor": Gemma3ImageProcessorPil,
    "PixtralImageProcessor": PixtralImageProcessorPil,
    "Idefics3ImageProcessor": Idefics3ImageProcessorPil,
}
OPTIONS = {
    Idefics3ImageProcessorPil: {"return_row_col_info": True},
    PixtralImageProcessorPil: {"patch_size": 8},  # of a patch that is merged, as its processor of texts says it
}
NUM_GREEDY = 12
# Llama 4 asks its model of texts for it, which has it not (transformers 5.24).
transformers.modeling_outputs.MoeCausalLMOutputWithPast.image_outputs = None
# Its processor knows the budgets of the published models alone, which are many tokens.
image_processing_pil_gemma4._SUPPORTED_SOFT_TOKENS = (12,)


def spread_of(name: str, shape: list[int], model: str) -> tuple[float, float]:
    """Mean and standard deviation of a tensor, so that attention is far from flat."""
    is_norm = "norm" in name.lower() or name.split(".")[-2] in ("ln_pre", "ln_q")
    if name.endswith(("A_log", "dt_bias")):
        return 0.0, 0.5
    if name.rpartition("_")[2] in ("min", "max"):  # of clipped linears; q, k and v of most layers read within the same
        is_same = "input" in name and "self_attn" in name and ".1." not in name
        return (-1.0 if name.endswith("min") else 1.0) * (1.5 if "input" in name else 2.0), 0.0 if is_same else 0.2
    if len(shape) == 1:
        plus_one = is_norm and model == "gemma3" and ("language_model" in name or "mm_soft_emb_norm" in name)
        multiplies = (is_norm and name.endswith("weight")) or name.endswith(("layer_scalar", "std_scale"))
        return (1.0 if multiplies and not plus_one else 0.0), 0.2
    if name.endswith(("embed_tokens.weight", "pos_embed.weight", "position_embedding.weight", "embedding_table")):
        # An embedding that is scaled by the root of its width is as large as others.
        return 0.0, float(shape[1]) ** -0.5 if "gemma" in model and "embed_tokens" in name else 1.0
    return 0.0, 1.5 / float(np.prod(shape[1:])) ** 0.5


def old_name(tensor: str) -> str:
    return tensor.replace("model.visual.", "visual.").replace("model.language_model.", "model.")


def complete(name: str, entry: dict[str, Any]) -> dict[str, np.ndarray]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "config.json").write_text(json.dumps(entry["config"]))
        config = transformers.AutoConfig.from_pretrained(folder)
        config._attn_implementation = "eager"
        made = getattr(transformers, entry["config"]["architectures"][0])
        shapes = {tensor: list(value.shape) for tensor, value in made(config).state_dict().items()}
        if config.tie_word_embeddings or getattr(config.text_config, "tie_word_embeddings", False):
            shapes.pop("lm_head.weight", None)
        if "text_config" not in entry["config"]:  # old files call tensors otherwise, too
            shapes = {old_name(tensor): shape for tensor, shape in shapes.items()}
        entry["tensors"] = {tensor: [shape, *spread_of(tensor, shape, name)] for tensor, shape in shapes.items()}
        write_weights(folder, make_weights(name, entry), entry["dtype"])
        model = made.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    settings = dict(entry["preprocessor"])
    processor = PROCESSORS[settings.pop("image_processor_type")](**settings)
    arrays: dict[str, np.ndarray] = {}
    entry["digests"] = []
    pictures = [Image.fromarray(picture) for picture in pictures_of(name)]
    for i, picture in enumerate(pictures):
        inputs = processor(images=[picture], return_tensors="pt", **OPTIONS.get(type(processor), {}))
        patches, grid = patches_of(entry, inputs)
        entry["digests"].append(hashlib.sha256(np.ascontiguousarray(patches).tobytes()).hexdigest())
        with torch.no_grad():
            out = model.base_model.get_image_features(**of_model(inputs), return_dict=True)
            rows = out.pooler_output
            if rows is None:
                rows = model.multi_modal_projector(out.last_hidden_state)
        levels = [torch.cat([*rows]), *(torch.cat([*level]) for level in getattr(out, "deepstack_features", ()))]
        arrays[f"rows_{i}"] = torch.cat(levels, dim=1).numpy()
        arrays[f"grid_{i}"] = np.array(grid, np.int32)
    text_processor = text_processor_of(name, entry, processor)
    for i, (ids, shown) in enumerate(prompts_of(name)):
        image_id = entry["tokens"][entry["image_token"]]
        given: dict[str, torch.Tensor] = {}
        if text_processor is None:
            counts = iter([len(arrays[f"rows_{p}"]) for p in shown])
            expanded = [other for one in ids for other in ([one] * next(counts) if one == image_id else [one])]
            if shown:
                each = [processor(images=[pictures[p]], return_tensors="pt") for p in shown]
                given = {key: torch.cat([own[key] for own in each]) for key in each[0]}
            sequence = torch.tensor([expanded])
        else:
            images = [pictures[p] for p in shown]
            made_of = text_processor(
                text=[text_of(name, ids)],
                images=[images] if images else None,
                padding=False,
                return_tensors="pt",
            )
            sequence = made_of.pop("input_ids")
            expanded = sequence[0].tolist()
            given = of_model(made_of) if images else {}
        types = (sequence == image_id).int()
        given[entry["types"]] = types
        if not entry["types"]:
            del given[""]
        with torch.no_grad():
            logits = model(input_ids=sequence, **given).logits[0].numpy()
            model.base_model.rope_deltas = None
            greedy = model.generate(
                input_ids=sequence,
                attention_mask=torch.ones_like(sequence),
                **given,
                max_new_tokens=NUM_GREEDY,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )[0, len(expanded) :].numpy()
            model.base_model.rope_deltas = None
        ends = np.flatnonzero(greedy == image_id)  # which transformers would take for a place of an image
        arrays |= {f"ids_{i}": np.array(expanded, np.int32), f"logits_{i}": logits}
        arrays[f"greedy_{i}"] = greedy[: ends[0]].astype(np.int32) if len(ends) else greedy.astype(np.int32)
    return arrays


def array_of(values: Any) -> np.ndarray:
    return values.float().numpy() if getattr(values, "dtype", None) == torch.bfloat16 else np.asarray(values)


def of_model(inputs: Any) -> dict[str, torch.Tensor]:
    """What a processor makes that the model takes."""
    names = ("pixel_values", "image_grid_thw", "image_sizes", "pixel_attention_mask", "token_type_ids")
    names += ("image_position_ids", "mm_token_type_ids")
    return {key: torch.as_tensor(array_of(inputs[key])) for key in names if key in inputs}


def patches_of(entry: dict[str, Any], inputs: Any) -> tuple[np.ndarray, list[int]]:
    """Patches of a picture in the order in which they are merged; rows and columns of patches, and those of tiles."""
    pixels = array_of(inputs["pixel_values"])
    if "image_grid_thw" in inputs:
        return pixels, [*inputs["image_grid_thw"][0, 1:].tolist(), 0, 0]
    vision = entry["config"]["vision_config"]
    patch = vision["patch_size"]
    if "image_position_ids" in inputs:
        return patches_of_places(pixels[0], np.asarray(inputs["image_position_ids"])[0], vision)
    merge = entry["config"].get("spatial_merge_size") or entry["config"].get("scale_factor")
    if merge is None and "pixel_shuffle_ratio" in vision:
        merge = round(1 / vision["pixel_shuffle_ratio"])
    elif merge is None:
        merge = vision["image_size"] // patch // round(entry["config"]["mm_tokens_per_image"] ** 0.5)
    tiles = pixels.reshape(-1, *pixels.shape[-3:])
    rows, columns = tiles.shape[2] // patch, tiles.shape[3] // patch
    blocks = tiles.reshape(len(tiles), 3, rows // merge, merge, patch, columns // merge, merge, patch)
    cut = blocks.transpose(0, 2, 5, 3, 6, 1, 4, 7).reshape(-1, 3 * patch**2)
    if "aspect_ratios" in inputs:
        grid_of_tiles = inputs["aspect_ratios"][0].tolist()
        return cut, [rows, columns, *(grid_of_tiles if grid_of_tiles != [1, 1] else (0, 0))]
    return cut, [rows, columns, *(inputs["rows"][0] + inputs["cols"][0] if "rows" in inputs else (0, 0))]


def patches_of_places(pixels: np.ndarray, places: np.ndarray, vision: dict[str, Any]) -> tuple[np.ndarray, list[int]]:
    """The same of patches that say where they are, by column and row, and whose numbers are scaled by the model."""
    patch, merge = vision["patch_size"], vision["pooling_kernel_size"]
    columns, rows = places.max(axis=0) + 1
    scaled = 2 * (pixels[: rows * columns] - np.float32(0.5))
    whole = scaled.reshape(rows // merge, merge, columns // merge, merge, patch, patch, 3)
    cut = whole.transpose(0, 2, 1, 3, 6, 4, 5).reshape(-1, 3 * patch**2)
    return cut, [int(rows), int(columns), 0, 0]


def text_processor_of(name: str, entry: dict[str, Any], processor: Any) -> Any:
    """What puts pictures into texts; None: a placeholder is repeated, and nothing else."""
    if entry["text_processor"] is None:
        return None
    kind, settings = entry["text_processor"]
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_of(name),
        extra_special_tokens={
            key: text
            for key, text in (
                ("image_token", entry["image_token"]),
                ("boi_token", "<start_of_image>"),
                ("eoi_token", "<end_of_image>"),
                ("boi_token", "<|image>"),
                ("eoi_token", "<image|>"),
                ("audio_token", "<|audio|>"),
                ("boa_token", "<|audio>"),
                ("eoa_token", "<audio|>"),
            )
            if text in entry["tokens"]
        },
    )
    if kind == "Gemma4Processor":
        settings = {
            "feature_extractor": transformers.Gemma4AudioFeatureExtractor(),
            "video_processor": transformers.Gemma4VideoProcessor(),
        }
    return getattr(transformers, kind)(image_processor=processor, tokenizer=tokenizer, **settings)


def main() -> None:
    names = sys.argv[1:] or list(ENTRIES)
    results: dict[str, np.ndarray] = {}
    if (path := KEPT / "vision.npz").exists():
        with np.load(path) as file:
            results = {key: file[key] for key in file.files if key.partition("/")[0] not in names}
    for name in names:
        arrays = complete(name, ENTRIES[name])
        results |= {f"{name}/{key}": array for key, array in arrays.items()}
        print(name, {key: (array.shape, float(np.std(array))) for key, array in arrays.items()})
    np.savez_compressed(path, **dict(sorted(results.items())))
    (KEPT / "vision.json").write_text(json.dumps(ENTRIES, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
