"""Runs the command line: in this process, or in one of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

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
