"""Signatures that name every keyword, for `help`, IPython and Jupyter.

Functions that take ``**keywords`` say to type checkers what these may be (`Unpack` of a TypedDict), but at run time
their signature is ``**keywords`` and an editor has nothing to complete. ``__signature__`` is what `inspect.signature`
and the completer of IPython read in its place (PEP 362).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["keyword_parameters", "name_keywords"]


def keyword_parameters(types: Mapping[str, Any]) -> list[inspect.Parameter]:
    """Keyword-only parameters by their names and types; ``...`` stands for their defaults."""
    return [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=..., annotation=getattr(kind, "__forward_arg__", kind)
        )
        for name, kind in types.items()
    ]


def name_keywords(function: Any, keywords: Iterable[inspect.Parameter] = ()) -> None:
    """Let the signature of a function or class name its keywords in place of ``*args`` and ``**keywords``."""
    function = getattr(function, "__func__", function)  # of a class method
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    function.__signature__ = signature.replace(parameters=[*own, *keywords])
