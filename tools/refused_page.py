"""Writes the list of what is not supported into docs/architectures.md, from `infinilm.unsupported.REFUSED`.

python tools/refused_page.py            writes it
python tools/refused_page.py --check    compares, and fails when it is out of date
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path

from infinilm.unsupported import REFUSED

PAGE = Path(__file__).resolve().parents[1] / "docs/architectures.md"
HEADING = "## Not supported\n"
WIDTH = 120


def section() -> str:
    """The list, an entry for each row."""
    entries = []
    for row in REFUSED:
        classes = ", ".join(f"`{name}`" for name in row.classes.split())
        text = f"- {classes}: {row.missing}. Nearest: `{row.nearest}`."
        entries.append(textwrap.fill(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False))
    return "\n".join(entries) + "\n"


def page(text: str) -> str:
    """The page with the list in place of the one that is there."""
    head, _, rest = text.partition(HEADING)
    introduction, _, behind = rest.partition("\n- ")
    tail = behind.partition("\n\n")[2]
    return f"{head}{HEADING}{introduction}\n{section()}" + (f"\n{tail}" if tail else "")


def main() -> None:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    text = PAGE.read_text()
    made = page(text)
    if not parser.parse_args().check:
        PAGE.write_text(made)
    elif made != text:
        sys.exit("docs/architectures.md is out of date: run tools/refused_page.py")


if __name__ == "__main__":
    main()
