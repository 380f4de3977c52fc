"""A block of attention and an MLP that several layers share. See `src/model/sublayers/shared_block.h`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from infinilm._core import SharedBlockSpec
from infinilm.models.reference.attention import attention
from infinilm.models.reference.mlp import mlp
from infinilm.models.reference.ops import Array
from infinilm.models.reference.step import Step

__all__ = ["mixer_input"]


def mixer_input(s: Step, spec: SharedBlockSpec, x: Array) -> Array:
    """What the mixer behind a block reads, the norm of x and the block's result: x [num_tokens, hidden_size]."""
    at = f"model.layers.{spec.owner}.shared_block"
    added = f"{at}.adapters.{spec.use}"
    beside = {}
    if spec.adapter_rank:
        beside = {f"{at}.mlp.{part}_proj": (f"{added}.mlp_down", f"{added}.mlp_{part}") for part in ("gate", "up")}
    if spec.attention_adapters:
        beside |= {f"{at}.self_attn.{part}_proj": (f"{added}.{part}_down", f"{added}.{part}_up") for part in "qkv"}
    own = replace(s, room=at, beside=beside)

    def norm(site: str, rows: Array, name: str) -> Array:
        return s.emit(site, s.norm(rows, own.name(name)))

    both = [x, s.embedded][: spec.attention.inputs]
    joined = norm("block_norm", np.concatenate(both, axis=-1), "input_layernorm")
    mixed = s.emit("o_proj", attention(own, spec.attention, joined))
    h = norm("block_mlp_norm", mixed, "post_attention_layernorm")
    out = s.emit("down_proj", mlp(own, spec.mlp, h))
    total = s.emit("block_sum", x + s.linear(out, s.name("block_proj"), bias=False))
    return s.emit("input_layernorm", s.norm(total, s.name("input_layernorm")))
