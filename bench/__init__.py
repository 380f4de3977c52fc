"""Programs that measure infinilm, each run as `python -m bench.NAME` in the root of the source tree."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def command(name: str, python: str = sys.executable) -> list[str]:
    """How any Python runs a program of this folder, from any folder.

    The source tree comes last on its path, behind an infinilm that is installed there.
    """
    start = f"import runpy, sys; sys.path.append({str(ROOT)!r}); "
    start += f"runpy.run_module('bench.{name}', run_name='__main__', alter_sys=True)"
    return [python, "-c", start]
