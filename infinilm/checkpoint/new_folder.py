"""A new folder for a model: it is empty at first, gets the texts of another, and one file of weights.

Used by the writers of packed and of quantised checkpoints.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from infinilm.checkpoint.quantised.config import CONFIG_FILES, CONFIG_KEYS
from infinilm.errors import ConfigError, DeviceError
from infinilm.files import read_json
from infinilm.gguf.file import is_gguf
from infinilm.model_files import MODEL_FILES, read_model_file
from infinilm.pooling.recipe import read_modules

__all__ = ["check_room", "copy_texts", "new_folder", "weights_file"]

_WEIGHTS = "model.safetensors"
_TEXT = (".json", ".jinja", ".model", ".txt")  # ends of the names of what else belongs to a model


@contextmanager
def new_folder(path: Path) -> Iterator[None]:
    """Make a folder, or take an empty one; leave nothing behind if the `with` block fails."""
    try:
        existed = path.exists()
        if existed and not path.is_dir():
            raise ConfigError(f"{path} is a file; pass the name of a new folder")
        if existed and any(path.iterdir()):
            raise ConfigError(f"{path} is not empty; pass the name of a new folder, or empty this one")
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # such as a loop of links, or a name that is too long
        raise ConfigError(f"{path}: no folder can be made here: {error.strerror}; pass the name of another") from error
    try:
        yield
    except BaseException:
        for entry in path.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        if not existed:
            path.rmdir()
        raise


def copy_texts(source: Path, out: Path, dtype: str) -> None:
    """Configuration, tokenizer and templates; config.json says the dtype that the weights have now."""
    if is_gguf(source):
        for name in MODEL_FILES:
            with suppress(FileNotFoundError):
                (out / name).write_bytes(read_model_file(source, name))
    else:
        for entry in sorted(source.iterdir()):
            if entry.name in CONFIG_FILES:
                continue  # it describes a quantisation that the new weights do not have
            if entry.is_file() and entry.name.endswith(_TEXT) and not entry.name.endswith(".safetensors.index.json"):
                shutil.copyfile(entry, out / entry.name)
        if not (out / "config.json").exists():
            (out / "config.json").write_bytes(read_model_file(source, "config.json"))
        for module in read_modules(source):
            if module.folder != source:
                place = out / module.folder.relative_to(source)
                shutil.copytree(module.folder, place, dirs_exist_ok=True)
    config = read_json(out / "config.json")
    changed = False
    for part in (config, config.get("text_config")):
        for key in CONFIG_KEYS:
            if part and part.pop(key, None) is not None:
                changed = True
        for key in ("dtype", "torch_dtype"):
            if part and part.get(key) not in (None, dtype):
                part[key], changed = dtype, True
    if changed:
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def check_room(folder: Path, needed: int) -> None:
    """Raise a `DeviceError` if the device of a folder has less room than the bytes needed."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DeviceError(f"{folder}: the weights take {needed} bytes, and {free} are free there")


@contextmanager
def weights_file(folder: Path) -> Iterator[BinaryIO]:
    """Open the file for the weights of a new folder; it has its name once the `with` block ends.

    Raises
    ------
    DeviceError
        It cannot be written.
    """
    partial = folder / f"{_WEIGHTS}.partial"
    try:
        with partial.open("wb") as file:
            yield file
    except OSError as error:
        raise DeviceError(f"{partial}: cannot be written: {error.strerror or error}") from error
    partial.rename(folder / _WEIGHTS)
