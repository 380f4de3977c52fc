"""The part of a model that each stage of a pipeline has, and its memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from infinilm import _core
from infinilm.checks import as_integer
from infinilm.errors import ConfigError
from infinilm.planning.sizes import format_bytes

__all__ = ["StageMemory", "StagePart", "stage_specs", "threads_per_stage"]


@dataclass(frozen=True, slots=True)
class StageMemory:
    """The memory of one stage, summed over its ranks.

    Attributes
    ----------
    first_layer, end_layer : int
        Its layers, and the first one behind them. The first stage has the embedding too, the last one the lm_head.
    weight_bytes, workspace_bytes : int
        Bytes of its weights, and the most that a step needs there.
    kv_bytes_per_token, state_bytes : int
        Bytes of a token in the cache of its layers, and of the state of a sequence.
    """

    first_layer: int
    end_layer: int
    weight_bytes: int
    workspace_bytes: int
    kv_bytes_per_token: int
    state_bytes: int

    def __str__(self) -> str:
        state = f", {format_bytes(self.state_bytes)} of a state" if self.state_bytes else ""
        return (
            f"layers {self.first_layer} to {self.end_layer - 1}: weights {format_bytes(self.weight_bytes)}, workspace "
            f"{format_bytes(self.workspace_bytes)}, KV cache {format_bytes(self.kv_bytes_per_token)} per token{state}"
        )


@dataclass(frozen=True, slots=True)
class StagePart:
    """The part of the model that a stage has, with bytes of its weights and of its steps."""

    spec: _core.ModelSpec
    weight_bytes: int
    workspace_bytes: int

    def memory(self, num_ranks: int, kv_cache_dtype: str) -> StageMemory:
        """What it takes with so many ranks, which share a memory."""
        rank = _core.local_spec(self.spec, num_ranks - 1, num_ranks)
        return StageMemory(
            *self.spec.own_layers,
            self.weight_bytes,
            self.workspace_bytes,
            num_ranks * rank.kv_bytes_per_token(kv_cache_dtype),
            num_ranks * rank.state_bytes(),
        )


def stage_specs(spec: _core.ModelSpec, num_stages: Any, device: str, only: int | None = None) -> list[_core.ModelSpec]:
    """The part of a model that each stage has, or `only` one. ConfigError: more stages than layers, or on a GPU."""
    num_stages = as_integer("pipeline_parallel_size", num_stages)
    if num_stages > spec.num_layers:
        raise ConfigError(
            f"pipeline_parallel_size must be at most {spec.num_layers}, the layers of the model; got {num_stages}"
        )
    if num_stages > 1 and device != "cpu":
        raise ConfigError(
            f"pipeline_parallel_size={num_stages}: stages run on device 'cpu' alone in this version, not on "
            f"{device!r}; GPUs of one machine share a model by tensor_parallel_size"
        )
    return [_core.stage_spec(spec, stage, num_stages) for stage in (range(num_stages) if only is None else [only])]


def threads_per_stage(num_threads: int | None, num_stages: int) -> int:
    """How many of these CPU threads each stage of this process gets; 0: one per core."""
    if num_stages == 1:
        return num_threads or 0
    return max((num_threads or _core.default_num_threads()) // num_stages, 1)
