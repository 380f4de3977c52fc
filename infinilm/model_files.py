"""The small files of a model by name, whether it is a folder or a GGUF file, which has their content as metadata.

A folder in the layout of Mistral AI's own tools has params.json in the place of config.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infinilm.files import MAX_BYTES, parse_json, read_bytes
from infinilm.gguf.config import config_json, generation_config_json
from infinilm.gguf.file import GgufFile, is_gguf, open_gguf, reading
from infinilm.gguf.tokenizer import tokenizer_json
from infinilm.gguf.vocabulary import tokenizer_config_json
from infinilm.mistral_params import PARAMS_FILE, config_of_params

__all__ = ["MODEL_FILES", "path_of", "read_model_file", "read_model_json", "read_optional_model_json", "what_is_there"]

MODEL_FILES: dict[str, Callable[[GgufFile], dict[str, Any] | None]] = {
    "config.json": config_json,
    "generation_config.json": generation_config_json,
    "tokenizer_config.json": tokenizer_config_json,
    "tokenizer.json": tokenizer_json,
}
"""What a GGUF file stands for; None: it has no such content."""


def path_of(model: Path, name: str) -> Path:
    """Where the content of such a file is, for messages."""
    if is_gguf(model):
        return model
    return model / (PARAMS_FILE if _has_params(model, name) else name)


def _has_params(folder: Path, name: str) -> bool:
    """True if a folder has params.json where config.json is asked for."""
    return name == "config.json" and not (folder / name).exists() and (folder / PARAMS_FILE).is_file()


def read_model_file(model: Path, name: str, *, limit: int = MAX_BYTES) -> bytes:
    """Return the content of a file of a model's folder, or what a GGUF file or params.json says in its place.

    Raises
    ------
    FileNotFoundError
        There is none.
    ConfigError, WeightError
        It cannot be read, or has more than `limit` bytes.
    """
    if not is_gguf(model):
        path = path_of(model, name)
        stored = read_bytes(path, limit=limit)
        return json.dumps(config_of_params(parse_json(stored, str(path)))).encode() if path.name != name else stored
    with reading(model):
        content = MODEL_FILES[name](open_gguf(model)) if name in MODEL_FILES else None
        if content is None:
            raise FileNotFoundError(f"{model}: has no metadata in the place of {name}")
        return json.dumps(content, ensure_ascii=False).encode()


def read_model_json(model: Path, name: str) -> dict[str, Any]:
    """Return the JSON object of such a file; raises as `read_model_file`."""
    return parse_json(read_model_file(model, name), str(path_of(model, name)))


def read_optional_model_json(model: Path, name: str) -> dict[str, Any]:
    """Return what `read_model_json` returns, or `{}` when there is no such file."""
    try:
        return read_model_json(model, name)
    except FileNotFoundError:
        return {}


def what_is_there(folder: Path) -> str:
    """Explain a folder without config.json."""
    if not folder.is_dir():
        problem = "there is no such folder"
    elif (folder / "adapter_config.json").exists():
        return (
            "the folder has none: this is a LoRA adapter, not a model; pass its base model, and this folder as "
            "lora={'name': folder} or merge_lora=folder"
        )
    elif any(folder.glob("*.gguf")):
        return "the folder has none, only a GGUF file: pass the path of that"
    elif within := sorted(folder.glob("*/*.gguf")):
        return f"the folder has none, and GGUF files in folders of it: pass the path of one, such as {within[0]}"
    elif (folder / "modules.json").exists():
        return (
            "the folder has none, but a modules.json of sentence-transformers, whose Transformer lies in another "
            "folder: a Router, or an old layout, which are not supported"
        )
    else:
        problem = "the folder has no config.json"
    return f"{problem}. Give the folder of a Hugging Face checkpoint: config.json beside *.safetensors"
