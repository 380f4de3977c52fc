"""The errors infinilm raises. All derive from `InfinilmError`; the C++ core raises the same classes.

Every message names the thing, the expected value, the value that came, and the remedy.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterable


class InfinilmError(Exception):
    """Base of every error raised by infinilm."""


class ConfigError(InfinilmError, ValueError):
    """A model or engine configuration that cannot work: names the key, the rule and what is supported."""


class WeightError(InfinilmError):
    """A checkpoint that does not fit its configuration, or a damaged file: names tensor, file, expected and got."""


class CacheFullError(InfinilmError):
    """The KV cache is too small. The message says how much was needed and is free, and which setting decides."""


class DeviceError(InfinilmError):
    """A device that is absent or not usable: says why."""


class RequestError(InfinilmError, ValueError):
    """A request that can never be served: an empty prompt, a token id out of range, a prompt that is too long."""


class QueueFullError(RequestError):
    """So many requests wait that one more is not taken: try again later (HTTP 429). Names the limit."""


class TimeLimitError(InfinilmError):
    """A request took longer than `RequestLimits.max_seconds`, in the queue or while it ran, and was ended."""


class ReceiptError(InfinilmError, ValueError):
    """A text that is no receipt, or a receipt whose signature does not fit: names the part."""


class CacheFileError(InfinilmError, ValueError):
    """A file of keys and values that is damaged, or of another model or prefix."""


class EngineDeadError(InfinilmError):
    """The engine was closed, a rank failed (`__cause__` says how), or this process was forked from the engine's."""


def did_you_mean(name: str, known: Iterable[str], count: int = 1) -> str:
    """Return "; did you mean 'x'?" with the nearest known names, or nothing: the end of a message."""
    # 0.52 are 'response_format' and 'presence_penalty', which have nothing to do with each other.
    close = difflib.get_close_matches(name, list(known), n=count, cutoff=0.58)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


class panics_as_errors:
    """Within it, a panic of a library written in Rust is raised as an `InfinilmError`.

    pyo3 raises a panic as a BaseException, as Python raises the end of a program, so that nothing catches it. Here it
    is the fault of one input.

    Parameters
    ----------
    what : str
        Begins the message.
    error : type
        What is raised.
    """

    __slots__ = ("_error", "_what")

    def __init__(self, what: str, error: type[InfinilmError] = InfinilmError) -> None:
        self._what, self._error = what, error

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: object) -> None:
        if kind is not None and kind.__name__ == "PanicException":
            raise self._error(f"{self._what}: a library failed in itself: {value}") from value


def told(error: BaseException) -> str:
    """What an exception says, or its class if it says nothing, as a failed `assert` does."""
    return str(error) or type(error).__name__


def own_copy(error: BaseException) -> BaseException:
    """A copy of an exception, with its traceback and cause, for each request that raises or keeps it.

    Raising an exception extends its traceback, which keeps the frames of all callers alive. One object for several
    requests would mix their tracebacks. An exception that cannot be copied is returned as it is.
    """
    copied = error
    for make in (copy.copy, _copy_without_init):
        try:
            made = make(error)
        except Exception:  # the class needs other arguments
            continue
        if type(made) is type(error):
            copied = made
            break
    copied.__cause__, copied.__context__ = error.__cause__, error.__context__
    copied.__suppress_context__ = error.__suppress_context__
    return copied.with_traceback(error.__traceback__)


def _copy_without_init(error: BaseException) -> BaseException:
    """Copy an exception whose `__init__` takes other arguments than its `args`."""
    copied = type(error).__new__(type(error), *error.args)
    vars(copied).update(vars(error))
    return copied
