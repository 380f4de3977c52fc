"""Runs the command line: in this process, or in one of its own."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from llm.support import PATIENCE

from infinilm.cli.main import main

# `python -m infinilm` with Ctrl-C switched on: a test run in the background inherits a SIGINT that is ignored.
PROGRAM = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "from infinilm.cli.main import main; sys.exit(main(sys.argv[1:]))"
)


def run(*arguments: str | Path) -> int:
    return main([str(a) for a in arguments])


def start(*arguments: str | Path, **kwargs: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
        cwd="/",  # in the root of the source tree, that would be imported instead of the installed package
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **kwargs,
    )


def wait_until_at_rest(process: subprocess.Popen[bytes]) -> None:
    """Wait until the main thread of a program sleeps, as it does at a prompt: five times in a row, 10 ms apart."""
    stat = Path(f"/proc/{process.pid}/task/{process.pid}/stat")
    end, num_at_rest = time.monotonic() + PATIENCE, 0
    while num_at_rest < 5:
        assert time.monotonic() < end, "the program does not come to rest"
        num_at_rest = num_at_rest + 1 if stat.read_text().rsplit(")", 1)[1].split()[0] == "S" else 0
        time.sleep(0.01)
