"""The residual stream: the norm that a sublayer begins with, and how its result joins the stream."""

from __future__ import annotations

from infinilm.models.reference.ops import Array
from infinilm.models.reference.step import Step

__all__ = ["add", "begin"]


def begin(s: Step, x: Array, norm: str, multiplier: float = 1) -> tuple[Array, Array]:
    """Return what a sublayer reads and the stream that its result is added to, both [num_tokens, hidden_size].

    It reads x through its norm, times the multiplier, if the model has these. The stream is x, or where the norm takes
    its place what is read.
    """
    read = s.emit(norm, s.norm(x, s.name(norm)) * s.scalar(multiplier)) if s.norms[0] else x
    is_first = s.layer == 0 and norm == "input_layernorm"
    takes_place = s.spec.stream_norms == "all" or (s.spec.stream_norms == "embedding" and is_first)
    return read, read if takes_place else x


def add(
    s: Step, x: Array, branch: Array, site: str, post_norm: str, multiplier: float = 1, has_norm: bool = False
) -> Array:
    """Add the result of a sublayer, normed and multiplied where the model does so, to x: [num_tokens, hidden_size].

    `has_norm`: it is normed in this sublayer, if not in all.
    """
    branch = s.emit(site, branch)
    if s.norms[1] or has_norm:
        branch = s.emit(post_norm, s.norm(branch, s.name(post_norm)))
    total: Array = x + branch * s.scalar(s.spec.residual_multiplier * multiplier)
    return total
