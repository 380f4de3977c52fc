"""Builds the program of C++ tests and the fake NCCL with g++ alone, under a sanitizer or without.

Processes that share a folder take turns. As a command, `python cpp_build.py MESON_BUILD`, it builds both for
AddressSanitizer on the core that Meson has compiled for it there (tools/sanitize.sh), and prints where they are.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = [
    *(
        ROOT / "src" / f"{name}.cpp"
        for name in (
            "core/check",
            "core/finite",
            "core/process",
            "core/tensor",
            "core/topology",
            "ops/args",
            "ops/attention_work",
            "ops/backend_defaults",
            "ops/host_experts",
            "ops/ops",
            "ops/values",
        )
    ),
    *sorted((ROOT / "src/dist").glob("*.cpp")),
    *sorted((ROOT / "src/gguf").glob("*.cpp")),
    ROOT / "src/engine/rank_worker.cpp",
    ROOT / "src/cpu/packed_memory.cpp",
    ROOT / "src/cpu/thread_pool.cpp",
]
# Sources of the engine, whose backend the tests make; the memory of a real one is tested elsewhere.
ENGINE = [
    *(path for folder in ("engine", "model") for path in sorted((ROOT / "src" / folder).rglob("*.cpp"))),
    ROOT / "src/ops/cuda_library.cpp",
    ROOT / "src/ops/timed_backend.cpp",
]
ENGINE = [path for path in ENGINE if path not in CORE and path.stem != "workspace"]
CPP_TESTS = sorted((ROOT / "tests/cpp").glob("*.cpp"))
TESTS = [*ENGINE, *CPP_TESTS]
# Sources of the core, and of the tests, that are compiled at a time, in half of the time. Names in their anonymous
# namespaces must differ; meson.build takes four of the core.
UNITY = 24
BENCH = ROOT / "bench/all_reduce_bench.cpp"
FAKE_NCCL = ROOT / "tests/cpp/fake_nccl/fake_nccl.cpp"
WATCHED_NCCL = ROOT / "tests/cpp/fake_nccl/watched_nccl.cpp"
HEADERS = [*ROOT.glob("src/**/*.h"), *ROOT.glob("tests/cpp/**/*.h")]
FLAGS = ["-std=c++20", "-O1", "-g1", "-Wall", "-Wextra", "-Wpedantic", "-pthread", "-fPIC", "-fvisibility=hidden",
         f"-I{ROOT}", f"-I{ROOT / 'src'}", f"-I{ROOT / 'tests/cpp'}"]  # fmt: skip
SANITIZE = {
    "plain": [],
    # -O0 compiles in two thirds of the time, and so does a compilation without what is found by other checks: an access
    # by a null pointer, or beyond an object, is one of an address that is not the program's.
    "address": [
        "-O0",
        "-fsanitize=address,undefined",
        "-fno-sanitize=null,object-size,pointer-overflow",
        "-fno-sanitize-recover=undefined",
    ],
    "thread": ["-Og", "-fsanitize=thread"],  # compiles in five sixths of the time of -O1
}


@dataclass(frozen=True)
class Builder:
    """Compiles into `folder`; what was compiled from the same text by the same command is taken from there."""

    folder: Path
    kind: str  # a key of SANITIZE
    compiler: str = "g++"

    def program(
        self, sources: Iterable[Path], name: str, flags: Sequence[str] = (), archives: Sequence[Path] = ()
    ) -> Path:
        """An executable; `flags` are the last ones of the command. What `archives` have it takes from there."""
        return self._link(list(sources), name, list(flags), list(archives))

    def library(
        self, sources: Iterable[Path], name: str, defines: Sequence[str] = (), flags: Sequence[str] = ()
    ) -> Path:
        """A shared library; `flags` are the last ones of the command."""
        return self._link(list(sources), name, ["-shared", *(f"-D{define}" for define in defines), *flags])

    def _link(self, sources: list[Path], name: str, flags: list[str], archives: Sequence[Path] = ()) -> Path:
        flags = [*FLAGS, *SANITIZE[self.kind], *flags]
        digest = hashlib.sha256(repr((self.compiler, flags)).encode())
        for path in [*sources, *sorted(HEADERS)]:
            digest.update(path.read_bytes())
        target = self.folder / f"{name}-{self.kind}-{digest.hexdigest()[:16]}"
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists() or archives:  # which may have changed
                for old in self.folder.glob(f"{name}-{self.kind}-*"):
                    old.unlink()
                self._make(target, sources, flags, archives)
        return target

    def _make(self, target: Path, sources: list[Path], flags: list[str], archives: Sequence[Path]) -> None:
        made: list[Path] = []
        for part in (CORE, ENGINE, CPP_TESTS):  # each by itself: ccache knows the core of one program in another one
            found = [path for path in sources if path in part]
            for begin in range(0, len(found), UNITY):
                text = "".join(f'#include "{source.relative_to(ROOT)}"\n' for source in found[begin : begin + UNITY])
                # A name that stays while the files do: ccache then knows the unit, whatever else was changed.
                made.append(self.folder / f"unity-{hashlib.sha256(text.encode()).hexdigest()[:16]}.cpp")
                made[-1].write_text(text)
        units = [*made, *(path for path in sources if path not in CORE + TESTS)]
        objects = [Path(f"{target}-{number}-{unit.stem}.o") for number, unit in enumerate(units)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(
                pool.map(
                    lambda pair: _run(self.compiler, ["-c", str(pair[0]), "-o", str(pair[1])], flags),
                    zip(units, objects, strict=True),
                )
            )
        _run(self.compiler, ["-o", f"{target}.part", *map(str, objects), *map(str, archives), "-ldl"], flags)
        os.replace(f"{target}.part", target)
        for path in (*objects, *made):
            path.unlink()


def _run(compiler: str, arguments: list[str], flags: list[str]) -> None:
    command = ["ccache", compiler] if shutil.which("ccache") else [compiler]
    done = subprocess.run([*command, *flags, *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0 or done.stderr:  # a warning is an error
        raise RuntimeError(f"{' '.join(arguments)}\n{done.stderr}")


def _build_on(meson_build: Path) -> tuple[Path, Path]:
    """The program of C++ tests and the fake NCCL, of which Meson has compiled what is not of the tests."""
    builder = Builder(meson_build / "cpp-tests", "address")
    builder.folder.mkdir(exist_ok=True)
    archives = [meson_build / "libinfinilm_core.a", *sorted((meson_build / "src/cpu").glob("*.a"))]
    # The tests have a backend of their own, which comes first.
    program = builder.program(CPP_TESTS, "cpp-tests", ["-Wl,-z,muldefs"], archives)
    return program, builder.library([FAKE_NCCL], "fake-nccl")


if __name__ == "__main__":
    print(*_build_on(Path(sys.argv[1]).resolve()), sep=":")
