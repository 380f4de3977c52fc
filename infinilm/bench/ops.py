"""The time of each op of a step beside the work it does: the rows of `infinilm bench --ops`.

The core takes the times (src/ops/timed_backend.h), `infinilm.bench.work` counts the work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from infinilm.bench.work import OpWork

__all__ = ["OpResult", "OpSeconds", "format_ops", "judge_ops", "per_step"]

OpSeconds = Mapping[str, float]
"""By op, the seconds of a step, or of a prompt."""

_ORDER = (
    "embedding",
    "qkv_proj",
    "latents",
    "attention",
    "states",
    "o_proj",
    "gate_up_proj",
    "down_proj",
    "router",
    "experts",
    "per_layer",
    "lora",
    "lm_head",
    "sampling",
    "other",
)
_TITLES = {
    "qkv_proj": "norm, q, k, v, rope",
    "latents": "to and from latents",
    "gate_up_proj": "norm, gate, up, silu",
    "lm_head": "norm, lm_head",
    "between": "between the ops",
}


@dataclass(frozen=True, slots=True)
class OpResult:
    """One op of a step, or of a prompt.

    Attributes
    ----------
    name : str
        "qkv_proj" has the norm before it and the rotation after it, "gate_up_proj" norm and activation, "lm_head" the
        final norm. "other" is what has no name of its own, "between" what the step lasts beside its ops: Python, the
        scheduler, sums between ranks.
    seconds, share_of_step : float
        The sum over all layers.
    num_bytes, flops : float
        The work, as `infinilm.bench.work` counts it; 0 where none is counted.
    limit : str
        Which limit of the machine the work meets first; "" without work.
    share_of_limit : float
        The time that the work would take at this limit : the time it took.
    """

    name: str
    seconds: float
    share_of_step: float
    num_bytes: float
    flops: float
    limit: Literal["bandwidth", "arithmetic", ""]
    share_of_limit: float


def per_step(times: Mapping[str, tuple[int, float]]) -> OpSeconds:
    """Seconds of each op in a step, from calls and seconds of several steps that each sampled; nothing of no steps."""
    num_steps, _ = times.get("sampling", (0, 0.0))
    if not num_steps:
        return {}
    return {name: seconds / num_steps for name, (_, seconds) in times.items()}


def judge_ops(
    work: Mapping[str, OpWork],
    seconds: OpSeconds,
    step_seconds: float,
    read_bytes_per_second: float,
    flops_per_second: float,
) -> tuple[OpResult, ...]:
    """Hold the time of each op against the limits of the machine; the rest of the step is "between"."""
    rows = []
    between = max(0.0, step_seconds - sum(seconds.values()))
    for name, taken in [*((name, seconds[name]) for name in _ORDER if name in seconds), ("between", between)]:
        done = work.get(name, OpWork(0, 0))
        reading, computing = done.num_bytes / read_bytes_per_second, done.flops / flops_per_second
        least = max(reading, computing)
        limit: Literal["bandwidth", "arithmetic", ""] = ""
        if least:
            limit = "bandwidth" if reading >= computing else "arithmetic"
        rows.append(
            OpResult(
                name=name,
                seconds=taken,
                share_of_step=taken / step_seconds,
                num_bytes=done.num_bytes,
                flops=done.flops,
                limit=limit,
                share_of_limit=least / taken if taken else 0.0,
            )
        )
    return tuple(rows)


def format_ops(ops: Sequence[OpResult]) -> list[str]:
    """Lines of a table for people; none without ops."""
    if not ops:
        return []
    lines = [f"  {'op':22}{'ms':>10}{'of step':>9}{'MB':>10}{'Mflop':>11}{'of its limit':>14}"]
    for op in ops:
        limit = f"{100 * op.share_of_limit:12.1f} % {op.limit}" if op.limit else ""
        lines.append(
            f"  {_TITLES.get(op.name, op.name):22}{op.seconds * 1e3:10.3f}{100 * op.share_of_step:7.1f} %"
            f"{op.num_bytes / 1e6:10.2f}{op.flops / 1e6:11.1f}{limit}"
        )
    return lines
