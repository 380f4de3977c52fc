"""The files in which sentence-transformers says how a model makes vectors, in both spellings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

OLD_KEYS = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "max": "pooling_mode_max_tokens",
    "mean_sqrt_len": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "last": "pooling_mode_lasttoken",
}
NEW_NAMES = {"mean_sqrt_len": "mean_sqrt_len_tokens", "last": "lasttoken"}
PLACES = {  # of version 6
    "Transformer": "sentence_transformers.base.modules.transformer.Transformer",
    "Pooling": "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
    "Dense": "sentence_transformers.base.modules.dense.Dense",
    "LayerNorm": "sentence_transformers.sentence_transformer.modules.layer_norm.LayerNorm",
    "Normalize": "sentence_transformers.base.modules.normalize.Normalize",
    "LogitScore": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore",
}


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


def write_modules(folder: Path, kinds: Sequence[str], *, old: bool) -> list[Path]:
    """Write modules.json; returns the folders of the modules, as sentence-transformers calls them."""
    places = [folder / ("" if kind == "Transformer" else f"{i}_{kind}") for i, kind in enumerate(kinds)]
    entries = [
        {
            "idx": i,
            "name": str(i),
            "path": "" if place == folder else place.name,
            "type": f"sentence_transformers.models.{kind}" if old else PLACES.get(kind, kind),
        }
        for i, (kind, place) in enumerate(zip(kinds, places, strict=True))
    ]
    write_json(folder / "modules.json", entries)
    return places


def write_pooling(place: Path, pooling: str, size: int, *, old: bool, include_prompt: bool = True) -> None:
    if old:
        modes = {key: mode == pooling for mode, key in OLD_KEYS.items()}
        write_json(place / "config.json", {"word_embedding_dimension": size, **modes, "include_prompt": include_prompt})
    else:
        mode = NEW_NAMES.get(pooling, pooling)
        config = {"embedding_dimension": size, "pooling_mode": mode, "include_prompt": include_prompt}
        write_json(place / "config.json", config)


def write_dense(place: Path, weight: np.ndarray, bias: np.ndarray | None, activation: str) -> None:
    config = {
        "in_features": weight.shape[1],
        "out_features": weight.shape[0],
        "bias": bias is not None,
        "activation_function": activation,
    }
    write_json(place / "config.json", config)
    tensors = {"linear.weight": weight} | ({} if bias is None else {"linear.bias": bias})
    save_file(tensors, place / "model.safetensors")


def write_prompts(
    folder: Path, prompts: Mapping[str, str], default: str | None = None, similarity: str = "dot"
) -> None:
    write_json(
        folder / "config_sentence_transformers.json",
        {"prompts": dict(prompts), "default_prompt_name": default, "similarity_fn_name": similarity},
    )
