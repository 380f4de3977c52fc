"""The standard streams of the command line where they are not as it would like them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_streams_that_come_closed(closed: int) -> None:
    """As services and `>&-` have them: stdin is empty then, and what is written goes nowhere."""
    command = [sys.executable, "-m", "infinilm", "generate", "-", "--max-tokens", "3"]
    done = subprocess.run(command, input=b"x", capture_output=True, preexec_fn=lambda: os.close(closed), check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert bool(done.stdout) == (closed != 1)


@pytest.mark.parametrize("command", [["generate", "-"], ["chat"]])
def test_stdin_that_is_not_utf8(command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "infinilm", *command, "--max-tokens", "3"],
        input=b"caf\xe9\n",
        capture_output=True,
        check=False,
    )
    assert done.returncode == 2
    assert b"stdin: expected UTF-8, got the byte 0xe9" in done.stderr
