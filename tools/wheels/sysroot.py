"""Makes a compiler whose libraries run with glibc 2.28 and later, on a system with a newer one.

    python tools/wheels/sysroot.py x86_64 FOLDER        # then CXX=FOLDER/g++ CC=FOLDER/gcc

A program binds to the newest version of each symbol that the C library it is linked with has: `exp` of 2.29, `dlopen`
of 2.34. The older versions are still in that library, for older programs. So this links with stubs in its place,
which have the newest version up to 2.28 of each symbol, as `zig cc -target x86_64-linux-gnu.2.28` does. Newer symbols
are missing in the stubs; the few that libstdc++ asks for are in glibc_compat.c. The C++ library is linked in, since
that of gcc 8, whose symbols manylinux_2_28 promises, lacks some of C++20.

FOLDER gets the stubs, and compilers that use them when they link. It needs gcc (of another architecture: Debian's
g++-aarch64-linux-gnu) and pyelftools, which auditwheel brings.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerDefSection, GNUVerSymSection

NEWEST = (2, 28)
LIBRARIES = ("libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1")
LOADERS = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}  # defines __tls_get_addr


def version_of(name: str) -> tuple[int, ...] | None:
    """Return (2, 17) of GLIBC_2.17, and None of what is no public version."""
    match = re.fullmatch(r"GLIBC_(\d+(?:\.\d+)+)", name)
    return tuple(map(int, match[1].split("."))) if match else None


def old_symbols(library: Path) -> dict[str, list[tuple[str, int]]]:
    """Return the symbols of a library by version, each in its newest version that is not too new.

    A symbol is its name and the bytes of a variable, or 0 for a function.
    """
    best: dict[str, tuple[tuple[int, ...], str, int]] = {}
    with library.open("rb") as file:
        elf = ELFFile(file)
        versions: GNUVerSymSection = elf.get_section_by_name(".gnu.version")
        definitions: GNUVerDefSection = elf.get_section_by_name(".gnu.version_d")
        names = {entry["vd_ndx"]: next(auxiliaries).name for entry, auxiliaries in definitions.iter_versions()}
        for number, symbol in enumerate(elf.get_section_by_name(".dynsym").iter_symbols()):
            index = versions.get_symbol(number)["ndx"]
            kind = symbol["st_info"]["type"]
            if symbol["st_shndx"] in ("SHN_UNDEF", "SHN_ABS") or not isinstance(index, int) or kind == "STT_TLS":
                continue
            name = names.get(index & 0x7FFF, "")
            version = version_of(name)
            if version is None or version > NEWEST or (symbol.name in best and best[symbol.name][0] > version):
                continue
            best[symbol.name] = (version, name, symbol["st_size"] if kind == "STT_OBJECT" else 0)
    result = defaultdict(list)
    for symbol_name, (_, name, size) in best.items():
        result[name].append((symbol_name, size))
    return dict(result)


def write_stub(compiler: str, library: Path, folder: Path) -> None:
    """Write a library of the same name with the symbols of `old_symbols`, all of which lead nowhere."""
    symbols = old_symbols(library)
    source = []
    for entries in symbols.values():
        for name, size in entries:  # each at an address of its own: what shares one would be taken for one variable
            place, kind = (".data", "%object") if size else (".text", "%function")
            source += [place, f".globl {name}", f".type {name}, {kind}", f".size {name}, {size or 8}", f"{name}:"]
            source += [f".skip {size or 8}"]
    (folder / "stub.s").write_text("\n".join([*source, '.section .note.GNU-stack,"",%progbits', ""]))
    nodes = [
        f"{version} {{ global: {'; '.join(name for name, _ in entries)}; }};" for version, entries in symbols.items()
    ]
    (folder / "stub.map").write_text("\n".join([*nodes, "HIDDEN { local: *; };"]))
    link = f"-Wl,-soname,{library.name},--version-script,{folder / 'stub.map'}"
    output = folder / library.name
    subprocess.run([compiler, "-shared", "-nostdlib", link, "-o", output, folder / "stub.s"], check=True)


def main(architecture: str, folder: Path) -> None:
    """Write the stubs and the compilers of an architecture into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    found = subprocess.run(["gcc", "-dumpmachine"], check=True, capture_output=True, text=True).stdout
    prefix = "" if found.startswith(architecture) else f"{architecture}-linux-gnu-"
    compiler = f"{prefix}gcc"

    def find(name: str) -> Path:
        path = subprocess.run([compiler, f"-print-file-name={name}"], check=True, capture_output=True, text=True)
        return Path(path.stdout.strip())

    for library in (*LIBRARIES, LOADERS[architecture]):
        write_stub(compiler, find(library), folder)
        (folder / f"{library.split('.so')[0]}.so").unlink(missing_ok=True)
        (folder / f"{library.split('.so')[0]}.so").symlink_to(library)
    compat = Path(__file__).with_name("glibc_compat.c")
    flags = ["-c", "-O2", "-fPIC", "-ffunction-sections", "-fno-builtin", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([compiler, *flags, compat, "-o", folder / "compat.o"], check=True)
    subprocess.run([f"{prefix}ar", "rcs", folder / "libcompat.a", folder / "compat.o"], check=True)
    # libgcc_s of this system asks for a newer C library; that of the system that runs the wheel does not. Until glibc
    # 2.34 threads, dlopen and shm_open were in libraries of their own, which must be loaded there whether or not the
    # linker finds their symbols in the stub of libc, too.
    own = "-Wl,--push-state,--no-as-needed -lpthread -ldl -lrt -Wl,--pop-state"
    always = f"-L{folder} -Wl,--allow-shlib-undefined {own}"
    # The driver links this as -lc: the stub of the C library, the parts it lacks, and those always linked in.
    (folder / "libc.so").unlink()
    loader = folder / LOADERS[architecture]
    parts = f"{folder}/libc.so.6 {folder}/libcompat.a {find('libc_nonshared.a')} AS_NEEDED ( {loader} )"
    (folder / "libc.so").write_text(f"GROUP ( {parts} )\n")
    # Symbols of the C++ library stay inside, so that no other module's copy is mixed with it.
    for name in ("gcc", "g++"):
        wrapper = folder / name
        static = " -static-libstdc++ -Wl,--exclude-libs,libstdc++.a" if name == "g++" else ""
        wrapper.write_text(f'#!/bin/sh\nexec {prefix}{name} "$@" {always}{static}\n')
        wrapper.chmod(0o755)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python tools/wheels/sysroot.py ARCHITECTURE FOLDER")
    main(sys.argv[1], Path(sys.argv[2]))
