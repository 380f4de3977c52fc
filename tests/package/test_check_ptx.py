"""tools/check_ptx.py: what it complains about, and which files it compiles again.

Programs that print what ptxas prints stand for the compilers.
"""

from __future__ import annotations

import functools
import importlib
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
FINE = """\
ptxas info    : Compiling entry function 'norm' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 1024 bytes smem
"""


@pytest.fixture
def check_ptx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "tools")
    module = importlib.import_module("check_ptx")
    monkeypatch.setattr(module, "CACHE", tmp_path)
    return module


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("cuda_sources")


@pytest.fixture
def elsewhere(sources: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another project, in tmp_path."""
    monkeypatch.setattr(sources, "ROOT", tmp_path)


@pytest.mark.parametrize(
    ("printed", "code", "faults"),
    [
        (FINE, 0, 0),
        (FINE + "    8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", 0, 1),
        ("ptxas warning : Registers are spilled to local memory in function 'f', 4 bytes spill stores", 0, 1),
        ("ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized", 0, 1),
        ("ptxas fatal   : Unsupported .version 9.0; current version is '8.4'", 255, 1),
        (FINE, 255, 1),
    ],
)
def test_complaints(check_ptx: ModuleType, tmp_path: Path, printed: str, code: int, faults: int) -> None:
    """Only what passed is remembered, and not compiled again.

    An audit found: nvcc 12.4, 12.6 and 12.8 spill registers in linear_decode, which was an error. Now: Warnings are
    errors with -Dwerror=true alone, in CI; no kernel spills with ptxas of 12.4 to 13.5.
    """
    ptx, log, ptxas = tmp_path / "x.ptx", tmp_path / "log", tmp_path / "ptxas"
    ptx.write_text("// PTX")
    log.write_text(printed)
    ptxas.write_text(f"#!/bin/sh\ncat {log}\nexit {code}\n")
    ptxas.chmod(0o755)
    for _ in range(2):
        assert len(check_ptx.complaints_of(ptxas, ptx, "90a")) == faults
    log.write_text("error: another answer")
    assert (check_ptx.complaints_of(ptxas, ptx, "90a") == []) == (faults == 0)


EMULATED = "#ifdef INFINILM_CUDA_EMULATOR\n"
CHANGED = (
    "cuda/core/types.h",
    "cuda/core/ptx_emulated.h",
    "cuda/emulator/emulator.h",
    "cuda/attention/rope.cuh",
    "cuda/linear/linear_sm90.cuh",
    "cuda/linear/pack.cu",
    "src/core/tensor.h",
    "src/numerics/quantise.h",
    "src/ops/attention_work.h",
)


@functools.cache
def dependencies() -> dict[str, set[str]]:
    """The project's files that each source is made from, as the host's preprocessor tells."""
    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "cuda").rglob("*.cu"))
    command = ["g++", "-std=c++17", "-MM", "-MG", "-x", "c++", "-I.", "-Isrc", *sources]
    rules = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = [rule.split(":")[1].replace("\\\n", " ").split() for rule in re.split(r"\n(?=\S)", rules.strip())]
    return {found[0]: {name for name in found if (ROOT / name).exists()} for found in names}


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to compare with")


@needs_compiler
def test_a_source_is_made_from_what_it_includes(sources: ModuleType) -> None:
    known = {sources.name_of(source): sources.inputs_of(source) for source in sources.all_sources()}
    assert {name: {sources.name_of(path) for path in paths} for name, paths in known.items()} == dependencies()


@needs_compiler
@pytest.mark.usefixtures("elsewhere")
def test_a_changed_file_makes_its_users_stale(check_ptx: ModuleType, sources: ModuleType, tmp_path: Path) -> None:
    """They, and no others, have another digest."""
    for top in ("cuda", "src"):
        shutil.copytree(ROOT / top, tmp_path / top)

    def digests() -> dict[str, str]:
        return {
            source.relative_to(tmp_path).as_posix(): check_ptx.made_from(source, "90a", b"nvcc 13")
            for source in sources.all_sources()
        }

    before = digests()
    stale_by = {}
    for name in CHANGED:
        path = tmp_path / name
        text = path.read_text()
        path.write_text(text + "constexpr int added = 1;\n")
        after = digests()
        path.write_text(text)
        stale = {source for source in before if after[source] != before[source]}
        assert stale == {source for source, read in dependencies().items() if name in read}, name
        stale_by[name] = len(stale)
    assert all(stale_by[name] == 0 for name in CHANGED if "emulat" in name or "tensor.h" in name)
    assert 0 < stale_by["cuda/attention/rope.cuh"] < len(before) == stale_by["cuda/core/types.h"]


def test_a_comment_makes_no_file_stale(sources: ModuleType) -> None:
    """Comments are taken out, and what looks like one in a string or between digits is not."""
    code = "int a = 1'000; // one\nconst char* url = \"http://x\"; /* two\nlines */ char quote = '\"'; // three\n\n"
    assert sources.code_of(code) == "int a = 1'000;\nconst char* url = \"http://x\";   char quote = '\"';"
    assert sources.code_of("// another\n" + code.replace("one", "1")) == sources.code_of(code)
    assert sources.code_of(code.replace("http://x", "http://y")) != sources.code_of(code)


def test_what_the_emulator_has_makes_no_file_stale(sources: ModuleType) -> None:
    """Its branches are left out, whichever comes first, and those of other conditions are not."""
    code = "#if A\nint a;\n#else\nint b;\n#endif"
    assert sources.code_of(code) == code
    assert sources.code_of(f"{EMULATED}int c;\n{code}\n#else\n{code}\n#endif") == code
    assert sources.code_of(f"{EMULATED.replace('ifdef', 'ifndef')}{code}\n#else\nint c;\n#endif") == code


def test_all_else_that_decides_is_in_the_digest(check_ptx: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    source = ROOT / "cuda/attention/attention_sm90.cu"
    seen = {check_ptx.made_from(source, "90a", b"nvcc 13.0"), check_ptx.made_from(source, "90a", b"nvcc 13.1")}
    seen.add(check_ptx.made_from(source, "80", b"nvcc 13.0"))
    for name, value in {"FLAGS": ["-O2"], "PTX_VERSION": "8.5", "TOOLKITS": {}, "SINCE": {}}.items():
        with monkeypatch.context() as patch:
            patch.setattr(check_ptx, name, value)
            seen.add(check_ptx.made_from(source, "90a", b"nvcc 13.0"))
    assert len(seen) == 7


def test_every_kernel_of_the_library_is_checked(sources: ModuleType) -> None:
    meson = (ROOT / "cuda/meson.build").read_text()
    built = {name.rpartition("/")[2] for name in re.findall(r"'([\w/]+)(?:\.cu)?'", meson)}
    checked = set(sources.all_sources())
    assert checked == set((ROOT / "cuda").rglob("*.cu")) and {path.stem for path in checked} <= built


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("text", "files"),
    [
        ('#include "b.h"\n#  include "cuda/c.h"\n#include <cstdint>\n#include <cuda/c.h>', "bcc"),
        (f'{EMULATED}#if X\n#include "b.h"\n#endif\n#else\n#include "cuda/c.h"\n#endif', "c"),
        ('#ifndef INFINILM_CUDA_EMULATOR\n#include "b.h"\n#else\n#include "cuda/c.h"\n#endif', "b"),
        ('#ifdef X\n#include "b.h"\n#else\n#include "cuda/c.h"\n#endif', "bc"),
        ('#if X\n#include "b.h"\n#elif Y\n#include "cuda/c.h"\n#else\n#include "b.h"\n#endif', "bcb"),
        (f'{EMULATED}#include "b.h"\n#elif X\n#include "cuda/c.h"\n#else\n#include "b.h"\n#endif', "cb"),
        ('#include "missing.h"', "there is no"),
        ("#include HEADER", "cannot tell which file"),
    ],
)
def test_which_files_are_included(sources: ModuleType, tmp_path: Path, text: str, files: str) -> None:
    (tmp_path / "cuda").mkdir()
    for name in ("b.h", "c.h"):
        (tmp_path / "cuda" / name).touch()
    source = tmp_path / "cuda/a.cu"
    source.write_text(text)
    if " " in files:
        with pytest.raises(SystemExit, match=files):
            sources.included(source)
    else:
        assert [path.stem for path in sources.included(source)] == list(files)


@pytest.mark.usefixtures("elsewhere")
def test_a_header_that_the_digest_lacks(check_ptx: ModuleType, tmp_path: Path) -> None:
    """The compiler tells what it has read, so nothing goes past a mistake of `included`."""
    (tmp_path / "a.cu").touch()
    (tmp_path / "secret.h").touch()
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(
        "#!/bin/sh\nwhile [ $# -gt 0 ]; do\n"
        'case $1 in -MF) echo "a: a.cu $HEADER" > $2;; -o) echo > $2;; esac; shift\ndone\n'
    )
    nvcc.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADER", "")
        assert check_ptx.make_ptx(nvcc, b"", tmp_path / "a.cu", "80").exists()
        patch.setenv("HEADER", "secret.h")
        (tmp_path / "a.cu").write_text("int changed;")
        with pytest.raises(SystemExit, match=r"a\.cu includes secret\.h"):
            check_ptx.make_ptx(nvcc, b"", tmp_path / "a.cu", "80")
