"""Experts on the CPU beside attention on a GPU: of which layers, and the memory that they take on either side."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from infinilm import _core
from infinilm.checkpoint.native import bytes_of_block, type_on
from infinilm.checks import short_repr
from infinilm.errors import ConfigError

__all__ = ["check_types", "count_cpu_moe", "expert_bytes", "keep_on_host"]

_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.")


def count_cpu_moe(cpu_moe: Any, spec: _core.ModelSpec) -> int:
    """The number of first layers whose experts the CPU has. ConfigError: it cannot be."""
    if not any(layer.experts for layer in spec.layers):
        raise ConfigError("cpu_moe: this model has no experts; leave it out, or use gpu_layers")
    if cpu_moe == "all":
        return spec.num_layers
    if isinstance(cpu_moe, bool) or not hasattr(cpu_moe, "__index__"):
        raise ConfigError(f"cpu_moe: expected 'auto', 'all' or a number of layers, got {short_repr(cpu_moe)}")
    count = int(cpu_moe.__index__())
    if not 0 <= count <= spec.num_layers:
        raise ConfigError(
            f"cpu_moe must be 0 to {spec.num_layers}, the layers of the model, 'all', or 'auto', for as few as needed; "
            f"got {count}"
        )
    return count


def keep_on_host(spec: _core.ModelSpec, count: int) -> None:
    """Mark the experts of so many first layers, which stay in memory of the host."""
    layers = spec.layers
    for layer in layers[:count]:
        if experts := layer.experts:
            experts.on_host = True
            layer.experts = experts
    spec.layers = layers


def expert_bytes(spec: _core.ModelSpec, kept: str, quantised: Mapping[str, int] | None) -> int:
    """Bytes of the weights that `keep_on_host` has marked: as `quantised` says by name, others in the dtype `kept`."""
    on_host = {i for i, layer in enumerate(spec.layers) if layer.experts and layer.experts.on_host}
    sizes, known = _core.param_bytes(spec, kept), quantised or {}
    experts = ((name, match) for name in sizes if (match := _EXPERT.match(name)))
    return sum(known.get(name, sizes[name]) for name, match in experts if int(match[1]) in on_host)


def check_types(types: Collection[str]) -> None:
    """ConfigError: weights are kept in blocks of a type that kernels of GPUs alone take."""
    refused = sorted(name for name in types if not bytes_of_block(type_on(name, "cuda"), "cpu"))
    if refused:
        raise ConfigError(
            f"cpu_moe: the kernels of CPUs do not take weights as {' and '.join(refused)}; pass a dtype or quantization"
        )
