"""Host memory that is left: of the machine, and of the control groups (containers, services, jobs) of the process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def available_memory() -> int:
    """Bytes of host memory that this process can still take without swapping.

    The smallest of the kernel's estimate and what each control group around the process has left.
    """
    limits = list(_left_in_groups(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")))
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            limits.append(int(line.split()[1]) * 1024)
    return min(limits, default=2**33)


def _left_in_groups(membership: Path, root: Path) -> Iterator[int]:
    """What the process's groups have left, and those around them, in bytes; of groups with a limit alone.

    `membership` has lines "0::/a/b" (v2) or "4:memory:/a/b" (v1). In a container `root` may begin at the container's
    own group, whatever path is said, so the groups up to the root are looked at, and those that are not there passed.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        lines = ["0::/", "1:memory:/"]  # the container's own, of either version
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        top = root / "memory" if controllers else root
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            try:
                limit, usage = ((folder / name).read_text().strip() for name in names)
                if limit != "max":
                    yield max(int(limit) - int(usage) + _droppable(folder), 0)
            except OSError:
                pass
            if folder == top:
                break


def _droppable(group: Path) -> int:
    """Bytes of files that the kernel kept for reading: a group's usage counts them, but they make room when needed."""
    try:
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return 0
    prefix = "total_" if "total_inactive_file" in stat else ""  # v1 has those of the groups within apart
    return sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
