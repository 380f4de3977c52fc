"""Finds an engine's parameters in a checkpoint: under another name, as rows of a tensor, or with rows in another order.

Called by `load_weights`. The tables are `infinilm.config.tensor_names`, one per family.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from infinilm.checkpoint.folder import FLOATS
from infinilm.checkpoint.safetensors_header import TensorInfo
from infinilm.config.delta import delta_facts
from infinilm.config.families import family_of, model_facts, rotary_dim
from infinilm.config.latent import latent_facts
from infinilm.config.layer_shapes import LayerShape
from infinilm.config.llama_config import LlamaConfig
from infinilm.config.tensor_names import TensorNames

__all__ = ["FoundTensors", "Source", "find_by_names", "find_tensors", "order_of_pairs", "rows_by_head", "tiled_heads"]

Shape = tuple[int, ...]


class HeadRows(NamedTuple):
    """Rows of a tensor that stand head by head in it."""

    tensor: str
    rows: npt.NDArray[np.int64] | None  # None: all
    num_rows: int  # of the tensor
    transposed: int = 0  # how many matrices these rows are, each of which is transposed; 0: none is
    column_order: npt.NDArray[np.int64] | None = None


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
        Its rows there, or those that they are among.
    order : numpy.ndarray, optional
        [rows of the parameter]: which of these rows each is. None: all in their order.
    matrix : int, optional
        Which of the matrices, or vectors, of a tensor of one dimension more has these rows.
    columns : bool
        They are columns there.
    step : int
        Each so-manieth of them.
    transposed : int
        These rows are so many matrices of equal size, each of which is transposed. 0: none is.
    column_order : numpy.ndarray, optional
        Which column of the tensor each of the parameter is; of GGUF files alone.
    unit_rows : bool
        The parameter is these rows divided by their lengths, which is left to who reads them.
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
    unit_rows: bool = False

    @property
    def places(self) -> slice:
        """Of the tensor's first dimension, those that hold the parameter."""
        return slice(self.begin, self.end) if self.matrix is None else slice(self.matrix, self.matrix + 1)

    def take(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Take the parameter from the whole tensor: a view, or a copy where it does not lie there row by row."""
        whole = array if self.matrix is None else array[self.matrix]
        return self.choose((whole.T if self.columns else whole)[self.begin : self.end])

    def choose(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Take the parameter from the rows from `begin` to `end`."""
        rows = rows[:: self.step]
        rows = np.ascontiguousarray(rows) if self.order is None else rows[self.order]
        return self.transpose(rows)

    def transpose(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Transpose the matrices that `transposed` speaks of."""
        if not self.transposed:
            return rows
        matrices = rows.reshape(self.transposed, -1, rows.shape[1]).swapaxes(1, 2)
        return np.ascontiguousarray(matrices).reshape(-1, matrices.shape[2])


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
    by_head = rows_by_head(config, family.names)
    layers = model_facts(config, config.max_position_embeddings).shapes
    return find_by_names(family.names, order, layers, expected, stored, by_head)


def find_by_names(
    names: TensorNames,
    order: npt.NDArray[np.int64] | None,
    layers: Sequence[LayerShape],
    expected: Mapping[str, Shape],
    stored: Collection[str] | Mapping[str, TensorInfo],
    by_head: Mapping[str, HeadRows] = MappingProxyType({}),
) -> FoundTensors:
    """Find the parameters of a model of such layers in files that call them so; others as in `find_tensors`.

    Where values are what k_proj gives, v_proj is the same tensor. `order`: of the elements of a head of q and k, as
    `Source.order`; None: as the engine has them. `by_head`: modules whose rows stand head by head in a tensor of
    several.
    """
    model, head = _prefix(names, stored)
    not_read = tuple(name for name in stored if _is_not_read(name, names, model, layers))
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
            module, _, kind = name.removeprefix("model.").partition(".")
            own = f"{names.outside.get(module, module)}.{kind}"
            tensor = model + own if name.startswith("model.") else head + own
            unit_rows = names.unit_head and name == "lm_head.weight"
            sources[name], shapes[tensor] = Source(tensor, 0, rows, unit_rows=unit_rows), shape
            continue
        own_layer, module, kind = match.groups()
        layer = own_layer.replace("layers", names.layers, 1)
        if module == "self_attn.v_proj" and layers[int(own_layer.split(".")[1])].values_are_keys:
            module = "self_attn.k_proj"
        if module in by_head:
            whole, own_rows, num_rows, transposed, column_order = by_head[module]
            tensor = f"{model}{layer}{whole}{kind}"
            sources[name] = Source(tensor, 0, num_rows, own_rows, transposed=transposed, column_order=column_order)
            shapes[tensor] = (num_rows, rows // transposed) if transposed else (num_rows, *shape[1:])
            continue
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
            renamed = names.also_renamed.get(any_expert, "").format(number)
            if not renamed or f"{model}{layer}{renamed}{kind}" not in stored:
                renamed = renames.get(any_expert, module).format(number)
            whole, parts = joined.get(module, (renamed, (module,)))
            tensor = f"{model}{layer}{whole}{kind}"
        sizes = [expected[f"model.{own_layer}{part}{kind}"][0] for part in parts]
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


# What transformers writes of layers that read the keys and values of others, and does not read.
_OF_OWN_KV = ("self_attn.k_proj.", "self_attn.v_proj.", "self_attn.k_norm.")


def _is_not_read(tensor: str, names: TensorNames, model: str, layers: Sequence[LayerShape]) -> bool:
    if names.not_read and tensor.startswith(names.not_read):
        return True
    number, _, rest = tensor.removeprefix(f"{model}{names.layers}.").partition(".")
    if not number.isdecimal():
        return False
    if int(number) >= len(layers):
        return names.later_layers
    return layers[int(number)].kv_owner is not None and rest.startswith(_OF_OWN_KV)


def _is_plain(stored: Collection[str] | Mapping[str, TensorInfo], tensor: str) -> bool:
    return not isinstance(stored, Mapping) or tensor not in stored or stored[tensor].dtype in FLOATS


def _prefix(names: TensorNames, stored: Collection[str]) -> tuple[str, str]:
    """Return the prefixes that the files use; the first where they use none."""
    table = names.outside.get("embed_tokens", "embed_tokens")
    return next((pair for pair in names.prefixes if f"{pair[0]}{table}.weight" in stored), names.prefixes[0])


def order_of_pairs(head_dim: int, rotary_dim: int) -> npt.NDArray[np.int64]:
    """Return which element of a head whose RoPE turns 2i with 2i + 1 comes where it turns i with i + rotary_dim / 2.

    Scores do not change where the elements of q and of k change places alike.
    """
    pairs = np.arange(rotary_dim).reshape(-1, 2)
    return np.concatenate([pairs[:, 0], pairs[:, 1], np.arange(rotary_dim, head_dim)])


def rows_by_head(config: LlamaConfig, names: TensorNames) -> dict[str, HeadRows]:
    """Return the modules whose rows stand head by head in a tensor of several."""
    found: dict[str, HeadRows] = {}

    def add(tensor: str, num_heads: int, of_a_head: Mapping[str, Sequence[int]]) -> None:
        """`of_a_head`: the rows of each module in a head, one after the other; by module their sizes."""
        size = sum(map(sum, of_a_head.values()))
        heads = np.arange(num_heads * size).reshape(num_heads, size)
        first = 0
        for module, sizes in of_a_head.items():
            parts = []
            for part in sizes:
                parts.append(heads[:, first : first + part].reshape(-1))
                first += part
            found[module] = HeadRows(tensor, np.concatenate(parts), num_heads * size)

    if config.kv_lora_rank:
        found |= _rows_of_latents(config)
    if names.qkv_by_head:
        one = [config.head_dim]
        group = [config.head_dim * (config.num_attention_heads // config.num_key_value_heads)]
        of_a_head = {"self_attn.q_proj": group, "self_attn.k_proj": one, "self_attn.v_proj": one}
        add(names.qkv_by_head, config.num_key_value_heads, of_a_head)
    if names.gated_q:
        one = [config.head_dim]
        add("self_attn.q_proj", config.num_attention_heads, {"self_attn.q_proj": one, "self_attn.gate_proj": one})
    delta = delta_facts(config)
    if names.delta_by_head and any(delta.layers):
        shared_by = delta.num_v_heads // delta.num_k_heads
        v_size = shared_by * delta.v_dim
        qkv = {"linear_attn.in_proj_qkv": [delta.k_dim, delta.k_dim, v_size], "linear_attn.in_proj_z": [v_size]}
        add("linear_attn.in_proj_qkvz", delta.num_k_heads, qkv)
        ba = {"linear_attn.in_proj_b": [shared_by], "linear_attn.in_proj_a": [shared_by]}
        add("linear_attn.in_proj_ba", delta.num_k_heads, ba)
    return found


def tiled_heads(config: LlamaConfig) -> dict[str, HeadRows]:
    """Return where modules of the delta rule are whose heads of values stand as `Architecture.tiled_heads` says."""
    facts = delta_facts(config)
    if not any(facts.layers) or facts.num_k_heads == facts.num_v_heads:
        return {}
    # The engine has [heads of keys, values of each], the file the same turned round.
    heads = np.arange(facts.num_v_heads).reshape(-1, facts.num_k_heads).T.reshape(-1)
    rows = (heads[:, None] * facts.v_dim + np.arange(facts.v_dim)).reshape(-1)
    qk_size = 2 * facts.k_size
    of_qkv = np.concatenate([np.arange(qk_size), qk_size + rows])
    orders = {"in_proj_qkv": of_qkv, "conv1d": of_qkv, "in_proj_z": rows}
    orders |= dict.fromkeys(("in_proj_b", "in_proj_a", "A_log", "dt_bias"), heads)
    found = {
        f"linear_attn.{name}": HeadRows(f"linear_attn.{name}", order, len(order)) for name, order in orders.items()
    }
    out = "linear_attn.out_proj"
    return {**found, out: HeadRows(out, None, config.hidden_size, column_order=rows)}


def _rows_of_latents(config: LlamaConfig) -> dict[str, HeadRows]:
    """Return where what `LatentFacts` describes is: the file has what RoPE turns at the end, the engine first."""
    facts = latent_facts(config)
    num_heads, rope_dim, nope_dim, kv_rank = config.num_attention_heads, facts.rope_dim, facts.nope_dim, facts.kv_rank
    neighbours = family_of(config.architecture).rope_pairs == "neighbours" and config.rope_interleave
    turned = order_of_pairs(rope_dim, rope_dim) if neighbours else np.arange(rope_dim)

    def of_heads(rows: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.int64]:
        heads: npt.NDArray[np.int64] = np.arange(0, num_heads * size, size)[:, None] + rows
        return heads.reshape(-1)

    query = np.concatenate([nope_dim + turned, np.arange(nope_dim)])
    q_proj = "self_attn.q_b_proj" if facts.q_rank else "self_attn.q_proj"
    row = np.concatenate([kv_rank + turned, np.arange(kv_rank)])
    key_value = nope_dim + facts.v_dim
    kv_b_proj, num_rows = "self_attn.kv_b_proj", num_heads * key_value
    return {
        q_proj: HeadRows(q_proj, of_heads(query, facts.query_dim), num_heads * facts.query_dim),
        "self_attn.kv_a_proj": HeadRows("self_attn.kv_a_proj_with_mqa", row, facts.row_dim),
        "self_attn.k_b_proj": HeadRows(kv_b_proj, of_heads(np.arange(nope_dim), key_value), num_rows, num_heads),
        "self_attn.v_b_proj": HeadRows(kv_b_proj, of_heads(np.arange(nope_dim, key_value), key_value), num_rows),
    }


def _of_heads(order: npt.NDArray[np.int64] | None, rows: int) -> npt.NDArray[np.int64]:
    assert order is not None
    heads: npt.NDArray[np.int64] = np.arange(0, rows, len(order))[:, None] + order  # [num_heads, head_dim]
    return heads.reshape(-1)
