"""A second way around attention. See `src/model/sublayers/laurel.h`."""

from __future__ import annotations

from infinilm.models.reference.ops import Array
from infinilm.models.reference.step import Step
from infinilm.models.reference.stream import add

__all__ = ["add_laurel"]


def add_laurel(s: Step, x: Array, h: Array) -> Array:
    """Add two linears of h, whose result is normed, to x, and scale the sum: all [num_tokens, hidden_size]."""
    inner = s.linear(h, s.name("laurel.linear_left"), False)  # [num_tokens, rank]
    total = add(s, x, s.linear(inner, s.name("laurel.linear_right"), False), "laurel", "post_laurel_norm")
    return s.emit("laurel_residual", total * s.scalar(0.5**0.5))
