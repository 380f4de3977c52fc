"""The part of a model that each stage of a pipeline has, and its memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from infinilm import _core
from infinilm.checks import as_integer
from infinilm.errors import ConfigError
from infinilm.planning.sizes import format_bytes

__all__ = ["StageMemory", "StagePart", "check_ranks", "split_specs", "stage_specs", "threads_per_stage"]


@dataclass(frozen=True, slots=True)
class StageMemory:
    """The memory of one stage: on a CPU summed over its ranks, and of each of them on GPUs.

    Attributes
    ----------
    first_layer, end_layer : int
        Its layers, and the first one behind them. The first stage has the embedding too, the last one the lm_head.
    weight_bytes, workspace_bytes : int
        Bytes of its weights, and the most that a step needs there.
    kv_bytes_per_token, state_bytes : int
        Bytes of a token in the cache of its layers, and of the state of a sequence.
    kv_cache_dtype : str
        What keys and values of its layers are kept in.
    device : str
        The kind of its devices: "cpu" or "cuda".
    """

    first_layer: int
    end_layer: int
    weight_bytes: int
    workspace_bytes: int
    kv_bytes_per_token: int
    state_bytes: int
    kv_cache_dtype: str
    device: str

    def __str__(self) -> str:
        state = f", {format_bytes(self.state_bytes)} of a state" if self.state_bytes else ""
        return (
            f"layers {self.first_layer} to {self.end_layer - 1} on {self.device}: weights "
            f"{format_bytes(self.weight_bytes)}, workspace {format_bytes(self.workspace_bytes)}, KV cache "
            f"{format_bytes(self.kv_bytes_per_token)} per token in {self.kv_cache_dtype}{state}"
        )


@dataclass(frozen=True, slots=True)
class StagePart:
    """The part of the model that a stage has, and that of its largest rank, with bytes of its weights and its steps."""

    spec: _core.ModelSpec
    rank: _core.ModelSpec
    weight_bytes: int
    workspace_bytes: int

    def memory(self, num_sharing: int, kv_cache_dtype: str, device: str) -> StageMemory:
        """What it takes on a device, where so many of its ranks share a memory."""
        return StageMemory(
            *self.spec.own_layers,
            self.weight_bytes,
            self.workspace_bytes,
            num_sharing * self.rank.kv_bytes_per_token(kv_cache_dtype, device=device),
            num_sharing * self.rank.state_bytes(),
            kv_cache_dtype,
            device.partition(":")[0],
        )


def stage_specs(
    spec: _core.ModelSpec, num_stages: Any, only: int | None = None, memory: Sequence[int] = ()
) -> list[_core.ModelSpec]:
    """The part of a model that each stage has, or `only` one. ConfigError: more stages than layers.

    `memory`: what each stage has, where this decides how many layers it gets; else they get equally many.
    """
    num_stages = as_integer("pipeline_parallel_size", num_stages)
    if num_stages > spec.num_layers:
        raise ConfigError(
            f"pipeline_parallel_size must be at most {spec.num_layers}, the layers of the model; got {num_stages}"
        )
    layers = _layers_by_memory(spec, memory) if memory else []
    stages = range(num_stages) if only is None else [only]
    return [_core.stage_spec(spec, stage, num_stages, layers) for stage in stages]


def split_specs(specs: Sequence[_core.ModelSpec], gpu_layers: int) -> list[_core.ModelSpec]:
    """The first layers of a model as a CPU computes it, and the last ones, so many, as a GPU does; `specs`: of both."""
    layers = [specs[0].num_layers - gpu_layers, gpu_layers]
    return [_core.stage_spec(spec, stage, len(specs), layers) for stage, spec in enumerate(specs)]


def _layers_by_memory(spec: _core.ModelSpec, memory: Sequence[int]) -> list[int]:
    """How many layers each stage has, so that weights are divided as memory is; at least one each."""
    whole, num_layers = _core.weight_bytes(spec, spec.dtype), spec.num_layers
    # The bytes of the first layers with what lies before them, for each number of them.
    first = [
        _core.weight_bytes(_core.stage_spec(spec, 0, 2, [count, num_layers - count]), spec.dtype)
        for count in range(1, num_layers)
    ]
    ends = [0]
    for stage in range(1, len(memory)):
        wanted = whole * sum(memory[:stage]) / sum(memory)
        nearest = min(range(1, num_layers), key=lambda count: abs(first[count - 1] - wanted))
        ends.append(min(max(nearest, ends[-1] + 1), num_layers - len(memory) + stage))
    return [end - begin for begin, end in itertools.pairwise([*ends, num_layers])]


def check_ranks(num_stages: int, num_ranks: int, device: str) -> None:
    """ConfigError: `num_stages` of one process have `num_ranks` GPUs each, and these are several.

    Memory that a stage asks the driver for may have to wait for kernels of all GPUs, and these for a peer that asks it,
    too. The ranks of a stage ask at the same time (DeviceQueue::while_quiet), which stages cannot: one is ahead of the
    other.
    """
    if num_stages > 1 and num_ranks > 1 and device != "cpu":
        raise ConfigError(
            f"pipeline_parallel_size={num_stages} and tensor_parallel_size={num_ranks}: stages of one process have one "
            "GPU each; use one of the two, or a process for each stage (`stages`, docs/scale-out.md)"
        )


def threads_per_stage(num_threads: int | None, num_stages: int) -> int:
    """How many of these CPU threads each stage of this process gets; 0: one per core."""
    if num_stages == 1:
        return num_threads or 0
    return max((num_threads or _core.default_num_threads()) // num_stages, 1)
