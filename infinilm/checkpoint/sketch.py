"""A model of the hub from its headers alone: planning it reads its configuration, and what its weights are, not these.

A sketch is a folder with the configuration, and with files of weights that have the size of the real ones and their
headers, and behind these a hole, which takes no room on the disk. Whatever reads headers reads it like any model.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from infinilm.checkpoint import safetensors_header
from infinilm.checkpoint.folder import find_files, resolve_model
from infinilm.checkpoint.quantised.layouts import LAYOUTS
from infinilm.checkpoint.safetensors_header import MAX_HEADER_BYTES
from infinilm.errors import ConfigError, InfinilmError, WeightError
from infinilm.files import MAX_BYTES
from infinilm.gguf.file import models_among, open_gguf, read_header
from infinilm.gguf.projectors import tower_of
from infinilm.hub import (
    MODEL_FILES,
    HubModel,
    cached_folder,
    choose_gguf,
    gguf_alone,
    hub_error,
    hub_model,
    parts_of,
    skipped_files,
)
from infinilm.mistral_params import PARAMS_FILE

__all__ = ["Headers", "open_headers"]

_CONFIG = ("*config*.json", PARAMS_FILE, "*.index.json", "modules.json")
_BLOCK = 1 << 17  # bytes of a request; of most safetensors files, the whole header
_MOST_CONNECTIONS = 8
_PEEKED = tuple({part for layout in LAYOUTS.values() for part in layout.peek})  # shapes of quantised weights


class Headers(NamedTuple):
    """Where the headers of a model are.

    Attributes
    ----------
    name : str
        What to call the model: its path, or of one of the hub that is not here, its hub id.
    path : Path
        A folder or a GGUF file.
    """

    name: str
    path: Path


@contextmanager
def open_headers(model: str | os.PathLike[str], revision: str | None = None) -> Iterator[Headers]:
    """Give a folder or a GGUF file with the headers of a model; nothing of the hub is fetched but these.

    Parameters
    ----------
    model, revision
        As of `resolve_model`. What the hub's cache has whole is used as it is, without a network.

    Raises
    ------
    ConfigError, FileNotFoundError
        As `resolve_model`.
    """
    of_hub = hub_model(model)
    if of_hub is None:
        path = resolve_model(model, revision)
        yield Headers(str(path), path)
    elif (cached := _cached(of_hub, revision)) is not None:
        yield Headers(str(cached), cached)
    else:
        with tempfile.TemporaryDirectory(prefix="infinilm-") as folder:
            try:
                yield Headers(str(of_hub), _sketch(of_hub, revision, Path(folder)))
            except InfinilmError as error:  # tells of a place that the user has never seen
                error.args = tuple(str(arg).replace(folder, of_hub.hub_id) for arg in error.args)
                raise


def _cached(model: HubModel, revision: str | None) -> Path | None:
    """The folder or file of a model that has been fetched; None: it has not, or not all of it."""
    folder = cached_folder(model, revision)
    if folder is None:
        return None
    try:
        if model.file is None:
            find_files(folder)
            return folder
        name = choose_gguf(model, models_among(p.relative_to(folder).as_posix() for p in folder.rglob("*.gguf")))
        open_gguf(folder / name)  # with all its parts
        return folder / name
    except (ConfigError, WeightError, FileNotFoundError):
        return None


def _sketch(model: HubModel, revision: str | None, folder: Path) -> Path:
    """Make the sketch; returns the folder, or the GGUF file in it."""
    from huggingface_hub import HfFileSystem

    hub = HfFileSystem(skip_instance_cache=True)  # an instance remembers what was there
    try:
        names = [name.split("/", 2)[2] for name in hub.find(model.hub_id, revision=revision)]
    except Exception as error:  # the hub's errors share no base class of their own
        raise hub_error(model, error) from error
    names = [name for name in names if not name.startswith("/") and ".." not in name.split("/")]  # inside the folder
    path = folder
    if model.file is None:
        wanted = _files_of_model(model, names)
    else:
        first = choose_gguf(model, names)
        path = folder / first
        wanted = [name for name in names if fnmatch(name, parts_of(first))] + tower_of(first, names)

    def copy(name: str) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with hub.open(f"{model.hub_id}/{name}", revision=revision, block_size=_BLOCK) as file:
            _copy_header(file, folder / name)

    try:
        with ThreadPoolExecutor(_MOST_CONNECTIONS) as pool:
            list(pool.map(copy, wanted))
    except WeightError:
        raise
    except Exception as error:
        raise hub_error(model, error) from error
    return path


def _files_of_model(model: HubModel, names: list[str]) -> list[str]:
    """The files of a repository that hold the weights and the configuration of its model."""
    skipped = skipped_files(names)
    fetched = [
        name
        for name in names
        if any(fnmatch(name, pattern) for pattern in MODEL_FILES)
        and not any(fnmatch(name, pattern) for pattern in skipped)
    ]
    weights = [name for name in fetched if name.endswith(".safetensors")]
    if not weights and (found := models_among(names)):
        raise gguf_alone(model, found)
    return weights + [name for name in fetched if any(fnmatch(name, pattern) for pattern in _CONFIG)]


def _copy_header(file: Any, copy: Path) -> None:
    """Copy the header of a file of weights, and any other file as a whole; what is behind a header becomes a hole."""
    with copy.open("w+b") as out:

        def read(count: int) -> bytes:
            data: bytes = file.read(count)
            out.write(data)
            return data

        needed: list[tuple[int, int]] = []  # offset and size of small tensors that belong to the configuration
        if copy.suffix == ".safetensors":
            read(min(int.from_bytes(read(8), "little"), MAX_HEADER_BYTES))
            out.truncate(file.size)
            out.flush()
            tensors = safetensors_header.read_header(copy).tensors.values()
            needed = [(tensor.offset, tensor.nbytes) for tensor in tensors if tensor.name.endswith(_PEEKED)]
        elif copy.suffix == ".gguf":
            header = read_header(copy, read, file.size)
            needed = [tensor[-2:] for tensor in header.tensors if tensor[0].startswith("rope_")]
            out.truncate(file.size)
        else:
            read(min(file.size, MAX_BYTES))
        for offset, size in needed:
            file.seek(offset)
            out.seek(offset)
            read(size)
