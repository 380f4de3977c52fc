"""A server in a process of its own, as users start it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

KEY = "a key for tests"
START_SECONDS = 120  # on machines with much else to do


class ServerProcess:
    """A running `infinilm serve`; `url` is where it listens."""

    def __init__(self, *arguments: str, folder: Path) -> None:
        # Not in the checkout, whose source tree would be imported instead of the installed package.
        command = [sys.executable, "-m", "infinilm", "serve", "--port", "0", "--api-key", KEY, *arguments]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._found = threading.Event()
        self.url = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._found.wait(START_SECONDS) or not self.url:
            self.process.kill()
            raise AssertionError(f"the server did not start: {self.lines}")

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stderr:
            for line in stderr:
                self.lines.append(line)
                if found := re.search(r" at (https?://\S+)", line):
                    self.url = found[1]
                    self._found.set()
        self._found.set()

    def stop(self, number: int = signal.SIGTERM, timeout: float = 60) -> int:
        """Send a signal; returns the exit code."""
        self.process.send_signal(number)
        code = self.process.wait(timeout)
        self._reader.join(timeout)
        return code


@contextmanager
def served(*arguments: str, folder: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(*arguments, folder=folder)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()
