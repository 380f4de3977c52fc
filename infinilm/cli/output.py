"""How the command line speaks: answers on stdout, everything else on stderr, and readers that leave early."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import sys
from collections.abc import Iterator

from infinilm.errors import RequestError
from infinilm.logs import printable


def prepare_streams() -> None:
    """Read and write UTF-8, whatever the locale; streams that came closed (``>&-``) are empty, and go nowhere."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # opened in this order, each takes the place of the descriptor that is closed
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)  # pytest and notebooks put other objects there
        if reconfigure is not None:
            reconfigure(encoding="utf-8", errors="strict" if stream is sys.stdin else "backslashreplace")


def stdin_lines() -> Iterator[str]:
    """The lines of stdin. RequestError: they are not UTF-8."""
    try:
        yield from sys.stdin
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise RequestError(
            f"stdin: expected UTF-8, got the byte 0x{byte:02x}; convert it, such as with iconv"
        ) from None


def stdin_text() -> str:
    """All of stdin, without the end of its last line. RequestError: it is not UTF-8."""
    return "".join(stdin_lines()).removesuffix("\n").removesuffix("\r")


def has_piped_text() -> bool:
    """Whether a pipe or a file is at stdin, as `|` and `<` make them: no terminal, and not /dev/null."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):  # an object without a descriptor, as notebooks have it
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def put(text: str) -> None:
    """Write to stdout, at once. BrokenPipeError: its reader has left. OSError: what else is wrong, such as a full disk.

    The message of the latter names stdout.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:  # by its number, Python makes it a BrokenPipeError where it was one
        raise OSError(error.errno, error.strerror, "stdout") from None


def put_aside(text: str) -> None:
    """Write to stderr, at once, if that can be written; a log on a full disk ends no server and loses no answer."""
    with contextlib.suppress(OSError):
        print(text, end="", file=sys.stderr, flush=True)


def note(text: str) -> None:
    """Write a line, or some, to stderr."""
    put_aside(printable(text, keep="\n\t") + "\n")


def stopped() -> int:
    """Exit code of Ctrl-C; what was written so far reaches its reader."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        drop_stdout()
    return 128 + signal.SIGINT


def drop_stdout() -> None:
    """Keep the flush at exit from complaining, once the reader of the output is gone."""
    with contextlib.suppress(OSError, ValueError):  # a stdout without a file descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
