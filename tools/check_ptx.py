#!/usr/bin/env python3
"""Compiles the PTX of all CUDA kernels with the ptxas of other toolkits than the one at hand; no GPU is needed.

    python tools/check_ptx.py                     # the toolkits of TOOLKITS, from PyPI: about 180 MB, kept by pip
    python tools/check_ptx.py --write             # also writes which files have passed into ptx_passed.json
    python tools/check_ptx.py --nvcc nvcc --jobs 2

Fails where one spills registers, uses local memory, or says that wgmma is serialized: a toolkit that a user installs
with does so silently. Compilers give the same every time. So a file that has passed is not compiled again while it, the
headers that it includes, nvcc, its flags and the toolkits are what they were: ptx_passed.json has a digest of all these
for each file, without their comments. Whenever a file is compiled, nvcc says which headers it has read, and one that
the digest lacks is an error. What was compiled since is kept in ~/.cache/infinilm/ptx (or below XDG_CACHE_HOME).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cuda_sources
from cuda_sources import all_sources, digest, digest_of, inputs_of, name_of

PASSED = Path(__file__).with_name("ptx_passed.json")  # {file and architecture: digest of all that it was made from}
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "infinilm/ptx"
# The last release of every minor version, and the newest of all.
TOOLKITS = {
    "12.4": "nvidia-cuda-nvcc-cu12==12.4.131",
    "12.6": "nvidia-cuda-nvcc-cu12==12.6.85",
    "12.8": "nvidia-cuda-nvcc-cu12==12.8.93",
    "12.9": "nvidia-cuda-nvcc-cu12==12.9.86",
    "13.5": "nvidia-cuda-nvcc==13.5.37",
}
# Files that older toolkits leave empty, since their ptxas would serialize wgmma there.
SINCE = {"attention_sm90.cu": (12, 8)}
# What the package is built for, and how cuda/meson.build calls nvcc.
ARCHITECTURES, HOPPER, FP8 = ("80", "90"), ("90a",), ("89",)
FLAGS = ["-ccbin", "c++", "-std=c++17", "-O3", "-DNDEBUG", "--expt-relaxed-constexpr", "-I.", "-Isrc"]
# The PTX version of CUDA 12.4: nvcc writes its own there, which older ones refuse, whatever the code needs.
PTX_VERSION = "8.4"
COMPLAINT = re.compile(
    r"[1-9]\d* bytes (stack frame|spill)|spilled to local memory|serialized|\b(error|fatal)\b",
    re.IGNORECASE,
)


def architectures_of(source: Path) -> tuple[str, ...]:
    """What the file is compiled for: sm_90a alone, or all that have one machine code, and with tensor cores for FP8."""
    if "sm90" in source.name:
        return HOPPER
    return (*ARCHITECTURES, *FP8) if source.name == "linear_fp8_pairs.cu" else ARCHITECTURES


def run(command: Sequence[str | Path]) -> str:
    """What it prints; SystemExit if it fails."""
    done = subprocess.run(
        command, cwd=cuda_sources.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}")
    return done.stdout


def fetch_ptxas(toolkit: str) -> Path:
    """The ptxas of a toolkit, from the wheel that has it."""
    place = CACHE / f"ptxas-{digest(TOOLKITS[toolkit].encode())}"
    if place.exists():
        return place
    with tempfile.TemporaryDirectory() as folder:
        run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, TOOLKITS[toolkit]])
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (n for n in archive.namelist() if n.endswith("/bin/ptxas"))
            partial = place.with_suffix(f".{os.getpid()}")
            partial.write_bytes(archive.read(name))
    partial.chmod(0o755)
    partial.replace(place)
    return place


def flags_for(architecture: str) -> list[str]:
    return [*FLAGS, f"-gencode=arch=compute_{architecture},code=compute_{architecture}"]


def make_ptx(nvcc: str, version: bytes, source: Path, architecture: str) -> Path:
    """PTX of a file, in a version that every toolkit reads."""
    flags = flags_for(architecture)
    key = digest(version, repr(flags).encode(), digest_of(source).encode())
    ptx = CACHE / f"{source.stem}-{architecture}-{key}.ptx"
    if not ptx.exists():
        partial, dependencies = ptx.with_suffix(f".{os.getpid()}"), ptx.with_suffix(f".{os.getpid()}.d")
        run([nvcc, *flags, "-ptx", "-MD", "-MF", dependencies, source.resolve(), "-o", partial])
        read = {
            (cuda_sources.ROOT / name).resolve()
            for name in dependencies.read_text().replace("\\\n", " ").partition(":")[2].split()
        }
        dependencies.unlink()
        if unknown := {path for path in read if path.is_relative_to(cuda_sources.ROOT)} - set(inputs_of(source)):
            sys.exit(f"{name_of(source)} includes {', '.join(sorted(map(name_of, unknown)))}, which `included` misses")
        partial.write_text(
            re.sub(r"^\.version .*$", f".version {PTX_VERSION}", partial.read_text(), flags=re.MULTILINE)
        )
        partial.replace(ptx)
    return ptx


def complaints_of(ptxas: Path, ptx: Path, architecture: str) -> list[str]:
    """What to complain about; none if it was compiled before without."""
    passed = CACHE / f"passed-{digest(ptxas.name.encode(), ptx.read_bytes())}"
    if passed.exists():
        return []
    command = [ptxas, f"-arch=sm_{architecture}", "-v", "-warn-spills", ptx, "-o", os.devnull]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    found = [line.strip() for line in done.stdout.splitlines() if COMPLAINT.search(line)]
    if done.returncode != 0 and not found:
        found = [f"exit code {done.returncode}"]
    if not found:
        passed.touch()
    return found


def entry(source: Path, architecture: str) -> str:
    """The name of a file and an architecture in ptx_passed.json."""
    return f"{name_of(source)}, sm_{architecture}"


def made_from(source: Path, architecture: str, version: bytes) -> str:
    """A digest of all that decides whether a file passes."""
    choice = repr((flags_for(architecture), PTX_VERSION, TOOLKITS, SINCE.get(source.name), COMPLAINT.pattern))
    return digest(version, choice.encode(), digest_of(source).encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvcc", default="nvcc", help="makes the PTX (default: %(default)s)")
    parser.add_argument("--toolkits", default=",".join(TOOLKITS), help="of %(default)s")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="at once (default: the CPUs, %(default)s)")
    parser.add_argument("--write", action="store_true", help=f"write {PASSED.name}")
    parser.add_argument("sources", type=Path, nargs="*", help="default: all of cuda")
    args = parser.parse_args()
    toolkits = args.toolkits.split(",")
    if unknown := set(toolkits) - set(TOOLKITS):
        parser.error(f"--toolkits: {', '.join(sorted(unknown))} is none of {', '.join(TOOLKITS)}")
    if args.write and (args.sources or toolkits != list(TOOLKITS)):
        parser.error("--write is for all files and toolkits")
    CACHE.mkdir(parents=True, exist_ok=True)
    sources = args.sources or all_sources()
    pairs = [(s, a) for s in sources for a in architectures_of(s)]
    version = run([args.nvcc, "--version"]).encode()
    digests = {entry(s, a): made_from(s, a, version) for s, a in pairs}
    passed = json.loads(PASSED.read_text()) if PASSED.exists() else {}
    left = [(s, a) for s, a in pairs if passed.get(entry(s, a)) != digests[entry(s, a)]]
    compilers = {toolkit: fetch_ptxas(toolkit) for toolkit in toolkits if left}

    def check(pair: tuple[Path, str]) -> list[str]:
        source, architecture = pair
        ptx = make_ptx(args.nvcc, version, source, architecture)
        return [
            f"{entry(source, architecture)}, ptxas of CUDA {toolkit}: {complaint}"
            for toolkit, ptxas in compilers.items()
            if tuple(map(int, toolkit.split("."))) >= SINCE.get(source.name, (0, 0))
            for complaint in complaints_of(ptxas, ptx, architecture)
        ]

    with ThreadPoolExecutor(args.jobs) as pool:
        faults = [fault for found in pool.map(check, left) for fault in found]
    if faults:
        sys.exit("\n".join(faults))
    if args.write:
        PASSED.write_text(json.dumps(digests, indent=1) + "\n")
    print(f"{len(pairs)} files by ptxas of CUDA {', '.join(toolkits)}: no spills, wgmma not serialized")
    print(f"{len(pairs) - len(left)} of them have passed before, as {PASSED.name} tells")


if __name__ == "__main__":
    main()
