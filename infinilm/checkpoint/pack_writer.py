"""Writes a packed checkpoint (`packed.py`), linear by linear: memory is that of one, whatever the model has.

Called by `infinilm pack`. The engine packs as it does for itself; what it has packed goes to the file at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from infinilm import _core
from infinilm.checkpoint.folder import FLOATS, Checkpoint, resolve_model
from infinilm.checkpoint.gguf import GgufCheckpoint
from infinilm.checkpoint.loading import load_weights
from infinilm.checkpoint.new_folder import check_room, copy_texts, new_folder, weights_file
from infinilm.checkpoint.opening import open_checkpoint
from infinilm.checkpoint.packed import PackedInfo, is_of_linear
from infinilm.checkpoint.quantised.checkpoint import QuantisedCheckpoint
from infinilm.checkpoint.safetensors_header import DTYPE_CODES
from infinilm.checkpoint.sources import count_mtp_modules, has_mtp_head, has_mtp_lm_head
from infinilm.checks import DTYPES, short_repr
from infinilm.config.json.model_config import AutoConfig, ModelConfig
from infinilm.config.spec import MtpFormat, build_spec, longest_text
from infinilm.errors import ConfigError
from infinilm.gguf.file import PLAIN_TYPES, is_gguf
from infinilm.logs import logger

__all__ = ["pack_model"]

_ALIGNMENT = 4096  # The first tensor begins at a page. Panels are multiples of 64 bytes, as kernels need.


class _PackedFile:
    """A safetensors file under way: a `WeightEngine` that packs what it is given and writes it."""

    def __init__(self, file: BinaryIO, core: _core.InferEngine, metadata: Mapping[str, str]) -> None:
        self._file, self._core = file, core
        self._shapes = core.param_shapes()
        self._vectors: dict[str, Any] = {}  # come last, since they are of any size
        self._entries: dict[str, Any] = {"__metadata__": dict(metadata)}
        self._size = 0  # bytes of data so far
        # The header is written at the end, when all is known, into room for more tensors than there are.
        room = 200 * len(self._shapes) + sum(map(len, self._shapes)) + len(json.dumps(self._entries))
        self._data_begin = -(-room // _ALIGNMENT) * _ALIGNMENT
        file.seek(self._data_begin)

    def param_shapes(self) -> Mapping[str, Sequence[int]]:
        return self._shapes

    def load_param(self, name: str, tensor: Any, /) -> Sequence[str]:
        if not is_of_linear(name, self._shapes[name]):
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
        The dtype of weights that are not quantised: "bfloat16" or "float16"; "auto" keeps the checkpoint's, and so does
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
    if config.head == "score":
        raise ConfigError(f"{source}: packed folders have no room for the scores of labels; load it as it is")
    with open_checkpoint(source) as checkpoint:
        if checkpoint.packed:
            raise ConfigError(f"{source} is packed already; pass the checkpoint that it was packed from")
        wanted = "float32" if dtype == "auto" else dtype  # in which 16 bits stay as they are
        if dtype == "auto" and quantization is None and is_gguf(source):
            wanted = checkpoint.checkpoint_dtype()
        mtp = _head_format(config, checkpoint, quantization)
        spec = build_spec(config, dtype=wanted, max_model_len=longest_text(config), quantization=quantization, mtp=mtp)
        kept = checkpoint.kept_dtype(wanted)
        if quantization is None:
            _tell_unpacked(checkpoint, _core.weight_bytes(spec, kept))
        core = _core.InferEngine(spec, "cpu", num_threads or 0)
        try:
            with new_folder(out):
                check_room(out, _core.weight_bytes(spec, kept))
                copy_texts(source, out, kept)
                with weights_file(out) as file:
                    packed = _PackedFile(file, core, PackedInfo(Path(file.name), quantization, kept, mtp).metadata())
                    load_weights(
                        checkpoint,
                        packed,
                        dtype=wanted,
                        config=config,
                        progress=use_tqdm,
                        quantised_dtype="float16" if dtype == "auto" and quantization is None else None,
                    )
                    packed.finish()
        finally:
            core.close()
    return out


def _head_format(
    config: ModelConfig, checkpoint: Checkpoint | GgufCheckpoint, quantization: str | None
) -> MtpFormat | None:
    """How an MTP head is packed beside a model of `quantization`: as it is loaded by default. None: there is none."""
    files = checkpoint.tensors, checkpoint.names
    if not has_mtp_head(config, *files):
        return None
    return MtpFormat.beside(
        quantization,
        "int4",
        num_ids=config.vocab_size,
        has_lm_head=has_mtp_lm_head(config, *files),
        num_modules=count_mtp_modules(config, *files),
    )


def _tell_unpacked(checkpoint: Checkpoint | GgufCheckpoint, size: int) -> None:
    """Warn that quantised weights become plain numbers, of `size` bytes: the layout has none of their formats."""
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
