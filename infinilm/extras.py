"""Optional dependencies: how to install those of an extra."""

from __future__ import annotations

import re

__all__ = ["how_to_install"]


def how_to_install(extra: str) -> str:
    """The command that installs the packages of an extra by their own names, wherever infinilm itself came from."""
    return f"pip install {' '.join(map(repr, _packages(extra))) or repr(f'infinilm[{extra}]')}"


def _packages(extra: str) -> list[str]:
    """What the extra, and those that it takes up, require; nothing where infinilm is not installed."""
    from importlib import metadata

    try:
        required = metadata.requires("infinilm") or []
    except metadata.PackageNotFoundError:
        return []
    found: list[str] = []
    for requirement in required:
        what, _, condition = (part.strip() for part in requirement.partition(";"))
        if re.search(rf"""extra == ['"]{re.escape(extra)}['"]""", condition):
            other = re.fullmatch(r"infinilm\[(.+)\]", what)
            found += [what] if other is None else [p for name in other[1].split(",") for p in _packages(name.strip())]
    return list(dict.fromkeys(found))
