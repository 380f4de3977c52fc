"""What the CUDA library is compiled from, as digests: compilers give the same every time, so a file whose digest has
passed a check passes it again. A digest has the code of a source and of the headers that it includes, without comments
and without what is for the emulator alone.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EMULATOR = "INFINILM_CUDA_EMULATOR"  # never defined by nvcc: what it guards is not compiled


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def lines_for_nvcc(text: str) -> Iterator[str]:
    """The lines of a C++ file but those that are for the emulator alone, and the directives that say so."""
    emulated: list[bool | None] = []  # for each open #if: whether this branch is the emulator's; None: other conditions
    for line in text.splitlines():
        match = re.match(r"\s*#\s*(\w+)\s*(.*)", line)
        directive, rest = match.groups() if match else ("", "")
        about = None
        if directive in ("if", "ifdef", "ifndef"):
            about = directive == "ifdef" if directive != "if" and rest.split()[0] == EMULATOR else None
            emulated.append(about)
        elif directive in ("else", "elif"):
            about = emulated[-1]
            emulated[-1] = not about if about is not None and directive == "else" else None
        elif directive == "endif":
            about = emulated.pop()
        if about is None and not any(emulated):
            yield line


def included(path: Path) -> list[Path]:
    """The project's files that a file includes itself, unless for the emulator alone."""
    found = []
    for line in lines_for_nvcc(path.read_text()):
        if not re.match(r"\s*#\s*include\b", line):
            continue
        name = re.match(r'\s*#\s*include\s*(["<])([^">]+)[">]', line)
        if name is None:
            sys.exit(f"{path}: cannot tell which file '{line.strip()}' includes")
        folders = [path.parent, ROOT, ROOT / "src"] if name[1] == '"' else [ROOT, ROOT / "src"]
        files = [folder / name[2] for folder in folders if (folder / name[2]).is_file()]
        if not files and name[1] == '"':
            sys.exit(f'{path}: there is no "{name[2]}"')
        found += [file.resolve() for file in files[:1]]
    return found


def inputs_of(source: Path) -> list[Path]:
    """A source, and the project's files that it includes, directly or not, in the order of their names."""
    known, left = set[Path](), [source.resolve()]
    while left:
        path = left.pop()
        if path not in known:
            known.add(path)
            left += included(path)
    return sorted(known)


def code_of(text: str) -> str:
    """What nvcc reads of a C++ file, without comments, ends of lines and empty lines: they make no other kernel."""
    code = re.sub(
        r""""(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])'|//[^\n]*|/\*.*?\*/""",
        lambda found: " " if found[0].startswith("/") else found[0],
        text,
        flags=re.DOTALL,
    )
    return "\n".join(line.rstrip() for line in lines_for_nvcc(code) if line.strip())


def digest_of(source: Path) -> str:
    """One of the code of a source and of all that it includes, which is the same in another folder."""
    inputs = ((name_of(path), code_of(path.read_text())) for path in inputs_of(source))
    return digest(*(part.encode() for pair in inputs for part in pair))


def name_of(path: Path) -> str:
    return path.resolve().relative_to(ROOT).as_posix()


def all_sources() -> list[Path]:
    """The kernels of the library."""
    return sorted((ROOT / "cuda").rglob("*.cu"))


def host_sources() -> list[Path]:
    """What the host's compiler adds to the library, as cuda/meson.build lists it."""
    folder = ROOT / "cuda"
    names = re.findall(r"'([\w./]+\.cpp)'", (folder / "meson.build").read_text())
    return sorted((folder / name).resolve() for name in names)
