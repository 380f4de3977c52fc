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
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from goldens import make_weights, write_weights
from vision import ENTRIES, KEPT, pictures_of, prompts_of

PROCESSORS = {"Qwen2VLImageProcessorFast": Qwen2VLImageProcessorPil, "Qwen2VLImageProcessor": Qwen2VLImageProcessorPil}
NUM_GREEDY = 12


def spread_of(name: str, shape: list[int]) -> tuple[float, float]:
    """Mean and standard deviation of a tensor, so that attention is far from flat."""
    is_norm = "norm" in name.lower()
    if name.endswith(("A_log", "dt_bias")):
        return 0.0, 0.5
    if len(shape) == 1:
        plus_one = is_norm and "visual" not in name and "Qwen3_5" in name
        return (1.0 if is_norm and name.endswith("weight") and not plus_one else 0.0), 0.2
    if name.endswith(("embed_tokens.weight", "pos_embed.weight")):
        return 0.0, 1.0
    return 0.0, 1.5 / float(np.prod(shape[1:])) ** 0.5


def complete(name: str, entry: dict[str, Any]) -> dict[str, np.ndarray]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "config.json").write_text(json.dumps(entry["config"]))
        config = transformers.AutoConfig.from_pretrained(folder)
        config._attn_implementation = "eager"
        made = getattr(transformers, entry["config"]["architectures"][0])
        shapes = {tensor: list(value.shape) for tensor, value in made(config).state_dict().items()}
        if config.tie_word_embeddings or config.text_config.tie_word_embeddings:
            shapes.pop("lm_head.weight", None)
        entry["tensors"] = {tensor: [shape, *spread_of(tensor, shape)] for tensor, shape in shapes.items()}
        write_weights(folder, make_weights(name, entry), entry["dtype"])
        model = made.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    settings = dict(entry["preprocessor"])
    processor = PROCESSORS[settings.pop("image_processor_type")](**settings)
    arrays: dict[str, np.ndarray] = {}
    inputs: list[dict[str, torch.Tensor]] = []
    entry["digests"] = []
    for i, picture in enumerate(pictures_of(name)):
        made_of = processor(images=[Image.fromarray(picture)], return_tensors="pt")
        inputs.append(made_of)
        entry["digests"].append(hashlib.sha256(made_of["pixel_values"].numpy().tobytes()).hexdigest())
        with torch.no_grad():
            out = model.model.get_image_features(**made_of, return_dict=True)
        levels = [torch.cat(out.pooler_output), *(torch.cat(level) for level in getattr(out, "deepstack_features", ()))]
        arrays[f"rows_{i}"] = torch.cat(levels, dim=1).numpy()
        arrays[f"grid_{i}"] = made_of["image_grid_thw"][0, 1:].numpy().astype(np.int32)
    image_id = entry["config"]["image_token_id"]
    for i, (ids, pictures) in enumerate(prompts_of(name)):
        counts = iter([len(arrays[f"rows_{p}"]) for p in pictures])
        expanded = [other for one in ids for other in ([one] * next(counts) if one == image_id else [one])]
        given: dict[str, torch.Tensor] = {}
        if pictures:
            given = {key: torch.cat([inputs[p][key] for p in pictures]) for key in inputs[0]}
        sequence = torch.tensor([expanded])
        types = (sequence == image_id).int()
        with torch.no_grad():
            logits = model(input_ids=sequence, mm_token_type_ids=types, **given).logits[0].numpy()
            model.model.rope_deltas = None
            greedy = model.generate(
                input_ids=sequence,
                mm_token_type_ids=types,
                attention_mask=torch.ones_like(sequence),
                **given,
                max_new_tokens=NUM_GREEDY,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )[0, len(expanded) :].numpy()
            model.model.rope_deltas = None
        ends = np.flatnonzero(greedy == image_id)  # which transformers would take for a place of an image
        arrays |= {f"ids_{i}": np.array(expanded, np.int32), f"logits_{i}": logits}
        arrays[f"greedy_{i}"] = greedy[: ends[0]].astype(np.int32) if len(ends) else greedy.astype(np.int32)
    return arrays


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
