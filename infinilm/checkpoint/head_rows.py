"""Where the rows of a module are that stand head by head in a tensor of a checkpoint, or in another order.

Heads of queries and keys whose RoPE turns neighbours, tensors that mix the heads of several modules, latents, and the
tiled heads of GGUF files.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from infinilm.config.families import family_of
from infinilm.config.families.names import TensorNames
from infinilm.config.json.model_config import ModelConfig
from infinilm.config.spec import rotary_dim
from infinilm.config.sublayers.delta import delta_spec, state_layers
from infinilm.config.sublayers.indexer import indexer_spec
from infinilm.config.sublayers.latent import latent_spec

__all__ = ["HeadRows", "order_of_pairs", "rows_by_head", "tiled_heads"]


class HeadRows(NamedTuple):
    """Rows of a tensor that stand head by head in it."""

    tensor: str
    rows: npt.NDArray[np.int64] | None  # None: all
    num_rows: int  # rows of the whole tensor
    transposed: int = 0  # how many matrices these rows are, each of which is transposed; 0: none is
    column_order: npt.NDArray[np.int64] | None = None


def order_of_pairs(head_dim: int, rotary_dim: int) -> npt.NDArray[np.int64]:
    """Return which element of a head whose RoPE turns 2i with 2i + 1 comes where it turns i with i + rotary_dim / 2.

    Scores do not change where the elements of q and of k change places alike.
    """
    pairs = np.arange(rotary_dim).reshape(-1, 2)
    return np.concatenate([pairs[:, 0], pairs[:, 1], np.arange(rotary_dim, head_dim)])


def rows_by_head(config: ModelConfig, names: TensorNames) -> dict[str, HeadRows]:
    """Return the modules whose rows stand head by head in a tensor of several."""
    found = _rows_of_latents(config) if config.kv_lora_rank else {}
    neighbours = family_of(config.architecture).rope_pairs == "neighbours"
    order = order_of_pairs(config.head_dim, rotary_dim(config)) if neighbours else np.arange(config.head_dim)
    for tensor, heads in ((own.tensor, own.heads(config)) for own in names.by_head):
        num_heads, of_a_head = heads
        size = sum(map(sum, of_a_head.values()))
        rows = np.arange(num_heads * size).reshape(num_heads, size)
        first = 0
        for module, sizes in of_a_head.items():
            parts = []
            for part in sizes:
                parts.append(rows[:, first : first + part].reshape(-1))
                first += part
            own = np.concatenate(parts)
            if module in ("self_attn.q_proj", "self_attn.k_proj"):
                own = own.reshape(-1, config.head_dim)[:, order].reshape(-1)
            found[module] = HeadRows(tensor, own, num_heads * size)
    return found


def tiled_heads(config: ModelConfig) -> dict[str, HeadRows]:
    """Return where modules of the delta rule are whose heads of values stand as `Architecture.tiled_heads` says."""
    delta = delta_spec(config) if any(state_layers(config)) else None
    if delta is None or delta.num_k_heads == delta.num_v_heads:
        return {}
    # The engine has [heads of keys, values of each], the file the same turned round.
    heads = np.arange(delta.num_v_heads).reshape(-1, delta.num_k_heads).T.reshape(-1)
    rows = (heads[:, None] * delta.v_dim + np.arange(delta.v_dim)).reshape(-1)
    qk_size = 2 * delta.k_size
    of_qkv = np.concatenate([np.arange(qk_size), qk_size + rows])
    orders = {"in_proj_qkv": of_qkv, "conv1d": of_qkv, "in_proj_z": rows}
    orders |= dict.fromkeys(("in_proj_b", "in_proj_a", "A_log", "dt_bias"), heads)
    found = {
        f"linear_attn.{name}": HeadRows(f"linear_attn.{name}", order, len(order)) for name, order in orders.items()
    }
    out = "linear_attn.out_proj"
    return {**found, out: HeadRows(out, None, config.hidden_size, column_order=rows)}


def _rows_of_latents(config: ModelConfig) -> dict[str, HeadRows]:
    """Return the places of the latents' weights: RoPE turns the end of a row in files, its beginning in the engine."""
    latent = latent_spec(config, config.rope_parameters)
    assert latent is not None
    num_heads, rope_dim, nope_dim, kv_rank = latent.num_heads, latent.rope_dim, latent.nope_dim, latent.kv_rank
    family = family_of(config.architecture)
    neighbours = family.rope_pairs == "neighbours" and config.rope_interleave
    turned = order_of_pairs(rope_dim, rope_dim) if neighbours else np.arange(rope_dim)

    def of_heads(rows: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.int64]:
        heads: npt.NDArray[np.int64] = np.arange(0, num_heads * size, size)[:, None] + rows
        return heads.reshape(-1)

    def of_indexer() -> dict[str, HeadRows]:
        indexer = indexer_spec(config)
        if indexer is None or not (neighbours and family.indexer_turns_neighbours):
            return {}
        key = order_of_pairs(indexer.head_dim, rope_dim)
        queries = (np.arange(0, indexer.num_heads * indexer.head_dim, indexer.head_dim)[:, None] + key).reshape(-1)
        orders = {"wq_b": queries, "wk": key, "k_norm": key}
        names = {module: f"self_attn.indexer.{module}" for module in orders}
        return {names[module]: HeadRows(names[module], order, len(order)) for module, order in orders.items()}

    query = np.concatenate([nope_dim + turned, np.arange(nope_dim)])
    q_proj = "self_attn.q_b_proj" if latent.q_rank else "self_attn.q_proj"
    row = np.concatenate([kv_rank + turned, np.arange(kv_rank)])
    key_value = nope_dim + latent.v_dim
    kv_b_proj, num_rows = "self_attn.kv_b_proj", num_heads * key_value
    return {
        q_proj: HeadRows(q_proj, of_heads(query, latent.query_dim), num_heads * latent.query_dim),
        "self_attn.kv_a_proj": HeadRows("self_attn.kv_a_proj_with_mqa", row, latent.row_dim),
        "self_attn.k_b_proj": HeadRows(kv_b_proj, of_heads(np.arange(nope_dim), key_value), num_rows, num_heads),
        "self_attn.v_b_proj": HeadRows(kv_b_proj, of_heads(np.arange(nope_dim, key_value), key_value), num_rows),
        **of_indexer(),
    }
