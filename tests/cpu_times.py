"""`pytest --cpu-times`: the CPU seconds of every folder, of every file and of the heaviest tests.

Time on the wall says little on a machine that others use too; CPU time stays nearly the same. A test's time is what its
process and all processes below it took while it ran, with all their threads: a worker or a server that a fixture shares
is counted with each test that uses it. Linux tells this of processes (proc(5)).
"""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HEAVIEST = 40


def cpu_seconds(pid: str = "self") -> float:
    """CPU seconds of a process, of its children that have ended, and of all processes below it that live."""
    process = Path("/proc", pid)
    try:
        fields = (process / "stat").read_text().rpartition(")")[2].split()  # behind its name: proc(5)
        children = {child for task in process.glob("task/*/children") for child in task.read_text().split()}
    except OSError:  # it has ended meanwhile, and counts as a child that has
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") + sum(map(cpu_seconds, children))


class CpuTimes:
    """Measures setup, call and teardown of each test, wherever it runs, and adds up where the reports arrive."""

    def __init__(self) -> None:
        self.start = cpu_seconds()
        self.by_test: collections.Counter[str] = collections.Counter()
        self.num_tests: collections.Counter[str] = collections.Counter()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self) -> Iterator[Any]:
        report = yield
        now = cpu_seconds()
        report.cpu_seconds = now - self.start  # since the report before; xdist sends the attributes of a report
        self.start = now
        return report

    def pytest_runtest_logstart(self) -> None:
        self.start = cpu_seconds()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = report.nodeid.partition("[")[0]  # without its parameters
        self.by_test[test] += report.cpu_seconds
        self.num_tests[test] += report.when == "setup"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section(f"CPU seconds: {sum(self.by_test.values()):.1f}")
        self._write_sums(terminalreporter, os.path.dirname)
        terminalreporter.section("by file")
        self._write_sums(terminalreporter, lambda file: file)
        terminalreporter.section(f"the {HEAVIEST} heaviest tests, all parameters together")
        for test, seconds in self.by_test.most_common(HEAVIEST):
            terminalreporter.write_line(f"{seconds:8.2f}  {self.num_tests[test]:5} tests  {test}")

    def _write_sums(self, terminalreporter: Any, group_of: Callable[[str], str]) -> None:
        """Write the seconds and the number of tests of every group of files, the heaviest first."""
        seconds: collections.Counter[str] = collections.Counter()
        num_tests: collections.Counter[str] = collections.Counter()
        for test, of_test in self.by_test.items():
            group = group_of(test.partition("::")[0])
            seconds[group] += of_test
            num_tests[group] += self.num_tests[test]
        for group, of_group in seconds.most_common():
            terminalreporter.write_line(f"{of_group:8.2f}  {num_tests[group]:5} tests  {group}")
