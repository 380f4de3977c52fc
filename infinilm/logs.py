"""Where the words of this package go: warnings to stderr, and those of a server with their time, as text or JSON."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time

__all__ = ["FORMATS", "configure", "logger", "printable"]

logger = logging.getLogger("infinilm")
"""What every module of the package logs to."""

FORMATS = ("text", "json")
"""How a server writes its log."""


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
        if logging.getLogger().handlers or logger.handlers != [self] or sys.stderr is None:
            return
        with contextlib.suppress(OSError):  # where stderr is on a full disk, what is at work goes on without a word
            print(f"infinilm: {record.levelname.lower()}: {printable(record.getMessage())}", file=sys.stderr)
            if record.exc_info:
                print(logging.Formatter().formatException(record.exc_info), file=sys.stderr)


class _Lines(logging.Formatter):
    """One line for each message, with its time (UTC) and level; a message may bring more fields, by name.

    These fields are the attribute `fields` of the record: `logger.info(message, extra={"fields": {...}})`.
    """

    def __init__(self, form: str) -> None:
        super().__init__()
        self._is_json = form == "json"

    def format(self, record: logging.LogRecord) -> str:
        """The line; a traceback follows its message on lines of its own, and is a field of JSON."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        moment, level = f"{seconds}.{int(record.msecs):03d}Z", record.levelname.lower()
        message = printable(record.getMessage())
        fields = getattr(record, "fields", {})
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        if self._is_json:
            told = {"time": moment, "level": level, "logger": record.name, "message": message, **fields}
            return json.dumps(told | ({"traceback": trace} if trace else {}))
        named = [f"{name}={_quoted(value)}" for name, value in fields.items()]
        return " ".join([f"{moment} {level}: {message}", *named]) + (f"\n{trace}" if trace else "")


def _quoted(value: object) -> str:
    """A value as it stands in a line of text: one word, or a text of JSON."""
    text = str(value)
    return text if text and text.isprintable() and not set(text) & set(' "=') else json.dumps(text)


def configure(form: str, level: int, others: tuple[str, ...] = ()) -> None:
    """Write records of the package and of the loggers `others` to stderr, from this level on.

    Parameters
    ----------
    form : str
        One of `FORMATS`.
    level : int
        A level of `logging`.
    others : tuple of str
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_Lines(form))
    for one in (logger, *map(logging.getLogger, others)):
        one.handlers, one.propagate = [handler], False
        one.setLevel(level)


if not logger.handlers:
    logger.addHandler(_Unconfigured(logging.WARNING))
