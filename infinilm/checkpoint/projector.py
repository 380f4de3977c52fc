"""The tensors of an mmproj file under the names of a Hugging Face checkpoint."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm.checkpoint.gguf import PLAIN, GgufTensors
from infinilm.checkpoint.head_rows import order_of_pairs
from infinilm.checkpoint.safetensors_header import TensorInfo
from infinilm.checkpoint.sources import Source
from infinilm.errors import WeightError
from infinilm.gguf.file import GgufTensor
from infinilm.gguf.projectors import ProjectorFile

__all__ = ["ProjectorCheckpoint"]

_FRAMES = ("v.patch_embd.weight", "v.patch_embd.weight.1")  # of the first frame and of the second


class ProjectorCheckpoint(GgufTensors):
    """A tower in an mmproj file, opened for reading.

    Parameters
    ----------
    file : ProjectorFile

    Attributes
    ----------
    order : int64 array or None
        The order of the rows of a head of queries and keys; None: as the engine has them.

    Raises
    ------
    FileNotFoundError, WeightError
        The file is absent or damaged.
    """

    def __init__(self, file: ProjectorFile) -> None:
        super().__init__(file.path, file.gguf)
        names, tensors = file.names(), file.gguf.tensors
        self._offsets = {names[tensor] for tensor in file.row.norm_offsets & names.keys()}
        self._frames: dict[str, TensorInfo] = {}  # tensors of one frame, by the name of that of both and a number
        found = {to: self._info(to, tensors[name]) for name, to in names.items()}
        patches = names.get(_FRAMES[0])
        if file.row.frames and patches is not None:
            self._frames = {f"{patches}.{i}": self._frame(file, f"{patches}.{i}", i) for i in range(len(_FRAMES))}
            rows, columns = found[patches].shape
            found[patches] = replace(found[patches], shape=(rows, len(_FRAMES) * columns))
        self._take(found)
        sizes = file.config["vision_config"]
        head_dim = sizes["hidden_size"] // sizes.get("num_attention_heads", 1)
        self.order: npt.NDArray[np.int64] | None = order_of_pairs(head_dim, head_dim) if file.row.pairs else None

    def _info(self, name: str, tensor: GgufTensor) -> TensorInfo:
        self._types[name] = tensor.type
        shape = tensor.shape
        if len(shape) > 2:  # a convolution over patches is a linear
            shape = shape[0], math.prod(shape[1:])
        return TensorInfo(name, PLAIN.get(tensor.type, tensor.type), shape, tensor.file, tensor.offset, tensor.nbytes)

    def _frame(self, file: ProjectorFile, name: str, number: int) -> TensorInfo:
        """What embeds one frame of a patch, in a type and of a shape that are those of the first."""
        first, tensor = file.gguf.tensors[_FRAMES[0]], file.gguf.tensors.get(_FRAMES[number])
        if tensor is None or (tensor.type, tensor.shape) != (first.type, first.shape):
            raise WeightError(
                f"{self.path}: expected a tensor {_FRAMES[number]!r} of {first.type} {list(first.shape)}, for one "
                f"frame of a patch; got {None if tensor is None else (tensor.type, list(tensor.shape))}"
            )
        return self._info(name, tensor)

    def _offset(self, name: str) -> float:
        """See `GgufTensors._offset`."""
        return 1.0 if name in self._offsets else 0.0

    def read(self, source: Source, dtype: str) -> tuple[npt.NDArray[Any], str]:
        """See `GgufTensors.read`. What embeds patches of two frames is put together: channel, frame, row, column."""
        frames = [f"{source.tensor}.{i}" for i in range(len(_FRAMES))]
        if frames[0] not in self._frames:
            return super().read(source, dtype)
        parts = [super(ProjectorCheckpoint, self).read(replace(source, tensor=name), dtype) for name in frames]
        of_channels = [array.reshape(len(array), 3, -1) for array, _ in parts]
        return np.stack(of_channels, axis=2).reshape(len(of_channels[0]), -1), parts[0][1]

    def info(self, name: str) -> TensorInfo:
        """See `MappedTensors.info`; also of a tensor of one frame."""
        return self._frames[name] if name in self._frames else super().info(name)
