"""Where warnings go in a program that has not configured logging: to stderr, with a word about whose they are."""

from __future__ import annotations

import logging
import sys

__all__ = ["logger", "printable"]

logger = logging.getLogger("infinilm")
"""What every module of the package logs to."""


def printable(text: str, keep: str = "") -> str:
    r"""Text that moves no cursor and begins no line: control characters as escapes such as \x1b, but those of `keep`.

    Messages quote names of a model's files, which are a stranger's.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


class _Unconfigured(logging.Handler):
    """Prints warnings as long as the application has no handlers of its own, for all loggers or for this one."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers and logger.handlers == [self] and sys.stderr is not None:
            print(f"infinilm: {record.levelname.lower()}: {printable(record.getMessage())}", file=sys.stderr)
            if record.exc_info:
                print(logging.Formatter().formatException(record.exc_info), file=sys.stderr)


if not logger.handlers:
    logger.addHandler(_Unconfigured(logging.WARNING))
