"""Progress bars: on a terminal or in a notebook, and nowhere else."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["can_show", "progress_bar"]


def _in_notebook() -> bool:
    """Whether this is a Jupyter kernel, whose stderr is shown though it is no terminal."""
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return hasattr(shell, "kernel")


def can_show() -> bool:
    """Whether a bar would be seen."""
    return sys.stderr is not None and (sys.stderr.isatty() or _in_notebook())


@contextmanager
def progress_bar(
    total: int | None, description: str, unit: str, *, wanted: bool = True, delay: float = 0.0
) -> Iterator[Callable[..., None]]:
    """Show a bar; gives the function ``advance(count=1, note="")`` that moves it.

    A note is anything with a text, which is made only where there is a bar.

    Parameters
    ----------
    total
        Units until it is done; None: it is not known.
    description, unit
        The text before the bar, and the unit; "B" is counted in kB, MB, GB.
    wanted
        False: no bar. There is none either where it would not be seen; tqdm is not imported then.
    delay
        Seconds before it appears, so that what is done soon shows nothing.
    """
    if not wanted or not can_show():
        yield lambda count=1, note="": None
        return
    if _in_notebook():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that without ipywidgets the bar is made of characters
            from tqdm.auto import tqdm as bar_type
    else:
        from tqdm import tqdm as bar_type  # type: ignore[assignment]  # the same, without asyncio
    with bar_type(total=total, desc=description, unit=unit, unit_scale=unit == "B", delay=delay) as bar:

        def advance(count: int = 1, note: object = "") -> None:
            if note:
                bar.set_postfix_str(str(note), refresh=False)
            bar.update(count)

        yield advance
