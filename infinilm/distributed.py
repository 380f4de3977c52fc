"""Which devices an engine runs on, and what its ranks say to each other.

`DistConfig` is what users write; `CommunicationGroup` makes ranks of it and refuses what no machine, or not this one,
can run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from infinilm import _core
from infinilm.checks import as_integer, short_repr
from infinilm.devices.arrays import as_tensor
from infinilm.devices.system import resolve_device, usable_gpus
from infinilm.errors import ConfigError, DeviceError

__all__ = ["CommunicationGroup", "DistConfig", "RankInfo"]


class DistConfig:
    """The devices of tensor parallelism, one rank on each.

    Parameters
    ----------
    tp_size
        So many devices, with the ids 0 .. tp_size - 1.
    tp_device_ids
        These devices. Neither given: device 0 alone; both: an error.

    Raises
    ------
    TypeError
        Ids or a size that are no integers.
    ConfigError
        Both given, or no device at all. What a machine has is checked by the engine.
    """

    __slots__ = ("_tp_device_ids",)
    __hash__ = None  # type: ignore[assignment]  # the ids can be written

    def __init__(self, tp_size: int | None = None, tp_device_ids: Iterable[int] | None = None) -> None:
        if tp_size is not None and tp_device_ids is not None:
            raise ConfigError("DistConfig takes tp_size or tp_device_ids, not both: the size is the number of ids")
        if tp_device_ids is None:
            size = 1 if tp_size is None else _integer("tp_size", tp_size)
            if size < 1:
                raise ConfigError(f"tp_size must be at least 1, got {size}")
            tp_device_ids = range(size)
        self.tp_device_ids = tp_device_ids

    @property
    def tp_device_ids(self) -> list[int]:
        """Device of each rank."""
        return self._tp_device_ids

    @tp_device_ids.setter
    def tp_device_ids(self, ids: Iterable[int]) -> None:
        if isinstance(ids, (str, bytes)) or not isinstance(ids, Iterable):
            raise TypeError(f"tp_device_ids must be a list of integers, got {ids!r}")
        checked = [_integer("tp_device_ids", i) for i in ids]
        if not checked:
            raise ConfigError("tp_device_ids is empty; name at least one device")
        self._tp_device_ids = checked

    @property
    def tp_size(self) -> int:
        """Number of ranks."""
        return len(self._tp_device_ids)

    def __eq__(self, other: object) -> bool:
        return self.tp_device_ids == other.tp_device_ids if isinstance(other, DistConfig) else NotImplemented

    def __repr__(self) -> str:
        return f"DistConfig(tp_device_ids={self._tp_device_ids})"


@dataclass(frozen=True, slots=True)
class RankInfo:
    """One rank of a group.

    Raises
    ------
    ConfigError
        A rank outside 0 .. tp_size - 1.
    """

    tp_rank: int = 0
    tp_size: int = 1
    device: str = "cpu"  # "cpu" or "cuda:<index>"

    def __post_init__(self) -> None:
        if not 0 <= self.tp_rank < self.tp_size:
            raise ConfigError(
                f"tp_rank must be in 0..{self.tp_size - 1} (tp_size is {self.tp_size}), got {self.tp_rank}"
            )


class CommunicationGroup:
    """The ranks of an engine and their collective operations.

    A tensor is anything with DLPack or the buffer protocol, in host memory; results are `infinilm.Tensor`. Operations
    are those of a group of one, and give back the tensor, sharing its memory; inside an engine ranks have their own.

    Parameters
    ----------
    dist_config
        The devices; default: one.
    device_type
        "cpu" or "cuda".

    Raises
    ------
    ConfigError
        Ids that are negative or repeated; an operation of a group of several ranks.
    DeviceError
        A device that is absent.
    """

    def __init__(self, dist_config: DistConfig | None = None, device_type: str = "cpu") -> None:
        dist_config = DistConfig() if dist_config is None else dist_config
        if not isinstance(dist_config, DistConfig):
            raise TypeError(f"expected a DistConfig, got {type(dist_config).__name__}")
        if device_type not in ("cpu", "cuda"):
            raise ConfigError(f"device_type: expected 'cpu' or 'cuda', got {device_type!r}")
        self.ranks: tuple[RankInfo, ...] = _make_ranks(dist_config, device_type)
        """One per rank, in order."""

    @property
    def tp_size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def all_reduce(self, tensor: Any, op: str = "sum") -> _core.Tensor:
        """Reduce a tensor over the ranks, element by element.

        Parameters
        ----------
        tensor
            [..], of the same shape and dtype on each rank.
        op
            "sum", "max" or "min".
        """
        if op not in ("sum", "max", "min"):
            raise ConfigError(f"all_reduce: op must be 'sum', 'max' or 'min', got {op!r}")
        self._require_one("all_reduce")
        return as_tensor(tensor, "all_reduce")

    def all_gather(self, tensor: Any, axis: int = 0) -> _core.Tensor:
        """Join the tensors of all ranks along an axis: [.., tp_size * size, ..], the same on each rank."""
        self._require_one("all_gather")
        gathered = as_tensor(tensor, "all_gather")
        ndim = len(gathered.shape)
        if not -ndim <= _integer("axis", axis) < ndim:
            raise ConfigError(f"all_gather: axis {axis} is out of range for a tensor of {ndim} dimensions")
        return gathered

    def broadcast(self, tensor: Any, src: int = 0) -> _core.Tensor:
        """Give every rank the tensor of rank `src`."""
        if not 0 <= _integer("src", src) < self.tp_size:
            raise ConfigError(f"broadcast: src must be in 0..{self.tp_size - 1}, got {src}")
        self._require_one("broadcast")
        return as_tensor(tensor, "broadcast")

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self._require_one("barrier")

    def _require_one(self, op: str) -> None:
        if self.tp_size > 1:
            raise ConfigError(f"{op}: this group has {self.tp_size} ranks, whose operations run inside an engine")


def resolve_devices(
    device: str,
    tensor_parallel_size: int = 1,
    device_ids: Iterable[int] | None = None,
    *,
    num_stages: int = 1,
    must_exist: bool = True,
) -> tuple[str, ...]:
    """The device of each rank, as `LLM` takes them: "cpu", or "cuda" and its ids, stage by stage.

    `num_stages`: those of a pipeline that are in this process. `must_exist`: GPUs must be here.

    Raises
    ------
    ConfigError
        Settings that contradict each other, or ids that are negative or repeated.
    DeviceError
        A device that is absent.
    """
    tensor_parallel_size = as_integer("tensor_parallel_size", tensor_parallel_size)
    num_stages = as_integer("pipeline_parallel_size", num_stages)
    num_ranks, sizes = tensor_parallel_size * num_stages, f"tensor_parallel_size is {tensor_parallel_size}"
    if num_stages > 1:
        sizes += f" and pipeline_parallel_size {num_stages}"
    first = resolve_device(device)
    kind, _, index = first.partition(":")
    if device == "auto" and index and (num_ranks != 1 or device_ids is not None):
        index = ""  # of the first that is usable: where several are wanted, none is named
        device_ids = usable_gpus()[:num_ranks] if device_ids is None else device_ids
    if device_ids is None:
        if num_ranks == 1:
            return (first,)
        if index:
            raise ConfigError(f"device={device!r} is one device, but {sizes}: pass device={kind!r} and device_ids")
        dist_config = DistConfig(tp_size=num_ranks)
    else:
        dist_config = DistConfig(tp_device_ids=device_ids)
        if index:
            raise ConfigError(f"device={device!r} and device_ids={dist_config.tp_device_ids}: pass device={kind!r}")
        if dist_config.tp_size != num_ranks:
            raise ConfigError(f"device_ids={dist_config.tp_device_ids} has {dist_config.tp_size} devices, but {sizes}")
    return tuple(rank.device for rank in _make_ranks(dist_config, kind, must_exist=must_exist))


def _make_ranks(dist_config: DistConfig, device_type: str, *, must_exist: bool = True) -> tuple[RankInfo, ...]:
    _check_ids(dist_config.tp_device_ids, device_type, must_exist)
    devices = ["cpu" if device_type == "cpu" else f"cuda:{i}" for i in dist_config.tp_device_ids]
    return tuple(RankInfo(i, len(devices), device) for i, device in enumerate(devices))


def _check_ids(ids: list[int], device_type: str, must_exist: bool) -> None:
    """Refuse settings that no engine can run, and, if GPUs must exist, those that this machine cannot run."""
    seen: set[int] = set()
    for device in ids:
        if device < 0:
            raise ConfigError(f"tp_device_ids: device ids are 0 or positive, got {device} in {short_repr(ids)}")
        if device in seen:
            raise ConfigError(
                f"tp_device_ids: device {device} is there twice in {short_repr(ids)}; each rank needs its own"
            )
        seen.add(device)
    largest = max(ids)
    if device_type == "cpu" and largest >= len(ids):
        raise DeviceError(
            f"tp_device_ids: there is no device {largest}; on CPUs ids are ranks, 0..{len(ids) - 1} for {len(ids)}: "
            f"use tp_size={len(ids)}"
        )
    if device_type == "cuda" and must_exist and largest >= (count := len(_core.cuda_devices())):
        raise DeviceError(f"tp_device_ids: there is no CUDA device {largest}; this machine has 0..{count - 1}")


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: expected an integer, got {value!r}")
    return int(value.__index__())
