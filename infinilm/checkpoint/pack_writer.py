"""Writes a packed checkpoint (`packed.py`), linear by linear: memory is that of one, whatever the model has.

Called by `infinilm pack`. The engine packs as it does for itself; what it has packed goes to the file at once.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from infinilm import _core
from infinilm.checkpoint.folder import FLOATS, Checkpoint, resolve_model
from infinilm.checkpoint.gguf import GgufCheckpoint
from infinilm.checkpoint.loading import load_weights
from infinilm.checkpoint.opening import open_checkpoint
from infinilm.checkpoint.packed import PackedInfo
from infinilm.checkpoint.quantised.checkpoint import QuantisedCheckpoint
from infinilm.checkpoint.quantised.config import CONFIG_FILES, CONFIG_KEYS
from infinilm.checkpoint.safetensors_header import DTYPE_CODES
from infinilm.checks import DTYPES, short_repr
from infinilm.config.families import build_spec
from infinilm.config.llama_config import AutoConfig
from infinilm.errors import ConfigError, DeviceError
from infinilm.files import read_json
from infinilm.gguf.file import PLAIN_TYPES, is_gguf
from infinilm.logs import logger
from infinilm.model_files import MODEL_FILES, read_model_file

__all__ = ["check_room", "copy_texts", "new_folder", "pack_model"]

_WEIGHTS = "model.safetensors"
_ALIGNMENT = 4096  # of the first tensor: a page. Panels are multiples of 64 bytes, which is what kernels need.
_TEXT = (".json", ".jinja", ".model", ".txt")  # ends of the names of what else belongs to a model


class _PackedFile:
    """A safetensors file under way: a `WeightEngine` that packs what it is given and writes it."""

    def __init__(self, file: BinaryIO, core: _core.InferEngine, metadata: Mapping[str, str]) -> None:
        self._file, self._core = file, core
        self._shapes = core.param_shapes()
        self._vectors: dict[str, Any] = {}  # come last, since they are of any size
        self._entries: dict[str, Any] = {"__metadata__": dict(metadata)}
        self._size = 0  # of the data
        # The header is written at the end, when all is known, into room for more tensors than there are.
        room = 200 * len(self._shapes) + sum(map(len, self._shapes)) + len(json.dumps(self._entries))
        self._data_begin = -(-room // _ALIGNMENT) * _ALIGNMENT
        file.seek(self._data_begin)

    def param_shapes(self) -> Mapping[str, Sequence[int]]:
        return self._shapes

    def load_param(self, name: str, tensor: Any, /) -> Sequence[str]:
        if len(self._shapes[name]) != 2:
            self._vectors[name] = tensor
        prepared = self._core.load_param(name, tensor)
        if prepared:
            for packed_name, packed in self._core.take_packed().items():
                self._write(packed_name, packed)
        return [name for name in prepared if name not in self._vectors]

    def finish(self) -> None:
        for name, tensor in self._vectors.items():
            self._write(name, tensor)
        header = json.dumps(self._entries).encode()
        length = self._data_begin - 8
        assert len(header) <= length
        self._file.seek(0)
        self._file.write(length.to_bytes(8, "little") + header.ljust(length))

    def _write(self, name: str, tensor: Any) -> None:
        data = tensor.memory()
        end = self._size + data.nbytes
        offsets = [self._size, end]
        self._entries[name] = {"dtype": DTYPE_CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        self._file.write(data)
        self._size = end


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
            entry.unlink()
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
                continue  # of how weights were quantised, which packed ones are in another way
            if entry.is_file() and entry.name.endswith(_TEXT) and not entry.name.endswith(".safetensors.index.json"):
                shutil.copyfile(entry, out / entry.name)
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


def pack_model(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    quantization: str | None = None,
    dtype: str = "auto",
    revision: str | None = None,
    num_threads: int | None = None,
    use_tqdm: bool = True,
) -> Path:
    """Write a folder with a model's weights packed for CPUs, which loads like any other and is used in place.

    Parameters
    ----------
    model
        A folder, a GGUF file, "demo" or a hub id; its weights are not packed yet.
    out
        A new folder, or an empty one.
    quantization
        None, "int8" or "int4".
    dtype
        Of weights that are not quantised: "bfloat16" or "float16"; "auto" keeps the checkpoint's, and so does
        "float32" with 16 bits, which are exact in it.
    revision, num_threads
        See `LLM`.
    use_tqdm
        Show a progress bar.

    Returns
    -------
    Path
        The folder.

    Raises
    ------
    ConfigError, WeightError
        The model or the settings do not fit, or `out` is not a new folder.
    DeviceError
        There is no room on the device of `out`.
    """
    if dtype not in ("auto", *DTYPES):
        raise ConfigError(f"dtype: expected 'auto', {', '.join(map(repr, DTYPES))}, got {short_repr(dtype)}")
    source, out = resolve_model(model, revision, use_tqdm=use_tqdm), Path(out)
    config = AutoConfig.from_pretrained(source)
    if quantization == "fp8":
        raise ConfigError("quantization='fp8' works on GPUs, and weights are packed for CPUs; pass 'int8' or 'int4'")
    with open_checkpoint(source) as checkpoint:
        if checkpoint.packed:
            raise ConfigError(f"{source} is packed already; pass the checkpoint that it was packed from")
        wanted = "float32" if dtype == "auto" else dtype  # in which 16 bits stay as they are
        if dtype == "auto" and quantization is None and is_gguf(source):
            wanted = checkpoint.checkpoint_dtype()
        spec = build_spec(config, dtype=wanted, max_model_len=config.max_position_embeddings, quantization=quantization)
        kept = checkpoint.kept_dtype(wanted)
        if quantization is None:
            _tell_unpacked(checkpoint, _core.weight_bytes(spec, kept))
        core = _core.InferEngine(spec, "cpu", num_threads or 0)
        try:
            with new_folder(out):
                check_room(out, _core.weight_bytes(spec, kept))
                copy_texts(source, out, kept)
                partial = out / f"{_WEIGHTS}.partial"
                try:
                    with partial.open("wb") as file:
                        packed = _PackedFile(file, core, PackedInfo(partial, quantization, kept).metadata())
                        load_weights(
                            checkpoint,
                            packed,
                            dtype=wanted,
                            config=config,
                            progress=use_tqdm,
                            quantised_dtype="float16" if dtype == "auto" and quantization is None else None,
                        )
                        packed.finish()
                except OSError as error:
                    raise DeviceError(f"{partial}: cannot be written: {error.strerror or error}") from error
                partial.rename(out / _WEIGHTS)
        finally:
            core.close()
    return out


def _tell_unpacked(checkpoint: Checkpoint | GgufCheckpoint, size: int) -> None:
    """Say that quantised weights become plain numbers of so many bytes: the layout has none of their formats."""
    if isinstance(checkpoint, (GgufCheckpoint, QuantisedCheckpoint)):
        types = [name for name in checkpoint.types() if name not in (*FLOATS, *PLAIN_TYPES)]
        if types:
            stored = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
            logger.warning(
                "%s: the weights, %s in %.1f MiB, are packed as plain numbers in %.1f MiB; load it as it is, or pass "
                "quantization='int8' or 'int4'",
                checkpoint.path,
                " and ".join(types),
                stored / 2**20,
                size / 2**20,
            )


def check_room(folder: Path, needed: int) -> None:
    """Raise a `DeviceError` where a folder's device has no room for so many bytes."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DeviceError(f"{folder}: the weights take {needed} bytes, and {free} are free there")
