"""The gated short convolution of LFM2. See `src/model/sublayers/short_conv.h`."""

from __future__ import annotations

import numpy as np

from infinilm._core import ShortConvSpec
from infinilm.models.reference.ops import Array
from infinilm.models.reference.step import Step

__all__ = ["short_conv"]


def short_conv(s: Step, spec: ShortConvSpec, h: Array) -> Array:
    """Mix each token with the few before it: h [num_tokens, hidden_size] -> the same.

    The state of a row is its last inputs of the convolution, [conv_size - 1, channels].
    """
    at = s.name("conv")
    gate_in, gate_out, x = np.split(s.linear(h, f"{at}.in_proj", False), 3, axis=1)  # each [num_tokens, channels]
    taps = s.weight(f"{at}.conv")[:, 0].T  # [conv_size, channels]
    gated, convolved = gate_in * x, np.empty_like(x)
    for row, own in enumerate(s.rows):
        state = s.cache.state(s.layer, row) or (np.zeros((spec.conv_size - 1, spec.channels), s.dtype),)
        seen = np.concatenate([state[0], gated[own]])
        length = len(seen) - spec.conv_size + 1
        convolved[own] = sum(tap * seen[i : i + length] for i, tap in enumerate(taps))
        if own.stop > own.start:
            s.cache.set_state(s.layer, row, seen[length:])
    return s.linear(s.emit("conv", gate_out * convolved), f"{at}.out_proj", False)
