"""Where warnings go in a program that has not configured logging: to stderr, with a word about whose they are."""

from __future__ import annotations

import logging
import sys

__all__ = ["logger"]

logger = logging.getLogger("infinilm")
"""What every module of the package logs to."""


class _Unconfigured(logging.Handler):
    """Prints warnings as long as the application has no handlers of its own, for all loggers or for this one."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers and logger.handlers == [self] and sys.stderr is not None:
            print(f"infinilm: {record.levelname.lower()}: {record.getMessage()}", file=sys.stderr)
            if record.exc_info:
                print(logging.Formatter().formatException(record.exc_info), file=sys.stderr)


if not logger.handlers:
    logger.addHandler(_Unconfigured(logging.WARNING))
