"""The memory of several models in one process, planned from headers before any of them is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from infinilm.errors import CacheFullError
from infinilm.planning.memory import ModelPlan, free_memory
from infinilm.planning.sizes import format_bytes

__all__ = ["plan_together"]

Planner = Callable[[int], ModelPlan]
"""Plans a model for a device that has so many bytes free: `plan_model` with the settings of the model."""


def plan_together(
    planners: Mapping[str, Planner], free_bytes: int | None, *, must_fit: bool
) -> tuple[Mapping[str, ModelPlan], int]:
    """The plans of models that share a device, by name, and how many bytes they have together.

    A plan does not depend on which other models are loaded at a time.

    If the weights and workspaces of all fit side by side, what they leave is divided among the caches. Each cache gets
    an equal share, and what it has no use for goes to larger ones. Otherwise each model is planned as if it were alone.

    Parameters
    ----------
    planners : mapping of str to callable
    free_bytes : int or None
        What all of them may take together; None: what is free of the device of the first.
    must_fit : bool
        All of them are to be loaded at the same time.

    Raises
    ------
    CacheFullError
        A model does not fit alone, or not all fit together though they must; the message has the sizes.
    ConfigError, WeightError, FileNotFoundError
        As `plan_model`.
    """
    if free_bytes is None:
        free_bytes = _free_for(next(iter(planners.values())))
    alone = {name: _planned(name, plan, free_bytes) for name, plan in planners.items()}
    together = _beside_each_other(planners, alone, free_bytes)
    if together is not None:
        return together, free_bytes
    if must_fit:
        sizes = ", ".join(
            f"{name!r} needs {format_bytes(plan.memory.weight_bytes + plan.memory.workspace_bytes)} and a KV cache"
            for name, plan in alone.items()
        )
        raise CacheFullError(
            f"the models do not fit in {format_bytes(free_bytes)} together: {sizes}; free memory, quantize one, lower "
            "kv_cache or max_num_seqs, or let them be loaded in turns, when they are asked for (--on-demand)"
        )
    return alone, free_bytes


def _free_for(plan: Planner) -> int:
    """What is free of the device that a model would be on; `plan` must not fail for lack of memory to tell this."""
    return min(map(free_memory, plan(1 << 60).devices))


def _planned(name: str, plan: Planner, free_bytes: int) -> ModelPlan:
    try:
        return plan(free_bytes)
    except CacheFullError as error:
        raise CacheFullError(f"the model {name!r} does not fit in {format_bytes(free_bytes)}: {error}") from error


def _beside_each_other(
    planners: Mapping[str, Planner], alone: Mapping[str, ModelPlan], free_bytes: int
) -> Mapping[str, ModelPlan] | None:
    """None: they do not fit."""
    fixed = {name: plan.memory.weight_bytes + plan.memory.workspace_bytes for name, plan in alone.items()}
    left = free_bytes - sum(fixed.values())
    plans: dict[str, ModelPlan] = {}
    # Those that can use less go first. The order of options decides nothing.
    by_cache = sorted(alone, key=lambda name: (alone[name].memory.kv_bytes, name))
    for num_taken, name in enumerate(by_cache):
        share = left // (len(by_cache) - num_taken)
        if share <= 0:
            return None
        try:
            plan = plans[name] = planners[name](fixed[name] + share)
        except CacheFullError:
            return None
        # A cache is a part of its share by default, unless its size was given; the rest stays free for the system.
        memory = plan.memory
        left -= max(memory.kv_bytes, share * memory.kv_bytes // max(memory.kv_budget_bytes, 1))
    return {name: plans[name] for name in planners} if left >= 0 else None
