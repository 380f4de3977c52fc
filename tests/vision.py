"""Golden models that see: tiny ones of every family, with what transformers computes from them.

As in `goldens`, weights follow from names and a seed; see tools/make_vision_golden.py.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from goldens import random_bits, write_checkpoint
from numpy.typing import NDArray

KEPT = Path(__file__).resolve().parent / "golden_vision"
ENTRIES: dict[str, dict[str, Any]] = json.loads((KEPT / "vision.json").read_text(encoding="utf-8"))

# Height and width: odd ones, one that is enlarged, a strip that shrinks, one that stays as it is.
SIZES = ((37, 53), (5, 9), (250, 31), (32, 32))
# The pictures of each prompt.
PICTURES: tuple[tuple[int, ...], ...] = ((0,), (2, 1), (), (1, 3, 1))


def text_config_of(name: str) -> dict[str, Any]:
    """The part of config.json that is of texts: in old files all of it."""
    config: dict[str, Any] = ENTRIES[name]["config"]
    return config.get("text_config", config)


def pictures_of(name: str) -> list[NDArray[np.uint8]]:
    """Pictures as [height, width, 3]: colours that change slowly, and some noise."""
    made = []
    for i, (height, width) in enumerate(SIZES):
        words = random_bits(f"{name}/picture{i}", ENTRIES[name]["seed"], height * width * 3 + 12)
        waves = (words[-12:] % np.uint64(1000)).astype(np.float64).reshape(4, 3) / 1000
        y, x = np.mgrid[:height, :width][..., None] / 16
        smooth = 110 + 60 * np.sin(6 * waves[0] + x * waves[1]) + 50 * np.cos(6 * waves[2] + y * waves[3])
        noise = (words[:-12] % np.uint64(41)).astype(np.float64).reshape(height, width, 3) - 20
        made.append(np.clip(np.rint(smooth + noise), 0, 255).astype(np.uint8))
    return made


def prompts_of(name: str) -> list[tuple[list[int], tuple[int, ...]]]:
    """Token ids with one placeholder for each picture, and which pictures.

    What stands around a placeholder is of its entry: `around`, tokens before and behind it.
    """
    entry = ENTRIES[name]
    usable = [i for i in range(text_config_of(name)["vocab_size"]) if i not in entry["tokens"].values()]
    before, behind = ([entry["tokens"][token] for token in tokens] for tokens in entry["around"])
    placeholder = entry["tokens"][entry["placeholder"]]
    prompts = []
    for i, pictures in enumerate(PICTURES):
        words = random_bits(f"{name}/prompt{i}", entry["seed"], 64)
        texts = iter([usable[int(word % np.uint64(len(usable)))] for word in words])
        ids = [next(texts) for _ in range(3 + 4 * i)]
        for _ in pictures:
            ids += [*before, placeholder, *behind, next(texts)]
        prompts.append((ids + [next(texts) for _ in range(5)], pictures))
    return prompts


def text_of(name: str, ids: list[int]) -> str:
    """The text that `tokenizer_of` makes these ids of, but for line ends that are one token with others."""
    marks = {token: text for text, token in ENTRIES[name]["tokens"].items()}
    return "".join(marks.get(token, f" w{token} ") for token in ids)


def tokenizer_of(name: str) -> tokenizers.Tokenizer:
    """A tokenizer whose words are w0, w1, .., and that has the tokens of its entry."""
    tokens = ENTRIES[name]["tokens"]
    known = {token: text for text, token in tokens.items()}
    size = text_config_of(name)["vocab_size"]
    words = {known.get(i, f"w{i}"): i for i in range(size)}
    unknown = next(word for word in words if word not in tokens)
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token=unknown))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in tokens if text.strip()])
    made.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in tokens if not text.strip()])
    return made


@functools.cache
def expected_of(name: str) -> dict[str, NDArray[Any]]:
    with np.load(KEPT / "vision.npz") as file:
        return {key.partition("/")[2]: file[key] for key in file.files if key.startswith(f"{name}/")}


def make_model(folder: Path, name: str, without: str = "no tensor") -> Path:
    """Write the folder of a checkpoint: config.json, preprocessor_config.json and safetensors.

    `without`: tensors with this in their names are left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    entry = ENTRIES[name]
    tensors = {tensor: values for tensor, values in entry["tensors"].items() if without not in tensor}
    write_checkpoint(folder, name, {**entry, "tensors": tensors})
    (folder / "preprocessor_config.json").write_text(json.dumps(ENTRIES[name]["preprocessor"]), encoding="utf-8")
    return folder
