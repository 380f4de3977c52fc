"""Checks that a wheel runs with glibc 2.28: python tools/wheels/check.py WHEEL

auditwheel reads the versions of symbols. A symbol that glibc 2.28 does not have is none of the stubs that the wheel is
linked with, so it has no version, and would be missing where the wheel is loaded: those are found here.
"""

from __future__ import annotations

import io
import re
import sys
import zipfile
from pathlib import Path

from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerSymSection


def unversioned(library: bytes) -> list[str]:
    """Return the symbols that a library needs from no library in particular, but for those of Python."""
    elf = ELFFile(io.BytesIO(library))
    versions: GNUVerSymSection | None = elf.get_section_by_name(".gnu.version")  # None: no symbol has a version
    return [
        symbol.name
        for number, symbol in enumerate(elf.get_section_by_name(".dynsym").iter_symbols())
        if symbol["st_shndx"] == "SHN_UNDEF"
        and symbol["st_info"]["bind"] == "STB_GLOBAL"
        and (versions is None or not isinstance(versions.get_symbol(number)["ndx"], int))
        and not symbol.name.startswith(("Py", "_Py"))
    ]


def main(wheel: Path) -> None:
    """End the program with what is wrong, if something is."""
    newest = min((int(minor) for minor in re.findall(r"manylinux_2_(\d+)_", wheel.name)), default=99)
    if newest > 28:
        sys.exit(f"{wheel.name} needs a newer system than manylinux_2_28")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".so") and (missing := unversioned(archive.read(name))):
                sys.exit(f"{wheel.name}: {name} needs symbols that glibc 2.28 does not have: {', '.join(missing)}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/wheels/check.py WHEEL")
    main(Path(sys.argv[1]))
