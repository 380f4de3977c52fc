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


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="what is written to it finds a full disk")
@pytest.mark.parametrize("command", [["generate", "x", "--max-tokens", "3"], ["plan", "demo"], ["completion", "bash"]])
def test_a_full_disk(command: list[str]) -> None:
    """An answer that cannot be written is an error that names stdout; what goes to stderr is not needed."""
    run = [sys.executable, "-m", "infinilm", *command]
    with open("/dev/full", "wb") as full:
        lost = subprocess.run(run, stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE, check=False)
        silent = subprocess.run(run, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=full, check=False)
    assert (lost.returncode, lost.stderr) == (1, b"infinilm: error: stdout: No space left on device\n")
    assert silent.returncode == 0 and silent.stdout
