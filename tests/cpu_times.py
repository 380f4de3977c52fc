"""`pytest --cpu-times`: the CPU seconds of every folder and of the heaviest tests.

Time on the wall says little on a machine that others use too; CPU time stays nearly the same. A test's time is that of
its process, with all threads, and of the child processes that ended during the test. A server or a worker that a
fixture shares is thus counted with the test after which it ends.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Iterator
from typing import Any

import pytest

HEAVIEST = 40


def cpu_seconds() -> float:
    """CPU seconds of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


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
        folders: collections.Counter[str] = collections.Counter()
        num_tests: collections.Counter[str] = collections.Counter()
        for test, seconds in self.by_test.items():
            folder = os.path.dirname(test.partition("::")[0])
            folders[folder] += seconds
            num_tests[folder] += self.num_tests[test]
        terminalreporter.section(f"CPU seconds: {sum(folders.values()):.1f}")
        for folder, seconds in folders.most_common():
            terminalreporter.write_line(f"{seconds:8.2f}  {num_tests[folder]:5} tests  {folder}")
        terminalreporter.section(f"the {HEAVIEST} heaviest tests, all parameters together")
        for test, seconds in self.by_test.most_common(HEAVIEST):
            terminalreporter.write_line(f"{seconds:8.2f}  {self.num_tests[test]:5} tests  {test}")
