"""Makes Meson and meson-python build for another architecture with a Python of this one:

    python tools/wheels/cross.py aarch64 FOLDER SYSROOT

SYSROOT is a folder of sysroot.py. FOLDER gets meson.ini, a cross file, and `environment`, which a shell reads before it
runs this Python: its sysconfig then says what a Python of the other architecture says, so that suffixes and tags are of
that one, as with the package crossenv. The headers stay those of this Python, which on Linux and 64 bits are the same.
"""

from __future__ import annotations

import importlib
import pprint
import shutil
import sys
import sysconfig
from pathlib import Path


def main(architecture: str, folder: Path, sysroot: Path) -> None:
    """Write the cross file, the data of sysconfig and the environment that selects it."""
    folder.mkdir(parents=True, exist_ok=True)
    here = sysconfig.get_platform().removeprefix("linux-")
    data = f"_sysconfigdata__linux_{architecture}-linux-gnu"
    variables = {
        name: value.replace(here, architecture) if isinstance(value, str) else value
        for name, value in importlib.import_module(sysconfig._get_sysconfigdata_name()).build_time_vars.items()
    }
    paths = {name: sysconfig.get_config_var(name) for name in ("INCLUDEPY", "CONFINCLUDEPY", "LIBDIR", "prefix")}
    (folder / f"{data}.py").write_text(f"build_time_vars = {pprint.pformat(variables | paths)}\n")
    (folder / "environment").write_text(
        f"export PYTHONPATH={folder.resolve()} _PYTHON_SYSCONFIGDATA_NAME={data}\n"
        f"export _PYTHON_HOST_PLATFORM=linux-{architecture}\n"
    )
    ccache = ["ccache"] if shutil.which("ccache") else []

    def compiler(name: str) -> list[str]:
        return [*ccache, f"{sysroot}/{name}"]

    (folder / "meson.ini").write_text(
        f"""[binaries]
c = {compiler("gcc")}
cpp = {compiler("g++")}
ar = '{architecture}-linux-gnu-ar'
strip = '{architecture}-linux-gnu-strip'
nm = '{architecture}-linux-gnu-nm'

[host_machine]
system = 'linux'
cpu_family = '{architecture}'
cpu = '{architecture}'
endian = 'little'
"""
    )


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: python tools/wheels/cross.py ARCHITECTURE FOLDER SYSROOT")
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
