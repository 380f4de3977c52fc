"""Hugging Face checkpoint folders: safetensors headers, zero-copy arrays of the mapped files.

Called by `loading.py`, and by the `LLM` and engine layers. Nothing is read before every header has been checked:
damage of any kind is a `WeightError` that names the file. Arrays are views of the mapped file and keep the mapping
alive; the engine uses them in place where the stored dtype allows it, so that peak memory is the model and not twice
the model.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm.checkpoint.mapped import FileState, MappedTensors, file_state
from infinilm.checkpoint.packed import PackedInfo, read_packed
from infinilm.checkpoint.safetensors_header import (
    STORED_DTYPES,
    TensorInfo,
    file_errors,
    read_header,
)
from infinilm.checks import DTYPES, short_repr
from infinilm.errors import ConfigError, WeightError
from infinilm.files import read_json
from infinilm.gguf.file import find_gguf, is_gguf
from infinilm.hub import download, hub_model
from infinilm.logs import logger

__all__ = ["FLOATS", "Checkpoint", "TensorInfo", "find_files", "is_used_in_place", "resolve_model"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_ADAPTER = (
    "this is a LoRA adapter, not a model: pass its base model, and this folder as lora={'name': folder} or "
    "merge_lora=folder"
)

FLOATS = (*DTYPES, "float64")
"""Dtypes that weights may be stored in."""


def is_used_in_place(stored: str, compute: str) -> bool:
    """True if a tensor needs no conversion: 16 bits are exact in float32."""
    return stored == compute or (compute == "float32" and stored in ("bfloat16", "float16"))


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
    if gguf_files := [n for n in names if n.endswith(".gguf")]:
        return WeightError(f"{folder}: no safetensors, only GGUF files such as {gguf_files[0]}: pass the path of one")
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


def find_files(folder: Path) -> tuple[list[Path], dict[str, Path]]:
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


def _read_headers(files: Sequence[Path]) -> tuple[dict[str, TensorInfo], dict[Path, FileState], PackedInfo | None]:
    """Tensors by name, what each file was before its header was read, and how the weights are packed, if they are."""
    tensors: dict[str, TensorInfo] = {}
    states: dict[Path, FileState] = {}
    metadata: dict[Path, Mapping[str, str]] = {}
    for file in files:
        with file_errors(file):
            states[file] = file_state(file.stat())
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


class Checkpoint(MappedTensors):
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
        super().__init__()
        self.path = self.folder = Path(folder)
        is_file = self.folder.suffix == ".safetensors" and self.folder.is_file()
        files, index = ([self.folder], {}) if is_file else find_files(self.folder)
        tensors, self._states, self.packed = _read_headers(files)
        _check_index(self.folder, index, tensors)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(tensors)
        self.dtypes = frozenset(FLOATS)

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
        return self._view(self.info(name))

    def _view(self, info: TensorInfo) -> npt.NDArray[Any]:
        dtype = STORED_DTYPES[info.dtype]
        if dtype.numpy is None:
            raise WeightError(f"{info.file}: tensor {info.name!r}: {info.dtype} has no numpy view")
        data = np.frombuffer(self._mapping(info), np.uint8, info.nbytes, info.offset)
        if info.offset % (dtype.bits // 8):
            data = data.copy()
            data.flags.writeable = False
            self._release(info)  # so that the tensor is not in memory twice
        return data.view(dtype.numpy).reshape(info.shape)

    def kept_dtype(self, dtype: str) -> str:
        """See `MappedTensors.kept_dtype`."""
        stored = self.checkpoint_dtype()
        return stored if is_used_in_place(stored, dtype) else dtype

    def checkpoint_dtype(self) -> str:
        """Return the floating dtype that holds most bytes: float32, bfloat16, float16 or float64.

        For packed weights it is that of the checkpoint they were packed from.

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


def resolve_model(model: str | os.PathLike[str], revision: str | None = None, *, use_tqdm: bool = True) -> Path:
    """Return the checkpoint folder or the GGUF file that `model` names.

    Parameters
    ----------
    model : str or path
        `"demo"` (the bundled model; a path of this name is a folder), a folder, a GGUF file, a hub id `"org/name"`, or
        `"org/name:file.gguf"` of the hub, for which `"org/name:Q4_K_M"` is short.
    revision : str, optional
        Branch, tag or commit of a hub id.
    use_tqdm : bool
        Show a progress bar while it is fetched.

    Returns
    -------
    Path
        A folder, or a GGUF file.

    Raises
    ------
    TypeError
        Neither text nor path.
    FileNotFoundError
        A folder that does not exist.
    ConfigError
        Another file, a folder that must not be read, one with several models as GGUF files, a revision of something
        else than a hub id, a hub id without huggingface_hub, or a download that failed.
    """
    if not isinstance(model, (str, os.PathLike)):
        raise TypeError(f"model: expected a folder, 'demo' or a hub id, got {short_repr(model)}")
    text = os.fspath(model)
    if of_hub := hub_model(model):
        return download(of_hub, revision, use_tqdm=use_tqdm)
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
        if not os.access(path, os.R_OK | os.X_OK):
            raise ConfigError(f"{path}: no permission to read this folder; check its owner and mode")
        return _weights_of(path)
    is_piece = re.search(r"\.gguf[.-]", path.name, re.IGNORECASE) and path.suffix.lower() != ".gguf"
    if is_gguf(path) and not is_piece:
        return path
    if path.exists():
        if is_piece:
            raise ConfigError(
                f"model {text!r} is a piece of a GGUF file: join all pieces in their order, as `cat` does, to one file "
                "whose name ends in .gguf"
            )
        raise ConfigError(
            f"model {text!r} is a file, and none of GGUF; pass a GGUF file, or the folder that holds config.json and "
            "*.safetensors"
        )
    if path.suffix.lower() == ".gguf":
        link = f"; it is a link to {path.readlink()}: fetch it again" if path.is_symlink() else ""
        raise FileNotFoundError(f"model file {text!r} does not exist (looked at {path.absolute()}){link}")
    raise FileNotFoundError(
        f"model folder {text!r} does not exist (looked at {path.absolute()}); pass the folder of a Hugging "
        "Face checkpoint (config.json, *.safetensors, tokenizer.json), 'demo' for the bundled model, or a "
        "hub id 'org/name'"
    )


def _weights_of(folder: Path) -> Path:
    """The folder, or the GGUF file in it where it has no other weights."""
    if any(folder.glob("*.safetensors")) or (folder / _INDEX).exists():
        return folder
    return find_gguf(folder) or folder
