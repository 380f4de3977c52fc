"""How the command line speaks: answers on stdout, everything else on stderr, and readers that leave early."""

from __future__ import annotations

import contextlib
import os
import signal
import sys


def use_utf8() -> None:
    """Read and write UTF-8, whatever the locale."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)  # pytest and notebooks put other objects there
        if reconfigure is not None:
            reconfigure(encoding="utf-8", errors="strict" if stream is sys.stdin else "backslashreplace")


def put(text: str) -> None:
    """Write to stdout, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def note(text: str) -> None:
    """Write a line to stderr."""
    with contextlib.suppress(BrokenPipeError):
        print(text, file=sys.stderr, flush=True)


def stopped() -> int:
    """Exit code of Ctrl-C; what was written so far reaches its reader."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        drop_stdout()
    return 128 + signal.SIGINT


def drop_stdout() -> None:
    """Nobody reads: keep the flush at exit from complaining."""
    with contextlib.suppress(OSError, ValueError):  # a stdout without a file descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
