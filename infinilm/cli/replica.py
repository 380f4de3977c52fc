"""A replica's process: `infinilm serve`, which ends with the process that started it.

Its options come as a line of JSON on stdin, so that `ps` shows no key. When stdin closes, its parent is gone: it drains
as at SIGTERM. Its address goes to stdout, which nothing else can write to: what would, goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Callable

from infinilm.cli.main import run_command
from infinilm.cli.serve import run_serve


def _end_with_parent() -> None:
    while os.read(0, 1 << 10):  # not through sys.stdin, which the interpreter would wait for at its end
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _telling() -> Callable[[str], None]:
    """Return what tells the parent where a server listens; whatever else writes to stdout writes to stderr from now."""
    parent = os.dup(1)
    os.dup2(2, 1)

    def tell(text: str) -> None:
        os.write(parent, f"{text.rpartition(' at ')[2]}\n".encode())

    return tell


def main() -> int:
    """Serve; returns the exit code."""
    for number in (signal.SIGINT, signal.SIGHUP):  # which reach all processes of a terminal; the parent decides
        signal.signal(number, signal.SIG_IGN)
    options = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, name="infinilm-parent", daemon=True).start()
    return run_command(argparse.Namespace(**options, run=run_serve, tell=_telling()))


if __name__ == "__main__":
    sys.exit(main())
