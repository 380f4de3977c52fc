"""What other processes take of the machine: a figure that was measured beside them is not the machine's."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["Others"]


class Others:
    """Cores that processes other than this one, and those named, have used since it was made.

    What the host of a virtual machine takes away counts as well. Resolution: some 10 ms of CPU time.
    """

    def __init__(self, pids: Sequence[int] = ()) -> None:
        self._pids = [os.getpid(), *pids]
        self._started, self._before = time.perf_counter(), self._used()

    def cores(self) -> float:
        """The mean since the beginning, at least 0."""
        return max(0.0, (self._used() - self._before) / (time.perf_counter() - self._started))

    def _used(self) -> float:
        return _busy_seconds() - sum(map(_cpu_seconds, self._pids))


def _busy_seconds() -> float:
    """CPU time of all processes, and what was stolen from this machine."""
    first = Path("/proc/stat").read_text().split("\n", 1)[0]
    user, nice, system, _idle, _waiting, *rest = map(int, first.split()[1:9])  # rest: interrupts, stolen
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


def _cpu_seconds(pid: int) -> float:
    """CPU time of a process, all its threads, and of its children that ended; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
