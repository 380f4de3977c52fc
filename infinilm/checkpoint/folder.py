"""Hugging Face checkpoint folders: safetensors headers, zero-copy arrays of the mapped files.

Called by `loading.py`, and by the `LLM` and engine layers. Nothing is read before every header has been checked:
damage of any kind is a `WeightError` that names the file. Arrays are views of the mapped file and keep the mapping
alive; the engine uses them in place where the stored dtype allows it, so that peak memory is the model and not twice
the model.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from types import MappingProxyType, TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm.checkpoint.packed import PackedInfo, read_packed
from infinilm.checkpoint.safetensors_header import (
    STORED_DTYPES,
    TensorInfo,
    file_errors,
    read_header,
)
from infinilm.checks import DTYPES, short_repr
from infinilm.errors import ConfigError, WeightError, did_you_mean
from infinilm.files import open_regular, os_errors, read_json
from infinilm.logs import logger

__all__ = ["FLOATS", "Checkpoint", "TensorInfo", "resolve_model"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_ADAPTER = (
    "this is a LoRA adapter, not a model, and adapters are not read in this version: merge it into its base model once "
    "where peft is installed (merge_and_unload, then save_pretrained), and pass that folder"
)

FLOATS = (*DTYPES, "float64")
"""Dtypes that weights may be stored in."""


def _read_index(folder: Path) -> dict[str, Path]:
    """Return tensor name -> file of `model.safetensors.index.json`."""
    path = folder / _INDEX
    weight_map = read_json(path, error=WeightError, strict=True).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightError(f"{path}: expected an object 'weight_map' of tensor name to file name")
    return {name: folder / _checked_file_name(path, name, value) for name, value in weight_map.items()}


def _checked_file_name(index: Path, tensor: str, value: Any) -> str:
    """Return a shard's name, which must stay inside the folder (symlinks may lead out: the hub's cache)."""
    if not isinstance(value, str):
        raise WeightError(f"{index}: the file of tensor {tensor!r} must be a string, got {short_repr(value)}")
    pure = PurePosixPath(value)
    outside = pure.is_absolute() or ".." in pure.parts or "\\" in value or not value.isprintable()
    if outside or not value.endswith(".safetensors"):
        raise WeightError(
            f"{index}: the file of tensor {tensor!r} must be the name of a .safetensors file inside the "
            f"folder, got {short_repr(value)}"
        )
    return value


def _no_weights(folder: Path) -> WeightError:
    """Explain a folder without safetensors files."""
    if (folder / "adapter_config.json").exists():
        return WeightError(f"{folder}: {_ADAPTER}")
    names = sorted(entry.name for entry in folder.iterdir())
    torch_files = [n for n in names if n.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    gguf_files = [n for n in names if n.endswith(".gguf")]
    if gguf_files:
        return WeightError(
            f"{folder}: only GGUF weights ({gguf_files[0]}), which this version does not read; use the "
            "model's safetensors checkpoint"
        )
    if torch_files:
        return WeightError(
            f"{folder}: only pickled PyTorch weights ({torch_files[0]}), which infinilm does not read; "
            "convert them once to safetensors where torch and transformers are installed: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder, "
            "safe_serialization=True)"
        )
    return WeightError(
        f"{folder}: no weights: expected {_SINGLE}, {_INDEX} or other *.safetensors files; is the download complete?"
    )


_State = tuple[int, int, int, int]


def _state(status: os.stat_result) -> _State:
    """What tells a file from another, or from itself after a change: device, inode; size, time of the last write."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _find_files(folder: Path) -> tuple[list[Path], dict[str, Path]]:
    """The safetensors files of a folder (one, those of an index, or all there are), and the index."""
    index: dict[str, Path] = {}
    with file_errors(folder):
        if not folder.is_dir():
            raise WeightError(f"{folder}: expected a checkpoint folder")
        if (folder / _SINGLE).exists():
            files = [folder / _SINGLE]
        elif (folder / _INDEX).exists():
            index = _read_index(folder)
            files = sorted(set(index.values()))
            for file in files:
                if not file.exists():
                    raise WeightError(f"{file}: named in {folder / _INDEX} but absent; is the download complete?")
        else:
            files = sorted(p for p in folder.iterdir() if p.name.endswith(".safetensors"))
            if not files:
                raise _no_weights(folder)
    return files, index


def _read_headers(files: Sequence[Path]) -> tuple[dict[str, TensorInfo], dict[Path, _State], PackedInfo | None]:
    """Tensors by name, what each file was before its header was read, and how the weights are packed, if they are."""
    tensors: dict[str, TensorInfo] = {}
    states: dict[Path, _State] = {}
    metadata: dict[Path, Mapping[str, str]] = {}
    for file in files:
        with file_errors(file):
            states[file] = _state(file.stat())
        header = read_header(file)
        metadata[file] = header.metadata
        for name, info in header.tensors.items():
            if name in tensors:
                raise WeightError(f"tensor {name!r} is in two files, {tensors[name].file} and {file}")
            tensors[name] = info
    return tensors, states, read_packed(metadata)


def _check_index(folder: Path, index: Mapping[str, Path], tensors: Mapping[str, TensorInfo]) -> None:
    for name, file in index.items():
        if name not in tensors or tensors[name].file != file:
            where = f" (it is in {tensors[name].file.name})" if name in tensors else ""
            raise WeightError(f"{file}: lacks tensor {name!r}, which {folder / _INDEX} places there{where}")


class Checkpoint:
    """A Hugging Face checkpoint folder, opened for reading. A context manager.

    Parameters
    ----------
    folder : str or path
        Holds `model.safetensors`, else `model.safetensors.index.json` and its shards, else any
        `*.safetensors` files. The path of one `.safetensors` file is accepted too.

    Attributes
    ----------
    folder : Path
    tensors : Mapping of str to TensorInfo
        Read-only.
    packed : PackedInfo or None
        How the weights are packed, in a folder that `infinilm pack` made.

    Raises
    ------
    WeightError
        When a file is absent, unreadable or damaged, when the folder holds no safetensors file, or weights packed in
        another layout.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        is_file = self.folder.suffix == ".safetensors" and self.folder.is_file()
        files, index = ([self.folder], {}) if is_file else _find_files(self.folder)
        tensors, self._states, self.packed = _read_headers(files)
        _check_index(self.folder, index, tensors)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(tensors)
        self._maps: dict[Path, mmap.mmap] | None = {}

    def __enter__(self) -> Checkpoint:
        """Return self."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def __repr__(self) -> str:
        """Name the folder, the number of tensors and their size."""
        nbytes = sum(t.nbytes for t in self.tensors.values())
        return f"<Checkpoint {self.folder}: {len(self.tensors)} tensors, {nbytes} bytes>"

    def close(self) -> None:
        """Let go of the files. Arrays handed out stay valid: each keeps its mapping alive."""
        for mapping in (self._maps or {}).values():
            with suppress(BufferError):  # arrays are alive; the mapping goes with the last of them
                mapping.close()
        self._maps = None

    def info(self, name: str) -> TensorInfo:
        """Return `tensors[name]`; an unknown name is a `WeightError` with the nearest names."""
        if name not in self.tensors:
            raise WeightError(f"{self.folder}: no tensor {name!r}{did_you_mean(name, self.tensors, count=3)}")
        return self.tensors[name]

    def _mapping(self, info: TensorInfo) -> mmap.mmap:
        if self._maps is None:
            raise WeightError(f"{self.folder}: the checkpoint is closed; tensor {info.name!r} cannot be read")
        mapping = self._maps.get(info.file)
        if mapping is None:
            try:
                with file_errors(info.file), open_regular(info.file, WeightError) as file:
                    self._check_state(info.file, os.fstat(file.fileno()))
                    mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError as error:  # "cannot mmap an empty file"
                raise WeightError(f"{info.file}: shrank after it was opened: {error}") from error
            self._maps[info.file] = mapping
        return mapping

    def _check_state(self, file: Path, now: os.stat_result) -> None:
        if _state(now) != self._states[file]:
            raise WeightError(
                f"{file}: was changed or replaced while it was being read; open the model again when nothing writes "
                "to its files any more"
            )

    def check_unchanged(self) -> None:
        """Check that no mapped file was written to since its header was read; one replaced by a rename still is mapped.

        Raises
        ------
        WeightError
            Names the file.
        """
        for file in self._maps or {}:
            with suppress(FileNotFoundError), os_errors(file, WeightError):
                now = file.stat()
                if _state(now)[:2] == self._states[file][:2]:
                    self._check_state(file, now)

    def array(self, name: str) -> npt.NDArray[Any]:
        """Return a tensor as a read-only view of the mapped file.

        Parameters
        ----------
        name : str

        Returns
        -------
        numpy.ndarray, shape `tensors[name].shape`
            bfloat16 comes as uint16 and float8 as uint8 (the bits), all else as numpy's own dtype. A copy
            only when the tensor's place in the file is not a multiple of its element size.

        Raises
        ------
        WeightError
            Unknown name, closed checkpoint, or a dtype of less than 8 bits.
        """
        info = self.info(name)
        dtype = STORED_DTYPES[info.dtype]
        if dtype.numpy is None:
            raise WeightError(f"{info.file}: tensor {name!r}: {info.dtype} has no numpy view")
        data = np.frombuffer(self._mapping(info), np.uint8, info.nbytes, info.offset)
        if info.offset % (dtype.bits // 8):
            data = data.copy()
            data.flags.writeable = False
            self.release(name)  # so that the tensor is not in memory twice
        return data.view(dtype.numpy).reshape(info.shape)

    def release(self, name: str, rows: slice = slice(None)) -> None:
        """Tell the kernel that a tensor's pages may leave memory; reading them again is correct, only slower.

        Covers the whole pages inside the tensor, or some rows of it: pages shared with a neighbour stay.
        """
        info = self.info(name)
        if not self._maps or info.file not in self._maps or not hasattr(mmap, "MADV_DONTNEED"):
            return
        num_rows = info.shape[0] if info.shape else 1
        first, last, _ = rows.indices(num_rows)
        row_bytes = info.nbytes // max(num_rows, 1)
        begin = -(-(info.offset + first * row_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (info.offset + last * row_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > begin:
            self._maps[info.file].madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def checkpoint_dtype(self) -> str:
        """Return the floating dtype that holds most bytes: float32, bfloat16, float16 or float64.

        Of packed weights, that of the checkpoint they were packed from.

        Raises
        ------
        WeightError
            No tensor is stored in one of these.
        """
        if self.packed:
            return self.packed.dtype
        totals = dict.fromkeys(FLOATS, 0)
        for info in self.tensors.values():
            if info.dtype in totals:
                totals[info.dtype] += info.nbytes
        best = max(totals, key=lambda name: totals[name])
        if totals[best] == 0:
            found = sorted({t.dtype for t in self.tensors.values()})
            raise WeightError(
                f"{self.folder}: no tensor of a floating dtype ({', '.join(FLOATS)}), only {found}; "
                "pass dtype= explicitly if this is intended"
            )
        return best


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.safetensors", "*.json", "tokenizer*", "*.jinja"]
_HUB_SKIP = ["consolidated*", "original/*", "onnx/*", "openvino/*", "metal/*"]


def resolve_model(model: str | os.PathLike[str], revision: str | None = None) -> Path:
    """Return the checkpoint folder that `model` names.

    Parameters
    ----------
    model : str or path
        `"demo"` (the bundled model; a path of this name is a folder), a folder, or a hub id `"org/name"`.
    revision : str, optional
        Branch, tag or commit of a hub id.

    Returns
    -------
    Path

    Raises
    ------
    TypeError
        Neither text nor path.
    FileNotFoundError
        A folder that does not exist.
    ConfigError
        A file instead of a folder, a revision of something else than a hub id, a hub id without huggingface_hub, or a
        download that failed.
    """
    if not isinstance(model, (str, os.PathLike)):
        raise TypeError(f"model: expected a folder, 'demo' or a hub id, got {short_repr(model)}")
    text = os.fspath(model)
    if isinstance(model, str) and _HUB_ID.fullmatch(text) and not Path(text).exists():
        return _download(text, revision)
    if revision is not None:
        raise ConfigError(f"revision={revision!r} is for models of the hub, and {text!r} is none; leave it out")
    if not text:
        raise ConfigError("model must be a folder, 'demo' or a hub id such as 'org/name', got an empty string")
    if model == "demo":
        if Path("demo", "config.json").exists():
            logger.warning("model 'demo' is the bundled model; the folder of this name here is './demo'")
        return Path(__file__).parents[1] / "assets" / "demo"
    path = Path(text).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        what = "a GGUF file, which this version does not read" if path.suffix.lower() == ".gguf" else "a file"
        raise ConfigError(f"model {text!r} is {what}; pass the folder that holds config.json and *.safetensors")
    raise FileNotFoundError(
        f"model folder {text!r} does not exist (looked at {path.absolute()}); pass the folder of a Hugging "
        "Face checkpoint (config.json, *.safetensors, tokenizer.json), 'demo' for the bundled model, or a "
        "hub id 'org/name'"
    )


def _download(hub_id: str, revision: str | None) -> Path:
    """Fetch a model from the Hugging Face hub into its cache; what is there already is not fetched again."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ConfigError(
            f"model {hub_id!r} is no folder here; to fetch it from the Hugging Face hub, run "
            "pip install huggingface_hub, or pass the path of a downloaded folder"
        ) from error
    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_SKIP))
    except Exception as error:  # the hub's errors share no base class of their own
        raise ConfigError(
            f"model {hub_id!r} is no folder here and could not be fetched from the Hugging Face hub: {error}"
        ) from error
