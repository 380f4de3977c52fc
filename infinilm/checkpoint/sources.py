"""Finds an engine's parameters in a checkpoint: under another name, as rows of a tensor, or with rows in another order.

Called by `load_weights`. The tables are `infinilm.config.families.names`, one per family.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from infinilm.checkpoint.folder import FLOATS
from infinilm.checkpoint.head_rows import HeadRows, order_of_pairs, rows_by_head
from infinilm.checkpoint.safetensors_header import TensorInfo
from infinilm.config.families import family_of
from infinilm.config.families.names import MISTRAL_OWN, OF_MISTRAL_OWN, WRAPPED, TensorNames
from infinilm.config.json.model_config import ModelConfig
from infinilm.config.spec import rotary_dim, shapes_of
from infinilm.config.sublayers.layer_shapes import LayerShape

__all__ = [
    "FoundTensors",
    "Source",
    "count_mtp_modules",
    "find_by_names",
    "find_tensors",
    "has_mtp_head",
    "has_mtp_lm_head",
    "names_of",
]

Shape = tuple[int, ...]


_OF_LAYER = re.compile(r"model\.(layers\.\d+\.)(.+?)(\.weight|\.bias|)")
_EXPERT = re.compile(r"(?:(?<=\.experts\.)|(?<=\.adapters\.))\d+(?=\.)")

# Tensors that transformers writes, but does not read, for layers that read the keys and values of others.
_OF_OWN_KV = ("self_attn.k_proj.", "self_attn.v_proj.", "self_attn.k_norm.")


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Where a parameter is.

    Attributes
    ----------
    tensor : str
        In the files.
    begin, end : int
        Its rows there, or those that they are among.
    order : numpy.ndarray, optional
        [rows of the parameter]: which of these rows each is. None: all in their order.
    matrix : int, optional
        Which of the matrices, or vectors, of a tensor of one dimension more has these rows.
    columns : bool
        They are columns there.
    step : int
        Every step-th of them.
    transposed : int
        The number of matrices of equal size that these rows are, each of them transposed. 0: none is.
    column_order : numpy.ndarray, optional
        Which column of the tensor each of the parameter is.
    unit : str
        The parameter is a matrix of which the "rows" or the "columns" are divided by their lengths, which is left to
        who reads it. "": it is as it is.
    """

    tensor: str
    begin: int
    end: int
    order: npt.NDArray[np.int64] | None = None
    matrix: int | None = None
    columns: bool = False
    step: int = 1
    transposed: int = 0
    column_order: npt.NDArray[np.int64] | None = None
    unit: Literal["", "rows", "columns"] = ""

    @property
    def places(self) -> slice:
        """The part of the tensor's first dimension that holds the parameter."""
        if self.matrix is not None:
            return slice(self.matrix, self.matrix + 1)
        return slice(None) if self.columns else slice(self.begin, self.end)

    def take(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Take the parameter from the whole tensor: a view, or a copy where it does not lie there row by row."""
        whole = np.atleast_1d(array if self.matrix is None else array[self.matrix])
        return self.choose((whole.T if self.columns else whole)[self.begin : self.end])

    def choose(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Take the parameter from the rows from `begin` to `end`."""
        rows = rows[:: self.step]
        rows = rows if self.order is None else rows[self.order]
        if self.column_order is not None:  # a row may be a kernel of a convolution
            rows = rows.reshape(len(rows), -1)[:, self.column_order]
        return self.transpose(np.ascontiguousarray(rows))

    def transpose(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Transpose the matrices that `transposed` speaks of."""
        if not self.transposed:
            return rows
        matrices = rows.reshape(self.transposed, -1, rows.shape[1]).swapaxes(1, 2)
        return np.ascontiguousarray(matrices).reshape(-1, matrices.shape[2])


@dataclass(frozen=True, slots=True)
class FoundTensors:
    """The tensors to read of a checkpoint.

    Attributes
    ----------
    sources : dict of str to Source
        By parameter.
    shapes : dict of str to shape
        The shapes of the whole tensors that the files must hold.
    not_read : tuple of str
        Names in the files that belong to parts of the model which are not computed.
    of_heads : tuple of str
        Names in the files that belong to heads of other tasks.
    values : dict of str to numpy.ndarray
        Parameters that are no tensors of the files: what they are, in float32.
    """

    sources: dict[str, Source]
    shapes: dict[str, Shape]
    not_read: tuple[str, ...] = ()
    of_heads: tuple[str, ...] = ()
    values: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)


def find_tensors(
    config: ModelConfig | None, expected: Mapping[str, Shape], stored: Collection[str] | Mapping[str, TensorInfo]
) -> FoundTensors:
    """Find parameters in a checkpoint.

    Parameters
    ----------
    config : ModelConfig, optional
        The configuration of the model; None: the files call tensors as the engine does.
    expected : mapping of str to shape
        The parameters.
    stored : collection of str
        Names of the tensors in the files. Stacked ones that are quantised, as a mapping tells, are [outputs, inputs]
        in all families.
    """
    if config is None:
        return FoundTensors({name: Source(name, 0, shape[0]) for name, shape in expected.items()}, dict(expected))
    names, pairs = names_of(config), family_of(config.architecture).rope_pairs
    if all(name in stored for name in OF_MISTRAL_OWN):
        names, pairs = MISTRAL_OWN, "neighbours"
    order = order_of_pairs(config.head_dim, rotary_dim(config)) if pairs == "neighbours" else None
    return find_by_names(names, order, shapes_of(config), expected, stored, rows_by_head(config, names))


def names_of(config: ModelConfig) -> TensorNames:
    """How the checkpoints of a model call its tensors: as its family does, but for what the configuration says."""
    names = family_of(config.architecture).names
    return replace(names, unit_head="columns") if config.norm_head else names


def find_by_names(
    names: TensorNames,
    order: npt.NDArray[np.int64] | None,
    layers: Sequence[LayerShape],
    expected: Mapping[str, Shape],
    stored: Collection[str] | Mapping[str, TensorInfo],
    by_head: Mapping[str, HeadRows] = MappingProxyType({}),
) -> FoundTensors:
    """Find the parameters of a model of such layers in files that call them so; others as in `find_tensors`.

    `order`: of the elements of a head of q and k, as `Source.order`; None: as the engine has them. `by_head`: modules
    whose rows stand head by head in a tensor of several.
    """
    files = _Files(names, order, layers, expected, stored, by_head)
    sources: dict[str, Source] = {}
    shapes: dict[str, Shape] = {}
    values: dict[str, npt.NDArray[np.float32]] = {}
    for name in expected:
        parameter = _parse(name, expected[name], layers)
        matches = (match(files, parameter) for match in _MATCHERS)
        source, shape = next(found for found in matches if found is not None)
        tensor = source.tensor
        if parameter.module in names.zero_if_absent and tensor not in stored:
            values[name] = np.zeros(expected[name], np.float32)
            continue
        sources[name] = source
        shapes[tensor] = max(shape, shapes.get(tensor, shape))  # a stack is as high as the last expert needs
    others = tuple(name for name in stored if name not in shapes and files.is_other_part(name))
    of_heads = tuple(name for name in stored if names.heads and name.startswith(names.heads))
    return FoundTensors(sources, shapes, others, of_heads, values)


def has_mtp_head(config: ModelConfig, stored: Collection[str] | None, names: TensorNames | None = None) -> bool:
    """Whether files with tensors of these names have an MTP head in a layout that is read; None: whether any may.

    `names`: how the files call what they hold; None: as the family of the model does.
    """
    of_family = family_of(config.architecture).names
    may_have = of_family.reads_head and bool(of_family.mtp or of_family.later_layers)
    if stored is None or not may_have:
        return may_have
    return all(_has_module_of_head(config, stored, names, module) for module in _OF_HEAD)


def has_mtp_lm_head(config: ModelConfig, stored: Collection[str], names: TensorNames | None = None) -> bool:
    """Whether files with an MTP head have an lm_head for it alone; the arguments are those of `has_mtp_head`."""
    return _has_module_of_head(config, stored, names, _LM_HEAD_OF_HEAD)


def count_mtp_modules(config: ModelConfig, stored: Collection[str], names: TensorNames | None = None) -> int:
    """How many modules the MTP head has in files that have one; the arguments are those of `has_mtp_head`."""
    if not (names or family_of(config.architecture).names).head_modules:
        return 1
    return next(
        number
        for number in itertools.count(1)
        if not all(_has_module_of_head(config, stored, names, module, number) for module in _OF_HEAD)
    )


def _has_module_of_head(
    config: ModelConfig, stored: Collection[str], names: TensorNames | None, module: str, number: int = 0
) -> bool:
    files = _Files(names or family_of(config.architecture).names, None, shapes_of(config), {}, stored, {})
    parameter = _Parameter("", (), f"layers.{config.num_hidden_layers + number}.", module, "", "", module)
    whole = tuple(f"{files.tensor(parameter, other)}." for other in files.other_names(module, module))
    return any(tensor.startswith(whole) for tensor in stored)


# What an MTP head has besides a layer: files that lack any of it have what is left of a head.
_OF_HEAD = ("enorm", "hnorm", "eh_proj")
_LM_HEAD_OF_HEAD = "shared_head.head"  # an lm_head of its own; where files have none, the engine copies the model's


class _Parameter(NamedTuple):
    """A parameter of the engine, by the parts of its name."""

    name: str
    shape: Shape
    layer: str  # such as "layers.3."; "": it is in none
    module: str
    kind: str  # ".weight", ".bias" or "", with which a vector is meant
    expert: str  # its number, or that of a use of a shared block; "": it is of neither
    pattern: str  # the module with `{}` in place of this number


def _parse(name: str, shape: Shape, layers: Sequence[LayerShape]) -> _Parameter:
    match = _OF_LAYER.fullmatch(name)
    if match is None:
        module, dot, kind = name.removeprefix("model.").partition(".")
        return _Parameter(name, shape, "", module, f"{dot}{kind}", "", module)
    layer, module, kind = match.groups()
    if module == "self_attn.v_proj" and layers[min(_number(layer), len(layers) - 1)].values_are_keys:
        module = "self_attn.k_proj"
    expert = _EXPERT.search(module)
    return _Parameter(name, shape, layer, module, kind, expert.group() if expert else "", _EXPERT.sub("{}", module))


def _number(layer: str) -> int:
    """The prefix of a layer such as "layers.3."."""
    return int(layer.split(".")[1])


_OLD_KINDS = {".weight": ".gamma", ".bias": ".beta"}

# PEFT keeps the weights of a linear that has LoRA adapters as `<name>.base_layer.weight`, and the adapters as
# `<name>.lora_A.<adapter>.weight` and `<name>.lora_B.<adapter>.weight`.
_BASE, _ADAPTER = ".base_layer", (".lora_A.", ".lora_B.")


class _Files:
    """The contents of the files, and their names; the arguments are those of `find_by_names`."""

    def __init__(
        self,
        names: TensorNames,
        order: npt.NDArray[np.int64] | None,
        layers: Sequence[LayerShape],
        expected: Mapping[str, Shape],
        stored: Collection[str] | Mapping[str, TensorInfo],
        by_head: Mapping[str, HeadRows],
    ) -> None:
        self.names, self.order, self.stored, self.by_head = names, order, stored, by_head
        self._layers, self.expected, self.num_layers = layers, expected, len(layers)
        table, self.lm_head = (names.outside.get(module, module) for module in ("embed_tokens", "lm_head"))
        # The prefixes that the files use: of the family or of a wrapper around it; the first where they use none. A
        # checkpoint of the model without a head, such as one of embeddings, has no prefix at all.
        wrappers: tuple[tuple[str, str], ...] = WRAPPED if names.is_text else ()
        known = (*names.prefixes, ("", ""), *wrappers)
        used = (pair for pair in known if f"{pair[0]}{table}.weight" in stored)
        self.model, self.head = next(used, names.prefixes[0])
        self.is_wrapped = (self.model, self.head) in set(wrappers) - set(names.prefixes)
        self.joined, self.stacked = (
            {part: (whole, parts) for whole, parts in table.items() for part in parts}
            for table in (names.joined, names.stacked)
        )

    def tensor(self, parameter: _Parameter, module: str) -> str:
        """The name of a module in the files, in the layer of the parameter."""
        mtp = self.names.mtp
        if mtp and parameter.layer and _number(parameter.layer) >= len(self._layers):
            return mtp.get(module, f"{mtp['']}{module}")
        return f"{self.model}{parameter.layer.replace('layers', self.names.layers, 1)}{module}"

    def other_names(self, pattern: str, module: str) -> tuple[str, ...]:
        """What files may call a module; `pattern` is its key in `renamed`."""
        others = self.names.renamed.get(pattern, module)
        return (others,) if isinstance(others, str) else others

    def found(self, parameter: _Parameter, pattern: str, module: str) -> str:
        """The name of a module in the files, of those that it may have there: `pattern` is its key in `renamed`."""
        candidates = [
            self.tensor(parameter, other.format(parameter.expert)) for other in self.other_names(pattern, module)
        ]
        there = (tensor for tensor in candidates if self.own_name(tensor, parameter.kind) in self.stored)
        return next(there, None) or _likely_name(candidates, self.stored)

    def own_name(self, module: str, kind: str) -> str:
        """The name of a module's weight or bias.

        Files of BERT that TensorFlow wrote say gamma and beta of norms, and a linear beside which there are adapters is
        their base layer.
        """
        name = f"{module}{kind}"
        others = [f"{module}{_OLD_KINDS.get(kind, kind)}"]
        if self.names.has_adapters:
            others.append(f"{module}{_BASE}{kind}")
        return next((other for other in (name, *others) if other in self.stored), name)

    def num_rows(self, parameter: _Parameter, modules: Sequence[str]) -> list[int]:
        """How many rows the engine's modules have, in the layer of the parameter."""
        return [self.expected[f"model.{parameter.layer}{module}{parameter.kind}"][0] for module in modules]

    def is_expected(self, parameter: _Parameter, module: str) -> bool:
        """True if the model has one of the engine's modules in the layer of the parameter."""
        return f"model.{parameter.layer}{module}{parameter.kind}" in self.expected

    def outputs_are_columns(self, parameter: _Parameter) -> bool:
        """True if outputs are the columns of the stacks in the layer of a parameter.

        transformers 5 writes as rows what earlier versions and the hub have as columns. A square tensor may be either,
        but the other one of the layer is not square then.
        """
        if self.names.stacked_as != "columns" or not isinstance(self.stored, Mapping):
            return self.names.stacked_as != "rows"
        for whole, modules in self.names.stacked.items():
            info = self.stored.get(self.tensor(parameter, whole))
            shapes = [
                self.expected.get(f"model.{parameter.layer}{module.format(0)}.weight", (0, 0)) for module in modules
            ]
            rows, columns = sum(shape[0] for shape in shapes), shapes[0][1]
            if info is not None and rows != columns and info.shape[1:] == (rows, columns):
                return False
        return True

    def is_quantised(self, tensor: str) -> bool:
        """True if a tensor is stored in a quantised format."""
        return isinstance(self.stored, Mapping) and tensor in self.stored and self.stored[tensor].dtype not in FLOATS

    def is_other_part(self, tensor: str) -> bool:
        """True if a tensor belongs to a part of the model that is not computed."""
        if self.names.not_read and tensor.startswith(self.names.not_read):
            return True
        if self.names.has_adapters and any(part in tensor for part in _ADAPTER):
            return True
        if self.is_wrapped and not tensor.startswith((self.model, f"{self.head}{self.lm_head}.")):
            return True
        number, _, rest = tensor.removeprefix(f"{self.model}{self.names.layers}.").partition(".")
        if not number.isdecimal():
            return False
        if int(number) >= len(self._layers):
            return self.names.later_layers
        if self.names.not_read_of_layers and rest.startswith(self.names.not_read_of_layers):
            return True
        return self._layers[int(number)].kv_owner is not None and rest.startswith(_OF_OWN_KV)


_Found = tuple[Source, Shape]  # where a parameter is, and the shape of the whole tensor


def _outside(files: _Files, parameter: _Parameter) -> _Found | None:
    """Find a parameter that is in no layer."""
    if parameter.layer:
        return None
    name, shape = parameter.name, parameter.shape
    prefix = files.model if name.startswith("model.") else files.head
    tensor = f"{prefix}{files.names.outside.get(parameter.module, parameter.module)}{parameter.kind}"
    unit = files.names.unit_head if name == "lm_head.weight" else ""
    if isinstance(files.stored, Mapping) and tensor in files.stored:
        kernel = files.stored[tensor].shape
        if len(kernel) > 2 and (kernel[0], math.prod(kernel[1:])) == shape:
            shape = kernel  # a convolution whose steps are as long as its kernel is a linear
    return Source(tensor, 0, shape[0], unit=unit), shape


def _lm_head_of_head(files: _Files, parameter: _Parameter) -> _Found | None:
    """Find the first rows of an MTP head's own lm_head, or of the model's where files have only that."""
    if parameter.module != _LM_HEAD_OF_HEAD:
        return None
    tied = "model.embed_tokens.weight"
    model = "lm_head.weight" if "lm_head.weight" in files.expected else tied
    found = _outside(files, _parse(model, files.expected[tied], ()))
    assert found is not None
    source, shape = found
    own = files.found(parameter, parameter.pattern, parameter.module) + parameter.kind
    if own in files.stored:
        source = Source(own, 0, shape[0])
    return replace(source, end=parameter.shape[0]), shape


def _norm_of_head(files: _Files, parameter: _Parameter) -> _Found | None:
    """Find the norm behind an MTP head in files that have none for it: it is that behind the model.

    So it is in ERNIE 4.5 (FastDeploy, ernie4_5_mtp.py) and where GGUF files have no `nextn.shared_head_norm`.
    """
    if parameter.module != "shared_head.norm":
        return None
    if files.found(parameter, parameter.pattern, parameter.module) + parameter.kind in files.stored:
        return None
    return _outside(files, _parse(f"model.norm{parameter.kind}", parameter.shape, ()))


def _projection_of_head(files: _Files, parameter: _Parameter) -> _Found | None:
    """Find the projection of an MTP head whose inputs files have in the other order: the hidden state first."""
    if parameter.module != "eh_proj" or not files.names.mtp_hidden_first:
        return None
    source, shape = _by_itself(files, parameter)
    return replace(source, column_order=np.roll(np.arange(shape[1]), shape[1] // 2)), shape


def _norm_of_sum(files: _Files, parameter: _Parameter) -> _Found | None:
    """Find the norm before a layer, or behind the last, where files have it behind the embedding or a layer."""
    names, number = files.names, _number(parameter.layer) if parameter.layer else files.num_layers
    own = names.norm_of_layer if number else names.norm_of_embedding
    if not own or parameter.module != ("input_layernorm" if parameter.layer else "norm"):
        return None
    module = f"{names.layers}.{number - 1}.{own}" if number else own
    tensor = files.own_name(f"{files.model}{module}", parameter.kind)
    return Source(tensor, 0, parameter.shape[0]), parameter.shape


def _head_by_head(files: _Files, parameter: _Parameter) -> _Found | None:
    """Find the rows of a module that stand head by head in a tensor."""
    if parameter.module not in files.by_head:
        return None
    whole, rows, num_rows, transposed, column_order = files.by_head[parameter.module]
    tensor = files.found(parameter, whole, whole) + parameter.kind
    source = Source(tensor, 0, num_rows, rows, transposed=transposed, column_order=column_order)
    num_columns = (parameter.shape[0] // transposed,) if transposed else parameter.shape[1:]
    return source, (num_rows, *num_columns)


def _in_a_stack(files: _Files, parameter: _Parameter) -> _Found | None:
    """Find a matrix or a vector of an expert in the tensor that has those of all experts of a layer."""
    whole, patterns = files.stacked.get(parameter.pattern, ("", ()))
    tensor = files.tensor(parameter, whole)
    if not whole or tensor not in files.stored:
        return None
    tensor += "_bias" if parameter.kind == ".bias" else ""
    parts = [pattern.format(parameter.expert) for pattern in patterns]
    sizes, index = files.num_rows(parameter, parts), parts.index(parameter.module)
    matrix = int(parameter.expert or 0)
    begin, end, step = sum(sizes[:index]), sum(sizes[: index + 1]), 1
    if files.names.stacked_as == "columns_in_turn":
        begin, end, step = index, sum(sizes), len(parts)
    columns = files.outputs_are_columns(parameter) and not files.is_quantised(tensor)
    shape = sum(sizes), *parameter.shape[1:]
    source = Source(tensor, begin, end, None, matrix, columns and len(parameter.shape) == 2, step)
    return source, (matrix + 1, *(shape[::-1] if columns else shape))


# The modules that have the experts of a layer in folders of MLX, in the models of its packages mlx-lm and mlx-vlm.
_MLX_EXPERTS = (
    *("mlp.switch_mlp", "block_sparse_moe.switch_mlp", "feed_forward.switch_mlp", "experts.switch_glu"),
    *("mlp.experts", "feed_forward.experts"),
)


def _in_a_stack_of_mlx(files: _Files, parameter: _Parameter) -> _Found | None:
    """Find a matrix or a vector of an expert where one module of all experts of a layer is a tensor."""
    if not parameter.expert:
        return None
    part, matrix = parameter.module.rpartition(".")[2], int(parameter.expert)
    tensors = (files.tensor(parameter, f"{experts}.{part}") + parameter.kind for experts in _MLX_EXPERTS)
    tensor = next((tensor for tensor in tensors if tensor in files.stored), None)
    if tensor is None:
        return None
    return Source(tensor, 0, parameter.shape[0], matrix=matrix), (matrix + 1, *parameter.shape)


def _joined(files: _Files, parameter: _Parameter) -> _Found | None:
    """Find a module among the rows of a tensor that has those of several, one behind the other."""
    if parameter.pattern not in files.joined:
        return None
    whole, all_parts = files.joined[parameter.pattern]
    whole, all_parts = whole.format(parameter.expert), tuple(part.format(parameter.expert) for part in all_parts)
    alone = files.own_name(files.tensor(parameter, parameter.module), parameter.kind)
    if alone in files.stored and files.tensor(parameter, whole) + parameter.kind not in files.stored:
        return None  # a converter has parted them
    parts = [part for part in all_parts if files.is_expected(parameter, part)]
    sizes, index = files.num_rows(parameter, parts), parts.index(parameter.module)
    return _rows(files, parameter, files.tensor(parameter, whole), sum(sizes[:index]), sum(sizes))


def _by_itself(files: _Files, parameter: _Parameter) -> _Found:
    """Find a module under its own name or another one."""
    tensor = files.found(parameter, parameter.pattern, parameter.module)
    return _rows(files, parameter, tensor, 0, parameter.shape[0])


def _likely_name(candidates: Sequence[str], stored: Collection[str]) -> str:
    """Choose, for a module that is missing, the name beside which the files have other modules."""
    parents = [name.rpartition(".")[0] + "." for name in candidates]
    if len(set(parents)) == 1:
        return candidates[0]
    likely = (
        name
        for name, parent in zip(candidates, parents, strict=True)
        if any(other.startswith(parent) for other in stored)
    )
    return next(likely, candidates[0])


# What has the elements of heads of q or k that RoPE turns.
_OF_TURNED_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_OF_TURNED_HEADS = ("self_attn.q_proj", "self_attn.k_proj", *_OF_TURNED_NORMS)


def _rows(files: _Files, parameter: _Parameter, tensor: str, begin: int, num_rows: int) -> _Found:
    """The rows of a parameter from `begin` on, of a tensor of `num_rows`, with heads in the order of the engine."""
    end, order, shape = begin + parameter.shape[0], None, (num_rows, *parameter.shape[1:])
    own = files.own_name(tensor, parameter.kind)
    if isinstance(files.stored, Mapping) and own in files.stored and len(shape) == 1:
        stored = files.stored[own].shape
        if stored.count(1) >= len(stored) - 1 and math.prod(stored) == num_rows:
            shape = stored  # a vector with axes of length 1 beside it, or a number
    columns = len(shape) == 2 and any(tensor.endswith(f".{module}") for module in files.names.transposed)
    if files.order is not None and parameter.module in _OF_TURNED_NORMS and len(parameter.shape) == 2:
        return Source(own, begin, end, column_order=files.order), shape  # of each head one row
    if files.order is not None and parameter.module in _OF_TURNED_HEADS:
        heads = np.arange(0, parameter.shape[0], len(files.order))[:, None] + files.order  # [num_heads, head_dim]
        order = heads.reshape(-1)
    return Source(own, begin, end, order, columns=columns), (shape[::-1] if columns else shape)


# The ways in which a file may hold a parameter. The first that finds it counts; the last always does.
_MATCHERS = (
    _norm_of_sum,
    _outside,
    _lm_head_of_head,
    _norm_of_head,
    _projection_of_head,
    _head_by_head,
    _in_a_stack,
    _in_a_stack_of_mlx,
    _joined,
    _by_itself,
)
