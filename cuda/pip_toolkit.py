"""Prints where pip has put a CUDA toolkit for this interpreter: the folder of the newest, or nothing.

The packages nvidia-cuda-nvcc, -runtime, -crt and nvidia-nvvm share one folder for each major version,
site-packages/nvidia/cu13. A build that pip isolates has the interpreter of the environment, but another path to import
from, so that the environment's own site-packages are looked at as well.
"""

import re
import sys
import sysconfig
from pathlib import Path


def find_toolkit(places: list[str]) -> str:
    """Return the folder of the newest toolkit with a compiler in these site-packages, or an empty text."""
    found = [path for place in dict.fromkeys(places) for path in Path(place, "nvidia").glob("cu*")]
    whole = [path for path in found if re.fullmatch(r"cu\d+", path.name) and (path / "bin" / "nvcc").is_file()]
    newest = sorted(whole, key=lambda path: int(path.name.removeprefix("cu")))[-1:]
    return str(newest[0]) if newest else ""


if __name__ == "__main__":
    paths = sysconfig.get_paths()
    print(find_toolkit([*filter(None, sys.path), paths["purelib"], paths["platlib"]]))
