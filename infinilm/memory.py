"""What fits: memory of the machine, the budget of the KV cache, and the plan made from both before anything is loaded."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from infinilm.errors import CacheFullError, ConfigError

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}  # fmt: skip


def available_memory() -> int:
    """Bytes of host memory that this process can still take without swapping.

    The smaller of the kernel's estimate and what the control group (a container) has left.
    """
    limits = []
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            limits.append(int(line.split()[1]) * 1024)
    for limit_file, usage_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limit, usage = Path(limit_file).read_text().strip(), Path(usage_file).read_text().strip()
        except OSError:
            continue
        if limit != "max":
            limits.append(max(int(limit) - int(usage), 0))
    return min(limits) if limits else 2**33


def parse_cache_budget(kv_cache: int | str | None, free_bytes: int) -> int:
    """Bytes the KV cache may take.

    Parameters
    ----------
    kv_cache
        Bytes, a size such as "4GiB" or "500MB", a share of what is free such as "50%", or None for half of it.
    free_bytes
        What is free once the weights are in memory.

    Raises
    ------
    ConfigError
        If `kv_cache` is none of these or not positive.
    """
    if kv_cache is None:
        return free_bytes // 2
    budget: float = -1
    if isinstance(kv_cache, int) and not isinstance(kv_cache, bool):
        budget = kv_cache
    elif isinstance(kv_cache, str) and (match := re.fullmatch(r"\s*([0-9.]+)\s*(%|[a-zA-Z]*)\s*", kv_cache)):
        number, unit = match.groups()
        scale = free_bytes / 100 if unit == "%" else _UNITS.get(unit.lower(), -1)
        try:
            budget = float(number) * scale
        except ValueError:
            budget = -1
        if unit == "%" and budget > free_bytes:
            budget = -1
    if budget <= 0:
        raise ConfigError(
            f"kv_cache: expected a positive number of bytes, a size such as '4GiB' or a share of free memory such as '50%', "
            f"got {kv_cache!r}"
        )
    return int(budget)


def format_bytes(count: float) -> str:
    """Bytes for people: '1.2 GiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How the memory is used: weights, and a static KV cache of `num_slots` rows of `max_model_len` tokens."""

    weight_bytes: int
    kv_bytes_per_token: int
    kv_budget_bytes: int
    max_model_len: int
    num_slots: int

    @property
    def kv_bytes(self) -> int:
        """Bytes of the whole cache; pages are taken from the system as sequences grow."""
        return self.num_slots * self.max_model_len * self.kv_bytes_per_token

    def __str__(self) -> str:
        return (
            f"weights {format_bytes(self.weight_bytes)}; KV cache {format_bytes(self.kv_bytes_per_token)} per token, "
            f"{self.num_slots} sequences of {self.max_model_len} tokens = {format_bytes(self.kv_bytes)} "
            f"(budget {format_bytes(self.kv_budget_bytes)})"
        )


def make_plan(
    *,
    weight_bytes: int,
    kv_bytes_per_token: int,
    model_max_len: int,
    max_model_len: int | None,
    max_num_seqs: int,
    kv_cache: int | str | None,
    free_bytes: int,
) -> MemoryPlan:
    """Divide the memory.

    With `max_model_len` None the context shrinks to what one sequence can have within the budget; when it is given,
    it must fit.

    Raises
    ------
    CacheFullError
        If not even one sequence fits; the message says what was needed and which setting decides.
    """
    budget = parse_cache_budget(kv_cache, free_bytes)
    length = max_model_len or min(model_max_len, budget // kv_bytes_per_token)
    num_slots = min(max_num_seqs, budget // (kv_bytes_per_token * length)) if length else 0
    if num_slots < 1:
        raise CacheFullError(
            f"the KV cache has {format_bytes(budget)}, but one sequence of {length or 1} tokens needs "
            f"{format_bytes(kv_bytes_per_token * (length or 1))}: pass max_model_len <= {budget // kv_bytes_per_token} or "
            f"raise kv_cache (now {kv_cache!r}, free memory {format_bytes(free_bytes)})"
        )
    return MemoryPlan(weight_bytes, kv_bytes_per_token, budget, length, num_slots)
