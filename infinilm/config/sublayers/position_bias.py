"""What is added to the scores of attention by the distance from a query to a key: learned buckets, or ALiBi.

Sources: `relative_position_bucket` of modeling_mpnet.py in transformers, which is T5's; ALiBi in both directions of
jina-bert-implementation, with the slopes of Press et al. 2021.
"""

from __future__ import annotations

import math
from typing import Literal

from infinilm._core import PositionBiasSpec

__all__ = ["BUCKETS", "position_bias_spec"]

BUCKETS = 32
_FARTHEST = 128  # distances from here on share the last bucket of their direction


def position_bias_spec(
    kind: Literal["none", "buckets", "alibi"], num_heads: int, max_model_len: int
) -> PositionBiasSpec | None:
    """Return the bias of a kind; None: there is none."""
    if kind == "none":
        return None
    if kind == "alibi":
        return PositionBiasSpec(slopes=alibi_slopes(num_heads))
    return PositionBiasSpec(
        num_buckets=BUCKETS, buckets=[bucket_of(d) for d in range(1 - max_model_len, max_model_len)]
    )


def bucket_of(distance: int) -> int:
    """Return the bucket of a key that stands `distance` behind the query.

    Half of them are for keys behind it. In each half, the first half has a bucket for each distance, and the others
    grow with the distance by a constant factor.
    """
    of_way = BUCKETS // 2
    first = of_way if distance > 0 else 0
    exact, far = of_way // 2, abs(distance)
    if far < exact:
        return first + far
    steps = math.log(far / exact) / math.log(_FARTHEST / exact) * (of_way - exact)
    # Where a distance is an exact power it begins a bucket, whichever way the logarithm is rounded.
    return first + min(of_way - 1, exact + int(steps + 1e-6))


def alibi_slopes(num_heads: int) -> list[float]:
    """Return what each head takes off for each position of distance, [num_heads].

    Powers of 2 ** (-8 / n) for n heads; where that is no power of two, those of the next lower one, then every other
    one of the next higher.
    """
    lower = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (i + 1) / lower) for i in range(lower)]
    higher = [2 ** (-8 * (i + 1) / (2 * lower)) for i in range(0, 2 * lower, 2)]
    return slopes + higher[: num_heads - lower]
