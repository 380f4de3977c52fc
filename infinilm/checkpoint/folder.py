"""Hugging Face checkpoint folders: safetensors headers, zero-copy arrays of the mapped files, strict loading.

Called by the `LLM` and engine layers. Nothing is read before every header has been checked: damage of any
kind is a `WeightError` that names the file. Arrays are views of the mapped file and keep the mapping alive;
the engine uses them in place where the stored dtype allows it, so that peak memory is the model and not twice
the model.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from infinilm import _core
from infinilm.checkpoint.dtype_conversion import convert
from infinilm.checkpoint.gguf import GgufCheckpoint
from infinilm.checkpoint.hub import HUB_FILE, HUB_ID, download, download_gguf
from infinilm.checkpoint.mapped import FileState, MappedTensors, file_state
from infinilm.checkpoint.packed import PackedInfo, expected_tensors, read_packed
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
from infinilm.logs import logger
from infinilm.progress import progress_bar

__all__ = ["Checkpoint", "TensorInfo", "WeightEngine", "load_weights", "resolve_model"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_ADAPTER = (
    "this is a LoRA adapter, not a model, and adapters are not read in this version: merge it into its base model once "
    "where peft is installed (merge_and_unload, then save_pretrained), and pass that folder"
)
_MAX_LISTED = 20  # names of one kind in one error message

_FLOATS = (*DTYPES, "float64")
_QUANTISED_DTYPES = frozenset(
    {"int8", "uint8", "float4"} | {n for n in STORED_DTYPES if n.startswith(("float8_", "float6_"))}
)
_QUANTISED_SUFFIXES = (
    ".qweight",
    ".qzeros",
    ".g_idx",
    ".weight_packed",
    ".weight_scale_inv",
    ".SCB",
    ".quant_map",
)


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
        files, index = ([self.folder], {}) if is_file else _find_files(self.folder)
        tensors, self._states, self.packed = _read_headers(files)
        _check_index(self.folder, index, tensors)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(tensors)
        self.dtypes = frozenset(_FLOATS)

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

    def read(self, name: str, dtype: str) -> tuple[npt.NDArray[Any], str]:
        """See `MappedTensors.read`."""
        array, stored = self.array(name), self.tensors[name].dtype
        if is_used_in_place(stored, dtype):
            return _own(array), stored
        array = convert(array, stored, dtype, name=name)
        self.release(name)
        return array, dtype

    def kept_dtype(self, dtype: str) -> str:
        """See `MappedTensors.kept_dtype`."""
        stored = self.checkpoint_dtype()
        return stored if is_used_in_place(stored, dtype) else dtype

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
        totals = dict.fromkeys(_FLOATS, 0)
        for info in self.tensors.values():
            if info.dtype in totals:
                totals[info.dtype] += info.nbytes
        best = max(totals, key=lambda name: totals[name])
        if totals[best] == 0:
            found = sorted({t.dtype for t in self.tensors.values()})
            raise WeightError(
                f"{self.folder}: no tensor of a floating dtype ({', '.join(_FLOATS)}), only {found}; "
                "pass dtype= explicitly if this is intended"
            )
        return best


class WeightEngine(Protocol):
    """What `load_weights` needs of an engine; `InferEngine` is one."""

    def param_shapes(self) -> Mapping[str, Sequence[int]]:
        """Return the full shape of each parameter expected, by its name in the checkpoint."""
        ...

    def load_param(self, name: str, tensor: Any, /) -> Sequence[str] | None:
        """Take one full tensor; each rank takes its shard. Return names whose memory is not read again."""
        ...


def _is_harmless(name: str, expected: Mapping[str, Any]) -> bool:
    """Tensors that may be in a file without being asked for.

    `lm_head.weight` of a model with tied embeddings (the engine then has no such parameter), and the rotary
    frequencies that old checkpoints store, which follow from the configuration.
    """
    return (name == "lm_head.weight" and name not in expected) or name.endswith(".rotary_emb.inv_freq")


def _listed(items: Sequence[str]) -> str:
    more = f", and {len(items) - _MAX_LISTED} more" if len(items) > _MAX_LISTED else ""
    return ", ".join(items[:_MAX_LISTED]) + more


def _missing_shards(checkpoint: MappedTensors) -> str | None:
    """Name the shards that a file name like model-00001-of-00003.safetensors promises and that are absent."""
    present: dict[str, set[int]] = {}
    for file in {t.file.name for t in checkpoint.tensors.values()}:
        if match := re.fullmatch(r"(.*)-(\d{1,6})-of-(\d{1,6})\.safetensors", file):
            present.setdefault(f"{match[1]}|{match[3]}", set()).add(int(match[2]))
    for key, numbers in present.items():
        total = int(key.rpartition("|")[2])
        absent = sorted(set(range(1, total + 1)) - numbers)
        if absent:
            return f"shards {_listed([str(n) for n in absent])} of {total} are absent: is the download complete?"
    return None


def _causes(checkpoint: MappedTensors, missing: list[str], unexpected: list[str], shaped: list[str]) -> list[str]:
    """Guess what went wrong from the pattern of differences."""
    causes = []
    if missing and (shards := _missing_shards(checkpoint)):
        causes.append(shards)
    if missing == ["lm_head.weight"]:
        causes.append('the embeddings are tied: config.json should say "tie_word_embeddings": true')
    tails = {name.rpartition("model.")[2] for name in unexpected}
    if missing and unexpected and all(name.rpartition("model.")[2] in tails for name in missing):
        causes.append("the names differ only by a prefix such as 'model.': the checkpoint was saved from a submodule")
    if unexpected and all(name.endswith(".bias") for name in unexpected):
        causes.append("the checkpoint has biases that config.json does not announce (attention_bias, mlp_bias)")
    if any("lora_" in name for name in unexpected):
        causes.append("the files hold a LoRA adapter: merge it into its base model first")
    if shaped or not causes:
        causes.append("config.json and the weights do not belong together (another size or another architecture)")
    return causes


def _check_quantised(checkpoint: MappedTensors) -> None:
    found = [
        t for t in checkpoint.tensors.values() if t.dtype in _QUANTISED_DTYPES or t.name.endswith(_QUANTISED_SUFFIXES)
    ]
    if found:
        first = found[0]
        raise WeightError(
            f"{first.file}: tensor {first.name!r} is stored as {first.dtype} ({len(found)} such tensors): "
            "quantised checkpoints are not supported in this version; use the float16 or bfloat16 checkpoint "
            "of the model"
        )


def _match(
    checkpoint: MappedTensors, expected: Mapping[str, tuple[int, ...]], packed_dtypes: Mapping[str, str]
) -> list[TensorInfo]:
    """Compare headers with the expected set; return what to load in the order of the files.

    `packed_dtypes`: of the tensors of packed linears; others have any floating dtype.

    Raises
    ------
    WeightError
        Reports all missing, unexpected and mis-shaped tensors together.
    """
    stored = checkpoint.tensors
    missing = [name for name in expected if name not in stored]
    skipped = [name for name in stored if name not in expected and _is_harmless(name, expected)]
    unexpected = [name for name in stored if name not in expected and name not in skipped]
    shaped = [
        f"{name} (expected {list(shape)}, got {list(stored[name].shape)} in {stored[name].file.name})"
        for name, shape in expected.items()
        if name in stored and stored[name].shape != shape
    ]
    typed = [
        f"{name} ({stored[name].dtype} in {stored[name].file.name})"
        for name in expected
        if name in stored and name not in packed_dtypes and stored[name].dtype not in checkpoint.dtypes
    ]
    typed += [
        f"{name} (expected {dtype}, got {stored[name].dtype} in {stored[name].file.name})"
        for name, dtype in packed_dtypes.items()
        if name in stored and stored[name].dtype != dtype
    ]
    report = [
        f"\n  {len(items)} {label}: {_listed(items)}"
        for label, items in (
            ("missing from the files", missing),
            ("unexpected in the files", unexpected),
            ("of another shape", shaped),
            ("not of a floating dtype" if not packed_dtypes else "of another dtype", typed),
        )
        if items
    ]
    if report:
        causes = "; ".join(_causes(checkpoint, missing, unexpected, shaped))
        raise WeightError(
            f"{checkpoint.path}: the weights do not fit the model:{''.join(report)}\n  Likely cause: {causes}"
        )
    if skipped:
        logger.info("%s: not needed by this model and skipped: %s", checkpoint.path, _listed(skipped))
    return sorted((stored[name] for name in expected), key=lambda t: (t.file, t.offset))


def _own(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Make a copy writable, which a view of a file is not: an engine keeps files, not copies, beside packed weights."""
    if isinstance(array.base, np.ndarray) and array.base.flags.owndata:
        array.base.flags.writeable = array.flags.writeable = True
    return array


def is_used_in_place(stored: str, compute: str) -> bool:
    """Whether a tensor needs no conversion: 16 bits are exact in float32."""
    return stored == compute or (compute == "float32" and stored in ("bfloat16", "float16"))


def load_weights(
    checkpoint: MappedTensors,
    engine: WeightEngine,
    *,
    dtype: str,
    progress: bool = True,
    from_numpy: Callable[..., Any] | None = None,
    natively: bool = False,
) -> None:
    """Load every parameter of an engine from a checkpoint, strictly.

    Headers are compared with `engine.param_shapes()` before a byte of data is read. A tensor is used in place
    (no copy) when it is stored in the compute dtype, or when the compute dtype is float32 and it is stored in
    16 bits; otherwise it is converted to the compute dtype, to nearest, ties to even, and its pages of the
    file are released. Packed linears are tensors of the file like the others, always used in place.

    Parameters
    ----------
    checkpoint : Checkpoint
    engine : WeightEngine
    dtype : str
        The compute dtype: `"float32"`, `"bfloat16"` or `"float16"`.
    progress : bool
        Show a progress bar on stderr, if that is a terminal.
    from_numpy : callable, optional
        Makes the engine's tensor of an array: `from_numpy(array, dtype="bfloat16")`. Default: the core's own,
        zero-copy.
    natively : bool
        Keep the blocks of a GGUF file as they are, where the engine, a `_core.InferEngine` on one CPU rank, computes
        with such.

    Raises
    ------
    WeightError
        Tensors are missing, unexpected, mis-shaped, quantised or not floating, a value does not fit `dtype`, or a file
        was written to meanwhile.
    ConfigError
        `dtype` is none of the three, or contradicts how the weights are packed.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    expected = {name: tuple(int(n) for n in shape) for name, shape in engine.param_shapes().items()}
    packed_dtypes: Mapping[str, str] = {}
    if checkpoint.packed:
        checkpoint.packed.check_dtype(dtype)
        expected, packed_dtypes = expected_tensors(engine, expected, checkpoint.tensors, checkpoint.packed)
    else:
        _check_quantised(checkpoint)
    infos = _match(checkpoint, expected, packed_dtypes)
    if from_numpy is None:
        make: Callable[..., Any] = importlib.import_module("infinilm._core").from_numpy
    else:
        make = from_numpy
    blocks = _native_blocks(checkpoint, engine) if natively else {}
    with progress_bar(sum(t.nbytes for t in infos), "Loading weights", "B", wanted=progress) as advance:
        for info in infos:
            if info.name in blocks:
                for name, tensor in blocks[info.name]():
                    engine.load_param(name, tensor)
                advance(info.nbytes)
                continue
            array, kept = checkpoint.read(info.name, info.dtype if info.name in packed_dtypes else dtype)
            for name in engine.load_param(info.name, make(array, dtype=kept)) or ():
                checkpoint.release(name)  # packed: not read again
            advance(info.nbytes)
    checkpoint.check_unchanged()


def _native_blocks(checkpoint: MappedTensors, engine: Any) -> dict[str, Callable[[], Sequence[tuple[str, Any]]]]:
    """What to load in the place of weights whose blocks are kept: all of a linear with the first of its weights."""
    if not isinstance(checkpoint, GgufCheckpoint):
        return {}
    linears = _core.linears(engine.spec)
    found: dict[str, Callable[[], Sequence[tuple[str, Any]]]] = {}
    for linear in checkpoint.native_linears(linears):
        names = sorted(
            linears[linear][0], key=lambda name: (checkpoint.tensors[name].file, checkpoint.tensors[name].offset)
        )
        found |= {name: lambda: () for name in names}
        found[names[0]] = partial(checkpoint.pack, linear, linears)
    return found


def resolve_model(model: str | os.PathLike[str], revision: str | None = None) -> Path:
    """Return the checkpoint folder or the GGUF file that `model` names.

    Parameters
    ----------
    model : str or path
        `"demo"` (the bundled model; a path of this name is a folder), a folder, a GGUF file, a hub id `"org/name"`, or
        `"org/name:file.gguf"` of the hub, for which `"org/name:Q4_K_M"` is short.
    revision : str, optional
        Branch, tag or commit of a hub id.

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
        Another file, a folder with several models as GGUF files, a revision of something else than a hub id, a hub id
        without huggingface_hub, or a download that failed.
    """
    if not isinstance(model, (str, os.PathLike)):
        raise TypeError(f"model: expected a folder, 'demo' or a hub id, got {short_repr(model)}")
    text = os.fspath(model)
    if isinstance(model, str) and not Path(text).exists():
        if HUB_ID.fullmatch(text):
            return download(text, revision)
        if match := HUB_FILE.fullmatch(text):
            return download_gguf(match[1], match[2], revision)
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
        return _weights_of(path)
    if is_gguf(path):
        return path
    if path.exists():
        raise ConfigError(
            f"model {text!r} is a file; pass a .gguf file, or the folder that holds config.json and *.safetensors"
        )
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
