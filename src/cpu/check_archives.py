"""Fails the build when a library of CPU kernels defines a weak symbol: check_archives.py NM OUTPUT ARCHIVE...

The linker keeps one copy of a weak symbol (an inline function, a template instance), maybe the one compiled for
AVX-512, and calls it from everywhere: an illegal instruction on older machines. Kernels therefore use no C++ standard
headers and have internal linkage.
"""

import subprocess
import sys
from pathlib import Path


def main() -> None:
    """Check the archives of the command line."""
    nm, output, *archives = sys.argv[1:]
    faults = []
    for archive in archives:
        text = subprocess.run([nm, "-C", "--defined-only", archive], capture_output=True, text=True, check=True).stdout
        for line in text.splitlines():
            _, kind, name = [*line.split(maxsplit=2), "", "", ""][:3]
            if kind in ("V", "v", "W", "w", "u"):
                faults.append(f"{archive}: weak symbol {name}")
    if faults:
        sys.exit("\n".join(faults))
    Path(output).write_text("no weak symbols\n")


if __name__ == "__main__":
    main()
