"""Finds an engine's parameters in a checkpoint: under another name, as rows of a tensor, or with rows in another order.

Called by `load_weights`. The tables are `infinilm.config.tensor_names`, one per family.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from infinilm.checkpoint.folder import FLOATS
from infinilm.checkpoint.safetensors_header import TensorInfo
from infinilm.config.families import family_of, rotary_dim
from infinilm.config.llama_config import LlamaConfig
from infinilm.config.tensor_names import TensorNames

__all__ = ["FoundTensors", "Source", "find_by_names", "find_tensors", "order_of_pairs"]

Shape = tuple[int, ...]

_OF_LAYER = re.compile(r"model\.(layers\.\d+\.)(.+?)(\.weight|\.bias|)")
_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Where a parameter is.

    Attributes
    ----------
    tensor : str
        In the files.
    begin, end : int
        Its rows there.
    order : numpy.ndarray, optional
        [end - begin]: which of these rows each row of the parameter is. None: in their order.
    matrix : int, optional
        Which of the matrices, or vectors, of a tensor of one dimension more has these rows.
    columns : bool
        They are columns there.
    step : int
        Each so-manieth of them.
    """

    tensor: str
    begin: int
    end: int
    order: npt.NDArray[np.int64] | None = None
    matrix: int | None = None
    columns: bool = False
    step: int = 1

    @property
    def places(self) -> slice:
        """Of the tensor's first dimension, those that hold the parameter."""
        return slice(self.begin, self.end) if self.matrix is None else slice(self.matrix, self.matrix + 1)

    def take(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Take the parameter from the whole tensor: a view, or a copy where it does not lie there row by row."""
        whole = array if self.matrix is None else array[self.matrix]
        rows = (whole.T if self.columns else whole)[self.begin : self.end : self.step]
        return np.ascontiguousarray(rows) if self.order is None else rows[self.order]


@dataclass(frozen=True, slots=True)
class FoundTensors:
    """What to read of a checkpoint.

    Attributes
    ----------
    sources : dict of str to Source
        By parameter.
    shapes : dict of str to shape
        Of the whole tensors that the files must hold.
    not_read : tuple of str
        Names in the files that belong to parts of the model which are not computed.
    """

    sources: dict[str, Source]
    shapes: dict[str, Shape]
    not_read: tuple[str, ...] = ()


def find_tensors(
    config: LlamaConfig | None, expected: Mapping[str, Shape], stored: Collection[str] | Mapping[str, TensorInfo]
) -> FoundTensors:
    """Find parameters in a checkpoint.

    Parameters
    ----------
    config : LlamaConfig, optional
        Of the model; None: the files call tensors as the engine does.
    expected : mapping of str to shape
        The parameters.
    stored : collection of str
        Names of the tensors in the files. Stacked ones that are quantised, as a mapping tells, are [outputs, inputs]
        in all families.
    """
    if config is None:
        return FoundTensors({name: Source(name, 0, shape[0]) for name, shape in expected.items()}, dict(expected))
    family = family_of(config.architecture)
    order = order_of_pairs(config.head_dim, rotary_dim(config)) if family.rope_pairs == "neighbours" else None
    return find_by_names(family.names, order, expected, stored)


def find_by_names(
    names: TensorNames,
    order: npt.NDArray[np.int64] | None,
    expected: Mapping[str, Shape],
    stored: Collection[str] | Mapping[str, TensorInfo],
) -> FoundTensors:
    """Find parameters in files that call them so; the other arguments are those of `find_tensors`.

    `order`: of the elements of a head of q and k, as `Source.order`; None: as the engine has them.
    """
    model, head = _prefix(names, stored)
    of_layers = filter(None, map(_OF_LAYER.fullmatch, expected))
    num_layers = max((int(match[1].split(".")[1]) + 1 for match in of_layers), default=0)
    not_read = tuple(name for name in stored if _is_not_read(name, names, f"{model}layers.", num_layers))
    joined, stacked = (
        {part: (whole, parts) for whole, parts in table.items() for part in parts}
        for table in (names.joined, names.stacked)
    )

    sources: dict[str, Source] = {}
    shapes: dict[str, Shape] = {}
    for name, shape in expected.items():
        rows = shape[0]
        match = _OF_LAYER.fullmatch(name)
        if match is None:
            tensor = model + name.removeprefix("model.") if name.startswith("model.") else head + name
            sources[name], shapes[tensor] = Source(tensor, 0, rows), shape
            continue
        layer, module, kind = match.groups()
        expert = _EXPERT.search(module)
        number = expert.group() if expert else ""
        any_expert = _EXPERT.sub("{}", module)
        stacks = any(f"{model}{layer}{whole}" in stored for whole in names.stacked)
        is_stacked = any_expert in stacked and f"{model}{layer}{stacked[any_expert][0]}" in stored
        if is_stacked:
            whole, parts = stacked[any_expert]
            tensor = f"{model}{layer}{whole}{'_bias' if kind == '.bias' else ''}"
            parts = tuple(part.format(number) for part in parts)
        else:
            renames = {} if stacks and not names.stacked_renamed else names.renamed
            renamed = renames.get(any_expert, module).format(number)
            whole, parts = joined.get(module, (renamed, (module,)))
            tensor = f"{model}{layer}{whole}{kind}"
        sizes = [expected[f"model.{layer}{part}{kind}"][0] for part in parts]
        begin = sum(sizes[: parts.index(module)])
        turned = order is not None and module in ("self_attn.q_proj", "self_attn.k_proj")
        if is_stacked:
            matrix, columns = int(number or 0), names.stacked_columns and _is_plain(stored, tensor)
            num_experts = max(matrix + 1, shapes.get(tensor, (0,))[0])
            whole_shape = (sum(sizes), *shape[1:])
            shapes[tensor] = (num_experts, *(whole_shape[::-1] if columns else whole_shape))
            first, end, step = begin, begin + rows, 1
            if names.stacked_in_turn:
                first, end, step = parts.index(module), sum(sizes), len(parts)
            sources[name] = Source(tensor, first, end, None, matrix, columns and len(shape) == 2, step)
            continue
        sources[name] = Source(tensor, begin, begin + rows, _of_heads(order, rows) if turned else None)
        shapes[tensor] = (sum(sizes), *shape[1:])
    return FoundTensors(sources, shapes, not_read)


def _is_not_read(tensor: str, names: TensorNames, layers: str, num_layers: int) -> bool:
    if names.not_read and tensor.startswith(names.not_read):
        return True
    layer = tensor.removeprefix(layers).partition(".")[0] if names.later_layers else ""
    return layer.isdecimal() and int(layer) >= num_layers


def _is_plain(stored: Collection[str] | Mapping[str, TensorInfo], tensor: str) -> bool:
    return not isinstance(stored, Mapping) or tensor not in stored or stored[tensor].dtype in FLOATS


def _prefix(names: TensorNames, stored: Collection[str]) -> tuple[str, str]:
    """Return the prefixes that the files use; the first where they use none."""
    return next((pair for pair in names.prefixes if f"{pair[0]}embed_tokens.weight" in stored), names.prefixes[0])


def order_of_pairs(head_dim: int, rotary_dim: int) -> npt.NDArray[np.int64]:
    """Return which element of a head whose RoPE turns 2i with 2i + 1 comes where it turns i with i + rotary_dim / 2.

    Scores do not change where the elements of q and of k change places alike.
    """
    pairs = np.arange(rotary_dim).reshape(-1, 2)
    return np.concatenate([pairs[:, 0], pairs[:, 1], np.arange(rotary_dim, head_dim)])


def _of_heads(order: npt.NDArray[np.int64] | None, rows: int) -> npt.NDArray[np.int64]:
    assert order is not None
    heads: npt.NDArray[np.int64] = np.arange(0, rows, len(order))[:, None] + order  # [num_heads, head_dim]
    return heads.reshape(-1)
